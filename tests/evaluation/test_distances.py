"""Distances against closed forms, loops and SciPy; U-statistics with mean zero under equal laws."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import each
from scipy.stats import wasserstein_distance
from torch import Tensor

from metastable.core.errors import ConfigError, InputError
from metastable.evaluation import distances
from metastable.evaluation.distances import energy_distance, mmd2, sliced_wasserstein, wasserstein_1d

Z = 4.5  # standard errors; one false alarm in 150 000 for each comparison


def normal(n: int, dim: int, seed: int) -> Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def z_score(values: list[Tensor], exact: float) -> float:
    sample = torch.stack(values)
    return float((sample.mean() - exact) / (sample.std() / math.sqrt(len(values))))


def gaussian_mmd2(shift: float, scale: float, dim: int, bandwidth: float) -> float:
    """MMD² of N(0, 1) and N(shift, scale²) per coordinate: E k over a difference N(m, v) is
    (σ²/(σ²+v))^{1/2}·exp(−m²/2(σ²+v)) in each coordinate."""

    def mean_kernel(m: float, v: float) -> float:
        width = bandwidth**2
        return (math.sqrt(width / (width + v)) * math.exp(-(m**2) / (2 * (width + v)))) ** dim

    return mean_kernel(0, 2) + mean_kernel(0, 2 * scale**2) - 2 * mean_kernel(shift, 1 + scale**2)


def gaussian_energy_distance(shift: float, scale: float) -> float:
    """On the line, with E|N(m, v)| = √(2v/π)·exp(−m²/2v) + m·erf(m/√(2v))."""

    def mean_abs(m: float, v: float) -> float:
        return math.sqrt(2 * v / math.pi) * math.exp(-(m**2) / (2 * v)) + m * math.erf(m / math.sqrt(2 * v))

    return 2 * mean_abs(shift, 1 + scale**2) - mean_abs(0, 2) - mean_abs(0, 2 * scale**2)


@pytest.mark.parametrize(
    ("shift", "scale", "dim"), [(0.0, 1.0, 1), (0.7, 1.0, 1), (0.3, 1.5, 3), (0.0, 1.0, 8)]
)
def test_mmd_has_the_closed_form_as_its_mean(shift: float, scale: float, dim: int) -> None:
    values = [
        mmd2(normal(60, dim, 2 * s), shift + scale * normal(40, dim, 2 * s + 1), bandwidth=1.3)
        for s in range(300)
    ]
    assert abs(z_score(values, gaussian_mmd2(shift, scale, dim, 1.3))) < Z


def test_the_biased_statistic_would_fail() -> None:
    """The mutant that keeps pairs of a row with itself is off by many standard errors."""

    def biased(x: Tensor, y: Tensor) -> Tensor:
        k = lambda a, b: torch.exp(-torch.cdist(a, b).square() / (2 * 1.3**2)).mean()  # noqa: E731
        return k(x, x) + k(y, y) - 2 * k(x, y)

    values = [biased(normal(60, 1, 2 * s), normal(40, 1, 2 * s + 1)) for s in range(300)]
    assert z_score(values, 0.0) > 2 * Z


@pytest.mark.parametrize(("shift", "scale"), [(0.0, 1.0), (0.5, 1.0), (0.2, 1.6)])
def test_energy_distance_has_the_closed_form_as_its_mean(shift: float, scale: float) -> None:
    values = [
        energy_distance(normal(60, 1, 2 * s), shift + scale * normal(40, 1, 2 * s + 1)) for s in range(300)
    ]
    assert abs(z_score(values, gaussian_energy_distance(shift, scale))) < Z


@pytest.mark.parametrize("statistic", [energy_distance, mmd2])
def test_equal_laws_give_zero_on_average_and_negative_values(statistic) -> None:
    values = [statistic(normal(50, 3, 2 * s), normal(50, 3, 2 * s + 1)) for s in range(300)]
    assert abs(z_score(values, 0.0)) < Z
    assert min(values) < 0 < max(values)


def test_weights_turn_one_law_into_another() -> None:
    """Draws of N(0, 1) weighted by exp(x·m − m²/2) follow N(m, 1)."""
    m, weighted, plain = 0.5, [], []
    for s in range(100):
        x, y = normal(200, 1, 2 * s), m + normal(200, 1, 2 * s + 1)
        weighted.append(energy_distance(x, y, log_weight_x=m * x[:, 0]))
        plain.append(energy_distance(x, y))
    assert abs(z_score(weighted, 0.0)) < Z
    assert z_score(plain, 0.0) > 3 * Z


@pytest.mark.parametrize("kernel", ["gaussian", "rational"])
def test_weighted_mmd_is_the_double_sum(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distances, "BLOCK", 20)  # several blocks, the last one ragged
    x, y = normal(7, 2, 0), normal(5, 2, 1) + 0.5
    lx, ly = normal(7, 1, 2)[:, 0], normal(5, 1, 3)[:, 0]
    p, q = lx.softmax(0), ly.softmax(0)

    def k(a: Tensor, b: Tensor) -> float:
        r2 = float((a - b).square().sum())
        shapes = [
            math.exp(-r2 / (2 * s * s)) if kernel == "gaussian" else 1 / (1 + r2 / (2 * s * s))
            for s in (0.6, 2)
        ]
        return sum(shapes) / 2

    def within(z: Tensor, w: Tensor) -> float:
        pairs = [(i, j) for i in range(len(z)) for j in range(len(z)) if i != j]
        total = sum(float(w[i] * w[j]) for i, j in pairs)
        return sum(float(w[i] * w[j]) * k(z[i], z[j]) for i, j in pairs) / total

    cross = sum(float(p[i] * q[j]) * k(x[i], y[j]) for i in range(7) for j in range(5))
    value = mmd2(x, y, [0.6, 2.0], kernel=kernel, log_weight_x=lx, log_weight_y=ly)
    assert float(value) == pytest.approx(within(x, p) + within(y, q) - 2 * cross, abs=1e-12)


@pytest.mark.parametrize("block", [1, 37, 1 << 22])
def test_blocks_do_not_change_the_value(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = normal(23, 2, 0), normal(31, 2, 1)
    whole = [mmd2(x, y), energy_distance(x, y), sliced_wasserstein(x, y)]
    monkeypatch.setattr(distances, "BLOCK", block)
    again = [mmd2(x, y), energy_distance(x, y), sliced_wasserstein(x, y)]
    assert torch.allclose(torch.stack(whole), torch.stack(again), atol=1e-13)


def test_no_digits_are_lost_far_from_the_origin() -> None:
    x, y = normal(200, 2, 0), normal(200, 2, 1) + 0.3
    far = 1e6
    assert float(energy_distance(x + far, y + far)) == pytest.approx(float(energy_distance(x, y)), abs=1e-7)


def test_events_of_any_shape_and_float32() -> None:
    x, y = normal(20, 12, 0).float(), normal(30, 12, 1).float()
    shaped = energy_distance(x.view(20, 3, 2, 2), y.view(30, 3, 2, 2))
    assert shaped.dtype == torch.float64
    assert torch.equal(shaped, energy_distance(x, y))


@pytest.mark.parametrize("weighted", [False, True])
def test_wasserstein_agrees_with_scipy(weighted: bool) -> None:
    for seed in range(20):
        x, y = normal(13, 1, seed)[:, 0], 2 * normal(29, 1, 100 + seed)[:, 0] + 1
        lx, ly = (normal(n, 1, 200 + seed)[:, 0] if weighted else None for n in (13, 29))
        weights = [None if w is None else w.softmax(0).numpy() for w in (lx, ly)]
        exact = wasserstein_distance(x.numpy(), y.numpy(), *weights)
        value = wasserstein_1d(x, y, log_weight_x=lx, log_weight_y=ly)
        assert float(value) == pytest.approx(exact, abs=1e-12)


def test_wasserstein_of_order_two() -> None:
    x = normal(500, 1, 0)
    assert float(wasserstein_1d(x, 3 * x + 2, order=2)) == pytest.approx(
        float((2 * x + 2).square().mean().sqrt()), abs=1e-12
    )


def test_weights_and_repeats_are_the_same_law() -> None:
    x, y = torch.tensor([0.0, 1.0]), normal(9, 1, 0)[:, 0]
    log_weight = torch.tensor([0.0, math.log(2.0)])
    repeated = wasserstein_1d(torch.tensor([0.0, 1.0, 1.0]), y)
    assert float(wasserstein_1d(x, y, log_weight_x=log_weight)) == pytest.approx(float(repeated), abs=1e-7)
    assert float(wasserstein_1d(x, torch.tensor([0.0, 1.0, 1.0]), log_weight_x=log_weight)) < 1e-7


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_sliced_wasserstein_of_a_shift(dim: int) -> None:
    """A shift by m moves a projection by θ·m, whose mean absolute value is |m|·Γ(d/2)/(√π·Γ((d+1)/2))."""
    x, projections = normal(50, dim, 0), 4000
    shift = torch.full((dim,), 0.9, dtype=torch.float64)
    length = float(shift.norm())
    mean = length * math.gamma(dim / 2) / (math.sqrt(math.pi) * math.gamma((dim + 1) / 2))
    spread = math.sqrt(max(length**2 / dim - mean**2, 1e-20) / projections)
    value = float(sliced_wasserstein(x, x + shift, projections=projections))
    assert abs(value - mean) < Z * spread + 1e-9
    squared = float(sliced_wasserstein(x, x + shift, projections=projections, order=2)) ** 2
    assert squared == pytest.approx(length**2 / dim, rel=0.1)


def test_sliced_wasserstein_is_reproducible() -> None:
    x, y = normal(30, 3, 0), normal(40, 3, 1)
    assert torch.equal(sliced_wasserstein(x, y, seed=5), sliced_wasserstein(x, y, seed=5))
    assert not torch.equal(sliced_wasserstein(x, y, seed=5), sliced_wasserstein(x, y, seed=6))


@each(
    "call, error, message",
    [
        (lambda x: mmd2(x, x[:, :1]), InputError, "two samples"),
        (lambda x: energy_distance(x, x[:1]), InputError, "at least two rows"),
        (lambda x: mmd2(x, x, kernel="gausian"), ConfigError, "did you mean 'gaussian'"),
        (lambda x: mmd2(x, x, bandwidth=0.0), ConfigError, "bandwidth"),
        (lambda x: energy_distance(x, x, torch.zeros(3)), InputError, "log_weight_x"),
        (lambda x: wasserstein_1d(x, x), InputError, "sliced_wasserstein"),
        (lambda x: wasserstein_1d(x[:, 0], x[:, 0], order=0.5), InputError, "order"),
        (lambda x: sliced_wasserstein(x, x, projections=0), ConfigError, "projections"),
    ],
)
def test_refusals_name_the_field(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(normal(10, 2, 0))
