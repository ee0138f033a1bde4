"""Whether a user's function of one number is strictly convex and differentiable, checked on a grid and by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .errors import ConfigError

ScalarFunction = Callable[[Tensor], Tensor]
"""An elementwise function, `(n,)` to `(n,)`."""

LOW, HIGH, POINTS = 1e-3, 1e3, 241
HALVINGS = 30
"""How often a cell is halved around its steepest part: a kink keeps its jump, a smooth slope loses it."""
ASIDE = 1e-6
"""How far beside a kink, relative to u, its two slopes are read: at the kink itself torch gives one between."""


def derivative(function: ScalarFunction, u: Tensor) -> Tensor:
    """f′(u), elementwise and itself differentiable.

    >>> derivative(lambda u: u * u.log(), torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    with torch.enable_grad():
        at = u if u.requires_grad else u.detach().requires_grad_()
        (slope,) = torch.autograd.grad(function(at).sum(), at, create_graph=True)
    return slope


def require_convex(
    function: ScalarFunction, field: str, low: float = LOW, high: float = HIGH, points: int = POINTS
) -> None:
    """Raise `ConfigError` unless `function` is finite, differentiable and strictly convex on [low, high].

    The grid is uniform in log u, float64. What lies between its points is looked at only for kinks: each cell
    is halved again and again towards its steeper half, and a slope that still jumps there is one.

    Args:
        function: maps `(n,)` to `(n,)`, elementwise, in torch operations.
        field: the setting that an error names.
        low: lower end, above 0.
        high: upper end.
        points: of the grid.

    >>> require_convex(lambda u: u * u.log(), "psi")
    >>> require_convex(lambda u: -u.log(), "psi")
    >>> require_convex(lambda u: u.log(), "psi")
    Traceback (most recent call last):
    ...
    metastable.core.errors.ConfigError: psi: must be strictly convex, but its slope goes from 1000 at u = 0.001 ...
    """
    u = torch.logspace(math.log10(low), math.log10(high), points, dtype=torch.float64)
    value, slope = _values(function, u, field), _slopes(function, u, field)
    _refuse_wrong_slopes(function, u, value, slope, field)
    _refuse_flat(u, slope, field)
    _refuse_kinks(function, u, slope, field)


def require_convex_at(
    function: ScalarFunction, field: str, log_u: Tensor, checked: tuple[float, float] = (LOW, HIGH)
) -> None:
    """The same from the smallest to the largest e^`log_u`, the ratios of data, where `checked` does not hold them.

    Beyond 10⁻⁸ and 10⁸ float64 cannot tell a curvature from its rounding, and nothing is looked at.

    >>> bounded = lambda u: torch.where(u < 2e3, u * u, 4e3 * u - 4e6)  # a line from 2,000 on
    >>> require_convex(bounded, "psi")
    >>> require_convex_at(bounded, "psi", torch.tensor([0.0, 9.0]))
    Traceback (most recent call last):
    ...
    metastable.core.errors.ConfigError: psi: must be strictly convex, but its slope goes from 4000 at u = ...
    """
    ends = log_u.detach().double().clamp(math.log(1e-8), math.log(1e8)).exp().aminmax()
    low, high = min(float(ends.min), checked[0]), max(float(ends.max), checked[1])
    if (low, high) != checked:
        require_convex(function, field, low, high)


def _values(function: ScalarFunction, u: Tensor, field: str) -> Tensor:
    try:
        value = function(u)
    except Exception as error:
        raise ConfigError(
            field, f"cannot be called with a tensor of shape {tuple(u.shape)}: {error}"
        ) from error
    if not isinstance(value, Tensor) or value.shape != u.shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(field, f"must map a tensor ({len(u)},) to ({len(u)},) elementwise, got {got}")
    return _finite(value.detach(), u, "its value", field)


def _slopes(function: ScalarFunction, u: Tensor, field: str) -> Tensor:
    try:
        slope = derivative(function, u)
    except RuntimeError as error:
        raise ConfigError(
            field, f"must be differentiable by torch; write it in torch operations ({error})"
        ) from error
    return _finite(slope.detach(), u, "its slope", field)


def _finite(values: Tensor, u: Tensor, what: str, field: str) -> Tensor:
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        where = int(bad.nonzero()[0])
        raise ConfigError(field, f"must be finite, but {what} at u = {u[where]:.4g} is {values[where]:.4g}")
    return values


def _refuse_wrong_slopes(
    function: ScalarFunction, u: Tensor, value: Tensor, slope: Tensor, field: str
) -> None:
    """Automatic differentiation against a central difference: a detached part would pass unseen otherwise."""
    step = 1e-5 * u
    with torch.no_grad():
        difference = (function(u + step) - function(u - step)) / (2 * step)
    wrong = (difference - slope).abs() > 1e-4 * (1e-3 + slope.abs() + (value / u).abs())
    if int(wrong.sum()) > 1:  # a kink on a grid point is left to `_refuse_kinks`, which says what it is
        i = int(wrong.nonzero()[0])
        raise ConfigError(
            field,
            f"must be differentiable by torch: at u = {u[i]:.4g} its slope is {difference[i]:.6g}, automatic "
            f"differentiation gives {slope[i]:.6g}",
        )


def _refuse_flat(u: Tensor, slope: Tensor, field: str) -> None:
    """A strictly convex function has a slope that rises from each point to the next."""
    rise = slope.diff()
    flat = rise <= 1e-12 * slope[1:].abs()
    if bool(flat.any()):
        i = int(torch.where(flat, rise, torch.inf).argmin())
        raise ConfigError(
            field,
            f"must be strictly convex, but its slope goes from {slope[i]:.4g} at u = {u[i]:.4g} to "
            f"{slope[i + 1]:.4g} at u = {u[i + 1]:.4g}",
        )


def _refuse_kinks(function: ScalarFunction, u: Tensor, slope: Tensor, field: str) -> None:
    low, high, at_low, at_high = u[:-1], u[1:], slope[:-1], slope[1:]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        at_middle = derivative(function, middle).detach()
        left = at_middle - at_low > at_high - at_middle
        low, at_low = torch.where(left, low, middle), torch.where(left, at_low, at_middle)
        high, at_high = torch.where(left, middle, high), torch.where(left, at_middle, at_high)
    jump = (at_high - at_low) > 1e-3 * slope.diff() + 1e-9 * slope[1:].abs()
    if bool(jump.any()):
        i = int(jump.nonzero()[0])
        before, after = _slopes(function, torch.stack([low[i] * (1 - ASIDE), high[i] * (1 + ASIDE)]), field)
        raise ConfigError(
            field,
            f"must be differentiable, but its slope jumps from {before:.4g} to {after:.4g} at u = {low[i]:.6g}",
        )
