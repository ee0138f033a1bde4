"""Hamiltonian Monte Carlo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from metastable.core.errors import ConfigError, require_count
from metastable.core.types import Energy, energy_and_grad, row_sum

from .base import ChainState, Info, Noise, StepKernel
from .metropolis import accept


@dataclass(frozen=True)
class HMC(StepKernel):
    """`leapfrog` steps of size ε on H(x, p) = E(x) + ½ pᵀM⁻¹p, then accept with min(1, e^{−ΔH}).

    Attributes:
        step_size: ε, the leapfrog step (not Langevin's h: one leapfrog step is MALA with h = ε²/2).
        leapfrog: number of leapfrog steps per move.
        mass: the diagonal of M, one number or one per coordinate (a nested tuple of the event's shape).
    """

    leapfrog: int = 10
    mass: float | tuple = 1.0

    name: ClassVar[str] = "hmc"
    target_acceptance: ClassVar[float] = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("hmc.leapfrog", self.leapfrog)
        if isinstance(self.mass, Tensor):
            object.__setattr__(self, "mass", _nested_tuple(self.mass.tolist()))
        mass = torch.as_tensor(self.mass, dtype=torch.float64)
        if not bool(((mass > 0) & mass.isfinite()).all()):
            raise ConfigError("hmc.mass", f"must be positive, got {self.mass!r}")

    @property
    def gradients_per_step(self) -> int:
        """One per leapfrog step."""
        return self.leapfrog

    def _mass(self, x: Tensor) -> Tensor:
        if isinstance(self.mass, (int, float)):
            return x.new_full((), self.mass)  # filled on the device: nothing waits for the host
        return x.new_tensor(self.mass)

    def init(self, energy: Energy, x: Tensor) -> ChainState:
        """Energies and gradients at `x`."""
        return ChainState(x, *energy_and_grad(energy, x))

    def step(
        self, energy: Energy, state: ChainState, noise: Noise, step_size: Tensor | float
    ) -> tuple[ChainState, Info]:
        """Draw a momentum, follow it, accept or stay."""
        mass = self._mass(state.x)
        p0 = mass.sqrt() * noise.normal
        new, p1 = leapfrog(energy, state, p0, mass, step_size, self.leapfrog)
        kinetic = 0.5 * row_sum((p0.square() - p1.square()) / mass)
        return accept(state, new, state.energy - new.energy + kinetic, noise.uniform)


def leapfrog(
    energy: Energy, state: ChainState, p: Tensor, mass: Tensor, step_size: Tensor | float, steps: int
) -> tuple[ChainState, Tensor]:
    """`steps` leapfrog steps from (x, p); reversible: running it from (x′, −p′) returns to (x, −p)."""
    for _ in range(steps):
        p = p - 0.5 * step_size * state.grad
        x = state.x + step_size * p / mass
        state = ChainState(x, *energy_and_grad(energy, x))
        p = p - 0.5 * step_size * state.grad
    return state, p


def _nested_tuple(value: list | float) -> tuple | float:
    return tuple(_nested_tuple(v) for v in value) if isinstance(value, list) else value
