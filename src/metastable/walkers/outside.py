"""Mass that no walker has met: an energy may fall again far from everything that a training has seen.

Weights cannot know of it. Where the network that was learned outgrows its reference, the integral of exp(−E) lies
out there, and log Z of the walkers is that of the part which they are in.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metastable.core.parts import energies_of
from metastable.core.random import generator
from metastable.core.types import Energy

RAYS, RADII = 64, 48
FARTHEST = 100.0
"""How far out to look, in distances of the farthest walker."""


@torch.no_grad()
def log_mass_outside(energy: Energy, x: Tensor, log_z: float) -> float:
    """log of about how much mass exp(−E)/Z has farther out than the farthest of the walkers `x`, `(N, *event)`.

    The integral in polar coordinates about the walkers' centre, in their standard deviations: a mean over `RAYS`
    directions, and a trapezoid rule over log r. Rough, but mass that has run away is not a matter of digits.

    >>> walkers = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
    >>> log_mass_outside(lambda x: 0.5 * x.square().sum(1), walkers, math.log(2 * math.pi)) < -5
    True
    >>> log_mass_outside(lambda x: x.square().sum(1).clamp(max=3), walkers, 1.0) > 5
    True
    """
    flat = x.flatten(1).double()
    centre, scale = flat.mean(0), flat.std(0).clamp(min=1e-12)
    d = flat.shape[1]
    first = ((flat - centre) / scale).norm(dim=1).max().clamp(min=1e-6)
    r = first * torch.logspace(0.02, math.log10(FARTHEST), RADII, dtype=torch.float64, device=x.device)
    rng = generator(0, x.device)
    ray = torch.randn((RAYS, d), generator=rng, dtype=torch.float32, device=x.device).double()
    ray = torch.cat([ray, -ray]) / ray.norm(dim=1).repeat(2)[:, None]
    points = centre + scale * r[:, None, None] * ray
    E = energies_of(energy, points.view(-1, *x.shape[1:]).to(x.dtype)).view(RADII, -1)
    log_p = torch.where(E.isnan(), -torch.inf, -E) - log_z + scale.log().sum()
    along = torch.logsumexp(log_p, 1) - math.log(E.shape[1]) + d * r.log()  # r^(d − 1) dr = r^d d(log r)
    surface = math.log(2) + 0.5 * d * math.log(math.pi) - math.lgamma(0.5 * d)
    step = math.log(float(r[1] / r[0]))
    return float(torch.logsumexp(along, 0)) + surface + math.log(step)
