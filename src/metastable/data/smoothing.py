"""Noise that keeps a small table from being learnt by heart, as the bandwidth of a kernel density estimate does."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.random import generator
from ..core.units import Units

ROWS = 16_384
"""A smaller table is repeated to at least this many rows, each copy with noise of its own."""


def smoothed(x: Tensor, smoothing: float, seed: int) -> Tensor:
    """√(1 − s²)·u + noise in whitened units u, brought back; vectors `(n, d)` to `(m, d)` with m at least `ROWS`.

    Mean and covariance stay as they are, so that Gaussian rows lose nothing and anything else is blurred by s. In a
    direction in which the rows have variance v the noise has variance 1 − (1 − s²)v, so that together they have
    variance 1, and at least s²: rows that are few for their columns are widened to their shrunk correlations.

    >>> x = torch.tensor([0.0, 10.0] * 50)[:, None]
    >>> round(float(smoothed(x, 0.5, seed=0).std()), 1)
    5.0
    """
    units = Units.fit(x, "whiten")
    u = units.forward(x.detach().cpu())
    kept = 1 - smoothing**2
    variances, axes = torch.linalg.eigh(u.T @ u / len(u))
    root = axes * (1 - kept * variances).clamp(min=smoothing**2).sqrt() @ axes.T
    copies = u.repeat(-(-ROWS // len(u)), 1)
    noise = torch.randn(copies.shape, generator=generator(seed), dtype=torch.float64)
    return units.inverse(kept**0.5 * copies + noise @ root).to(x)
