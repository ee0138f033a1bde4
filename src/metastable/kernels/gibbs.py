"""Gibbs sampling over units coded −1 and +1 (Geman and Geman 1984; Algorithm 2.1 of Xu's thesis, 2022).

An energy that knows its conditionals offers a whole sweep at once (`Sweeps`): the two layers of a restricted
Boltzmann machine, the fields of a Boltzmann machine. Any other discrete energy is swept unit by unit through
energy differences, p(s_i flips | rest) = 1/(1 + exp(E(flipped) − E(s))).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from metastable.core.errors import InputError, UnsupportedError, require_choice
from metastable.core.protocols import SweepCounted, Sweeping, provides
from metastable.core.random import normal_like
from metastable.core.types import Energy, is_discrete, precise, row_dot

from .base import ChainState, Info, Kernel, Noise

ORDERS = ("fixed", "random")


class Sweeps(Protocol):
    """An energy over {−1, +1}^d that draws its own conditionals.

    Attributes:
        sweep_uniforms: how many uniform numbers one sweep of one chain needs.
    """

    sweep_uniforms: int

    def sweep(self, x: Tensor, uniform: Tensor, free: Tensor | None, order: Tensor | None) -> Tensor:
        """Every unit of `x`, `(B, *event)`, drawn once from its conditional.

        Args:
            x: −1 and +1.
            uniform: on [0, 1), `(B, sweep_uniforms)`.
            free: bool, `(d,)` or `(B, d)`: units that may move; None for all.
            order: the order in which units are drawn, `(d,)`; of no meaning where they are drawn in blocks.
        """
        ...


@dataclass(frozen=True)
class Gibbs(Kernel):
    """One step is one sweep: every unit is drawn once from its conditional given the others.

    It has no step size and rejects nothing, so `acceptance` is 1 and `moved` is four times the number of units
    that changed sign. Blocks of units that do not interact are drawn together where the energy knows them.

    A sweep that the energy draws itself counts as one evaluation (two matrix products for a restricted
    Boltzmann machine, what its energy with gradient costs); a sweep by energy differences as one for each unit.

    Attributes:
        order: `fixed` visits units in their order, `random` in a new one at each sweep, the same for all chains.
            Both leave the model invariant.
        clamped: which units never move, bools in the event's shape (a nested tuple or a tensor); None for none.

    >>> Gibbs(clamped=torch.tensor([True, False, False])).clamped
    (True, False, False)
    """

    order: str = "fixed"
    clamped: tuple | None = None

    name: ClassVar[str] = "gibbs"

    def __post_init__(self) -> None:
        require_choice("gibbs.order", self.order, ORDERS)
        if isinstance(self.clamped, Tensor):
            object.__setattr__(self, "clamped", _nested_tuple(self.clamped.bool().tolist()))

    @property
    def discrete(self) -> bool:
        """It flips signs."""
        return True

    @property
    def gradients_per_step(self) -> int:
        """None."""
        return 0

    def evaluations(self, steps: int, energy: Energy | None = None, x: Tensor | None = None) -> int:
        """One for each sweep, or for each unit of each sweep and the start where the energy has no sweep."""
        if energy is None or x is None or provides(energy, Sweeping):
            return steps
        return steps * math.prod(x.shape[1:]) + 1

    def init(self, energy: Energy, x: Tensor) -> ChainState:
        """Positions, and energies where a sweep goes by their differences."""
        if not is_discrete(energy):
            raise UnsupportedError(
                "kernel: 'gibbs' moves units coded −1 and +1, and this energy does not say that it is over such "
                "units; set its attribute discrete = True, or use MALA or HMC"
            )
        self._check_clamped(x)
        with torch.no_grad():
            values = x.new_empty(0) if provides(energy, Sweeping) else precise(energy(x))
        return ChainState(x, values, x.new_empty(0))

    def _check_clamped(self, x: Tensor) -> None:
        if self.clamped is not None and torch.tensor(self.clamped).shape != x.shape[1:]:
            shape = tuple(torch.tensor(self.clamped).shape)
            raise InputError(f"gibbs.clamped: must have the event's shape {tuple(x.shape[1:])}, got {shape}")

    def draw(self, x: Tensor, rng: torch.Generator, energy: Energy | None = None) -> Noise:
        """`uniform`: one number for each unit that a sweep draws. `normal`: their ranks are the order."""
        d = math.prod(x.shape[1:])
        width = energy.sweep_uniforms if provides(energy, SweepCounted) else d  # pyright: ignore
        uniform = torch.rand((len(x), width), generator=rng, device=x.device, dtype=x.dtype)
        return Noise(normal_like(x.new_empty(d if self.order == "random" else 0), rng), uniform)

    def step(
        self, energy: Energy, state: ChainState, noise: Noise, step_size: Tensor | float
    ) -> tuple[ChainState, Info]:
        """One sweep."""
        x, values = state.x, state.energy
        free = None if self.clamped is None else ~torch.tensor(self.clamped, device=x.device).flatten()
        order = torch.argsort(noise.normal) if self.order == "random" else None
        own = getattr(energy, "sweep", None)
        if own is not None:
            y = own(x, noise.uniform, free, order)
        else:
            y, values = sweep_by_differences(energy, x, values, noise.uniform, free, order)
        displacement = y - x
        info = Info(torch.ones_like(noise.uniform[:, 0]), row_dot(displacement, displacement))
        return ChainState(y, values, state.grad), info


def sweep_by_differences(
    energy: Energy, x: Tensor, values: Tensor, uniform: Tensor, free: Tensor | None, order: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Unit after unit: flip where u < 1/(1 + exp(E(flipped) − E(x))). New positions and their energies."""
    d = math.prod(x.shape[1:])
    sign = (1 - 2 * torch.eye(d, dtype=x.dtype, device=x.device)).view(d, 1, *x.shape[1:])
    for k in range(d):
        i = k if order is None else order[k]
        y = x * sign[i]
        new = precise(energy(y))
        flips = uniform[:, k] < torch.sigmoid(values - new)
        if free is not None:
            flips = flips & free[i]
        x = torch.where(flips.view(-1, *[1] * (x.dim() - 1)), y, x)
        values = torch.where(flips, new, values)
    return x, values


def _nested_tuple(value: list | bool) -> tuple | bool:
    return tuple(_nested_tuple(v) for v in value) if isinstance(value, list) else value
