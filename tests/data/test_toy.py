"""Toy sets: samples and densities are checked against each other and against exact integrals."""

import math

import pytest
import torch
from conftest import each
from hypothesis import given, settings
from hypothesis import strategies as st

from metastable.core import InputError
from metastable.data import TOY_SETS, toy_set
from metastable.data.toy import _digit_images

WITH_DENSITY = [name for name, toy in TOY_SETS.items() if toy.log_density is not None]
PLANE = [name for name in WITH_DENSITY if TOY_SETS[name].event_shape == (2,)]
# Two-sided 5 standard errors: 6e-7 a comparison, well under one false alarm in a thousand for this file.
SIGMAS = 5.0


def plane_grid(half_width: float, cells: int) -> tuple[torch.Tensor, float]:
    """Cell midpoints of a square grid, `(cells², 2)`, and the area of one cell."""
    side = 2 * half_width / cells
    axis = -half_width + side * (torch.arange(cells, dtype=torch.float64) + 0.5)
    return torch.cartesian_prod(axis, axis), side**2


@pytest.mark.parametrize("name", TOY_SETS)
def test_contract(name):
    toy = toy_set(name)
    x = toy.sample(20, seed=3)
    assert x.shape == (20, *toy.event_shape)
    assert x.dtype == torch.float32
    assert bool(torch.isfinite(x).all())
    assert torch.equal(x, toy.sample(20, seed=3))
    assert not torch.equal(x, toy.sample(20, seed=4))
    assert toy.name == name
    assert toy.description
    if toy.weights is not None:
        assert toy.centers is not None
        assert toy.centers.shape == (len(toy.weights), *toy.event_shape)
        assert float(toy.weights.sum()) == 1.0


@pytest.mark.parametrize("name", TOY_SETS)
def test_a_generator_is_a_source_too(name):
    draws = [toy_set(name).sample(5, torch.Generator().manual_seed(9)) for _ in range(2)]
    assert torch.equal(*draws)


@pytest.mark.parametrize("name", PLANE)
def test_density_integrates_to_one(name):
    # Cells of 0.02 resolve the thinnest scale, 0.1, and have edges where the checkerboard has its edges.
    x, area = plane_grid(8.0, 800)
    total = toy_set(name).log_density(x).exp().sum() * area
    assert float(total) == pytest.approx(1.0, abs=1e-6)


def box_z_scores(name: str, log_density, n: int = 20_000) -> torch.Tensor:
    """Counts of `n` draws in 16 × 16 boxes against the integral of the density, in standard errors."""
    cells, boxes, half = 640, 16, 4.0
    x, area = plane_grid(half, cells)
    mass = (
        (log_density(x).exp() * area).view(boxes, cells // boxes, boxes, cells // boxes).sum((1, 3)).flatten()
    )
    draws = toy_set(name).sample(n, seed=1)
    draws = draws[(draws.abs() < half).all(1)]
    index = ((draws + half) / (2 * half / boxes)).floor().long()
    counts = torch.bincount(index[:, 0] * boxes + index[:, 1], minlength=boxes**2)
    enough = mass * n > 10
    assert int(counts[mass * n < 1e-6].sum()) == 0
    return (counts - n * mass)[enough] / (n * mass * (1 - mass)).sqrt()[enough]


@pytest.mark.parametrize("name", PLANE)
def test_samples_follow_the_density(name):
    assert float(box_z_scores(name, toy_set(name).log_density).abs().max()) < SIGMAS


@pytest.mark.parametrize("name", PLANE)
def test_a_mirrored_density_is_found_out(name):
    def wrong(x):
        return toy_set(name).log_density(x * torch.tensor([-1.0, 1.0], dtype=x.dtype) + 0.05)

    with pytest.raises(AssertionError):
        assert float(box_z_scores(name, wrong).abs().max()) < SIGMAS


def test_two_modes_weights_and_barrier():
    toy = toy_set("two-modes")
    light = float((toy.sample(10_000, seed=0)[:, 0] < 0).float().mean())
    assert abs(light - 0.25) < SIGMAS * math.sqrt(0.25 * 0.75 / 10_000)
    peak, saddle = toy.log_density(torch.tensor([[-3.0, 0.0], [0.0, 0.0]], dtype=torch.float64))
    assert float(peak - saddle) > 9


def test_fifty_dimensions_against_the_closed_form():
    toy = toy_set("two-modes-50d")
    x = toy.sample(4000, seed=2)
    expected = torch.logaddexp(
        math.log(0.25) - (x.double() - toy.centers[0]).square().sum(1) / 2,
        math.log(0.75) - (x.double() - toy.centers[1]).square().sum(1) / 2,
    ) - 25 * math.log(2 * math.pi)
    torch.testing.assert_close(toy.log_density(x.double()), expected, rtol=1e-12, atol=1e-9)
    entropy = 25 * math.log(2 * math.pi * math.e) + 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    values = -toy.log_density(x.double())
    assert abs(float(values.mean()) - entropy) < SIGMAS * float(values.std()) / math.sqrt(len(x))


def test_every_checkerboard_draw_is_on_a_dark_square():
    toy = toy_set("checkerboard")
    assert bool((toy.log_density(toy.sample(200_000, seed=0)) == torch.tensor(-math.log(32.0))).all())
    assert float(toy.log_density(torch.ones(1, 2, dtype=torch.float64))) == -math.log(32.0)
    assert toy.log_density(torch.tensor([[1.0, 3.0], [5.0, 5.0]])).tolist() == [-math.inf, -math.inf]


@pytest.mark.parametrize("name", WITH_DENSITY)
def test_single_precision_density_agrees_with_double(name):
    toy = toy_set(name)
    x = toy.sample(500, seed=0)
    difference = (toy.log_density(x).double() - toy.log_density(x.double())).abs().max()
    assert float(difference) < 1e-3


@pytest.mark.parametrize("name", WITH_DENSITY)
@each("shape", [(4, 1), (4,), (4, 3), ()])
def test_density_refuses_other_shapes(name, shape):
    with pytest.raises(InputError, match="must have shape"):
        toy_set(name).log_density(torch.zeros(shape))


def test_two_moons_lie_on_two_half_circles():
    x = toy_set("two-moons").sample(5000, seed=0)
    centers = torch.tensor([[-1.0, -0.5], [1.0, 0.5]])
    off = (torch.cdist(x, centers) - 2).abs().min(1).values
    assert float(off.max()) < 0.15 * 6
    assert abs(float(x.mean())) < SIGMAS * float(x.std()) / math.sqrt(len(x))


def test_digits_are_different_rows_in_range():
    toy = toy_set("digits")
    images, labels = _digit_images()
    assert toy.rows == len(images)
    assert toy.default_rows == toy.rows
    x = toy.sample(toy.rows, seed=0)
    assert (float(x.min()), float(x.max())) == (-1.0, 1.0)
    assert torch.equal(x.sum((1, 2, 3)).sort().values, images.sum((1, 2, 3)).sort().values)
    matched = (x.flatten(1)[:50, None] == images.flatten(1)).all(2).double()
    assert torch.equal(labels[matched.argmax(1)], toy.labels(toy.rows, seed=0)[:50])
    assert toy_set("circles").labels(3) is None
    with pytest.raises(InputError, match="1797 rows, got n=1798"):
        toy.sample(1798)


def test_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(InputError, match="did you mean 'pinwheel'"):
        toy_set("pinweel")


@pytest.mark.parametrize("n", [0, -1, 2.5, True])
def test_sample_refuses_a_bad_count(n):
    with pytest.raises(InputError, match="n: must be an integer"):
        toy_set("circles").sample(n)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(sorted(TOY_SETS)), n=st.integers(1, 50), seed=st.integers(0, 2**32))
def test_any_count_and_seed(name, n, seed):
    assert toy_set(name).sample(n, seed).shape == (n, *toy_set(name).event_shape)
