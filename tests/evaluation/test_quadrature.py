"""Quadrature against closed forms, its order where it has one, and its refusals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conftest import each
from torch import Tensor, nn

from metastable.core.errors import ConfigError, EnergyError, InputError
from metastable.evaluation import quadrature
from metastable.evaluation.quadrature import (
    bounding_box,
    grid_density,
    kl_on_grid,
    log_partition_quadrature,
)


def gaussian_energy(mean: float, scale: float):
    return lambda x: 0.5 * ((x - mean) / scale).square().sum(1)


def gaussian_log_p(mean: float, scale: float, dim: int = 1):
    constant = dim * (math.log(scale) + 0.5 * math.log(2 * math.pi))
    return lambda x: -gaussian_energy(mean, scale)(x) - constant


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_gaussian_log_partition_is_exact(dim: int) -> None:
    exact = dim * (math.log(0.7) + 0.5 * math.log(2 * math.pi))
    value = log_partition_quadrature(gaussian_energy(0.4, 0.7), [(-6.0, 7.0)] * dim, 81)
    assert value == pytest.approx(exact, abs=1e-11)


def test_correlated_gaussian_on_an_uneven_box() -> None:
    precision = torch.tensor([[2.0, -0.9], [-0.9, 1.0]], dtype=torch.float64)
    energy = lambda x: 0.5 * torch.einsum("bi,ij,bj->b", x, precision, x)  # noqa: E731
    exact = math.log(2 * math.pi) - 0.5 * float(torch.logdet(precision))
    assert log_partition_quadrature(energy, [(-9.0, 9.5), (-12.0, 12.0)], (150, 130)) == pytest.approx(
        exact, abs=1e-11
    )


def test_a_product_of_energies_adds_its_log_partitions() -> None:
    left, right = (lambda x: x[:, 0] ** 4 - x[:, 0] ** 2), (lambda y: (y[:, 0] - 1).abs() ** 3)
    box = [(-5.0, 5.0)]
    both = log_partition_quadrature(lambda x: left(x[:, :1]) + right(x[:, 1:]), box * 2, 201)
    apart = log_partition_quadrature(left, box, 201) + log_partition_quadrature(right, box, 201)
    assert both == pytest.approx(apart, abs=1e-12)


def test_a_constant_energy_gives_the_volume_with_any_grid() -> None:
    value = log_partition_quadrature(lambda x: torch.full((len(x),), 3.0), [(0.0, 2.0), (-1.0, 4.0)], (2, 7))
    assert value == pytest.approx(math.log(10.0) - 3.0, abs=1e-13)


def test_second_order_where_the_density_is_cut_off() -> None:
    exact = math.log(1 - math.exp(-1))
    errors = [log_partition_quadrature(lambda x: x[:, 0], [(0.0, 1.0)], n) - exact for n in (11, 21, 41)]
    for coarse, fine in itertools.pairwise(errors):
        assert coarse / fine == pytest.approx(4, abs=0.02)


def test_energies_of_any_size_neither_overflow_nor_vanish() -> None:
    energy = gaussian_energy(0.0, 1.0)
    for offset in (-1e5, 1e5):
        shifted = log_partition_quadrature(lambda x: energy(x) + offset, [(-9.0, 9.0)], 101)  # noqa: B023
        assert shifted + offset == pytest.approx(0.5 * math.log(2 * math.pi), abs=1e-9)


def test_hard_walls_are_allowed() -> None:
    energy = lambda x: torch.where(x[:, 0] < 0, math.inf, x[:, 0])  # noqa: E731
    assert log_partition_quadrature(energy, [(-1.0, 40.0)], 40001) == pytest.approx(0.0, abs=1e-3)


def test_a_module_is_evaluated_in_its_own_precision() -> None:
    class Well(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stiffness = nn.Parameter(torch.tensor(4.0))
            self.seen: set[torch.dtype] = set()

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add(x.dtype)
            return 0.5 * self.stiffness * x.square().sum(1)

    well = Well()
    value = log_partition_quadrature(well, [(-6.0, 6.0)], 301)
    assert well.seen == {torch.float32}
    assert value == pytest.approx(0.5 * math.log(2 * math.pi / 4), abs=1e-6)


def test_blocks_cover_the_grid_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    energy = lambda x: (x[:, 0] - 0.3 * x[:, 1]).square() + x[:, 1].square()  # noqa: E731
    whole = grid_density(energy, [(-4.0, 4.0), (-5.0, 5.0)], (31, 47)).density
    monkeypatch.setattr(quadrature, "BLOCK", 100)
    blocks = grid_density(energy, [(-4.0, 4.0), (-5.0, 5.0)], (31, 47)).density
    torch.testing.assert_close(blocks, whole, rtol=1e-13, atol=0)  # the end of a block may round otherwise


def test_grid_density_is_the_density_at_its_axes() -> None:
    grid = grid_density(gaussian_energy(1.0, 0.5), [(-4.0, 6.0), (-4.5, 6.5)], (101, 121))
    a, b = torch.meshgrid(*grid.axes, indexing="ij")
    x = torch.stack([a.flatten(), b.flatten()], 1)
    assert torch.allclose(grid.density.flatten(), gaussian_log_p(1.0, 0.5, 2)(x).exp(), atol=1e-12)
    assert grid.edge_mass < 1e-12
    assert float(torch.trapezoid(torch.trapezoid(grid.density, grid.axes[1]), grid.axes[0])) == pytest.approx(
        1
    )


def test_edge_mass_shows_a_box_that_is_too_small() -> None:
    assert grid_density(gaussian_energy(0.0, 1.0), [(0.0, 5.0)], 101).edge_mass > 0.01


@pytest.mark.parametrize(("mean", "scale"), [(0.0, 1.0), (0.8, 1.0), (-0.5, 1.7), (0.3, 0.6)])
@pytest.mark.parametrize("dim", [1, 2])
def test_kl_between_gaussians(mean: float, scale: float, dim: int) -> None:
    """KL(N(0,1) ‖ N(μ,σ²)) = log σ + (1+μ²)/2σ² − ½ per dimension; the reverse is a different number."""
    exact = dim * (math.log(scale) + (1 + mean**2) / (2 * scale**2) - 0.5)
    box = [(-16.0, 16.0)] * dim
    value = kl_on_grid(gaussian_log_p(0.0, 1.0, dim), gaussian_energy(mean, scale), box, 241)
    assert value == pytest.approx(exact, abs=1e-10)
    reverse = kl_on_grid(gaussian_log_p(mean, scale, dim), gaussian_energy(0.0, 1.0), box, 241)
    assert scale == 1 or abs(reverse - exact) > 0.01


def test_kl_does_not_see_a_constant_in_the_energy() -> None:
    energy = gaussian_energy(0.5, 1.2)
    first, second = (
        kl_on_grid(gaussian_log_p(0.0, 1.0), lambda x: energy(x) + c, [(-12.0, 12.0)])  # noqa: B023
        for c in (0.0, 700.0)
    )
    assert first == pytest.approx(second, abs=1e-10)


def test_kl_with_a_density_that_vanishes() -> None:
    uniform = lambda x: torch.where(x[:, 0].abs() <= 1, -math.log(2), -math.inf)  # noqa: E731
    value = kl_on_grid(uniform, lambda x: torch.zeros(len(x)), [(-2.0, 2.0)], 8001, mass_tolerance=1e-2)
    assert value == pytest.approx(math.log(2), abs=1e-3)


def test_kl_refuses_a_box_that_cuts_the_data() -> None:
    with pytest.raises(InputError, match="widen the box"):
        kl_on_grid(gaussian_log_p(0.0, 1.0), gaussian_energy(0.0, 1.0), [(-1.0, 1.0)])
    with pytest.raises(InputError, match="normalise log_p"):
        kl_on_grid(lambda x: -gaussian_energy(0.0, 1.0)(x), gaussian_energy(0.0, 1.0), [(-9.0, 9.0)])


def test_bounding_box_holds_the_data_with_a_margin() -> None:
    data = torch.tensor([[0.0, -1.0], [2.0, 3.0], [1.0, 1.0]])
    assert bounding_box(data, 0.5) == ((-1.0, 3.0), (-3.0, 5.0))
    assert bounding_box(torch.tensor([1.0, 3.0]), 0.0) == ((1.0, 3.0),)


@each(
    "call, error, message",
    [
        (lambda e: log_partition_quadrature(e, [(1.0, 0.0)]), ConfigError, "low < high"),
        (lambda e: log_partition_quadrature(e, [(0.0, 1.0)] * 2, (5,)), ConfigError, "points"),
        (lambda e: log_partition_quadrature(e, [(0.0, 1.0)], 1), ConfigError, "at least 2"),
        (lambda e: log_partition_quadrature(e, [(0.0, 1.0)] * 5, 200), InputError, "by sampling"),
        (lambda e: log_partition_quadrature(lambda x: x, [(0.0, 1.0)]), EnergyError, "must map"),
        (lambda e: log_partition_quadrature(lambda x: x[:, 0].log() / 0, [(0.0, 1.0)]), EnergyError, "NaN"),
        (lambda e: grid_density(lambda x: x[:, 0] * 0 + math.inf, [(1.0, 2.0)]), EnergyError, "mass"),
        (lambda e: bounding_box(torch.zeros(3, 1), -0.1), ConfigError, "margin"),
    ],
)
def test_refusals_name_the_field(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(gaussian_energy(0.0, 1.0))
