"""The log of a training as rules read it: columns, their late values, their trends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .finding import Evidence

Row = Mapping[str, Any]

LEAST_ROWS = 20  # four rows in each fifth: below that no trend can be told from noise
CLEAR = 5.0  # standard errors, with noise estimated from few rows, before a difference counts as real
IMPROVED = 3.0  # standard errors by which learning must show
EXPLODED = 1e6  # nats; the guard's own limit, unless it was given another

ENERGIES = ("energy_data", "energy_negatives", "energy_gap")

# Of the data, and of the labels where a classifier is trained.
ENTROPIES = {"cross_entropy": "Cross-entropy", "label_cross_entropy": "Cross-entropy of the labels"}


class Log:
    """Rows of `metrics.jsonl`, with energies in nats.

    Args:
        rows: as logged.
        power: P of exp(−P·E); energies times P are what the log of the learned density is made of.
    """

    def __init__(self, rows: Sequence[Row], power: float = 1.0):
        self.rows = list(rows)
        if power != 1:
            energies = [{key: number(row.get(key)) for key in ENERGIES} for row in rows]
            self.rows = [
                {**row, **{key: power * value for key, value in known.items() if value is not None}}
                for row, known in zip(rows, energies, strict=True)
            ]

    def __len__(self) -> int:
        return len(self.rows)

    def series(self, key: str) -> np.ndarray:
        """The finite values of one key, in order."""
        values = [number(row.get(key)) for row in self.rows]
        return np.array([v for v in values if v is not None and math.isfinite(v)])

    def late(self, key: str) -> float | None:
        """Median of the second half of a column; None where it has fewer than five values."""
        values = self.series(key)
        return float(np.median(values[len(values) // 2 :])) if len(values) >= 5 else None

    def trend(self, key: str) -> Trend | None:
        """How a column went; None for one that is too short to tell."""
        return Trend.of(self.series(key))

    @cached_property
    def gap(self) -> np.ndarray:
        """The energy gap, from the two energies where it was not logged itself."""
        logged = self.series("energy_gap")
        if len(logged):
            return logged
        pairs = [(number(r.get("energy_data")), number(r.get("energy_negatives"))) for r in self.rows]
        gaps = np.array([a - b for a, b in pairs if a is not None and b is not None])
        return gaps[np.isfinite(gaps)]

    @cached_property
    def gap_trend(self) -> Trend | None:
        """How the energy gap went."""
        return Trend.of(self.gap)

    @property
    def last_step(self) -> float:
        """The last logged step; the number of rows where steps were not logged."""
        logged = self.series("step")
        return float(logged[-1] if len(logged) else len(self))

    @property
    def diverged(self) -> bool:
        """Whether the last energies are not numbers, or none that a density has."""
        last = self.rows[-1] if self.rows else {}
        values = [v for key in ENERGIES if (v := number(last.get(key))) is not None]
        return any(not abs(v) <= EXPLODED for v in values)


@dataclass(frozen=True)
class Trend:
    """Means over each fifth of the log, and the standard error of one, from the second half's noise."""

    fifths: tuple[float, ...]
    se: float

    @classmethod
    def of(cls, values: np.ndarray) -> Trend | None:
        """None where there are too few values to tell."""
        if len(values) < LEAST_ROWS:
            return None
        fifths = tuple(float(part.mean()) for part in np.array_split(values, 5))
        return cls(fifths, mean_error(values[len(values) // 2 :], len(values) // 5))

    @property
    def first(self) -> float:
        """Of the first fifth."""
        return self.fifths[0]

    @property
    def last(self) -> float:
        """Of the last fifth."""
        return self.fifths[-1]

    @property
    def change_se(self) -> float:
        """Standard error of the difference of two fifths."""
        return math.sqrt(2) * self.se

    def evidence(self, name: str) -> Evidence:
        """The numbers behind a finding about `name`."""
        return {f"{name}_first_fifth": self.first, f"{name}_last_fifth": self.last, f"{name}_se": self.se}


def number(value: Any) -> float | None:
    """A logged value as a float, or None where there is none; text such as 'NaN' is read as a number."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def mean_error(values: np.ndarray, count: int) -> float:
    """Standard error of a mean over `count` successive rows: σ/√count · √((1+ρ)/(1−ρ)).

    σ and the lag-one correlation ρ are those of the residuals around a line; ρ is corrected for the bias
    (1+4ρ)/n that fitting the line gives it, since rows logged from persistent chains follow each other.
    """
    time = np.arange(len(values), dtype=float)
    residual = values - np.polyval(np.polyfit(time, values, 1), time)
    variance = float(residual @ residual) / max(len(values) - 2, 1)
    if variance == 0:
        return 0.0
    rho = float(residual[1:] @ residual[:-1]) / float(residual @ residual)
    rho = min(max(rho + (1 + 4 * max(rho, 0.0)) / len(values), 0.0), 0.98)
    return math.sqrt(variance / count * (1 + rho) / (1 - rho))


def tenths(values: np.ndarray) -> np.ndarray:
    """The median of each tenth of a column."""
    return np.array([np.median(part) for part in np.array_split(values, 10)])
