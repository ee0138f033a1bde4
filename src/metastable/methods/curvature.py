"""Derivatives of an energy along directions, and how much of a gradient kinks hide from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metastable.core.plain import plain_layers
from metastable.core.types import Energy, row_dot


class Curvature(NamedTuple):
    """E, ∇E, v·∇E and vᵀ∇²E v for each pair of a row and a direction, differentiable in the parameters.

    Shapes are `(P,)`, `(P, *event)`, `(P,)` and `(P,)`.
    """

    energy: Tensor
    grad: Tensor
    slope: Tensor
    bend: Tensor


def score(energy: Energy, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A copy of x to differentiate in, E and ∇E there; the gradient can be differentiated again."""
    x = x.detach().requires_grad_(True)
    with plain_layers():  # those of torch have too few derivatives
        E = energy(x)
    (g,) = torch.autograd.grad(E.sum(), x, create_graph=True)
    return x, E, g


def curvature(energy: Energy, rows: Tensor, directions: Tensor) -> Curvature:
    """One Hessian-vector product, ∇(v·∇E), for every pair: `rows` `(B, *event)`, `directions` `(n, B, *event)`.

    Rows are repeated, so that all pairs go through the energy at once; double backward needs nothing of the
    energy but that autograd can differentiate it twice.
    """
    v = directions.flatten(0, 1)
    x, E, g = score(energy, rows.expand_as(directions).flatten(0, 1))
    slope = row_dot(g, v)
    (Hv,) = torch.autograd.grad(slope.sum(), x, create_graph=True, materialize_grads=True)
    return Curvature(E, g, slope, row_dot(v, Hv))


def kink_share(energy: Energy, parameters: Sequence[Tensor], x: Tensor, y: Tensor) -> float:
    """What share of the change of ∇E from x to y the second derivative misses; about 0 for a smooth energy.

    With v = y − x, ∫ vᵀ∇²E v along the segment must equal v·(∇E(y) − ∇E(x)). Where ∇E jumps, as it does in a
    network of ReLUs, the integral misses the jumps, and so does every trace of ∇²E. Both sides are compared by
    their gradients in the parameters, since that is what training follows (a network whose last layer is zero
    at first shows its kinks nowhere else).

    Args:
        energy: `(B, *event)` to `(B,)`.
        parameters: in which to compare.
        x: one end of each segment, `(B, *event)`.
        y: the other; nearby, so that three nodes are enough.
    """
    nodes, weights = _gauss_legendre(3)
    v = y - x
    inside = torch.cat([x + t * v for t in nodes])
    c = curvature(energy, inside, v.repeat(len(nodes), *([1] * (v.dim() - 1)))[None])
    integral = (torch.tensor(weights).to(x).repeat_interleave(len(x)) * c.bend).sum()
    at_x, at_y = (_flat_gradient(row_dot(score(energy, end)[2], v).sum(), parameters) for end in (x, y))
    change = at_y - at_x
    if float(change.norm()) <= 1e-4 * float(at_y.norm()):
        return 0.0  # rounding only: the parameters do not bend the energy, as when just a mean is learned
    missed = change - _flat_gradient(integral, parameters)
    return float(missed.norm() / change.norm())


def _gauss_legendre(n: int) -> tuple[list[float], list[float]]:
    """Nodes and weights on [0, 1]."""
    import numpy as np

    nodes, weights = np.polynomial.legendre.leggauss(n)
    return (0.5 * (nodes + 1)).tolist(), (0.5 * weights).tolist()


def _flat_gradient(value: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    if not value.requires_grad:
        return torch.zeros(sum(p.numel() for p in parameters), dtype=value.dtype, device=value.device)
    grads = torch.autograd.grad(value, list(parameters), allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in grads])
