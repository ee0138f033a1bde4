"""Metropolis–Hastings with any proposal (Hastings 1970; Section 2.1.3.1 of Xu's thesis, 2022).

| symbol | here |
|---|---|
| π(x) | exp(−`energy`(x)) |
| q(x* given x) | `proposal.draw`, `proposal.log_density` |
| 𝒜(x*, x) | `acceptance` |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from metastable.core.configure import build_tagged
from metastable.core.errors import ConfigError, require, require_length
from metastable.core.protocols import NoiseDrawing, provides
from metastable.core.random import normal_like, uniform_rows
from metastable.core.types import Energy, Proposal, is_discrete, precise, row_sum

from .base import ChainState, Info, Kernel, Noise
from .metropolis import accept


@runtime_checkable
class Transition(Protocol):
    """A proposal q(x* | x). It may also bring its own random numbers, `noise(x, rng) → Tensor`."""

    def draw(self, x: Tensor, noise: Tensor) -> Tensor:
        """x* from x, `(B, *event)`, and the noise: standard normals of the same shape, unless it brings its own."""
        ...

    def log_density(self, x: Tensor, y: Tensor) -> Tensor:
        """log q(y | x), `(B,)`, up to a constant that depends on neither."""
        ...


@dataclass(frozen=True)
class RandomWalk:
    """x* = x + `scale`·ξ: symmetric."""

    scale: float = 0.1

    name: ClassVar[str] = "random-walk"

    def __post_init__(self) -> None:
        require_length("random-walk.scale", self.scale)

    def draw(self, x: Tensor, noise: Tensor) -> Tensor:
        """A Gaussian step."""
        return x + self.scale * noise

    def log_density(self, x: Tensor, y: Tensor) -> Tensor:
        """−|y − x|²/(2·scale²)."""
        return -row_sum((y - x).square()) / (2 * self.scale**2)


@dataclass(frozen=True)
class Flips:
    """Each unit, coded −1 or +1, changes its sign with `probability`: symmetric."""

    probability: float = 0.1

    name: ClassVar[str] = "flips"
    discrete: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(0 < self.probability < 1, "flips.probability", "between 0 and 1", self.probability)

    def noise(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Uniform numbers, one for each unit."""
        return torch.rand(x.shape, generator=rng, device=x.device, dtype=x.dtype)

    def draw(self, x: Tensor, noise: Tensor) -> Tensor:
        """Flip where the uniform number lies below the probability."""
        return torch.where(noise < self.probability, -x, x)

    def log_density(self, x: Tensor, y: Tensor) -> Tensor:
        """Flipped units times log(p/(1 − p)); the rest depends on the number of units only."""
        odds = math.log(self.probability / (1 - self.probability))
        return odds * (x != y).to(x.dtype).flatten(1).sum(1)


class Independent:
    """x* ~ q whatever x is: the independence sampler, from any proposal of the library."""

    def __init__(self, proposal: Proposal):
        self.proposal = proposal
        self.discrete = is_discrete(proposal)

    def noise(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Draws of q, which are the candidates."""
        return self.proposal.sample(len(x), rng).to(x.dtype)

    def draw(self, x: Tensor, noise: Tensor) -> Tensor:
        """The candidates."""
        return noise

    def log_density(self, x: Tensor, y: Tensor) -> Tensor:
        """log q(y)."""
        return self.proposal.log_prob(y)


TRANSITIONS: dict[str, type] = {t.name: t for t in (RandomWalk, Flips)}


@dataclass(frozen=True)
class MetropolisHastings(Kernel):
    """A candidate x* ~ q(x* | x), accepted with 𝒜 = min(1, π(x*) q(x | x*) / (π(x) q(x* | x))), (2.2).

    The Hastings factor q(x | x*)/q(x* | x) is always computed, so a proposal need not be symmetric; it is one
    where `log_density` is symmetric. Candidates of density zero are refused.

    Attributes:
        proposal: a `Transition` (an object with `draw(x, noise)` and `log_density(x, y)`), a `Proposal` of the
            library (`ms.proposals.Gaussian(…)`), which becomes an independence sampler, a name (`random-walk`,
            `flips`) or a table with `name` and settings; a number is the scale of a Gaussian random walk.

    >>> kernel = MetropolisHastings(0.5)
    >>> kernel.transition
    RandomWalk(scale=0.5)
    """

    proposal: Any = 0.1

    name: ClassVar[str] = "metropolis-hastings"

    def __post_init__(self) -> None:
        object.__setattr__(self, "_transition", transition_of(self.proposal, f"{self.name}.proposal"))

    @property
    def transition(self) -> Transition:
        """The proposal as an object that draws and scores."""
        return self._transition  # pyright: ignore

    @property
    def discrete(self) -> bool:
        """Whether the proposal says that it stays on units coded −1 and +1."""
        return is_discrete(self.transition)

    @property
    def gradients_per_step(self) -> int:
        """None; an energy a step."""
        return 0

    def evaluations(self, steps: int, energy: Energy | None = None, x: Tensor | None = None) -> int:
        """The start, and each candidate."""
        return steps + 1

    def init(self, energy: Energy, x: Tensor) -> ChainState:
        """Energies at `x`."""
        with torch.no_grad():
            return ChainState(x, precise(energy(x)), x.new_empty(0))

    def draw(self, x: Tensor, rng: torch.Generator, energy: Energy | None = None) -> Noise:
        """What the proposal needs in `normal`, and the uniforms of the accept step."""
        own = provides(self.transition, NoiseDrawing)
        with torch.no_grad():
            noise = self.transition.noise(x, rng) if own else normal_like(x, rng)  # pyright: ignore
            return Noise(noise, uniform_rows(x, rng))

    def step(
        self, energy: Energy, state: ChainState, noise: Noise, step_size: Tensor | float
    ) -> tuple[ChainState, Info]:
        """Propose, evaluate, accept or stay."""
        x, q = state.x, self.transition
        y = q.draw(x, noise.normal)
        new = ChainState(y, precise(energy(y)), state.grad)
        log_ratio = state.energy - new.energy + q.log_density(y, x) - q.log_density(x, y)  # (2.2)
        return accept(state, new, log_ratio, noise.uniform)


def transition_of(given: Any, field: str) -> Transition:
    """A transition from itself, a proposal, a name, a table or the scale of a random walk."""
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return RandomWalk(given)
    if isinstance(given, (str, Mapping)):
        return build_tagged(TRANSITIONS, given, field)
    if isinstance(given, type) or not isinstance(given, (Transition, Proposal)):
        raise ConfigError(
            field,
            "must have draw(x, noise) and log_density(x, y), or be a proposal with sample and log_prob, a name "
            f"({', '.join(TRANSITIONS)}) or the scale of a random walk, got {given!r}",
        )
    return given if isinstance(given, Transition) else Independent(given)
