"""Gaussian and uniform proposals for any event shape."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from metastable.core.errors import InputError, require
from metastable.core.kept import Kept
from metastable.core.perceptron import Gaussians
from metastable.core.types import row_sum

FLOOR = 1e-6
"""Share of a variance that is added to it, so that columns which depend on each other still have a density."""
ROUNDED = 1e-10
"""Standard deviation, relative to the mean, up to which a column is a constant: float64's rounding of a mean."""
NARROW = 8
"""Numbers of an event up to which a GPU multiplies by an inverse: solving for a million events takes it seconds."""
FULL_COVARIANCE_LIMIT = 128
"""Above this many coordinates a fitted Gaussian keeps variances only: a full factor would cost d² numbers."""


class Gaussian(nn.Module):
    """N(mean, L Lᵀ) over events of any shape, with L lower triangular or diagonal.

    Args:
        mean: `(*event)`.
        scale: a number or `(*event)` for independent coordinates; or `(d, d)`, lower triangular, over the d numbers
            of a flattened event.

    >>> q = Gaussian(torch.zeros(3), 2.0)
    >>> round(q.log_prob(torch.zeros(1, 3)).item(), 4)  # −3 log(2√(2π))
    -4.8363
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, scale: Tensor | float = 1.0):
        super().__init__()
        mean = torch.as_tensor(mean)
        scale = torch.as_tensor(scale, dtype=mean.dtype, device=mean.device)
        self.event_shape = tuple(mean.shape)
        self.full = scale.shape == (mean.numel(), mean.numel()) and scale.shape != mean.shape
        if not self.full:
            scale = scale.expand(mean.shape).clone()
        elif not torch.equal(scale, scale.tril()):
            raise InputError(
                "scale: a matrix must be lower triangular (torch.linalg.cholesky of a covariance)"
            )
        diagonal = scale.diagonal() if self.full else scale
        require(bool((diagonal > 0).all()), "scale", "positive on its diagonal", diagonal.min().item())
        self.kept_constant: Kept[Tensor] = Kept()
        self.kept_gaussians: Kept[Gaussians] = Kept()
        self.kept_inverse: Kept[Tensor] = Kept()
        self.register_buffer("mean", mean.clone())
        # Row-major, because a Cholesky factor is not and safetensors refuses it.
        self.register_buffer("scale", scale.clone(memory_format=torch.contiguous_format))

    def _constant(self) -> Tensor:
        """−log of the density at the mean."""
        diagonal = self.scale.diagonal() if self.full else self.scale
        half = 0.5 * self.mean.numel() * math.log(2 * math.pi)
        return self.kept_constant(lambda: diagonal.log().sum() + half, self.scale)

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` draws, `(n, *event)`."""
        return self._place(self._noise(n, rng))

    def _noise(self, n: int, rng: torch.Generator) -> Tensor:
        return torch.randn(
            (n, *self.event_shape), generator=rng, device=self.mean.device, dtype=self.mean.dtype
        )

    def _place(self, noise: Tensor) -> Tensor:
        if self.full:
            return self.mean + (noise.flatten(1) @ self.scale.T).view(noise.shape)
        return self.mean + noise * self.scale

    def sample_and_log_prob(self, n: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """The draws of `sample` with their log-densities, which need no solving for the noise behind them."""
        noise = self._noise(n, rng)
        return self._place(noise), -0.5 * row_sum(noise.square()) - self._constant()

    def log_prob(self, x: Tensor) -> Tensor:
        """Normalised log-density, `(B, *event)` to `(B,)`."""
        centred = x - self.mean
        if self.full:  # events lie along the first dimension here: a sum over it runs through memory in order
            rows = centred.flatten(1)
            if x.is_cuda and rows.shape[1] <= NARROW:
                square = by_inverse(rows, self.gaussians().factor[0]).square().sum(1)
            elif x.is_cuda and rows.shape[1] > FULL_COVARIANCE_LIMIT:  # in float64, which no setting rounds
                square = (rows.double() @ self._inverse().T).square().sum(1).to(rows)
            else:
                square = torch.linalg.solve_triangular(self.scale, rows.T, upper=False).square().sum(0)
        else:
            square = row_sum((centred / self.scale).square())
        return -0.5 * square - self._constant()

    def gaussians(self) -> Gaussians:
        """The one component, over flattened events."""
        return self.kept_gaussians(self._gaussians, self.mean, self.scale)

    def _gaussians(self) -> Gaussians:
        one, mean = torch.ones_like(self.mean).flatten(), self.mean.reshape(1, -1)
        factor = (self._inverse() if self.full else self._inverted()).to(mean.dtype)
        return Gaussians(-self._constant().view(1, 1), mean, factor[None].contiguous(), one[:1])

    def _inverse(self) -> Tensor:
        """L⁻¹ over flattened events, `(d, d)`, float64."""
        return self.kept_inverse(self._inverted, self.scale)

    def _inverted(self) -> Tensor:
        wide = self.scale.double() if self.full else self.scale.double().flatten().diag()
        return torch.linalg.solve_triangular(wide, torch.eye(len(wide)).to(wide), upper=False)


def by_inverse(rows: Tensor, inverse: Tensor) -> Tensor:
    """`(N, D)` times the transpose of a small matrix, number by number, so that no setting rounds the products.

    >>> by_inverse(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [3.0, 0.5]]))
    tensor([[1., 4.]])
    """
    return (rows[:, None] * inverse).sum(-1)


class Uniform(nn.Module):
    """Uniform on the box [low, high]; −inf log-density outside."""

    low: Tensor
    high: Tensor

    def __init__(self, low: Tensor, high: Tensor):
        super().__init__()
        low, high = torch.as_tensor(low), torch.as_tensor(high)
        if not bool((high > low).all()):
            raise InputError(f"high: must be above low in every coordinate, got low={low}, high={high}")
        self.event_shape = tuple(low.shape)
        self.register_buffer("low", low.clone())
        self.register_buffer("high", high.clone())

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` draws, `(n, *event)`."""
        u = torch.rand((n, *self.event_shape), generator=rng, device=self.low.device, dtype=self.low.dtype)
        return self.low + (self.high - self.low) * u

    def log_prob(self, x: Tensor) -> Tensor:
        """−Σ log(high − low) inside the box, −inf outside."""
        inside = ((x >= self.low) & (x <= self.high)).flatten(1).all(1)
        value = -(self.high - self.low).log().sum()
        return torch.where(inside, value, torch.full_like(value, -math.inf))


def is_image(event_shape: tuple[int, ...]) -> bool:
    """Whether events are images `(C, H, W)` of one or three channels.

    >>> is_image((1, 8, 8)), is_image((8, 3)), is_image((2, 8, 8))
    (True, False, False)
    """
    return len(event_shape) == 3 and event_shape[0] in (1, 3)


def fit_gaussian(x: Tensor, log_weight: Tensor | None = None, inflate: float = 1.0) -> Gaussian:
    """The Gaussian with the (weighted) mean and covariance of `x`, its standard deviations × `inflate`.

    Events of up to `FULL_COVARIANCE_LIMIT` numbers, of any shape but that of an image, get a full covariance;
    others get variances. Each column of vectors has units of its own: to its variance a millionth of itself is
    added, whatever the others are. Pixels have common units, and get a millionth of their mean variance.
    """
    small = x[0].numel() <= FULL_COVARIANCE_LIMIT and not is_image(tuple(x.shape[1:]))
    if x.dim() == 2 or small:
        return _fit_columns(x, log_weight, inflate)
    p = torch.softmax(log_weight if log_weight is not None else x.new_zeros(len(x)), 0).to(x.dtype)
    flat = x.flatten(1)
    mean = p @ flat
    variance = p @ (flat - mean).square_()  # in place: images can fill half of the memory
    floor = FLOOR * variance.mean().clamp(min=1e-12)
    scale = inflate * (variance + floor).sqrt()
    return Gaussian(mean.view(x.shape[1:]), scale.view(x.shape[1:]))


def _fit_columns(x: Tensor, log_weight: Tensor | None, inflate: float) -> Gaussian:
    """In float64, and by way of the correlations, so that a column's unit is nothing to another's."""
    flat = x.double().flatten(1)
    p = torch.softmax(flat.new_zeros(len(x)) if log_weight is None else log_weight.double(), 0)
    mean = p @ flat
    centred = flat - mean
    scale = column_scales(mean, (p @ centred.square()).sqrt())
    factor = inflate * math.sqrt(1 + FLOOR) * scale
    if flat.shape[1] <= FULL_COVARIANCE_LIMIT:
        z = centred / scale
        correlation = (z * p[:, None]).T @ z
        added = torch.where(correlation.diagonal() < 0.5, 1.0, FLOOR)  # 0 of a constant column, else 1
        factor = inflate * scale[:, None] * torch.linalg.cholesky(correlation + added.diag())
    return Gaussian(mean.view(x.shape[1:]).to(x.dtype), factor.to(x.dtype))


def column_scales(mean: Tensor, std: Tensor) -> Tensor:
    """The standard deviation of each column, `(d,)`; of a constant one a thousandth of its value, never zero.

    >>> column_scales(torch.tensor([5.0, -200.0]), torch.tensor([2.0, 0.0]))
    tensor([2.0000, 0.2000])
    """
    size = mean.abs()
    constant = 1e-3 * torch.where(size > 0, size, 1.0)
    return torch.where(std > ROUNDED * size, std, constant)
