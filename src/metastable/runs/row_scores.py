"""One score for each row: its log-density, or its energy where log Z is not trusted; and which are outliers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from metastable.core.errors import EnergyError, require
from metastable.core.memory import within_memory
from metastable.core.parts import energies_of

from .model import Model


@dataclass(frozen=True)
class RowScores:
    """Scores of rows, in the order of the rows.

    Attributes:
        value: `(n,)`, float64: log p(x), or the energy −log p(x) − log Z.
        kind: `log_density` or `energy`.
        why: in words, why it is not the log-density, or what speaks against it; empty where nothing does.
        std_error: of the log Z in each log-density given a context, `(n,)`; None without contexts, where all rows
            share one.
    """

    value: Tensor
    kind: str
    why: str = ""
    std_error: Tensor | None = None

    @property
    def surprise(self) -> Tensor:
        """`(n,)`: high where a row is unlikely."""
        return self.value if self.kind == "energy" else -self.value

    def threshold(self, share: float = 0.01) -> float:
        """The value beyond which lie at most a `share` of rows like these.

        The ⌈(n + 1)(1 − share)⌉-th of the n sorted scores, which new rows of the same law pass with a chance of
        at most `share`; the most extreme of all where n is below 1/share − 1.

        >>> import torch
        >>> RowScores(torch.arange(1.0, 100.0), "energy").threshold(0.05)
        95.0
        """
        require(0 < share < 1, "outliers", "a share above 0 and below 1", share)
        n = len(self.value)
        # rounded, since 1 − share is: 100·(1 − 0.01) must be 99
        kth = min(math.ceil(round((n + 1) * (1 - share), 9)), n)
        beyond = float(self.surprise.sort().values[kth - 1])
        return beyond if self.kind == "energy" else -beyond

    def outliers(self, threshold: float) -> Tensor:
        """Which rows lie beyond `threshold`, `(n,)`."""
        return self.value > threshold if self.kind == "energy" else self.value < threshold


def row_scores(model: Model, energy_of: Any, x: Any) -> RowScores:
    """log p of each row of `x` under a model, or its energy where there is no log Z to trust.

    Args:
        model: of events alone, or given the context of each row.
        energy_of: P·E in the data's units.
        x: `(n, *event)`, in the data's units.
    """
    rows = model.as_events(x)
    with within_memory("scoring", rows, {"data": f"{len(rows)} rows"}):
        if model.contexts is not None:
            return _given(model, x)
        energy = _checked(energies_of(energy_of, rows))
    z = model.log_z
    if model.normalised:
        return RowScores(-energy, "log_density")
    if z is None:
        return RowScores(energy, "energy", "log Z was not estimated")
    if not z.trusted:
        return RowScores(energy, "energy", f"log Z is not to be trusted: {'; '.join(z.warnings)}")
    return RowScores(-energy - z.value, "log_density")


def _given(model: Model, x: Any) -> RowScores:
    """Given contexts: each has a log Z of its own, without which its energies could not be held against others'."""
    if model.normalised:
        return RowScores(_checked(model.log_prob(x).double()), "log_density")
    u, log_det = model.enter(x)
    found = model.conditional_log_prob(u)
    z = found.log_partition
    doubted = int((~z.trusted).sum())
    why = f"log Z of {doubted} of {len(z)} contexts is not to be trusted" if doubted else ""
    return RowScores(_checked(found.value + log_det), "log_density", why, found.std_error.cpu())


def _checked(values: Tensor) -> Tensor:
    values = values.detach().cpu()
    if bool(values.isnan().any()):
        first = int(values.isnan().nonzero()[0])
        raise EnergyError(
            f"energy: must be a number or +inf, got NaN on {int(values.isnan().sum())} of {len(values)} rows, the "
            f"first at row {first} (counting from 0)"
        )
    return values
