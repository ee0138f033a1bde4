"""log Z of each context against exact answers and quadrature, coverage of its intervals, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import assert_within, quadrature, z_limit
from scipy.stats import binom

from metastable.core.errors import ConfigError, InputError, UnsupportedError
from metastable.evaluation import conditional
from metastable.evaluation.conditional import conditional_log_prob, log_partition_given
from metastable.proposals import Gaussian, Uniform

GIVEN = torch.tensor([[-1.0], [0.3], [2.0]], dtype=torch.float64)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def two_modes(y, given):
    """A mixture whose places, widths and log Z depend on the context: log Z(c) = c + log 2π."""
    c = given[:, None]
    shift = torch.cat([c, -c], -1)
    left = -0.5 * (y - shift).square().sum(-1) / 0.25 - math.log(0.25)
    right = -0.5 * (y + shift).square().sum(-1) / 0.5 - math.log(0.5)
    return -torch.logsumexp(torch.stack([left + math.log(0.3), right + math.log(0.7)]), 0) - given


TRUTH = GIVEN[:, 0] + math.log(2 * math.pi)


class Near:
    """A Gaussian around nothing, wide enough for its context."""

    event_shape, context_shape = (2,), (1,)

    def scale(self, given):
        return 1.0 + given.abs()[:, None]

    def sample(self, n, rng, given):
        return self.scale(given) * torch.randn((len(given), n, 2), generator=rng, dtype=torch.float64)

    def log_prob(self, y, given):
        s = self.scale(given)
        return -0.5 * (y / s).square().sum(-1) - 2 * s[..., 0].log() - math.log(2 * math.pi)


def test_exact_values_and_quadrature_agree_with_importance_sampling():
    z = log_partition_given(two_modes, Near(), GIVEN, 8192, rng(1), std_error=0.005, most=2**19)
    on_grid = [
        quadrature(lambda y, c=c: two_modes(y[None], c[None])[0], [(-7, 7, 301)] * 2).log_partition
        for c in GIVEN
    ]
    assert torch.allclose(torch.stack(on_grid), TRUTH, atol=1e-8)
    assert_within(z.value, TRUTH, z.std_error)
    assert float((z.value - torch.stack(on_grid)).abs().max()) < 0.02
    assert float(z.std_error.max()) <= 0.005
    assert z.warnings == ()
    assert bool(z.trusted.all())


@pytest.mark.parametrize("proposal", [Near(), Gaussian(torch.zeros(2).double(), 2.5)])
def test_intervals_cover(proposal):
    """400 repeats of each of three contexts as 1,200 contexts of one call."""
    z = log_partition_given(two_modes, proposal, GIVEN.repeat(400, 1), 1024, rng(2))
    low, high = z.interval(0.9)
    covered = int(((low < TRUTH.repeat(400)) & (TRUTH.repeat(400) < high)).sum())
    # log Z lies low by half its squared error, a twentieth of its error here: coverage is a little below 0.9
    assert binom.cdf(covered, 1200, 0.88) > 1e-6
    assert binom.sf(covered, 1200, 0.92) > 1e-6


def test_a_density_that_is_off_does_not_agree():
    class Off(Near):
        def log_prob(self, y, given):
            return super().log_prob(y, given) + 0.15

    wrong = log_partition_given(two_modes, Off(), GIVEN, 2**15, rng())
    assert float(((wrong.value - TRUTH) / wrong.std_error).abs().min()) > z_limit(3)


def test_draws_are_doubled_only_where_they_are_needed():
    z = log_partition_given(two_modes, Near(), GIVEN, 512, rng(3), std_error=0.02)
    assert int(z.draws.min()) < int(z.draws.max())
    assert float(z.std_error.max()) <= 0.02
    assert_within(z.value, TRUTH, z.std_error)


def test_an_unreachable_target_and_few_effective_draws_are_said():
    def narrow(y, given):
        return 0.5 * ((y - 3) / 0.02).square().sum(-1)

    z = log_partition_given(
        narrow, Gaussian(torch.zeros(2).double()), GIVEN, 512, rng(), std_error=0.01, most=2048
    )
    assert not bool(z.trusted.any())
    few, above = z.warnings
    assert "3 of 3 contexts few draws carry the weight" in few
    assert "standard error is above 0.01" in above
    assert z.draws.tolist() == [2048.0] * 3


def test_memory_is_bounded_and_does_not_change_the_estimate(monkeypatch):
    whole = log_partition_given(two_modes, Near(), GIVEN, 256, rng(4))
    monkeypatch.setattr(conditional, "AT_ONCE", 256)
    seen = []

    def watched(y, given):
        seen.append(y.shape[0] * y.shape[1])
        return two_modes(y, given)

    parts = log_partition_given(watched, Near(), GIVEN, 256, rng(4), std_error=0.03)
    assert max(seen) == 256 * int(parts.draws.max()) // 512  # later draws of one context come together
    assert_within(parts.value, whole.value, torch.hypot(parts.std_error, whole.std_error))


def test_the_same_call_gives_the_same_number():
    first, second = (log_partition_given(two_modes, Near(), GIVEN, 64) for _ in range(2))
    assert torch.equal(first.value, second.value)


def test_log_densities_are_normalised_and_their_mean_has_an_honest_error():
    context = torch.arange(3).repeat(200)
    pairs = 0.8 * torch.randn((600, 2), generator=rng(5), dtype=torch.float64)
    found = conditional_log_prob(two_modes, Near(), pairs, GIVEN[context], 2048, rng(6))
    truth = -two_modes(pairs[:, None], GIVEN[context])[:, 0] - TRUTH[context]
    assert len(found.log_partition) == 3  # not 600
    assert torch.equal(GIVEN.sort(0).values[found.context], GIVEN[context])
    per_context = torch.stack([(found.value - truth)[context == k][0] for k in range(3)])
    assert_within(
        per_context, torch.zeros(3), torch.stack([found.std_error[context == k][0] for k in range(3)])
    )
    mean, error = found.mean_and_error()
    exact = math.sqrt(float(truth.var()) / 600 + float(found.log_partition.std_error.square().sum()) / 9)
    assert mean == pytest.approx(float(found.value.mean()))
    assert error == pytest.approx(exact, rel=0.02)


def test_energies_with_a_time_and_empty_regions():
    def moving(y, given, t):
        return 0.5 * (y - t[..., None]).square().sum(-1)

    z = log_partition_given(moving, Gaussian(torch.zeros(2).double(), 1.5), GIVEN, 4096, rng(), t=0.5)
    assert_within(z.value, torch.full((3,), math.log(2 * math.pi)), z.std_error)

    def half(y, given):
        return torch.where(y[..., 0] > 0, 0.0, math.inf)  # exp(−E) is 1 on half of the box

    box = log_partition_given(
        half, Uniform(-torch.ones(2).double(), torch.ones(2).double()), GIVEN, 4096, rng()
    )
    assert_within(box.value, torch.full((3,), math.log(2.0)), box.std_error)
    nothing = log_partition_given(
        lambda y, given: y.sum(-1) * 0 + math.inf, Gaussian(torch.zeros(2).double()), GIVEN, 64, rng()
    )
    assert not bool(nothing.trusted.any())


def test_bad_input_is_named():
    q = Gaussian(torch.zeros(2).double())
    with pytest.raises(InputError, match="one for each of the 5 events, got 3"):
        conditional_log_prob(two_modes, q, torch.zeros(5, 2), GIVEN)
    with pytest.raises(InputError, match="proposal: must have sample and log_prob, got object"):
        log_partition_given(two_modes, object(), GIVEN)
    with pytest.raises(ConfigError, match="draws: must be an integer of at least 2"):
        log_partition_given(two_modes, q, GIVEN, 0)
    q.biased = True
    with pytest.raises(UnsupportedError, match="biased estimate"):
        log_partition_given(two_modes, q, GIVEN)

    def nan_for_one(y, given):
        return torch.where(given > 1, math.nan, y.sum(-1))

    with pytest.raises(InputError, match=r"for context 2 \(counting from 0\) is not finite: E = nan"):
        log_partition_given(nan_for_one, Gaussian(torch.zeros(2).double()), GIVEN)
