"""f-divergences in the form that training needs: functions of the log-ratio x = log p/q.

D_f(p‖q) = E_q[f(p/q)] for a strictly convex, differentiable f with f(1) = 0. The variational form of
L. Yu, Y. Song, J. Song, S. Ermon, *Training deep energy-based models with f-divergence minimization*, ICML 2020,
never uses f itself but two functions of u = p/q,

    f′(u),   averaged over data,   and   f*(f′(u)) = u f′(u) − f(u),   averaged over the model.

Here both are functions of x = log u, since e^{H+E} is known by its exponent: closed forms then overflow only where
the number itself does. With P_a(x) = (e^{ax} − 1)/a, and P_0(x) = x, most of them are one formula: the
α-divergence has f′ = P_{α−1} and f*∘f′ = P_α.

| name | f(u) | f′ | f*∘f′ |
|---|---|---|---|
| `kl` | u log u | x + 1 | eˣ |
| `reverse-kl` | −log u | −e⁻ˣ | x − 1 |
| `js` | ½[u log u − (u+1) log((u+1)/2)] | ½[log 2 − softplus(−x)] | ½[softplus(x) − log 2] |
| `hellinger` | (√u − 1)² | 1 − e^{−x/2} | e^{x/2} − 1 |
| `pearson` | (u − 1)² | 2(eˣ − 1) | e^{2x} − 1 |
| `neyman` | (u − 1)²/u | 1 − e^{−2x} | 2(1 − e⁻ˣ) |
| `alpha` | (u^α − 1 − α(u − 1))/(α(α − 1)) | P_{α−1}(x) | P_α(x) |

Scale and a multiple of u − 1 are free: neither moves the minimum. In these normalisations `js` is the
Jensen–Shannon divergence (at most log 2), `hellinger` the squared Hellinger distance ∫(√p − √q)²; α → 1 is KL and
α → 0 reverse KL (both handled), α = ½ twice `hellinger`, α = 2 half of `pearson`, α = −1 half of `neyman`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from metastable.core.convex import derivative, require_convex
from metastable.core.errors import ConfigError, InputError, nearest

LOG_2 = math.log(2)
LOW, HIGH = 1e-2, 1e2
"""Where a user's f is checked; beyond, a slope may flatten below rounding although f is strictly convex."""

Elementwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Divergence:
    """An f-divergence as functions of x = log p/q.

    Attributes:
        name: what it is called in settings and logs.
        f: u to f(u).
        slope: x to f′(eˣ), averaged over data.
        conjugate: x to f*(f′(eˣ)), averaged over the model.

    >>> DIVERGENCES["kl"].slope(torch.tensor([0.0, 2.0]))
    tensor([1., 3.])
    >>> DIVERGENCES["js"].conjugate(torch.tensor(1000.0))  # e^1000 is never formed
    tensor(499.6534)
    """

    name: str
    f: Elementwise
    slope: Elementwise
    conjugate: Elementwise


def power(a: float, x: Tensor) -> Tensor:
    """P_a(x) = (e^{ax} − 1)/a, and its limit x at a = 0."""
    return torch.expm1(a * x) / a if a else x


def alpha_divergence(alpha: float) -> Divergence:
    """f(u) = (u^α − 1 − α(u − 1))/(α(α − 1)); its limits at α = 1 (KL) and α = 0 (reverse KL).

    >>> half = alpha_divergence(0.5)
    >>> half.f(torch.tensor(4.0)), DIVERGENCES["hellinger"].f(torch.tensor(4.0))
    (tensor(2.), tensor(1.))
    """
    if not math.isfinite(alpha):
        raise ConfigError("alpha", f"must be a finite number, got {alpha!r}")

    def f(u: Tensor) -> Tensor:
        return u * power(alpha - 1, u.log()) - power(alpha, u.log())

    return Divergence(f"alpha={alpha:g}", f, lambda x: power(alpha - 1, x), lambda x: power(alpha, x))


def from_function(f: Elementwise, name: str | None = None, field: str = "f") -> Divergence:
    """The divergence of any strictly convex f with f(1) = 0, written in torch operations.

    f′ is derived by automatic differentiation and f*(f′(u)) = u f′(u) − f(u). f is checked on a grid of u from
    10⁻² to 10²: finite, differentiable without kinks, strictly convex. u itself is formed, so that exponents
    beyond about ±88 (±709 in double precision) overflow.

    Args:
        f: `(n,)` to `(n,)`, elementwise.
        name: of the divergence; that of the function by default.
        field: the setting that an error names.

    >>> mine = from_function(lambda u: u * u.log())
    >>> mine.slope(torch.tensor([0.0, 2.0]))
    tensor([1., 3.])
    >>> from_function(lambda u: u**2)
    Traceback (most recent call last):
    ...
    metastable.core.errors.ConfigError: f: must be 0 at u = 1, got f(1) = 1; subtract that constant
    """
    require_convex(f, field, LOW, HIGH)
    with torch.no_grad():
        at_one = float(f(torch.ones(1, dtype=torch.float64)))
    if abs(at_one) > 1e-6:
        raise ConfigError(field, f"must be 0 at u = 1, got f(1) = {at_one:.6g}; subtract that constant")

    def slope(x: Tensor) -> Tensor:
        value = derivative(f, x.exp())
        return value if x.requires_grad else value.detach()

    def conjugate(x: Tensor) -> Tensor:
        return x.exp() * slope(x) - f(x.exp())

    return Divergence(name or getattr(f, "__name__", type(f).__name__), f, slope, conjugate)


def _js(u: Tensor) -> Tensor:
    return 0.5 * (torch.special.xlogy(u, u) - (u + 1) * (torch.log1p(u) - LOG_2))


DIVERGENCES: dict[str, Divergence] = {
    d.name: d
    for d in (
        Divergence("kl", lambda u: torch.special.xlogy(u, u), lambda x: x + 1, torch.exp),
        Divergence("reverse-kl", lambda u: -u.log(), lambda x: -torch.exp(-x), lambda x: x - 1),
        Divergence(
            "js", _js, lambda x: 0.5 * (LOG_2 - F.softplus(-x)), lambda x: 0.5 * (F.softplus(x) - LOG_2)
        ),
        Divergence(
            "hellinger",
            lambda u: (u.sqrt() - 1) ** 2,
            lambda x: -torch.expm1(-0.5 * x),
            lambda x: torch.expm1(0.5 * x),
        ),
        Divergence(
            "pearson", lambda u: (u - 1) ** 2, lambda x: 2 * torch.expm1(x), lambda x: torch.expm1(2 * x)
        ),
        Divergence(
            "neyman",
            lambda u: (u - 1) ** 2 / u,
            lambda x: -torch.expm1(-2 * x),
            lambda x: -2 * torch.expm1(-x),
        ),
    )
}
"""Divergences by name; `register_divergence` adds to them."""


def register_divergence(divergence: Divergence) -> Divergence:
    """Make a divergence known by its name, for settings files and `--set method.f=NAME`.

    >>> mine = register_divergence(from_function(lambda u: (u - 1) * u.log(), name="jeffreys"))
    >>> divergence_of("jeffreys") is DIVERGENCES.pop("jeffreys")
    True
    """
    if DIVERGENCES.get(divergence.name, divergence) is not divergence or divergence.name == "alpha":
        raise InputError(f"name: there is already a divergence {divergence.name!r}; choose another name")
    DIVERGENCES[divergence.name] = divergence
    return divergence


def divergence_of(f: Any, alpha: float | None = None) -> Divergence:
    """A divergence from its name, a function f, itself, or the description that `config.json` holds of it."""
    if f == "alpha":
        if alpha is None:
            raise ConfigError("f-ebm.alpha", "must be given with f = 'alpha'")
        return alpha_divergence(alpha)
    if alpha is not None:
        raise ConfigError("f-ebm.alpha", f"belongs to f = 'alpha' only, got it with f = {f!r}")
    if isinstance(f, Divergence):
        return f
    if isinstance(f, Mapping):
        f = f.get("name")
    if isinstance(f, str):
        if f not in DIVERGENCES:
            raise ConfigError("f-ebm.f", f"unknown divergence {f!r}{nearest(f, [*DIVERGENCES, 'alpha'])}")
        return DIVERGENCES[f]
    if callable(f):
        return from_function(f, field="f-ebm.f")  # pyright: ignore
    raise ConfigError("f-ebm.f", f"must be a name, a function or a Divergence, got {f!r}")
