"""Five energies that break estimates of log Z, each with its exact value.

A funnel has a neck that is narrower than any one step, a ring no direction that whitening could straighten, a
banana a bend, a posterior of logistic regression a skew that comes from data, and far modes a gap that no chain
crosses. `coverage` repeats `log_partition` at default settings on one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.errors import require, require_choice, require_count, require_positive
from metastable.energies import Banana, Funnel, GaussianMixture
from metastable.evaluation.quadrature import log_partition_quadrature

from ..log_partition import against_exact

LOG_2PI = math.log(2 * math.pi)
GRID_POINTS = 65
"""Along each axis of the logistic posterior's quadrature; its narrowest width spans about two of them."""


class Ring(nn.Module):
    """E(x) = (|x| − R)²/(2σ²) in the plane; log Z in closed form."""

    def __init__(self, radius: float = 4.0, width: float = 0.2):
        super().__init__()
        require_positive("radius", radius)
        require_positive("width", width)
        self.radius, self.width = radius, width
        self.event_shape = (2,)

    def forward(self, x: Tensor) -> Tensor:
        # the square root has no gradient at the very centre, where nobody should get stuck
        r = (x.square().sum(1) + 1e-12).sqrt()
        return 0.5 * ((r - self.radius) / self.width).square()

    def log_partition(self) -> Tensor:
        """log 2π∫ r exp(−(r − R)²/(2σ²)) dr over r > 0, in closed form.

        ∫ r φ = σ²e^{−R²/2σ²} + R σ√(2π)·Φ(R/σ).
        """
        R, s = self.radius, self.width
        below = 0.5 * math.erfc(-R / (s * math.sqrt(2)))
        radial = s**2 * math.exp(-0.5 * (R / s) ** 2) + R * s * math.sqrt(2 * math.pi) * below
        return torch.tensor(LOG_2PI + math.log(radial), dtype=torch.float64)


class LogisticPosterior(nn.Module):
    """−log of prior times likelihood of Bayesian logistic regression: Z is the evidence of the labels.

    E(w) = ½|w|² + ½d·log 2π + Σ_i log(1 + exp(−y_i x_i·w)), with labels y_i = ±1 drawn from the model. The
    features lie in a subspace of `rank` dimensions, turned at random: weights across it are as in the prior, which
    brings the integral down to those along it, where it is done by quadrature.

    Args:
        dim: number of weights.
        rank: dimension of the features' span, at most 3.
        rows: how many labels.
        seed: of features and labels.
    """

    signed: Tensor
    turn: Tensor

    def __init__(self, dim: int = 8, rank: int = 3, rows: int = 40, seed: int = 0):
        super().__init__()
        require_count("dim", dim)
        require(1 <= rank <= min(dim, 3), "rank", f"from 1 to {min(dim, 3)}", rank)
        require_count("rows", rows)
        rng = torch.Generator().manual_seed(seed)
        z, truth = (torch.randn(shape, generator=rng) for shape in ((rows, rank), (rank,)))
        y = torch.where(torch.rand(rows, generator=rng) < torch.sigmoid(2 * z @ truth), 1.0, -1.0)
        self.register_buffer("signed", 2 * y[:, None] * z)
        self.register_buffer("turn", torch.linalg.qr(torch.randn((dim, rank), generator=rng))[0])
        self.event_shape = (dim,)

    def forward(self, w: Tensor) -> Tensor:
        return 0.5 * w.square().sum(1) + 0.5 * w.shape[1] * LOG_2PI + self._loss(w @ self.turn)

    def _loss(self, along: Tensor) -> Tensor:
        """−log-likelihood of weights in the span of the features, `(B, rank)` to `(B,)`."""
        return nn.functional.softplus(-along @ self.signed.to(along.dtype).T).sum(1)

    def log_partition(self) -> Tensor:
        """Trapezoid rule over eight standard deviations of the prior."""
        rank = self.signed.shape[1]

        def along(w: Tensor) -> Tensor:
            return 0.5 * w.square().sum(1) + 0.5 * rank * LOG_2PI + self._loss(w)

        value = log_partition_quadrature(along, [(-8.0, 8.0)] * rank, points=GRID_POINTS)
        return torch.tensor(value, dtype=torch.float64)


def far_modes() -> GaussianMixture:
    """Two unit Gaussians in the plane, twenty standard deviations apart, of masses 0.3 and 1.7."""
    return GaussianMixture(
        torch.tensor([[-8.0, -6.0], [8.0, 6.0]]), log_weights=torch.tensor([0.3, 1.7]).log()
    )


TARGETS: dict[str, Callable[[], nn.Module]] = {
    "funnel": lambda: Funnel(10),
    "ring": Ring,
    "banana": lambda: Banana(4, width=3.0, bend=0.5),
    "logistic": LogisticPosterior,
    "far-modes": far_modes,
}


def estimate(name: str, seed: int, exact: float | None = None, **options: Any) -> dict[str, Any]:
    """One call of `log_partition` against the exact value.

    Args:
        name: of `TARGETS`.
        seed: of the estimate.
        exact: log Z, where it is known already.
        options: of `log_partition`, only where its defaults are not what is asked about.
    """
    require_choice("name", name, TARGETS)
    energy: Any = TARGETS[name]()
    exact = float(energy.log_partition()) if exact is None else exact
    return against_exact(name, energy, exact, seed, **options)


def coverage(name: str, seeds: int | Iterable[int] = 100, **options: Any) -> dict[str, Any]:
    """How often the number is trusted, and how often its 95 % interval covers log Z where it is.

    Returns:
        `trusted` (share of seeds), `coverage` (share of the trusted ones that cover; not a number where none is),
        `worst` (largest |error| of a trusted one, in its own standard errors), `median_std_error`,
        `seconds` (in all) and `rows`, one dictionary for each seed.
    """
    require_choice("name", name, TARGETS)
    energy: Any = TARGETS[name]()
    exact, each = float(energy.log_partition()), range(seeds) if isinstance(seeds, int) else seeds
    rows = [estimate(name, seed, exact, **options) for seed in each]
    sure = [row for row in rows if row["trusted"]]
    return {
        "target": name,
        "seeds": len(rows),
        "trusted": len(sure) / len(rows),
        "coverage": sum(row["covered"] for row in sure) / len(sure) if sure else math.nan,
        "worst": max((abs(row["z_score"]) for row in sure), default=0.0),
        "median_std_error": float(torch.tensor([row["std_error"] for row in rows]).median()),
        "seconds": sum(row["seconds"] for row in rows),
        "rows": rows,
    }
