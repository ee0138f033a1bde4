"""Columns of mean 0 and standard deviation 1, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Standardiser:
    """u = (x − mean)/scale, coordinate by coordinate.

    A density of u is one of x through log p(x) = log p(u) + `log_det`. A coordinate that never changes keeps
    scale 1.

    Attributes:
        mean: `(*event)`.
        scale: `(*event)`, above zero.

    Example:
        >>> s = Standardiser.fit(torch.tensor([[0.0], [2.0]]))
        >>> s.forward(torch.tensor([[3.0]])).item(), s.inverse(torch.tensor([[2.0]])).item()
        (2.0, 3.0)
    """

    mean: Tensor
    scale: Tensor

    @classmethod
    def fit(cls, x: Tensor) -> Standardiser:
        """Mean and standard deviation of the rows of `x`, `(n, *event)`."""
        wide = x.double()
        mean, scale = wide.mean(0), wide.std(0, correction=0)
        # A constant column is off its own mean by rounding only.
        constant = scale <= 4 * torch.finfo(x.dtype).eps * mean.abs()
        return cls(mean.to(x.dtype), torch.where(constant, 1.0, scale).to(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """From x to u."""
        return (x - self.mean.to(x)) / self.scale.to(x)

    def inverse(self, u: Tensor) -> Tensor:
        """From u to x."""
        return u * self.scale.to(u) + self.mean.to(u)

    @property
    def log_det(self) -> float:
        """The log-Jacobian log |du/dx| = −Σ log scale, the same for every row."""
        return -float(self.scale.double().log().sum())
