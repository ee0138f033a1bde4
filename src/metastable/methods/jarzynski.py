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
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import (
    UnsupportedError,
    require,
    require_choice,
    require_count,
    require_positive,
)
from metastable.core.random import normal_like
from metastable.core.resampling import SCHEMES
from metastable.core.types import Energy, LogPartition, Walkers, energy_and_grad, is_discrete
from metastable.core.weights import ess_fraction, log_mean_exp, spread_of_log_mean
from metastable.kernels import MALA, ULA, Gibbs, Kernel, run_chain
from metastable.walkers.outside import log_mass_outside
from metastable.walkers.population import ORDERS, Population
from metastable.walkers.starts import random_rows

from .base import ChainMethod, Context, Metrics, Negatives
from .exact_start import start_populations

CRITERIA = ("ess", "entropy", "lag", "never")
MOST_OUTSIDE = math.log(0.02)
"""log of the mass beyond the farthest walker from which on log Z of the walkers is not that of the model."""
ACCEPTED = 0.65
"""Share of proposals that a step which tunes itself lets be accepted."""
PROBES = 128
"""Walkers that say how far a step of θ went, where unadjusted moves do not say it by the way."""
LEAST_WALKERS, LEAST_ANCESTORS = 50, 10
"""Of one held-out population, for its spread to say how wrong log Z is."""
FIRST_FACTOR = 0.1
"""What the first learning rate is multiplied with: how far it goes is known after the update only."""


class Move(NamedTuple):
    """What some walkers of a population did in one update: squared distances and acceptances.

    `shift` is v, the variance of U_{k+1} − U_k over walkers that stood still, `()`, where that is known.
    """

    moved: Tensor
    acceptance: Tensor
    shift: Tensor | None = None


def shift_of(log_weight: Tensor, change: Tensor) -> Tensor:
    """v = Var(U_{k+1} − U_k) under the weights before the step, `()`: twice the KL divergence that θ moved by."""
    p = torch.softmax(log_weight, 0)
    change = change.to(p)
    return torch.dot(p, (change - torch.dot(p, change)).square())


def paced(log_factor: Tensor, shift: Tensor, pace: float) -> Tensor:
    """log of the factor on the learning rate for the next update, by feedback on v.

    v is noisy and skewed: near `pace` the correction is slow and linear in v, so that it is the mean of v which
    settles there. A v far above (e²) or below (e⁻⁴) is made good at once, since v grows with the square of the
    rate: down without limit, and up by a factor e at most.
    """
    off = torch.log(pace / shift.clamp(min=1e-30)).clamp(-20, 20)
    slow, fast = 0.05 * (1 - torch.exp(-off)), (0.5 * off).clamp(max=1.0)
    far = (off < -2) | (off > 4)
    return (log_factor + torch.where(far, fast, slow)).clamp(max=0.0)


def _some_moves(X: Tensor, Y: Tensor, shift: Tensor | None, enough: int = 1024) -> Move:
    """Distances of about `enough` walkers, evenly spaced: a diagnostic does not need a pass over all."""
    every = max(1, len(X) // enough)
    moved = (Y[::every] - X[::every]).flatten(1).square().sum(1)
    return Move(moved, torch.ones_like(moved), shift)


def _probed_shift(energy: Energy, walkers: Population) -> Tensor:
    """v from at most `PROBES` walkers, evenly spaced, each evaluated once more where it stood."""
    n = min(PROBES, len(walkers.x))
    some = slice(0, n * (len(walkers.x) // n), len(walkers.x) // n)
    with torch.no_grad():
        U = energy(walkers.x[some])
    return shift_of(walkers.log_weight[some], U - walkers.energy[some])


def cross(
    kernel: ULA,
    energy: Energy,
    walkers: Population,
    rows: Tensor | None,
    rng: torch.Generator,
    probe: bool = False,
) -> tuple[Population, Move]:
    """Algorithm 2, lines 8–15 (Algorithm 1, lines 7–10, when `rows` is None and every walker moves).

    `energy` is U_{k+1}; `walkers` caches U_k and ∇U_k, the latter at `rows` only. `probe` asks for v, which costs a
    few energies where every walker moves.
    """
    X = walkers.x if rows is None else walkers.x[rows]
    U_k = walkers.energy if rows is None else walkers.energy[rows]
    dU_k = walkers.grad
    ξ = normal_like(X, rng)
    Y = kernel.move(X, dU_k, ξ)  # line 9
    U_next, dU_next = energy_and_grad(energy, Y)
    dA = kernel.log_weight_increment(ξ, U_k, dU_k, U_next, dU_next)  # line 10: α_k(X, Y) − α_{k+1}(Y, X)
    if rows is None:
        move = _some_moves(X, Y, _probed_shift(energy, walkers) if probe else None)
        A = walkers.log_weight + dA
        return walkers._replace(x=Y, log_weight=A, energy=U_next, grad=dU_next), move
    with torch.no_grad():
        U_all = energy(walkers.x)  # frozen walkers need no gradient
    move = _some_moves(X, Y, shift_of(walkers.log_weight, U_all - walkers.energy) if probe else None)
    dA_all = (walkers.energy - U_all).index_copy(0, rows, dA)  # line 14, and line 10 at `rows`
    return (
        walkers._replace(
            x=walkers.x.index_copy(0, rows, Y),
            log_weight=walkers.log_weight + dA_all,
            energy=U_all.index_copy(0, rows, U_next),
            grad=dU_next,
        ),
        move,
    )


def stay(
    kernel: ULA, energy: Energy, walkers: Population, rows: Tensor | None, rng: torch.Generator
) -> Population:
    """One more ULA step at the same θ, weighed by its own Metropolis–Hastings ratio.

    Proposition 1 with θ_{k+1} = θ_k; `walkers.grad` is current at `rows`.
    """
    X = walkers.x if rows is None else walkers.x[rows]
    U = walkers.energy if rows is None else walkers.energy[rows]
    ξ = normal_like(X, rng)
    Y = kernel.move(X, walkers.grad, ξ)
    U_new, dU_new = energy_and_grad(energy, Y)
    dA = kernel.log_weight_increment(ξ, U, walkers.grad, U_new, dU_new)
    if rows is None:
        return walkers._replace(x=Y, log_weight=walkers.log_weight + dA, energy=U_new, grad=dU_new)
    return walkers._replace(
        x=walkers.x.index_copy(0, rows, Y),
        log_weight=walkers.log_weight.index_add(0, rows, dA.double()),
        energy=walkers.energy.index_copy(0, rows, U_new),
        grad=dU_new,
    )


def keeps_energy(kernel: Kernel, energy: Energy) -> bool:
    """Whether the chain's state holds E where the walker stands; a Gibbs sweep never needs it."""
    return not (isinstance(kernel, Gibbs) and hasattr(energy, "sweep"))


def reweigh_then_move(
    kernel: Kernel,
    energy: Energy,
    walkers: Population,
    rows: Tensor | None,
    steps: int,
    rng: torch.Generator,
    engine: str,
    step_size: Tensor | None = None,
    probe: bool = False,
) -> tuple[Population, Move]:
    """For a kernel that leaves each model invariant: A += U_k − U_{k+1} where the walker stands, then move.

    Annealed importance sampling along the path of θ; a move that keeps the model does not change a weight. Where
    every walker moves, the energies that weigh them are those that their chains begin with. `step_size`, where it
    is not the kernel's own, must not depend on what happens here; `probe` asks for v.
    """
    begin = kernel.init(energy, walkers.x if rows is None else walkers.x[rows])
    shared = rows is None and keeps_energy(kernel, energy)
    with torch.no_grad():
        U = begin.energy if shared else energy(walkers.x)
    change = U - walkers.energy
    A = walkers.log_weight - change
    result = run_chain(kernel, energy, begin, steps, rng, engine=engine, step_size=step_size)
    Y, U_new, _ = result.state
    if not keeps_energy(kernel, energy):
        with torch.no_grad():
            U_new = energy(Y)
    if rows is not None:
        Y, U_new = walkers.x.index_copy(0, rows, Y), U.index_copy(0, rows, U_new)
    shift = shift_of(walkers.log_weight, change) if probe else None
    move = Move(steps * result.info.moved, result.info.acceptance, shift)
    return walkers._replace(x=Y, log_weight=A, energy=U_new, grad=walkers.grad[:0]), move


def fixed_parameters(
    kernel: ULA, energy: Energy, x: Tensor, steps: int, rng: torch.Generator, threshold: float = 0.5
) -> Walkers:
    """Sampling that goes on at fixed θ: ULA whose weights remove the bias of h > 0 (end of Section 3.2)."""
    zero = torch.zeros(1, dtype=torch.float64, device=x.device)
    walkers = Population.start(x, *energy_and_grad(energy, x), zero)
    for _ in range(steps):
        walkers = stay(kernel, energy, walkers, None, rng)
        walkers = walkers.resample(walkers.ess() < threshold, "systematic", "principal", rng)
    info = {"ess_fraction": float(walkers.ess()[0]), "resamplings": int(walkers.resamplings[0])}
    return Walkers(walkers.x, walkers.log_weight, {**info, "kernel": kernel})


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


class Followed(NamedTuple):
    """One population after an update: what it did, and its ESS `(G,)` and who was resampled, `(G,)`, at its end."""

    walkers: Population
    move: Move
    ess: Tensor
    resampled: Tensor


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
        gradient: `all` walkers steer (Algorithm 2, line 5), or only the mini-`batch` (the authors' code).
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
    mode_weights_advice: ClassVar[str] = (
        "Use more walkers, a smaller learning rate or earlier resampling, so that the weights keep up."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("jarzynski.walkers", self.walkers, 2)
        require_count("jarzynski.populations", self.populations, 2)
        require_count("jarzynski.lag", self.lag)
        require(0 <= self.held_out < 1, "jarzynski.held_out", "at least 0 and below 1", self.held_out)
        require_choice("jarzynski.gradient", self.gradient, ("all", "batch"))
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

    def chains(self, context: Context, batch: int) -> int:
        """Walkers that move in one update, of those that steer and those that follow."""
        return sum(min(self.batch or n, n) for n in self.counts)

    def evaluations(self, context: Context, batch: int) -> int:
        """The moves, the energies of walkers that stand still, and those of the gradient."""
        moving = self.chains(context, batch)
        if not isinstance(self.moves, ULA):
            shared = self.batch is None and keeps_energy(self.moves, context.energy)
            follow = (0 if shared else self.walkers) + moving * self._each(context)
        elif self.batch is None:
            follow = moving * self.steps + (0 if self.pace is None else min(PROBES, self.counts[0]))
        else:
            follow = self.walkers + moving * (self.steps + 1)
        return follow + self.negatives_count(context, batch) + batch

    def negatives_count(self, context: Context, batch: int) -> int:
        """Walkers that steer, or those of the mini-batch."""
        steering = self.counts[0]
        return min(self.batch or steering, steering) if self.gradient == "batch" else steering

    def _each(self, context: Context) -> int:
        """Energies of one moving walker under a kernel that leaves the model invariant."""
        made = self.moves.evaluations(self.steps, context.energy, context.data)
        return made + int(not keeps_energy(self.moves, context.energy))

    def start(self, context: Context) -> JarzynskiState:
        """Line 2, with walkers that follow the first model exactly or carry the error of their start."""
        populations = start_populations(context, *self.counts, self.populations)
        log_factor = None
        if self.pace is not None:
            first = math.log(FIRST_FACTOR)
            log_factor = torch.full((), first, dtype=torch.float64, device=context.data.device)
        return JarzynskiState(*populations, log_step=self.first_log_step(context), log_factor=log_factor)

    def rate_factor(self, state: JarzynskiState) -> Tensor | None:
        """What keeps v near `pace`, in (0, 1]."""
        return None if state.log_factor is None else state.log_factor.exp()

    def negatives(
        self, context: Context, state: JarzynskiState, batch: Tensor
    ) -> tuple[Negatives, JarzynskiState, Metrics]:
        """Line 4: walkers and their weights. In a mini-batched run the rows are drawn here, at θ_k."""
        if self.batch is not None:
            state = self._choose(context, state)
        walkers = state.steering
        if self.gradient == "batch" and state.rows is not None:
            return Negatives(walkers.x[state.rows], walkers.log_weight[state.rows]), state, {}
        return Negatives(walkers.x, walkers.log_weight), state, {}

    def loss(
        self, context: Context, state: JarzynskiState, player: str, batch: Tensor, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """Lines 4 and 5, and the cross-entropy (12): log Z and the data's energy, both at θ_k."""
        loss, metrics = super().loss(context, state, player, batch, negatives)
        return loss, {**metrics, "cross_entropy": self._log_z(state) + metrics["energy_data"]}

    def _log_z(self, state: JarzynskiState) -> Tensor:
        """log Z from the walkers that follow, or from those that steer where none do."""
        return log_mean_exp((state.following or state.steering).log_partition())

    def _choose(self, context: Context, state: JarzynskiState) -> JarzynskiState:
        """Line 7, and ∇U_k at the chosen rows, which the move needs."""
        steering, rows = self._choose_rows(context, state.steering)
        if state.following is None:
            return state._replace(steering=steering, rows=rows)
        following, following_rows = self._choose_rows(context, state.following)
        return state._replace(
            steering=steering, rows=rows, following=following, following_rows=following_rows
        )

    def _choose_rows(self, context: Context, walkers: Population) -> tuple[Population, Tensor]:
        rows = random_rows(
            len(walkers.x), min(self.batch or 0, len(walkers.x)), context.rng, walkers.x.device
        )
        if not isinstance(self.moves, ULA):
            return walkers, rows
        return walkers._replace(grad=energy_and_grad(context.energy, walkers.x[rows]).grad), rows

    def advance(self, context: Context, state: JarzynskiState) -> tuple[JarzynskiState, Metrics]:
        """Lines 7–16: move and weigh under the new parameters, then resample where it is due.

        Step and learning rate of the next update follow from what the steering walkers did in this one.
        """
        h = None if state.log_step is None else state.log_step.exp()
        free = self.batch is not None or not isinstance(self.moves, ULA)
        probe = free or self.pace is not None
        steering = self._follow(context, state.steering, state.rows, h, probe)
        following = None
        if state.following is not None:
            following = self._follow(context, state.following, state.following_rows, h)
        metrics = self._metrics(context, state, steering, following)
        return self._tuned_after(context, state, steering, following), metrics

    def _tuned_after(
        self, context: Context, state: JarzynskiState, steering: Followed, following: Followed | None
    ) -> JarzynskiState:
        log_step, log_factor, move = state.log_step, state.log_factor, steering.move
        if log_step is not None:
            log_step = self.next_log_step(context, log_step, move.acceptance.mean(), ACCEPTED, gain=0.2)
        if log_factor is not None and self.pace is not None and move.shift is not None:
            log_factor = paced(log_factor, move.shift, self.pace)
        return state._replace(
            steering=steering.walkers,
            following=None if following is None else following.walkers,
            log_step=log_step,
            log_factor=log_factor,
        )

    def _follow(
        self,
        context: Context,
        walkers: Population,
        rows: Tensor | None,
        step_size: Tensor | None,
        probe: bool = False,
    ) -> Followed:
        kernel, energy, rng = self.moves, context.energy, context.rng
        if isinstance(kernel, ULA):
            walkers, move = cross(kernel, energy, walkers, rows, rng, probe)
            for _ in range(self.steps - 1):
                walkers = stay(kernel, energy, walkers, rows, rng)
        elif kernel.invariant:
            walkers, move = reweigh_then_move(
                kernel, energy, walkers, rows, self.steps, rng, context.engine, step_size, probe
            )
        else:
            raise UnsupportedError(
                f"jarzynski.kernel: {kernel.name} neither leaves the model invariant nor gives its transition "
                "density, so its weights would not be exact; use ULA, MALA or HMC"
            )
        if rows is not None:  # gradients of a mini-batch are of no use to the next one
            walkers = walkers._replace(grad=walkers.grad[:0])
        ess, due = walkers.ess(), self.due(walkers, context.step + 1)
        if due is None:
            return Followed(walkers, move, ess, torch.zeros_like(ess, dtype=torch.bool))
        return Followed(walkers.resample(due, self.scheme, self.order, rng), move, ess, due)

    def due(self, walkers: Population, k: int) -> Tensor | None:
        """Line 16: which populations are to be resampled after update k; None when none can be."""
        if self.resample == "never":
            return None
        if self.resample == "lag":
            every = torch.ones(walkers.groups, dtype=torch.bool, device=walkers.x.device)
            return every if k % self.lag == 0 else None
        c = self.threshold_at(k)
        if c <= 0:
            return None
        return (walkers.ess() if self.resample == "ess" else walkers.entropy()) < c

    def threshold_at(self, k: int) -> float:
        """c_k: the last entry of the schedule that is in force, or the constant."""
        in_force = [c for start, c in self.schedule if k >= start]
        return in_force[-1] if in_force else (0.0 if self.schedule else self.threshold)

    def _metrics(
        self, context: Context, state: JarzynskiState, steering: Followed, following: Followed | None
    ) -> Metrics:
        """Of the walkers after the update, and of the step and the learning rate that `state` held for it."""
        move, log_z = steering.move, steering.walkers.log_partition()[0]
        read = steering if following is None else following
        per_population = read.walkers.log_partition()
        metrics = {
            "displacement": move.moved.mean().sqrt() / context.data_scale,
            "ess": steering.ess[0],
            "resampled": steering.resampled[0].to(steering.ess),
            "resamplings": steering.walkers.resamplings[0],
            "ancestors": read.walkers.ancestors().amin(),
            "log_z": log_mean_exp(per_population),
            "log_z_steering": log_z,
            "log_z_noise": read.walkers.noise().mean().sqrt(),
        }
        if following is not None:
            metrics["log_z_se"] = per_population.std() / math.sqrt(len(per_population))
            metrics["log_z_gap"] = log_z - metrics["log_z"]
            metrics["ess_held_out"] = following.ess.mean()
        if self.moves.invariant:
            metrics["acceptance"] = move.acceptance.mean()
        if move.shift is not None:
            metrics["pace"] = move.shift
        if state.log_factor is not None:
            metrics["rate_factor"] = state.log_factor.exp()
        if state.log_step is not None:
            metrics["step_size"] = state.log_step.exp()
        return metrics

    def current_walkers(self, context: Context, state: JarzynskiState) -> Walkers:
        """All walkers with weights that are comparable across populations; steering ones where those say nothing.

        Held-out populations that disagree leave all the weight to the one or two with the highest log Z, which is
        chance: then the walkers that training held on to the data stand for the model.
        """
        parts = [state.steering]
        if state.following is not None and HeldOut.of(state.following).agree:
            parts.append(state.following)
        x = torch.cat([p.x for p in parts])
        log_weight = torch.cat([_comparable(p) for p in parts])
        sizes = [len(p.x) // p.groups for p in parts for _ in range(p.groups)]
        return Walkers(x, log_weight, {"ess_fraction": float(ess_fraction(log_weight)), "populations": sizes})

    def log_partition(self, context: Context, state: JarzynskiState) -> LogPartition:
        """log Z of the current model, with the spread of the held-out populations as its error."""
        if state.following is None:
            value = float(state.steering.log_partition()[0])
            warning = "log Z was read from the walkers that steer θ, which pulls it down; use held_out > 0"
            return LogPartition(
                value, math.nan, float(state.steering.ess()[0]) * len(state.steering.x), 0, (warning,)
            )
        found = HeldOut.of(state.following)
        ess = float(ess_fraction(_comparable(state.following))) * len(state.following.x)
        moves = _doubt_of_moves(found, self.moves, math.prod(context.data.shape[1:]), context.step)
        outside = _doubt_of_reach(context, state.following, found.value)
        doubts = (*found.doubts(), *moves, *_doubt_of_gap(found, state.steering), *outside)
        return LogPartition(found.value, found.error, ess, state.following.groups - 1, doubts)

    def save(self, state: JarzynskiState) -> dict[str, Any]:
        """Both populations; mini-batch rows are drawn anew in each update."""
        return {
            "steering": state.steering.save(),
            "following": None if state.following is None else state.following.save(),
            "log_step": state.log_step,
            "log_factor": state.log_factor,
        }

    def load(self, tree: dict[str, Any]) -> JarzynskiState:
        """From a checkpoint."""
        following = None if tree["following"] is None else Population(**tree["following"])
        return JarzynskiState(
            Population(**tree["steering"]),
            following,
            log_step=tree["log_step"],
            log_factor=tree["log_factor"],
        )


@dataclass(frozen=True)
class HeldOut:
    """log Z of held-out populations, and what speaks for and against it.

    Attributes:
        value: log Z.
        error: its standard error. It is the spread between populations, or, where that is the smaller by chance,
            what the weights predict, but never more than half as much again.
        spread: standard deviation of log Z between populations.
        noise: the same as the weights predict it, see `Population.noise`.
        agreeing: effective share of the populations in their mean of Z: 1 where all say the same.
        size: walkers of a population.
        ancestors: first walkers that the population with the fewest of them descends from.
        ess: the lowest effective sample size of a population, as a fraction.
        resampled: whether any of them was ever resampled.
    """

    value: float
    error: float
    spread: float
    noise: float
    agreeing: float
    size: int
    ancestors: int
    ess: float
    resampled: bool

    @classmethod
    def of(cls, walkers: Population) -> HeldOut:
        """Read from held-out populations."""
        log_z, size = walkers.log_partition(), len(walkers.x) // walkers.groups
        error, noise = float(spread_of_log_mean(log_z)), math.sqrt(float(walkers.noise().mean()))
        predicted = noise / math.sqrt(walkers.groups)
        return cls(
            value=float(log_mean_exp(log_z)),
            error=max(error, min(predicted, 1.5 * error)),
            spread=float(log_z.std()),
            noise=noise,
            agreeing=float(ess_fraction(log_z)),
            size=size,
            ancestors=round(float(walkers.ancestors().min()) * size),
            ess=float(walkers.ess().min()),
            resampled=bool((walkers.resamplings > 0).any()),
        )

    @property
    def agree(self) -> bool:
        """Whether no few populations decide their mean of Z."""
        return self.spread <= 1 and self.agreeing >= 0.5

    def doubts(self) -> list[str]:
        """Why the value or its error should not be trusted; empty when nothing speaks against them."""
        checks = [
            (
                not self.agree,
                f"the held-out populations disagree by {self.spread:.2f} nats, and a few of them decide; use more "
                "walkers or a lower pace",
            ),
            (
                self.size < LEAST_WALKERS,
                f"each held-out population has only {self.size} walkers; their spread may be too small",
            ),
            (self.error > 0.5, f"the standard error is {self.error:.2f} nats"),
            (
                self.ess < 0.05,
                f"one held-out population has an effective sample size of {100 * self.ess:.1f} %",
            ),
            (
                self.noise > 1,
                f"all the weights since the start make log Z of a population uncertain by {self.noise:.2f} nats, "
                "more than the spread between populations can be believed to show; use a lower pace, more walkers, "
                "or moves that are adjusted",
            ),
            (
                self.resampled and self.ancestors < min(LEAST_ANCESTORS, self.size),
                f"one held-out population descends from {self.ancestors} of its {self.size} first walkers; use a "
                "lower pace or more walkers",
            ),
            (
                self.spread > max(0.2, 1.5 * self.noise),
                f"the held-out populations disagree by {self.spread:.2f} nats where their weights predict "
                f"{self.noise:.2f}: rare walkers of large weight decide, or walkers do not mix; use adjusted moves "
                "(leave step_size and kernel out), shorter steps or more walkers",
            ),
        ]
        return [words for speaks, words in checks if speaks]


def _doubt_of_reach(context: Context, walkers: Population, log_z: float) -> list[str]:
    """Mass farther out than any walker, where a network has outgrown its reference."""
    if is_discrete(context.energy) or not math.isfinite(log_z):
        return []
    log_mass = log_mass_outside(context.energy, walkers.x, log_z)
    if not log_mass > MOST_OUTSIDE:
        return []
    return [
        "the energy falls again farther out than any walker, where it puts more mass than around the data: use a "
        "lower learning rate, fewer updates, or a reference that the network cannot outgrow"
        if log_mass > 0
        else f"{100 * math.exp(log_mass):.1f} % of the mass lie farther out than any walker"
    ]


def _doubt_of_moves(found: HeldOut, kernel: Kernel, dim: int, updates: int) -> list[str]:
    """Unadjusted moves that lead away from the model: weights then do their work, and rare ones decide.

    A ULA step of h = κσ² adds dim·κ³/2 to the variance of a weight; beyond κ = ½ its own law is a third wider than
    the model. With noise of its own, or a clipped drift, it is another law at any step.
    """
    if not isinstance(kernel, ULA) or updates == 0:
        return []
    altered = kernel.noise is not None or kernel.drift_clip is not None
    most, each = (0.01 if altered else 0.06 * dim), found.noise**2 * found.size / updates
    if not each > most:
        return []
    what = "moves whose noise or drift was altered lead" if altered else "the step is too long: moves lead"
    return [
        f"{what} away from the model, and add a variance of {each:.2g} to the weights in each update, so that rare "
        "walkers decide; leave step_size and kernel out, so that moves are adjusted and the step tunes itself"
    ]


def _doubt_of_gap(found: HeldOut, steering: Population) -> list[str]:
    """Two estimates of one log Z that cannot both be right."""
    gap = float(steering.log_partition()[0]) - found.value
    chance = math.sqrt(found.error**2 + float(steering.noise()[0]))
    if not abs(gap) > max(1.0, 4 * chance):
        return []
    side = "above" if gap > 0 else "below"
    return [
        f"the walkers that steer θ give a log Z {abs(gap):.2f} nats {side} this one, which is that of held-out "
        "walkers and is believed, since steering walkers pull their own down; as far apart as that, θ was steered "
        "by walkers that are not the model's. Use a lower pace or learning rate, or more walkers"
    ]


def _comparable(walkers: Population) -> Tensor:
    """Log-weights that say what walkers count for across populations, `(G·n,)`."""
    return (walkers.by_group(walkers.log_weight) + walkers.log_z[:, None]).flatten()
