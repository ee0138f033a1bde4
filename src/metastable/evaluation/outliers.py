"""Telling events of another kind from those that a model was trained on.

A score is high where the model takes an event for one of its own. AUROC is the chance that an event from inside
scores higher than one from outside, ties counting half: 1 tells all apart, ½ is a coin.

Grathwohl and others, *Your classifier is secretly an energy based model and you should treat it like one*,
ICLR 2020, compare three scores of a classifier that is an energy model: log p(x), max p(y | x) and
−‖∇ₓ log p(x)‖.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.protocols import Classifier, provides

from ..core.errors import InputError
from ..core.parts import NUMBERS, in_parts
from ..core.types import energy_and_grad, row_sum

SCORES = ("log_density", "confidence", "gradient")
"""log p(x) up to log Z, max p(y | x), and −‖∇ₓ log p(x)‖."""


class Auroc(NamedTuple):
    """Area under the ROC curve with its standard error, 0 where the two samples do not overlap at all."""

    value: float
    std_error: float


def auroc(inside: Tensor, outside: Tensor) -> Auroc:
    """P(inside > outside) + ½P(inside = outside), with its standard error (DeLong and others, 1988).

    Each event's placement is the share of the other sample that it beats; the spread of placements within each
    sample gives the error. Sorting costs n log n; no pairs are formed.

    Args:
        inside: scores of events from the model's own distribution, `(n,)`.
        outside: scores of other events, `(m,)`.

    >>> auroc(torch.tensor([1.0, 2.0, 2.0]), torch.tensor([0.0, 2.0])).value  # 3 + 2·½ of 6 pairs
    0.6666666666666666
    """
    inside, outside = _scores(inside, "inside"), _scores(outside, "outside").to(inside.device)
    n, m = len(inside), len(outside)
    together = midranks(torch.cat([inside, outside]))
    placed = (together[:n] - midranks(inside)) / m
    other = 1 - (together[n:] - midranks(outside)) / n
    spread = _mean_variance(placed) + _mean_variance(other)
    return Auroc(float(placed.mean()), math.sqrt(spread))


def midranks(values: Tensor) -> Tensor:
    """Ranks from 1, equal values sharing the mean of theirs, float64 `(N,)`.

    >>> midranks(torch.tensor([0.3, 0.1, 0.3]))
    tensor([2.5000, 1.0000, 2.5000], dtype=torch.float64)
    """
    _, index, count = torch.unique(values, return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    return (last - (count - 1) / 2)[index]


def _mean_variance(values: Tensor) -> float:
    return float(values.var()) / len(values)


def _scores(values: Tensor, name: str) -> Tensor:
    if values.dim() != 1 or len(values) < 2:
        raise InputError(f"{name}: must be at least two scores (n,), got shape {tuple(values.shape)}")
    broken = int(values.isnan().sum())
    if broken:
        raise InputError(f"{name}: {broken} of {len(values)} scores are NaN, which cannot be ranked")
    return values.detach().double()


def ood_scores(energy: Any, x: Tensor) -> dict[str, Tensor]:
    """How much a model takes each event for one of its own, by every score that it can give.

    Args:
        energy: any energy `(B, *event)` → `(B,)`; one with `logits(x)`, `(B, C)`, gives the confidence too.
        x: events `(N, *event)`; they are looked at in parts, so that memory does not grow with N.

    Returns:
        `(N,)` in float64 for each of `log_density` (−E, which is log p(x) + log Z), `confidence` (max p(y | x)) and
        `gradient` (−‖∇ₓ log p(x)‖, the norm over the whole event).

    >>> from metastable.energies import GaussianMixture
    >>> bell = GaussianMixture(means=torch.zeros(1, 2), scales=1.0)
    >>> ood_scores(bell, torch.tensor([[3.0, 4.0]]))["gradient"]
    tensor([-5.], dtype=torch.float64)
    """
    if len(x) == 0:
        raise InputError("x: there are no events to score (N = 0)")

    def both(part: Tensor) -> Tensor:
        value, grad = energy_and_grad(energy, part)
        return torch.stack([-value.double(), -row_sum(grad.double().square()).sqrt()], 1)

    # the graph of a deep network holds many times its input
    log_density, gradient = in_parts(both, x, NUMBERS // 8).unbind(1)
    found = {"log_density": log_density, "gradient": gradient}
    if provides(energy, Classifier):
        found["confidence"] = in_parts(lambda part: torch.softmax(energy.logits(part).double(), 1).amax(1), x)
    return {name: found[name] for name in SCORES if name in found}


def ood_aurocs(inside: Mapping[str, Tensor], outside: Mapping[str, Tensor]) -> dict[str, Auroc]:
    """AUROC by each score that both have, from `ood_scores` of events inside and outside."""
    return {name: auroc(inside[name], outside[name]) for name in inside if name in outside}
