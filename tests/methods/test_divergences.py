"""Closed forms of divergences against automatic differentiation of f, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import each

from metastable.core.errors import ConfigError, InputError
from metastable.methods.divergences import (
    DIVERGENCES,
    Divergence,
    alpha_divergence,
    divergence_of,
    from_function,
    register_divergence,
)

ALPHAS = (-3.0, -1.0, -0.5, 0.0, 1e-9, 0.5, 0.9, 1.0, 2.0, 3.5)
MEMBERS = {**DIVERGENCES, **{d.name: d for d in map(alpha_divergence, ALPHAS)}}
every = pytest.mark.parametrize("divergence", MEMBERS.values(), ids=MEMBERS)
X = torch.linspace(-4, 4, 401, dtype=torch.float64)


@every
def test_closed_forms_are_those_of_f(divergence: Divergence):
    """slope = f′(eˣ) and conjugate = eˣ f′(eˣ) − f(eˣ), with f′ by automatic differentiation."""
    derived = from_function(divergence.f)
    torch.testing.assert_close(divergence.slope(X), derived.slope(X), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(divergence.conjugate(X), derived.conjugate(X), rtol=1e-9, atol=1e-9)


@every
def test_the_conjugate_is_the_supremum(divergence: Divergence):
    """f*(t) = sup_u tu − f(u), attained at the u whose slope is t: no other u on a grid gives more."""
    x = X[::40]
    attained = x.exp() * divergence.slope(x) - divergence.f(x.exp())
    others = divergence.slope(x)[:, None] * X.exp() - divergence.f(X.exp())
    assert (others.max(1).values <= attained + 1e-9 * (1 + attained.abs())).all()


@every
def test_derivatives_in_x_agree_with_the_identity(divergence: Divergence):
    """d/dx f*(f′(eˣ)) = eˣ d/dx f′(eˣ): what makes the optimum of H stationary."""
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(divergence.slope(x).sum(), x)
    (conjugate,) = torch.autograd.grad(divergence.conjugate(x).sum(), x)
    torch.testing.assert_close(conjugate, X.exp() * slope, rtol=1e-9, atol=1e-12)


@every
def test_f_is_zero_at_one(divergence: Divergence):
    assert abs(float(divergence.f(torch.ones(1, dtype=torch.float64)))) < 1e-12


@each(
    "alpha, other, factor",
    [
        (1.0, "kl", 1.0),
        (0.0, "reverse-kl", 1.0),
        (0.5, "hellinger", 2.0),
        (2.0, "pearson", 0.5),
        (-1.0, "neyman", 0.5),
    ],
)
def test_alpha_divergences_meet_the_named_ones(alpha: float, other: str, factor: float):
    """Equal up to the factor and a multiple of u − 1, which no divergence sees."""
    u = torch.logspace(-2, 2, 101, dtype=torch.float64)
    gap = alpha_divergence(alpha).f(u) - factor * DIVERGENCES[other].f(u)
    slope = gap[-1] / (u[-1] - 1)
    torch.testing.assert_close(gap, slope * (u - 1), rtol=1e-9, atol=1e-9)


def test_alpha_near_its_limits_is_near_them():
    for limit in (0.0, 1.0):
        near, at = alpha_divergence(limit + 1e-7), alpha_divergence(limit)
        torch.testing.assert_close(near.slope(X), at.slope(X), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(near.conjugate(X), at.conjugate(X), rtol=1e-5, atol=1e-5)


def test_no_overflow_where_the_number_itself_is_finite():
    far = torch.tensor([-200.0, 200.0])  # e^200 is infinite in single precision
    for name, sides in {
        "js": (0, 1),
        "reverse-kl": (1,),
        "hellinger": (),
        "kl": (0,),
        "neyman": (1,),
        "pearson": (0,),
    }.items():
        values = torch.stack([DIVERGENCES[name].slope(far), DIVERGENCES[name].conjugate(far)])
        for side in sides:
            assert torch.isfinite(values[:, side]).all(), (name, side)
    near = torch.tensor([1e-4], dtype=torch.float32)  # (√u − 1) would lose its digits here
    assert float(DIVERGENCES["hellinger"].conjugate(near)) == pytest.approx(5.00012e-5, rel=1e-5)


@each(
    "f, words",
    [
        (lambda u: -(u**2) + 1, "strictly convex"),
        (lambda u: (u - 1) ** 3, "strictly convex"),
        (lambda u: 2 * (u - 1), "strictly convex"),
        (lambda u: (u - 1) ** 2 + (u - 1).abs(), "slope jumps"),
        (lambda u: (u - 1) ** 2 + torch.relu(u - 3.3), "slope jumps from 4.6 to 5.6 at u = 3.3"),
        (lambda u: u**2, r"f\(1\) = 1"),
        (lambda u: u * u.log() - 0.25, r"f\(1\) = -0.25"),
        (lambda u: torch.where(u > 50, torch.inf, (u - 1) ** 2), "finite"),
        (lambda u: ((u - 1) ** 2).detach(), "differentiable"),
        (lambda u: ((u - 1) ** 2).mean(), "elementwise"),
        (lambda u: math.log(u), "cannot be called"),
    ],
)
def test_a_bad_f_is_refused_by_name(f, words):
    with pytest.raises(InputError, match=words) as caught:
        from_function(f)
    assert str(caught.value).startswith("f: ")


@each(
    "make, path",
    [
        (lambda: divergence_of("kll"), "f-ebm.f"),
        (lambda: divergence_of(3), "f-ebm.f"),
        (lambda: divergence_of("alpha"), "f-ebm.alpha"),
        (lambda: divergence_of("js", 0.5), "f-ebm.alpha"),
        (lambda: alpha_divergence(math.inf), "alpha"),
    ],
)
def test_a_bad_choice_names_its_field(make, path):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.path == path


def test_the_list_can_be_extended():
    jeffreys = from_function(lambda u: (u - 1) * u.log(), name="jeffreys-of-a-test")
    try:
        register_divergence(jeffreys)
        assert divergence_of("jeffreys-of-a-test") is jeffreys
        assert divergence_of({"name": "jeffreys-of-a-test", "f": "<lambda>"}) is jeffreys
        with pytest.raises(InputError, match="already"):
            register_divergence(from_function(lambda u: (u - 1) ** 2, name="jeffreys-of-a-test"))
    finally:
        DIVERGENCES.pop("jeffreys-of-a-test")
