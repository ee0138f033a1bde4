"""Contrastive divergence, persistent contrastive divergence and short-run training.

The three differ only in where a chain begins. Algorithms 3 and 4 of Carbone, Hua, Coste and Vanden-Eijnden,
*Efficient training of energy-based models using Jarzynski equality*, NeurIPS 2023, write down CD and PCD.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from metastable.core.augment import augmented, require_changes, require_images
from metastable.core.batch import Batch, Rows, as_batch
from metastable.core.by_class import of_labels
from metastable.core.errors import InputError, require, require_choice, require_count
from metastable.core.processes import average, even_share, share
from metastable.core.protocols import Sampled, provides
from metastable.core.types import Walkers
from metastable.kernels import MALA, Kernel, run_chain, unadjusted_target
from metastable.walkers.space import space_of
from metastable.walkers.starts import Box, ReplayBuffer, Starts, from_batch, from_noise

from .base import ChainMethod, Context, Metrics, Negatives, Nothing, State, chain_metrics
from .exact_start import start_populations

PROBE_EVERY = 10
"""Updates between two looks at whether the step fits; the first ones are all looked at."""
PROBES = 128
"""Chains that are looked at."""


def move(
    method: ChainMethod, context: Context, start: Rows, log_step: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """`method.steps` kernel steps from `start` under the current energy, each chain with the label it is given.

    Steps are of the kernel's size, or of exp(`log_step`).
    """
    kernel, start = method.moves, as_batch(start)
    result = run_chain(
        kernel,
        of_labels(context.energy, start.given),
        start.x,
        method.steps,
        context.rng,
        engine=context.engine,
        step_size=None if log_step is None else log_step.exp(),
        slopes=context.slopes,
    )
    acceptance = result.info.acceptance if kernel.invariant else None
    metrics = chain_metrics(context, method.steps * result.info.moved, acceptance)
    if result.slope is not None:
        metrics["gradient_magnitude"] = result.slope.mean()
    if log_step is not None:
        metrics["step_size"] = log_step.exp()
    return result.state.x, metrics


@dataclass(frozen=True)
class UnadjustedChains(ChainMethod[State]):
    """Chains of ULA that nothing corrects: their own bias is what sets the step, where none is given.

    The variances that ULA keeps are h/(2σ²) too wide for a density of width σ. Now and then a few chains, from
    where they stand, propose one move of MALA at the current h, which is thrown away; how probable its acceptance
    is says how h compares with σ² (`unadjusted_target`), and the steps of later updates follow.
    """

    def probe_due(self, context: Context) -> bool:
        """Whether the step is looked at in this update."""
        return self.tuned and (context.step < PROBE_EVERY or context.step % PROBE_EVERY == 0)

    def phase(self, context: Context) -> Hashable:
        """Whether the step is looked at."""
        return self.probe_due(context)

    def after_probe(self, context: Context, chains: Rows, log_step: Tensor | None) -> Tensor | None:
        """log h of the next update, from where chains stand in this one."""
        if log_step is None or not self.probe_due(context):
            return log_step
        some, kernel = as_batch(chains)[:PROBES], MALA()
        energy, x = of_labels(context.energy, some.given), some.x
        state, h = kernel.init(energy, x), log_step.exp().to(x)
        with torch.no_grad():
            _, info = kernel.step(energy, state, kernel.draw(x, context.rng), h)
        target = unadjusted_target(x[0].numel())
        return self.next_log_step(context, log_step, average(info.acceptance.mean()), target, gain=0.5)

    def evaluations(self, context: Context, batch: int) -> int | None:
        """The chains' gradients, one energy for each datum and each negative, and the two of a probe."""
        made, chains = super().evaluations(context, batch), self.chains(context, batch)
        if made is None or chains is None or not self.probe_due(context):
            return made
        return made + 2 * min(chains, PROBES)


class Stepping(NamedTuple):
    """log h of the next update where the step tunes itself, `()`."""

    log_step: Tensor | None = None


@dataclass(frozen=True)
class FreshChains(UnadjustedChains[Stepping]):
    """Chains that begin anew at every update and are forgotten after it; subclasses say where they begin.

    Attributes:
        walkers: number of chains; by default one for each row of the data batch.
    """

    walkers: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.walkers is not None:
            require_count(f"{self.name}.walkers", self.walkers)

    @property
    def fresh_steps(self) -> int:  # pyright: ignore
        """All of them."""
        return self.steps

    def begin(self, context: Context, batch: Rows, n: int) -> Rows:
        """Where `n` chains begin, `(n, *event)`, and with which labels where they carry any."""
        raise NotImplementedError

    def start(self, context: Context) -> Stepping:
        """Nothing but the step is carried."""
        return Stepping(self.first_log_step(context))

    def negatives(
        self, context: Context, state: Stepping, batch: Rows
    ) -> tuple[Negatives, Stepping, Metrics]:
        """Begin, then move."""
        chains = as_batch(self.begin(context, batch, self.chains(context, len(batch))))
        x, metrics = move(self, context, chains, state.log_step)
        log_step = self.after_probe(context, chains.with_events(x), state.log_step)
        return Negatives(x, given=chains.given), Stepping(log_step), metrics

    def chains(self, context: Context, batch: int) -> int:
        """As many as `walkers` says, or one for each row."""
        return even_share(f"{self.name}.walkers", self.walkers) if self.walkers else batch

    def load(self, tree: dict[str, Any]) -> Stepping:
        """From a checkpoint."""
        return Stepping(**tree)


@dataclass(frozen=True)
class ContrastiveDivergence(FreshChains):
    """Algorithm 3: chains restart at data points before every update and make `steps` steps.

    Biased: with frequent restarts it follows the Fisher divergence, which cannot see the weights of
    separated modes.

    | symbol | here |
    |---|---|
    | N | `walkers` |
    | P | `steps` |
    | h | `step_size` |
    """

    steps: int = 4

    name: ClassVar[str] = "cd"
    title: ClassVar[str] = "contrastive divergence"
    sees_mode_weights: ClassVar[bool] = False

    def begin(self, context: Context, batch: Rows, n: int) -> Batch:
        """Line 4: rows of the data."""
        return from_batch(as_batch(batch), n, context.rng)


@dataclass(frozen=True)
class ShortRun(FreshChains):
    """Chains from noise, `steps` long, at every update (Nijkamp and others, 2019).

    The noise is the Gaussian with the data's mean and covariance. What is learned is the short chain as a
    generator; its energy is in general not a density model of the data.
    """

    steps: int = 60

    name: ClassVar[str] = "short-run"
    title: ClassVar[str] = "short-run training"
    sees_mode_weights: ClassVar[bool] = False

    def begin(self, context: Context, batch: Rows, n: int) -> Batch:
        """Fresh noise, with labels of the data."""
        rows = as_batch(batch)
        x = from_noise(context.noise, n, context.rng).to(rows.x.dtype)
        return Batch(x) if rows.given is None else from_batch(rows, n, context.rng).with_events(x)


class PersistentState(NamedTuple):
    """The buffer, chains in flight with their rows, the ends `(2, *event)` of uniform noise, and log h, `()`.

    `given` are the labels of the buffer's chains, where they carry any; each keeps its own.
    """

    buffer: Tensor
    x: Tensor
    rows: Tensor
    box: Tensor | None = None
    log_step: Tensor | None = None
    given: Tensor | None = None


@dataclass(frozen=True)
class PersistentCD(UnadjustedChains[PersistentState]):
    """Algorithm 4: chains go on from where they stood at the last update.

    Attributes:
        walkers: chains in the buffer; by default one for each data point, at most 10,000.
        batch: chains that move in one update; by default all of them.
        start_at: `data` (Algorithm 4), `noise`, or `model`: draws of the first model, the paper's "unweighted"
            procedure (Appendix C.1.2).
        rejuvenation: share of chains that begin afresh from noise at each update.
        noise: what noise is: `gaussian`, with the data's mean and covariance, or `uniform`, between the data's
            least and greatest values (of each coordinate, or of all pixels of images together).
        augment: ways in which pictures that are read from the buffer are changed before they move: `flip`, `crop`,
            `rescale`, `colour`, `blur` (`core.augment`). It is what the paper's Table 1 means by PCD with data
            augmentation: jumps that help chains to mix, of Y. Du and others, 2021. They are no moves of the model,
            so that chains start off their law and have to find back, and the density that is learned is not quite
            the data's. Data are augmented by the trainer's own `augment`.

    Deviations: an update first moves the chains and then takes the gradient at their new positions, both under
    the current parameters; Algorithm 4 takes the gradient first. The sequence of moves and gradients is the
    same, shifted by half an update.
    """

    walkers: int | None = None
    batch: int | None = None
    start_at: str = "data"
    rejuvenation: float = 0.0
    noise: str = "gaussian"
    augment: tuple[str, ...] = ()

    name: ClassVar[str] = "pcd"
    title: ClassVar[str] = "persistent contrastive divergence"
    keeps_walkers: ClassVar[bool] = True
    rows_of_state: ClassVar[tuple[str, ...]] = ("buffer", "x", "rows", "given")
    sees_mode_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.walkers is not None:
            require_count("pcd.walkers", self.walkers)
        if self.batch is not None:
            require_count("pcd.batch", self.batch)
        require_choice("pcd.start_at", self.start_at, ("data", "noise", "model"))
        require(0 <= self.rejuvenation <= 1, "pcd.rejuvenation", "between 0 and 1", self.rejuvenation)
        require_choice("pcd.noise", self.noise, ("gaussian", "uniform"))
        object.__setattr__(self, "augment", require_changes("pcd.augment", self.augment))

    def stored(self, batch: int, rows: int) -> int:
        """The buffer."""
        return self.walkers or min(rows, 10_000)

    def moving(self, batch: int, rows: int) -> int:
        """`batch` of them, or all."""
        return min(self.batch or self.stored(batch, rows), self.stored(batch, rows))

    def chains(self, context: Context, batch: int) -> int:
        """`batch` of them, or all."""
        field = "pcd.batch" if self.batch else "pcd.walkers"
        return even_share(field, self.moving(batch, len(context.data)))

    def start(self, context: Context) -> PersistentState:
        """Line 2."""
        if self.augment:
            require_images("pcd.augment", context.data.shape[1:])
        self.chains(context, 0)  # where they cannot be shared out, that is said now
        N = share(self.stored(0, len(context.data)))
        if self.noise == "uniform":
            rule = "must be 'gaussian' for units coded −1 and +1: their noise is random signs"
            space_of(context.energy).require_volume("pcd.noise", rule)
        box = torch.stack(Box.around(context.data)) if self.noise == "uniform" else None
        chains = self._first(context, box, N)
        x, given = chains.x, chains.given
        return PersistentState(x, x[:0], x.new_empty(0).long(), box, self.first_log_step(context), given)

    def _first(self, context: Context, box: Tensor | None, n: int) -> Batch:
        """Where the chains begin, with labels in the data's shares where they carry any."""
        if self.start_at == "model":
            walkers = start_populations(context, n, 0, 1, self.labels)[0]
            return Batch(walkers.x, walkers.given)
        data = Batch(context.data, context.given if self.labels else None)
        if self.start_at == "data":
            return from_batch(data, n, context.rng)
        x = from_noise(_fresh(context, box), n, context.rng).to(context.data.dtype)
        return from_batch(data, n, context.rng).with_events(x) if self.labels else Batch(x)

    def negatives(
        self, context: Context, state: PersistentState, batch: Rows
    ) -> tuple[Negatives, PersistentState, Metrics]:
        """Read, rejuvenate, augment, move."""
        buffer, fresh = ReplayBuffer(state.buffer), _fresh(context, state.box)
        reading = buffer.read(self.chains(context, len(batch)), context.rng, self.rejuvenation, fresh)
        start = augmented(reading.x, self.augment, context.rng)
        chains = Batch(start, None if state.given is None else state.given[reading.rows])
        x, metrics = move(self, context, chains, state.log_step)
        log_step = self.after_probe(context, chains.with_events(x), state.log_step)
        made = Negatives(x, given=chains.given)
        return made, state._replace(x=x, rows=reading.rows, log_step=log_step), metrics

    def advance(self, context: Context, state: PersistentState) -> tuple[PersistentState, Metrics]:
        """Write the chains back to the rows they were read from; where all of them moved, they are the buffer."""
        if self.batch is None:
            return state._replace(buffer=state.x), {}
        buffer = ReplayBuffer(state.buffer).write(state.rows, state.x)
        return state._replace(buffer=buffer.x), {}

    def current_walkers(self, context: Context, state: PersistentState) -> Walkers:
        """The buffer, with equal weights."""
        return Walkers.equal(state.buffer, labels=state.given)

    def save(self, state: PersistentState) -> dict[str, Any]:
        """As a tree; labels where chains carry any."""
        tree = state._asdict()
        return tree if state.given is not None else {k: v for k, v in tree.items() if k != "given"}

    def load(self, tree: dict[str, Any]) -> PersistentState:
        """From a checkpoint."""
        return PersistentState(**tree)


def _fresh(context: Context, box: Tensor | None) -> Starts:
    return context.noise if box is None else Box(*box)


@dataclass(frozen=True)
class ExactDraws(ChainMethod[Nothing]):
    """Exact draws of the model at every update, for an energy that can sample itself: no chain, no bias.

    The energy must have `sample(n, rng)`, `n` independent draws of exp(−E)/Z as it is now.

    Attributes:
        walkers: draws in an update; by default one for each row of the data batch.
    """

    walkers: int | None = None

    name: ClassVar[str] = "exact"
    discrete: ClassVar[bool] = True
    """Draws are the energy's own, so they stay on the states of a discrete one."""
    chain_kernel: ClassVar[Kernel | None] = None  # pyright: ignore

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting in ("step_size", "kernel"):
            require(vars(self)[setting] is None, f"exact.{setting}", "left out: nothing moves", "a value")
        require(not self.labels, "exact.labels", "left out: draws are of events alone", self.labels)
        if self.walkers is not None:
            require_count("exact.walkers", self.walkers)

    def start(self, context: Context) -> Nothing:
        """Nothing is carried."""
        if not provides(context.energy, Sampled):
            raise InputError(
                f"energy: {type(context.energy).__name__} has no sample(n, rng), which exact draws need; "
                "use a method with chains (pcd, jarzynski)"
            )
        return Nothing()

    def negatives(
        self, context: Context, state: Nothing, batch: Tensor
    ) -> tuple[Negatives, Nothing, Metrics]:
        """Independent of every draw before."""
        return Negatives(self._draw(context, self.negatives_count(context, len(batch)))), state, {}

    def _draw(self, context: Context, n: int) -> Tensor:
        return context.energy.sample(n, context.rng).detach().to(context.data)  # pyright: ignore

    def negatives_count(self, context: Context, batch: int) -> int:
        """As many as `walkers` says, or one for each row."""
        return even_share(f"{self.name}.walkers", self.walkers) if self.walkers else batch

    def evaluations(self, context: Context, batch: int) -> int:
        """One energy for each datum and each draw."""
        return batch + self.negatives_count(context, batch)

    def current_walkers(self, context: Context, state: Nothing) -> Walkers:
        """Fresh draws."""
        return Walkers.equal(self._draw(context, self.walkers or min(len(context.data), 10_000)))

    def load(self, tree: dict[str, Any]) -> Nothing:
        """Nothing was saved."""
        return Nothing()
