"""Laws of continuous flows, in float64: exact fields give exact densities, at every time, by either direction.

The exact field between N(0, I) and a mixture of Gaussians is known in closed form, and so is the density on the
way. At t = 0 and t = 1 the divergences of both interpolants cancel or vanish (∓d, or 0), so a trapezoidal rule with
wrong ends is seen only where the flow is cut before the end.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conftest import assert_within, each, mean_and_error, quadrature, z_limit, z_scores
from torch import Tensor, nn

from metastable.benchmarks.interpolant import one_scale, own
from metastable.proposals import (
    ConcatSquash,
    FilmField,
    InterpolantFlow,
    MixtureField,
    ResidualField,
    TransformerField,
    VectorField,
    continuous,
)
from metastable.proposals.interpolants import INTERPOLANTS

F64 = torch.float64
REQUIRED = 0.01
over = pytest.mark.parametrize
over_interpolants = over("kind", INTERPOLANTS)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=F64)


def mixture(dim: int, kind: str, scale: float = 0.25) -> MixtureField:
    """Three components; the narrowest has the given standard deviation."""
    means = normal(3, dim, seed=1) * (2 if dim == 2 else 1)
    scales = torch.tensor([1.0, 1.0, 1.6], dtype=F64) * scale
    return MixtureField(means, scales, torch.tensor([0.2, 0.3, 0.5], dtype=F64), interpolant=kind)


def exact_flow(field: MixtureField, **settings) -> InterpolantFlow:
    dim = field.means.shape[1]
    return InterpolantFlow(dim, field=field, interpolant=field.interpolant, **settings).double()


def draws(field: MixtureField, n: int, t: float = 1.0, seed: int = 2) -> Tensor:
    """Exact draws of the law at t."""
    own = torch.multinomial(field.log_weights.exp(), n, replacement=True, generator=rng(seed))
    y = field.means[own] + field.variances[own, None].sqrt() * normal(n, field.means.shape[1], seed=seed + 1)
    z, times = normal(*y.shape, seed=seed + 2), torch.full((n,), t, dtype=F64)
    return field.interpolant.point(z, y, times)


def mistake(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).abs().mean())


def bent(module: nn.Module, size: float = 0.4) -> nn.Module:
    """Weights far from where they start, so that the flow is no identity."""
    module.double()
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p += size * normal(*p.shape, seed=100 + i)
    return module


# ---- exact densities


@over_interpolants
@over("dim", [2, 20])
def test_log_density_of_an_exact_field_is_exact(dim, kind):
    """375 Heun steps and 64 divergences; components down to a standard deviation of 0.25."""
    field = mixture(dim, kind)
    flow = exact_flow(field, steps=375, scored=64)
    x, log_prob = flow.sample_and_log_prob(100, rng(3))
    assert mistake(log_prob, field.log_prob(x)) <= REQUIRED
    y = draws(field, 100)
    assert mistake(flow.log_prob(y), field.log_prob(y)) <= REQUIRED


@over_interpolants
@over("dim", [2, 20])
def test_the_usual_settings_are_exact_enough(dim, kind):
    field = mixture(dim, kind)
    y = draws(field, 100)
    assert mistake(exact_flow(field).log_prob(y), field.log_prob(y)) <= REQUIRED


def test_crowded_times_do_not_mind_narrow_modes():
    """With even steps the trapezoidal rule's error grows as the modes get narrower."""
    field = mixture(20, "trigonometric", 0.1)
    y = draws(field, 50)
    even, crowded = (
        mistake(exact_flow(field, crowding=c).log_prob(y), field.log_prob(y)) for c in (1.0, 2.0)
    )
    assert crowded <= REQUIRED < 5 * REQUIRED < even


class Flipped(MixtureField):
    """The mutant of (6.2): the divergence with the wrong sign."""

    def divergence(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        return -super().divergence(x, code, clock)


def left_rule(values: Tensor, times: Tensor) -> Tensor:
    lengths = times.diff(dim=0).view(-1, 1, 1)
    return torch.cat([torch.zeros_like(values[:1]), (lengths * values[:-1]).cumsum(0)])


def without_halves(values: Tensor, times: Tensor) -> Tensor:
    lengths = times.diff(dim=0).view(-1, 1, 1)
    ends = 0.5 * (lengths[:1] * values[:1] + lengths[-1:] * values)
    return trapezoid(values, times) + ends


trapezoid = continuous.trapezoid


def test_a_wrong_sign_is_noticed():
    right = mixture(2, "linear")
    wrong = Flipped(right.means, right.variances.sqrt(), right.log_weights.exp(), interpolant="linear")
    y = draws(right, 50, t=0.7)
    got = exact_flow(wrong).log_prob(y, at=0.7)
    assert mistake(got, right.log_prob(y, 0.7)) > 50 * REQUIRED


@over("rule", [left_rule, without_halves])
def test_a_wrong_rule_is_noticed(rule, monkeypatch):
    field = mixture(20, "linear")
    y = draws(field, 50, t=0.7)
    assert mistake(exact_flow(field).log_prob(y, at=0.7), field.log_prob(y, 0.7)) <= REQUIRED / 2
    monkeypatch.setattr(continuous, "trapezoid", rule)
    assert mistake(exact_flow(field).log_prob(y, at=0.7), field.log_prob(y, 0.7)) > 5 * REQUIRED


@over_interpolants
def test_a_flow_can_be_cut_at_any_time(kind):
    field = mixture(2, kind)
    flow = exact_flow(field)
    for t in (0.0, 0.3, 0.8):
        x, log_prob = flow.sample_and_log_prob(50, rng(4), until=t)
        assert mistake(log_prob, field.log_prob(x, t)) <= REQUIRED / 2
        y = draws(field, 50, t)
        assert mistake(flow.log_prob(y, at=t), field.log_prob(y, t)) <= REQUIRED / 2
    assert torch.equal(flow.sample(5, rng(4), until=0.0), flow.trajectories(5, torch.zeros(1), rng(4))[0][0])


def test_rows_may_have_times_of_their_own():
    field = mixture(2, "trigonometric")
    flow = exact_flow(field)
    t = torch.tensor([0.0, 0.25, 0.6, 0.9, 1.0], dtype=F64)
    x = torch.cat([draws(field, 1, float(v)) for v in t])
    assert mistake(flow.log_prob(x, at=t), field.log_prob(x, t)) <= REQUIRED
    one_by_one = torch.cat([flow.log_prob(x[i : i + 1], at=float(v)) for i, v in enumerate(t)])
    torch.testing.assert_close(flow.log_prob(x, at=t), one_by_one)


@over_interpolants
def test_one_set_of_trajectories_serves_many_times(kind):
    """Remark 5.1: at each time they are draws of the flow cut there, with their density."""
    field = mixture(2, kind)
    flow = exact_flow(field)
    times = torch.tensor([0.31, 0.9, 0.0, 0.31, 0.77], dtype=F64)
    x, log_prob = flow.trajectories(60, times, rng(5))
    assert x.shape == (5, 60, 2)
    assert mistake(log_prob, field.log_prob(x, times[:, None])) <= REQUIRED / 2
    assert torch.equal(x[0], x[3])
    end, end_log_prob = flow.sample_and_log_prob(60, rng(5), until=0.9)
    torch.testing.assert_close(x[1], end)
    torch.testing.assert_close(log_prob[1], end_log_prob)
    assert mistake(flow.sample(60, rng(5), until=0.31), x[0]) < 1e-4  # the same path, other steps


def test_both_directions_agree():
    field = mixture(2, "trigonometric")
    flow = exact_flow(field, steps=400, scored=401)
    x, log_prob = flow.sample_and_log_prob(50, rng(6))
    assert mistake(flow.log_prob(x), log_prob) < 1e-4


def test_errors_fall_with_the_square_of_the_step():
    """Heun's rule and the trapezoidal rule are of second order."""
    field = mixture(2, "linear", 0.5)
    y = draws(field, 50)
    errors = [
        mistake(exact_flow(field, steps=n, scored=n + 1).log_prob(y), field.log_prob(y)) for n in (20, 40, 80)
    ]
    for coarse, fine in itertools.pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(2.0, abs=0.4)


@over_interpolants
def test_draws_of_an_exact_field_have_the_moments_of_the_mixture(kind):
    field = mixture(2, kind, 0.5)
    w = field.log_weights.exp()
    mean = w @ field.means
    second = torch.einsum("k,ki,kj->ij", w, field.means, field.means) + (w @ field.variances) * torch.eye(2)
    exact = torch.cat([mean, second.flatten()])
    flow = exact_flow(field, steps=100)

    def moments(until: float) -> tuple[Tensor, Tensor]:
        x = flow.sample(5000, rng(7), until=until)
        return mean_and_error(torch.cat([x, (x[:, :, None] * x[:, None, :]).flatten(1)], 1))

    value, error = moments(1.0)
    assert_within(value, exact, error)
    value, error = moments(0.6)  # a flow that stops early is noticed
    assert z_scores(value, exact, error).max() > z_limit(6)


# ---- any field

FIELDS = {
    "concatsquash, 2 layers": lambda d: ConcatSquash(d, (3,), width=9, layers=2),
    "concatsquash, 3 layers": lambda d: ConcatSquash(d, (3,), width=9, layers=3),
    "concatsquash, 4 layers": lambda d: ConcatSquash(d, (3,), width=9, layers=4),
    "residual, 2 layers": lambda d: ResidualField(d, (3,), width=9, layers=2),
    "residual, 5 layers": lambda d: ResidualField(d, (3,), width=9, layers=5),
    "transformer": lambda d: TransformerField(d, (3,), width=8, layers=1, past=[(0, 2, 1)], reads="path"),
    "film": lambda d: FilmField(d, (3,), width=8, layers=2, tokens=[(1, 2, 1)]),
}
SHAPES = {
    "one time": ((5, 6), ()),
    "one for each context": ((5, 6), (5, 1)),
    "one for each row": ((5, 6), (5, 6)),
    "nodes": ((4, 5, 6), (4, 1, 1)),
    "nodes of each context": ((4, 5, 6), (4, 5, 1)),
    "nodes of each row": ((4, 5, 6), (4, 5, 6)),
    "one row for each context": ((4, 5, 1), (4, 1, 1)),
}


@each("dim", [1, 4, 12])
@each("shapes", SHAPES.values())
@over("make", FIELDS.values(), ids=FIELDS)
def test_divergence_is_the_trace_of_the_jacobian(make, shapes, dim):
    field = bent(make(dim))
    lead, of_times = shapes
    x, t = normal(*lead, dim, seed=1), torch.rand(of_times, generator=rng(2), dtype=F64)
    code, clock = field.encode(normal(5, 3, seed=3))[:, None], field.clock(t)
    rows = x.clone().requires_grad_(True)
    v = field.velocity(rows, code, clock)
    exact = sum(torch.autograd.grad(v[..., i].sum(), rows, retain_graph=True)[0][..., i] for i in range(dim))
    torch.testing.assert_close(field.divergence(x, code, clock), exact)
    torch.testing.assert_close(VectorField.divergence(field, x, code, clock), exact)


def test_divergence_of_a_mixture_is_the_trace_of_the_jacobian():
    field = mixture(3, "trigonometric")
    x, t = normal(5, 6, 3, seed=1), torch.rand((5, 1), generator=rng(2), dtype=F64)
    torch.testing.assert_close(field.divergence(x, None, t), VectorField.divergence(field, x, None, t))


@over("until", [0.4, 1.0])
@over("name", ["concatsquash", "residual"])
def test_a_learned_density_integrates_to_one(name, until):
    flow = InterpolantFlow(2, 1, field=name, width=12, layers=3, steps=40, scored=41, crowding=1.0)
    bent(flow.field)
    given = torch.tensor([[0.3]], dtype=F64)
    flow.double()
    with torch.no_grad():
        grid = quadrature(
            lambda x: -flow.log_prob(x[None], given, at=until)[0], [(-9.0, 9.0, 81), (-9.0, 9.0, 81)]
        )
        assert float(grid.log_partition) == pytest.approx(0.0, abs=2e-3)
        plain = quadrature(lambda x: 0.5 * x.square().sum(1) + math.log(2 * math.pi), [(-9.0, 9.0, 81)] * 2)
        assert (grid.log_mass - plain.log_mass).abs().max() > 0.5  # and it is not the density it started as


@over("dim", [2, 20])
def test_two_time_scales_give_what_one_gives(dim):
    """64 divergences beside one at each stage of 375 Heun steps: the augmented ODE of Section 6."""
    flow = InterpolantFlow(dim, field="residual", width=16, layers=4, steps=375, scored=64)
    bent(flow.field, 0.3)
    flow.double()
    with torch.no_grad():
        x, coarse = flow.sample_and_log_prob(20, rng(9))
        end, fine = one_scale(flow, 20, rng(9), own)
        start = flow.log_prob(flow.sample(20, rng(9), until=0.0), at=0.0)
    torch.testing.assert_close(x, end)
    assert (coarse - fine).abs().max() <= 0.02
    assert (fine - start).abs().mean() > 0.2  # there is something to integrate
