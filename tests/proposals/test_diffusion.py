"""Diffusions against densities whose denoisers are known in closed form, and wrong ones that must not pass."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import assert_within, mean_and_error, z_limit
from torch import Tensor, nn

from metastable.core.batch import Batch
from metastable.core.errors import ConfigError, InputError
from metastable.core.types import bind
from metastable.evaluation.conditional import log_partition_given
from metastable.proposals import (
    Diffusion,
    DiffusionEnergy,
    Gaussian,
    ResidualField,
    VectorField,
    diffusion,
    diffusion_energy,
)
from metastable.proposals.diffusion import EDMField, coefficients, noise_levels
from metastable.proposals.diffusion_energy import ResidualPotential
from metastable.proposals.fields import PlainField

SIGMA_DATA = 0.5
ENOUGH = 0.01
"""Mean absolute error of a log-density through the ODE."""


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Mixture:
    """Σ_k w_k N(μ_k + shift·given, s_k² I) with noise of level σ on it: its log-density, F and φ in closed form.

    D(y) = y + σ²∇log p(y; σ), and F, φ are what the preconditioning leaves of D and of log p.
    """

    def __init__(self, means: Tensor, scales: Tensor, weights: Tensor, shift: float = 0.0):
        self.means, self.scales, self.weights, self.shift = means, scales, weights, shift

    def log_prob(self, y: Tensor, sigma: Tensor | float, given: Tensor | None = None) -> Tensor:
        spread = self.scales.square() + torch.as_tensor(sigma, dtype=y.dtype)[..., None].square()
        centred = y[..., None, :] - self.means
        if given is not None:
            centred = centred - self.shift * given[..., None, :]
        log_normal = -0.5 * (centred.square().sum(-1) / spread + y.shape[-1] * (2 * math.pi * spread).log())
        return (self.weights.log() + log_normal).logsumexp(-1)

    def F(self, z: Tensor, given: Tensor | None, noise: Tensor) -> Tensor:
        sigma = (4 * noise).exp()[..., None]
        c = coefficients(sigma, SIGMA_DATA)
        y = z / c.inside
        score = torch.func.grad(lambda y: self.log_prob(y, sigma[..., 0], given).sum())(y)
        return (y + sigma.square() * score - c.skip * y) / c.out

    def phi(self, z: Tensor, given: Tensor | None, noise: Tensor) -> Tensor:
        sigma = (4 * noise).exp()
        c = coefficients(sigma, SIGMA_DATA)
        y = z / c.inside[..., None]
        rest = self.log_prob(y, sigma, given) - (c.skip - 1) / (2 * sigma.square()) * y.square().sum(-1)
        return rest * sigma.square() * c.inside / c.out

    def sample(self, n: int, g: torch.Generator) -> Tensor:
        k = torch.multinomial(self.weights, n, True, generator=g)
        noise = torch.randn((n, self.means.shape[1]), generator=g, dtype=torch.float64)
        return self.means[k] + self.scales[k, None] * noise


def gaussian(d: int, scale: float = 0.4) -> Mixture:
    return Mixture(
        *(torch.full(s, v, dtype=torch.float64) for s, v in (((1, d), 0.0), ((1,), scale), ((1,), 1.0)))
    )


def two_modes(shift: float = 0.0) -> Mixture:
    """Unequal weights, scales and directions, with mean zero: nothing is symmetric."""
    means = torch.tensor([[-0.9, 0.45], [0.6, -0.3]], dtype=torch.float64)
    scales, weights = torch.tensor([[0.15, 0.25], [0.4, 0.6]], dtype=torch.float64)
    return Mixture(means, scales, weights, shift)


LAWS = {"gaussian": gaussian(5), "mixture": two_modes()}


def exact_model(law: Mixture, **settings) -> Diffusion:
    d = law.means.shape[1]
    return Diffusion(d, network=law.F, **{"steps": 128, "scored": 64, **settings}).double()


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_draws_of_the_exact_denoiser_have_the_exact_moments(law):
    x = exact_model(law, steps=48).sample(10_000, rng()).double()
    extra = 0.002**2 * torch.eye(x.shape[1], dtype=torch.float64)
    spread = (law.weights * law.scales.square()).sum() * torch.eye(x.shape[1], dtype=torch.float64)
    second = spread + extra + torch.einsum("k,ki,kj->ij", law.weights, law.means, law.means)
    assert_within(*_swap(mean_and_error(x), torch.zeros(x.shape[1])))
    assert_within(*_swap(mean_and_error(x[:, :, None] * x[:, None]), second))
    if len(law.means) == 2:
        first = ((x @ (law.means[1] - law.means[0])) < 0).double()
        truth = ((law.sample(400_000, rng(1)) @ (law.means[1] - law.means[0])) < 0).double()
        assert_within(first.mean(), truth.mean(), (first.var() / len(x) + truth.var() / len(truth)).sqrt())


def _swap(found: tuple[Tensor, Tensor], truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return found[0], truth, found[1]


def error_of(model: Diffusion, law: Mixture) -> float:
    """Mean absolute error of log_prob at exact draws of the smoothed law."""
    x = law.sample(300, rng(3))
    x = x + model.sigma_min * torch.randn(x.shape, generator=rng(4), dtype=torch.float64)
    with torch.no_grad():
        return float((model.log_prob(x) - law.log_prob(x, model.sigma_min)).abs().mean())


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_the_density_through_the_ode_is_that_of_the_smoothed_law(law):
    model = exact_model(law)
    assert error_of(model, law) < ENOUGH
    x, log_prob = model.sample_and_log_prob(300, rng(5))
    assert float((log_prob - law.log_prob(x, model.sigma_min)).abs().mean()) < ENOUGH
    assert float((log_prob - model.log_prob(x)).abs().max()) < ENOUGH  # there and back


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_part_of_the_way_the_density_is_that_of_more_noise(law):
    model = exact_model(law)
    sigma = float(noise_levels(torch.tensor(0.7)))
    x = law.sample(300, rng(6)) + sigma * torch.randn(
        (300, law.means.shape[1]), generator=rng(7), dtype=torch.float64
    )
    assert float((model.log_prob(x, at=0.7) - law.log_prob(x, sigma)).abs().mean()) < ENOUGH


def test_a_divergence_of_the_wrong_sign_is_seen(monkeypatch):
    right = EDMField.divergence
    monkeypatch.setattr(EDMField, "divergence", lambda *inputs: -right(*inputs))
    assert all(error_of(exact_model(law), law) > 100 * ENOUGH for law in LAWS.values())


def test_a_denoiser_without_c_out_is_seen(monkeypatch):
    law, model = two_modes(), exact_model(two_modes())
    x = law.sample(5, rng())

    def without(sigma, sigma_data):
        return coefficients(sigma, sigma_data)._replace(out=torch.ones_like(sigma))

    truth = [law.F(x, None, torch.tensor(-0.3, dtype=torch.float64)), model.denoise(x, 0.1)]
    monkeypatch.setattr(diffusion, "coefficients", without)
    assert not torch.allclose(model.denoise(x, 0.1), truth[1], atol=0.1)
    assert error_of(exact_model(law), law) > 10 * ENOUGH


def test_the_levels_are_those_of_the_paper():
    """σ_i of EDM's (5) with σ_min = 0.002, σ_max = 80, ρ = 7, N = 18 begins 80, 57.6, 40.8 and ends at 0.002."""
    sigma = noise_levels(torch.linspace(0, 1, 18, dtype=torch.float64))
    torch.testing.assert_close(
        sigma[:3], torch.tensor([80.0, 57.586, 40.786], dtype=torch.float64), rtol=1e-4, atol=0
    )
    assert abs(float(sigma[-1]) - 0.002) < 1e-12


# ---- the loss


class Bent(nn.Module):
    """The exact F, bent by parameters that are zero: the loss must be least there."""

    def __init__(self, law: Mixture, stretch: float = 1.0):
        super().__init__()
        self.law, self.stretch = law, stretch
        self.theta = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, z: Tensor, given: Tensor | None, noise: Tensor) -> Tensor:
        shape = torch.stack([torch.ones_like(z), z, z.tanh() * noise[..., None], z.square()], -1)
        return self.stretch * self.law.F(z, given, noise) + shape @ self.theta


def gradients(stretch: float) -> tuple[Tensor, Tensor]:
    law, g = two_modes(), rng(8)
    bent = Bent(law, stretch)
    model = Diffusion(2, network=bent).double()
    each = []
    for _ in range(150):
        loss = model.loss(law.sample(400, g), rng=g)
        each.append(torch.autograd.grad(loss, bent.theta)[0])
    return mean_and_error(torch.stack(each))


def test_the_loss_is_least_at_the_exact_denoiser():
    mean, error = gradients(1.0)
    assert_within(mean, torch.zeros(4), error)


def test_another_denoiser_is_not_where_the_loss_is_least():
    mean, error = gradients(0.9)
    assert float((mean / error).abs().max()) > z_limit(4)


def test_noise_levels_of_the_loss_are_log_normal():
    seen = []

    def network(z, given, noise):
        seen.append(4 * noise.flatten())
        return torch.zeros_like(z)

    Diffusion(1, network=network, log_sigma=(-0.7, 0.5)).loss(torch.zeros(4000, 1), rng=rng(3))
    white = (seen[-1] + 0.7) / 0.5
    mean, error = mean_and_error(torch.stack([white, white.square()], 1))
    assert_within(mean, torch.tensor([0.0, 1.0]), error)


def test_the_network_has_targets_of_unit_variance():
    """For data of standard deviation σ_data, whatever σ: F = 0 has the loss d, because λ = 1/c_out²."""
    law = gaussian(3, SIGMA_DATA)
    model = Diffusion(3, network=lambda z, given, noise: torch.zeros_like(z)).double()
    g = rng(9)
    losses = torch.stack([model.loss(law.sample(500, g), rng=g) for _ in range(50)])
    mean, error = mean_and_error(losses)
    assert_within(mean, 3.0, error)


# ---- Diffusion-φ


def test_the_relative_likelihood_is_the_log_density_up_to_a_constant():
    law = gaussian(2, 0.5)
    model = DiffusionEnergy(2, potential=law.phi, sigma_rel=0.02).double()
    x = law.sample(200, rng(10)).clamp(-1.0, 1.0)
    r = -model(x)
    smooth = r - law.log_prob(x, 0.02)
    assert float(smooth.max() - smooth.min()) < 1e-9
    plain = r - law.log_prob(x, 0.0)  # within two standard deviations σ_rel costs 2·(0.02/0.5)² a coordinate
    assert float(plain.max() - plain.min()) < 1e-2


def test_a_relative_likelihood_without_the_skip_term_is_seen(monkeypatch):
    law = gaussian(2, 0.5)
    model = DiffusionEnergy(2, potential=law.phi).double()
    x = law.sample(200, rng(10))
    right = coefficients
    monkeypatch.setattr(
        diffusion_energy, "coefficients", lambda s, d: right(s, d)._replace(skip=torch.ones_like(s))
    )
    off = -model(x) - law.log_prob(x, 0.0)
    assert float(off.max() - off.min()) > 1


def test_the_gradient_of_the_energy_is_minus_the_score_that_draws_follow():
    """∇r = (D − y)/σ²: the same network in two roles."""
    model = DiffusionEnergy(3, 2, width=16, layers=4, sigma_rel=0.3).double()
    _shake(model)
    x, given = torch.randn((5, 3), generator=rng(), dtype=torch.float64), torch.randn(5, 2).double()
    x.requires_grad_(True)
    (grad,) = torch.autograd.grad(model(x, given).sum(), x)
    score = (model.denoise(x, 0.3, given) - x) / 0.09
    torch.testing.assert_close(-grad, score, rtol=1e-9, atol=1e-9)


def _shake(module: nn.Module) -> None:
    """Weights that are nowhere zero."""
    g = rng(11)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=g, dtype=p.dtype))


def test_a_conditional_energy_is_bound_and_normalised_as_any_other():
    """−r of the exact φ is normalised by itself, so log Z by importance sampling is 0 for every context."""
    law = two_modes(shift=0.3)
    model = DiffusionEnergy(2, 2, potential=law.phi).double()
    given = torch.tensor([[0.0, 0.0], [1.0, -1.0], [2.0, 0.5]], dtype=torch.float64)
    x = torch.randn((3, 7, 2), generator=rng(), dtype=torch.float64)
    torch.testing.assert_close(bind(model, given)(x.flatten(0, 1)), model(x, given).flatten())
    torch.testing.assert_close(model(x[:, 0], given), model(x, given)[:, 0])
    wide = Gaussian(torch.zeros(2, dtype=torch.float64), 1.2)
    z = log_partition_given(model, wide, given, draws=20_000, rng=rng(12))
    assert_within(z.value, torch.zeros(3), z.std_error)


# ---- fields


class Wavy(VectorField):
    """A field that is no gradient, with the divergence left to automatic differentiation."""

    def velocity(self, x, code, clock):
        return torch.sin(x.roll(1, -1) * clock[..., None]) + x.square()


@pytest.mark.parametrize("inner", ["wavy", "residual", "potential"])
def test_velocity_and_divergence_are_those_of_the_denoiser(inner):
    network: VectorField = Wavy() if inner == "wavy" else ResidualField(3, width=8, layers=4)
    network = ResidualPotential(3, width=8, layers=4) if inner == "potential" else network
    field = EDMField(network.double(), SIGMA_DATA)
    _shake(field)
    y = torch.randn((2, 5, 3), generator=rng(), dtype=torch.float64)
    sigma = torch.tensor([[0.01], [3.0]], dtype=torch.float64)
    clock = field.clock(sigma)
    plain = (y - field.denoise(y, None, clock)) / sigma[..., None]
    torch.testing.assert_close(field.velocity(y, None, clock), plain, rtol=1e-9, atol=1e-9)
    trace = VectorField.divergence(field, y, None, clock)
    torch.testing.assert_close(field.divergence(y, None, clock), trace, rtol=1e-9, atol=1e-9)


def test_the_written_out_gradient_of_a_potential_is_its_gradient():
    network = ResidualPotential(3, (2,), width=8, layers=5).double()
    _shake(network)
    y = torch.randn((4, 6, 3), generator=rng(), dtype=torch.float64, requires_grad=True)
    code = network.encode(torch.randn((4, 2), generator=rng(1), dtype=torch.float64))[:, None]
    clock = network.clock(torch.tensor(0.3, dtype=torch.float64))
    (grad,) = torch.autograd.grad(network.potential(y, code, clock).sum(), y)
    torch.testing.assert_close(network.velocity(y, code, clock), grad)


# ---- the door


def test_where_it_starts_is_what_is_left_of_the_data_in_the_largest_noise():
    model = Diffusion(2, sigma_max=1.2, sigma_data=0.5, width=8, layers=3, steps=2, scored=2).double()
    x = model.sample(4000, rng(4), until=0.0)
    exact = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.3).log_prob(x).sum(1)
    torch.testing.assert_close(model.log_prob(x, at=0.0), exact)
    mean, error = mean_and_error(x.square())
    assert_within(mean, 1.69, error)


def test_every_context_may_have_a_noise_level_of_its_own():
    model = Diffusion(2, 1, network=lambda z, given, noise: z.sin() + given + noise[..., None]).double()
    x, given = (
        torch.randn(3, 4, 2, generator=rng(5), dtype=torch.float64),
        torch.arange(3.0).double()[:, None],
    )
    sigma = torch.tensor([0.01, 0.3, 2.0], dtype=torch.float64)
    each = [model.denoise(x[i : i + 1], float(sigma[i]), given[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(model.denoise(x, sigma, given), torch.cat(each))


def test_contexts_select_the_law():
    law = two_modes(shift=0.3)
    model = Diffusion(2, 2, network=law.F, steps=128).double()
    given = torch.tensor([[0.0, 0.0], [1.0, -1.0]], dtype=torch.float64)
    x, log_prob = model.sample_and_log_prob(300, rng(13), given)
    exact = law.log_prob(x, model.sigma_min, given[:, None])
    assert tuple(x.shape) == (2, 300, 2)
    assert float((log_prob - exact).abs().mean()) < ENOUGH
    torch.testing.assert_close(model.log_prob(x[:, 0], given), model.log_prob(x, given)[:, 0])


@pytest.mark.parametrize("kind", [Diffusion, DiffusionEnergy])
def test_a_new_model_is_the_gaussian_with_the_moments_of_the_data(kind):
    data = 3 + torch.tensor([2.0, 0.1]) * torch.randn((500, 2), generator=rng())
    given = 400 + 100 * torch.randn((500, 1), generator=rng(1))
    model = kind(2, 1, data=Batch(data, given), width=8, layers=3, steps=64)
    exact = Gaussian(data.mean(0), data.std(0))
    with torch.no_grad():
        assert float((model.log_prob(data, given) - exact.log_prob(data)).abs().mean()) < ENOUGH
    assert float(model.field.network.encoder(given).mean().abs()) < 1e-3  # contexts are standardised too


@pytest.mark.parametrize("kind", [Diffusion, DiffusionEnergy])
def test_weights_and_moments_are_saved(kind):
    data = 3 + 2 * torch.randn((50, 2), generator=rng())
    made = kind(2, data=data, width=8, layers=3, steps=16)
    _shake(made)
    again = kind(2, width=8, layers=3, steps=16, seed=5)
    again.load_state_dict(made.state_dict())
    assert torch.equal(made.log_prob(data), again.log_prob(data))
    assert torch.equal(made.sample(3, rng()), again.sample(3, rng()))


def test_bad_settings_and_inputs_are_named():
    for wrong, field in (
        (dict(sigma_data=0.0), "diffusion.sigma_data"),
        (dict(sigma_min=90.0), "diffusion.sigma_max"),
        (dict(rho=-1.0), "diffusion.rho"),
        (dict(log_sigma=(0.0, 0.0)), "diffusion.log_sigma.1"),
        (dict(steps=0), "flow.steps"),
    ):
        with pytest.raises(ConfigError) as caught:
            Diffusion(2, **wrong)
        assert caught.value.path == field
    with pytest.raises(ConfigError, match=r"diffusion\.sigma_rel: must be within"):
        DiffusionEnergy(2, sigma_rel=1e-4)
    with pytest.raises(InputError, match="network: a Diffusion-φ has a scalar network"):
        DiffusionEnergy(2, network="residual")
    model = Diffusion(2, 3, width=8, layers=3, steps=4)
    with pytest.raises(InputError, match="given: "):
        model.sample(3, rng())
    with pytest.raises(InputError, match="given: "):
        model.log_prob(torch.zeros(4, 2), torch.zeros(5, 3))
    with pytest.raises(ConfigError, match="sigma: must be above 0"):
        model.denoise(torch.zeros(4, 2), 0.0, torch.zeros(4, 3))


def test_a_network_that_is_not_finite_is_named_with_its_context():
    def burst(z, given, noise):
        return torch.where(given[..., :1] > 0, math.nan, 0.0) * z

    model = Diffusion(2, 1, network=burst, steps=8)
    with pytest.raises(InputError, match=r"not finite at t = .*context 1"):
        model.sample(2, rng(), torch.tensor([[0.0], [1.0]]))


def test_any_callable_is_a_network():
    assert isinstance(Diffusion(1, network=lambda z, given, noise: 0 * z).field.network, PlainField)
