"""What no log-likelihood can exceed: the entropy of the data's law, and the mass that any density has.

Two checks of a number that a model claims. The mean log-density of held-out data cannot lie above minus the entropy
of their law, which distances to nearest neighbours estimate. And whatever the data are, a density sums to one: its
mean ratio to the draws of any other density q is at most 1, and by Markov's inequality rarely much above it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.parts import energies_of
from metastable.core.random import generator
from metastable.core.weights import log_mean_exp

from .rays import spread_of

NEIGHBOUR = 3
"""k: the third neighbour has a third of the variance of the first, and little more bias."""
MOST_ROWS = 2000
CENTRES, DRAWS = 500, 1000
WIDTHS = (0.03, 0.1, 0.3, 1.0)
"""Standard deviations of the kernels of q, in those of the data: with each, regions of another size are seen."""


class Entropy(NamedTuple):
    """An estimate of ∫ −p log p, in nats.

    Attributes:
        value: the estimate; of the distinct rows, where some are copies.
        std_error: from the spread over rows; bias, which grows with the dimension, is not in it.
        copies: share of the rows that are copies of another one. A law with atoms has no density.
    """

    value: float
    std_error: float
    copies: float


def nearest_neighbour_entropy(x: Tensor, k: int = NEIGHBOUR, seed: int = 0) -> Entropy:
    """Kozachenko and Leonenko's estimate, ψ(n) − ψ(k) + log V_d + (d/n)·Σ log ε_i, in float64.

    ε_i is the distance of row i to its k-th neighbour and V_d the volume of the unit ball. Rows are whitened first,
    and the log of that map's determinant added: where directions have very different scales, balls would not fit.

    Args:
        x: `(n, *event)`; at most `MOST_ROWS` of them are used.
        k: which neighbour.
        seed: of the choice of rows.
    """
    flat = x.detach().flatten(1).double().cpu()
    flat = flat[torch.randperm(len(flat), generator=generator(seed))[:MOST_ROWS]]
    rows = torch.unique(flat, dim=0)
    n, d = rows.shape
    if n <= k + 1:
        return Entropy(-math.inf, math.inf, 1 - n / len(flat))
    white, log_det = _whitened(rows)
    between = torch.cdist(white, white, compute_mode="donot_use_mm_for_euclid_dist")
    distance = between.kthvalue(k + 1, 1).values  # the first is the row itself
    terms = d * distance.clamp(min=1e-300).log()
    log_volume = d / 2 * math.log(math.pi) - math.lgamma(d / 2 + 1)
    value = _digamma(n) - _digamma(k) + log_volume + float(terms.mean()) + log_det
    return Entropy(value, float(terms.std()) / math.sqrt(n), 1 - n / len(flat))


def _whitened(x: Tensor) -> tuple[Tensor, float]:
    """Rows with about unit covariance, and log |det| of the map back."""
    scale = spread_of(x)
    z = (x - x.mean(0)) / scale
    if len(x) <= 2 * x.shape[1]:  # too few rows for a covariance
        return z, float(scale.log().sum())
    factor = torch.linalg.cholesky(z.T.cov() + 1e-9 * torch.eye(z.shape[1], dtype=z.dtype))
    white = torch.linalg.solve_triangular(factor, z.T, upper=False).T
    return white, float(scale.log().sum() + factor.diagonal().log().sum())


def _digamma(n: int) -> float:
    return float(torch.digamma(torch.tensor(float(n), dtype=torch.float64)))


@torch.no_grad()
def excess_mass(energy: Any, log_z: float, x: Tensor, seed: int = 0) -> float:
    """log of the mass that exp(−E − log Z) has around the data, by importance sampling: about 0 at most.

    With y ~ q, E[p(y)/q(y)] ≤ 1 for any density p, so that by Markov's inequality its mean over draws is above eˢ
    with a probability of e⁻ˢ at most, whatever p, q and their dimension. q is a mixture of kernels around rows of
    the data. A large value says that log Z is too low by at least as much; a small one says nothing.

    Args:
        energy: E.
        log_z: log Z that is claimed.
        x: rows of the data, `(n, *event)`.
        seed: of the draws.

    Returns:
        The largest over kernels of `WIDTHS`, less the log of their number.

    >>> x = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    >>> energy = lambda x: 0.5 * x.square().sum(1)  # log Z = log 2π
    >>> excess_mass(energy, 1.84, x) < 1, excess_mass(energy, 1.84 - 50, x) > 45
    (True, True)
    """
    rng = generator(seed, x.device)
    centres = x[torch.randperm(len(x), generator=rng, device=x.device)[:CENTRES]]
    spread = spread_of(x)
    found = []
    for width in WIDTHS:
        scale = width * spread
        rows = torch.randint(len(centres), (DRAWS,), generator=rng, device=x.device)
        noise = torch.randn((DRAWS, *x.shape[1:]), generator=rng, device=x.device, dtype=x.dtype)
        y = centres[rows] + scale * noise
        log_p = -energies_of(energy, y) - log_z
        found.append(float(log_mean_exp(log_p - _kernel_density(y, centres, scale))))
    return max(found) - math.log(len(WIDTHS))


def _kernel_density(y: Tensor, centres: Tensor, scale: Tensor) -> Tensor:
    """log q(y) of equal kernels N(centre, scale²), in float64, `(m,)`."""
    d = centres[0].numel()
    near, at = ((rows.double() / scale.double()).flatten(1) for rows in (y, centres))
    log_scale = scale.double().log().sum() * (d / scale.numel())
    kernels = -0.5 * torch.cdist(near, at).square()
    return log_mean_exp(kernels) - log_scale - d / 2 * math.log(2 * math.pi)
