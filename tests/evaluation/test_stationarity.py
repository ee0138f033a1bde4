"""Walkers of the model stay where they are when they go on; walkers that miss a part of it do not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from metastable.core.types import Energy
from metastable.energies import Funnel, two_modes
from metastable.evaluation.log_partition import log_partition
from metastable.evaluation.stationarity import COORDINATES, Drift, find_drift
from metastable.kernels import HMC, MetropolisHastings
from metastable.walkers.anneal import Annealed
from metastable.walkers.path import Schedule

HMC4 = HMC(0.3, leapfrog=4)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def standing(x: Tensor, populations: int = 16, step: float = 0.3) -> Annealed:
    path = Schedule.equal(1, step)
    zero = torch.zeros(len(x), dtype=torch.float64)
    return Annealed(x, zero, populations=populations, schedule=path)


def drift_of(energy: Energy, x: Tensor, seed: int = 0, step: float = 0.3) -> Drift:
    return find_drift(energy, standing(x, step=step), HMC4, rng(seed))


@pytest.mark.parametrize("dim", [1, 3, COORDINATES + 1])
def test_draws_of_the_model_do_not_drift(dim):
    energy = two_modes(6.0, (0.3, 0.7), dim)
    found = [drift_of(energy, energy.sample(4096, rng(s)), s) for s in range(8)]
    assert not any(f.significant for f in found)


def test_draws_that_are_too_narrow_drift():
    energy = two_modes(6.0, (0.3, 0.7), 3)
    centre = torch.tensor([[3.0, 0.0, 0.0]])
    found = drift_of(energy, centre + 0.8 * torch.randn(4096, 3, generator=rng()))
    assert found.significant
    assert found.change > 0.1
    assert found.what in ("mean energy", "mean squared length") or "square of coordinate" in found.what


def test_walkers_that_miss_the_neck_of_a_funnel_drift_into_it():
    energy = Funnel(5)
    x = energy.sample(8192, rng())
    short = x[x[:, 0] > -2][:4096]
    assert drift_of(energy, short, step=0.5).significant
    assert not drift_of(energy, x[:4096], step=0.5).significant


def test_a_population_without_walkers_says_nothing():
    main = standing(torch.randn(1600, 2, generator=rng()))
    main.log_weight[:100] = -math.inf
    assert not find_drift(lambda x: 0.5 * x.square().sum(1), main, HMC4, rng()).significant


def test_a_kernel_without_a_step_size_will_do():
    main = standing(torch.randn(3200, 2, generator=rng()))
    found = find_drift(lambda x: 0.5 * x.square().sum(1), main, MetropolisHastings(0.5), rng(1))
    assert not found.significant


def test_what_a_finer_path_changes_is_in_the_error():
    """A funnel: the first path misses part of the neck, all its populations together."""
    exact = float(Funnel(5).log_partition())
    z = log_partition(Funnel(5), seed=1)
    assert not z.trusted or abs(z.value - exact) < 4 * z.std_error
    hasty = log_partition(Funnel(5), seed=1, refinements=0)
    assert any("drifted when they went on" in words for words in hasty.warnings)
