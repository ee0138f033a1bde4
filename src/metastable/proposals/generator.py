"""A noisy neural sampler: easy to draw from, its density only estimated.

Section 3.1 of the self-adapting NCE thesis (adversarial contrastive estimation, A. J. Bose, H. Ling, Y. Cao,
*Adversarial contrastive estimation*, ACL 2018).

| symbol | here |
|---|---|
| z, p(z) | latents, standard normal of size `latent` |
| μ_φ, σ_φ | the two halves of `network` |
| M | `draws` |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.errors import require_count, require_positive
from metastable.core.random import generator, normal_like, seeded
from metastable.core.types import as_shape

from .encoders import moments
from .flows import LOG_2PI

LEAST_SCALE = 1e-3
"""σ_φ stays above this share of the data's spread: a narrower one has a density nobody can estimate."""


class Generator(nn.Module):
    """x = μ_φ(z) + σ_φ(z)·ε: exact draws from p_φ(x) = ∫ p_φ(x|z) p(z) dz, whose density is an estimate.

    log p_φ(x) ≈ log (1/M) Σ_m N(x; μ_φ(z_m), σ_φ²(z_m)), with latents z₁…z_M that stay the same until `redraw`.
    By Jensen's inequality its mean lies **below** log p_φ(x): a number that uses it is biased, and `biased` says
    so. `density_error` estimates by how much.

    Args:
        event_shape: shape of one event, or its dimension.
        data: rows whose mean and standard deviation scale the output, `(n, *event)`; kept in buffers.
        latent: size of z.
        hidden: widths of the network.
        draws: M.
        spread: σ_φ at the start, in units of the data's standard deviation.
        seed: of the initial weights and the first latents; nothing global is touched.

    >>> q = Generator(2, hidden=(8,), draws=64)
    >>> q.biased, q.log_prob(torch.zeros(3, 2)).shape
    (True, torch.Size([3]))
    """

    biased = True

    mean: Tensor
    scale: Tensor
    latents: Tensor

    def __init__(
        self,
        event_shape: int | Sequence[int],
        *,
        data: Tensor | None = None,
        latent: int = 4,
        hidden: Sequence[int] = (64, 64),
        draws: int = 256,
        spread: float = 0.3,
        seed: int = 0,
    ):
        super().__init__()
        require_count("generator.latent", latent)
        require_count("generator.draws", draws, 2)
        require_positive("generator.spread", spread)
        self.event_shape = as_shape(event_shape)
        mean, scale = moments(self.event_shape, data)
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        like = mean.new_empty(draws, latent)
        self.register_buffer("latents", normal_like(like, generator(seed, mean.device)))
        with seeded(seed):
            self.network = _network([latent, *hidden, 2 * len(mean)])
        last: Any = self.network[-1]
        nn.init.constant_(last.bias[len(mean) :], math.log(math.expm1(spread)))
        self.to(mean)

    @property
    def draws(self) -> int:
        """M, latents behind one density."""
        return len(self.latents)

    def conditional(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of x given z, `(B, d)` each, in standardised units."""
        centre, width = self.network(z).chunk(2, -1)
        return centre, nn.functional.softplus(width) + LEAST_SCALE

    def rsample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` draws with fresh latents, `(n, *event)`, through which gradients flow to the weights."""
        z = normal_like(self.latents[:1].expand(n, -1), rng)
        centre, width = self.conditional(z)
        white = centre + width * normal_like(centre, rng)
        return (self.mean + self.scale * white).view(n, *self.event_shape)

    @torch.no_grad()
    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` draws, `(n, *event)`."""
        return self.rsample(n, rng)

    def log_prob(self, x: Tensor) -> Tensor:
        """An estimate of the log-density, biased low, `(B, *event)` to `(B,)`."""
        return torch.logsumexp(self._log_joint(x), 1) - math.log(self.draws)

    def _log_joint(self, x: Tensor) -> Tensor:
        """log N(x_b; μ(z_m), σ²(z_m)), `(B, M)`, with the square expanded so that no (B, M, d) is made."""
        white = (x.flatten(1) - self.mean) / self.scale
        centre, width = self.conditional(self.latents)
        precision = width**-2
        square = white.square() @ precision.T - 2 * white @ (centre * precision).T
        constant = -0.5 * (centre.square() * precision).sum(1) - width.log().sum(1)
        return constant - 0.5 * square - 0.5 * len(self.mean) * LOG_2PI - self.scale.log().sum()

    @torch.no_grad()
    def density_error(self, x: Tensor) -> Tensor:
        """About how far `log_prob` lies below log p_φ at `x`, in nats, `(B,)`: −Var(w)/(2M·mean(w)²), w = p(x|z).

        The delta method: good where many latents explain a row, and a lower bound in size where few do.
        """
        share = torch.softmax(self._log_joint(x), 1)
        return -0.5 * (share.square().sum(1) - 1 / self.draws)

    @torch.no_grad()
    def redraw(self, rng: torch.Generator) -> None:
        """Fresh latents for `log_prob`, so that training does not fit the density of M particular ones."""
        self.latents.copy_(normal_like(self.latents, rng))


def _network(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(widths):
        layers += [nn.Linear(i, o), nn.SiLU()]
    return nn.Sequential(*layers[:-1])
