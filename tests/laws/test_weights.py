"""Arithmetic of log-weights: exact on weights that can be added up by hand, stable where they cannot."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import assert_within, each, mean_and_error
from hypothesis import given, settings
from hypothesis import strategies as st

from metastable.core.types import LogPartition, Walkers, student_t_quantile
from metastable.core.weights import (
    entropy_fraction,
    ess_fraction,
    log_mean_exp,
    spread_of_log_mean,
    weighted_mean,
)

F64 = torch.float64
over = pytest.mark.parametrize
FRACTIONS = {"ess": ess_fraction, "entropy": entropy_fraction}
weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=30)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(max_examples=50, deadline=None)
@given(values=weights, level=st.floats(-3000, 3000))
def test_the_definitions_hold_at_any_level(values, level):
    w = np.array(values)
    log_weight = torch.tensor(np.log(w) + level)
    p = w / w.sum()
    near = {"rel": 1e-9, "abs": 1e-9}
    assert log_mean_exp(log_weight).item() - level == pytest.approx(math.log(w.mean()), **near)
    assert ess_fraction(log_weight).item() == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()), **near)
    entropy = -(p * np.log(p)).sum()
    assert entropy_fraction(log_weight).item() == pytest.approx(math.exp(entropy) / len(w), **near)


@each("fraction", FRACTIONS.values())
@each("size", [1, 2, 17])
def test_equal_weights_are_all_effective_and_one_alone_is_one(fraction, size):
    assert fraction(torch.full((size,), -700.0, dtype=F64)).item() == pytest.approx(1.0)
    alone = torch.full((size,), -math.inf, dtype=F64)
    alone[size // 2] = 300.0
    assert fraction(alone).item() == pytest.approx(1 / size)


@each("fraction", FRACTIONS.values())
@each("kept", [1, 3, 8])
def test_k_equal_weights_among_zeros_count_for_k(fraction, kept):
    log_weight = torch.full((8,), -math.inf, dtype=F64)
    log_weight[:kept] = 2.5
    assert fraction(log_weight).item() == pytest.approx(kept / 8)


@settings(max_examples=50, deadline=None)
@given(values=weights)
def test_fractions_lie_in_their_range_and_entropy_is_the_larger(values):
    log_weight = torch.tensor(values, dtype=F64).log()
    ess, entropy = ess_fraction(log_weight).item(), entropy_fraction(log_weight).item()
    assert (
        1 / len(values) - 1e-12 <= ess <= entropy + 1e-12 <= 1 + 2e-12
    )  # Rényi's entropies fall with their order


@over("function", [log_mean_exp, ess_fraction, entropy_fraction])
def test_a_dimension_is_reduced_row_by_row(function):
    log_weight = torch.randn((4, 5), generator=rng(), dtype=F64)
    assert torch.allclose(function(log_weight), torch.stack([function(row) for row in log_weight]))
    assert torch.allclose(function(log_weight, 0), function(log_weight.T))


def test_weighted_mean_is_the_sum_by_hand():
    values = torch.tensor([[1.0, 10.0], [2.0, 20.0], [9.0, 90.0]])
    log_weight = torch.tensor([0.0, math.log(3.0), -math.inf], dtype=F64) + 1000
    assert torch.allclose(weighted_mean(values, log_weight), torch.tensor([1.75, 17.5]))


def delta_method(log_estimates: torch.Tensor) -> torch.Tensor:
    w = log_estimates.exp()
    return w.std(0) / w.mean(0) / len(w) ** 0.5


def test_jackknife_is_the_delta_method_where_estimates_agree():
    log_estimates = 3.0 + 1e-3 * torch.randn((12, 5), generator=rng(), dtype=F64)
    assert torch.allclose(spread_of_log_mean(log_estimates), delta_method(log_estimates), rtol=1e-3)


def test_jackknife_is_its_definition():
    log_estimates = torch.randn(6, generator=rng(), dtype=F64)
    left_out = np.array([math.log(np.delete(log_estimates.exp().numpy(), i).mean()) for i in range(6)])
    by_hand = math.sqrt(5 / 6 * ((left_out - left_out.mean()) ** 2).sum())
    assert spread_of_log_mean(log_estimates).item() == pytest.approx(by_hand, rel=1e-10)


@over(("groups", "spread"), [(16, 0.1), (16, 0.5), (32, 1.0), (16, 2.0)])
def test_jackknife_is_the_spread_found_by_simulation(groups, spread):
    """On average its square is not below the true variance (Efron and Stein 1981), and little above it."""
    log_estimates = spread * torch.randn((groups, 40_000), generator=rng(1), dtype=F64)
    centred = log_mean_exp(log_estimates, 0)
    true, true_error = mean_and_error((centred - centred.mean()).square())
    estimated, error = mean_and_error(spread_of_log_mean(log_estimates).square())
    both = math.hypot(true_error, error)
    assert_within(max(true - estimated, torch.zeros(())), 0.0, both)
    assert estimated < 1.12 * true
    if spread > 1:
        assert delta_method(log_estimates).square().mean() < 0.6 * true  # which is why it is not used


def test_one_estimate_says_nothing_about_its_spread():
    assert spread_of_log_mean(torch.zeros(1)).item() == math.inf
    assert spread_of_log_mean(torch.zeros(1, 3)).tolist() == [math.inf] * 3


def test_effective_sample_size_of_walkers_is_in_walkers():
    log_weight = torch.tensor([0.0, 0.0, -math.inf, -math.inf])
    assert Walkers(torch.zeros(4, 2), log_weight).ess == pytest.approx(2.0)
    assert Walkers.equal(torch.zeros(4, 2)).ess == pytest.approx(4.0)


@over(("degrees", "probability"), [(0, 0.975), (1, 0.9), (7, 0.975), (100, 0.6)])
def test_quantiles_are_scipys(degrees, probability):
    from scipy import stats

    law = stats.t(degrees) if degrees else stats.norm
    assert student_t_quantile(probability, degrees) == pytest.approx(law.ppf(probability), rel=1e-9)


def test_an_estimate_of_log_z_shifts_with_its_energy():
    z = LogPartition(1.0, 0.1, degrees=7, reverse=1.5)
    low, high = z.interval(0.95)
    assert (high - low) / 2 == pytest.approx(0.1 * student_t_quantile(0.975, 7))
    assert (low + high) / 2 == pytest.approx(1.0)
    assert z.shifted(2.0).bracket == pytest.approx((3.0, 3.5))
    assert z.shifted(2.0).std_error == 0.1
    assert z.trusted
    assert not LogPartition(0.0, 1.0, warnings=("few walkers",)).trusted
