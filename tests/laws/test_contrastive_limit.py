"""(41) of the Jarzynski paper: contrastive divergence whose walkers hardly leave the data is score matching."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from metastable.core.types import energy_and_grad
from metastable.energies import MLP
from metastable.kernels import ULA
from metastable.methods import Context, ContrastiveDivergence, Negatives, ScoreMatching
from metastable.methods.base import Nothing
from metastable.methods.contrastive import Stepping
from metastable.proposals import fit_gaussian

F64 = torch.float64


def noise_points(d: int, n: int = 12) -> tuple[Tensor, Tensor]:
    """Gauss–Hermite nodes of d standard normals, `(nᵈ, d)`, and the logs of their weights: no chance is left."""
    nodes, weights = (torch.as_tensor(a) for a in np.polynomial.hermite_e.hermegauss(n))
    log_w = (weights / weights.sum()).log()
    grid, each = torch.cartesian_prod(*[nodes] * d), torch.cartesian_prod(*[log_w] * d)
    return grid.view(-1, d), each.view(-1, d).sum(1)


def gradient(loss: Tensor, energy: torch.nn.Module) -> Tensor:
    parameters = list(energy.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)  # a score does not see the last bias
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)]
    )


@pytest.fixture
def case() -> tuple[Context, Tensor]:
    energy = MLP(2, hidden=(12, 12), activation="tanh", seed=3).double()
    x = torch.randn((6, 2), generator=torch.Generator().manual_seed(0), dtype=F64)
    return Context(energy, {"energy": energy}, x, fit_gaussian(x), torch.Generator()), x


def contrastive(context: Context, x: Tensor, h: float) -> Tensor:
    """The gradient of CD after one step of ULA from the data, averaged over its noise by quadrature, over h."""
    ξ, log_w = noise_points(x.shape[1])
    starts, noise = x.repeat_interleave(len(ξ), 0), ξ.repeat(len(x), 1)
    moved = ULA(h).move(starts, energy_and_grad(context.energy, starts).grad, noise).detach()
    loss, _ = ContrastiveDivergence(step_size=h, steps=1).loss(
        context, Stepping(), "energy", x, Negatives(moved, log_w.repeat(len(x)))
    )
    return gradient(loss, context.energy) / h  # pyright: ignore


def test_contrastive_divergence_tends_to_the_fisher_gradient_at_first_order(case):
    context, x = case
    fisher = gradient(
        ScoreMatching().loss(context, Nothing(), "energy", x, None)[0],
        context.energy,  # pyright: ignore
    )
    off = [float((contrastive(context, x, h) - fisher).norm() / fisher.norm()) for h in (4e-3, 2e-3, 1e-3)]
    assert off[-1] < 0.02
    assert off[0] / off[1] == pytest.approx(2, rel=0.05)
    assert off[1] / off[2] == pytest.approx(2, rel=0.05)


def test_without_noise_it_is_another_limit(case):
    """The Laplacian of (42) comes from the walkers' noise: a mutant that only drifts loses it."""
    context, x = case
    fisher = gradient(ScoreMatching().loss(context, Nothing(), "energy", x, None)[0], context.energy)  # pyright: ignore
    h = 1e-3
    moved = (x - h * energy_and_grad(context.energy, x).grad).detach()
    loss, _ = ContrastiveDivergence(step_size=h, steps=1).loss(
        context, Stepping(), "energy", x, Negatives(moved)
    )
    drifting = gradient(loss, context.energy) / h  # pyright: ignore
    assert float((drifting - fisher).norm() / fisher.norm()) > 0.1
