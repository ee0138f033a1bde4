"""Laws on the line with the statistics (y, y²): what `rnce-learned` is made of, and its integrals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixture:
    """The law of the data, Σ w N(mean, sd²)."""

    weights: tuple[float, ...] = (1.0,)
    means: tuple[float, ...] = (0.0,)
    sds: tuple[float, ...] = (1.0,)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, means and standard deviations."""
        weights, means, sds = (
            torch.tensor(v, dtype=torch.float64) for v in (self.weights, self.means, self.sds)
        )
        return weights, means, sds

    def sample(self, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Draws."""
        weights, means, sds = self.tensors()
        k = torch.multinomial(weights, math.prod(shape), replacement=True, generator=rng).view(shape)
        return means[k] + sds[k] * torch.randn(shape, generator=rng, dtype=torch.float64)

    def log_prob(self, y: Tensor) -> Tensor:
        """log p, of any shape."""
        weights, means, sds = self.tensors()
        return torch.logsumexp(weights.log() + log_normal(y[..., None], means, sds.log()), -1)

    def moments(self) -> Tensor:
        """(m, log s) of the normal law with the same moments: where likelihood ends."""
        weights, means, sds = self.tensors()
        mean = (weights * means).sum()
        return torch.stack([mean, 0.5 * ((weights * (sds**2 + means**2)).sum() - mean**2).log()])


def log_normal(y: Tensor, mean: Tensor | float, log_sd: Tensor) -> Tensor:
    """log N(y; mean, sd²)."""
    return -0.5 * ((y - mean) * torch.exp(-log_sd)).square() - log_sd - 0.5 * math.log(2 * math.pi)


def statistics(y: Tensor) -> Tensor:
    """ψ(y) = (y, y²), `(…, 2)`."""
    return torch.stack([y, y.square()], -1)


def grid_of(law: Mixture, side: int = 1601) -> tuple[Tensor, float]:
    """Points around the law, and what each stands for."""
    mean, log_sd = law.moments()
    y = mean + torch.exp(log_sd) * torch.linspace(-10.0, 10.0, side, dtype=torch.float64)
    return y, float(y[1] - y[0])


def fisher(law: Mixture) -> Tensor:
    """I = Cov(ψ), by quadrature."""
    y, cell = grid_of(law)
    mass, psi = cell * law.log_prob(y).exp(), statistics(y)
    mean = mass @ psi
    return (psi * mass[:, None]).T @ psi - torch.outer(mean, mean)


def slopes(law: Mixture) -> Tensor:
    """J = 𝔼[ψ′ψ′ᵀ], by quadrature."""
    y, cell = grid_of(law)
    slope = torch.stack([torch.ones_like(y), 2 * y], -1)
    return (slope * (cell * law.log_prob(y).exp())[:, None]).T @ slope


def points(law: Mixture, y: Tensor, z: Tensor, xi: Tensor) -> tuple[Tensor, Tensor]:
    """Data with their negatives, `(R, n, K + 1)`, and log p − log p_ξ of each."""
    mean, log_sd = xi[:, 0, None, None], xi[:, 1, None, None]
    every = torch.cat([y[..., None], mean + torch.exp(log_sd) * z], 2)
    return every, law.log_prob(every) - log_normal(every, mean, log_sd)
