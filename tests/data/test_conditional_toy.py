"""Conditional toy sets: samples and densities are checked against each other and against exact integrals."""

import math

import pytest
import torch
from conftest import FALSE_ALARM, each
from scipy.stats import chi2

from metastable.core import InputError
from metastable.data import CONDITIONAL_TOY_SETS, conditional_toy_set, load_array
from metastable.data.conditional_toy import sinusoidal

CASES = [("pinwheel-given", 4.0), ("pinwheel-given", 7.0), ("spiral-given", 400.0), ("spiral-given", 800.0)]
CELLS, BOXES, HALF = 160, 16, 4.0


def cells(half: float, count: int) -> tuple[torch.Tensor, float]:
    """Midpoints of the cells of a square grid, `(count², 2)`, and the area of one cell."""
    side = 2 * half / count
    axis = -half + side * (torch.arange(count, dtype=torch.float64) + 0.5)
    return torch.cartesian_prod(axis, axis), side**2


@pytest.mark.parametrize("name", CONDITIONAL_TOY_SETS)
def test_contract(name):
    toy = conditional_toy_set(name)
    pairs = toy.sample(20, seed=3)
    assert pairs.x.shape == (20, *toy.event_shape)
    assert pairs.given.shape == (20, *toy.context_shape)
    assert pairs.x.dtype == pairs.given.dtype == torch.float32
    assert torch.equal(pairs.x, toy.sample(20, seed=3).x)
    assert not torch.equal(pairs.x, toy.sample(20, seed=4).x)
    for value in toy.values:
        x = toy.sample_given(value, 50, seed=1)
        assert torch.equal(x, toy.sample_given(value, 50, seed=1))
        assert toy.context(value).shape == toy.context_shape
        assert bool(torch.isfinite(toy.log_density(x, value)).all())


@pytest.mark.parametrize(("name", "value"), CASES)
def test_density_integrates_to_one_and_nearly_all_of_it_is_in_the_square(name, value):
    toy = conditional_toy_set(name)
    x, area = cells(5.0, 160)
    mass = toy.log_density(x, value).exp() * area
    assert float(mass.sum()) == pytest.approx(1.0, abs=1e-6)
    assert float(mass[(x.abs() <= 4).all(1)].sum()) > 0.999


def chi_square(name: str, value: float, log_density, n: int = 10_000) -> float:
    """Probability of a χ² as large as that of `n` draws in 16 × 16 boxes against the integral of the density."""
    x, area = cells(HALF, CELLS)
    inner = CELLS // BOXES
    mass = (log_density(x, value).exp() * area).view(BOXES, inner, BOXES, inner).sum((1, 3)).flatten()
    draws = conditional_toy_set(name).sample_given(value, n, seed=1)
    inside = draws[(draws.abs() < HALF).all(1)]
    index = ((inside + HALF) / (2 * HALF / BOXES)).floor().long()
    counts = torch.bincount(index[:, 0] * BOXES + index[:, 1], minlength=BOXES**2).double()
    enough = mass * n > 10
    rest = torch.stack([n - counts[enough].sum(), n - n * mass[enough].sum()])  # all other boxes, and outside
    found = torch.cat([counts[enough], rest[:1]])
    expected = torch.cat([n * mass[enough], rest[1:]])
    statistic = ((found - expected).square() / expected).sum()
    return float(chi2.sf(float(statistic), len(expected) - 1))


@pytest.mark.parametrize(("name", "value"), CASES)
def test_samples_follow_the_density(name, value):
    assert chi_square(name, value, conditional_toy_set(name).log_density) > FALSE_ALARM


@pytest.mark.parametrize(
    ("name", "value", "other"), [("pinwheel-given", 5.0, 6.0), ("spiral-given", 500.0, 510.0)]
)
def test_the_density_of_another_context_is_found_out(name, value, other):
    toy = conditional_toy_set(name)
    assert chi_square(name, value, lambda x, _: toy.log_density(x, other)) < FALSE_ALARM


@pytest.mark.parametrize("name", CONDITIONAL_TOY_SETS)
def test_a_mirrored_density_is_found_out(name):
    toy = conditional_toy_set(name)
    mirror = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    assert chi_square(name, toy.values[0], lambda x, value: toy.log_density(x * mirror, value)) < FALSE_ALARM


def test_joint_draws_have_the_context_that_made_them():
    """Under its own context a draw is likely; under the contexts of other draws much less so."""
    for name, toy in CONDITIONAL_TOY_SETS.items():
        rng = torch.Generator().manual_seed(0)
        values = toy.draw_values(400, rng)
        x = toy.draw(values, rng)
        own, other = toy.log_density(x, values), toy.log_density(x, values.roll(1))
        assert float(own.mean()) > float(other.mean()) + 0.5, name


@pytest.mark.parametrize(("name", "value"), CASES)
def test_single_precision_density_agrees_with_double(name, value):
    toy = conditional_toy_set(name)
    x = toy.sample_given(value, 300, seed=0)
    difference = toy.log_density(x, value).double() - toy.log_density(x.double(), value)
    assert float(difference.abs().max()) < 2e-3


def test_contexts_as_a_model_sees_them():
    spokes = conditional_toy_set("pinwheel-given")
    assert spokes.context(4.0).tolist()[0] == pytest.approx(math.sin(4.0), abs=1e-6)
    assert spokes.context(4.0).tolist()[5] == pytest.approx(math.cos(4.0), abs=1e-6)
    spiral = conditional_toy_set("spiral-given")
    assert [spiral.context(v).item() for v in (400.0, 600.0, 800.0)] == [-1.0, 0.0, 1.0]
    assert torch.equal(sinusoidal(torch.tensor([4.0]), 10)[0], spokes.context(4.0))


@each(
    "call, message",
    [
        (
            lambda toy: toy.log_density(torch.zeros(3, 1), 400),
            r"x: must have shape \(B, \*\(2,\)\), got \(3, 1\)",
        ),
        (lambda toy: toy.log_density(torch.zeros(3, 2), 900), "value: must be from 400 to 800, got 900"),
        (
            lambda toy: toy.log_density(torch.zeros(3, 2), torch.tensor([400.0, 500.0])),
            "one number, or 3 of them",
        ),
        (lambda toy: toy.sample_given(math.nan, 3), "value: must be from 400 to 800, got nan"),
        (lambda toy: toy.sample(0), "n: must be an integer of at least 1"),
        (lambda toy: conditional_toy_set("spiral-give"), "did you mean 'spiral-given'"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call(conditional_toy_set("spiral-given"))


def test_as_a_data_source():
    data = load_array("toy:spiral-given?n=30&seed=2")
    pairs = conditional_toy_set("spiral-given").sample(30, seed=2)
    assert torch.equal(data.x, pairs.x)
    assert torch.equal(data.given, pairs.given)
    assert data.toy is None
    assert torch.equal(load_array(data.name).x, data.x)  # a run finds its rows again by the name it kept
    noisy = load_array("toy:spiral-given?n=30&seed=2&noise=0.1")
    assert torch.equal(noisy.given, data.given)
    assert not torch.equal(noisy.x, data.x)
    with pytest.raises(InputError, match="did you mean 'pinwheel-given'"):
        load_array("toy:pinwheel-give")
