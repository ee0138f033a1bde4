"""Energies E(x, y) of events and their classes as energies of events: of given labels, or summed over classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .protocols import is_discrete
from .types import Energy


class OfLabels:
    """E(·, y) with the label of every row fixed, `(B, *event)` to `(B,)`; made anew for every set of rows.

    It has slots, so that nobody can watch for its end: chains of it are recorded as a part of their update or not
    at all.
    """

    __slots__ = ("discrete", "energy", "labels")

    def __init__(self, energy: Any, labels: Tensor):
        self.energy, self.labels, self.discrete = energy, labels, is_discrete(energy)

    def __call__(self, x: Tensor) -> Tensor:
        return self.energy.class_energies(x).gather(1, self.labels[:, None]).squeeze(1)


class Summed:
    """−log Σ_y exp(−E(x, y)) of an energy by class, `(B, *event)` to `(B,)`."""

    def __init__(self, energy: Any):
        self.energy, self.discrete = energy, is_discrete(energy)

    def __call__(self, x: Tensor) -> Tensor:
        return -torch.logsumexp(-self.energy.class_energies(x), 1)


def of_labels(energy: Energy, labels: Tensor | None) -> Energy:
    """E(·, y) for rows of these labels, `(B,)`; E itself where there are none."""
    return energy if labels is None else OfLabels(energy, labels)


@torch.no_grad()
def draw_labels(energy: Any, x: Tensor, rng: torch.Generator) -> Tensor:
    """One label for each row, from p(y | x) ∝ exp(−E(x, y)), int64 `(B,)`."""
    p = torch.softmax(-energy.class_energies(x).double(), 1)
    u = torch.rand((len(x), 1), generator=rng, device=x.device, dtype=torch.float64)
    return (p.cumsum(1) < u).sum(1).clamp(max=p.shape[1] - 1)
