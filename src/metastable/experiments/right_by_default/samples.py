"""Samples that keep the weights: of a mixture, and of conditional energies that are known exactly."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from metastable.api import continue_sampling, fit
from metastable.core.random import derive, generator
from metastable.core.types import Walkers
from metastable.energies import GaussianMixture
from metastable.methods.conditional_sampling import sample_interpolating

LEFT = 0.271
"""Mass of the left mode."""
DRAWS = 8000
CONTEXTS = (-2.4, 0.0, 2.4)
"""Of which the left branch has .083, .5 and .917."""


def mixture() -> GaussianMixture:
    """Two modes on a line, of widths 0.4 and 0.6, that hardly meet."""
    return GaussianMixture(
        torch.tensor([[-2.0], [2.0]]), torch.tensor([0.4, 0.6]), torch.tensor([LEFT, 1 - LEFT]).log()
    )


def left_mass(seed: int) -> tuple[float, float]:
    """Mass left of zero after `continue_sampling` from exact draws, and the standard error it states."""
    energy = mixture()
    start = Walkers.equal(energy.sample(DRAWS, generator(derive(seed, "exact draws"))))
    drawn = continue_sampling(energy, start, DRAWS, seed=seed)
    p = torch.softmax(drawn.log_weight, 0)
    mass = float(p[drawn.x[:, 0] < 0].sum())
    return mass, math.sqrt(mass * (1 - mass) / drawn.ess)


class Known(nn.Module):
    """Base of conditional energies that need no training; the one parameter is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))


class Branches(Known):
    """E(x | c) of two branches at ∓2 of width 0.2, the left one of weight 1/(1 + e^{−c})."""

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        """`(B, K, 1)` and `(B, 1)` to `(B, K)`."""
        c = given[:, None, 0]
        left, right = (-0.5 * ((x[..., 0] - at) / 0.2).square() for at in (-2.0, 2.0))
        both = torch.logaddexp(left + nn.functional.logsigmoid(c), right + nn.functional.logsigmoid(-c))
        return 0 * self.unused - both


class Widths(Known):
    """E(x | c) of N(0, e^{2c}): a width for each context, and the same at every time where one is given."""

    def forward(self, x: Tensor, given: Tensor, t: Tensor | None = None) -> Tensor:
        """`(B, K, 1)` and `(B, 1)` to `(B, K)`."""
        return 0 * self.unused + 0.5 * (x[..., 0] * torch.exp(-given[:, None, 0])).square()


def run_of(energy: nn.Module, draw: Any, seed: int) -> Any:
    """A run of the default conditional method whose energy is exact already."""
    c = torch.empty(2000, 1).uniform_(-4, 4, generator=generator(derive(seed, "contexts")))
    x = draw(c, generator(derive(seed, "events")))
    return fit(energy, x, "ranking-nce", steps=1, given=c, seed=seed, evaluate=False)


def branch_weights(n: int, seed: int) -> list[tuple[float, float]]:
    """Weight of the left branch among samples, and the true one, for each context."""

    def draw(c: Tensor, rng: torch.Generator) -> Tensor:
        left = torch.rand(c.shape, generator=rng) < torch.sigmoid(c)
        return torch.where(left, -2.0, 2.0) + 0.2 * torch.randn(c.shape, generator=rng)

    run = run_of(Branches(), draw, seed)
    given = torch.tensor(CONTEXTS)[:, None]
    x = run.sample(n, given=given, seed=seed).x[..., 0]
    return list(zip((x < 0).double().mean(1).tolist(), torch.sigmoid(given[:, 0]).tolist(), strict=True))


def widths(n: int, seed: int) -> list[float]:
    """Standard deviation of samples over the true one, for contexts of widths e⁻⁴ to e in one call."""

    def draw(c: Tensor, rng: torch.Generator) -> Tensor:
        return torch.exp(c) * torch.randn(c.shape, generator=rng)

    run = run_of(Widths(), draw, seed)
    given = torch.tensor([[-4.0], [1.0], [0.0], [-2.0]])
    x = run.sample(n, given=given, seed=seed).x[..., 0]
    return (x.double().square().mean(1).sqrt() / torch.exp(given[:, 0])).tolist()


class Still:
    """A flow that draws N(0, e^{2c}) and does not move, for Algorithm 4 on an energy without a time."""

    event_shape = (1,)

    def sample(
        self, n: int, rng: torch.Generator, given: Tensor, until: float = 1.0, **options: Any
    ) -> Tensor:
        """`(B, n, 1)`."""
        return torch.exp(given)[:, None] * torch.randn((len(given), n, 1), generator=rng)

    def velocity(self, y: Tensor, t: Any, given: Tensor) -> Tensor:
        """Nothing moves."""
        return torch.zeros_like(y)


def interpolated_widths(n: int, seed: int) -> list[float]:
    """The same by Algorithm 4, for nine contexts of width 1 and one of 0.05."""
    given = torch.tensor([0.0] * 9 + [math.log(0.05)])[:, None]
    rng = generator(derive(seed, "interpolating"))
    x = sample_interpolating(Widths(), Still(), n, given, rng).x[..., 0]
    return (x.double().square().mean(1).sqrt() / torch.exp(given[:, 0])).tolist()
