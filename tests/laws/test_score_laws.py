"""Score matching against full Hessians, finite differences and quadrature, in float64; and mutants that fail."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_within, mean_and_error, quadrature, z_limit, z_scores
from torch import Tensor, nn

from metastable.core.types import row_dot
from metastable.energies import MLP, GaussianMixture
from metastable.methods import Context, DenoisingScoreMatching, ScoreMatching, SlicedScoreMatching
from metastable.methods.score import axes, curvature, implicit, random_directions, score, sliced
from metastable.proposals import fit_gaussian


def small_conv() -> nn.Module:
    """Strides, padding and two channels on 2 × 4 × 3 events."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(4, 3, 2),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(3, 1),
            nn.Flatten(0),
        )


ENERGIES = {
    "vector": (lambda: MLP(5, hidden=(16, 16), seed=1), (5,)),
    "matrix": (lambda: MLP((2, 3), hidden=(12,), activation="tanh", seed=2), (2, 3)),
    "image": (small_conv, (2, 4, 3)),
}


@pytest.fixture(params=ENERGIES.values(), ids=ENERGIES)
def case(request) -> tuple[nn.Module, Tensor]:
    make, shape = request.param
    x = torch.randn((7, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return make().double(), x


def context_of(energy: nn.Module, x: Tensor, seed: int = 0) -> Context:
    return Context(energy, {"energy": energy}, x, fit_gaussian(x), torch.Generator().manual_seed(seed))


def loss_of(method, energy: nn.Module, x: Tensor, seed: int = 0) -> Tensor:
    from metastable.methods.base import Nothing

    return method.loss(context_of(energy, x, seed), Nothing(), "energy", x, None)[0]


def full_hessian(energy: nn.Module, row: Tensor) -> Tensor:
    d = row.numel()
    return torch.autograd.functional.hessian(lambda r: energy(r[None])[0], row).reshape(d, d)  # pyright: ignore


def test_exact_trace_is_that_of_the_full_hessian(case):
    energy, x = case
    c = curvature(energy, x, axes(x))
    bend = c.bend.view(-1, len(x)).mean(0)
    hessians = torch.stack([full_hessian(energy, row) for row in x])
    truth = hessians.diagonal(dim1=1, dim2=2).sum(1)
    assert truth.abs().min() > 1e-4
    torch.testing.assert_close(bend, truth, rtol=1e-9, atol=1e-12)
    divided = bend / x[0].numel()  # the mutant that averages over dimensions
    assert ((divided - truth).abs() > 0.4 * truth.abs()).all()


def test_objective_is_theorem_2_1(case):
    energy, x = case
    truth = torch.stack(
        [
            0.5 * torch.autograd.functional.jacobian(lambda r: energy(r[None])[0], row).square().sum()  # pyright: ignore
            - full_hessian(energy, row).trace()
            for row in x
        ]
    ).mean()
    torch.testing.assert_close(loss_of(ScoreMatching(), energy, x), truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
def test_hutchinson_and_slices_are_unbiased(case, probes):
    energy, x = case
    exact = loss_of(ScoreMatching(), energy, x).detach()
    directions = random_directions(x, 20_000, probes, torch.Generator().manual_seed(3))
    c = curvature(energy, x, directions)
    for objective in (implicit, sliced):
        value, error = mean_and_error(objective(c).detach().view(-1, len(x)).mean(1))
        assert_within(value, exact, error)
        without_half = objective(c).detach() + 0.5 * row_dot(c.grad, c.grad).detach()  # ‖g‖² for ½‖g‖²
        value, error = mean_and_error(without_half.view(-1, len(x)).mean(1))
        assert z_scores(value, exact, error) > z_limit()


def test_directions_have_unit_covariance():
    rows = torch.zeros(1, 3, dtype=torch.float64)
    torch.testing.assert_close(torch.einsum("nbi,nbj->ij", axes(rows), axes(rows)) / 3, torch.eye(3).double())
    for probes in ("rademacher", "gaussian"):
        v = random_directions(rows, 100_000, probes, torch.Generator().manual_seed(0))[:, 0]
        value, error = mean_and_error(v[:, :, None] * v[:, None])
        assert_within(value, torch.eye(3), error)
    assert not torch.equal(v[0], v[1])


def test_variance_reduced_slices_are_hutchinson(case):
    energy, x = case
    hutchinson = ScoreMatching(trace="hutchinson", projections=3)
    reduced = SlicedScoreMatching(projections=3, variance_reduced=True)
    assert torch.equal(loss_of(hutchinson, energy, x, 5), loss_of(reduced, energy, x, 5))
    plain = SlicedScoreMatching(projections=3)
    assert not torch.isclose(loss_of(plain, energy, x, 5), loss_of(reduced, energy, x, 5))


METHODS = {
    "exact": ScoreMatching(),
    "in parts": ScoreMatching(chunk=4),
    "hutchinson": ScoreMatching(trace="hutchinson", projections=2),
    "sliced": SlicedScoreMatching(),
    "denoising": DenoisingScoreMatching(sigma=0.5),
    "denoising, weighted": DenoisingScoreMatching(sigma=0.5, weighted=True),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_parameter_gradient_is_the_finite_difference(method, case):
    energy, x = case
    parameters = list(energy.parameters())
    rng = torch.Generator().manual_seed(4)
    step = [torch.randn(p.shape, generator=rng, dtype=p.dtype) for p in parameters]
    grads = torch.autograd.grad(
        loss_of(method, energy, x), parameters, allow_unused=True, materialize_grads=True
    )
    along = sum(float((g * s).sum()) for g, s in zip(grads, step, strict=True))

    def moved(by: float) -> float:
        with torch.no_grad():
            for p, s in zip(parameters, step, strict=True):
                p += by * s
        value = loss_of(method, energy, x).detach()
        with torch.no_grad():
            for p, s in zip(parameters, step, strict=True):
                p -= by * s
        return float(value)

    h = 1e-4
    difference = (8 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12 * h)
    assert abs(along) > 1e-3
    assert along == pytest.approx(difference, rel=1e-6, abs=1e-9)


def test_parts_add_up_to_the_whole(case):
    energy, x = case
    whole, parts = (loss_of(ScoreMatching(chunk=n), energy, x) for n in (10_000, 3))
    torch.testing.assert_close(whole, parts, rtol=1e-12, atol=1e-12)
    each = [
        torch.autograd.grad(loss, list(energy.parameters()), allow_unused=True, materialize_grads=True)
        for loss in (whole, parts)
    ]
    for a, b in zip(*each, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class Target:
    """A lopsided density on the line, with its quadrature."""

    def __init__(self) -> None:
        means = torch.tensor([[-1.0], [1.5]], dtype=torch.float64)
        self.energy = GaussianMixture(
            means, torch.tensor([0.6, 1.0]).double(), torch.tensor([0.3, 0.7]).log().double()
        )
        self.grid = quadrature(self.energy, [(-9.0, 12.0, 2001)])
        self.p = torch.softmax(self.grid.log_mass, 0)

    def mean(self, values: Tensor) -> float:
        return float(self.p @ values.detach().double())


@pytest.mark.parametrize("objective", [implicit, sliced], ids=["implicit", "sliced"])
def test_objective_is_the_fisher_divergence_up_to_a_constant(objective):
    """(2.6) against Theorem 2.1 and (2.9): the difference between two models is the same."""
    target = Target()
    x = target.grid.points
    data_score = -score(target.energy, x)[2]
    models = [MLP(1, hidden=(8,), seed=s).double() for s in (0, 1)]
    fisher, ours, doubled = [], [], []
    for model in models:
        c = curvature(model, x, axes(x))
        miss = data_score + c.grad
        fisher.append(target.mean(0.5 * row_dot(miss, miss)))
        ours.append(target.mean(objective(c)))
        doubled.append(target.mean(objective(c) + 0.5 * row_dot(c.grad, c.grad)))
    assert abs(fisher[0] - fisher[1]) > 1e-3
    assert ours[0] - ours[1] == pytest.approx(fisher[0] - fisher[1], rel=1e-9)
    assert doubled[0] - doubled[1] != pytest.approx(fisher[0] - fisher[1], rel=1e-2)


def test_denoising_is_the_fisher_divergence_of_the_smoothed_data():
    """(2.7), first line against second, by quadrature over x and the noise."""
    target, sigma = Target(), 0.7
    rows = target.grid.points[::4]
    p = torch.softmax(target.grid.log_mass[::4], 0)
    z = torch.linspace(-8, 8, 201, dtype=torch.float64)
    q = torch.softmax(-0.5 * z.square(), 0)
    x, noise = rows.repeat_interleave(len(z), 0), z.repeat(len(rows))[:, None]
    weight = (p[:, None] * q).flatten()
    smoothed = GaussianMixture(
        target.energy.means.detach(),
        (target.energy.scales.detach().square() + sigma**2).sqrt(),
        torch.tensor([0.3, 0.7]).double().log(),
    )
    wide = quadrature(smoothed, [(-12.0, 15.0, 2001)])

    from metastable.methods.score import denoising

    ours, fisher, unsmoothed = [], [], []
    for seed in (0, 1):
        model = MLP(1, hidden=(8,), seed=seed).double()
        ours.append(float(weight @ denoising(model, x, noise, sigma)[0].detach()))
        for energy, grid, values in ((smoothed, wide, fisher), (target.energy, target.grid, unsmoothed)):
            miss = score(model, grid.points)[2] - score(energy, grid.points)[2]
            mass = torch.softmax(grid.log_mass, 0)
            values.append(float(mass @ (0.5 * row_dot(miss, miss)).detach()))
    assert ours[0] - ours[1] == pytest.approx(fisher[0] - fisher[1], rel=1e-6)
    assert ours[0] - ours[1] != pytest.approx(unsmoothed[0] - unsmoothed[1], rel=1e-2)
