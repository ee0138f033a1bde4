"""Training with Jarzynski-corrected walkers: exact gradients and log Z while the model is being learned.

D. Carbone, M. Hua, S. Coste, E. Vanden-Eijnden, *Efficient training of energy-based models using Jarzynski
equality*, NeurIPS 2023. Algorithms 1 and 2; U is our E.

| symbol | here |
|---|---|
| N, N′ | `walkers` that steer θ, `batch` |
| A, p | `Population.log_weight`, its softmax |
| h, ξ | `step_size`, `normal` |
| c_k | `threshold`, or a `schedule` of it |
| M | `steps` |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from metastable.core.batch import Rows
from metastable.core.capture import LATER, aside, together_again
from metastable.core.errors import UnsupportedError, require, require_choice, require_count, require_positive
from metastable.core.processes import count, is_many, share
from metastable.core.resampling import SCHEMES
from metastable.core.types import LogPartition, Walkers, energy_and_grad
from metastable.core.weights import log_mean_exp
from metastable.kernels import MALA, ULA, Kernel
from metastable.kernels.engine import weighing_energy
from metastable.walkers.held_out import HeldOut, held_out_log_partition
from metastable.walkers.jarzynski import PROBES, keeps_energy, langevin_step, paced, reweigh_then_move
from metastable.walkers.population import ORDERS, Population, walkers_of
from metastable.walkers.settled import Following, Rules, settled
from metastable.walkers.spread import begun, share_of
from metastable.walkers.starts import random_rows

from .base import ChainMethod, Context, Metrics, Negatives
from .exact_start import start_populations
from .jarzynski_state import Followed, Heard, JarzynskiState, followed, metrics_of, of_populations, weighing

CRITERIA = ("ess", "entropy", "lag", "never")
GRADIENTS = ("all", "batch", "moved")
ACCEPTED, GAIN = 0.65, 0.2
"""Share of proposals that a step which tunes itself lets be accepted, and how fast it gets there."""
FIRST_FACTOR = 0.1
"""What the first learning rate is multiplied with: how far it goes is known after the update only."""


@dataclass(frozen=True)
class Jarzynski(ChainMethod[JarzynskiState]):
    """Algorithms 1 and 2, with log Z read from walkers that do not steer.

    Attributes:
        walkers: N, walkers in all.
        held_out: share of the walkers that only follow θ. Walkers that steer θ pull their own log Z down, by
            about γ·d·K/N for K updates at rate γ; those that follow do not. 0 gives the paper's algorithm.
        populations: independent populations among the held-out walkers; the standard error of log Z is
            their spread.
        batch: N′, walkers of each kind that move in one update (Algorithm 2); by default all (Algorithm 1).
        gradient: `all` walkers steer (Algorithm 2, line 5), only the mini-`batch` (the authors' code), or those
            that `moved` in the update before, as chains of PCD do. Then those that stand still are weighed when
            their turn comes, for all updates at once, so that an update costs what one of PCD does; weights are as
            exact, but resampling is decided by those of the last turns, and log Z and ESS are logged so, too,
            without an error or a cross-entropy.
        steps: M, kernel steps per update. Moves after the first are made at θ_{k+1} and weighed there.
        resample: when to resample: `ess` or `entropy` below `threshold` (fractions), every `lag` updates, or
            `never`.
        threshold: c_k. The paper's 1/c = 1.05 is 0.952; a coefficient of variation c means 1/(1 + c).
        schedule: pairs (update, threshold), each in force from its update on; replaces `threshold`.
        lag: for `resample="lag"`.
        scheme: `systematic`, `stratified`, `multinomial` or `residual`.
        order: sort walkers before resampling: `principal` (along their main axis), `energy`, or `none`.
            Sorting keeps the masses of modes that lie side by side along the axis; it changes no expectation.
        pace: a bound on v = Var(U_{k+1} − U_k) over the walkers that steer, twice the KL divergence that θ moves by
            in one update. The learning rate is multiplied with a factor of at most 1 that keeps v near it or below,
            by feedback from one update to the next. None leaves the learning rate as it is.
        step_size: h of ULA, the paper's kernel. Where neither it nor a `kernel` is given, walkers move by MALA,
            which adds no noise to the weights, with a step that tunes itself from one update to the next; weights
            stay exact, since no move depends on itself.

    Metrics: `ess` and `ess_held_out`, before resampling; `resampled`, the share of updates after which the steering
    walkers were resampled; `ancestors`, the share of the first walkers that still have descendants, in the held-out
    population that has the fewest; `log_z_gap`, log Z of the steering walkers minus that of the held-out ones;
    `log_z_noise`, the standard deviation of a held-out population's log Z that its weights predict; `pace`, v, and
    `rate_factor`; `step_size` where it tunes itself.

    Deviations: `held_out`, `order` and `pace` are not in the paper, and its kernel is ULA (`held_out=0,
    order="none", pace=None, step_size=h` is the paper's). With a kernel that has an accept step the weight is the
    annealed one; see `reweigh_then_move`.
    """

    walkers: int = 4096
    held_out: float = 0.5
    populations: int = 16
    batch: int | None = None
    gradient: str = "all"
    resample: str = "ess"
    threshold: float = 0.9
    schedule: tuple[tuple[int, float], ...] = ()
    lag: int = 10
    scheme: str = "systematic"
    order: str = "principal"
    pace: float | None = 0.03

    longest_step_size: ClassVar[float] = 2.0
    name: ClassVar[str] = "jarzynski"
    keeps_walkers: ClassVar[bool] = True
    weighs_together: ClassVar[bool] = True
    mode_weights_advice: ClassVar[str] = (
        "Use more walkers, a smaller learning rate or earlier resampling, so that the weights keep up."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("jarzynski.walkers", self.walkers, 2)
        require_count("jarzynski.populations", self.populations, 2)
        require_count("jarzynski.lag", self.lag)
        require(0 <= self.held_out < 1, "jarzynski.held_out", "at least 0 and below 1", self.held_out)
        require_choice("jarzynski.gradient", self.gradient, GRADIENTS)
        require_choice("jarzynski.resample", self.resample, CRITERIA)
        require_choice("jarzynski.scheme", self.scheme, SCHEMES)
        require_choice("jarzynski.order", self.order, ORDERS)
        require(0 <= self.threshold <= 1, "jarzynski.threshold", "between 0 and 1", self.threshold)
        if self.pace is not None:
            require_positive("jarzynski.pace", self.pace)
        object.__setattr__(self, "schedule", tuple((int(k), float(c)) for k, c in self.schedule))
        steering, _ = self.counts
        require(steering >= 2, "jarzynski.held_out", "such that two walkers steer", self.held_out)
        if self.batch is not None:
            require_count("jarzynski.batch", self.batch)
            require(self.batch <= steering, "jarzynski.batch", f"at most {steering} (N)", self.batch)

    @cached_property
    def moves(self) -> Kernel:
        """MALA where nothing else is said, ULA where a step size is."""
        return MALA(self.first_step_size) if self.tuned else super().moves

    @property
    def counts(self) -> tuple[int, int]:
        """How many walkers steer, and how many follow (a multiple of `populations`)."""
        per_population = round(self.walkers * self.held_out) // self.populations
        enough = self.held_out == 0 or per_population >= 2
        require(enough, "jarzynski.populations", "such that each has two walkers", self.populations)
        following = per_population * self.populations
        return self.walkers - following, following

    @property
    def temperature(self) -> float:
        """1: the weights account for whatever noise the kernel makes."""
        return 1.0

    @property
    def in_turn(self) -> bool:
        """Whether walkers that stand still are weighed when their turn comes."""
        return self.gradient == "moved" and self.batch is not None

    def chains(self, context: Context, batch: int) -> int:
        """Walkers that move in one update, of those that steer and those that follow."""
        return sum(min(self.batch or n, n) for n in self.counts)

    def evaluations(self, context: Context, batch: int) -> int:
        """The moves, the energies of walkers that stand still, and those of the gradient."""
        moving = self.chains(context, batch)
        still = moving + self.negatives_count(context, batch) if self.in_turn else self.walkers
        if not isinstance(self.moves, ULA):
            known = keeps_energy(self.moves, context.energy)
            each = self.moves.evaluations(self.steps, context.energy, context.data) + int(not known)
            follow = (0 if known and self.batch is None else still) + moving * each
        elif self.batch is None:
            follow = moving * self.steps + (0 if self.pace is None else min(PROBES, self.counts[0]))
        else:
            probes = min(PROBES, self.negatives_count(context, batch)) if self.in_turn else 0
            follow = still + moving * (self.steps + 1) + probes
        return follow + self.negatives_count(context, batch) + batch

    def negatives_count(self, context: Context, batch: int) -> int:
        """Walkers that steer, or those of the mini-batch."""
        steering = self.counts[0]
        return steering if self.gradient == "all" else min(self.batch or steering, steering)

    def start(self, context: Context) -> JarzynskiState:
        """Line 2, with walkers that follow the first model exactly or carry the error of their start."""
        steering, following = self.counts
        self._require_whole()
        groups, size = share(self.populations), following // self.populations
        populations = start_populations(context, share(steering), groups * size, groups, self.labels)
        log_factor = None
        if self.pace is not None:
            log_first = math.log(FIRST_FACTOR)
            log_factor = torch.full((), log_first, dtype=torch.float64, device=context.data.device)
        first, log_step = begun(populations[0], steering), self.first_log_step(context)
        return JarzynskiState(first, populations[1], log_step=log_step, log_factor=log_factor)

    def _require_whole(self) -> None:
        rule, enough = f"at least the {count()} processes, each with whole ones", self.populations >= count()
        require(enough or not self.counts[1], "jarzynski.populations", rule, self.populations)

    def rate_factor(self, state: JarzynskiState) -> Tensor | None:
        """What keeps v near `pace`, in (0, 1]."""
        return None if state.log_factor is None else state.log_factor.exp()

    def negatives(
        self, context: Context, state: JarzynskiState, batch: Rows
    ) -> tuple[Negatives, JarzynskiState, Metrics]:
        """Line 4: walkers and their weights. In a mini-batched run the rows are drawn here, at θ_k (line 7)."""
        moved = state.rows if self.in_turn else None
        if self.batch is not None:
            steering, rows = self._mini_batch(context, state.steering, self.gradient == "all")
            state = state._replace(steering=steering, rows=rows)
            if state.following is not None:
                following, rows = self._mini_batch(context, state.following, True)
                state = state._replace(following=following, following_rows=rows)
        rows = None if self.gradient == "all" else state.rows
        if moved is not None:
            rows, state = moved, state._replace(steering=state.steering.caught_up(context.energy, moved))
        x, log_weight = (v if rows is None else v.index_select(0, rows) for v in state.steering[:2])
        given = state.steering.labels_of(rows)
        heard = state.heard if rows is None else None
        part = share_of(log_weight) if heard is None else heard.share
        return Negatives(x, log_weight, given=given, share=part), state, {}

    def _mini_batch(self, context: Context, walkers: Population, later: bool) -> tuple[Population, Tensor]:
        """Line 7, and ∇U_k at the chosen rows, which an unadjusted move needs; `later` if only `advance` does."""
        n, unadjusted = len(walkers.x), isinstance(self.moves, ULA)
        with aside(walkers.x.device, later and not unadjusted and not self.in_turn, LATER):
            rows = random_rows(n, min(share(self.batch or n), n), context.rng, walkers.x.device)
        if self.in_turn:
            walkers = walkers.caught_up(context.energy, rows)
        if unadjusted:
            energy = walkers.energy_at(context.energy, rows)
            walkers = walkers._replace(grad=energy_and_grad(energy, walkers.x[rows]).grad)
        return walkers, rows

    def loss(
        self, context: Context, state: JarzynskiState, player: str, batch: Rows, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """Lines 4 and 5, and the cross-entropy (12): log Z and the data's energy, both at θ_k.

        In turn there is none, since log Z is of the updates in which walkers had their last turns.
        """
        if self.in_turn:
            return super().loss(context, state, player, batch, negatives)
        with aside(state.steering.x.device) as join:
            log_z = of_populations(state, self.populations, state.log_partition(), log_mean_exp)
        loss, metrics = super().loss(context, state, player, batch, negatives)
        join()
        return loss, {**metrics, "cross_entropy": log_z + metrics["energy_data"]}

    def advance(self, context: Context, state: JarzynskiState) -> tuple[JarzynskiState, Metrics]:
        """Lines 7–16: move and weigh under the new parameters, then resample where it is due.

        Step and learning rate of the next update follow from what the steering walkers did in this one.
        """
        together_again(state.steering.x.device, LATER)  # rows may have been drawn aside
        if (made := self._settled(context, state)) is not None:
            return JarzynskiState(*made[:2], *state[2:4], *made[2:4]), made.metrics
        h = None if state.log_step is None else state.log_step.exp()
        probe = self.pace is not None or self.batch is not None or not isinstance(self.moves, ULA)
        following = None
        with aside(state.steering.x.device) as join:  # neither asks for the other
            steering = self._follow(context, state.steering, state.rows, h, probe)
        if state.following is not None:
            following = self._follow(context, state.following, state.following_rows, h)()
        join()
        steering = steering()
        with aside(state.steering.x.device) as join:
            metrics = self._metrics(context, state, steering, following)
        log_step, log_factor, move = state.log_step, state.log_factor, steering.move
        if log_step is not None:
            log_step = self.next_log_step(context, log_step, move.acceptance.mean(), ACCEPTED, GAIN)
        if log_factor is not None and self.pace is not None and move.shift is not None:
            log_factor = paced(log_factor, move.shift, self.pace)
        others = None if following is None else following.walkers
        join()
        # in turn, walkers are weighed once more before the next update
        totals = None if self.in_turn else steering.totals
        heard = None if totals is None else Heard(totals.share, steering.log_z)
        return JarzynskiState(steering.walkers, others, *state[2:4], log_step, log_factor, heard), metrics

    def _metrics(
        self, context: Context, state: JarzynskiState, steering: Followed, following: Followed | None
    ) -> Metrics:
        """What is logged; in turn, weights are of many updates, and their spread is no error of the last one's."""
        told = self.populations, self.moves.invariant, context.data_scale
        metrics = metrics_of(state, steering, following, *told)
        return {k: v for k, v in metrics.items() if not (self.in_turn and k == "log_z_se")}

    def _settled(self, context: Context, state: JarzynskiState) -> Following | None:
        """All of it by a few kernels, where chains are fused and what is asked for is what those do."""
        c = self.threshold_at(context.step + 1) if self.resample == "ess" else 0.0
        asked = (self.scheme, self.order) == ("systematic", "principal")
        if context.engine != "fused" or c <= 0 or not asked or is_many() or self.in_turn:
            return None
        longest = self.longest_log_step(context)
        rules = Rules(self.moves, self.steps, c, ACCEPTED, GAIN, longest, self.pace, context.data_scale)
        return settled(rules, context.energy, *state[:6], context.rng)

    def _follow(
        self,
        context: Context,
        walkers: Population,
        rows: Tensor | None,
        h: Tensor | None,
        probe: bool = False,
    ) -> Callable[[], Followed]:
        """Algorithm 2, lines 8–16, of one population: done, or, of one that lies on several processes, about to be.

        Those are being asked for their weights, and what is returned waits for their answers.
        """
        kernel, energy, rng = self.moves, context.energy, context.rng
        if isinstance(kernel, ULA):
            if walkers.given is None:
                energy = weighing_energy(kernel, energy, walkers.x, rng, context.engine)
            asked = {"probe": probe, "in_turn": self.in_turn}
            walkers, move = langevin_step(kernel, energy, walkers, rows, rng, **asked)  # θ_k → θ_{k+1}
            for _ in range(self.steps - 1):
                walkers, _ = langevin_step(kernel, energy, walkers, rows, rng, theta_moved=False)
        elif kernel.invariant:
            walkers, move = reweigh_then_move(
                kernel, energy, walkers, rows, self.steps, rng, context.engine, h, probe, self.in_turn
            )
        else:
            raise UnsupportedError(
                f"jarzynski.kernel: {kernel.name} neither leaves the model invariant nor gives its transition "
                "density, so its weights would not be exact; use ULA, MALA or HMC"
            )
        if rows is not None:  # gradients of a mini-batch are of no use to the next one
            walkers = walkers._replace(grad=walkers.grad[:0])
        due = partial(self.due, walkers, context.step + 1)
        resample = partial(walkers.resample, scheme=self.scheme, order=self.order, rng=rng)  # line 16
        return followed(walkers, weighing(walkers, move, rng), due, resample)

    def due(self, walkers: Population, k: int, ess: Tensor) -> Tensor | None:
        """Line 16: which populations are to be resampled after update k; None when none can be."""
        if self.resample == "never":
            return None
        if self.resample == "lag":
            every = torch.ones(walkers.groups, dtype=torch.bool, device=walkers.x.device)
            return every if k % self.lag == 0 else None
        c = self.threshold_at(k)
        if c <= 0:
            return None
        return (ess if self.resample == "ess" else walkers.entropy()) < c

    def phase(self, context: Context) -> Hashable:
        """What is resampled at the end of the update: all walkers or none after a lag, else those below c_k."""
        k = context.step + 1
        return k % self.lag == 0 if self.resample == "lag" else self.threshold_at(k)

    def threshold_at(self, k: int) -> float:
        """c_k: the last entry of the schedule that is in force, or the constant."""
        in_force = [c for start, c in self.schedule if k >= start]
        return in_force[-1] if in_force else (0.0 if self.schedule else self.threshold)

    def current_walkers(self, context: Context, state: JarzynskiState) -> Walkers:
        """All walkers with weights that are comparable across populations; steering ones where those say nothing.

        Steering ones have a log Z that is low, and so the smaller share: all err no more than held-out ones alone.
        Where those disagree, one or two with the highest log Z have all their weight: then steering ones count.
        """
        state = self._caught_up(context, state)
        parts = [state.steering]
        if state.following is not None and HeldOut.of(state.following).agree:
            parts.append(state.following)
        return walkers_of(parts)

    def log_partition(self, context: Context, state: JarzynskiState) -> LogPartition:
        """log Z of the current model, with the spread of the held-out populations as its error."""
        state = self._caught_up(context, state)
        if state.following is None:
            value, ess = float(state.steering.log_partition()[0]), float(state.steering.ess()[0])
            warning = "log Z was read from the walkers that steer θ, which pulls it down; use held_out > 0"
            return LogPartition(value, math.nan, ess * len(state.steering.x), 0, (warning,))
        following, steering = state.following, state.steering
        return held_out_log_partition(context.energy, following, steering, self.moves, context.step)

    def _caught_up(self, context: Context, state: JarzynskiState) -> JarzynskiState:
        return state.caught_up(context.energy) if self.in_turn else state

    def gathered(self, state: JarzynskiState) -> JarzynskiState:
        """The walkers of all processes."""
        return state.gathered()

    def own_part(self, state: JarzynskiState) -> JarzynskiState:
        """Some of the walkers that steer, and some populations of those that follow."""
        self._require_whole()
        return state.own_part()

    def save(self, state: JarzynskiState) -> dict[str, Any]:
        """Both populations; mini-batch rows are drawn anew in each update, unless they steer the next."""
        return state.saved(self.in_turn)

    def load(self, tree: dict[str, Any]) -> JarzynskiState:
        """From a checkpoint."""
        return JarzynskiState.loaded(tree)
