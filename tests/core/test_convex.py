"""What passes for a strictly convex, differentiable function of one number, and what is named when it does not."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import each

from metastable.core.convex import HIGH, LOW, POINTS, derivative, require_convex
from metastable.core.errors import ConfigError

CONVEX = {
    "u log u": lambda u: u * u.log(),
    "nce": lambda u: u * u.log() - (1 + u) * torch.log1p(u),
    "square": lambda u: 0.5 * u**2,
    "minus log": lambda u: -u.log(),
    "reciprocal": lambda u: 1 / u,
    "root": lambda u: (u.sqrt() - 1) ** 2,
    "steep": lambda u: u**3,
    "with a corner in f'": lambda u: u**2 + torch.relu(u - 1) ** 2,
}


@pytest.mark.parametrize("function", CONVEX.values(), ids=CONVEX)
def test_strictly_convex_functions_pass(function):
    require_convex(function, "f")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda u: -(u**2), "strictly convex"),
        (lambda u: u**3 - 3 * u**2, "strictly convex"),
        (lambda u: 2 * u, "strictly convex"),
        (lambda u: torch.relu(u - 1), "strictly convex"),
        (lambda u: u**2 + (u - 1).abs(), "jumps from 1 to 3 at u = 1$"),
        (lambda u: u**2 + (u - 1.2345).abs(), "at u = 1.2345"),
        (lambda u: torch.where(u > 2, torch.inf, u**2), "finite"),
        (lambda u: (u - 1).sqrt(), "finite"),
        (lambda u: (u**2).detach(), "differentiable"),
        (lambda u: u**2 + (u**3).detach(), "automatic differentiation gives"),
        (lambda u: torch.tensor(u.numpy() ** 2), "differentiable"),
        (lambda u: (u**2).sum(), "elementwise"),
        (lambda u: 3.0, "elementwise"),
        (lambda u: math.log(u), "cannot be called"),
    ],
)
def test_the_error_names_field_and_rule(function, words):
    with pytest.raises(ConfigError, match=words) as caught:
        require_convex(function, "method.psi")
    assert caught.value.path == "method.psi"


@each("beside", [-1, 0, 1])
@each("place", [60, 120, 181])
def test_a_kink_on_a_point_of_the_grid_is_the_kink_beside_it(place, beside):
    """Which side of a kink a grid point falls on is a matter of the last bit, which a CPU may round otherwise."""
    u = torch.logspace(math.log10(LOW), math.log10(HIGH), POINTS, dtype=torch.float64)[place]
    kink = torch.nextafter(u, torch.tensor(beside * torch.inf).to(u)) if beside else u
    words = f"jumps from {2 * u - 1:.4g} to {2 * u + 1:.4g} at u = {u:.6g}$"
    with pytest.raises(ConfigError, match=words):
        require_convex(lambda u: u**2 + (u - kink).abs(), "psi")


def test_derivative_is_exact_and_differentiable():
    u = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    slope = derivative(lambda u: u * u.log(), u)
    torch.testing.assert_close(slope, u.log() + 1)
    (curvature,) = torch.autograd.grad(slope.sum(), u)
    torch.testing.assert_close(curvature, 1 / u.detach())
