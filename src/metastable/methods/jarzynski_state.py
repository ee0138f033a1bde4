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
from metastable.walkers.spread import Spread, Totals, some_of, spread, whole_of


class Heard(NamedTuple):
    """What several processes said at the end of an update, and need not say again in the next.

    Attributes:
        share: what steering walkers of this process count for in the whole, `()`, see `Negatives`.
        log_z: of all populations that log Z is read from, `(G,)`.
    """

    share: Tensor
    log_z: Tensor


class JarzynskiState(NamedTuple):
    """Walkers that steer θ, walkers that only follow, and the mini-batch rows of each.

    With them go log h of the next update where the step tunes itself, and the log of the factor on its learning
    rate where the pace is bounded, both `()`; and what was heard, which follows from the walkers.
    """

    steering: Population
    following: Population | None
    rows: Tensor | None = None
    following_rows: Tensor | None = None
    log_step: Tensor | None = None
    log_factor: Tensor | None = None
    heard: Heard | None = None

    def caught_up(self, energy: Energy) -> JarzynskiState:
        """With all walkers weighed for the updates in which they stood still."""
        following = None if self.following is None else self.following.caught_up(energy)
        return self._replace(steering=self.steering.caught_up(energy), following=following)

    def log_partition(self, groups: int) -> Tensor:
        """Of all `groups` populations that it is read from, those of other processes too."""
        if self.heard is not None:
            return self.heard.log_z
        if self.following is None:
            return self.steering.log_partition()
        return joined(self.following.log_partition(), groups)

    def gathered(self) -> JarzynskiState:
        """The walkers of all processes; each has rows of its own, which are drawn anew."""
        following = None if self.following is None else whole_of(self.following)
        return self._replace(steering=whole_of(self.steering), following=following, rows=None, heard=None)

    def own_part(self) -> JarzynskiState:
        """Of whole populations what one process has: some of the walkers that steer, some of the held-out ones."""
        following = None if self.following is None else some_of(self.following)
        return self._replace(steering=spread(self.steering), following=following, heard=None)


Known = tuple[Tensor, ...]
"""log Z and ESS of populations, `(G,)` each; `Totals` of one that lies on several processes."""


def weighed(walkers: Population, move: Move, rng: torch.Generator) -> tuple[Known, Move]:
    """log Z and ESS after a move, and the move; both of all processes where the population is."""
    if not isinstance(walkers, Spread):
        return walkers.log_partition_and_ess(), move
    own = [move.acceptance.mean()] + ([] if move.shift is None else [move.shift])
    totals = walkers.totals(rng, *own)
    acceptance, *shift = totals.means
    accepted = acceptance[None].to(move.acceptance)
    return totals, move._replace(acceptance=accepted, shift=shift[0] if shift else None)


class Followed(NamedTuple):
    """One population after an update: what it did, and its ESS, who was resampled, and log Z at its end, `(G,)`.

    `totals`, at its end, are of one that lies on several processes.
    """

    walkers: Population
    move: Move
    ess: Tensor
    resampled: Tensor
    log_z: Tensor
    totals: Totals | None = None

    @classmethod
    def of(cls, walkers: Population, move: Move, resampled: Tensor, known: Known, changed: bool) -> Followed:
        """From what was `known` before some were `resampled`; `changed` if there were any."""
        log_z, ess, *_ = known
        if isinstance(known, Totals):
            known = known.resampled if changed else known
            return cls(walkers, move, ess, resampled, known.log_z, known)
        if changed and log_z.device.type == "cpu":  # the same but for its rounding, and cheap
            log_z = walkers.log_partition()
        return cls(walkers, move, ess, resampled, log_z)

    def told(self, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log Z, ESS, ancestors and noise of all `groups` populations, those of other processes too."""
        ended = torch.where(self.resampled, 1.0, self.ess)
        if isinstance(self.walkers, Spread):
            noise = self.walkers.noise(ended, self.totals)
            return self.log_z, self.ess, self.walkers.ancestors(self.totals), noise
        told = self.log_z, self.ess, self.walkers.ancestors(), self.walkers.noise(ended)
        if not is_many():
            return told
        return joined(torch.stack(told, 1), groups).unbind(1)  # pyright: ignore


def metrics_of(
    state: JarzynskiState,
    steering: Followed,
    following: Followed | None,
    told: tuple[Tensor, Tensor, Tensor, Tensor],
    adjusted: bool,
    scale: float | Tensor,
) -> Metrics:
    """Of the walkers after the update, and of the step and the learning rate that `state` held for it.

    `told` is what the populations do that log Z is read from.
    """
    move, log_z = steering.move, steering.log_z[0]
    per_population, ess, ancestors, noise = told
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
