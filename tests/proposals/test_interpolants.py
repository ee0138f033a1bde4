"""Interpolants, the law of their times, and the loss whose minimum is the velocity between noise and data."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_within, each, mean_and_error, z_limit, z_scores
from torch import Tensor

from metastable.core.errors import ConfigError
from metastable.core.times import require_times
from metastable.proposals import InterpolantFlow, MixtureField, VectorField
from metastable.proposals.interpolants import (
    INTERPOLANTS,
    LINEAR,
    TRIGONOMETRIC,
    draw_times,
    interpolant_loss,
    interpolant_named,
)

F64 = torch.float64
over = pytest.mark.parametrize
over_interpolants = over("interpolant", INTERPOLANTS.values(), ids=INTERPOLANTS)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=F64)


@over_interpolants
def test_a_path_leads_from_noise_to_data(interpolant):
    z, y = normal(5, 3, seed=0), normal(5, 3, seed=1)
    for t, end in ((0.0, z), (1.0, y)):
        torch.testing.assert_close(interpolant.point(z, y, torch.full((5,), t, dtype=F64)), end)


@over_interpolants
def test_speed_is_the_derivative_of_the_path(interpolant):
    z, y, t = normal(5, 3, seed=0), normal(5, 3, seed=1), torch.linspace(0.05, 0.95, 5, dtype=F64)
    h = 1e-6
    slope = (interpolant.point(z, y, t + h) - interpolant.point(z, y, t - h)) / (2 * h)
    torch.testing.assert_close(interpolant.speed(z, y, t), slope, rtol=1e-7, atol=1e-8)


def test_the_trigonometric_path_keeps_unit_variance():
    a, b = TRIGONOMETRIC.coefficients(torch.linspace(0, 1, 7, dtype=F64))
    torch.testing.assert_close(a.square() + b.square(), torch.ones(7, dtype=F64))


@over("alpha", [0.5, 1.0, 2.5])
def test_times_follow_their_law(alpha):
    """P(T ≤ t) = t^α."""
    times = draw_times((20_000,), alpha, rng(1), torch.zeros((), dtype=F64))
    grid = torch.tensor([0.2, 0.5, 0.8], dtype=F64)
    share, error = mean_and_error((times[:, None] <= grid).double())
    assert_within(share, grid.pow(alpha), error)
    if alpha != 1:  # u^α in place of u^{1/α} is noticed
        assert z_scores(share, grid.pow(1 / alpha), error).min() > z_limit()


def test_the_loss_is_the_printed_one():
    z, y, t = normal(4, 2, seed=0), normal(4, 2, seed=1), torch.tensor([0.1, 0.4, 0.7, 1.0], dtype=F64)
    v = (1 - t)[:, None] * z + t[:, None] * y + t[:, None]
    expected = v.square().sum(1) - 2 * ((y - z) * v).sum(1)
    got = interpolant_loss(lambda x, t: x + t[:, None], LINEAR, y, z, t)
    torch.testing.assert_close(got, expected)


class Combination(VectorField):
    """θ₀ v*(x) + θ₁ x + θ₂: linear in its parameters, with the exact velocity at θ = (1, 0, 0)."""

    def __init__(self, exact: MixtureField):
        super().__init__()
        self.exact = exact
        self.theta = torch.nn.Parameter(torch.tensor([1.0, 0.0, 0.0], dtype=F64))

    def velocity(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        return self.theta[0] * self.exact.velocity(x, None, clock) + self.theta[1] * x + self.theta[2]


def gradients_at_the_velocity(kind: str, learned: str, mean: float = 0.6) -> Tensor:
    """Gradients of `kind`'s loss on a Gaussian, where θ gives the velocity of `learned`; one row for each batch."""
    exact = MixtureField(
        torch.full((1, 2), mean, dtype=F64), torch.tensor([0.4], dtype=F64), interpolant=learned
    )
    flow = InterpolantFlow(2, field=Combination(exact), interpolant=kind, alpha=1.5, times=3).double()
    flow.mean.copy_(torch.tensor([10.0, -3.0]))
    flow.scale.copy_(torch.tensor([2.0, 0.1]))
    source, rows = rng(3), []
    for _ in range(300):
        white = mean + 0.4 * torch.randn((100, 2), generator=source, dtype=F64)
        loss = flow.loss(flow.mean + flow.scale * white, rng=source)
        rows.append(torch.autograd.grad(loss, flow.field.theta)[0])
    return torch.stack(rows)


@over("kind", INTERPOLANTS)
def test_the_loss_is_least_at_the_closed_form_velocity(kind):
    """The loss is quadratic in θ, so least where its gradient vanishes; another path's velocity is not there."""
    gradient, error = mean_and_error(gradients_at_the_velocity(kind, kind))
    assert_within(gradient, 0.0, error)
    (other,) = set(INTERPOLANTS) - {kind}
    gradient, error = mean_and_error(gradients_at_the_velocity(kind, other))
    assert z_scores(gradient, 0.0, error).max() > 4 * z_limit()


def test_the_minimiser_is_within_its_standard_error():
    """θ̂ of a linear-in-parameters field, by the normal equations, with the sandwich's standard errors."""
    exact = MixtureField(
        torch.tensor([[0.5, -1.0]], dtype=F64), torch.tensor([0.7], dtype=F64), interpolant="linear"
    )
    n = 20_000
    y = torch.tensor([0.5, -1.0], dtype=F64) + 0.7 * normal(n, 2, seed=4)
    z, t = normal(n, 2, seed=5), draw_times((n,), 2.0, rng(6), torch.zeros((), dtype=F64))
    x = LINEAR.point(z, y, t)
    basis = torch.stack([exact.velocity(x, None, t), x, torch.ones_like(x)])  # (3, n, 2)

    def estimate(speed: Tensor) -> tuple[Tensor, Tensor]:
        gram = torch.einsum("ind,jnd->ij", basis, basis)
        theta = torch.linalg.solve(gram, torch.einsum("ind,nd->i", basis, speed))
        residual = speed - torch.einsum("i,ind->nd", theta, basis)
        scores = torch.einsum("ind,nd->ni", basis, residual)
        inverse = torch.linalg.inv(gram)
        return theta, (inverse @ (scores.T @ scores) @ inverse).diagonal().sqrt()

    theta, error = estimate(LINEAR.speed(z, y, t))
    truth = torch.tensor([1.0, 0.0, 0.0], dtype=F64)
    assert error.max() < 0.05
    assert_within(theta, truth, error)
    by_loss = theta.clone().requires_grad_(True)  # the normal equations are those of the loss
    loss = interpolant_loss(lambda *_: torch.einsum("i,ind->nd", by_loss, basis), LINEAR, y, z, t).mean()
    assert torch.autograd.grad(loss, by_loss)[0].abs().max() < 1e-10
    theta, error = estimate(-LINEAR.speed(z, y, t))
    assert z_scores(theta, truth, error).max() > 10 * z_limit()


@each(
    "make, words",
    [
        (
            lambda: draw_times((2,), 0.0, rng(), torch.zeros(())),
            r"alpha: must be a finite number above 0, got 0.0",
        ),
        (lambda: InterpolantFlow(2, alpha=-1.0), r"flow.alpha: must be a finite number above 0, got -1.0"),
        (lambda: interpolant_named("trigonometry"), r"interpolant: .*did you mean 'trigonometric'"),
        (lambda: require_times("t", torch.tensor([0.5, 1.5])), r"t: must be within \[0, 1\], got 1.5"),
        (lambda: require_times("t", torch.tensor(float("nan"))), r"t: must be within \[0, 1\], got nan"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
