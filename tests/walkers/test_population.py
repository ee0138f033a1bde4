"""Resampling of many populations: only those that need it change, and log Z goes on through it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metastable.walkers import population
from metastable.walkers.population import ORDERS, Population, principal_scores

over = pytest.mark.parametrize
F64 = torch.float64


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def walkers(groups: int = 4, n: int = 50, dim: int = 3, keep_grad: bool = True) -> Population:
    """Energies and gradients that say which row they came from."""
    x = torch.randn((groups * n, dim), generator=rng(1), dtype=F64)
    grad = 2 * x if keep_grad else x[:0]
    start = Population.start(x, x.sum(1), grad, torch.arange(groups, dtype=F64))
    return start._replace(log_weight=torch.randn(groups * n, generator=rng(2), dtype=F64))


def marks(*need: int) -> Tensor:
    return torch.tensor(need, dtype=torch.bool)


def test_what_was_taken_goes_back_to_its_rows():
    old, rows = walkers(), torch.tensor([7, 3, 150])
    x, log_weight, energy, _ = old.take(rows)
    assert torch.equal(energy, x.sum(1))
    new = old.put(rows, x + 1, log_weight - 2, energy + 3, x)
    still = torch.ones(200, dtype=torch.bool).index_fill(0, rows, False)
    for name, change in (("x", 1), ("log_weight", -2), ("energy", 3)):
        before, after = getattr(old, name), getattr(new, name)
        assert torch.equal(after[rows], before[rows] + change)
        assert torch.equal(after[still], before[still])


def test_a_change_of_energy_is_in_the_weights():
    """A + U stays: what a density loses where a walker stands, the walker's weight loses too."""
    old = walkers()
    new = old.reweigh(old.energy + torch.linspace(-3, 5, 200, dtype=F64))
    torch.testing.assert_close(new.log_weight + new.energy, old.log_weight + old.energy)
    assert not torch.allclose(new.log_weight, old.log_weight)


@over("order", ORDERS)
@over("need", [marks(0, 1, 0, 1), marks(1, 1, 1, 1), marks(0, 0, 1, 0)])
def test_only_marked_populations_change(order, need):
    old = walkers()
    new = old.resample(need, "systematic", order, rng())
    for g in range(4):
        for before, after in zip(old[:4], new[:4], strict=True):
            same = torch.equal(old.by_group(before)[g], new.by_group(after)[g])
            assert same != bool(need[g])
    assert torch.equal(new.resamplings, need.long())


@over("order", ORDERS)
@over("need", [marks(0, 1, 0, 1), marks(1, 1, 1, 1)])
def test_walkers_keep_what_belongs_to_them_and_stay_in_their_population(order, need):
    old = walkers()
    new = old.resample(need, "systematic", order, rng())
    assert torch.equal(new.energy, new.x.sum(1))
    assert torch.equal(new.grad, 2 * new.x)
    for g in range(4):
        own = {tuple(row) for row in old.by_group(old.x)[g].tolist()}
        assert {tuple(row) for row in new.by_group(new.x)[g].tolist()} <= own


@over("need", [marks(0, 1, 0, 1), marks(1, 1, 1, 1)])
def test_log_z_goes_on_and_weights_are_one(need):
    old = walkers()
    new = old.resample(need, "systematic", "principal", rng())
    assert torch.allclose(new.log_partition(), old.log_partition(), rtol=1e-12)
    assert bool((new.by_group(new.log_weight)[need] == 0).all())


@over("order", ORDERS)
def test_rows_are_drawn_in_proportion_to_their_weights(order):
    """Systematic draws take row i ⌊n·p_i⌋ or ⌈n·p_i⌉ times, whatever the order."""
    old = walkers()
    new = old.resample(marks(1, 0, 1, 1), "systematic", order, rng())
    for g in (0, 2, 3):
        x, drawn = old.by_group(old.x)[g], new.by_group(new.x)[g]
        count = (drawn[None] == x[:, None]).all(-1).sum(1)
        expected = 50 * torch.softmax(old.by_group(old.log_weight)[g], 0)
        assert bool(((count - expected).abs() < 1).all())


def test_gradients_that_are_not_kept_stay_empty():
    new = walkers(keep_grad=False).resample(marks(0, 1, 1, 0), "residual", "energy", rng())
    assert new.grad.shape == (0, 3)


def test_nobody_in_need_costs_nothing_and_draws_nothing():
    old, source = walkers(), rng()
    assert old.resample(marks(0, 0, 0, 0), "systematic", "principal", source) is old
    assert torch.equal(source.get_state(), rng().get_state())


@over("dim", [2, 5])
@over("limit", [0, 256])
def test_principal_scores_lie_along_the_direction_of_largest_variance(dim, limit, monkeypatch):
    monkeypatch.setattr(population, "MAX_COVARIANCE", limit)
    x = torch.randn((3, 400, dim), generator=rng(4), dtype=F64)
    x[..., 0] *= 6
    mix = torch.linalg.qr(torch.randn((3, dim, dim), generator=rng(5), dtype=F64)).Q
    x = x @ mix + 100
    p = torch.softmax(torch.randn((3, 400), generator=rng(6), dtype=F64), -1)
    centred = x - (p[..., None] * x).sum(1, keepdim=True)
    top = torch.linalg.eigh(centred.mT @ (p[..., None] * centred)).eigenvectors[..., -1:]
    exact, scores = (centred @ top)[..., 0], principal_scores(x, p)
    aligned = torch.sign((exact * scores).sum(1, keepdim=True)) * scores
    assert torch.allclose(aligned, exact, atol=1e-5)


@over("scale", [1e-12, 1e12])
def test_principal_scores_survive_small_and_large_units(scale):
    x = torch.randn((1, 200, 200), generator=rng(7))
    x[..., 3] *= 5
    p = torch.full((1, 200), 1 / 200)
    assert torch.allclose(
        principal_scores(scale * x, p) / scale, principal_scores(x, p), rtol=1e-2, atol=1e-2
    )


def test_walkers_in_one_place_have_equal_scores():
    p = torch.full((2, 10), 0.1)
    assert bool((principal_scores(torch.ones(2, 10, 3), p).abs() < 1e-5).all())


def test_ancestors_go_with_their_descendants_and_never_come_back():
    first = walkers()
    now, source = first, rng(3)
    for _ in range(4):
        before = now.ancestors()
        now = now._replace(log_weight=torch.randn(200, generator=source, dtype=F64))
        now = now.resample(marks(1, 0, 1, 1), "multinomial", "none", source)
        assert bool((now.ancestors() <= before).all())
    assert torch.equal(now.x, first.x[now.ancestor])
    left = [len(part.unique()) / 50 for part in now.by_group(now.ancestor)]
    assert now.ancestors().tolist() == pytest.approx(left)
    assert float(now.ancestors()[1]) == 1.0


def test_noise_adds_up_over_resamplings():
    old = walkers()
    each = (1 / old.ess() - 1) / 50
    assert torch.allclose(old.noise(), each)
    new = old.resample(marks(1, 0, 1, 0), "systematic", "none", rng())
    assert torch.allclose(new.noise(), old.noise())
    twice = new._replace(log_weight=old.log_weight)
    expected = torch.where(marks(1, 0, 1, 0), 2 * each, each)
    assert torch.allclose(twice.noise(), expected)
