"""How much two samples overlap: the Bhattacharyya coefficient of their kernel density estimates on a grid.

S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies: ranking noise contrastive estimation and
interpolating energy models*, TMLR 2024, Section 7.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import InputError, require, require_count

SAFE = 100.0  # exponents up to here can be multiplied three times in float64
BLOCK = 1 << 22  # kernel values held at once where they do not factor


@dataclass(frozen=True)
class PlaneKDE:
    """A Gaussian kernel density estimate of rows in the plane: the numbers of `scipy.stats.gaussian_kde`.

    The kernel's covariance is that of the sample times n^{−1/3}, Scott's rule in two dimensions.

    Attributes:
        x: rows, `(n, 2)`, float64.
        precision: inverse of the kernel's covariance, `(2, 2)`.

    >>> kde = PlaneKDE.of(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    >>> axis = torch.linspace(-6, 7, 131, dtype=torch.float64)
    >>> round(float(kde.on_grid(axis, axis).sum() * 0.01), 6)
    1.0
    """

    x: Tensor
    precision: Tensor

    @classmethod
    def of(cls, x: Tensor) -> PlaneKDE:
        """The estimate from rows `(n, 2)`, at least three that are not on one line."""
        if x.dim() != 2 or x.shape[1] != 2 or len(x) < 3:
            raise InputError(f"x: must be at least 3 rows in the plane, shape (n, 2), got {tuple(x.shape)}")
        rows = x.detach().double()
        if not bool(rows.isfinite().all()):
            raise InputError(
                f"x: must be finite, got {int((~rows.isfinite()).any(1).sum())} rows that are not"
            )
        covariance = torch.cov(rows.T) * len(rows) ** (-1 / 3)
        if not float(torch.linalg.det(covariance)) > 1e-12 * float(covariance.diagonal().prod()):
            raise InputError(
                "x: its rows lie on one line or in one point, and so have no density in the plane"
            )
        return cls(rows, torch.linalg.inv(covariance))

    def on_grid(self, first: Tensor, second: Tensor) -> Tensor:
        """The density at all points of a grid, from its axes `(p,)` and `(q,)` to `(p, q)`, float64.

        With a = g − x, the exponent −½aᵀPa has one term that joins both axes, −P₁₂a₁a₂. Of its four products
        −P₁₂g₁g₂ is the same for all rows, and the others belong to one axis at the most. The sum over rows is so
        a product of two matrices, `(p, n)` and `(n, q)`: exact, in a hundredth of the time. Where the factors would
        leave float64 (a sample close to a line) kernels are evaluated one by one.
        """
        centre = self.x.mean(0)
        first, second = first.to(self.x) - centre[0], second.to(self.x) - centre[1]
        x, P = self.x - centre, self.precision
        reach = max(float(v.abs().max()) for v in (first, second, x))
        norm = math.sqrt(float(torch.linalg.det(P))) / (2 * math.pi * len(x))
        if abs(float(P[0, 1])) * reach**2 > SAFE:
            return norm * _one_by_one(first, second, x, P)
        left = (
            -0.5 * P[0, 0] * (first[:, None] - x[:, 0]).square() + P[0, 1] * first[:, None] * x[:, 1]
        ).exp()
        right = (
            -0.5 * P[1, 1] * (second[:, None] - x[:, 1]).square() + P[0, 1] * second[:, None] * x[:, 0]
        ).exp()
        rows = (-P[0, 1] * x[:, 0] * x[:, 1]).exp()
        return norm * (-P[0, 1] * first[:, None] * second).exp() * ((left * rows) @ right.T)


def _one_by_one(first: Tensor, second: Tensor, x: Tensor, P: Tensor) -> Tensor:
    """Σ exp(−½ aᵀPa) at every grid point, with P = WᵀW: distances in whitened coordinates."""
    whiten = torch.linalg.cholesky(P)
    grid, rows = torch.cartesian_prod(first, second) @ whiten, x @ whiten
    parts = [
        torch.exp(-0.5 * torch.cdist(g, rows).square()).sum(1) for g in grid.split(max(1, BLOCK // len(x)))
    ]
    return torch.cat(parts).view(len(first), len(second))


def bhattacharyya(x: Tensor, y: Tensor, *, half_width: float = 4.0, points: int = 256) -> float:
    """BC = ∫ √(p q) by the trapezoid rule, with p and q kernel density estimates of two samples; (7.1).

    1 where they are the same and 0 where they do not overlap. Kernels blur both samples by about n^{−1/6} of their
    width, so details finer than that are not seen. Two samples of one law are a little below 1, which is the most
    that a model can reach: report that number beside the model's.

    Args:
        x: `(n, 2)`.
        y: `(m, 2)`.
        half_width: the square is [−half_width, half_width]²; mass outside is not counted.
        points: along each axis.

    >>> x = torch.randn(500, 2, generator=torch.Generator().manual_seed(0)) / 2
    >>> round(bhattacharyya(x, x), 4), bhattacharyya(x, 0.1 * x) < 0.3
    (1.0, True)
    """
    require(0 < half_width < math.inf, "half_width", "a finite number above 0", half_width)
    require_count("points", points, 2)
    axis = torch.linspace(-half_width, half_width, points, dtype=torch.float64)
    p, q = (PlaneKDE.of(z.cpu()).on_grid(axis, axis) for z in (x, y))
    return float(torch.trapezoid(torch.trapezoid((p * q).sqrt(), axis), axis))


def least_overlap(found: Sequence[Tensor], truth: Sequence[Tensor], **grid: float) -> float:
    """The smallest coefficient over contexts, with one sample of each kind for each of them."""
    return min(bhattacharyya(x, y, **grid) for x, y in zip(found, truth, strict=True))  # pyright: ignore
