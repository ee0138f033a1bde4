"""Binary NCE, exactly: the objective is (2.13), its gradient a weighted contrast, its optimum the truth."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from conftest import quadrature
from torch import Tensor

from metastable.core.errors import ConfigError
from metastable.energies import MLP
from metastable.methods import NCE, Context, FlowContrastive, Negatives
from metastable.methods.bregman import BREGMANS
from metastable.methods.nce import nce_loss
from metastable.proposals import Gaussian, fit_gaussian

F64 = torch.float64
over = pytest.mark.parametrize
RATIOS = [0.25, 1.0, 5.0]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def context_of(method: NCE, energy: torch.nn.Module, data: Tensor, c: float) -> Context:
    noise = fit_gaussian(data)
    players = {"energy": energy, **method.companions(energy, data, noise, 0)}
    for module in players.values():
        module.to(data.dtype)
    players["log_partition"].value.data.fill_(c)
    return Context(energy, players, data, noise, rng())


@over("ratio", RATIOS)
def test_objective_is_the_papers(ratio):
    """(2.13) with the posteriors (2.11) written out in densities, ν = 1/noise_ratio."""
    log_p, log_pn = (torch.randn((2, 40), generator=rng(s), dtype=F64) for s in (1, 2))
    nu, rho_1 = 1 / ratio, 1 / (1 + ratio)
    p, pn = log_p.exp(), log_pn.exp()
    posterior_noise, posterior_data = pn / (pn + nu * p), nu * p / (pn + nu * p)
    J = -rho_1 * posterior_data[0].log().mean() - (1 - rho_1) * posterior_noise[1].log().mean()
    G = log_p - log_pn - math.log(ratio)
    assert float(rho_1 * nce_loss(G[0], G[1], ratio)) == pytest.approx(float(J), abs=1e-12)


@over("ratio", RATIOS)
def test_chance_is_the_entropy_of_the_label(ratio):
    G = torch.full((3,), -math.log(ratio), dtype=F64)
    expected = (1 + ratio) * math.log(1 + ratio) - ratio * math.log(ratio)
    assert float(nce_loss(G, G, ratio)) == pytest.approx(expected, abs=1e-12)


def test_logits_of_any_size_stay_finite():
    G = torch.tensor([-1e5, -90.0, 0.0, 90.0, 1e5], requires_grad=True)
    loss = nce_loss(G, G, 2.0)
    (slope,) = torch.autograd.grad(loss, G)
    assert bool(torch.isfinite(loss))
    assert slope.tolist() == pytest.approx([-0.2, -0.2, 0.1, 0.4, 0.4])


def weighted_contrast(method: NCE, context: Context, data: Tensor, draws: Negatives) -> list[Tensor]:
    """E_data[w⁺∇E] − k·E_n[w⁻∇E], row by row, with weights from densities."""
    energy, noise = context.energy, context.players["noise"]
    c, k = context.players["log_partition"].value.detach(), method.noise_ratio
    parameters = list(energy.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for x, sign in ((data, 1.0), (draws.x, -k)):
        with torch.no_grad():
            p, pn = (-energy(x) - c).exp(), noise.log_prob(x).exp()
            weight = k * pn / (p + k * pn) if sign > 0 else p / (p + k * pn)
        for row, w in zip(x, weight, strict=True):
            gradient = torch.autograd.grad(energy(row[None])[0], parameters, allow_unused=True)
            for t, g in zip(total, gradient, strict=True):
                t += 0 if g is None else sign * w * g / len(x)
    return total


@over("ratio", RATIOS)
def test_gradient_is_the_weighted_contrast_of_both_sides(ratio):
    method = NCE(noise_ratio=ratio)
    energy = MLP(2, hidden=(8,), seed=1).double()
    data = 0.5 + torch.randn((12, 2), generator=rng(3), dtype=F64)
    context = context_of(method, energy, data, 0.7)
    draws, state, _ = method.negatives(context, method.load({}), data)
    assert len(draws.x) == max(1, round(12 * ratio))
    loss, metrics = method.loss(context, state, "energy", data, draws)
    c = context.players["log_partition"].value
    *gradient, slope = torch.autograd.grad(loss, [*energy.parameters(), c])
    expected = weighted_contrast(method, context, data, draws)
    for got, want in zip(gradient, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    weights = metrics["positive_weight"] - ratio * metrics["negative_weight"]
    torch.testing.assert_close(slope, weights, rtol=0, atol=1e-12)
    # positives without their weights would be another gradient
    plain = torch.autograd.grad(energy(data).mean() - energy(draws.x).mean(), list(energy.parameters()))
    assert (plain[0] - gradient[0]).abs().max() > 1e-2


def population_slope(ratio: float, c: float, forget_ratio: bool = False) -> float:
    """d/dc of the population objective by quadrature: data N(1, 0.6²) with its true energy, noise N(0, 1)."""
    method = NCE(noise=Gaussian(torch.zeros(1, dtype=F64)), noise_ratio=ratio)
    truth = Gaussian(torch.ones(1, dtype=F64), 0.6)
    context = context_of(method, torch.nn.Identity(), torch.zeros(2, 1, dtype=F64), c)
    context.energy = lambda x: -truth.log_prob(x) - 2.0  # log Z = 2
    noise = context.players["noise"]
    grid = quadrature(lambda x: torch.zeros(len(x), dtype=F64), [(-12.0, 12.0, 4001)]).points
    cell = grid[1, 0] - grid[0, 0]
    logits = method.logits(context, grid, grid, noise.log_prob(grid), noise.log_prob(grid))
    shift = math.log(ratio) if forget_ratio else 0.0
    w_data, w_noise = torch.sigmoid(-logits.G_data - shift), torch.sigmoid(logits.G_noise + shift)
    masses = [cell * q.log_prob(grid).exp() for q in (truth, noise)]
    return float((w_data @ masses[0] - ratio * w_noise @ masses[1]).detach())


@over("ratio", RATIOS)
def test_the_truth_is_the_optimum_whatever_the_noise_ratio(ratio):
    assert population_slope(ratio, 2.0) == pytest.approx(0.0, abs=1e-10)
    assert population_slope(ratio, 2.1) > 1e-3
    assert population_slope(ratio, 1.9) < -1e-3
    if ratio != 1:
        assert abs(population_slope(ratio, 2.0, forget_ratio=True)) > 1e-2


# ---- Bregman ratio matching with a fixed noise, (4.8)


PSIS = {"kl": "kl", "squared": "squared", "user": lambda u: u * u.log() + 0.1 * u**2}
CURVATURE = {"kl": lambda g: 1 / g, "squared": torch.ones_like, "user": lambda g: 1 / g + 0.2}
"""Ψ″, written out."""


@over("ratio", RATIOS)
def test_logistic_nce_is_one_of_them(ratio):
    G = torch.randn((2, 40), generator=rng(1), dtype=F64)
    torch.testing.assert_close(BREGMANS["nce"].loss(G[1], G[0], ratio), nce_loss(G[0], G[1], ratio))


@over("ratio", RATIOS)
@over("psi", PSIS)
def test_gradient_of_any_psi_is_the_contrast_with_its_own_weights(psi, ratio):
    """E_data[Ψ″(g)g ∇E] − k·E_n[Ψ″(g)g² ∇E] with g = p_θ/(k·p_n), (4.12)."""
    method = NCE(noise_ratio=ratio, psi=PSIS[psi])
    energy = MLP(2, hidden=(8,), seed=1).double()
    data = 0.5 + torch.randn((12, 2), generator=rng(3), dtype=F64)
    context = context_of(method, energy, data, 0.7)
    draws, state, _ = method.negatives(context, method.load({}), data)
    loss, metrics = method.loss(context, state, "energy", data, draws)
    gradient = torch.autograd.grad(loss, list(energy.parameters()))
    noise, weights = context.players["noise"], []
    with torch.no_grad():
        for x, power in ((data, 1), (draws.x, 2)):
            g = (-energy(x) - 0.7 - noise.log_prob(x)).exp() / ratio
            weights.append(CURVATURE[psi](g) * g**power)
    surrogate = (weights[0] * energy(data)).mean() - ratio * (weights[1] * energy(draws.x)).mean()
    for got, want in zip(gradient, torch.autograd.grad(surrogate, list(energy.parameters())), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    torch.testing.assert_close(metrics["positive_weight"], weights[0].mean())
    torch.testing.assert_close(metrics["negative_weight"], weights[1].mean())


def slope_in_c(psi: str, ratio: float, c: float, forget_ratio: bool = False) -> float:
    """d/dc of (4.8) by quadrature for data N(1, 0.6²), whose energy has log Z = 2, and noise N(0.5, 1)."""
    method = NCE(psi=PSIS[psi])
    truth, noise = (Gaussian(torch.full((1,), m, dtype=F64), s) for m, s in ((1.0, 0.6), (0.5, 1.0)))
    grid = torch.linspace(-9, 11, 4001, dtype=F64)[:, None]
    p, q = (law.log_prob(grid) for law in (truth, noise))
    log_g = p + 2.0 - c - q - math.log(ratio)
    of_noise, of_data = method.bregman.weights(log_g, log_g)
    k = 1.0 if forget_ratio else ratio
    return float(torch.trapezoid(of_data * p.exp() - k * of_noise * q.exp(), grid[:, 0]))


@over("ratio", RATIOS)
@over("psi", PSIS)
def test_the_truth_and_its_log_z_are_the_optimum_of_every_psi(psi, ratio):
    assert slope_in_c(psi, ratio, 2.0) == pytest.approx(0.0, abs=1e-9)
    assert slope_in_c(psi, ratio, 2.1) > 1e-3
    assert slope_in_c(psi, ratio, 1.9) < -1e-3
    assert ratio == 1 or abs(slope_in_c(psi, ratio, 2.0, forget_ratio=True)) > 1e-2


def test_a_psi_that_is_not_strictly_convex_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"nce\.psi: must be strictly convex"):
        NCE(psi=lambda u: u.log())
    with pytest.raises(ConfigError, match=r"nce\.psi: must be one of nce, kl, squared"):
        NCE(psi=3)  # type: ignore
    with pytest.raises(ConfigError, match=r"flow-contrastive\.psi: must be nce"):
        FlowContrastive(psi="kl")


def test_a_method_with_a_named_psi_can_be_pickled():
    assert pickle.loads(pickle.dumps(NCE(psi="kl"))) == NCE(psi="kl")


def test_a_psi_that_is_a_line_where_data_are_is_refused_when_training_starts():
    """Strictly convex up to 2,000; far data have ratios of e⁹ and more to narrow noise."""
    line = NCE(noise=Gaussian(torch.zeros(1)), psi=lambda u: torch.where(u < 2e3, u * u, 4e3 * u - 4e6))
    near, far = 0.1 * torch.randn((50, 1), generator=rng()), torch.full((50, 1), 5.0)

    def start(data: Tensor) -> None:
        energy = Flat()
        players = {"energy": energy, **line.companions(energy, data, fit_gaussian(near), 0)}
        line.start(Context(energy, players, data, fit_gaussian(near), rng()))

    start(near)
    with pytest.raises(ConfigError, match=r"nce\.psi: must be strictly convex, but its slope goes from 4000"):
        start(far)


class Flat(torch.nn.Module):
    """E(x) = ½·(x/10)²: a model much wider than the noise."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.005 * x[:, 0].square()
