"""The density that was learned, where it is exp(−P·E) and not exp(−E).

Chains whose noise does not match their drift sample exp(−E/T), and what they teach an energy E is that exp(−E/T) is
the data's density: P = 1/T. Whatever is said about the model must then be said of P·E.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from .protocols import Powering, event_shape_of, output_scale_of, provides, reference_of
from .types import Energy, EnergyGrad, Proposal, energy_and_grad, is_discrete

ROUNDING = 1e-9
"""A power this near to 1 is 1: σ²/(2h) and (1 − β) + β are rounded."""


class Powered(nn.Module):
    """P·E as an energy: E's parameters, dtype, device, kind and shape of events, times a number.

    Attributes:
        energy: E.
        power: P.
    """

    def __init__(self, energy: Energy, power: float):
        super().__init__()
        self.energy, self.power = energy, power
        self.discrete = is_discrete(energy)
        shape = event_shape_of(energy)
        if shape is not None:
            self.event_shape = shape
        reference = reference_of(energy)
        if isinstance(reference, Proposal) and not self.discrete:
            object.__setattr__(self, "reference", reference)  # where to start from; E's module, not one more
        scale = output_scale_of(energy)
        if scale is not None:
            self.output_scale = power * float(scale)

    def forward(self, x: Tensor) -> Tensor:
        """P·E(x), `(B, *event)` to `(B,)`."""
        return self.power * self.energy(x)

    def value_and_grad(self, x: Tensor) -> EnergyGrad:
        """Those of E, times P: an energy with a gradient of its own keeps it."""
        value, grad = energy_and_grad(self.energy, x)
        return EnergyGrad(self.power * value, self.power * grad)


def powered(energy: Any, power: float) -> Any:
    """The energy of the density exp(−P·E): E itself at P = 1, so that nothing changes there.

    An energy of which more is known than its values (a classifier, whose p(y | x) no power changes) brings a
    `powered(power)` of its own.

    >>> import torch
    >>> powered(lambda x: x.square().sum(1), 4.0)(torch.ones(1, 2))
    tensor([8.])
    """
    if power == 1:
        return energy
    return energy.powered(power) if provides(energy, Powering) else Powered(energy, power)


def without_rounding(power: float) -> float:
    """The power, or 1 where rounding alone keeps it from that.

    >>> without_rounding(0.3**2 / (2 * 0.045)), without_rounding(4.0)
    (1.0, 4.0)
    """
    return 1.0 if math.isclose(power, 1.0, rel_tol=ROUNDING) else power
