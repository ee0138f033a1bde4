"""Intervals against the definitions that they have."""

import pytest
import torch

from metastable.core import InputError
from metastable.policies.intervals import (
    bounded_mean,
    clopper_pearson,
    difference_of,
    mean_over_starts,
    paired_difference,
    rate_difference,
    rate_over_starts,
    score_difference,
    score_over_starts,
    t_interval,
)


@pytest.mark.parametrize(("hits", "trials"), [(1, 10), (7, 20), (19, 20)])
def test_tails_at_the_ends_of_a_rate(hits, trials):
    from scipy.stats import binom

    found = clopper_pearson(hits, trials)
    assert binom.sf(hits - 1, trials, found.low) == pytest.approx(0.025)
    assert binom.cdf(hits, trials, found.high) == pytest.approx(0.025)
    assert clopper_pearson(torch.tensor(hits), torch.tensor(trials)) == found, "counted by torch"


def test_a_rate_of_all_or_nothing_has_one_end():
    assert clopper_pearson(0, 5).low == 0
    assert clopper_pearson(5, 5).high == 1
    assert clopper_pearson(0, 5).high == pytest.approx(1 - 0.025 ** (1 / 5))
    with pytest.raises(InputError, match="hits"):
        clopper_pearson(6, 5)


def test_rollouts_of_one_start_are_not_independent():
    scores = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.5, 0.5]])
    assert mean_over_starts(scores) == t_interval([0.0, 1.0, 0.5])
    wrong = t_interval(scores)
    assert wrong.high - wrong.low < mean_over_starts(scores).high - mean_over_starts(scores).low


def test_pairs_share_what_starts_have_in_common():
    hard = torch.linspace(0, 1, 20)
    better = paired_difference(hard + 0.1 + 0.01 * (-1) ** torch.arange(20), hard)
    assert better.value == pytest.approx(0.1)
    assert better.low > 0.09
    with pytest.raises(InputError, match="same starts"):
        paired_difference([1.0, 2.0], [1.0])
    with pytest.raises(InputError, match="at least 2"):
        t_interval([1.0])


def test_levels_and_hits_that_are_none_are_refused():
    for level in (95, 0, 1, -1):
        with pytest.raises(InputError, match="level: must be between 0 and 1"):
            t_interval([1.0, 2.0], level)
        with pytest.raises(InputError, match="level: must be between 0 and 1"):
            clopper_pearson(3, 10, level)
    with pytest.raises(InputError, match="hits: must be a whole number"):
        clopper_pearson(3.5, 10)
    with pytest.raises(InputError, match="hits: must be a whole number"):
        clopper_pearson("a", 10)
    with pytest.raises(InputError, match="values: must hold numbers"):
        t_interval(["a", "b"])
    with pytest.raises(InputError, match="values: must be finite, got nan"):
        t_interval([1.0, float("nan")])


def simulated(p, starts, rollouts, rng, alike=20.0):
    """0 or 1, each start with a chance of its own around p, by less the more they are alike."""
    own = torch.distributions.Beta(alike * p, alike * (1 - p)).sample((starts, 1)) if rollouts > 1 else p
    return (torch.rand(starts, rollouts, generator=rng) < own).double()


@pytest.mark.parametrize(
    ("p", "starts", "rollouts", "alike"),
    [
        *[(0.99, 10, 2, 20.0), (0.95, 10, 2, 20.0), (0.99, 32, 4, 20.0), (0.5, 12, 3, 20.0)],
        *[(0.05, 25, 16, 1.0), (0.99, 25, 8, 0.3), (0.2, 10, 4, 0.3), (0.3, 64, 8, 0.3)],
    ],
)
def test_intervals_of_rates_cover_with_several_rollouts_of_a_start(p, starts, rollouts, alike):
    torch.manual_seed(0)
    rng, trials = torch.Generator().manual_seed(1), 300
    found = [rate_over_starts(simulated(p, starts, rollouts, rng, alike)) for _ in range(trials)]
    assert (
        sum(low <= p <= high for _, low, high in found) >= 0.95 * trials - 4 * (0.05 * 0.95 * trials) ** 0.5
    )
    assert all(low < high and low >= 0 and high <= 1 for _, low, high in found)


@pytest.mark.parametrize(("rollouts", "alike"), [((1, 1), 20), ((2, 2), 20), ((1, 3), 20), ((16, 16), 1)])
def test_differences_of_rates_cover(rollouts, alike):
    torch.manual_seed(0)
    rng, trials = torch.Generator().manual_seed(2), 300
    draws = [[simulated(p, 10, n, rng, alike) for p, n in zip((0.99, 0.95), rollouts)] for _ in range(trials)]
    found = [rate_difference(*pair) for pair in draws]
    assert sum(low <= 0.04 <= high for _, low, high in found) >= 0.95 * trials
    student = [paired_difference(*(x.mean(1) for x in pair)) for pair in draws]
    assert sum(low <= 0.04 <= high for _, low, high in student) < 0.8 * trials  # which it was before
    first, second = draws[0]
    back = rate_difference(second, first)
    assert (back.low, back.high) == pytest.approx((-found[0].high, -found[0].low))


def test_a_difference_is_one_of_rates_where_all_are_hits_or_misses():
    ones, some = torch.ones(5, 2), torch.full((5, 2), 0.5)
    assert difference_of(ones, ones, 0.9) == rate_difference(ones, ones, 0.9)
    assert difference_of(ones, ones[:, :1]) == rate_difference(ones, ones[:, :1])
    assert difference_of(ones, some, 0.9) == paired_difference(ones, some, 0.9)
    assert difference_of(ones, some[:, :1]).value == 0.5
    assert difference_of(ones, ones, rates=False) == paired_difference(ones, ones)


@pytest.mark.parametrize("hits", [0, 1, 3, 12, 13])
def test_misses_count_as_hits_do(hits):
    few = torch.zeros(25, 4)
    few.view(-1)[: 4 * hits : 4] = 1  # one hit each of so many starts
    found, other = rate_over_starts(few), rate_over_starts(1 - few)
    assert (other.low, other.high) == pytest.approx((1 - found.high, 1 - found.low))


@pytest.mark.parametrize(
    ("hits", "trials"), [(0, 1), (0, 7), (1, 10), (7, 20), (20, 20), (1, 200), (90, 200)]
)
@pytest.mark.parametrize("level", [0.5, 0.95, 0.9999])
def test_gaffkes_interval_of_hits_and_misses_is_clopper_and_pearsons(hits, trials, level):
    values = torch.zeros(trials)
    values[:hits] = 1
    assert bounded_mean(values, level) == pytest.approx(clopper_pearson(hits, trials, level), abs=1e-6)


def test_gaffkes_interval_is_of_uniform_weights():
    rng = torch.Generator().manual_seed(0)
    for x in (torch.rand(8, generator=rng), torch.tensor([0.999] * 30 + [0.0, 0.1]), torch.full((20,), 0.5)):
        w = -torch.log1p(-torch.rand(100_000, len(x) + 1, generator=rng))
        w /= w.sum(1, keepdim=True)
        found = bounded_mean(x)
        low, high = w[:, :-1] @ x, w[:, :-1] @ x + w[:, -1]
        error = 4 * (0.025 * 0.975 / len(w)) ** 0.5
        assert float((low < found.low).double().mean()) == pytest.approx(0.025, abs=error)
        assert float((high > found.high).double().mean()) == pytest.approx(0.025, abs=error)
        other = bounded_mean(1 - x)
        assert (other.low, other.high) == pytest.approx((1 - found.high, 1 - found.low), abs=1e-6)
    for wrong in ([0.5, 1.1], [-0.1], [float("nan")]):
        with pytest.raises(InputError, match="values: must be from 0 to 1"):
            bounded_mean(wrong)
        with pytest.raises(InputError, match="scores: must be from 0 to 1"):
            score_over_starts(wrong * 20)
        with pytest.raises(InputError, match="second: must be from 0 to 1"):
            score_difference([0.5] * len(wrong), wrong)
    assert score_over_starts([1 + 1e-9, 1.0]).high == 1, "a score of 1 that was rounded"


def rare(n, share, rng, otherwise):
    """n scores that are `otherwise`, but for a share that is anything."""
    return torch.where(torch.rand(n, generator=rng) < share, torch.rand(n, generator=rng), otherwise).double()


@pytest.mark.parametrize(
    ("starts", "share", "otherwise"), [(8, 0.1, 0.0), (16, 0.05, 1.0), (64, 0.03, 0.0), (32, 0.1, 1.0)]
)
def test_intervals_of_scores_cover_where_few_are_unlike_the_rest(starts, share, otherwise):
    rng, trials = torch.Generator().manual_seed(0), 300
    draws = [rare(starts, share, rng, otherwise) for _ in range(trials)]
    mean = (1 - share) * otherwise + share / 2
    found = [score_over_starts(x[:, None].expand(-1, 2)) for x in draws]
    assert sum(low <= mean <= high for _, low, high in found) >= 0.95 * trials
    assert all(0 <= low < high <= 1 for _, low, high in found)
    student = [mean_over_starts(x) for x in draws]
    assert sum(low <= mean <= high for _, low, high in student) < 0.91 * trials  # which it was before
    apart = [score_difference(x, torch.full_like(x, otherwise)) for x in draws]
    assert sum(low <= mean - otherwise <= high for _, low, high in apart) >= 0.95 * trials


def test_scores_of_many_unlike_starts_have_students_interval():
    x = torch.rand(64, 2, generator=torch.Generator().manual_seed(0)).double()
    assert score_over_starts(x) == mean_over_starts(x)
    assert score_difference(x, x.flip(0)) == paired_difference(x, x.flip(0))
    ones = torch.ones(5, 2)
    assert score_over_starts(ones) == rate_over_starts(ones)
