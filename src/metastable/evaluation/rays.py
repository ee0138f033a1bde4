"""Whether an energy can hold a density at all: it must grow along every ray away from the data.

In d dimensions exp(−E) has a finite integral along rays only where E grows faster than d·log r, as volume grows
like rᵈ. A bare network does not promise that: one with SiLU or ReLU layers is linear far away, and falls along
many rays before training; one with bounded layers is constant there.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.parts import column_moments, energies_of, in_parts
from metastable.core.protocols import Classifier, is_normalised, provides
from metastable.core.random import generator
from metastable.proposals.basic import column_scales
from metastable.walkers.space import space_of

RAYS = 256
NEAR, FAR = 100.0, 1000.0
"""Where along a ray the energy is looked at, in spreads of the data: beyond what layers bend, within float32."""

BEYOND = 5.0
"""Times the distance of the farthest datum: of 20 data or more even Cauchy's law has but a hundredth beyond."""


class Rays(NamedTuple):
    """What an energy does along rays away from the data.

    Attributes:
        share_bad: share of the rays along which exp(−E) has no finite integral.
        growth: dE/d log r of the worst ray; at least `needed` is needed. −inf where energies are −inf or NaN.
        needed: d, the dimensions of an event.
        rays: how many were followed.
    """

    share_bad: float
    growth: float
    needed: int
    rays: int = RAYS

    @property
    def holds(self) -> bool:
        """Whether every ray is one that a density can have."""
        return self.share_bad == 0

    @property
    def text(self) -> str:
        """In words."""
        if self.holds:
            return f"The energy grows along all of {self.rays} rays away from the data, as a density needs."
        how = (
            "falls"
            if self.growth < 0
            else "stays where it is"
            if self.growth == 0
            else f"grows like {self.growth:.3g}·log r only"
        )
        return (
            f"Along {self.share_bad:.0%} of {self.rays} rays away from the data the energy grows too slowly (on "
            f"the worst it {how}; {self.needed}·log r is needed in {self.needed} dimensions): exp(−E) has no "
            "finite integral, so that there is no density and no log Z, and walkers can run away."
        )


ADVICE = (
    'Put it on a reference with one word, fit(…, reference="gaussian"): E − log q with a Gaussian q fitted to the '
    "data (energies.Tilted), whose energy grows as the square of the distance."
)


@torch.no_grad()
def holds_density(energy: Any, x: Tensor, *, rays: int = RAYS, seed: int = 0) -> Rays:
    """Follow rays from points of the data outwards, to a thousand times the data's spread.

    Args:
        energy: `(B, *event)` to `(B,)`. It may be +inf from somewhere on: there is no mass.
        x: rows of the data, `(n, *event)`.
        rays: how many.
        seed: of the points and directions.

    >>> x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    >>> holds_density(lambda x: 0.5 * x.square().sum(1), x).holds
    True
    >>> holds_density(lambda x: x[:, 0], x).share_bad  # falls to one side
    0.5
    """
    rng = generator(seed, x.device)
    start = x[torch.randint(len(x), (rays,), generator=rng, device=x.device)]
    direction = torch.randn(start.shape, generator=rng, device=x.device, dtype=x.dtype)
    direction = torch.cat([direction[: rays - rays // 2], -direction[: rays // 2]])  # a ray and its opposite
    length = direction.flatten(1).norm(dim=1).view(-1, *([1] * (x.dim() - 1)))
    step = direction / length * math.sqrt(x[0].numel()) * spread_of(x)
    near, far = (energies_of(energy, start + radius * step) for radius in (NEAR, FAR))
    growth = (far - near) / math.log(FAR / NEAR)
    growth = torch.where(far == torch.inf, torch.inf, growth.nan_to_num(-math.inf, math.inf, -math.inf))
    needed = x[0].numel()
    return Rays(float((growth <= needed).double().mean()), float(growth.min()), needed, rays)


def spread_of(x: Tensor) -> Tensor:
    """Standard deviations of the columns of vectors, `(d,)`, each in its own units; of other events one for all."""
    mean, std = column_moments(x)
    if x.dim() == 2:
        return column_scales(mean, std).to(x.dtype)
    return std.square().mean().sqrt().clamp(min=1e-12).to(x.dtype)


def radii(x: Tensor, data: Tensor) -> Tensor:
    """Distances of rows from the data's centre, `(B,)`, float64, in root mean square ones of the data."""
    centre, _ = column_moments(data)
    scale = spread_of(data).double().expand(data.shape[1:]).flatten()
    away = in_parts(lambda part: ((part.flatten(1).double() - centre) / scale).norm(dim=1), x)
    return away / math.sqrt(len(centre))


def far_share(x: Tensor, data: Tensor) -> float:
    """Share of the rows that lie `BEYOND` times as far from the data's centre as the farthest datum.

    >>> data = torch.tensor([[-1.0], [0.0], [1.0]])
    >>> far_share(torch.tensor([[0.0], [4.0], [6.0], [-600.0]]), data)
    0.5
    """
    found, known = radii(x, data), radii(data, data)
    return float((~(found <= BEYOND * known.max())).double().mean())  # so that NaN is far too


def bare_network_words(energy: Any, x: Tensor) -> str | None:
    """What to say before training about an energy that cannot hold a density; None where nothing is to be said.

    Nothing is said of units coded −1 and +1, whose states are finitely many, of a classifier, whose density is a
    by-product, and of a density.
    """
    if not space_of(energy).has_volume or provides(energy, Classifier) or is_normalised(energy):
        return None
    found = holds_density(energy, x)
    return None if found.holds else f"{found.text} {ADVICE}"
