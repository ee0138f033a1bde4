"""The one idea: every method lowers the energy of data and raises the energy of weighted negatives.

A method is a frozen set of choices with a few pure pieces, called by the trainer at an update's moments:

1. `negatives` draws the weighted negatives of the update, once, for all players;
2. `loss` gives each player its surrogate loss on data and negatives, and the trainer steps that player's
   optimiser;
3. `advance` follows the parameters **after** the step: weights, buffers, frozen copies;
4. each of them returns metrics, tensors that nobody waits for.

What a method carries from one update to the next is its state, a tuple of tensors that a checkpoint keeps.
Modules that a method needs beside the energy (a second player, a noise model, a frozen copy) are its
`companions`; a checkpoint keeps them too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .batch import Batch
from .processes import joined, own_rows
from .types import Energy, LogPartition, Proposal, Walkers

Metrics = dict[str, Tensor]
State = TypeVar("State")


@dataclass
class Context:
    """What a method may look at during training.

    Attributes:
        energy: the energy in training.
        players: every module of the run by name: `energy`, and the method's companions.
        data: the training data, `(n, *event)`, on the device.
        given: the label or context of each of them, where the method needs those.
        noise: a normalised density around the data, for starts from noise.
        rng: the method's own random numbers.
        step: the number of updates made so far.
        engine: how chains run, as `run_chain` has it.
        data_scale: the data's spread, which distances are measured in.
        slopes: whether chains also report the mean of ‖∇E‖ along their path, as `gradient_magnitude`.
        batch: rows of an update; 0 where nobody has said.
        views: what a method last made of this context, which it may find there again.
    """

    energy: Energy
    players: Mapping[str, nn.Module]
    data: Tensor
    noise: Proposal
    rng: torch.Generator
    step: int = 0
    engine: str = "eager"
    data_scale: float = field(default=1.0)
    slopes: bool = False
    given: Tensor | None = None
    batch: int = 0
    views: Any = field(default=None, init=False, repr=False, compare=False)

    def seeing(self, energy: Energy) -> Context:
        """The same context with another energy in the place of the one in training."""
        return replace(self, energy=energy)


class Negatives(NamedTuple):
    """Weighted negatives.

    Attributes:
        x: positions, `(N, *event)`.
        log_weight: raw log-weights `(N,)`, or None for equal weights.
        log_prob: log-density `(N,)` of the noise that drew them, where a method needs it.
        given: the label of each, int64 `(N,)`, where chains carry one.
        share: where they are some of a population on several processes, what their weight is to all of it, as a
            multiple of an equal share, `()`.
    """

    x: Tensor
    log_weight: Tensor | None = None
    log_prob: Tensor | None = None
    given: Tensor | None = None
    share: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """The average of one value per negative, `(N,)`, under their weights.

        With a `share` it is the mean over processes that is the average.
        """
        if self.log_weight is None:
            return values.mean()
        weights = torch.softmax(self.log_weight, 0).to(values.dtype)
        mean = torch.dot(weights, values)  # autocast would round what `@` is given
        return mean if self.share is None else self.share.to(mean) * mean


class Nothing(NamedTuple):
    """The state of a method that carries nothing."""


@dataclass(frozen=True)
class Method(Generic[State]):
    """Base of all methods: what the rest of the library asks of one, with what it is told where nothing is said.

    A method that needs labels or contexts gets batches, and data in `companions`, as a `Batch` in the place of a
    tensor. What a diagnosis and a report ask are the members of `core.traits.Traits`.
    """

    name: ClassVar[str] = ""
    """What settings, logs and tables call it."""
    needs: ClassVar[str] = ""
    """`labels` or `given` (contexts) where events must come with those, `given?` where they may have contexts."""
    classifies: ClassVar[bool] = False
    """Whether its labels teach a classifier, rather than say which of an energy's classes an event is of."""
    timed: ClassVar[bool] = False
    """Whether its energies have a time as well, E(x, given, t)."""
    title: ClassVar[str] = ""
    """Its name in words, for the middle of a sentence; the name itself where it is left out."""
    gap_vanishes: ClassVar[bool] = True
    """Whether negatives are meant to follow the model, so that the energy gap ends at zero."""
    sees_mode_weights: ClassVar[bool] = True
    """Whether it can learn how much mass each of several separated modes has."""
    mode_weights_advice: ClassVar[str] = ""
    """What to try where modes have the wrong mass; longer chains where it is left out."""
    weighs: ClassVar[bool] = False
    """Whether the logged `objective` is −log(K + 1) where energy and proposal are both the data's law."""
    keeps_walkers: ClassVar[bool] = False
    """Whether it goes on with its walkers from one update to the next."""
    sample: ClassVar[Callable[..., Walkers] | None] = None
    """`sample(players, n, rng)`: draws of a trained model that needs no chains; None for the way of all others."""
    sources: ClassVar[tuple[Method, ...]] = ()
    """The methods whose negatives it uses, where they come from others."""
    chain_kernel: ClassVar[Any] = None
    """The kernel that moves its chains, of several sources the first one's; None where nothing moves."""
    fresh_steps: ClassVar[int | None] = None
    """Steps of chains that begin afresh at every update; None where it has none of these."""
    grows_with: ClassVar[tuple[str, ...]] = ("walkers", "batch", "negatives_per_datum", "chunk")
    """Those of its settings, where it has them, that the memory of an update grows with."""
    weighs_together: ClassVar[bool] = False
    """Whether its negatives of several processes are weighed together."""
    rows_of_state: ClassVar[tuple[str, ...]] = ()
    """Those fields of its state that hold rows, of which each of several processes has its own."""
    not_recorded: ClassVar[str] = ""
    """Why its updates cannot be recorded and launched as a whole, in words; nothing where they can."""

    def takes(self, batch: Batch) -> Any:
        """A batch as the method is given it: events alone, `(B, *event)`, where it needs nothing beside them."""
        return batch if self.needs else batch.x

    def why_not_fused(self, energy: Energy, x: Tensor) -> str | None:
        """Why chains of `energy` from rows like `x` cannot be one kernel on a GPU, in words; None if they can."""
        return "the method does not say that its chains can"

    def sizes(self, batch: int, rows: int) -> dict[str, Any]:
        """What to lower where memory is not enough for an update, with its value, the sources' included.

        Walkers whose number follows from `batch` of `rows` data are given with it.
        """
        left_out = {"walkers": self.stored(batch, rows)}
        own = {name: vars(self)[name] for name in self.grows_with if name in vars(self)}
        own = {name: left_out.get(name) if value is None else value for name, value in own.items()}
        for k, source in enumerate(self.sources):
            front = f"sources.{k}" if len(self.sources) > 1 else "source"
            own |= {f"{front}.{name}": value for name, value in source.sizes(batch, rows).items()}
        return {name: value for name, value in own.items() if value is not None}

    def with_sources(self, sources: Sequence[Method]) -> Method:
        """The same method on other sources, as many as it has."""
        return self

    def source_states(self, state: State) -> tuple[Any, ...]:
        """What each of the sources carries, in their order."""
        return ()

    def moving(self, batch: int, rows: int) -> int:
        """Negatives of one update on `batch` of `rows` data: what a backward pass has to hold beside them."""
        return vars(self).get("walkers") or batch

    def stored(self, batch: int, rows: int) -> int:
        """Walkers that are held between updates."""
        return self.moving(batch, rows)

    def companions(self, energy: nn.Module, data: Any, noise: Proposal, seed: int) -> dict[str, nn.Module]:
        """Modules of the method's own, by name; those with trainable parameters become players.

        They are built from the shape of `data` and from `seed`, and a checkpoint holds everything that
        training or the data put into them: a finished run is read back with other data of the same shape.
        """
        return {}

    def rate(self, player: str) -> float:
        """What the learning rate is multiplied with for this player."""
        return 1.0

    def rate_factor(self, state: State) -> Tensor | None:
        """What the energy's learning rate is multiplied with in the next update, `()`; None for nothing.

        It stays on the device: the trainer does not wait for it.
        """
        return None

    def start(self, context: Context) -> State:
        """The state before the first update."""
        raise NotImplementedError(f"{type(self).__name__}.start(context): a method has to define it")

    def turns(self, context: Context) -> Sequence[str | tuple[str, ...]]:
        """Which players are stepped in this update, in order.

        A tuple of players shares one loss and one backward pass; `loss` is asked for the first of them.
        """
        return ("energy",)

    def phase(self, context: Context) -> Hashable:
        """All that `negatives`, `loss` and `advance` decide from `context.step` in this update, but for `turns`.

        On a GPU, updates of one phase are recorded once and launched as a whole after that: what Python decided
        then, numbers that it computed from `context.step` included, is the same in all of them. None for a method
        that never asks for the step. By default each update has a phase of its own, and none is recorded; a class
        that writes one of the moments anew says its phase anew. No moment may look at a number on a device.
        """
        return context.step

    def updates(self, context: Context, player: str, steps: int) -> int:
        """In how many of the first `steps` updates this player has a turn; its learning rate follows these."""
        return steps

    def negatives(
        self, context: Context, state: State, batch: Any
    ) -> tuple[Negatives | None, State, Metrics]:
        """The weighted negatives of this update, shared by all players; None for a method without any."""
        return None, state, {}

    def loss(
        self, context: Context, state: State, player: str, batch: Any, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """The surrogate whose gradient is this player's update."""
        raise NotImplementedError(
            f"{type(self).__name__}.loss(context, state, player, batch, negatives): a method has to define it"
        )

    def advance(self, context: Context, state: State) -> tuple[State, Metrics]:
        """Follow the parameters after the step."""
        return state, {}

    def evaluations(self, context: Context, batch: int) -> int | None:
        """Energies of single events that one update evaluates, one with its gradient counting as one.

        None where a method does not say; then it cannot be given a budget of evaluations.
        """
        return None

    def power(self, step: int) -> float:
        """P, where what the method learns in update `step` is exp(−P·E): 1, unless it says otherwise."""
        return 1.0

    def current_walkers(self, context: Context, state: State) -> Walkers | None:
        """The weighted walkers of exp(−P·E) that the method holds now, where it holds any."""
        return None

    def log_partition(self, context: Context, state: State) -> LogPartition | None:
        """log Z of exp(−P·E) with the energy as it is now, where the method gives it."""
        return None

    def sample_given(
        self, players: Mapping[str, Any], n: int, given: Tensor, rng: torch.Generator, **options: Any
    ) -> Walkers | None:
        """`n` samples of a trained conditional model for each context, `(B, n, *event)`.

        None for the way of all others: what the energy draws itself where it can, else chains from the proposal.
        """
        return None

    def refuse_options(self, options: Iterable[str]) -> None:
        """Refuse what `sample_given` does not take, by name; nothing where a method has no way of its own."""

    def why_not_shared(self) -> str:
        """Why several processes cannot train with it, in words; nothing where they can."""
        return next((why for source in self.sources if (why := source.why_not_shared())), "")

    def gathered(self, state: State) -> State:
        """The state with the rows of all processes."""
        return self._rows(state, joined)

    def own_part(self, state: State) -> State:
        """A whole state with the rows of this process only."""
        return self._rows(state, lambda rows: rows[own_rows(len(rows))])

    def _rows(self, state: State, make: Callable[[Tensor], Tensor]) -> State:
        old = {name: value for name, value in self.save(state).items() if name in self.rows_of_state}
        new = {name: make(value) for name, value in old.items() if value is not None}
        return state._replace(**new) if new else state  # pyright: ignore

    def save(self, state: State) -> dict[str, Any]:
        """The state as a tree of tensors and numbers."""
        return state._asdict()  # pyright: ignore

    def load(self, tree: dict[str, Any]) -> State:
        """The inverse of `save`."""
        if not tree:
            return Nothing()  # pyright: ignore
        raise NotImplementedError(
            f"{type(self).__name__}.load(tree): a method that carries something has to define it, such as "
            "State(**tree), to be resumed and read back"
        )


def draws_given(method: Any) -> bool:
    """Whether a method has a way of its own to sample given contexts."""
    return getattr(type(method), "sample_given", Method.sample_given) is not Method.sample_given
