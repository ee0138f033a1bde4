"""The spaces that events live in, and what each of them is walked, started and judged with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metastable.core.errors import ConfigError
from metastable.core.protocols import is_discrete
from metastable.kernels import HMC, MALA, Gibbs, Kernel
from metastable.proposals import Gaussian, Signs, fit_gaussian, fit_signs


@dataclass(frozen=True)
class Space:
    """One kind of events; `CONTINUOUS` and `SIGNS` are the two there are.

    Attributes:
        has_volume: whether there are volumes: densities on grids, modes, rays, gradients and walls mean something
            only then.
        sampler: the kernel that samples where none is asked for.
        warmup: steps in which that kernel's step size is adapted.
        annealer: the kernel that follows a path of temperatures: in continuous space short Hamiltonian
            trajectories, which forget their start in fewer gradients than Langevin steps.
    """

    has_volume: bool
    sampler: Kernel
    warmup: int
    annealer: Kernel

    def noise_around(self, x: Tensor) -> Gaussian | Signs:
        """A normalised density around the data: Gaussian, or independent units with the data's means."""
        return fit_gaussian(x) if self.has_volume else fit_signs(x)

    def starts(self, n: int, shape: Sequence[int], rng: torch.Generator) -> Tensor:
        """Where chains begin when nobody says: a standard normal, or random signs."""
        if self.has_volume:
            return torch.randn((n, *shape), generator=rng)
        return Signs.uniform(tuple(shape)).sample(n, rng)

    def require_volume(self, field: str, rule: str) -> None:
        """Refuse a setting that only continuous space has."""
        if not self.has_volume:
            raise ConfigError(field, rule)


CONTINUOUS = Space(True, MALA(0.1), 200, HMC(step_size=0.3, leapfrog=4))
SIGNS = Space(False, Gibbs(), 0, Gibbs())


def space_of(law: Any) -> Space:
    """Where the events of an energy or a proposal live, as its `discrete` says.

    >>> space_of(lambda x: x.sum(1)) is CONTINUOUS
    True
    """
    return SIGNS if is_discrete(law) else CONTINUOUS
