"""What is known of the rows' law, in the units of training and in the data's own."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from metastable.core.units import Coordinates
from metastable.data import ToySet


def toy_within(toy: ToySet | None, coordinates: Coordinates | None) -> ToySet | None:
    """What is known of the rows' law, in the units of training."""
    if toy is None or coordinates is None:
        return toy
    units, log_density = coordinates.events, toy.log_density

    def within(u: Tensor) -> Tensor:
        assert log_density is not None
        return log_density(units.inverse(u).float()) - units.log_det

    centers = None if toy.centers is None else units.forward(toy.centers).float()
    return dataclasses.replace(toy, centers=centers, log_density=None if log_density is None else within)


def toy_outside(toy: ToySet | None, coordinates: Coordinates | None) -> ToySet | None:
    """The same in the data's units again."""
    if toy is None or coordinates is None:
        return toy
    units, log_density = coordinates.events, toy.log_density

    def outside(x: Tensor) -> Tensor:
        assert log_density is not None
        return log_density(units.forward(x)) + units.log_det

    centers = None if toy.centers is None else units.inverse(toy.centers)
    return dataclasses.replace(toy, centers=centers, log_density=None if log_density is None else outside)
