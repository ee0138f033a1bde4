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
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import UnsupportedError, require, require_choice, require_count
from metastable.core.random import normal_like
from metastable.core.resampling import SCHEMES
from metastable.core.types import Energy, LogPartition, Walkers, energy_and_grad
from metastable.core.weights import ess_fraction, log_mean_exp, spread_of_log_mean
from metastable.kernels import ULA, Gibbs, Kernel, run_chain
from metastable.walkers.population import ORDERS, Population
from metastable.walkers.starts import random_rows

from .base import ChainMethod, Context, Metrics, Negatives
from .exact_start import start_populations

CRITERIA = ("ess", "entropy", "lag", "never")


class Move(NamedTuple):
    """What some walkers of a population did in one update: squared distances and acceptances."""

    moved: Tensor
    acceptance: Tensor


def _some_moves(X: Tensor, Y: Tensor, enough: int = 1024) -> Move:
    """Distances of about `enough` walkers, evenly spaced: a diagnostic does not need a pass over all."""
    every = max(1, len(X) // enough)
    moved = (Y[::every] - X[::every]).flatten(1).square().sum(1)
    return Move(moved, torch.ones_like(moved))


def cross(
    kernel: ULA, energy: Energy, walkers: Population, rows: Tensor | None, rng: torch.Generator
) -> tuple[Population, Move]:
    """Algorithm 2, lines 8–15 (Algorithm 1, lines 7–10, when `rows` is None and every walker moves).

    `energy` is U_{k+1}; `walkers` caches U_k and ∇U_k, the latter at `rows` only.
    """
    X = walkers.x if rows is None else walkers.x[rows]
    U_k = walkers.energy if rows is None else walkers.energy[rows]
    dU_k = walkers.grad
    ξ = normal_like(X, rng)
    Y = kernel.move(X, dU_k, ξ)  # line 9
    U_next, dU_next = energy_and_grad(energy, Y)
    dA = kernel.log_weight_increment(ξ, U_k, dU_k, U_next, dU_next)  # line 10: α_k(X, Y) − α_{k+1}(Y, X)
    move = _some_moves(X, Y)
    if rows is None:
        A = walkers.log_weight + dA
        return walkers._replace(x=Y, log_weight=A, energy=U_next, grad=dU_next), move
    with torch.no_grad():
        U_all = energy(walkers.x)  # frozen walkers need no gradient
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
) -> tuple[Population, Move]:
    """For a kernel that leaves each model invariant: A += U_k − U_{k+1} where the walker stands, then move.

    Annealed importance sampling along the path of θ; a move that keeps the model does not change a weight.
    """
    with torch.no_grad():
        U = energy(walkers.x)
    A = walkers.log_weight + (walkers.energy - U)
    X = walkers.x if rows is None else walkers.x[rows]
    result = run_chain(kernel, energy, kernel.init(energy, X), steps, rng, engine=engine)
    Y, U_new, _ = result.state
    if not keeps_energy(kernel, energy):
        with torch.no_grad():
            U_new = energy(Y)
    if rows is not None:
        Y, U_new = walkers.x.index_copy(0, rows, Y), U.index_copy(0, rows, U_new)
    move = Move(steps * result.info.moved, result.info.acceptance)
    return walkers._replace(x=Y, log_weight=A, energy=U_new), move


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
    """Walkers that steer θ, walkers that only follow, and the mini-batch rows of each."""

    steering: Population
    following: Population | None
    rows: Tensor | None
    following_rows: Tensor | None


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

    Deviations: `held_out` and `order` are not in the paper (`held_out=0, order="none"` is). With a kernel
    that has an accept step the weight is the annealed one; see `reweigh_then_move`.
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

    name: ClassVar[str] = "jarzynski"

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
        object.__setattr__(self, "schedule", tuple((int(k), float(c)) for k, c in self.schedule))
        steering, _ = self.counts
        require(steering >= 2, "jarzynski.held_out", "such that two walkers steer", self.held_out)
        if self.batch is not None:
            require_count("jarzynski.batch", self.batch)
            require(self.batch <= steering, "jarzynski.batch", f"at most {steering} (N)", self.batch)

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
            follow = self.walkers + moving * self._each(context)
        elif self.batch is None:
            follow = moving * self.steps
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
        steering, following = self.counts
        return JarzynskiState(*start_populations(context, steering, following, self.populations), None, None)

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
        """Lines 7–16: move and weigh under the new parameters, then resample where it is due."""
        steering, move = self._follow(context, state.steering, state.rows)
        following = state.following
        if following is not None:
            following, _ = self._follow(context, following, state.following_rows)
        state = state._replace(steering=steering, following=following)
        metrics = self._metrics(context, state, move)
        return state, metrics

    def _follow(self, context: Context, walkers: Population, rows: Tensor | None) -> tuple[Population, Move]:
        kernel, energy, rng = self.moves, context.energy, context.rng
        if isinstance(kernel, ULA):
            walkers, move = cross(kernel, energy, walkers, rows, rng)
            for _ in range(self.steps - 1):
                walkers = stay(kernel, energy, walkers, rows, rng)
        elif kernel.invariant:
            walkers, move = reweigh_then_move(kernel, energy, walkers, rows, self.steps, rng, context.engine)
        else:
            raise UnsupportedError(
                f"jarzynski.kernel: {kernel.name} neither leaves the model invariant nor gives its transition "
                "density, so its weights would not be exact; use ULA, MALA or HMC"
            )
        if rows is not None:  # gradients of a mini-batch are of no use to the next one
            walkers = walkers._replace(grad=walkers.grad[:0])
        due = self.due(walkers, context.step + 1)
        return (walkers if due is None else walkers.resample(due, self.scheme, self.order, rng)), move

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

    def _metrics(self, context: Context, state: JarzynskiState, move: Move) -> Metrics:
        metrics = {
            "displacement": move.moved.mean().sqrt() / context.data_scale,
            "ess": state.steering.ess()[0],
            "resamplings": state.steering.resamplings[0],
            "log_z": self._log_z(state),
            "log_z_steering": state.steering.log_partition()[0],
        }
        if state.following is not None:
            spread = state.following.log_partition().std()
            metrics["log_z_se"] = spread / math.sqrt(state.following.groups)
            metrics["ess_held_out"] = state.following.ess().mean()
        if self.moves.invariant:
            metrics["acceptance"] = move.acceptance.mean()
        return metrics

    def current_walkers(self, context: Context, state: JarzynskiState) -> Walkers:
        """All walkers with weights that are comparable across populations."""
        parts = [p for p in (state.steering, state.following) if p is not None]
        x = torch.cat([p.x for p in parts])
        log_weight = torch.cat([(p.by_group(p.log_weight) + p.log_z[:, None]).flatten() for p in parts])
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
        per_population = state.following.log_partition()
        error = float(spread_of_log_mean(per_population))
        ess = float(ess_fraction(state.following.log_weight)) * len(state.following.x)
        return LogPartition(
            float(log_mean_exp(per_population)),
            error,
            ess,
            state.following.groups - 1,
            tuple(self._doubts(per_population, error, state)),
        )

    def _doubts(self, per_population: Tensor, error: float, state: JarzynskiState) -> list[str]:
        doubts = []
        if float(per_population.std()) > 1:
            doubts.append(
                f"the held-out populations disagree by {float(per_population.std()):.2f} nats; use more walkers"
            )
        if state.following is not None and len(state.following.x) < 50 * state.following.groups:
            size = len(state.following.x) // state.following.groups
            doubts.append(f"each held-out population has only {size} walkers; their spread may be too small")
        if error > 0.5:
            doubts.append(f"the standard error is {error:.2f} nats")
        low = float(state.following.ess().min()) if state.following is not None else 1.0
        if low < 0.05:
            doubts.append(f"one held-out population has an effective sample size of {100 * low:.1f} %")
        return doubts

    def save(self, state: JarzynskiState) -> dict[str, Any]:
        """Both populations; mini-batch rows are drawn anew in each update."""
        return {
            "steering": state.steering.save(),
            "following": None if state.following is None else state.following.save(),
        }

    def load(self, tree: dict[str, Any]) -> JarzynskiState:
        """From a checkpoint."""
        following = None if tree["following"] is None else Population(**tree["following"])
        return JarzynskiState(Population(**tree["steering"]), following, None, None)
