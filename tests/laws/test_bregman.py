"""Chapter 4 of the AdaNCE thesis in double precision: (4.4)–(4.6), the weights of (4.12), maximum likelihood."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import each
from torch import Tensor

from metastable.core.errors import ConfigError
from metastable.energies import MLP
from metastable.methods import AdaptiveNCE, Bregman, Context
from metastable.methods.base import Negatives, contrast
from metastable.methods.bregman import BREGMANS, as_bregman
from metastable.proposals import fit_gaussian

over = pytest.mark.parametrize
F64 = torch.float64

PSI = {
    "nce": lambda u: u * u.log() - (1 + u) * torch.log1p(u),
    "kl": lambda u: u * u.log(),
    "squared": lambda u: 0.5 * u**2,
    "user": lambda u: u**3 / 6 - u.log(),
}
"""Ψ written as in the thesis, and a user's."""
FACTOR = {"nce": 0.5, "kl": 1.0, "squared": 1.0, "user": 2.0}
"""S₀′(1) = Ψ″(1)."""


def bregman(name: str) -> Bregman:
    return Bregman.from_function(PSI["user"]) if name == "user" else BREGMANS[name]


def curvature(psi, g: Tensor) -> Tensor:
    """Ψ″ by automatic differentiation of Ψ, sharing nothing with the class."""
    return torch.func.vmap(torch.func.grad(torch.func.grad(psi)))(g)


@over("name", PSI)
def test_halves_of_the_loss_are_those_of_psi(name):
    log_g = torch.linspace(-6, 6, 49, dtype=F64)
    g, psi = log_g.exp(), PSI[name]
    slope = torch.func.vmap(torch.func.grad(psi))(g)
    torch.testing.assert_close(bregman(name).S1(log_g), slope, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(bregman(name).S0(log_g), slope * g - psi(g), rtol=1e-9, atol=1e-9)


@over("name", PSI)
def test_weights_are_those_of_4_12(name):
    """S₁′(g)g = Ψ″(g)g for data and S₀′(g)g = Ψ″(g)g² for negatives, by (4.6)."""
    log_g = torch.linspace(-4, 4, 33, dtype=F64)
    g = log_g.exp()
    negatives, data = bregman(name).weights(log_g, log_g)
    expected = curvature(PSI[name], g)
    torch.testing.assert_close(data, expected * g, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(negatives, expected * g * g, rtol=1e-9, atol=1e-12)
    assert math.isclose(bregman(name).factor(), FACTOR[name], rel_tol=1e-12)


@each("name", BREGMANS)
def test_named_and_user_given_are_the_same_loss(name):
    """The same Ψ passed as a function, with its derivatives by automatic differentiation."""
    mine, log_g = Bregman.from_function(PSI[name]), torch.linspace(-5, 5, 21, dtype=F64)
    for half in ("S0", "S1"):
        torch.testing.assert_close(getattr(mine, half)(log_g), getattr(BREGMANS[name], half)(log_g))


def test_nce_stays_finite_where_g_does_not():
    log_g = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4])
    nce = BREGMANS["nce"]
    assert torch.isfinite(nce.S0(log_g)).all()
    assert torch.isfinite(nce.S1(log_g)).all()
    negatives, data = nce.weights(log_g, log_g)
    torch.testing.assert_close(negatives, torch.sigmoid(log_g))
    torch.testing.assert_close(data, torch.sigmoid(-log_g))


# ---- the gradient


class Setting:
    """Two small networks, data and weighted negatives, all in double precision."""

    def __init__(self, moved: float):
        rng = torch.Generator().manual_seed(0)
        self.data, x = (torch.randn((n, 2), generator=rng, dtype=F64) for n in (9, 7))
        self.negatives = Negatives(x, torch.randn(7, generator=rng, dtype=F64))
        self.energy = MLP(2, (8, 8), seed=1).double()
        method = AdaptiveNCE(interval=1)
        self.frozen = method.companions(self.energy, self.data, fit_gaussian(self.data), 0)["frozen"]
        with torch.no_grad():
            for p in self.energy.parameters():
                p.add_(moved * torch.randn(p.shape, generator=rng, dtype=F64))
        players = {"energy": self.energy, "frozen": self.frozen}
        self.context = Context(self.energy, players, self.data, fit_gaussian(self.data), rng)

    def gradient(self, loss: Tensor) -> Tensor:
        grads = torch.autograd.grad(loss, list(self.energy.parameters()), allow_unused=True)
        return torch.cat([g.flatten() for g in grads if g is not None])

    def of_method(self, psi) -> Tensor:
        method = AdaptiveNCE(psi=psi)
        return self.gradient(method.loss(self.context, None, "energy", self.data, self.negatives)[0])  # type: ignore

    def of_4_12(self, weigh) -> Tensor:
        """E_m[w₀ ∇log p̃] − E_data[w₁ ∇log p̃] with weights from `weigh(g)` = (w₀, w₁)."""
        with torch.no_grad():
            g_data, g_model = ((self.frozen(x) - self.energy(x)).exp() for x in (self.data, self.negatives.x))
        p = torch.softmax(self.negatives.log_weight, 0)  # type: ignore
        of_negatives = -(p * weigh(g_model)[0]) @ self.energy(self.negatives.x)
        of_data = -(weigh(g_data)[1] * self.energy(self.data)).mean()
        return self.gradient(of_negatives - of_data)


def choice(name: str):
    return PSI["user"] if name == "user" else name


@over("name", PSI)
def test_at_interval_one_the_gradient_is_maximum_likelihood_times_a_factor(name):
    setting = Setting(moved=0.0)
    likelihood = setting.gradient(contrast(setting.energy, setting.data, setting.negatives)[0])
    got = setting.of_method(choice(name))
    torch.testing.assert_close(got, FACTOR[name] * likelihood, rtol=0, atol=1e-6)
    assert (got - likelihood).abs().max() > 1e-3 or FACTOR[name] == 1  # another factor is told apart


@over("name", PSI)
def test_away_from_one_the_gradient_is_the_weighted_form(name):
    setting = Setting(moved=0.3)
    got = setting.of_method(choice(name))

    def right(g: Tensor) -> tuple[Tensor, Tensor]:
        c = curvature(PSI[name], g)
        return c * g * g, c * g

    torch.testing.assert_close(got, setting.of_4_12(right), rtol=0, atol=1e-9)


MUTANTS = {
    "swapped weights": lambda c, g: (c * g, c * g * g),
    "g upside down": lambda c, g: (c / g**2, c / g),
    "one weight for both": lambda c, g: (c * g, c * g),
    "maximum likelihood": lambda c, g: (torch.ones_like(g), torch.ones_like(g)),
}


@over("mutant", MUTANTS.values(), ids=MUTANTS)
@over("name", PSI)
def test_wrong_weights_fail_the_same_comparison(name, mutant):
    setting = Setting(moved=0.3)
    got = setting.of_method(choice(name))
    wrong = setting.of_4_12(lambda g: mutant(curvature(PSI[name], g), g))
    assert (got - wrong).abs().max() > 1e-3


# ---- bad input


@each(
    "psi, words",
    [
        ("nec", "did you mean 'nce'"),
        (3.0, "a function Ψ or a Bregman"),
        (lambda u: u.log(), "strictly convex"),
        (lambda u: 2 * u, "strictly convex"),
        (lambda u: u**2 + (u - 2).abs(), "jumps"),
        (lambda u: (u - 1).sqrt(), "finite"),
    ],
)
def test_a_bad_psi_is_named(psi, words):
    with pytest.raises(ConfigError, match=words) as caught:
        AdaptiveNCE(psi=psi)
    assert caught.value.path == "adance.psi"


def test_a_bregman_is_taken_as_it_is():
    assert as_bregman(BREGMANS["kl"]) is BREGMANS["kl"]
    assert Bregman.named("squared") is BREGMANS["squared"]
