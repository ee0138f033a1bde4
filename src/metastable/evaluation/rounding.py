"""What coarse products do to an energy."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from metastable.core.parts import energies_of
from metastable.core.precision import precision
from metastable.core.types import Energy


class Rounding(NamedTuple):
    """δ = E as computed − E in float32 over some rows, in nats.

    Attributes:
        mean: moves log Z as a whole, and no difference of energies.
        std: what rounding adds to every energy. A weight that goes along with θ gains δ_k − δ_{k+1} in an update,
            whose variance is below 4·`std`², and far below where a small step of θ leaves most roundings as they
            were; the share of the effective sample size that an update costs for it is about that variance.
    """

    mean: float
    std: float


def rounding_of(energy: Energy, x: Tensor, name: str = "bf16-mixed") -> Rounding:
    """What `ms.precision(name)` does to the energies of the rows `x`, `(B, *event)`: draws of the model, or data.

    >>> import torch
    >>> rounding_of(lambda x: x.square().sum(1), torch.ones(3, 2))  # no product that would be rounded
    Rounding(mean=0.0, std=0.0)
    """
    with precision(name, x.device):
        rounded = energies_of(energy, x)
    off = rounded - energies_of(energy, x)
    return Rounding(float(off.mean()), float(off.std()))
