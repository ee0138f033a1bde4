"""A normalised density in other units: the same law, with the Jacobian."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.parts import home_of
from metastable.core.protocols import StepwiseSolved, carry, provides
from metastable.core.units import Coordinates

from .given import finely


class _InUnits(nn.Module):
    """Base: a density, and the units on the other side.

    Attributes:
        inner: the density.
        coordinates: the units of training.
    """

    def __init__(self, inner: Any, coordinates: Coordinates):
        super().__init__()
        self.inner, self.coordinates = inner, coordinates
        self.event_shape = tuple(inner.event_shape)
        carry(inner, self, ("context_shape", "biased"))


class DensityInDataUnits(_InUnits):
    """p(x | given) of the data's own units, from a density that was trained in others.

    log p(x) = log p(u) + log|det A| with u = (x − m)A.

    `inner` is the density of u.
    """

    def sample(self, n: int, rng: torch.Generator, *given: Tensor, **options: Any) -> Tensor:
        """Draws in the data's units, float64: `(n, *event)`, or `(B, n, *event)` for B contexts."""
        with torch.no_grad():
            drawn = self.inner.sample(n, rng, *map(self._contexts, given), **options)
        return self.coordinates.events.inverse(drawn)

    def log_prob(self, x: Tensor, *given: Tensor, **options: Any) -> Tensor:
        """Normalised log-density in the data's units."""
        u = self.coordinates.events.forward(x).to(home_of(self.inner))
        return (
            self.inner.log_prob(u, *map(self._contexts, given), **options) + self.coordinates.events.log_det
        )

    def _contexts(self, given: Tensor) -> Tensor:
        units = self.coordinates.given
        return (given if units is None else units.forward(given)).to(home_of(self.inner))


class SolvedInDataUnits(DensityInDataUnits):
    """The same for a flow or diffusion, whose ODE can be solved in other numbers of steps."""

    def __init__(self, inner: Any, coordinates: Coordinates):
        super().__init__(inner, coordinates)
        carry(inner, self, ("steps", "scored"))

    def with_steps(self, steps: int, scored: int | None = None) -> SolvedInDataUnits:
        """As that of the density inside."""
        return SolvedInDataUnits(self.inner.with_steps(steps, scored), self.coordinates)

    def sample_and_log_prob(
        self, n: int, rng: torch.Generator, *given: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Draws with their log-densities, from one solution of the ODE."""
        u, log_prob = self.inner.sample_and_log_prob(n, rng, *map(self._contexts, given), **options)
        return self.coordinates.events.inverse(u), log_prob + self.coordinates.events.log_det

    def finely(self) -> SolvedInDataUnits:
        """As that of the density inside."""
        return SolvedInDataUnits(finely(self.inner), self.coordinates)


def density_in_data_units(inner: Any, coordinates: Coordinates) -> DensityInDataUnits:
    """A density that was trained in these units, in the data's own."""
    return (SolvedInDataUnits if provides(inner, StepwiseSolved) else DensityInDataUnits)(inner, coordinates)


class DensityInTrainingUnits(_InUnits):
    """The other way round: p(u) from a density of x, so that walkers can start from it.

    `inner` is the density of x.
    """

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """Draws of u, `(n, *event)`."""
        with torch.no_grad():
            drawn = self.inner.sample(n, rng)
        return self.coordinates.events.forward(drawn).to(drawn.dtype)

    def log_prob(self, u: Tensor) -> Tensor:
        """Normalised log-density of u, `(B, *event)` to `(B,)`."""
        units = self.coordinates.events
        return self.inner.log_prob(units.inverse(u).to(u.dtype)) - units.log_det
