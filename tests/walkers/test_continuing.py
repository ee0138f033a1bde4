"""Sampling that goes on from weighted walkers: masses of modes, narrow beside wide, what the result is worth."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import metastable as ms
from metastable.core.errors import InputError
from metastable.core.resampling import resample_indices
from metastable.evaluation.modes import mode_weights, sampled_mode_weights
from metastable.kernels import MALA, ULA, warm_up
from metastable.walkers.continuing import StepRange, find_step_range
from metastable.walkers.jarzynski import fixed_parameters

CENTERS = torch.tensor([[-1.5], [1.5]])
SEEDS = 24


def mixture(scales: tuple[float, float] = (0.4, 0.6), apart: float = 1.5) -> ms.energies.GaussianMixture:
    return ms.energies.GaussianMixture(
        torch.tensor([[-apart], [apart]]), torch.tensor(scales), torch.tensor([0.271, 0.729]).log()
    )


def normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


LEFT = 0.271 * normal_cdf(1.5 / 0.4) + 0.729 * normal_cdf(-1.5 / 0.6)
"""Mass of the mixture to the left of 0."""


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draws(n: int, seed: int) -> ms.Walkers:
    return ms.Walkers.equal(mixture().sample(n, rng(seed)))


def misses(ways: list[ms.Walkers]) -> tuple[float, float]:
    """The largest error of the left mass, and the share of 95 % intervals that hold the truth."""
    found = [sampled_mode_weights(w, CENTERS) for w in ways]
    errors = torch.stack([f.weights[0] - LEFT for f in found])
    covered = errors.abs() < 1.96 * torch.stack([f.std_error[0] for f in found])
    return float(errors.abs().max()), float(covered.double().mean())


def test_modes_keep_their_masses_and_the_stated_errors_cover():
    ways = [ms.continue_sampling(mixture(), draws(8000, s), 8000, steps=30, seed=s) for s in range(SEEDS)]
    worst, covered = misses(ways)
    assert worst < 0.02
    assert covered >= 0.9


def test_unadjusted_moves_do_not():
    """The same walkers by ULA with its own weights, at the step that MALA would accept nine times in ten."""
    ways = []
    for seed in range(8):
        kernel, _ = warm_up(ULA(0.05), mixture(), draws(1024, seed).x, 100, rng(seed))
        ways.append(fixed_parameters(kernel, mixture(), draws(8000, seed).x, 100, rng(seed)))
    worst, covered = misses(ways)
    assert worst > 0.02  # which adjusted moves stay below
    assert covered < 0.75


def test_a_narrow_mode_beside_a_wide_one_fills_both():
    """From the centres alone: both widths must come out, without a walker that changes sides."""
    start = torch.where(torch.arange(6000)[:, None] < 2000, -5.0, 5.0)
    w = ms.continue_sampling(mixture((0.02, 1.0), 5.0), ms.Walkers.equal(start), 6000, steps=100)
    left, right = w.x[w.x < 0], w.x[w.x > 0]
    assert len(left) == 2000
    assert float(left.std()) == pytest.approx(0.02, rel=5 / math.sqrt(2 * 2000))
    assert float(right.std()) == pytest.approx(1.0, rel=5 / math.sqrt(2 * 4000))
    low, high = w.info["step_sizes"]
    assert low < 4 * 0.02**2  # MALA's step for sd σ in one dimension is about 1.6σ²
    assert high > 0.4


def test_one_step_size_would_not():
    """What the range is for: the step that suits all walkers on average leaves the narrow mode at its centre."""
    start = torch.where(torch.arange(6000)[:, None] < 600, -5.0, 5.0)
    kernel, _ = warm_up(MALA(0.05), mixture((0.02, 1.0), 5.0), start, 100, rng())
    w = ms.continue_sampling(
        mixture((0.02, 1.0), 5.0), ms.Walkers.equal(start), 6000, step_size=kernel.step_size
    )
    assert float(w.x[w.x < 0].std()) < 0.015


def test_weights_are_drawn_from_and_then_stay_equal():
    """Draws of N(0, 1) weighted to N(1, ½²): the same mean and width whatever the number that is asked for."""
    x = torch.randn(20_000, 1, generator=rng())
    log_weight = (0.5 * x.square() - 2 * (x - 1).square())[:, 0].double()
    start = ms.Walkers(x, log_weight)
    for n in (500, 20_000):
        w = ms.continue_sampling(lambda y: 2 * (y - 1).square()[:, 0], start, n, steps=10, seed=n)
        assert not w.log_weight.any()
        assert w.ess == pytest.approx(min(n, start.ess))
        assert abs(float(w.x.mean()) - 1) < 4 * 0.5 / math.sqrt(w.ess)
        assert abs(float(w.x.std()) - 0.5) < 4 * 0.5 / math.sqrt(2 * w.ess)


def test_copies_are_worth_no_more_than_what_they_are_copies_of():
    start = draws(50, 0)
    w = ms.continue_sampling(mixture(), start, 5000, steps=5)
    assert w.info["start_ess"] == pytest.approx(50) == pytest.approx(w.ess)
    assert w.resampled(900, seed=3).ess == pytest.approx(50)
    assert w.resampled(20).ess == pytest.approx(20)
    again = ms.continue_sampling(mixture(), w.resampled(2000), 8000, steps=5)
    assert again.ess == pytest.approx(50)


def test_errors_of_mode_weights_hear_that_populations_disagree():
    """Sixteen populations, in each of which all walkers descend from ten: weights alone claim 16 times too many."""
    ways = []
    for seed in range(40):
        few = mixture().sample(160, rng(seed)).view(16, 10, 1)
        start = ms.Walkers.equal(few.repeat_interleave(16, 1).flatten(0, 1), info={"populations": [160] * 16})
        ways.append(ms.continue_sampling(mixture(), start, 2560, steps=0, step_size=0.1, seed=seed))
    _, covered = misses(ways)
    assert covered >= 0.85
    deaf = [ms.Walkers.equal(w.x) for w in ways]
    assert misses(deaf)[1] < 0.6


def test_a_mode_without_samples_is_not_known_without_error():
    found = sampled_mode_weights(ms.Walkers.equal(torch.full((50, 1), 1.5)), CENTERS)
    assert found.weights.tolist() == [0.0, 1.0]
    assert float(found.std_error[0]) > 0.01


def test_a_range_of_one_step_size_is_that_step_size():
    x = torch.zeros(5, 2, 3)
    assert torch.equal(StepRange(0.25, 0.25).draw(x, rng()), torch.full((5, 1, 1), 0.25))
    sizes = StepRange(0.01, 1.0).draw(torch.zeros(4000, 1), rng()).log()
    assert float(sizes.min()) >= math.log(0.01) - 1e-6
    assert float(sizes.mean()) == pytest.approx(math.log(0.1), abs=5 * math.log(100) / math.sqrt(12 * 4000))


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_the_warm_up_finds_scales_far_from_its_first_step(scale):
    def energy(x: Tensor) -> Tensor:
        return 0.5 * (x / scale).square().sum(1)

    x = scale * torch.randn(256, 2, generator=rng())
    sizes = find_step_range(MALA(0.05), energy, x, rng(1))
    assert sizes.low / scale**2 > 0.1
    assert sizes.high / scale**2 < 10


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
def test_weights_that_cannot_be_drawn_from_are_an_error(value):
    walkers = ms.Walkers(torch.zeros(4, 1), torch.full((4,), value, dtype=torch.float64))
    for draw in (
        lambda: walkers.resampled(),
        lambda: ms.continue_sampling(mixture(), walkers, 10),
        lambda: resample_indices(walkers.log_weight, rng=rng()),
    ):
        with pytest.raises(
            InputError, match=r"log_weight: (all 4 are −inf|must be finite or −inf, got 4 of 4)"
        ):
            draw()


def test_one_walker_that_has_probability_is_enough():
    log_weight = torch.tensor([-math.inf, 0.0, -math.inf], dtype=torch.float64)
    w = ms.Walkers(torch.tensor([[9.0], [1.0], [9.0]]), log_weight)
    assert w.resampled(5).x[:, 0].tolist() == [1.0] * 5


def test_walkers_that_stand_outside_the_model_are_named():
    def half_line(x: Tensor) -> Tensor:
        return torch.where(x[:, 0] > 0, x[:, 0], torch.inf)

    with pytest.raises(
        InputError, match=r"walkers: 2 of 4 walkers of positive weight stand where the energy"
    ):
        ms.continue_sampling(half_line, ms.Walkers.equal(torch.tensor([[1.0], [-1.0]])), 4)


def test_mode_weights_of_continued_walkers_are_those_of_the_start():
    start = draws(4000, 5)
    w = ms.continue_sampling(mixture((0.4, 0.6), 3.0), start, 1000, steps=0)
    before, after = (mode_weights(v.x, CENTERS)[0] for v in (start, w))
    assert abs(float(before - after)) <= 1.5 / 1000  # systematic draws along the axis: to within a walker
