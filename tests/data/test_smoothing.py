"""Noise that leaves mean and covariance as they are."""

import math

import pytest
import torch
from conftest import assert_within

from metastable.core.units import Units
from metastable.data.smoothing import ROWS, smoothed


def rows(n=500):
    rng = torch.Generator().manual_seed(0)
    u = torch.randn((n, 3), generator=rng, dtype=torch.float64)
    u[:, 1] = torch.where(u[:, 1] > 0, 3.0, -3.0) + 0.1 * u[:, 1]
    return u * torch.tensor([1e4, 1.0, 1e-3]) + torch.tensor([1e5, 0.0, -2.0])


@pytest.mark.parametrize("smoothing", [0.0, 0.3, 0.8])
def test_neither_mean_nor_covariance_changes(smoothing):
    x = rows()
    units = Units.fit(x, "whiten")
    u = units.forward(smoothed(x, smoothing, seed=0))
    assert len(u) >= ROWS
    error = math.sqrt(2 / len(u))
    assert_within(u.mean(0), 0.0, 1 / math.sqrt(len(u)) + 1e-12)
    assert_within(torch.cov(u.T), torch.eye(3), error)


def test_what_is_between_two_spikes_fills_up():
    x = rows()
    between = [float((smoothed(x, s, seed=0)[:, 1].abs() < 1.5).double().mean()) for s in (0.0, 0.3, 0.9)]
    assert between[0] < between[1] < between[2]
    assert between[2] > 0.2


def test_the_same_seed_gives_the_same_rows():
    assert torch.equal(smoothed(rows(), 0.3, seed=1), smoothed(rows(), 0.3, seed=1))
