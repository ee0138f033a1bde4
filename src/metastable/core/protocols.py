"""What an energy or a proposal may bring beside what it must: every optional member, each with what it is good for.

An energy must only be callable, `(B, *event)` to `(B,)`; a proposal must have `event_shape`, `sample` and
`log_prob` (`core.types.Proposal`). What else they have is asked for by what stands here: `provides(energy,
Classifier)` says whether every member of a protocol is there, and a function ending in `_of` or beginning with
`is_` reads a value that has a default. What a kernel and a method may bring are the members of their base classes,
`kernels.Kernel` and `core.method.Method`, whose defaults make asking unnecessary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

# ---- energies


class Shaped(Protocol):
    """A law that knows its events."""

    event_shape: tuple[int, ...]
    """The shape of one event; `sample` and `log_partition` then need not be told."""


class Discrete(Protocol):
    """A law over units coded −1 and +1."""

    discrete: bool
    """Whether events are units coded −1 and +1; False where it is left out."""


class ClosedForm(Protocol):
    """An energy with a gradient of its own."""

    def value_and_grad(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Energies `(B,)` and gradients `(B, *event)` in closed form, instead of automatic differentiation."""
        ...


class Sampled(Protocol):
    """An energy that draws for itself."""

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` independent draws of exp(−E)/Z as it is now; with contexts also `given`, draws for each."""
        ...


class Normalisable(Protocol):
    """An energy that knows its log Z."""

    def log_partition(self) -> Tensor:
        """log Z as it is now, `()`; with `sample` an exact start for walkers."""
        ...


class ExactlyStarted(Protocol):
    """An energy that equals a known density at the start."""

    def exact_start(self, probe: Tensor) -> Any:
        """The density that the energy equals now, up to a constant; None where it equals none."""
        ...


class OnReference(Protocol):
    """An energy that stands on a density."""

    reference: Any
    """A proposal that holds the energy's mass, where estimates of log Z start from."""


class Normalised(Protocol):
    """An energy that is −log of a density."""

    normalised: bool
    """Whether log Z is 0, so that nothing has to be estimated; False where it is left out."""


class Costly(Protocol):
    """An energy that is dear."""

    costly: bool
    """Whether one energy is an ODE solved, so that scores and pictures do with fewer; False if left out."""


class Classifier(Protocol):
    """An energy made of a classifier's logits, E(x) = −o·log Σ e^h."""

    def logits(self, x: Tensor) -> Tensor:
        """h, `(B, *event)` to `(B, classes)`: the energy is a classifier too, and judged as one."""
        ...


class ByClass(Protocol):
    """An energy of events with classes, p(x, y) ∝ exp(−E(x, y)), whose E(x) is that of x alone."""

    def class_energies(self, x: Tensor) -> Tensor:
        """E(x, y) for every class, `(B, *event)` to `(B, C)`, which chains with labels need."""
        ...


class Scaled(Protocol):
    """An energy whose numbers are in units of its own."""

    output_scale: float
    """o of a classifier's energy, which limits on energies are multiplied with; 1 where it is left out."""


class Counted(Protocol):
    """A classifier that says how many classes it knows."""

    classes: int
    """How many classes a network tells apart; read off its last linear layer where it is left out."""


class Encoded(Protocol):
    """A conditional energy with one module for its contexts."""

    encoder: Any
    """The module that encodes contexts, which an energy and its proposal may share (`encoder_owner`)."""


class Encoding(Protocol):
    """A conditional energy that encodes contexts once; `score(x, code, t)` goes with it."""

    def encode(self, given: Tensor) -> Any:
        """A code of the contexts, made once for all their events and chain steps; `score(x, code, t)` takes it."""
        ...


class Timed(Protocol):
    """A conditional energy that says whether it has a time."""

    time: bool
    """Whether the energy has a time, E(y, given, t); where it is left out, its signature says."""


class Sweeping(Protocol):
    """A discrete energy that a Gibbs sweep need not evaluate unit by unit; `sweep_uniforms` may go with it."""

    def sweep(self, x: Tensor, uniform: Tensor, free: Tensor | None, order: Tensor | None) -> Tensor:
        """One Gibbs sweep over all units, in blocks; `sweep_uniforms` says how many numbers it draws."""
        ...


class SweepCounted(Protocol):
    """A sweep that draws fewer units than there are, or more."""

    sweep_uniforms: int
    """How many numbers one `sweep` draws for each row; one for each unit where it is left out."""


class Listed(Protocol):
    """A discrete energy that is summed over fewer states than it has; `sample` and `log_partition` go with it."""

    listed_units: int
    """Units over which its own `log_partition` and `sample` sum: log Z is exact where these are few."""


class Enumerated(Protocol):
    """An energy whose exact answers may be out of reach."""

    enumerable: bool
    """Whether `sample` and `log_partition` are affordable; True where it is left out."""


class Tempering(Protocol):
    """A discrete energy with a path of its own from independent units."""

    def tempered(self, beta: float, fields: Tensor) -> Any:
        """The energy at β of its own path from independent units with these fields, for annealing."""
        ...


class Powering(Protocol):
    """An energy of which more is known than values."""

    def powered(self, power: float) -> Any:
        """P·E as an energy that keeps what is known of this one; without it only values and gradients are kept."""
        ...


class Fitted(Protocol):
    """A model with a loss of its own; `loss_rows` may go with it."""

    def loss(self, x: Tensor, given: Tensor | None = None, *, rng: torch.Generator) -> Tensor:
        """What the method `density` and a trained proposal minimise; a proposal without one has −log p."""
        ...


class LossCounted(Protocol):
    """A model whose loss looks at a row several times."""

    loss_rows: int
    """Rows that go through the network for each row in `loss`, for budgets of evaluations; 1 where left out."""


class Following(Protocol):
    """A module with something to do after each step."""

    def after_step(self) -> None:
        """Called after each optimiser step, for any part of a trained module."""
        ...


class ZeroStarting(Protocol):
    """A network that knows how to be zero."""

    def start_at_zero(self) -> None:
        """Makes the network zero everywhere, in place; without it the last layer is set to zero."""
        ...


class Layered(Protocol):
    """An energy that is a perceptron, alone or on Gaussians, in whatever units."""

    def perceptron(self) -> Any:
        """Its layers as a `core.perceptron.Perceptron`, for chains that run in one launch; None if it is none."""
        ...


# ---- proposals


class Gaussianlike(Protocol):
    """A proposal that is a Gaussian or a mixture of them."""

    def gaussians(self) -> Any:
        """Its components as `core.perceptron.Gaussians`, for chains that run in one launch."""
        ...


class Conditional(Protocol):
    """A proposal whose density depends on a context."""

    context_shape: tuple[int, ...] | None
    """The shape of one context; `sample` and `log_prob` then take `given` last."""


class Scored(Protocol):
    """A proposal with a density: what chains only begin from need not have one."""

    def log_prob(self, x: Tensor) -> Tensor:
        """Normalised log-density; without it draws cannot be weighed, and chains begin from them as they are."""
        ...


class Reparametrised(Protocol):
    """A proposal through whose draws gradients flow."""

    def rsample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` draws through which gradients flow, for proposals that play against the energy."""
        ...


class JointlyScored(Protocol):
    """A proposal whose draws come with their log-densities."""

    def sample_and_log_prob(self, n: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws with their log-densities, where that costs less than one after the other."""
        ...


class Estimated(Protocol):
    """A proposal whose density is an estimate; `draws`, `redraw` and `density_error` go with it."""

    biased: bool
    """Whether `log_prob` is a biased estimate, so that no weights may rest on it; False where it is left out."""


class StepwiseSolved(Protocol):
    """A proposal that solves an ODE; its `steps` and `scored` go with it."""

    def with_steps(self, steps: int, scored: int) -> Any:
        """The same density with its ODE solved in other numbers of steps, by which its error is estimated."""
        ...


class Refinable(Protocol):
    """A proposal that solves an ODE, and knows how finely numbers need it."""

    def finely(self) -> Any:
        """The same density, solved as finely as log-densities should be."""
        ...


class FineDrawing(Protocol):
    """An energy that also draws with a known density, by an ODE; `with_steps` goes with it."""

    fine: tuple[int, int]
    """Steps and divergences of the ODE behind its own draws, where weights rest on them."""


class Flowing(Protocol):
    """A flow that encodes contexts once."""

    def velocity_given(self, given: Tensor) -> Callable[[Tensor, float], Tensor]:
        """(y, t) ↦ velocity for these contexts, encoded once."""
        ...


# ---- settings of an energy


class Settling(Protocol):
    """Settings that leave something to the data."""

    def settled(self, x: Tensor) -> Any:
        """The same settings, with what they leave to the data decided: a run records what it was."""
        ...


# ---- transitions


class NoiseDrawing(Protocol):
    """A transition of `MetropolisHastings` whose draws are not made of normal noise of the event's shape."""

    def noise(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """What `draw(x, noise)` is handed; standard normal, of the shape of `x`, where it is left out."""
        ...


# ---- asking


def perceptron_of(energy: Any) -> Any:
    """The layers of an energy that is a perceptron; None of any other."""
    return energy.perceptron() if provides(energy, Layered) else None


@cache
def members(kind: type) -> tuple[str, ...]:
    """The names of a protocol's members."""
    return tuple(name for name in {**kind.__annotations__, **vars(kind)} if not name.startswith("_"))


def provides(thing: Any, *kinds: type) -> bool:
    """Whether a thing has every member of these protocols; what it derives from does not matter.

    >>> provides(lambda x: x.sum(1), ClosedForm)
    False
    """
    return all(hasattr(thing, name) for kind in kinds for name in members(kind))


def carry(inner: Any, outer: Any, names: tuple[str, ...]) -> None:
    """Say of a law around another one what the one inside says of itself, of these members."""
    for name in names:
        if hasattr(inner, name):
            setattr(outer, name, getattr(inner, name))


def is_discrete(law: Any) -> bool:
    """Whether an energy, a proposal or a method is over units coded −1 and +1, as its `discrete` says."""
    return bool(getattr(law, "discrete", False))


def is_normalised(energy: Any) -> bool:
    """Whether an energy says that its log Z is 0."""
    return bool(getattr(energy, "normalised", False))


def is_costly(energy: Any) -> bool:
    """Whether an energy says that one of its values is an ODE solved."""
    return bool(getattr(energy, "costly", False))


def is_enumerable(energy: Any) -> bool:
    """Whether an energy that sums over its states can; it can where it says nothing."""
    return bool(getattr(energy, "enumerable", True))


def is_biased(proposal: Any) -> bool:
    """Whether a proposal says that its log-density is an estimate."""
    return bool(getattr(proposal, "biased", False))


def is_symmetric(noise: Any) -> bool:
    """Whether conditional noise says that p(y given x) = p(x given y)."""
    return bool(getattr(noise, "symmetric", False))


def has_time(energy: Any, default: bool | None = None) -> bool | None:
    """Whether a conditional energy says that it has a time; `default` where it says nothing."""
    return getattr(energy, "time", default)


def event_shape_of(law: Any) -> tuple[int, ...] | None:
    """The shape of one event, where a law says it; a vector's may be said by its dimension."""
    shape = getattr(law, "event_shape", None)
    return (shape,) if isinstance(shape, int) else None if shape is None else tuple(shape)


def context_shape_of(proposal: Any) -> tuple[int, ...] | None:
    """The shape of one context, where a proposal has contexts."""
    return getattr(proposal, "context_shape", None)


def reference_of(energy: Any) -> Any:
    """The density that an energy stands on, or None."""
    return getattr(energy, "reference", None)


def output_scale_of(energy: Any) -> float | None:
    """o of a classifier's energy; None where the energy has none."""
    return getattr(energy, "output_scale", None)
