"""Conditional NCE: (3.1)–(3.2), its optimum on a Gaussian, and what the diagnosis says of its noise."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import assert_within, each, mean_and_error, minimise, z_limit
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import metastable as ms
from metastable.core.errors import ConfigError, InputError
from metastable.energies import MLP
from metastable.evaluation.diagnosis import diagnose
from metastable.methods.base import Context, Nothing
from metastable.methods.conditional import ConditionalNCE, GaussianSteps, default_sigma, pair_logit
from metastable.proposals import Gaussian

over = pytest.mark.parametrize
KAPPA = 3
MEAN = torch.tensor([0.5, -1.0], dtype=torch.float64)
COVARIANCE = torch.tensor([[1.0, 0.5], [0.5, 2.0]], dtype=torch.float64)


class Quadratic(nn.Module):
    """½ xᵀPx − b·x in two dimensions, P symmetric: linear in its five parameters, so that the loss is convex."""

    def __init__(self):
        super().__init__()
        self.parameters_ = nn.Parameter(torch.tensor([0.7, 0.0, 0.7, 0.0, 0.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        u, v = x[:, 0], x[:, 1]
        return torch.stack([0.5 * u * u, u * v, 0.5 * v * v, -u, -v], 1) @ self.parameters_


def truth() -> Tensor:
    P = torch.linalg.inv(COVARIANCE)
    return torch.stack([P[0, 0], P[0, 1], P[1, 1], *(P @ MEAN)])


class Shrinking(nn.Module):
    """y = x/2 + noise: not symmetric, so that its densities stay in the ratio."""

    symmetric = False

    def sample(self, x: Tensor, rng: torch.Generator) -> Tensor:
        return 0.5 * x + torch.randn(x.shape, generator=rng, dtype=x.dtype)

    def log_prob(self, y: Tensor, x: Tensor) -> Tensor:
        return -0.5 * (y - 0.5 * x).square().sum(1) - math.log(2 * math.pi)


class Claims(Shrinking):
    """A mutant: it says that it is symmetric, and its densities are left out."""

    symmetric = True


def context_of(energy: nn.Module, noise: nn.Module, x: Tensor, seed: int = 0) -> Context:
    players, rng = {"energy": energy, "noise": noise}, torch.Generator().manual_seed(seed)
    return Context(energy, players, x, Gaussian(torch.zeros(2)), rng)


def estimates(noise: nn.Module, groups: int = 40, size: int = 2000) -> Tensor:
    """The five parameters on independent data sets, where the method's loss on fixed pairs is least."""
    method, found = ConditionalNCE(negatives_per_datum=KAPPA), []
    factor = torch.linalg.cholesky(COVARIANCE)
    for g in range(groups):
        rng = torch.Generator().manual_seed(g)
        x = MEAN + torch.randn((size, 2), generator=rng, dtype=torch.float64) @ factor.T
        energy = Quadratic()
        context = context_of(energy, noise, x, 1000 + g)
        negatives, state, _ = method.negatives(context, Nothing(), x)
        minimise(method, context, state, negatives, 30)
        found.append(energy.parameters_.detach())
    return torch.stack(found)


def test_the_optimum_is_the_truth_with_gaussian_steps():
    mean, error = mean_and_error(estimates(GaussianSteps(1.2).double()))
    assert float(error.max()) < 0.02
    assert_within(mean, truth(), error)


def test_the_optimum_is_the_truth_with_noise_that_is_not_symmetric():
    mean, error = mean_and_error(estimates(Shrinking()))
    assert_within(mean, truth(), error)


def test_leaving_out_the_noise_ratio_misses_the_truth():
    mean, error = mean_and_error(estimates(Claims()))
    assert float(((mean - truth()).abs() / error).max()) > 3 * z_limit(5)


# ---- laws


def test_loss_is_the_posterior_of_the_thesis():
    """(3.2) with the densities written out, v = 1: 1/(1 + p(y)p_n(x|y)/(p(x)p_n(y|x)))."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randn((5, 2), generator=rng, dtype=torch.float64)
    energy, noise = MLP(2, hidden=(8,)).double(), Shrinking()
    method, context = ConditionalNCE(negatives_per_datum=KAPPA), context_of(energy, noise, x)
    negatives, state, _ = method.negatives(context, Nothing(), x)
    loss, metrics = method.loss(context, state, "energy", x, negatives)
    total, weights = 0.0, []
    for i in range(5):
        for y in negatives.x[i * KAPPA : (i + 1) * KAPPA]:
            point, other = x[i : i + 1], y[None]
            p = [torch.exp(-energy(z)) for z in (point, other)]
            there, back = noise.log_prob(other, point).exp(), noise.log_prob(point, other).exp()
            posterior = 1 / (1 + p[1] * back / (p[0] * there))
            total = total - posterior.log() / (5 * KAPPA)
            weights.append(1 - posterior.item())
    assert loss.item() == pytest.approx(total.item(), abs=1e-12)
    assert metrics["pair_weight"].item() == pytest.approx(sum(weights) / len(weights), abs=1e-12)


def test_symmetric_noise_cancels():
    x, y = (torch.randn((4, 3), generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    steps = GaussianSteps(0.7)
    assert torch.allclose(steps.log_prob(y, x), steps.log_prob(x, y))
    exact = MultivariateNormal(torch.zeros(3), 0.49 * torch.eye(3)).log_prob(y - x)
    torch.testing.assert_close(steps.log_prob(y, x), exact)


def test_a_constant_in_the_energy_changes_nothing():
    E_x, E_y = torch.randn(4, 1, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    torch.testing.assert_close(pair_logit(E_x + 9, E_y + 9), pair_logit(E_x, E_y))


def test_default_noise_follows_the_data():
    x = 3 * torch.randn((4000, 16), generator=torch.Generator().manual_seed(0))
    assert default_sigma(x) == pytest.approx(3 / 4, rel=0.02)
    assert default_sigma(x.view(-1, 1, 4, 4)) == default_sigma(x)
    assert default_sigma(torch.ones(5, 2)) > 0


def test_sigma_is_kept_with_the_run(tmp_path):
    x = 5 * torch.randn((300, 2), generator=torch.Generator().manual_seed(0))
    run = ms.fit(None, x, "conditional-nce", steps=3, out=tmp_path / "run", evaluate=False, units="none")
    again = ms.load_run(tmp_path / "run")
    assert again.players["noise"].sigma == run.players["noise"].sigma
    assert float(again.players["noise"].sigma) > 2


# ---- diagnosis


def log_of(sigma: float | None) -> list[dict]:
    x = torch.randn((500, 2), generator=torch.Generator().manual_seed(0))
    method = ConditionalNCE(sigma=sigma, negatives_per_datum=4)
    return ms.fit({"name": "mlp", "hidden": [16]}, x, method, steps=30, log_every=1, evaluate=False).history


@each(
    "sigma, finding",
    [
        (1e-3, "conditional-noise-too-small"),
        (300.0, "conditional-noise-too-large"),
        (None, None),
        (0.3, None),
        (3.0, None),
    ],
)
def test_noise_that_leaves_no_gradient_is_named(sigma, finding):
    found = {f.name: f for f in diagnose(log_of(sigma)) if f.name.startswith("conditional")}
    assert list(found) == ([] if finding is None else [finding])
    if finding is not None:
        assert found[finding].severity == "problem"
        assert "sigma" in found[finding].advice
        assert set(found[finding].evidence) == {"pair_logit", "pair_weight", "saturated"}


@each(
    "logit, weight, expected",
    [
        (0.051, 0.5, None),
        (0.049, 0.5, ("conditional-noise-too-small", "warning")),
        (0.009, 0.5, ("conditional-noise-too-small", "problem")),
        (40.0, 0.011, None),
        (40.0, 0.009, ("conditional-noise-too-large", "warning")),
        (400.0, 0.0009, ("conditional-noise-too-large", "problem")),
    ],
)
def test_edges_of_the_findings(logit, weight, expected):
    rows = [{"step": k, "pair_logit": logit, "pair_weight": weight} for k in range(40)]
    rows[:15] = [
        {"step": k, "pair_logit": 0.0, "pair_weight": 0.0} for k in range(15)
    ]  # the start is forgiven
    found = [(f.name, f.severity) for f in diagnose(rows) if f.name.startswith("conditional")]
    assert found == ([] if expected is None else [expected])


# ---- bad input


class Plain:
    """Samples and scores, but is no module."""

    sample = Shrinking.sample
    log_prob = Shrinking.log_prob


@each(
    "make, field",
    [
        (lambda: ConditionalNCE(negatives_per_datum=0), "conditional-nce.negatives_per_datum"),
        (lambda: ConditionalNCE(sigma=0.0), "conditional-nce.sigma"),
        (lambda: ConditionalNCE(sigma=math.inf), "conditional-nce.sigma"),
        (lambda: ConditionalNCE(noise="laplace"), "conditional-nce.noise"),
        (lambda: ConditionalNCE(noise=Plain()), "conditional-nce.noise"),
        (lambda: ConditionalNCE(noise=nn.Linear(1, 1)), "conditional-nce.noise"),
        (lambda: ConditionalNCE(noise=Shrinking(), sigma=1.0), "conditional-nce.sigma"),
    ],
)
def test_bad_settings_name_field_and_value(make, field):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.path == field


class OneWay(Shrinking):
    """Only ever goes up: no y leads back to its x."""

    def sample(self, x: Tensor, rng: torch.Generator) -> Tensor:
        return x + torch.rand(x.shape, generator=rng) + 0.01

    def log_prob(self, y: Tensor, x: Tensor) -> Tensor:
        return torch.where((y > x).all(1), 0.0, -math.inf)


class Fewer(Shrinking):
    def sample(self, x: Tensor, rng: torch.Generator) -> Tensor:
        return x[:1]


@over(("noise", "words"), [(OneWay(), "lead back to the datum"), (Fewer(), "one y for each x")])
def test_noise_that_does_not_fit_is_refused(noise, words):
    x = torch.randn((50, 2), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match=words):
        ms.fit(None, x, ConditionalNCE(noise=noise), steps=1, evaluate=False)
