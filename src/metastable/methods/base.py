"""What the algorithms share: chains, losses on the negatives of another method, and the numbers that are logged."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from metastable.core.batch import Batch, Rows, as_batch
from metastable.core.by_class import of_labels
from metastable.core.errors import ConfigError, require
from metastable.core.method import Context, Method, Metrics, Negatives, State
from metastable.core.method import Nothing as Nothing
from metastable.core.parts import NUMBERS, in_parts
from metastable.core.types import Energy, LogPartition, Walkers, precise
from metastable.kernels import ULA, Kernel, follow_acceptance, fused
from metastable.kernels.base import require_kernel


@dataclass(frozen=True)
class ChainMethod(Method[State]):
    """A method whose negatives come from Markov chains; the shared surrogate is written once, here.

    Attributes:
        step_size: h of ULA, the same in every update; not to be given together with `kernel`. Where neither is
            given, the step tunes itself: each update's is set by what came of those before.
        kernel: any kernel, instead of ULA with `step_size`.
        steps: kernel steps per update.
        energy_l2: adds `energy_l2`·(E(x⁺)² + E(x⁻)²) to the loss, which keeps energies near zero and changes
            the objective; off by default.
        labels: learn p(x | y) from data with labels: every chain carries a label that stays, and an energy by class
            (`ClassEnergy`, which every built-in network becomes) is lowered at data and raised at negatives under
            the label of each.
    """

    step_size: float | None = None
    kernel: Kernel | None = None
    steps: int = 1
    energy_l2: float = 0.0
    labels: bool = field(default=False, kw_only=True)

    first_step_size: ClassVar[float] = 0.05
    """h of the first update where it tunes itself, in units of the data's mean variance."""
    longest_step_size: ClassVar[float] = 0.1
    """What h may grow to, in the same units: a flat energy accepts any step."""

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Refuses a count where the step size stands: `Jarzynski(4096)` is meant to have 4096 walkers."""
        if values and isinstance(values[0], int) and not isinstance(values[0], bool):
            raise ConfigError(
                f"{cls.name}.step_size",
                f"stands first, and {values[0]} is a count; give it by its name, as in walkers={values[0]}, "
                f"steps={values[0]} or step_size={float(values[0])}",
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.kernel is not None and self.step_size is not None:
            raise ConfigError(f"{self.name}.step_size", "give either step_size or kernel, not both")
        require(self.steps >= 1, f"{self.name}.steps", "at least 1", self.steps)
        if self.kernel is not None:
            require_kernel(f"{self.name}.kernel", self.kernel)
        require(self.energy_l2 >= 0, f"{self.name}.energy_l2", "at least 0", self.energy_l2)
        _ = self.moves

    @property
    def needs(self) -> str:  # pyright: ignore
        """Labels, where chains carry them."""
        return "labels" if self.labels else ""

    @cached_property
    def moves(self) -> Kernel:
        """The kernel that moves the chains."""
        if self.kernel is not None:
            return self.kernel
        return ULA(self.first_step_size if self.step_size is None else self.step_size)

    def why_not_fused(self, energy: Energy, x: Tensor) -> str | None:
        """The kernel's reason, or the energy's."""
        return fused.why_not(cast(Kernel, self.chain_kernel), energy, x, precision="float32")

    @property
    def chain_kernel(self) -> Kernel | None:  # pyright: ignore
        """The kernel that moves its chains."""
        return self.moves

    @property
    def tuned(self) -> bool:
        """Whether the step tunes itself."""
        return self.step_size is None and self.kernel is None

    def first_log_step(self, context: Context) -> Tensor | None:
        """log h of the first update, `()`, on the device; None where the step is fixed."""
        if not self.tuned:
            return None
        log_step = math.log(self.first_step_size * _mean_variance(context))
        return torch.full((), log_step, dtype=torch.float64, device=context.data.device)

    def next_log_step(
        self, context: Context, log_step: Tensor, acceptance: Tensor, target: float, gain: float
    ) -> Tensor:
        """log h of the update after one in which `acceptance`, `()`, of all moves were (or would be) accepted."""
        moved = follow_acceptance(log_step, acceptance, target, gain)
        return moved.clamp(max=self.longest_log_step(context))

    def longest_log_step(self, context: Context) -> float:
        """Up to which log h may grow."""
        return math.log(self.longest_step_size * _mean_variance(context))

    def kernel_now(self, state: Any) -> Kernel:
        """The kernel as it moves chains now, with the step that `state` holds; the host waits for that."""
        log_step = getattr(state, "log_step", None)
        return self.moves if log_step is None else replace(self.moves, step_size=float(log_step.exp()))  # pyright: ignore

    @property
    def temperature(self) -> float:
        """T, where negatives follow exp(−E/T): that of the kernel."""
        return self.moves.temperature

    def power(self, step: int) -> float:
        """1/T: training rests where data follow what the negatives follow, exp(−E/T)."""
        return 1 / self.temperature

    def phase(self, context: Context) -> Hashable:
        """None: chains are the same in every update."""
        return None

    @property
    def bounded(self) -> bool:
        """Whether negatives stay in a bounded set under any energy, a constant one included."""
        return self.moves.discrete

    def chains(self, context: Context, batch: int) -> int | None:
        """Chains that move in one update, where a method says so."""
        return None

    def negatives_count(self, context: Context, batch: int) -> int | None:
        """Negatives of one update, where a method says so: the chains that moved, unless it says otherwise."""
        return self.chains(context, batch)

    def negatives(self, context: Context, state: State, batch: Any) -> tuple[Negatives, State, Metrics]:
        """The weighted negatives of this update."""
        raise NotImplementedError

    def drawn(self, negatives: Any) -> tuple[Negatives, ...]:
        """The sets of negatives in what `negatives` returned, for those who look at samples only."""
        return (negatives,)

    def loss(
        self, context: Context, state: State, player: str, batch: Any, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """Mean energy of data minus weighted mean energy of negatives."""
        return contrast(context.energy, batch, negatives, self.energy_l2)

    def evaluations(self, context: Context, batch: int) -> int | None:
        """The chains' gradients, then one energy for each datum and each negative."""
        chains = self.chains(context, batch)
        if chains is None:
            return None
        return chains * (self.moves.evaluations(self.steps, context.energy, context.data) + 1) + batch


@dataclass(frozen=True)
class Objective(Method[State]):
    """Another loss on the negatives of any chain method: what a paper changes when it keeps the sampler.

    The source is a whole method (`PersistentCD`, `ShortRun`, `Jarzynski`, …) of which everything but the loss
    is used; the state is the source's own.

    Attributes:
        source: where the negatives come from.
    """

    source: ChainMethod

    @property
    def needs(self) -> str:  # pyright: ignore
        """What the source needs."""
        return self.source.needs

    @property
    def sources(self) -> tuple[Method, ...]:  # pyright: ignore
        """The one source."""
        return (self.source,)

    def why_not_fused(self, energy: Energy, x: Tensor) -> str | None:
        """The source's reason."""
        return self.source.why_not_fused(energy, x)

    @property
    def chain_kernel(self) -> Kernel | None:  # pyright: ignore
        """The source's."""
        return self.source.chain_kernel

    @property
    def fresh_steps(self) -> int | None:  # pyright: ignore
        """The source's."""
        return self.source.fresh_steps

    def with_sources(self, sources: Sequence[Method]) -> Method:
        """The same loss on other negatives."""
        return replace(self, source=sources[0])  # pyright: ignore

    def source_states(self, state: State) -> tuple[Any, ...]:
        """The state is the source's own."""
        return (state,)

    def moving(self, batch: int, rows: int) -> int:
        """The source's."""
        return self.source.moving(batch, rows)

    def stored(self, batch: int, rows: int) -> int:
        """The source's."""
        return self.source.stored(batch, rows)

    def phase(self, context: Context) -> Hashable:
        """The source's."""
        return self.source.phase(context)

    def sampled(self, context: Context) -> Context:
        """The context that the source sees; a method that samples another energy than E overrides this."""
        return context

    def rate_factor(self, state: State) -> Tensor | None:
        """The source's."""
        return self.source.rate_factor(state)

    def start(self, context: Context) -> State:
        """The source's."""
        return self.source.start(self.sampled(context))

    def negatives(self, context: Context, state: State, batch: Any) -> tuple[Negatives, State, Metrics]:
        """The source's."""
        return self.source.negatives(self.sampled(context), state, batch)

    def drawn(self, negatives: Any) -> tuple[Negatives, ...]:
        """The sets of negatives in what `negatives` returned: one, unless the source or the loss has others."""
        return self.source.drawn(negatives)

    def advance(self, context: Context, state: State) -> tuple[State, Metrics]:
        """The source's."""
        return self.source.advance(self.sampled(context), state)

    def evaluations(self, context: Context, batch: int) -> int | None:
        """The source's; a method that looks at more energies than data and negatives adds them."""
        return self.source.evaluations(context, batch)

    def power(self, step: int) -> float:
        """The source's; a method that weighs its negatives by another power of exp(−E) adds that."""
        return self.source.power(step)

    def current_walkers(self, context: Context, state: State) -> Walkers | None:
        """The source's."""
        return self.source.current_walkers(self.sampled(context), state)

    def log_partition(self, context: Context, state: State) -> LogPartition | None:
        """The source's; a method that samples another energy than E gives none."""
        return self.source.log_partition(self.sampled(context), state)

    def gathered(self, state: State) -> State:
        """The source's."""
        return self.source.gathered(state)

    def own_part(self, state: State) -> State:
        """The source's."""
        return self.source.own_part(state)

    def save(self, state: State) -> dict[str, Any]:
        """The source's."""
        return self.source.save(state)

    def load(self, tree: dict[str, Any]) -> State:
        """The source's."""
        return self.source.load(tree)


def weighed_apart(method: Method) -> str:
    """Why a loss that normalises weights itself cannot have sources that are weighed across processes, in words."""
    weighed = next((source.name for source in method.sources if source.weighs_together), "")
    words = (
        f"{method.name} normalises the weights of its negatives within a process, and {weighed} has walkers "
    )
    return (
        f"{words}that are weighed with those of all others; use a source without weights" if weighed else ""
    )


def _mean_variance(context: Context) -> float:
    """Of one coordinate of the data."""
    return context.data_scale**2 / math.prod(context.data.shape[1:])


def energies_at(energy: Energy, rows: Rows | Negatives) -> Tensor:
    """E of every row, `(B,)`, under its label where there are labels, in single precision at least."""
    rows = as_batch(rows) if isinstance(rows, Tensor) else rows
    return precise(of_labels(energy, rows.given)(rows.x))


def together(data: Batch, negatives: Negatives) -> Batch:
    """Data and negatives in one batch, with their labels where they have any."""
    given = (data.given, negatives.given)
    labels = None if given[0] is None or given[1] is None else torch.cat(given)  # pyright: ignore
    return Batch(torch.cat([data.x, negatives.x]), labels, data.kind)


def energies_of_both(energy: Energy, data: Rows, negatives: Negatives) -> tuple[Tensor, Tensor]:
    """E of data and of negatives, in one pass where that gains."""
    data = as_batch(data)
    if data.device.type == "cpu":  # where a product of more rows may round differently, and gains nothing
        return energies_at(energy, data), energies_at(energy, negatives)
    both = energies_at(energy, together(data, negatives))
    return both[: len(data)], both[len(data) :]


def energies_of_walkers(energy: Any, walkers: Walkers, numbers: int = NUMBERS) -> Tensor:
    """E of every walker, `(N,)` in float64, under its label where it has one, so many `numbers` at a time."""
    if walkers.labels is None:
        return in_parts(energy, walkers.x, numbers).double()
    every = in_parts(energy.class_energies, walkers.x, numbers)
    return every.gather(1, walkers.labels[:, None]).squeeze(1).double()


def contrast(
    energy: Energy, positives: Rows, negatives: Negatives, energy_l2: float = 0.0
) -> tuple[Tensor, Metrics]:
    """E(x⁺) averaged minus E(x⁻) averaged with the negatives' weights: its gradient is (11), sign reversed."""
    E_data, E_model = energies_of_both(energy, positives, negatives)
    mean_data, mean_model = E_data.mean(), negatives.mean(E_model)
    loss = mean_data - mean_model
    if energy_l2:
        loss = loss + energy_l2 * (E_data.square().mean() + E_model.square().mean())
    return loss, gap_metrics(mean_data, mean_model)


def gap_metrics(mean_data: Tensor, mean_model: Tensor) -> Metrics:
    """The numbers that every method with negatives logs, and the guard watches."""
    mean_data, mean_model = mean_data.detach(), mean_model.detach()
    return {"energy_data": mean_data, "energy_negatives": mean_model, "energy_gap": mean_data - mean_model}


def without_log_z(metrics: Metrics) -> Metrics:
    """Metrics of chains that follow another energy than the one in training: their log Z is not its."""
    return {name: value for name, value in metrics.items() if not name.startswith("log_z")}


def chain_metrics(context: Context, moved: Tensor, acceptance: Tensor | None = None) -> Metrics:
    """RMS distance travelled, in units of the data's spread, and the mean acceptance."""
    metrics = {"displacement": moved.mean().sqrt() / context.data_scale}
    if acceptance is not None:
        metrics["acceptance"] = acceptance.mean()
    return metrics
