"""What training with Jarzynski-corrected walkers carries from update to update, in one process or in several."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.method import Metrics
from metastable.core.processes import shared
from metastable.core.types import Energy
from metastable.core.weights import log_mean_exp
from metastable.walkers.jarzynski import Move
from metastable.walkers.population import Population
from metastable.walkers.spread import Spread, Totals, some_of, spread, whole_of


class Heard(NamedTuple):
    """What several processes said at the end of an update, and need not say again in the next.

    Attributes:
        share: what steering walkers of this process count for in the whole, `()`, see `Negatives`.
        log_z: of the steering walkers of all, `(1,)`.
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

    def log_partition(self) -> Tensor:
        """Of the populations here that it is read from, `(G,)`."""
        if self.following is None and self.heard is not None:
            return self.heard.log_z
        return (self.following or self.steering).log_partition()

    def gathered(self) -> JarzynskiState:
        """The walkers of all processes; each has rows of its own, which are drawn anew."""
        following = None if self.following is None else whole_of(self.following)
        return self._replace(steering=whole_of(self.steering), following=following, rows=None, heard=None)

    def own_part(self) -> JarzynskiState:
        """Of whole populations what one process has: some of the walkers that steer, some of the held-out ones."""
        following = None if self.following is None else some_of(self.following)
        return self._replace(steering=spread(self.steering), following=following, rows=None, heard=None)

    def saved(self, rows: bool) -> dict[str, Any]:
        """For a checkpoint, with the mini-batch rows where they steer the next update."""
        return {
            "steering": self.steering.save(),
            "following": None if self.following is None else self.following.save(),
            "log_step": self.log_step,
            "log_factor": self.log_factor,
            **({"rows": self.rows} if rows else {}),
        }

    @classmethod
    def loaded(cls, tree: dict[str, Any]) -> JarzynskiState:
        """From a checkpoint."""
        following = None if tree["following"] is None else Population(**tree["following"])
        steering, step, factor = Population(**tree["steering"]), tree["log_step"], tree["log_factor"]
        return cls(steering, following, tree.get("rows"), log_step=step, log_factor=factor)


Known = tuple[Tensor, ...]
"""log Z and ESS of populations, `(G,)` each; `Totals` of one that lies on several processes."""


def weighing(walkers: Population, move: Move, rng: torch.Generator) -> Callable[[], tuple[Known, Move]]:
    """log Z and ESS after a move, and the move: of all processes where the population is, which are being asked."""
    if not isinstance(walkers, Spread):
        return lambda: (walkers.log_partition_and_ess(), move)
    own = [move.acceptance.mean()] + ([] if move.shift is None else [move.shift])
    answers = walkers.asking(rng, *own)

    def heard() -> tuple[Known, Move]:
        totals = answers()
        acceptance, *shift = totals.means
        accepted = acceptance[None].to(move.acceptance)
        return totals, move._replace(acceptance=accepted, shift=shift[0] if shift else None)

    return heard


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

    def told(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log Z, ESS, ancestors and noise of the populations here."""
        ended, known = torch.where(self.resampled, 1.0, self.ess), self.totals
        if isinstance(self.walkers, Spread):
            return self.log_z, self.ess, self.walkers.ancestors(known), self.walkers.noise(ended, known)
        return self.log_z, self.ess, self.walkers.ancestors(), self.walkers.noise(ended)


def followed(
    walkers: Population,
    heard: Callable[[], tuple[Known, Move]],
    due: Callable[[Tensor], Tensor | None],
    resample: Callable[..., Population],
) -> Callable[[], Followed]:
    """Who is `due` by the ESS is resampled: at once, or, of walkers on several processes, when it is asked for."""

    def resampled() -> Followed:
        known, move = heard()
        need, after = due(known[1]), walkers
        if need is None:
            need = torch.zeros_like(known[1], dtype=torch.bool)
        else:
            after = resample(need, known=known)
        return Followed.of(after, move, need, known, after is not walkers)

    if isinstance(walkers, Spread):
        return resampled
    done = resampled()
    return lambda: done


def of_populations(state: JarzynskiState, groups: int, own: Tensor, read: Callable[[Tensor], Tensor]) -> Any:
    """A metric of all `groups` populations, from those here, `(G,)`; of one that is spread all is known here."""
    return read(own) if state.following is None else shared(own, groups, read)


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
    per_population, ess, ancestors, noise = (following or steering).told()
    of_all = partial(of_populations, state, populations)
    metrics = {
        "displacement": move.moved.mean().sqrt() / scale,
        "ess": steering.ess[0],
        "resampled": steering.resampled[0].to(steering.ess),
        "resamplings": steering.walkers.resamplings[0],
        "ancestors": of_all(ancestors, lambda each: each.amin(-1)),
        "log_z": of_all(per_population, log_mean_exp),
        "log_z_steering": log_z,
        "log_z_noise": of_all(noise, lambda each: each.mean(-1).sqrt()),
    }
    if following is not None:
        metrics["log_z_se"] = of_all(per_population, lambda each: each.std(-1) / math.sqrt(populations))
        metrics["log_z_gap"] = of_all(per_population, lambda each: -log_mean_exp(each)) + log_z
        metrics["ess_held_out"] = of_all(ess, lambda each: each.mean(-1))
    if adjusted:
        metrics["acceptance"] = move.acceptance.mean()
    if move.shift is not None:
        metrics["pace"] = move.shift
    if state.log_factor is not None:
        metrics["rate_factor"] = state.log_factor.exp()
    if state.log_step is not None:
        metrics["step_size"] = state.log_step.exp()
    return metrics
