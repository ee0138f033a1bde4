"""What a kernel is: one Markov step as a pure function of tensors.

`step(energy, state, noise, step_size) → (state, info)` draws nothing and changes nothing: the random numbers
of a step are an argument, made beforehand by `draw`. State is what the next step needs, Info is diagnostics.
The same function is therefore run eagerly, compiled, or captured on a GPU with the noise as an input buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import ConfigError, UnsupportedError, require, require_length
from metastable.core.random import normal_like, uniform_rows
from metastable.core.types import Energy, is_discrete


class Noise(NamedTuple):
    """Random numbers of one step: standard normals `(B, *event)` and uniforms on [0, 1) `(B,)`.

    A kernel that needs other ones makes them in its `draw`, and says there what the two hold.
    """

    normal: Tensor
    uniform: Tensor


class Info(NamedTuple):
    """Diagnostics of one step, each `(B,)`.

    Attributes:
        acceptance: probability with which the move was accepted (1 for kernels that never reject).
        moved: squared distance from the old position to the new one.
        grad: ∇E at the old position, `(B, *event)`, from a kernel that made it and does not keep it in its
            state; a reference, which costs nothing where nobody reads it.
    """

    acceptance: Tensor
    moved: Tensor
    grad: Tensor | None = None


class ChainState(NamedTuple):
    """Where a chain is. `energy` and `grad` belong to `x`; kernels that do not keep them leave them empty."""

    x: Tensor
    energy: Tensor
    grad: Tensor


class ChainResult(NamedTuple):
    """The final state, mean diagnostics over the run, and positions `(draws, B, *event)` if recorded.

    `slope` is the mean of ‖∇E‖ over the positions x₀ … x_{k−1} of each chain, `(B,)`, if asked for; zero where
    the kernel has no gradients.
    """

    state: ChainState
    info: Info
    trace: Tensor | None
    slope: Tensor | None = None


@dataclass(frozen=True)
class Kernel:
    """Base of all kernels: a frozen set of numbers with a pure `step`. Those with a step size are `StepKernel`s."""

    name: ClassVar[str] = ""
    """What settings call it."""
    invariant: ClassVar[bool] = True
    """Whether the kernel leaves exp(−E) exactly invariant (it has an accept step, or draws from conditionals)."""

    @property
    def discrete(self) -> bool:
        """Whether its moves stay on units coded −1 and +1."""
        return False

    @property
    def temperature(self) -> float:
        """The temperature T at which the chain really samples: its law is about exp(−E/T)."""
        return 1.0

    @property
    def gradients_per_step(self) -> int:
        """Gradient evaluations that one step costs."""
        return 1

    def evaluations(self, steps: int, energy: Energy | None = None, x: Tensor | None = None) -> int:
        """Energies that `init` and `steps` steps evaluate for one chain; one with its gradient counts as one.

        `energy` and `x`, some rows of its events, are for kernels whose cost depends on them.
        """
        return steps * self.gradients_per_step + int(self.invariant)

    def init(self, energy: Energy, x: Tensor) -> ChainState:
        """The state of chains standing at `x`."""
        raise NotImplementedError(f"{type(self).__name__}.init(energy, x): a kernel has to define it")

    def draw(self, x: Tensor, rng: torch.Generator, energy: Energy | None = None) -> Noise:
        """The random numbers of one step; `energy` is for kernels that must ask it how many they need."""
        return Noise(normal_like(x, rng), uniform_rows(x, rng))

    def step(
        self, energy: Energy, state: ChainState, noise: Noise, step_size: Tensor | float
    ) -> tuple[ChainState, Info]:
        """One step with the given noise; `step_size` is for those that have one.

        It may be one for each row, `(B, 1, …, 1)`, which broadcasts against positions.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.step(energy, state, noise, step_size): a kernel has to define it"
        )


@dataclass(frozen=True)
class StepKernel(Kernel):
    """Base of the kernels with a step size, which `warm_up` can adapt.

    Attributes:
        step_size: h. Drift h∇E and noise √(2h), whatever a paper calls it.
    """

    step_size: float = 0.1

    target_acceptance: ClassVar[float] = 0.8
    """The share of accepted moves that warm-up steers the step size to."""

    def __post_init__(self) -> None:
        require_length(f"{self.name}.step_size", self.step_size)


def require_kernel(field: str, kernel: object) -> None:
    """Refuse what is no kernel: a name, a class, an object that does not derive from `Kernel`."""
    if isinstance(kernel, type):
        raise ConfigError(field, f"got the class {kernel.__name__}; pass an instance, {kernel.__name__}(…)")
    require(
        isinstance(kernel, Kernel), field, "a kernel, an object of a class that derives from Kernel", kernel
    )


def require_events(kernel: Kernel, energy: Energy) -> None:
    """Refuse a kernel that would leave the states of a discrete energy."""
    if is_discrete(energy) and not kernel.discrete:
        raise UnsupportedError(
            f"kernel: {kernel.name!r} moves in continuous space, but the energy is over units coded −1 and +1; "
            "use Gibbs(), or MetropolisHastings with a proposal that stays on them such as Flips(0.1)"
        )
