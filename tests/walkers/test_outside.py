"""Mass that no walker has met, against closed forms."""

import math

import pytest
import torch
from torch import Tensor

from metastable.walkers.outside import log_mass_outside


def walkers(d: int, n: int = 2000) -> Tensor:
    return torch.randn((n, d), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def bowl(x: Tensor) -> Tensor:
    return 0.5 * x.square().sum(1)


@pytest.mark.parametrize("d", [1, 2, 5, 50])
def test_a_gaussian_has_next_to_nothing_beyond_its_walkers(d):
    assert log_mass_outside(bowl, walkers(d), 0.5 * d * math.log(2 * math.pi)) < math.log(0.01)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_a_far_shell_is_weighed(d):
    """A shell at thirty standard deviations with twice the mass of the bowl."""
    surface = math.log(2) + 0.5 * d * math.log(math.pi) - math.lgamma(0.5 * d)
    height = math.log(2) + 0.5 * d * math.log(2 * math.pi) - surface - (d - 1) * math.log(30)
    height -= math.log(4 * math.sqrt(2 * math.pi))

    def both(x: Tensor) -> Tensor:
        shell = -0.5 * ((x.norm(dim=1) - 30) / 4).square() + height
        return -torch.logaddexp(-bowl(x), shell)

    found = log_mass_outside(both, walkers(d), 0.5 * d * math.log(2 * math.pi))
    assert abs(found - math.log(2)) < 0.3


def test_an_energy_that_falls_for_ever_has_more_mass_out_there_than_here():
    assert log_mass_outside(lambda x: -x.norm(dim=1), walkers(2), 1.0) > 10


def test_what_is_not_a_number_has_no_mass():
    def broken(x: Tensor) -> Tensor:
        return torch.where(x.norm(dim=1) > 6, torch.nan, bowl(x))

    assert log_mass_outside(broken, walkers(2), math.log(2 * math.pi)) < -5
