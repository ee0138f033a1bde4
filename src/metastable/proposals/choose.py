"""A proposal from a name or from itself, checked against the data it shall stand beside."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.batch import Batch, Rows, as_batch
from metastable.core.errors import ConfigError, InputError, nearest, require, require_choice
from metastable.core.random import generator
from metastable.core.types import Proposal
from metastable.core.waiting import may_look

from .basic import Uniform, fit_gaussian
from .cnf import InterpolantFlow
from .encoders import Standardise
from .flows import Flow
from .given import is_conditional, log_prob_given, log_prob_of, sample_given
from .named_fields import is_named

NAMED = ("gaussian", "uniform", "flow")
LEARNED = {"flow": Flow, "interpolant": InterpolantFlow}
"""Proposals by name that learn, and take settings."""
MARGIN = 0.1
"""Share of the data's range by which a uniform proposal reaches beyond it on every side."""
CHECKED, DRAWS = 1024, 256
"""Rows of data at which a proposal whose density is costly is asked for it before training, and its own draws."""


def proposal_for(
    choice: str | Mapping[str, Any] | Proposal, data: Rows, field: str, seed: int = 0, **defaults: Any
) -> nn.Module:
    """The proposal that `choice` names, fitted to `data`, or `choice` itself.

    Args:
        choice: `gaussian` (the data's mean and covariance), `uniform` (a box around the data), `flow` or
            `interpolant` (a normalising flow, or a continuous one, standardised by the data and not yet fitted), a
            table of one of these names and its settings, or any module with `sample`, `log_prob` and `event_shape`.
        data: `(n, *event)`, or a `Batch`, whose contexts a flow is then given.
        field: the setting's name, for messages.
        seed: of a flow's initial weights.
        defaults: settings of a flow that `choice` does not set.

    >>> q = proposal_for("uniform", torch.tensor([[0.0], [1.0]]), "noise")
    >>> q.low.item(), round(q.high.item(), 3)
    (-0.10000000149011612, 1.1)
    >>> proposal_for({"name": "interpolant", "width": 8}, torch.randn(9, 2), "proposal").field.widths
    [8, 8, 2]
    """
    rows = as_batch(data)
    if isinstance(choice, (str, Mapping)):
        name, settings = named_settings(choice, field)
        if name in LEARNED:
            return _flow(LEARNED[name], rows, {"seed": seed, **defaults, **settings})
        return fit_gaussian(rows.x) if name == "gaussian" else _box(rows.x)
    ok = isinstance(choice, nn.Module) and isinstance(choice, Proposal)
    known = ", ".join((*NAMED, "interpolant"))
    require(ok, field, f"one of {known}, or a module with sample, log_prob and event_shape", choice)
    _check_shape(choice, rows, field)
    return choice  # pyright: ignore


def named_settings(choice: str | Mapping[str, Any], field: str) -> tuple[str, dict[str, Any]]:
    """The name of a built-in proposal and its settings, which must be those it has."""
    settings = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = settings.pop("name", "")
    require_choice(field, name, dict.fromkeys((*NAMED, *LEARNED)))
    kind = LEARNED.get(name)
    known = set() if kind is None else set(inspect.signature(kind.__init__).parameters) - {"self", "data"}
    for setting in settings:
        if setting not in known:
            raise ConfigError(f"{field}.{setting}", f"unknown setting of {name!r}{nearest(setting, known)}")
    return name, settings


def _flow(kind: type, data: Batch, settings: dict[str, Any]) -> nn.Module:
    """A flow over the data's events, given their contexts.

    These are standardised unless there is an encoder, or a field of one's own.
    """
    if data.given is not None:
        shape = data.context_shape or ()
        named = is_named(settings.get("field", ""))  # a field of one's own sees contexts as they are
        encoder = {"encoder": Standardise(shape, data.given)} if named else {}
        settings = {"context_shape": shape, **encoder, **settings}
    return kind(data.event_shape, data=data.x, **settings).to(data.x)


def _box(data: Tensor) -> Uniform:
    low, high = data.amin(0), data.amax(0)
    margin = MARGIN * (high - low).clamp(min=1e-6)
    return Uniform(low - margin, high + margin)


def _check_shape(choice: Any, data: Batch, field: str) -> None:
    shape = data.event_shape
    if tuple(choice.event_shape) != shape:
        raise InputError(
            f"{field}: events of the proposal have shape {tuple(choice.event_shape)}, those of the data {shape}"
        )
    if is_conditional(choice):
        given = data.context_shape
        if tuple(choice.context_shape) != given:
            there = "the data have none" if given is None else f"those of the data {given}"
            raise InputError(f"{field}: contexts of the proposal have shape {choice.context_shape}, {there}")


@torch.no_grad()
def require_support(proposal: Any, data: Batch, field: str) -> None:
    """Refuse data that the proposal gives density zero, and draws of its own that it does.

    A ratio with a density of zero below it is no ratio: contrast with such a proposal has no gradient. Of a
    proposal that learns, whose density can be costly and will change, only some rows are asked for, as of one that
    has learned what follows from contexts.
    """
    parameters = list(proposal.parameters())
    costly = bool(parameters) and (is_conditional(proposal) or any(p.requires_grad for p in parameters))
    rows = data[:: -(-len(data) // CHECKED)] if costly else data
    own = _own_density(proposal, rows, generator(0, data.device))
    if bool(torch.isneginf(own).any()):
        raise InputError(
            f"{field}: {int(torch.isneginf(own).sum())} of {own.numel()} draws of the proposal have density zero "
            "under the proposal itself; its sample and log_prob do not belong together"
        )
    outside = torch.isneginf(log_prob_of(proposal, rows))
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise InputError(
            f"{field}: {int(outside.sum())} of {len(rows)} data rows lie outside the proposal's support, row {row} "
            "first; widen it, or use one that is positive everywhere, such as 'gaussian'"
        )


def require_density(log_prob: Tensor | None, what: str, field: str, step: int) -> None:
    """Name densities in update `step` that are zero or no number, where they may be looked at."""
    if log_prob is None or not may_look(log_prob) or bool(torch.isfinite(log_prob).all()):
        return
    nan, zero = int(log_prob.isnan().sum()), int(torch.isneginf(log_prob).sum())
    raise InputError(
        f"{field}: at update {step} log p_ξ is −inf at {zero} and NaN at {nan} of {log_prob.numel()} {what}; a "
        "ratio of densities needs a proposal that is positive wherever data or its own draws are (a lower "
        "proposal_rate, where it learns?)"
    )


def _own_density(proposal: Any, data: Batch, rng: torch.Generator) -> Tensor:
    """Log-densities of some draws; for contexts, of one draw each."""
    if data.given is None:
        return proposal.log_prob(proposal.sample(DRAWS, rng))
    given = data.given[:DRAWS]
    return log_prob_given(proposal, sample_given(proposal, 1, rng, given), given)
