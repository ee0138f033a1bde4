"""Toy sets of events given a context, p(x | value), with exact conditional densities.

What a model is given is an embedding of the value that makes the density: ten sines and cosines of a number of
spokes, or the length of a spiral on [−1, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.errors import InputError, nearest, require_count
from ..core.random import Seed, derive, generator
from .toy import DEFAULT_ROWS, _normal, _turn, _uniform

BLOCK = 1 << 19  # values held at once by the spiral's density: they stay in the cache


@dataclass(frozen=True, eq=False)
class ConditionalToySet:
    """A conditional distribution to learn, with its density.

    Attributes:
        name: its name in `CONDITIONAL_TOY_SETS`.
        event_shape: shape of one event.
        context_shape: shape of what a model is given.
        description: one line for `--help` and reports.
        values: some values of the context, for pictures and scores.
        limits: the smallest and the largest value.
        draw_values: `(n, rng)` to values `(n,)`, as data have them.
        embed: values `(B,)` to what a model is given, `(B, *context)`.
        draw: values `(B,)` and a generator to one event for each, float32 `(B, *event)`.
        density: log p(x | value), `(B, *event)` and values `(B,)` to `(B,)`.

    Example:
        >>> toy = conditional_toy_set("pinwheel-given")
        >>> pairs = toy.sample(3, seed=0)
        >>> pairs.x.shape, pairs.given.shape
        (torch.Size([3, 2]), torch.Size([3, 10]))
        >>> toy.log_density(pairs.x, 5).shape
        torch.Size([3])
    """

    name: str
    event_shape: tuple[int, ...]
    context_shape: tuple[int, ...]
    description: str
    values: tuple[float, ...]
    limits: tuple[float, float]
    draw_values: Callable[[int, torch.Generator], Tensor]
    embed: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, torch.Generator], Tensor]
    density: Callable[[Tensor, Tensor], Tensor]

    @property
    def default_rows(self) -> int:
        """How many rows to draw when nobody says."""
        return DEFAULT_ROWS

    def sample(self, n: int, seed: Seed = 0) -> Batch:
        """`n` independent events with what each is given, from the joint law."""
        require_count("n", n)
        rng = self._rng(seed, "pairs")
        values = self.draw_values(n, rng)
        return Batch(self.draw(values, rng), self.embed(values))

    def sample_given(self, value: float, n: int, seed: Seed = 0) -> Tensor:
        """`n` independent events given one `value`, `(n, *event)`."""
        require_count("n", n)
        return self.draw(self._values(value, n), self._rng(seed, value))

    def context(self, value: float) -> Tensor:
        """What a model is given for one `value`, `(*context)`."""
        return self.embed(self._values(value, 1))[0]

    def log_density(self, x: Tensor, value: float | Tensor) -> Tensor:
        """Normalised log p(x | value), `(B, *event)` to `(B,)`; one value for all, or one for each row."""
        if x.dim() == 0 or tuple(x.shape[1:]) != self.event_shape:
            raise InputError(f"x: must have shape (B, *{self.event_shape}), got {tuple(x.shape)}")
        return self.density(x, self._values(value, len(x)).to(x))

    def _values(self, value: float | Tensor, n: int) -> Tensor:
        values = torch.as_tensor(value, dtype=torch.float32)
        if values.dim() > 0 and tuple(values.shape) != (n,):
            raise InputError(f"value: must be one number, or {n} of them, got shape {tuple(values.shape)}")
        low, high = self.limits
        outside = ~((values >= low) & (values <= high))
        if bool(outside.any()):
            raise InputError(
                f"value: must be from {low:g} to {high:g}, got {float(values[outside].flatten()[0]):g}"
            )
        return values.expand(n)

    def _rng(self, seed: Seed, *what: object) -> torch.Generator:
        own = seed if isinstance(seed, torch.Generator) else derive(seed, "toy", self.name, *what)
        return generator(own)


def conditional_toy_set(name: str) -> ConditionalToySet:
    """The conditional toy set called `name`; a near miss is named in the error."""
    if name not in CONDITIONAL_TOY_SETS:
        raise InputError(f"conditional toy set: unknown name {name!r}{nearest(name, CONDITIONAL_TOY_SETS)}")
    return CONDITIONAL_TOY_SETS[name]


def sinusoidal(values: Tensor, features: int, base: float = 10_000.0) -> Tensor:
    """Sines, then cosines, of `values` at frequencies base^{−2i/features}, `(B,)` to `(B, features)`.

    >>> sinusoidal(torch.tensor([0.0]), 4)
    tensor([[0., 0., 1., 1.]])
    """
    frequency = base ** (-torch.arange(0, features, 2, dtype=torch.float64) / features)
    angle = values.double()[:, None] * frequency.to(values.device)
    return torch.cat([angle.sin(), angle.cos()], 1).to(values.dtype)


def _pinwheel_given(radial: float = 0.3, tangential: float = 0.1, rate: float = 0.25) -> ConditionalToySet:
    """The toy set `pinwheel` with 4 to 7 spokes: each N((1, 0), diag(radial², tangential²)), twisted and doubled.

    The twist is by an angle rate·exp(|x|), which keeps area, so the density is exact; the common definition twists
    by the first coordinate before the rotation, and looks the same.
    """
    fewest, most = 4, 7
    scales, centre = torch.tensor([radial, tangential]), torch.tensor([1.0, 0.0])
    log_norm = math.log(2 * math.pi * radial * tangential) + 2 * math.log(2.0)

    def draw_values(n: int, rng: torch.Generator) -> Tensor:
        return torch.randint(fewest, most + 1, (n,), generator=rng).float()

    def draw(spokes: Tensor, rng: torch.Generator) -> Tensor:
        spoke = (_uniform(len(spokes), rng) * spokes).floor()
        x = scales * _normal(rng, len(spokes), 2) + centre
        return 2 * _turn(x, 2 * math.pi * spoke / spokes + rate * x.norm(dim=1).exp())

    def density(x: Tensor, spokes: Tensor) -> Tensor:
        spoke = torch.arange(most, dtype=x.dtype, device=x.device)
        y = (x / 2)[:, None]
        y = _turn(y, -(2 * math.pi * spoke / spokes[:, None] + rate * y.norm(dim=-1).exp()))
        squared = ((y - centre.to(x)) / scales.to(x)).square().sum(-1)
        each = torch.where(spoke < spokes[:, None], -squared / 2, -math.inf)
        return torch.logsumexp(each, -1) - spokes.log() - log_norm

    return ConditionalToySet(
        "pinwheel-given",
        (2,),
        (10,),
        "twisted spokes around the origin, given how many: 4 to 7",
        (4.0, 5.0, 6.0, 7.0),
        (fewest, most),
        draw_values,
        lambda values: sinusoidal(values, 10),
        draw,
        density,
    )


@lru_cache(maxsize=1)
def _nodes(count: int) -> tuple[Tensor, Tensor]:
    """Gauss–Legendre nodes and weights on [0, 1], float64."""
    from scipy.special import roots_legendre

    node, weight = roots_legendre(count)
    return torch.from_numpy((node + 1) / 2), torch.from_numpy(weight / 2)


def _spiral_given(pitch: float = 0.25, scale: float = 0.08, nodes: int = 640) -> ConditionalToySet:
    """Two spirals of `value` degrees, ±pitch·(−s cos s, s sin s) with s = √u · value, moved by N(0, scale²·I).

    u is uniform on [0, 1], so that mass is even along the curve. This is the usual set of two spirals, whose length
    is 540 degrees, shrunk by 3/4 so that the longest lies within [−4, 4]², and with all of its noise Gaussian. The
    density is then the integral over s of a Gaussian, by Gauss–Legendre nodes at most one `scale` apart.
    """
    low, high = 400.0, 800.0
    log_norm = math.log(2 * math.pi * scale**2) + math.log(2.0)

    def curve(s: Tensor) -> Tensor:
        return pitch * torch.stack([-s * s.cos(), s * s.sin()], -1)

    def draw_values(n: int, rng: torch.Generator) -> Tensor:
        return low + (high - low) * _uniform(n, rng)

    def draw(degrees: Tensor, rng: torch.Generator) -> Tensor:
        n = len(degrees)
        side = 2 * torch.randint(2, (n, 1), generator=rng) - 1
        s = _uniform(n, rng).sqrt() * torch.deg2rad(degrees)
        return side * curve(s) + scale * _normal(rng, n, 2)

    def density(x: Tensor, degrees: Tensor) -> Tensor:
        one = bool((degrees == degrees[:1]).all())  # most often: then all rows share one curve
        parts = zip(x.split(BLOCK // nodes), degrees.split(BLOCK // nodes), strict=True)
        return torch.cat([part(rows, own, one) for rows, own in parts])

    def part(x: Tensor, degrees: Tensor, one: bool) -> Tensor:
        node, weight = (values.to(x) for values in _nodes(nodes))
        points = curve(torch.deg2rad(degrees[:1] if one else degrees)[:, None] * node)
        log_weight = (2 * node * weight).log()  # the density of √u is 2√u
        # |x ∓ c|² = |x|² + |c|² ∓ 2x·c: the two spirals differ in the last term
        inner = x @ points[0].T if one else (points @ x[..., None])[..., 0]
        shared = log_weight - points.square().sum(-1) / (2 * scale**2)
        sides = [torch.logsumexp(shared + side * inner / scale**2, -1) for side in (1, -1)]
        return torch.logaddexp(*sides) - x.square().sum(1) / (2 * scale**2) - log_norm

    return ConditionalToySet(
        "spiral-given",
        (2,),
        (1,),
        "two spirals, given their length: 400 to 800 degrees",
        (400.0, 500.0, 600.0),
        (low, high),
        draw_values,
        lambda values: ((values - (low + high) / 2) / ((high - low) / 2))[:, None],
        draw,
        density,
    )


CONDITIONAL_TOY_SETS: dict[str, ConditionalToySet] = {
    toy.name: toy for toy in (_pinwheel_given(), _spiral_given())
}
"""Every conditional toy set by name."""
