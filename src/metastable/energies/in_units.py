"""Energies in other units: what was learned in u as an energy of x, and an energy of x as training sees it.

With u = (x − m)A and P the power of the density exp(−P·E) that is learned, E(x) = E(u) − log|det A|/P, so that
log Z is the same number in both.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.parts import home_of
from metastable.core.perceptron import Perceptron
from metastable.core.protocols import (
    Classifier,
    ClosedForm,
    Encoding,
    ExactlyStarted,
    Normalisable,
    Sampled,
    carry,
    perceptron_of,
    provides,
    reference_of,
)
from metastable.core.types import EnergyGrad, Proposal, bind, energy_and_grad
from metastable.core.units import Coordinates
from metastable.proposals.in_units import DensityInTrainingUnits, density_in_data_units

CARRIED = ("context_shape", "time", "costly", "normalised", "output_scale", "classes")
"""What is known of an energy and does not depend on units."""


class InDataUnits(nn.Module):
    """E(x) in the data's own units, from an energy that was trained in others; x may be float64.

    Attributes:
        inner: the energy of u, as it was trained.
        coordinates: the units of training.
        power: P.
    """

    def __init__(self, inner: nn.Module, coordinates: Coordinates, power: float = 1.0):
        super().__init__()
        self.inner, self.coordinates, self.power = inner, coordinates, power
        self.event_shape = coordinates.events.event_shape
        self.offset = -coordinates.events.log_det / power
        carry(inner, self, CARRIED)

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        """E(x), `(B, *event)` to `(B,)`; with contexts, and a time, as the energy inside takes them."""
        if not given:
            return self.inner(self.to_inner(x)) + self.offset
        context, *time = given
        seen = None if context is None else self.contexts(context)
        return self.inner(self.to_inner(x), seen, *time) + self.offset

    def to_inner(self, x: Tensor) -> Tensor:
        """u of x, in the dtype and on the device of the energy inside."""
        return self.coordinates.events.forward(x).to(home_of(self.inner))

    def perceptron(self) -> Perceptron | None:
        """The layers of the energy inside, the first of which takes x; None where it has none."""
        layers, units = perceptron_of(self.inner), self.coordinates.events
        return layers and layers.of_units(units.mean, units.matrix, units.inverse_matrix, self.offset)

    def contexts(self, given: Any) -> Any:
        """Contexts as the energy inside takes them; labels have no units."""
        units = self.coordinates.given
        if units is None or not isinstance(given, Tensor) or not given.is_floating_point():
            return given
        return units.forward(given).to(home_of(self.inner))

    @cached_property
    def reference(self) -> Any:
        """The reference of the energy inside, in the data's units, where it has one."""
        own = reference_of(self.inner)
        if not isinstance(own, Proposal):
            raise AttributeError("reference")
        return density_in_data_units(own, self.coordinates)


class EncodedInDataUnits(InDataUnits):
    """The same for an energy that encodes its contexts once."""

    def encode(self, given: Any) -> Any:
        """What the energy inside makes of the contexts."""
        return self.inner.encode(self.contexts(given))  # pyright: ignore

    def score(self, x: Tensor, code: Any, t: Tensor | None = None) -> Tensor:
        """E for encoded contexts, `(B, K, *event)` to `(B, K)`."""
        return self.inner.score(self.to_inner(x), code, t) + self.offset  # pyright: ignore


class JointInDataUnits(EncodedInDataUnits):
    """The same for a classifier that is an energy."""

    def logits(self, x: Tensor) -> Tensor:
        """h(x), `(B, C)`."""
        return self.inner.logits(self.to_inner(x))  # pyright: ignore

    def log_prob_labels(self, x: Tensor) -> Tensor:
        """log p(y | x), `(B, C)`."""
        return self.inner.log_prob_labels(self.to_inner(x))  # pyright: ignore

    def given(self, labels: Any) -> Any:
        """An energy of p(x | y) for every kernel."""
        return bind(self, self.encode(labels))

    def powered(self, power: float) -> Any:
        """The energy of exp(−P·E), whose p(y | x) no power changes."""
        return JointInDataUnits(self.inner.powered(power), self.coordinates, self.power / power)  # pyright: ignore


class InTrainingUnits(nn.Module):
    """E(u) as training sees it, from an energy of one's own that expects x.

    Chains then move in units of the data, and a step size means the same for every data set. The checkpoint is that
    of the module inside.

    Attributes:
        inner: the energy of x.
        coordinates: the units of training.
        power: P.
    """

    mean: Tensor
    matrix: Tensor

    def __init__(self, inner: nn.Module, coordinates: Coordinates, power: float = 1.0):
        super().__init__()
        self.inner, self.coordinates = inner, coordinates
        units = coordinates.events
        self.event_shape = units.event_shape
        self.offset = units.log_det / power
        like = home_of(inner)
        self.register_buffer("mean", units.mean.to(like.dtype), persistent=False)
        self.register_buffer("matrix", units.inverse_matrix.to(like.dtype), persistent=False)
        carry(inner, self, ("output_scale", "time"))
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)

    def to_data(self, u: Tensor) -> Tensor:
        """x of u, in the dtype of u."""
        flat, mean, matrix = u.flatten(1), self.mean.to(u), self.matrix.to(u)
        back = flat * matrix if matrix.dim() == 1 else flat @ matrix
        return (back + mean).view(u.shape)

    def forward(self, u: Tensor, *rest: Any) -> Tensor:
        """E(u), `(B, *event)` to `(B,)`; what else the energy inside takes, as a time, is handed on."""
        return self.inner(self.to_data(u), *rest) + self.offset

    def perceptron(self) -> Perceptron | None:
        """The layers of the energy inside, the first of which takes u; None where it has none."""
        layers, units = perceptron_of(self.inner), self.coordinates.events
        origin = units.forward(torch.zeros(1, *units.event_shape, dtype=torch.float64)).flatten()
        return layers and layers.of_units(origin, units.inverse_matrix, units.matrix, self.offset)

    def exact_start(self, probe: Tensor) -> Proposal | None:
        """The density that the energy inside equals now, in the units of training; None where it says none."""
        known = provides(self.inner, ExactlyStarted)
        density = self.inner.exact_start(self.to_data(probe)) if known else None  # pyright: ignore
        return None if density is None else DensityInTrainingUnits(density, self.coordinates)  # pyright: ignore


def _without_prefix(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Keys of the module inside, as if nothing were around it."""
    for key in [k for k in state if k.startswith(f"{prefix}inner.")]:
        state[prefix + key[len(f"{prefix}inner.") :]] = state.pop(key)


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """The inverse, before a state is read."""
    for key in [k for k in state if k.startswith(prefix)]:
        state[f"{prefix}inner.{key[len(prefix) :]}"] = state.pop(key)


class GradientInTrainingUnits(InTrainingUnits):
    """The same for an energy with a gradient of its own."""

    def value_and_grad(self, u: Tensor) -> EnergyGrad:
        """E(u) and ∇E(u)."""
        value, grad = energy_and_grad(self.inner, self.to_data(u))
        flat, matrix = grad.flatten(1), self.matrix.to(u)
        turned = flat * matrix if matrix.dim() == 1 else flat @ matrix.T
        return EnergyGrad(value + self.offset, turned.view(u.shape))


class DrawnInTrainingUnits(GradientInTrainingUnits):
    """The same for an energy that draws for itself."""

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """Draws of u, `(n, *event)`."""
        drawn = self.inner.sample(n, rng)  # pyright: ignore
        return self.coordinates.events.forward(drawn).to(drawn.dtype)


class KnownInTrainingUnits(DrawnInTrainingUnits):
    """The same for one that knows its log Z as well."""

    def log_partition(self) -> Tensor:
        """The same number in both units."""
        return self.inner.log_partition()  # pyright: ignore


def in_data_units(energy: Any, coordinates: Coordinates | None, power: float = 1.0) -> Any:
    """What was learned in `coordinates` as an energy of x."""
    if coordinates is None or coordinates.trivial:
        return energy
    if isinstance(energy, InTrainingUnits):
        return energy.inner
    kind = InDataUnits
    if provides(energy, Classifier):
        kind = JointInDataUnits
    elif provides(energy, Encoding):
        kind = EncodedInDataUnits
    return kind(energy, coordinates, power)


def in_training_units(energy: nn.Module, coordinates: Coordinates | None, power: float = 1.0) -> nn.Module:
    """An energy of x as training in `coordinates` sees it."""
    if coordinates is None or coordinates.trivial:
        return energy
    kind = GradientInTrainingUnits if provides(energy, ClosedForm) else InTrainingUnits
    if provides(energy, Sampled):
        kind = KnownInTrainingUnits if provides(energy, Normalisable) else DrawnInTrainingUnits
    return kind(energy, coordinates, power)
