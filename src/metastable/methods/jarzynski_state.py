"""What training with Jarzynski-corrected walkers carries from update to update, in one process or in several."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from metastable.core.method import Metrics
from metastable.core.processes import is_many, joined
from metastable.core.types import Energy
from metastable.core.weights import log_mean_exp
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

    def caught_up(self, energy: Energy) -> JarzynskiState:
        """With all walkers weighed for the updates in which they stood still."""
        following = None if self.following is None else self.following.caught_up(energy)
        return self._replace(steering=self.steering.caught_up(energy), following=following)

    def gathered(self) -> JarzynskiState:
        """The walkers of all processes; each has rows of its own, which are drawn anew."""
        following = None if self.following is None else whole_of(self.following)
        return self._replace(steering=whole_of(self.steering), following=following, rows=None)

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


def metrics_of(
    state: JarzynskiState,
    steering: Followed,
    following: Followed | None,
    populations: int,
    adjusted: bool,
    scale: float | Tensor,
) -> Metrics:
    """Of the walkers after the update, and of the step and the learning rate that `state` held for it."""
    move, log_z = steering.move, steering.log_z[0]
    read = steering if following is None else following
    per_population, ess, ancestors, noise = read.told(populations)
    metrics = {
        "displacement": move.moved.mean().sqrt() / scale,
        "ess": steering.ess[0],
        "resampled": steering.resampled[0].to(steering.ess),
        "resamplings": steering.walkers.resamplings[0],
        "ancestors": ancestors.amin(),
        "log_z": log_mean_exp(per_population),
        "log_z_steering": log_z,
        "log_z_noise": noise.mean().sqrt(),
    }
    if following is not None:
        metrics["log_z_se"] = per_population.std() / math.sqrt(len(per_population))
        metrics["log_z_gap"] = log_z - metrics["log_z"]
        metrics["ess_held_out"] = ess.mean()
    if adjusted:
        metrics["acceptance"] = move.acceptance.mean()
    if move.shift is not None:
        metrics["pace"] = move.shift
    if state.log_factor is not None:
        metrics["rate_factor"] = state.log_factor.exp()
    if state.log_step is not None:
        metrics["step_size"] = state.log_step.exp()
    return metrics
