"""Exact answers in few dimensions: log Z, densities and KL by the trapezoid rule on a grid.

For a smooth density that has decayed at the edge of the box the rule converges faster than any power of
the spacing. The spacing must resolve the narrowest feature: four points to a standard deviation give
log Z to about 1e-12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ..core.errors import EnergyError, InputError, require, require_count
from ..core.types import Energy

Box = Sequence[tuple[float, float]]
"""One `(low, high)` for each dimension."""

MOST_POINTS = 1 << 25  # grid points in all
BLOCK = 1 << 16  # grid points evaluated at once


@dataclass(frozen=True)
class GridDensity:
    """A density on a grid, normalised there.

    Attributes:
        axes: coordinates along each dimension, D tensors of shape `(n_d,)`.
        density: exp(−E)/Z, of shape `(n_1, …, n_D)`, float64.
        log_partition: log Z on the box.
        edge_mass: share of the mass in the outermost cells; the box is too small unless it is about zero.
    """

    axes: tuple[Tensor, ...]
    density: Tensor
    log_partition: float
    edge_mass: float


def bounding_box(data: Tensor, margin: float = 0.25) -> tuple[tuple[float, float], ...]:
    """The range of each coordinate, widened on both sides by `margin` times its length.

    Args:
        data: `(N, D)` or `(N,)`.
        margin: share of the range added at each end.

    >>> bounding_box(torch.tensor([[0.0, 1.0], [4.0, 1.0]]))
    ((-1.0, 5.0), (0.75, 1.25))
    """
    require(margin >= 0, "margin", "a number of at least 0", margin)
    rows = data.detach().reshape(len(data), -1).double()
    low, high = rows.min(0).values, rows.max(0).values
    length = torch.where(high > low, high - low, torch.ones_like(low))  # a constant column has no range
    return tuple(zip((low - margin * length).tolist(), (high + margin * length).tolist()))


def _axes(box: Box, points: int | Sequence[int]) -> tuple[Tensor, ...]:
    counts = [points] * len(box) if isinstance(points, int) else list(points)
    require(len(counts) == len(box) > 0, "points", f"one number for each of {len(box)} dimensions", points)
    for count in counts:
        require_count("points", count, least=2)
    if math.prod(counts) > MOST_POINTS:
        raise InputError(
            f"points: {' × '.join(map(str, counts))} grid points are more than {MOST_POINTS}; take fewer "
            "points, or estimate log Z by sampling in this many dimensions"
        )
    for low, high in box:
        require(-math.inf < low < high < math.inf, "box", "finite with low < high", (low, high))
    return tuple(torch.linspace(low, high, n, dtype=torch.float64) for (low, high), n in zip(box, counts))


def _log_cell(axes: Sequence[Tensor]) -> Tensor:
    """Log of the trapezoid weight of each grid point, flattened: h inside, h/2 at an end, per axis."""
    total = torch.zeros(1, dtype=torch.float64)
    for axis in axes:
        weight = torch.full_like(axis, math.log(float(axis[1] - axis[0])))
        weight[[0, -1]] -= math.log(2)
        total = (total[:, None] + weight).flatten()
    return total


def _blocks(axes: Sequence[Tensor]) -> Iterator[Tensor]:
    """Grid points `(≤ BLOCK, D)` in the order of the flattened grid, the last axis running fastest."""
    shape = [len(axis) for axis in axes]
    for start in range(0, math.prod(shape), BLOCK):
        index = torch.arange(start, min(start + BLOCK, math.prod(shape)))
        places = torch.unravel_index(index, shape)
        yield torch.stack([axis[place] for axis, place in zip(axes, places)], 1)


def _evaluate(function: Callable[[Tensor], Tensor], axes: Sequence[Tensor], name: str) -> Tensor:
    """Values on the flattened grid in float64; a network in float32 is evaluated in float32."""
    home = torch.empty(0, dtype=torch.float64, device="cpu")  # where a plain function is evaluated
    module = cast(nn.Module, function)
    if isinstance(module, nn.Module):
        home = next((t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()), home)
    parts = []
    with torch.no_grad():
        for x in _blocks(axes):
            values = function(x.to(home))
            if values.shape != (len(x),):
                raise EnergyError(
                    f"{name}: must map ({len(x)}, {len(axes)}) to ({len(x)},), got {tuple(values.shape)}"
                )
            parts.append(values.double().cpu())
    return torch.cat(parts)


def _negative_energy(energy: Energy, axes: Sequence[Tensor]) -> Tensor:
    values = -_evaluate(energy, axes, "energy")
    if bool((values.isnan() | (values == math.inf)).any()):
        raise EnergyError("energy: must be above −∞ on the whole box, got NaN or −∞; try a smaller box")
    return values


def log_partition_quadrature(energy: Energy, box: Box, points: int | Sequence[int] = 401) -> float:
    """The integral log Z = log ∫_box exp(−E(x)) dx by the trapezoid rule, summed in float64.

    Args:
        energy: maps `(B, D)` to `(B,)`; D is the length of `box`.
        box: one `(low, high)` for each dimension. Mass outside is not counted.
        points: grid points along each dimension, one number or D of them.

    >>> z = log_partition_quadrature(lambda x: x.square().sum(1) / 2, [(-9.0, 9.0)] * 2, 101)
    >>> abs(z - math.log(2 * math.pi)) < 1e-12
    True
    """
    axes = _axes(box, points)
    return float(torch.logsumexp(_negative_energy(energy, axes) + _log_cell(axes), 0))


def grid_density(energy: Energy, box: Box, points: int | Sequence[int] = 201) -> GridDensity:
    """exp(−E)/Z on a grid, with Z the integral over the box. Arguments as `log_partition_quadrature`."""
    axes = _axes(box, points)
    log_value = _negative_energy(energy, axes)
    log_mass = log_value + _log_cell(axes)
    log_z = torch.logsumexp(log_mass, 0)
    if not bool(torch.isfinite(log_z)):
        raise EnergyError("energy: is +∞ on the whole box; choose a box where the model has mass")
    shape = [len(axis) for axis in axes]
    mass = (log_mass - log_z).exp().view(shape)
    inside = mass[tuple(slice(1, -1) for _ in shape)].sum()
    density = (log_value - log_z).exp().view(shape)
    return GridDensity(axes, density, float(log_z), float((1 - inside).clamp(min=0)))


def kl_on_grid(
    log_p: Callable[[Tensor], Tensor],
    energy: Energy,
    box: Box,
    points: int | Sequence[int] = 401,
    *,
    mass_tolerance: float = 1e-3,
) -> float:
    """KL(p ‖ exp(−E)/Z) = ∫ p (log p + E + log Z) dx in nats, with Z the integral over the box.

    Both laws are those restricted to the box. That is the KL of the unrestricted laws only if the box holds
    their mass; for p this is checked, since log p is normalised, for E it cannot be.

    Args:
        log_p: normalised log-density of the data, `(B, D)` to `(B,)`; −∞ where there are none.
        energy: the model, `(B, D)` to `(B,)`.
        box: one `(low, high)` for each dimension.
        points: grid points along each dimension, one number or D of them.
        mass_tolerance: how far from 1 the mass of p on the grid may be.

    Raises:
        InputError: p does not integrate to 1 on the grid: the box is too small, the grid too coarse, or
            log p not normalised.
    """
    axes = _axes(box, points)
    log_cell = _log_cell(axes)
    log_q, log_p_values = _negative_energy(energy, axes), _evaluate(log_p, axes, "log_p")
    log_mass = float(torch.logsumexp(log_p_values + log_cell, 0))
    if not abs(math.expm1(log_mass)) <= mass_tolerance:
        raise InputError(
            f"log_p: must integrate to 1 on the box within {mass_tolerance:g}, got {math.exp(log_mass):.6g}; "
            "widen the box, take more points, or normalise log_p"
        )
    log_q = log_q - torch.logsumexp(log_q + log_cell, 0)
    log_p_values = log_p_values - log_mass
    p = (log_p_values + log_cell).exp()
    return float(torch.where(p > 0, p * (log_p_values - log_q), torch.zeros_like(p)).sum())
