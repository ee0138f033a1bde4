"""The Bhattacharyya coefficient: against scipy's kernel density, and against two Gaussians in closed form."""

import math

import numpy as np
import pytest
import torch
from conftest import assert_within
from scipy.stats import gaussian_kde

from metastable.core import InputError
from metastable.evaluation.bhattacharyya import PlaneKDE, bhattacharyya, least_overlap

AXIS = torch.linspace(-4, 4, 33, dtype=torch.float64)


def sample(n: int, correlation: float, seed: int) -> torch.Tensor:
    """Rows of a Gaussian with standard deviations 1.3 and 0.6, off the centre, and a second blob."""
    z = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mixed = torch.stack([z[:, 0], correlation * z[:, 0] + math.sqrt(1 - correlation**2) * z[:, 1]], 1)
    rows = mixed * torch.tensor([1.3, 0.6]) + torch.tensor([0.4, -0.2])
    rows[: n // 3] += torch.tensor([0.5, 1.0])
    return rows


@pytest.mark.parametrize("correlation", [0.0, -0.5, 0.9, 0.9999])
def test_the_density_is_scipys(correlation):
    x = sample(700, correlation, seed=1)
    points = torch.cartesian_prod(AXIS, AXIS).numpy().T
    expected = gaussian_kde(x.numpy().T)(points).reshape(33, 33)
    found = PlaneKDE.of(x).on_grid(AXIS, AXIS).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-14)


def test_the_coefficient_is_that_of_scipys_densities():
    x, y = sample(400, 0.3, seed=1), sample(500, -0.2, seed=2)
    points = torch.cartesian_prod(AXIS, AXIS).numpy().T
    p, q = (gaussian_kde(z.numpy().T)(points).reshape(33, 33) for z in (x, y))
    expected = np.trapezoid(np.trapezoid(np.sqrt(p * q), AXIS.numpy()), AXIS.numpy())
    assert bhattacharyya(x, y, points=33) == pytest.approx(expected, abs=1e-12)


def blurred_overlap(mean: torch.Tensor, first: torch.Tensor, second: torch.Tensor, n: int) -> float:
    """exp(−⅛ mᵀS⁻¹m) · |S₁S₂|^{1/4}/|S|^{1/2} of two Gaussians after blurring, S = (S₁ + S₂)/2."""
    S1, S2 = (cov * (1 + n ** (-1 / 3)) for cov in (first, second))
    S = (S1 + S2) / 2
    distance = float(mean @ torch.linalg.inv(S) @ mean) / 8
    return math.exp(-distance) * float((torch.det(S1) * torch.det(S2)) ** 0.25 / torch.det(S) ** 0.5)


def two_gaussians(n: int, seed: int) -> float:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=rng, dtype=torch.float64) * torch.tensor([0.8, 0.5])
    y = torch.randn(n, 2, generator=rng, dtype=torch.float64) * torch.tensor([0.5, 0.9]) + 0.7
    return bhattacharyya(x, y, half_width=6.0, points=96)


def test_two_gaussians_in_closed_form():
    """The mean of a kernel estimate is the law blurred by the kernel: that of a Gaussian is a Gaussian."""
    n, repeats = 3000, 12
    values = torch.tensor([two_gaussians(n, seed) for seed in range(repeats)], dtype=torch.float64)
    covariances = [torch.tensor(sd, dtype=torch.float64).square().diag() for sd in ([0.8, 0.5], [0.5, 0.9])]
    offset = torch.full((2,), 0.7, dtype=torch.float64)
    truth = blurred_overlap(offset, *covariances, n)
    # the square root of an estimate lies below that of its mean, by ⅛ of its relative variance for either sample:
    # 1/(n·n^{-1/3}·4π·|S|^{1/2}·p), integrated against p^{1/2}q^{1/2}, is below 0.003 here
    error = float(values.std()) / math.sqrt(repeats) + 0.003 / 5
    assert_within(float(values.mean()), truth, error)
    with pytest.raises(AssertionError):  # the unblurred law, or none of the exponent's eighth
        assert_within(float(values.mean()), blurred_overlap(2 * offset, *covariances, n), error)


def test_the_smallest_over_contexts():
    x, near, far = sample(300, 0.0, 0), sample(300, 0.0, 1), sample(300, 0.0, 2) + 1.5
    assert least_overlap([x, x], [near, far]) == bhattacharyya(x, far) < bhattacharyya(x, near)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(5, 3), r"shape \(n, 2\), got \(5, 3\)"),
        (torch.zeros(2, 2), "at least 3 rows"),
        (torch.ones(9, 1) * torch.tensor([[1.0, 2.0]]), "on one line or in one point"),
        (torch.tensor([[math.nan, 0.0], [1.0, 0.0], [0.0, 1.0]]), "must be finite, got 1 row"),
    ],
)
def test_what_has_no_density_is_refused(x, message):
    with pytest.raises(InputError, match=message):
        bhattacharyya(x, sample(10, 0.0, 0))
