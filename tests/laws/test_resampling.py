"""Laws of every resampling scheme: unbiased, bounded, blind to zero weights, batched in law."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from conftest import assert_within, each, mean_and_error, z_limit, z_scores
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metastable.core import resampling
from metastable.core.errors import ConfigError
from metastable.core.resampling import SCHEMES, resample_indices
from metastable.core.types import Walkers

F64 = torch.float64
WEIGHTS = torch.tensor([0.05, 0.3, 0.0, 0.021, 0.4, 0.129, 0.1], dtype=F64)
SPREAD = {"multinomial": math.inf, "stratified": 2.0, "systematic": 1.0, "residual": 1.0}
"""How far the copies of a row can lie from n·p: less than this, whatever the random numbers."""
over = pytest.mark.parametrize


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def counts(rows: Tensor, population: int) -> Tensor:
    """How often each row was drawn, `(..., n)` to `(..., population)`."""
    zero = torch.zeros((*rows.shape[:-1], population), dtype=F64)
    return zero.scatter_add(-1, rows, torch.ones_like(rows, dtype=F64))


Scheme = Callable[[Tensor, int, torch.Generator], Tensor]


def bias(scheme: Scheme, n: int, repeats: int = 4000) -> float:
    """Largest z-score of a mean count against n·p, over the limit: above 1 is a failure."""
    p = WEIGHTS.expand(repeats, -1)
    mean, error = mean_and_error(counts(scheme(p, n, rng(1)), len(WEIGHTS)))
    return float(z_scores(mean, n * WEIGHTS, error).max()) / z_limit(len(WEIGHTS))


@over("n", [1, 5, 7, 40])
@over("name", SCHEMES)
def test_every_row_is_drawn_in_proportion(name, n):
    assert bias(SCHEMES[name], n) < 1


def one_too_far(p: Tensor, n: int, source: torch.Generator) -> Tensor:
    return (SCHEMES["systematic"](p, n, source) + 1).clamp(max=p.shape[-1] - 1)


def unnormalised(p: Tensor, n: int, source: torch.Generator) -> Tensor:
    return SCHEMES["stratified"](p.square() / p.square().sum(-1, keepdim=True), n, source)


def without_jitter(p: Tensor, n: int, source: torch.Generator) -> Tensor:
    u = (torch.arange(n, dtype=F64) + 0.5) / n
    return resampling._invert(p, u.expand(*p.shape[:-1], n))


def grid_from_zero(p: Tensor, n: int, source: torch.Generator) -> Tensor:
    u = (torch.arange(n, dtype=F64) + 0.5 * torch.rand((*p.shape[:-1], 1), generator=source, dtype=F64)) / n
    return resampling._invert(p, u)


def rest_by_weight(p: Tensor, n: int, source: torch.Generator) -> Tensor:
    """Residual resampling whose rest is drawn by the weights, not by their fractional parts."""
    certain = torch.floor(n * p).long()
    fixed = torch.stack([torch.repeat_interleave(torch.arange(len(row)), row) for row in certain])
    return torch.cat([fixed, SCHEMES["multinomial"](p, n - fixed.shape[-1], source)], -1)


@over("mutant", [one_too_far, unnormalised, without_jitter, grid_from_zero, rest_by_weight])
def test_a_biased_scheme_is_found(mutant):
    assert bias(mutant, 5) > 1


@over("name", SCHEMES)
def test_leading_dimensions_are_independent_populations(name):
    logits = torch.randn((3, 2, 6), generator=rng(), dtype=F64)
    many = logits.expand(3000, 3, 2, 6)
    rows = resample_indices(many, 4, scheme=name, rng=rng(1))
    assert rows.shape == (3000, 3, 2, 4)
    drawn = counts(rows, 6)
    mean, error = mean_and_error(drawn)
    assert_within(mean, 4 * torch.softmax(logits, -1), error)
    # Independent: the counts of row 0 in two populations are uncorrelated.
    first, second = drawn[:, 0, 0], drawn[:, 2, 1]
    product, error = mean_and_error((first - mean[0, 0]) * (second - mean[2, 1]))
    assert_within(product, 0.0, error)


@over("name", SCHEMES)
def test_a_batch_of_one_is_the_population_alone(name):
    logits = torch.randn(9, generator=rng(), dtype=F64)
    alone = resample_indices(logits, 9, scheme=name, rng=rng(1))
    batched = resample_indices(logits[None], 9, scheme=name, rng=rng(1))
    assert torch.equal(alone, batched[0])


log_weights = st.lists(st.one_of(st.floats(-30, 30), st.just(-math.inf)), min_size=1, max_size=40).filter(
    lambda values: max(values) > -math.inf
)


@settings(max_examples=60, deadline=None)
@given(values=log_weights, n=st.integers(1, 60), seed=st.integers(0, 2**31))
@over("name", SCHEMES)
def test_counts_stay_within_their_bounds(name, values, n, seed):
    log_weight = torch.tensor(values, dtype=F64)
    rows = resample_indices(log_weight, n, scheme=name, rng=rng(seed))
    assert rows.shape == (n,)
    drawn, wanted = counts(rows, len(values)), n * torch.softmax(log_weight, 0)
    assert drawn[log_weight == -math.inf].sum() == 0
    rounding = 1e-9
    assert ((drawn - wanted).abs() < SPREAD[name] + rounding).all()
    if name == "residual":
        assert (drawn >= torch.floor(wanted - rounding)).all()


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 500), level=st.floats(-1e4, 1e4), seed=st.integers(0, 2**31))
@over("name", ["stratified", "systematic", "residual"])
def test_equal_weights_keep_every_row(name, size, level, seed):
    rows = resample_indices(torch.full((size,), level), scheme=name, rng=rng(seed))
    assert torch.equal(rows.sort().values, torch.arange(size))


@over("name", SCHEMES)
def test_a_random_number_of_exactly_zero_draws_no_row_of_zero_weight(name, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **kwargs: torch.zeros(shape, dtype=F64))
    rows = resample_indices(torch.tensor([-math.inf, 0.0, 0.7, -math.inf]), 5, scheme=name, rng=rng())
    assert set(rows.tolist()) <= {1, 2}


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-6, 6), min_size=2, max_size=30),
    n=st.integers(1, 60),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
@over("name", ["stratified", "systematic"])
def test_an_order_keeps_the_mass_of_every_block(name, values, n, seed, data):
    log_weight = torch.tensor(values, dtype=F64)
    order = torch.randperm(len(values), generator=rng(seed))
    low = data.draw(st.integers(0, len(values) - 1))
    high = data.draw(st.integers(low + 1, len(values)))
    block = order[low:high]
    rows = resample_indices(log_weight, n, scheme=name, rng=rng(seed), order=order)
    mass = n * torch.softmax(log_weight, 0)[block].sum()
    assert abs(torch.isin(rows, block).sum() - mass) < SPREAD[name] + 1e-9


def test_without_the_order_a_scattered_block_loses_its_mass():
    """The law above can fail: a hundred even rows of equal mass, drawn in their own order."""
    log_weight = torch.randn(200, generator=rng(), dtype=F64)
    block = torch.arange(0, 200, 2)
    mass = 200 * torch.softmax(log_weight, 0)[block].sum()
    order = torch.cat([block, block + 1])
    plain, ordered = (
        [torch.isin(resample_indices(log_weight, rng=rng(s), order=o), block).sum() - mass for s in range(20)]
        for o in (None, order)
    )
    assert max(map(abs, plain)) > 1
    assert max(map(abs, ordered)) <= 1


@over("name", SCHEMES)
def test_an_order_leaves_the_scheme_unbiased(name):
    repeats = 4000
    order = torch.stack([torch.randperm(len(WEIGHTS), generator=rng(s)) for s in range(50)]).repeat(
        repeats // 50, 1
    )
    rows = resample_indices(WEIGHTS.log().expand(repeats, -1), 5, scheme=name, rng=rng(), order=order)
    mean, error = mean_and_error(counts(rows, len(WEIGHTS)))
    assert_within(mean, 5 * WEIGHTS, error)


@each("name", SCHEMES)
def test_the_level_of_the_log_weights_does_not_matter(name):
    logits = torch.randint(-8, 8, (20,), generator=rng()).to(F64)
    low, high = (resample_indices(logits + level, scheme=name, rng=rng(1)) for level in (-4096.0, 4096.0))
    assert torch.equal(low, high)


def test_an_unknown_scheme_is_named():
    with pytest.raises(ConfigError, match="did you mean 'systematic'"):
        resample_indices(torch.zeros(3), scheme="sistematic", rng=rng())


def test_walkers_are_resampled_with_their_rows():
    walkers = Walkers(
        torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([-math.inf, 0.0, math.log(3.0)]), {"a": 1}
    )
    even = walkers.resampled(8, seed=0)
    assert even.x[:, 0].sort().values.tolist() == [1, 1, 2, 2, 2, 2, 2, 2]
    assert even.ess == pytest.approx(walkers.ess) == pytest.approx(1.6)  # copies are not new walkers
    assert even.info == {"a": 1, "start_ess": even.ess}
    assert len(walkers.resampled()) == 3
