"""A proposal from a name or from itself, checked against the data it shall stand beside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.errors import InputError, require, require_choice
from metastable.core.types import Proposal

from .basic import Uniform, fit_gaussian
from .flows import Flow

NAMED = ("gaussian", "uniform", "flow")
MARGIN = 0.1
"""Share of the data's range by which a uniform proposal reaches beyond it on every side."""


def proposal_for(choice: str | Proposal, data: Tensor, field: str, seed: int = 0) -> nn.Module:
    """The proposal that `choice` names, fitted to `data`, or `choice` itself.

    Args:
        choice: `gaussian` (the data's mean and covariance), `uniform` (a box around the data), `flow` (a
            normalising flow standardised by the data, not yet fitted), or any module with `sample`, `log_prob`
            and `event_shape`.
        data: `(n, *event)`.
        field: the setting's name, for messages.
        seed: of a flow's initial weights.

    >>> q = proposal_for("uniform", torch.tensor([[0.0], [1.0]]), "noise")
    >>> q.low.item(), round(q.high.item(), 3)
    (-0.10000000149011612, 1.1)
    """
    if isinstance(choice, str):
        require_choice(field, choice, NAMED)
        if choice == "flow":
            return Flow(tuple(data.shape[1:]), data=data, seed=seed)
        return fit_gaussian(data) if choice == "gaussian" else _box(data)
    ok = isinstance(choice, nn.Module) and isinstance(choice, Proposal)
    require(
        ok, field, f"one of {', '.join(NAMED)}, or a module with sample, log_prob and event_shape", choice
    )
    _check_shape(choice, data, field)
    return choice  # pyright: ignore


def _box(data: Tensor) -> Uniform:
    low, high = data.amin(0), data.amax(0)
    margin = MARGIN * (high - low).clamp(min=1e-6)
    return Uniform(low - margin, high + margin)


def _check_shape(choice: Any, data: Tensor, field: str) -> None:
    if tuple(choice.event_shape) != tuple(data.shape[1:]):
        raise InputError(
            f"{field}: events of the proposal have shape {tuple(choice.event_shape)}, those of the data "
            f"{tuple(data.shape[1:])}"
        )


def require_support(proposal: Proposal, data: Tensor, field: str) -> None:
    """Refuse data that the proposal gives density zero, and draws of its own that it does.

    A ratio with a density of zero below it is no ratio: contrast with such a proposal has no gradient.
    """
    with torch.no_grad():
        outside = torch.isneginf(proposal.log_prob(data))
        rng = torch.Generator(data.device).manual_seed(0)
        own = torch.isneginf(proposal.log_prob(proposal.sample(256, rng)))
    if bool(own.any()):
        raise InputError(
            f"{field}: {int(own.sum())} of 256 draws of the proposal have density zero under the proposal "
            "itself; its sample and log_prob do not belong together"
        )
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise InputError(
            f"{field}: {int(outside.sum())} of {len(data)} data rows lie outside the proposal's support, row {row} "
            "first; widen it, or use one that is positive everywhere, such as 'gaussian'"
        )
