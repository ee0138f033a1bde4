"""What training with Jarzynski-corrected walkers carries from update to update, in one process or in several."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metastable.core.processes import is_many, joined
from metastable.walkers.jarzynski import Move
from metastable.walkers.population import Population
from metastable.walkers.spread import Spread, some_of, spread, whole_of


class JarzynskiState(NamedTuple):
    """Walkers that steer θ, walkers that only follow, and the mini-batch rows of each.

    With them go log h of the next update where the step tunes itself, and the log of the factor on its learning
    rate where the pace is bounded, both `()`.
    """

    steering: Population
    following: Population | None
    rows: Tensor | None = None
    following_rows: Tensor | None = None
    log_step: Tensor | None = None
    log_factor: Tensor | None = None

    def gathered(self) -> JarzynskiState:
        """The walkers of all processes."""
        following = None if self.following is None else whole_of(self.following)
        return self._replace(steering=whole_of(self.steering), following=following)

    def own_part(self) -> JarzynskiState:
        """Of whole populations what one process has: some of the walkers that steer, some of the held-out ones."""
        following = None if self.following is None else some_of(self.following)
        return self._replace(steering=spread(self.steering), following=following)


class Followed(NamedTuple):
    """One population after an update: what it did, and its ESS, who was resampled, and log Z at its end, `(G,)`."""

    walkers: Population
    move: Move
    ess: Tensor
    resampled: Tensor
    log_z: Tensor

    def told(self, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log Z, ESS, ancestors and noise of all `groups` populations, those of other processes too."""
        noise = self.walkers.noise(torch.where(self.resampled, 1.0, self.ess))
        told = self.log_z, self.ess, self.walkers.ancestors(), noise
        if isinstance(self.walkers, Spread) or not is_many():
            return told
        return joined(torch.stack(told, 1), groups).unbind(1)  # pyright: ignore
