"""Hamiltonian Monte Carlo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from metastable.core.errors import ConfigError, require, require_count, require_length, short
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
        mass_matrix: all of M, `(d, d)` over the flattened event, symmetric and positive definite; in the place of
            `mass`. With M the inverse covariance of the target, directions of every width are alike.
    """

    leapfrog: int = 10
    mass: float | tuple = 1.0
    mass_matrix: tuple | None = None

    name: ClassVar[str] = "hmc"
    target_acceptance: ClassVar[float] = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("hmc.leapfrog", self.leapfrog)
        if isinstance(self.mass, Tensor):
            object.__setattr__(self, "mass", _nested_tuple(self.mass.tolist()))
        mass = _numbers("hmc.mass", self.mass)
        if not mass.numel() or not bool(((mass > 0) & mass.isfinite()).all()):
            raise ConfigError("hmc.mass", f"must be positive, got {self.mass!r}")
        for extreme in (float(mass.min()), float(mass.max())):
            require_length("hmc.mass", extreme)
        if self.mass_matrix is not None:
            require(self.mass == 1.0, "hmc.mass", "left at 1 where mass_matrix is given", self.mass)
            matrix = _numbers("hmc.mass_matrix", self.mass_matrix)
            object.__setattr__(self, "mass_matrix", _nested_tuple(matrix.tolist()))
            require_positive_definite("hmc.mass_matrix", matrix)

    @property
    def gradients_per_step(self) -> int:
        """One per leapfrog step."""
        return self.leapfrog

    def _mass(self, x: Tensor) -> Tensor:
        if isinstance(self.mass, (int, float)):
            return x.new_full((), self.mass)  # filled on the device: nothing waits for the host
        mass, event = x.new_tensor(self.mass), tuple(x.shape[1:])
        rule = f"one number or one per coordinate, of shape {event}; a full matrix is hmc.mass_matrix"
        require(tuple(mass.shape) == event, "hmc.mass", rule, f"shape {tuple(mass.shape)}")
        return mass

    @cached_property
    def masses(self) -> tuple[float, float]:
        """The least and the largest mass, of all directions."""
        if self.mass_matrix is None:
            each = _numbers("hmc.mass", self.mass)
        else:
            each = torch.linalg.eigvalsh(_numbers("hmc.mass_matrix", self.mass_matrix))
        return float(each.min()), float(each.max())

    @cached_property
    def _matrices(self) -> tuple[Tensor, Tensor]:
        """L with M = LLᵀ, and M⁻¹, float64."""
        factor = torch.linalg.cholesky(torch.as_tensor(self.mass_matrix, dtype=torch.float64))
        return factor, torch.cholesky_inverse(factor)

    def init(self, energy: Energy, x: Tensor) -> ChainState:
        """Energies and gradients at `x`."""
        return ChainState(x, *energy_and_grad(energy, x))

    def step(
        self, energy: Energy, state: ChainState, noise: Noise, step_size: Tensor | float
    ) -> tuple[ChainState, Info]:
        """Draw a momentum, follow it, accept or stay."""
        if self.mass_matrix is not None:
            return self._step_with_matrix(energy, state, noise, step_size)
        mass = self._mass(state.x)
        p0 = mass.sqrt() * noise.normal
        new, p1 = leapfrog(energy, state, p0, mass, step_size, self.leapfrog)
        kinetic = 0.5 * row_sum((p0.square() - p1.square()) / mass)
        return accept(state, new, state.energy - new.energy + kinetic, noise.uniform)

    def _step_with_matrix(
        self, energy: Energy, state: ChainState, noise: Noise, step_size: Tensor | float
    ) -> tuple[ChainState, Info]:
        """The same with p ~ N(0, M) as a Cholesky factor makes it, and velocities M⁻¹p."""
        factor, inverse = (part.to(state.x) for part in self._matrices)
        d = state.x[0].numel()
        require(
            len(factor) == d, "hmc.mass_matrix", f"({d}, {d}) for events of {d} numbers", tuple(factor.shape)
        )

        def velocity(p: Tensor) -> Tensor:
            return (p.flatten(1) @ inverse).view_as(p)

        p0 = (noise.normal.flatten(1) @ factor.T).view_as(state.x)
        new, p1 = leapfrog(energy, state, p0, factor, step_size, self.leapfrog, velocity)
        kinetic = 0.5 * row_sum(p0 * velocity(p0) - p1 * velocity(p1))
        return accept(state, new, state.energy - new.energy + kinetic, noise.uniform)


def require_positive_definite(field: str, matrix: Tensor) -> None:
    """Refuse what is no symmetric matrix with positive eigenvalues; the smallest is named.

    >>> require_positive_definite("mass_matrix", torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
    Traceback (most recent call last):
    ...
    metastable.core.errors.ConfigError: mass_matrix: must be positive definite, got a smallest eigenvalue of -1
    """
    square = matrix.dim() == 2 and matrix.shape[0] == matrix.shape[1]
    require(square, field, "a square matrix (d, d)", tuple(matrix.shape))
    symmetric = bool(matrix.isfinite().all()) and torch.allclose(matrix, matrix.T, rtol=1e-9, atol=1e-12)
    require(symmetric, field, "finite and symmetric", matrix.tolist())
    smallest = float(torch.linalg.eigvalsh(matrix.double()).min())
    if smallest <= 1e-12 * float(matrix.abs().max()):
        raise ConfigError(field, f"must be positive definite, got a smallest eigenvalue of {smallest:.4g}")


def leapfrog(
    energy: Energy,
    state: ChainState,
    p: Tensor,
    mass: Tensor,
    step_size: Tensor | float,
    steps: int,
    velocity: Callable[[Tensor], Tensor] | None = None,
) -> tuple[ChainState, Tensor]:
    """`steps` leapfrog steps from (x, p); reversible: running it from (x′, −p′) returns to (x, −p).

    Velocities are p over the diagonal `mass`, or what `velocity` makes of p.
    """
    for _ in range(steps):
        p = p - 0.5 * step_size * state.grad
        x = state.x + step_size * (p / mass if velocity is None else velocity(p))
        state = ChainState(x, *energy_and_grad(energy, x))
        p = p - 0.5 * step_size * state.grad
    return state, p


def _numbers(field: str, value: Any) -> Tensor:
    """`value` in float64; what is no array of numbers is refused."""
    try:
        return torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(field, f"must be numbers, in rows of one length, got {short(value)}") from error


def _nested_tuple(value: list | float) -> tuple | float:
    return tuple(_nested_tuple(v) for v in value) if isinstance(value, list) else value
