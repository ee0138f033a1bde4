"""The one idea: every method lowers the energy of data and raises the energy of weighted negatives.

A method is a frozen set of choices with four pure pieces, called by the trainer at an update's three moments:

1. `loss` gives each player its surrogate loss, and the trainer steps that player's optimiser;
2. `advance` follows the parameters **after** the step: weights, buffers, frozen copies;
3. both return metrics, tensors that nobody waits for.

What a method carries from one update to the next is its state, a tuple of tensors that a checkpoint keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from metastable.core.errors import ConfigError, require
from metastable.core.types import Energy, LogPartition, Proposal, Walkers
from metastable.kernels import ULA, Kernel

Metrics = dict[str, Tensor]
State = TypeVar("State")


@dataclass
class Context:
    """What a method may look at during training.

    Attributes:
        energy: the energy in training.
        players: every module that is trained, by name; `energy` among them.
        data: the training data, `(n, *event)`, on the device.
        noise: a normalised density around the data, for starts from noise.
        rng: the method's own random numbers.
        step: the number of updates made so far.
        engine: how chains run, `eager` or `compile`.
    """

    energy: Energy
    players: Mapping[str, nn.Module]
    data: Tensor
    noise: Proposal
    rng: torch.Generator
    step: int = 0
    engine: str = "eager"
    data_scale: float = field(default=1.0)


class Negatives(NamedTuple):
    """Weighted negatives: positions `(N, *event)` and raw log-weights `(N,)`, or None for equal weights."""

    x: Tensor
    log_weight: Tensor | None = None


class Nothing(NamedTuple):
    """The state of a method that carries nothing."""


@dataclass(frozen=True)
class Method(Generic[State]):
    """Base of all methods."""

    name: ClassVar[str] = ""

    def start(self, context: Context) -> State:
        """The state before the first update."""
        raise NotImplementedError

    def turns(self, context: Context) -> Sequence[str]:
        """Which players are stepped in this update, in order."""
        return ("energy",)

    def loss(
        self, context: Context, state: State, player: str, batch: Tensor
    ) -> tuple[Tensor, State, Metrics]:
        """The surrogate whose gradient is this player's update."""
        raise NotImplementedError

    def advance(self, context: Context, state: State) -> tuple[State, Metrics]:
        """Follow the parameters after the step."""
        return state, {}

    def current_walkers(self, state: State) -> Walkers | None:
        """The weighted walkers that the method holds now, where it holds any."""
        return None

    def log_partition(self, state: State) -> LogPartition | None:
        """log Z of the energy as it is now, where the method gives it."""
        return None

    def save(self, state: State) -> dict[str, Any]:
        """The state as a tree of tensors and numbers."""
        return state._asdict()  # pyright: ignore

    def load(self, tree: dict[str, Any]) -> State:
        """The inverse of `save`."""
        raise NotImplementedError


@dataclass(frozen=True)
class ChainMethod(Method[State]):
    """A method whose negatives come from Markov chains; the shared surrogate is written once, here.

    Attributes:
        step_size: h of the default ULA kernel; not to be given together with `kernel`.
        kernel: any kernel, instead of ULA with `step_size`.
        steps: kernel steps per update.
        energy_l2: adds `energy_l2`·(E(x⁺)² + E(x⁻)²) to the loss, which keeps energies near zero and changes
            the objective; off by default.
    """

    step_size: float | None = None
    kernel: Kernel | None = None
    steps: int = 1
    energy_l2: float = 0.0

    default_step_size: ClassVar[float] = 0.05

    def __post_init__(self) -> None:
        if self.kernel is not None and self.step_size is not None:
            raise ConfigError(f"{self.name}.step_size", "give either step_size or kernel, not both")
        require(self.steps >= 1, f"{self.name}.steps", "at least 1", self.steps)
        require(self.energy_l2 >= 0, f"{self.name}.energy_l2", "at least 0", self.energy_l2)
        _ = self.moves

    @property
    def moves(self) -> Kernel:
        """The kernel that moves the chains."""
        if self.kernel is not None:
            return self.kernel
        return ULA(self.default_step_size if self.step_size is None else self.step_size)

    def negatives(self, context: Context, state: State, batch: Tensor) -> tuple[Negatives, State, Metrics]:
        """The weighted negatives of this update."""
        raise NotImplementedError

    def loss(
        self, context: Context, state: State, player: str, batch: Tensor
    ) -> tuple[Tensor, State, Metrics]:
        """Mean energy of data minus weighted mean energy of negatives."""
        negatives, state, metrics = self.negatives(context, state, batch)
        loss, contrast_metrics = contrast(context.energy, batch, negatives, self.energy_l2)
        return loss, state, {**contrast_metrics, **metrics}


def contrast(
    energy: Energy, positives: Tensor, negatives: Negatives, energy_l2: float = 0.0
) -> tuple[Tensor, Metrics]:
    """E(x⁺) averaged minus E(x⁻) averaged with the negatives' weights: its gradient is (11), sign reversed."""
    E_data = energy(positives)
    E_model = energy(negatives.x)
    if negatives.log_weight is None:
        mean_model = E_model.mean()
    else:
        mean_model = torch.softmax(negatives.log_weight, 0).to(E_model.dtype) @ E_model
    mean_data = E_data.mean()
    loss = mean_data - mean_model
    if energy_l2:
        loss = loss + energy_l2 * (E_data.square().mean() + E_model.square().mean())
    metrics = {
        "energy_data": mean_data.detach(),
        "energy_negatives": mean_model.detach(),
        "energy_gap": (mean_data - mean_model).detach(),
    }
    return loss, metrics


def chain_metrics(context: Context, moved: Tensor, acceptance: Tensor | None = None) -> Metrics:
    """RMS distance travelled, in units of the data's spread, and the mean acceptance."""
    metrics = {"displacement": moved.mean().sqrt() / context.data_scale}
    if acceptance is not None:
        metrics["acceptance"] = acceptance.mean()
    return metrics
