"""Entropies against closed forms, and the mass that no density exceeds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from metastable.energies import Funnel, two_modes
from metastable.evaluation.entropy import excess_mass, nearest_neighbour_entropy

F64 = torch.float64
over = pytest.mark.parametrize


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn((n, d), generator=rng(seed), dtype=F64)


def of_gaussian(d: int) -> float:
    return d / 2 * math.log(2 * math.pi * math.e)


@over(("d", "bias"), [(1, 0.02), (2, 0.02), (5, 0.1), (10, 0.2)])
def test_the_entropy_of_a_gaussian(d, bias):
    """Against d/2·log 2πe; `bias` is what 2,000 rows leave, beside four standard errors."""
    found = nearest_neighbour_entropy(normal(2000, d, seed=d))
    assert found.value == pytest.approx(of_gaussian(d), abs=bias + 4 * found.std_error)
    assert found.std_error < 0.1
    assert found.copies == 0


def test_the_entropy_of_a_box_and_of_an_exponential_law():
    u = torch.rand((2000, 2), generator=rng(), dtype=F64) * torch.tensor([3.0, 0.5]) + 10
    box = nearest_neighbour_entropy(u)
    assert box.value == pytest.approx(math.log(1.5), abs=0.06 + 4 * box.std_error)  # edges cost a little
    exponential = nearest_neighbour_entropy(-torch.rand((2000, 1), generator=rng(1), dtype=F64).log())
    assert exponential.value == pytest.approx(1.0, abs=0.03 + 4 * exponential.std_error)


def test_a_linear_map_adds_the_log_of_its_determinant():
    x = normal(1000, 3)
    A = torch.tensor([[1e4, 0.0, 0.0], [2.0, 1e-3, 0.0], [0.0, 0.0, 5.0]], dtype=F64)
    plain, mapped = nearest_neighbour_entropy(x), nearest_neighbour_entropy(x @ A.T)
    assert mapped.value == pytest.approx(plain.value + math.log(50.0), abs=1e-4)


def test_copies_are_counted_and_left_out():
    x = normal(1500, 2)
    once, twice = nearest_neighbour_entropy(x), nearest_neighbour_entropy(torch.cat([x[:700], x[:700]]))
    assert once.copies == 0
    assert twice.copies == 0.5
    assert twice.value == pytest.approx(once.value, abs=0.3)  # without care −inf
    atoms = nearest_neighbour_entropy(torch.randint(0, 3, (100, 1), generator=rng()).double())
    assert (atoms.value, atoms.copies) == (-math.inf, 0.97)


# ---- mass


@over("d", [1, 2, 20, 100])
def test_a_density_has_no_more_than_its_mass_and_a_claimed_log_z_shows(d):
    """Exact log Z: below Markov's bound for every seed; log Z too low by 30: nearly all of that is seen."""
    x = normal(800, d).float()

    def energy(y: Tensor) -> Tensor:
        return 0.5 * y.square().sum(1)

    exact = d / 2 * math.log(2 * math.pi)
    found = [excess_mass(energy, exact, x, seed) for seed in range(10)]
    assert max(found) < 7
    if d <= 20:
        assert excess_mass(energy, exact - 30, x) > 25
    assert excess_mass(energy, exact - 1000, x) > 900


@over("energy", [two_modes(8.0, (0.3, 0.7), 3), Funnel(10)], ids=["modes", "funnel"])
def test_hard_densities_raise_no_alarm(energy):
    x = energy.sample(1000, rng())
    exact = float(energy.log_partition())
    assert excess_mass(energy, exact, x) < 7
    assert excess_mass(energy, exact - 40, x) > 20


def test_a_narrow_law_in_many_dimensions_raises_no_alarm():
    """Data near a line in ten dimensions, 1/1000 wide: a true density that is very high."""
    along = normal(1000, 1)
    x = along * torch.ones(10, dtype=F64) + 1e-3 * normal(1000, 10, seed=1)
    covariance = torch.ones((10, 10), dtype=F64) + 1e-6 * torch.eye(10, dtype=F64)
    law = torch.distributions.MultivariateNormal(torch.zeros(10, dtype=F64), covariance)
    assert excess_mass(lambda y: -law.log_prob(y), 0.0, x) < 7


def test_images_have_mass_too():
    x = normal(300, 16).view(-1, 1, 4, 4).float()
    exact = 8 * math.log(2 * math.pi)
    assert excess_mass(lambda y: 0.5 * y.flatten(1).square().sum(1), exact, x) < 7
    assert excess_mass(lambda y: 0.5 * y.flatten(1).square().sum(1), exact - 50, x) > 40
