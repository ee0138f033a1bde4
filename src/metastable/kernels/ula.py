"""The unadjusted Langevin algorithm, with the transition density it really has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from metastable.core.errors import require_length
from metastable.core.random import normal_like
from metastable.core.types import Energy, energy_and_grad, row_dot, row_sum

from .base import ChainState, Info, Noise, StepKernel


@dataclass(frozen=True)
class ULA(StepKernel):
    """x′ = x − h∇E(x) + σξ with σ = √(2h) unless `noise` says otherwise.

    Attributes:
        step_size: h.
        noise: standard deviation σ of the noise. The "SGLD trick" of a large drift with little noise is
            `noise` below √(2h): such a chain samples exp(−E/T) with T = σ²/(2h), which `temperature` says.
        drift_clip: each coordinate of h∇E is cut to ±`drift_clip`. The chain then samples no closed form;
            Jarzynski weights stay exact because they use `log_transition`, the density of the cut move.

    >>> ULA(step_size=1.0, noise=0.01).temperature
    5e-05
    """

    noise: float | None = None
    drift_clip: float | None = None

    name: ClassVar[str] = "ula"
    target_acceptance: ClassVar[float] = 0.9
    invariant: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise is not None:
            require_length("ula.noise", self.noise)
        if self.drift_clip is not None:
            require_length("ula.drift_clip", self.drift_clip)

    @property
    def temperature(self) -> float:
        """σ²/(2h): 1 for matching noise."""
        return 1.0 if self.noise is None else self.noise**2 / (2 * self.step_size)

    def sigma(self, step_size: Tensor | float | None = None) -> Tensor | float:
        """Standard deviation of the noise of one step."""
        if self.noise is not None:
            return self.noise
        h = self.step_size if step_size is None else step_size
        return torch.sqrt(2 * h) if isinstance(h, Tensor) else math.sqrt(2 * h)

    def drift(self, grad: Tensor, step_size: Tensor | float | None = None) -> Tensor:
        """The deterministic part of the move, h∇E after clipping."""
        move = (self.step_size if step_size is None else step_size) * grad
        return move if self.drift_clip is None else move.clamp(-self.drift_clip, self.drift_clip)

    def move(self, x: Tensor, grad: Tensor, normal: Tensor) -> Tensor:
        """The new position, from a gradient that is already known."""
        if self.drift_clip is None:  # two passes over the walkers instead of four
            return x.sub(grad, alpha=self.step_size).add_(normal, alpha=float(self.sigma()))
        return x - self.drift(grad) + self.sigma() * normal

    def log_transition(self, x: Tensor, grad: Tensor, y: Tensor) -> Tensor:
        """log density of moving from `x` (with gradient `grad`) to `y`, up to the constant of the noise.

        −|y − x + drift(x)|²/(2σ²), shape `(B,)`; (30) of the Jarzynski paper when σ² = 2h.
        """
        return -row_sum((y - x + self.drift(grad)).square()) / (2 * float(self.sigma()) ** 2)

    def log_weight_increment(
        self, normal: Tensor, energy: Tensor, grad: Tensor, new_energy: Tensor, new_grad: Tensor
    ) -> Tensor:
        """log [e^{−U′(y)} q′(x | y)] − log [e^{−U(x)} q(y | x)] for the move y = x − b + σξ, shape `(B,)`.

        U and q belong to the parameters the move was made with, U′ and q′ to those it is weighed with; where
        they are the same this is the log of the Metropolis–Hastings ratio. With drifts b and b′, completing
        the squares leaves U − U′ + (ξ − s/(2σ))·s/σ, s = b + b′: no large terms cancel, and for σ² = 2h
        without clipping it is α_k(x, y) − α_{k+1}(y, x) of (5) and (6).

        Args:
            normal: ξ of the move, `(B, *event)`.
            energy: U(x), `(B,)`.
            grad: ∇U(x), `(B, *event)`.
            new_energy: U′(y).
            new_grad: ∇U′(y).
        """
        sigma = float(self.sigma())
        linear = self.drift_clip is None
        s = self.drift(grad + new_grad) if linear else self.drift(grad) + self.drift(new_grad)
        return energy - new_energy + row_sum(normal.sub(s, alpha=0.5 / sigma).mul_(s)) / sigma

    def draw(self, x: Tensor, rng: torch.Generator, energy: Energy | None = None) -> Noise:
        """Normals only: nothing is accepted or rejected."""
        return Noise(normal_like(x, rng), x.new_empty(0))

    def init(self, energy: Energy, x: Tensor) -> ChainState:
        """Positions only: k steps then cost k gradients, not k + 1."""
        return ChainState(x, x.new_empty(0), x.new_empty(0))

    def step(
        self, energy: Energy, state: ChainState, noise: Noise, step_size: Tensor | float
    ) -> tuple[ChainState, Info]:
        """Evaluate, then move."""
        x = state.x
        grad = energy_and_grad(energy, x).grad
        y = x - self.drift(grad, step_size) + self.sigma(step_size) * noise.normal
        displacement = y - x
        info = Info(torch.ones_like(x[:, :1].flatten(1)[:, 0]), row_dot(displacement, displacement), grad)
        return ChainState(y, state.energy, state.grad), info
