"""a·E in the place of E: what chains see that sample a power of the model."""

from __future__ import annotations

from torch import Tensor

from metastable.core.protocols import ClosedForm, provides
from metastable.core.types import Energy, EnergyGrad, energy_and_grad, is_discrete

from .base import Context


class Tempered:
    """a·E as an energy.

    Attributes:
        energy: E.
        scale: a, a tensor, so that compiled chains go on when it changes.
    """

    def __init__(self, energy: Energy, scale: Tensor):
        self.energy, self.scale = energy, scale
        self.discrete = is_discrete(energy)

    def __call__(self, x: Tensor) -> Tensor:
        """a·E(x), `(B,)`."""
        return self.scale * self.energy(x)

    def class_energies(self, x: Tensor) -> Tensor:
        """a·E(x, y) of an energy by class, `(B, C)`."""
        return self.scale * self.energy.class_energies(x)  # pyright: ignore


class TemperedClosed(Tempered):
    """a·E of an energy that brings its own gradient."""

    def value_and_grad(self, x: Tensor) -> EnergyGrad:
        """Both times a."""
        value, grad = energy_and_grad(self.energy, x)
        return EnergyGrad(self.scale * value, self.scale * grad)


def tempered(context: Context, scale: float) -> Context:
    """The context of chains that sample exp(−`scale`·E); the same one at 1."""
    if scale == 1:
        return context
    kind = TemperedClosed if provides(context.energy, ClosedForm) else Tempered
    return context.seeing(kind(context.energy, context.data.new_full((), scale)))
