"""Targets whose log Z is known, for tests, tutorials and honest comparisons.

Each energy is unnormalised on purpose where that is natural, with `log_partition()` exact (closed form or
quadrature in float64) and, where it can be had, an exact `sample(n, rng)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from metastable.core.errors import InputError, require, require_count, require_positive

LOG_2PI = math.log(2 * math.pi)


def _randn(n: int, d: int, rng: torch.Generator, like: Tensor) -> Tensor:
    return torch.randn((n, d), generator=rng, device=like.device, dtype=like.dtype)


def _store(module: nn.Module, trainable: bool, **tensors: Tensor) -> None:
    for name, value in tensors.items():
        # Row-major, because a Cholesky factor is not and safetensors refuses it.
        own = value.clone(memory_format=torch.contiguous_format)
        if trainable:
            setattr(module, name, nn.Parameter(own))
        else:
            module.register_buffer(name, own)


class Gaussian(nn.Module):
    """E(x) = ½ (x−m)ᵀ Σ⁻¹ (x−m), so log Z = ½ log det(2πΣ).

    >>> round(Gaussian(torch.zeros(2), torch.eye(2)).log_partition().item(), 4)  # log 2π
    1.8379
    """

    mean: Tensor
    covariance: Tensor
    factor: Tensor

    def __init__(self, mean: Tensor, covariance: Tensor):
        super().__init__()
        require(mean.dim() == 1, "mean", "a vector", tuple(mean.shape))
        require(covariance.shape == (len(mean),) * 2, "covariance", "a d × d matrix", tuple(covariance.shape))
        factor, failed = torch.linalg.cholesky_ex(covariance)
        sound = not bool(failed) and torch.allclose(covariance, covariance.T)
        require(sound, "covariance", "symmetric and positive definite", covariance.tolist())
        _store(self, False, mean=mean, covariance=covariance, factor=factor)
        self.event_shape = tuple(mean.shape)

    def forward(self, x: Tensor) -> Tensor:
        white = torch.linalg.solve_triangular(self.factor, (x - self.mean).T, upper=False)
        return 0.5 * white.square().sum(0)

    def log_partition(self) -> Tensor:
        """½ log det(2πΣ)."""
        return self.factor.diagonal().log().sum() + 0.5 * len(self.mean) * LOG_2PI

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` exact draws."""
        return self.mean + _randn(n, len(self.mean), rng, self.mean) @ self.factor.T


class GaussianMixture(nn.Module):
    """E(x) = −log Σ_k w_k N(x; m_k, s_k² I) with weights that need not sum to one: log Z = log Σ w_k.

    Args:
        means: `(K, d)`.
        scales: standard deviations, one number or `(K,)`.
        log_weights: raw log-weights `(K,)`, equal by default.
        trainable: whether means and log-weights (not the scales) are parameters.

    >>> E = GaussianMixture(torch.tensor([[-3.0], [3.0]]), log_weights=torch.tensor([0.0, 1.0]).log1p())
    >>> round(E.log_partition().item(), 4)  # log(1 + 2)
    1.0986
    """

    means: Tensor
    scales: Tensor
    log_weights: Tensor

    def __init__(
        self,
        means: Tensor,
        scales: Tensor | float = 1.0,
        log_weights: Tensor | None = None,
        trainable: bool = False,
    ):
        super().__init__()
        require(means.dim() == 2, "means", "of shape (K, d)", tuple(means.shape))
        K = means.shape[0]
        scales = torch.as_tensor(scales, dtype=means.dtype, device=means.device).expand(K)
        log_weights = means.new_zeros(K) if log_weights is None else log_weights.to(means.dtype)
        require(log_weights.shape == (K,), "log_weights", f"of shape ({K},)", tuple(log_weights.shape))
        require(bool((scales > 0).all()), "scales", "positive", scales.tolist())
        _store(self, trainable, means=means, log_weights=log_weights)
        _store(self, False, scales=scales)
        self.event_shape = (means.shape[1],)

    def _logits(self, x: Tensor) -> Tensor:
        """log w_k + log N(x; m_k, s_k²), shape (B, K), with |x−m|² expanded so that no (B, K, d) is made."""
        precision = self.scales**-2
        centre = self.means.detach().mean(0)  # keeps the digits of data far from the origin
        x, means = x - centre, self.means - centre
        square = x.square().sum(1, keepdim=True) - 2 * x @ means.T + means.square().sum(1)
        constant = self.log_weights - x.shape[1] * (self.scales.log() + 0.5 * LOG_2PI)
        return constant - 0.5 * precision * square

    def forward(self, x: Tensor) -> Tensor:
        return -torch.logsumexp(self._logits(x), 1)

    def value_and_grad(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Closed-form energies and gradients: ∇E = Σ_k r_k(x)(x − m_k)/s_k² with responsibilities r."""
        logits = self._logits(x)
        pull = torch.softmax(logits, 1) * self.scales**-2
        return -torch.logsumexp(logits, 1), x * pull.sum(1, keepdim=True) - pull @ self.means

    def log_partition(self) -> Tensor:
        """log Σ w_k."""
        return torch.logsumexp(self.log_weights, 0)

    def mode_weights(self) -> Tensor:
        """Normalised weights of the components, `(K,)`."""
        return torch.softmax(self.log_weights.detach(), 0)

    @torch.no_grad()
    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` exact draws."""
        k = torch.multinomial(self.mode_weights(), n, replacement=True, generator=rng)
        return self.means[k] + self.scales[k, None] * _randn(n, self.means.shape[1], rng, self.means)


class DoubleWell(nn.Module):
    """Two wells at ±`separation` along x₁, unit Gaussian elsewhere.

    E(x) = height·((x₁/separation)² − 1)² + tilt·x₁ + ½ Σ_{i>1} x_i². log Z by quadrature in x₁.
    """

    def __init__(self, dim: int = 1, separation: float = 2.0, height: float = 6.0, tilt: float = 0.0):
        super().__init__()
        require_count("dim", dim)
        require_positive("separation", separation)
        require_positive("height", height)
        self.separation, self.height, self.tilt = separation, height, tilt
        self.event_shape = (dim,)

    def _along(self, x: Tensor) -> Tensor:
        return self.height * ((x / self.separation).square() - 1).square() + self.tilt * x

    def forward(self, x: Tensor) -> Tensor:
        return self._along(x[:, 0]) + 0.5 * x[:, 1:].square().sum(1)

    def _grid(self) -> Tensor:
        # Beyond the lowest point, at most 1.2 + 0.63·pull away, the quartic rises by at least 40 to the edge.
        pull = (abs(self.tilt) * self.separation / self.height) ** (1 / 3)
        edge = self.separation * (2 + (40 / self.height) ** 0.25 + pull)
        return edge / 100_000 * torch.arange(-100_000, 100_001, dtype=torch.float64)

    def log_partition(self) -> Tensor:
        """Trapezoid rule in x₁ (spectrally accurate here), closed form in the rest."""
        t = self._grid()
        return (
            torch.logsumexp(-self._along(t), 0)
            + torch.log(t[1] - t[0])
            + 0.5 * (self.event_shape[0] - 1) * LOG_2PI
        )

    def right_weight(self) -> float:
        """Probability of x₁ > 0."""
        t = self._grid()
        p = torch.softmax(-self._along(t), 0)
        return float(p[t > 0].sum() + 0.5 * p[t == 0].sum())

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` draws: inverse distribution function in x₁."""
        t = self._grid().to(rng.device)
        cdf = torch.softmax(-self._along(t), 0).cumsum(0)
        u = torch.rand(n, generator=rng, device=rng.device, dtype=torch.float64)
        first = t[torch.searchsorted(cdf, u).clamp(max=len(t) - 1)].float()[:, None]
        return torch.cat([first, _randn(n, self.event_shape[0] - 1, rng, first)], 1)


class Banana(nn.Module):
    """E(x) = x₁²/(2σ²) + ½(x₂ − b(x₁² − σ²))² + ½Σ_{i>2}x_i²; log Z = ½d·log 2π + log σ."""

    def __init__(self, dim: int = 2, width: float = 2.0, bend: float = 0.5):
        super().__init__()
        require_count("dim", dim, 2)
        require_positive("width", width)
        self.width, self.bend = width, bend
        self.event_shape = (dim,)

    def forward(self, x: Tensor) -> Tensor:
        rest = x[:, 2:].square().sum(1)
        unbent = x[:, 1] - self.bend * (x[:, 0].square() - self.width**2)
        return 0.5 * ((x[:, 0] / self.width).square() + unbent.square() + rest)

    def log_partition(self) -> Tensor:
        """Closed form: the bend preserves volume."""
        return torch.tensor(0.5 * self.event_shape[0] * LOG_2PI + math.log(self.width), dtype=torch.float64)

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` exact draws."""
        x = torch.randn((n, self.event_shape[0]), generator=rng, device=rng.device)
        x[:, 0] *= self.width
        x[:, 1] += self.bend * (x[:, 0].square() - self.width**2)
        return x


class Funnel(nn.Module):
    """Neal's funnel: v = x₁ ~ N(0, σ²), x_i | v ~ N(0, eᵛ), unnormalised: log Z = ½d·log 2π + log σ."""

    def __init__(self, dim: int = 2, width: float = 3.0):
        super().__init__()
        require_count("dim", dim, 2)
        require_positive("width", width)
        self.width = width
        self.event_shape = (dim,)

    def forward(self, x: Tensor) -> Tensor:
        v, rest = x[:, 0], x[:, 1:]
        return 0.5 * ((v / self.width).square() + rest.square().sum(1) * torch.exp(-v) + rest.shape[1] * v)

    def log_partition(self) -> Tensor:
        """Closed form."""
        return torch.tensor(0.5 * self.event_shape[0] * LOG_2PI + math.log(self.width), dtype=torch.float64)

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` exact draws."""
        x = torch.randn((n, self.event_shape[0]), generator=rng, device=rng.device)
        x[:, 0] *= self.width
        x[:, 1:] *= torch.exp(0.5 * x[:, :1])
        return x


def two_modes(
    distance: float, weights: Sequence[float], dim: int, dtype: torch.dtype = torch.float32
) -> GaussianMixture:
    """Two unit Gaussians `distance` apart along the first axis, with the given weights."""
    if len(weights) != 2 or min(weights) <= 0:
        raise InputError(f"weights: must be two positive numbers, got {weights!r}")
    means = torch.zeros(2, dim, dtype=dtype)
    means[0, 0], means[1, 0] = -distance / 2, distance / 2
    return GaussianMixture(means, log_weights=torch.tensor(weights, dtype=dtype).log())
