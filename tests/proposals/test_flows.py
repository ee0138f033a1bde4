"""Flows, mixtures and generators: one density, whichever way it is asked for."""

from __future__ import annotations

import copy
import importlib
import math

import pytest
import torch
from conftest import assert_within, each, mean_and_error, quadrature, z_limit, z_scores
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributions import Distribution

from metastable.core import errors
from metastable.core.batch import Batch
from metastable.core.errors import ConfigError, InputError, MissingDependencyError
from metastable.core.types import Proposal
from metastable.proposals import Flow, Gaussian, Generator, Mixture, Uniform, flows, proposal_for
from metastable.proposals.encoders import Standardise

F64 = torch.float64
over = pytest.mark.parametrize


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bent(module: nn.Module, size: float = 0.25) -> nn.Module:
    """Weights far from where they start, so that a density is no Gaussian."""
    with torch.no_grad():
        for p in module.parameters():
            p += size * torch.randn(p.shape, generator=rng(1), dtype=p.dtype)
    return module.double()


def rows(*event: int) -> Tensor:
    return 2 * torch.randn((50, *event), generator=rng(), dtype=F64) + 1


def mixture() -> Mixture:
    return Mixture(
        [bent(Flow(2, data=rows(2), layers=2, hidden=(8,))), Gaussian(torch.ones(2, dtype=F64), 0.5)],
        (1.0, 3.0),
    )


def full_gaussian() -> Gaussian:
    return Gaussian(torch.ones(2, dtype=F64), torch.tensor([[1.5, 0.0], [-0.7, 0.4]], dtype=F64))


MEMBERS = {
    "spline, 1-D": lambda: bent(Flow(1, data=rows(1), layers=2)),
    "spline, 2-D": lambda: bent(Flow(2, data=rows(2), layers=3, hidden=(16,)), 0.15),
    "spline, autoregressive": lambda: bent(Flow(2, data=rows(2), passes=None, layers=2, hidden=(16,))),
    "affine, 2-D": lambda: bent(Flow(2, data=rows(2), kind="affine", layers=2, hidden=(16,))),
    "mixture": mixture,
}
IMAGES = {
    "spline, image": lambda: bent(Flow((1, 2, 3), data=rows(1, 2, 3), layers=2, hidden=(16,))),
    "generator": lambda: bent(Generator((1, 2, 2), data=rows(1, 2, 2), hidden=(8,), draws=32), 0.1),
}
EVERY = MEMBERS | IMAGES
over_exact = over("make", MEMBERS.values(), ids=MEMBERS)
over_all = over("make", EVERY.values(), ids=EVERY)


@over_exact
def test_density_integrates_to_one(make):
    q = make()
    reach, points = (30.0, 20_001) if q.event_shape == (1,) else (24.0, 351)
    with torch.no_grad():
        grid = quadrature(lambda x: -q.log_prob(x), [(-reach, reach, points)] * q.event_shape[0])
    assert float(grid.log_partition) == pytest.approx(0.0, abs=2e-3)


@over("make", [*MEMBERS.values(), IMAGES["spline, image"]], ids=[*MEMBERS, "spline, image"])
def test_density_and_draws_belong_together(make):
    """The mean of φ(x)/q(x) over draws of q is 1 for any normalised φ inside q: here a box."""
    q = make()
    with torch.no_grad():
        x = q.sample(20_000, rng(2)).flatten(1)
        low, high = (x.quantile(p, 0) for p in (0.3, 0.7))
        inside = ((x > low) & (x < high)).all(1)
        log_prob = q.log_prob(x.view(-1, *q.event_shape))
    ratio = inside / (high - low).prod() * torch.exp(-log_prob)
    mean, error = mean_and_error(ratio)
    assert error < 0.2
    assert_within(mean, 1.0, error)
    wrong, error = mean_and_error(ratio * math.exp(0.5))  # a log-density off by half a nat is noticed
    assert error > 0.1 or z_scores(wrong, 1.0, error) > z_limit()


@over_exact
def test_moments_of_draws_are_those_of_the_density(make):
    q = make()
    reach, points = (30.0, 20_001) if q.event_shape == (1,) else (24.0, 351)
    with torch.no_grad():
        grid = quadrature(lambda x: -q.log_prob(x), [(-reach, reach, points)] * q.event_shape[0])
        x = q.sample(20_000, rng(3))
    value, error = mean_and_error(x.tanh())
    assert_within(value, grid.mean(torch.tanh), error)


@over(
    "make",
    [*EVERY.values(), lambda: Gaussian(torch.ones(2, dtype=F64), 0.5), full_gaussian],
    ids=[*EVERY, "gaussian", "full gaussian"],
)
def test_draws_with_their_density_are_the_same_draws(make):
    q = make()
    if hasattr(q, "sample_and_log_prob"):
        x, log_prob = q.sample_and_log_prob(50, rng(3))
        assert torch.equal(x, q.sample(50, rng(3)))
        torch.testing.assert_close(log_prob, q.log_prob(x).detach(), rtol=0, atol=1e-8)
    else:
        assert isinstance(q, (Mixture, Generator))


@over_all
def test_draws_come_from_the_generator_alone(make):
    before = torch.get_rng_state()
    q = make()
    assert isinstance(q, Proposal)
    assert q.sample(5, rng(3)).shape == (5, *q.event_shape)
    assert torch.equal(q.sample(5, rng(3)), q.sample(5, rng(3)))
    assert torch.equal(q.sample(5, rng(3)), q.rsample(5, rng(3)))
    assert torch.equal(before, torch.get_rng_state())


@over_all
def test_state_survives_a_file_bit_by_bit(make):
    q = make()
    x = q.sample(5, rng())
    other = copy.deepcopy(q)
    with torch.no_grad():
        for value in (*other.parameters(), *(b for b in other.buffers() if b.is_floating_point())):
            value.mul_(1.5).add_(0.1)
    assert not torch.equal(other.log_prob(x), q.log_prob(x))
    other.load_state_dict(load(save(q.state_dict())))
    assert torch.equal(other.log_prob(x), q.log_prob(x))
    assert torch.equal(other.sample(5, rng(1)), q.sample(5, rng(1)))


@over_all
def test_gradients_flow_through_draws(make):
    """d/dφ of a mean over draws, against a finite difference with the same random numbers."""
    q = make()
    parameters = [p for p in q.parameters() if p.requires_grad]
    direction = [torch.randn(p.shape, generator=rng(4), dtype=F64) for p in parameters]

    def mean() -> Tensor:
        return q.rsample(64, rng(5)).square().mean()

    gradient = torch.autograd.grad(mean(), parameters, allow_unused=True)
    slope = sum(float((g * d).sum()) for g, d in zip(gradient, direction, strict=True) if g is not None)

    def moved(by: float) -> float:
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p += by * d
            value = float(mean())
            for p, d in zip(parameters, direction, strict=True):
                p -= by * d
        return value

    assert slope != 0
    assert (moved(1e-6) - moved(-1e-6)) / 2e-6 == pytest.approx(slope, rel=1e-4, abs=1e-7)


def test_making_a_flow_leaves_validation_on(monkeypatch):
    """Importing zuko switches off validation of torch.distributions for the whole process; a flow must not."""

    def importing(module: str, *rest: str):
        distributions = importlib.import_module("zuko.distributions")
        importlib.reload(distributions)  # what a first import does
        assert not Distribution._validate_args
        return errors.need(module, *rest)

    monkeypatch.setattr(flows, "need", importing)
    monkeypatch.setattr(Distribution, "_validate_args", True)  # compiled code elsewhere switches it off, too
    Flow(2)
    assert Distribution._validate_args
    with pytest.raises(ValueError, match="invalid values"):
        torch.distributions.Normal(0.0, -1.0)


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setattr(flows, "need", lambda module, *rest: errors.need("no_such_package", *rest))
    with pytest.raises(MissingDependencyError, match=r"metastable\[flows\]"):
        Flow(2)


def test_a_flow_learns_a_density_by_likelihood():
    """Mean log-likelihood ratio to the truth on fresh rows: a Gaussian of the same moments is 0.4 nats worse."""
    truth = Mixture([Gaussian(torch.tensor([-3.0, 0.0])), Gaussian(torch.tensor([3.0, 0.0]))], (1.0, 3.0))
    x, fresh = truth.sample(3000, rng(6)), truth.sample(5000, rng(7))
    flow = Flow(2, layers=2, hidden=(32,))
    before = [p.clone() for p in flow.parameters()]
    flow.fit(x, 120, learning_rate=5e-3)
    assert all(p.requires_grad and p.grad is None for p in flow.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, flow.parameters(), strict=True))
    kl, error = mean_and_error(truth.log_prob(fresh) - flow.log_prob(fresh).detach())
    assert kl < 0.06 + z_limit() * error
    assert kl > -z_limit() * error
    gaussian, _ = mean_and_error(
        truth.log_prob(fresh) - Gaussian(x.mean(0), torch.linalg.cholesky(x.T.cov())).log_prob(fresh)
    )
    assert gaussian > 0.3


def test_data_standardise_a_flow():
    x = torch.tensor([1000.0, -5.0]) + torch.tensor([20.0, 0.1]) * torch.randn((500, 2), generator=rng())
    flow = Flow(2, data=x)
    draws = flow.sample(4000, rng(1))
    mean, error = mean_and_error(draws)
    assert_within(mean, x.mean(0).double(), error)
    same = torch.distributions.Independent(torch.distributions.Normal(x.mean(0), x.std(0)), 1)
    assert torch.allclose(flow.log_prob(x), same.log_prob(x), atol=1e-3)


def test_a_named_flow_is_a_proposal():
    x = rows(3)
    q = proposal_for("flow", x, "noise", seed=3)
    assert isinstance(q, Flow)
    assert q.event_shape == (3,)
    assert q.mean.dtype == F64
    assert torch.equal(q.log_prob(x), proposal_for("flow", x, "noise", seed=3).log_prob(x))


@each(
    "make, words",
    [
        (lambda: Flow(2, kind="splines"), r"flow.kind: .*did you mean 'spline'"),
        (lambda: Flow(2, layers=0), r"flow.layers: .*at least 1, got 0"),
        (lambda: Flow(2, data=torch.zeros(5, 3)), r"data: must have shape"),
        (lambda: Flow(2).fit(torch.zeros(5, 2), 0), r"steps: .*at least 1, got 0"),
        (lambda: Generator(2, draws=1), r"generator.draws: .*at least 2, got 1"),
        (lambda: Mixture([]), r"mixture.components: .*at least 1, got 0"),
        (lambda: Mixture([nn.Linear(1, 1)]), r"mixture.components: must be modules with sample"),
        (lambda: Mixture([Gaussian(torch.zeros(1))], (0.0,)), r"mixture.weights: must be 1 positive"),
        (lambda: Mixture([Gaussian(torch.zeros(1))], (1.0, 2.0)), r"mixture.weights: must be 1 positive"),
        (lambda: Mixture([Gaussian(torch.zeros(1)), Gaussian(torch.zeros(2))]), r"different shapes"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises((ConfigError, InputError), match=words):
        make()


# ---- mixtures


def test_a_mixture_draws_its_components_in_proportion():
    q = Mixture(
        [Uniform(torch.zeros(1), torch.ones(1)), Uniform(2 * torch.ones(1), 3 * torch.ones(1))], (0.2, 0.8)
    )
    x = q.sample(20_000, rng())
    share, error = mean_and_error((x[:, 0] > 1.5).double())
    assert_within(share, 0.8, error)
    half = x[:10_000, 0] > 1.5  # rows are independent: no block of one component
    assert_within(half.double().mean(), 0.8, error * math.sqrt(2))
    assert q.log_prob(torch.tensor([[0.5], [2.5], [1.5]])).tolist() == pytest.approx(
        [math.log(0.2), math.log(0.8), -math.inf]
    )


# ---- generators


def linear_generator(draws: int) -> tuple[Generator, torch.distributions.MultivariateNormal]:
    """μ(z) = Az + b and a constant σ, so that the density is N(b, AAᵀ + σ²I) exactly."""
    q = Generator(2, latent=2, hidden=(), draws=draws, spread=0.7).double()
    A, b = torch.tensor([[1.0, 0.3], [0.0, 0.8]], dtype=F64), torch.tensor([0.5, -1.0], dtype=F64)
    with torch.no_grad():
        q.network[0].weight.zero_()
        q.network[0].weight[:2], q.network[0].bias[:2] = A, b
        sigma = q.conditional(torch.zeros(1, 2, dtype=F64))[1][0, 0]
    return q, torch.distributions.MultivariateNormal(b, A @ A.T + sigma**2 * torch.eye(2, dtype=F64))


def test_a_generators_density_is_unbiased_and_its_log_is_not():
    q, exact = linear_generator(16)
    x = exact.mean + torch.linspace(-1.5, 1.5, 16, dtype=F64).view(8, 2)
    source, estimates = rng(8), []
    with torch.no_grad():
        for _ in range(4000):
            q.redraw(source)
            estimates.append(q.log_prob(x))
    log_prob = torch.stack(estimates)
    density, error = mean_and_error(log_prob.exp())
    assert_within(density, exact.log_prob(x).exp(), error)
    bias, error = mean_and_error(log_prob - exact.log_prob(x))
    assert bool((bias < -z_limit(8) * error).all())  # Jensen: too low everywhere, and said to be


def test_a_generator_says_how_biased_it_is():
    """The delta method against the bias over many redraws, where M is large enough for it."""
    q, exact = linear_generator(200)
    x = exact.mean + torch.linspace(-1.0, 1.0, 8, dtype=F64).view(4, 2)
    source, errors_, said = rng(9), [], []
    with torch.no_grad():
        for _ in range(2000):
            q.redraw(source)
            errors_.append(q.log_prob(x) - exact.log_prob(x))
            said.append(q.density_error(x))
    bias, error = mean_and_error(torch.stack(errors_))
    told = torch.stack(said).mean(0)
    assert bool((told < 0).all())
    assert bool(((told - bias).abs() < 0.25 * bias.abs() + z_limit(4) * error).all())


def test_a_generators_draws_follow_its_exact_density():
    q, exact = linear_generator(16)
    x = q.sample(50_000, rng(10))
    mean, error = mean_and_error(x)
    assert_within(mean, exact.mean, error)
    centred = x - exact.mean
    second, error = mean_and_error(centred[:, :, None] * centred[:, None, :])
    assert_within(second, exact.covariance_matrix, error)


def test_a_mixture_passes_on_that_a_density_is_estimated():
    q = Mixture([Gaussian(torch.zeros(2)), Generator(2, draws=32)])
    plain = Mixture([Gaussian(torch.zeros(2))])
    assert (q.biased, plain.biased, q.draws) == (True, False, 32)
    x = torch.zeros(3, 2)
    part = q.components[1].density_error(x)
    assert bool((q.density_error(x) > part).all())
    assert bool((q.density_error(x) < 0).all())
    before = q.log_prob(x)
    q.redraw(rng(11))
    assert not torch.equal(before, q.log_prob(x))


def test_fitting_standardises_contexts_as_well():
    """y ~ N(c', 0.3²) with c' in [−1, 1] for contexts c = 600 + 200 c'."""
    rng = torch.Generator().manual_seed(1)
    share = 2 * torch.rand((1500, 1), generator=rng) - 1
    data = Batch(share + 0.3 * torch.randn((1500, 1), generator=rng), 600 + 200 * share)
    settings = {"layers": 1, "hidden": (16,), "bins": 4}
    late = Flow(1, 1, **settings).fit(data, 150)
    early = Flow(1, 1, data=data, **settings).fit(data, 150)
    assert torch.equal(late.log_prob(data.x, data.given), early.log_prob(data.x, data.given))
    least = -math.log(0.3 * math.sqrt(2 * math.pi * math.e))
    assert float(late.log_prob(data.x, data.given).detach().mean()) > least - 0.15
    kept = Standardise((1,), torch.tensor([[0.0], [2.0]]))
    Flow(1, 1, encoder=kept, **settings).fit(data, 2)
    assert kept.mean.item() == 1  # an encoder of one's own is left alone


def test_frozen_parameters_stay_frozen_in_fit():
    given = torch.randn(100, 1, generator=rng())
    data = Batch(given + 0.1 * torch.randn(100, 1, generator=rng(1)), given)
    flow = Flow(1, 1, encoder=nn.Linear(1, 3).requires_grad_(False), layers=1, hidden=(8,))
    before = {name: p.clone() for name, p in flow.named_parameters()}
    flow.fit(data, 3)
    for name, p in flow.named_parameters():
        frozen = name.startswith("encoder")
        assert p.requires_grad != frozen
        assert not frozen or torch.equal(p, before[name])
    assert any(not torch.equal(p, before[name]) for name, p in flow.named_parameters())
    with pytest.raises(InputError, match="fit: every parameter of this Flow is frozen"):
        flow.requires_grad_(False).fit(data, 3)
