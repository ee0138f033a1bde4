"""The same law in any units: log Z against quadrature at five scales, and a table in two sets of units."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.api import fit
from metastable.core.random import derive, generator
from metastable.evaluation.quadrature import bounding_box, log_partition_quadrature

POINTS = 20_001
"""Of the quadrature on a line."""


def two_humps(n: int, seed: int) -> Tensor:
    """Rows on a line: two thirds from N(−1, 0.4²), a third from N(1.2, 0.6²), float64 `(n, 1)`."""
    rng = generator(derive(seed, "two humps"))
    left = torch.rand(n, generator=rng) < 2 / 3
    noise = torch.randn(n, generator=rng, dtype=torch.float64)
    return torch.where(left, -1 + 0.4 * noise, 1.2 + 0.6 * noise)[:, None]


def log_z_at(scale: float, rows: int, seed: int, **options: Any) -> dict[str, float]:
    """log Z of what `fit` learns from two humps in units of 1/`scale`, against quadrature."""
    x = scale * two_humps(rows, seed)
    run = fit(None, x, seed=seed, **options)
    z = run.log_partition
    assert z is not None
    exact = log_partition_quadrature(run.learned_energy, bounding_box(x, 1.5), points=POINTS)
    return {
        "error": abs(z.value - exact),
        "errors": abs(z.value - exact) / z.std_error,
        "trusted": float(z.trusted),
    }


def mixed_table(rows: int, seed: int) -> np.ndarray:
    """Dollars, years and a date in seconds, which go together: `(rows, 3)`, float64."""
    rng = np.random.default_rng(derive(seed, "mixed table"))
    years = rng.gamma(9.0, 5.0, rows)
    dollars = np.exp(rng.normal(10 + 0.02 * years, 0.3))
    date = 1.7e9 + 86_400 * rng.uniform(0, 30, rows) + 2e4 * years
    return np.stack([dollars, years, date], 1)


OTHER = np.array([0.92e-3, 365.25, 1 / 3600.0]), np.array([0.0, 0.0, -1.7e9 / 3600.0])
"""Thousands of euros, days, and hours since a day in 2023."""


def likelihoods_in_two_units(rows: int, seed: int, **options: Any) -> tuple[float, float]:
    """Held-out log-likelihood of the same table in two sets of units, the second brought to the first's."""
    table = mixed_table(rows, seed)
    factor, shift = OTHER
    both = [fit(None, t, seed=seed, held_out=0.2, **options) for t in (table, table * factor + shift)]
    first, second = (run.scores["log_likelihood"] for run in both)
    return first, second + float(np.log(factor).sum())
