"""Toy sets: small distributions whose modes, weights and (mostly) densities are known exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..core.errors import InputError, nearest, require_count
from ..core.random import Seed, derive, generator

Draw = Callable[[int, torch.Generator], Tensor]
LogDensity = Callable[[Tensor], Tensor]

DEFAULT_ROWS = 5000


@dataclass(frozen=True, eq=False)
class ToySet:
    """A distribution to learn, with what is known about it.

    Attributes:
        name: its name in `TOY_SETS`.
        event_shape: shape of one row.
        description: one line for `--help` and reports.
        draw: `(n, rng)` to float32 rows `(n, *event)`.
        log_density: normalised log p, `(B, *event)` to `(B,)`; None where no closed form exists.
        centers: mode centres `(K, *event)`, None where the set is not a mixture of blobs.
        weights: probability of each mode `(K,)`, which sums to 1.
        rows: how many different rows exist; None where every draw is new.
        draw_labels: `(n, rng)` to int64 classes `(n,)`, of the rows that `draw` gives for the same state of `rng`;
            None where rows have no classes.

    Example:
        >>> toy = toy_set("two-modes")
        >>> toy.sample(3, seed=0).shape, toy.weights.tolist()
        (torch.Size([3, 2]), [0.25, 0.75])
    """

    name: str
    event_shape: tuple[int, ...]
    description: str
    draw: Draw
    log_density: LogDensity | None = None
    centers: Tensor | None = None
    weights: Tensor | None = None
    rows: int | None = None
    draw_labels: Draw | None = None

    @property
    def default_rows(self) -> int:
        """How many rows to draw when nobody says."""
        return DEFAULT_ROWS if self.rows is None else min(DEFAULT_ROWS, self.rows)

    def sample(self, n: int, seed: Seed = 0) -> Tensor:
        """`n` independent rows `(n, *event)`, or `n` different ones where the set is finite."""
        require_count("n", n)
        if self.rows is not None and n > self.rows:
            raise InputError(
                f"n: {self.name!r} has {self.rows} rows, got n={n}; ask for {self.rows} or fewer"
            )
        return self.draw(n, self._rng(seed))

    def labels(self, n: int, seed: Seed = 0) -> Tensor | None:
        """The classes `(n,)` of the rows of `sample(n, seed)`, where they have any."""
        return None if self.draw_labels is None else self.draw_labels(n, self._rng(seed))

    def _rng(self, seed: Seed) -> torch.Generator:
        return generator(seed if isinstance(seed, torch.Generator) else derive(seed, "toy", self.name))


def toy_set(name: str) -> ToySet:
    """The toy set called `name`; a near miss is named in the error."""
    if name not in TOY_SETS:
        raise InputError(f"toy set: unknown name {name!r}{nearest(name, TOY_SETS)}")
    return TOY_SETS[name]


def _guarded(log_density: LogDensity, event_shape: tuple[int, ...]) -> LogDensity:
    """Refuse rows of another shape, which would otherwise broadcast into a number that means nothing."""

    def guarded(x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != event_shape or x.dim() == 0:
            raise InputError(
                f"x: must have shape (B, {', '.join(map(str, event_shape))}), got {tuple(x.shape)}"
            )
        return log_density(x)

    return guarded


def _uniform(n: int, rng: torch.Generator) -> Tensor:
    return torch.rand(n, generator=rng)


def _normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng)


def _turn(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate each row of `x`, `(..., 2)`, by its `angle`, `(...)`."""
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([cos * x[..., 0] - sin * x[..., 1], sin * x[..., 0] + cos * x[..., 1]], -1)


def _gaussians(name: str, description: str, centers: Tensor, weights: Tensor, scale: float) -> ToySet:
    """p(x) = Σ_k w_k N(x; c_k, scale²·I), `centers` `(K, d)`, `weights` `(K,)`."""
    dim = centers.shape[1]
    log_norm = dim * math.log(scale * math.sqrt(2 * math.pi))

    def draw(n: int, rng: torch.Generator) -> Tensor:
        mode = torch.multinomial(weights, n, replacement=True, generator=rng)
        return centers[mode] + scale * _normal(rng, n, dim)

    def log_density(x: Tensor) -> Tensor:
        squared = (x[:, None] - centers.to(x)).square().sum(-1) / scale**2
        return torch.logsumexp(weights.to(x).log() - squared / 2, -1) - log_norm

    return ToySet(name, (dim,), description, draw, _guarded(log_density, (dim,)), centers, weights)


def _two_modes() -> ToySet:
    # Midway between the modes log p is 10 below the lighter peak: a chain with local moves stays where it is.
    centers = torch.tensor([[-3.0, 0.0], [3.0, 0.0]])
    description = "two blobs of mass 1/4 and 3/4 with a barrier between them"
    return _gaussians("two-modes", description, centers, torch.tensor([0.25, 0.75]), scale=0.6)


def _two_modes_50d() -> ToySet:
    # The teacher of the Jarzynski paper's Gaussian-mixture experiment: masses 1/4 and 3/4 at −10e₁ and 6e₁.
    centers = torch.zeros(2, 50)
    centers[:, 0] = torch.tensor([-10.0, 6.0])
    description = "masses 1/4 and 3/4 at -10 and 6 on the first of 50 axes, unit variance"
    return _gaussians("two-modes-50d", description, centers, torch.tensor([0.25, 0.75]), scale=1.0)


def _eight_gaussians() -> ToySet:
    angle = torch.arange(8, dtype=torch.float64) * (math.pi / 4)
    centers = 2 * torch.stack([angle.cos(), angle.sin()], 1).float()
    description = "eight blobs of equal mass on a ring of radius 2"
    return _gaussians("eight-gaussians", description, centers, torch.full((8,), 1 / 8), scale=0.15)


def _pinwheel(spokes: int = 5, radial: float = 0.3, tangential: float = 0.1, rate: float = 0.25) -> ToySet:
    """Spokes N((1, 0), diag(radial², tangential²)), twisted by an angle rate·exp(|x|) and doubled.

    The common definition twists by the first coordinate before the rotation instead of by the distance from
    the origin; the two look the same, and a twist by distance keeps area, so the density is exact.
    """
    scales = torch.tensor([radial, tangential], dtype=torch.float64)
    log_norm = math.log(2 * math.pi * radial * tangential * spokes) + 2 * math.log(2.0)
    turns = torch.arange(spokes, dtype=torch.float64) * (2 * math.pi / spokes)

    def draw(n: int, rng: torch.Generator) -> Tensor:
        spoke = torch.randint(spokes, (n,), generator=rng)
        x = scales.float() * _normal(rng, n, 2) + torch.tensor([1.0, 0.0])
        return 2 * _turn(x, turns[spoke].float() + rate * x.norm(dim=1).exp())

    def log_density(x: Tensor) -> Tensor:
        y = (x / 2)[:, None]
        y = _turn(y, -(turns.to(x) + rate * y.norm(dim=-1).exp()))
        squared = ((y - torch.tensor([1.0, 0.0]).to(x)) / scales.to(x)).square().sum(-1)
        return torch.logsumexp(-squared / 2, -1) - log_norm

    description = "five twisted spokes around the origin"
    return ToySet("pinwheel", (2,), description, draw, _guarded(log_density, (2,)))


def _checkerboard() -> ToySet:
    """Uniform on the eight squares of side 2 in [−4, 4)² whose column and row add up to an even number."""

    def draw(n: int, rng: torch.Generator) -> Tensor:
        column = torch.randint(4, (n,), generator=rng)
        row = 2 * torch.randint(2, (n,), generator=rng) + column % 2
        # Steps of 2⁻¹⁹ add to a corner without rounding, so no row lands on the neighbouring square.
        offset = torch.randint(2**20, (n, 2), generator=rng) / 2**19
        return torch.stack([column, row], 1) * 2 - 4 + offset

    def log_density(x: Tensor) -> Tensor:
        on_board = ((x >= -4) & (x < 4)).all(1)
        dark = (x / 2).floor().sum(1) % 2 == 0
        return torch.where(on_board & dark, x.new_tensor(-math.log(32.0)), x.new_tensor(-math.inf))

    description = "uniform on the dark squares of a 4 by 4 board; density 0 elsewhere"
    return ToySet("checkerboard", (2,), description, draw, _guarded(log_density, (2,)))


def _two_moons(scale: float = 0.15) -> ToySet:
    """Two interleaved half circles of radius 2, each point moved by N(0, scale²·I)."""

    def draw(n: int, rng: torch.Generator) -> Tensor:
        angle = math.pi * _uniform(n, rng)
        side = 2 * torch.randint(2, (n,), generator=rng) - 1
        arc = torch.stack([2 * side * angle.cos() - side, side * (2 * angle.sin() - 0.5)], 1)
        return arc + scale * _normal(rng, n, 2)

    return ToySet("two-moons", (2,), "two interleaved half circles", draw)


def _circles(radii: tuple[float, ...] = (1.0, 2.0), scale: float = 0.1) -> ToySet:
    """Circles of equal mass, blurred by N(0, scale²·I).

    A blurred circle of radius r has density exp(−(|x|² + r²)/2s²)·I₀(|x|r/s²)/(2πs²); the scaled Bessel
    function I₀(z)e^{−z} keeps it finite.
    """

    def draw(n: int, rng: torch.Generator) -> Tensor:
        angle = 2 * math.pi * _uniform(n, rng)
        radius = torch.tensor(radii)[torch.randint(len(radii), (n,), generator=rng)]
        ring = radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
        return ring + scale * _normal(rng, n, 2)

    def log_density(x: Tensor) -> Tensor:
        distance, r = x.norm(dim=1, keepdim=True), torch.tensor(radii).to(x)
        exponent = -((distance - r) / scale).square() / 2
        each = exponent + torch.special.i0e(distance * r / scale**2).log()
        return torch.logsumexp(each, -1) - math.log(2 * math.pi * scale**2 * len(radii))

    return ToySet(
        "circles", (2,), "two thin rings of radius 1 and 2, equal mass", draw, _guarded(log_density, (2,))
    )


@lru_cache(maxsize=1)
def _digit_images() -> tuple[Tensor, Tensor]:
    """Images `(1797, 1, 8, 8)` and their classes `(1797,)`."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).div(8).sub(1).view(-1, 1, 8, 8)
    return images, torch.tensor(labels, dtype=torch.int64)


def _digits() -> ToySet:
    def chosen(part: int) -> Draw:
        def draw(n: int, rng: torch.Generator) -> Tensor:
            values = _digit_images()[part]
            return values[torch.randperm(len(values), generator=rng)[:n]]

        return draw

    return ToySet(
        "digits",
        (1, 8, 8),
        "1797 handwritten digits, 8 by 8, in [-1, 1], with labels",
        draw=chosen(0),
        rows=1797,
        draw_labels=chosen(1),
    )


def bars_and_stripes(side: int = 4) -> Tensor:
    """All pictures `(1, side, side)` whose rows, or whose columns, are each of one sign: 2·2^side − 2 of them.

    >>> bars_and_stripes(2).shape
    torch.Size([6, 1, 2, 2])
    """
    require_count("side", side)
    bits = 2 * ((torch.arange(2**side)[:, None] >> torch.arange(side)) & 1).float() - 1
    bars = bits[:, None, :].expand(-1, side, side)
    return torch.cat([bars, bars[1:-1].transpose(1, 2)])[:, None].contiguous()  # the two plain ones once


def _bars_and_stripes(side: int = 4) -> ToySet:
    patterns = bars_and_stripes(side)

    def draw(n: int, rng: torch.Generator) -> Tensor:
        return patterns[torch.randint(len(patterns), (n,), generator=rng)]

    def log_density(x: Tensor) -> Tensor:
        known = (x.flatten(1)[:, None] == patterns.flatten(1).to(x)).all(2).any(1)
        value = x.new_full((len(x),), -math.log(len(patterns)))
        return torch.where(known, value, torch.full_like(value, -math.inf))

    return ToySet(
        "bars-and-stripes",
        (1, side, side),
        f"{side}×{side} pictures of −1 and +1 whose rows or columns are each of one sign, for discrete energies",
        draw,
        _guarded(log_density, (1, side, side)),
    )


TOY_SETS: dict[str, ToySet] = {
    toy.name: toy
    for toy in (
        _two_modes(),
        _two_modes_50d(),
        _eight_gaussians(),
        _pinwheel(),
        _checkerboard(),
        _two_moons(),
        _circles(),
        _digits(),
        _bars_and_stripes(),
    )
}
"""Every toy set by name."""
