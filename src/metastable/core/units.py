"""Units: coordinates in which every column has the same scale, and the way back.

Columns in dollars, years and codes differ by factors of thousands, and a step size, a network's first layer and a
float32 number all mean something else in each. Training therefore happens in

    u = (x − m)A,    log p(x) = log p(u) + log|det A|,    E(x) = E(u) − log|det A|,

so that log Z of E is the same number in both. Rows are brought there in float64, before anything is cast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .errors import MOST, require, require_choice
from .pixels import Frames
from .random import generator

KINDS = ("none", "common", "scale", "whiten")
WHITEN_LIMIT = 128
"""Coordinates up to which correlations are undone; beyond, the matrix costs more than it brings."""
FAR = 30.0
"""Factor from one beyond which the spread of pictures is no unit that a network or a step is made for."""
LEAST_VARIANCE = 1e-6
"""Variance that a direction is given at least, where that of a column is one; less where its noise has less."""
TOLD_APART = 1e-12
"""Variance below which float64 cannot tell it from none."""
STILL = 1e-4
"""Spread that a column which never changes is given, as a share of its value."""
EMPTY = 0.01
"""Directions with less than this share of the variance they should have hold nothing but rounding."""
LARGEST = 1e150
"""Size of a number up to which float64 holds its square, and sums of those over rows."""
NEAR = MOST**0.5
"""Size of a number whose square single precision can reckon with."""
COLUMNS = 256
"""Of contexts that are measured at once."""
FOLDS = 5
FINEST = 2.0**20
"""Parts of a unit that rows are told apart by; up to 16 units, float32 holds as many."""
MOST_ROWS = 20_000
"""Rows behind the shrinkage of correlations: more would not change it."""


@dataclass(frozen=True, eq=False)
class Units:
    """u = (x − mean)·A for events of one shape, and back.

    Attributes:
        kind: `none`; `common`, all numbers less one mean and in one standard deviation; `scale`, every number in
            its own; `whiten`, correlations undone as well.
        event_shape: shape of one event.
        mean: m, float64 `(D,)`, of the flattened event.
        matrix: A, float64: `(D,)` where it is diagonal, else `(D, D)`.
        inverse_matrix: A⁻¹, likewise.
        noise: standard deviation of the normal noise that training always puts on rows, in x; 0 for none.

    >>> units = Units.fit(torch.tensor([[0.0, 10.0], [2.0, 30.0]]), "scale")
    >>> units.forward(torch.tensor([[3.0, 20.0]])).tolist(), round(units.log_det, 4)
    ([[2.0, 0.0]], -2.3026)
    """

    kind: str
    event_shape: tuple[int, ...]
    mean: Tensor
    matrix: Tensor
    inverse_matrix: Tensor
    noise: float = 0.0

    @classmethod
    def none(cls, event_shape: tuple[int, ...]) -> Units:
        """u = x."""
        D = math.prod(event_shape)
        one = torch.ones(D, dtype=torch.float64)
        return cls("none", tuple(event_shape), torch.zeros_like(one), one, one)

    @classmethod
    def fit(cls, x: Tensor, kind: str, noise: float = 0.0) -> Units:
        """Units of the rows of `x`, `(n, *event)`, which hold the `noise` of training already.

        For `whiten`, A = diag(1/σ)·T^{−1/2} with T = (1 − α)R + αI, R the correlations and α their shrinkage. The
        symmetric root keeps columns where they were and, unlike principal axes, hardly moves when the rows hardly
        move.
        """
        require_choice("units", kind, KINDS)
        shape = tuple(x.shape[1:])
        if kind == "none":
            return cls.none(shape)
        flat = x.detach().flatten(1).cpu().double()
        mean, scale, varies = column_scales(flat.reshape(-1, 1) if kind == "common" else flat)
        if kind == "common":
            mean, scale = mean.repeat(flat.shape[1]), scale.repeat(flat.shape[1])
        if kind in ("common", "scale"):
            return cls(kind, shape, mean, 1 / scale, scale, noise)
        T = torch.eye(len(mean), dtype=torch.float64)
        if bool(varies.any()):
            places = varies.nonzero()[:, 0]
            own = float((noise / scale[varies]).square().min()) or LEAST_VARIANCE
            least = min(max(own, TOLD_APART), LEAST_VARIANCE)
            T[places[:, None], places] = _shrunk_correlations(((flat - mean) / scale)[:, varies], least)
        variances, axes = torch.linalg.eigh(T)
        matrix = (axes / variances.sqrt()) @ axes.T / scale[:, None]
        return cls(kind, shape, mean, matrix, (axes * variances.sqrt()) @ axes.T * scale, noise)

    @classmethod
    def of_contexts(cls, given: Tensor) -> Units:
        """Units of contexts, `(n, c)`: every number in its standard deviation.

        One that never changes has none, and u = 0 whatever it is later: nothing was shown of what follows from it,
        and any scale would make a large number of some shift. A has no inverse then: back comes the mean.

        >>> units = Units.of_contexts(torch.tensor([[0.0, 7.0], [2.0, 7.0]]))
        >>> units.forward(torch.tensor([[3.0, 7.1]])).tolist()
        [[2.0, 0.0]]
        """
        parts = given.detach().cpu().split(COLUMNS, 1)  # pictures in double precision can fill the memory
        mean, scale, varies = map(torch.cat, zip(*(column_scales(p.double()) for p in parts), strict=True))
        matrix, inverse = (torch.where(varies, each, 0.0) for each in (1 / scale, scale))
        return cls("scale", tuple(given.shape[1:]), mean, matrix, inverse)

    @property
    def trivial(self) -> bool:
        """Whether u is x."""
        return self.kind == "none"

    @cached_property
    def log_det(self) -> float:
        """log|det A|, the log-Jacobian of u in x, the same for every row."""
        if self.matrix.dim() == 1:
            return float(self.matrix.log().sum())
        return float(torch.linalg.slogdet(self.matrix).logabsdet)

    @cached_property
    def noise_covariance(self) -> Tensor:
        """That of the noise of training in u: variances `(D,)` where A is diagonal, else `(D, D)`."""
        turned = self.noise * self.matrix
        return turned.square() if turned.dim() == 1 else turned.T @ turned

    def forward(self, x: Tensor) -> Tensor:
        """From x to u, float64, `(…, *event)`."""
        if self.trivial:
            return x
        flat, lead = self._flat(x)
        return self._turn(flat - self.mean.to(flat), self.matrix).view(*lead, *self.event_shape)

    def inverse(self, u: Tensor) -> Tensor:
        """From u to x, float64, `(…, *event)`."""
        if self.trivial:
            return u
        flat, lead = self._flat(u)
        back = self._turn(flat, self.inverse_matrix) + self.mean.to(flat)
        return back.view(*lead, *self.event_shape)

    def turn(self, noise: Tensor) -> Tensor:
        """Differences of x as differences of u, in their own dtype, `(…, *event)`."""
        if self.trivial:
            return noise
        lead = noise.shape[: noise.dim() - len(self.event_shape)]
        return self._turn(noise.reshape(*lead, -1), self.matrix.to(noise.dtype)).view(noise.shape)

    def _flat(self, x: Tensor) -> tuple[Tensor, torch.Size]:
        lead = x.shape[: x.dim() - len(self.event_shape)]
        wide = torch.float32 if x.device.type == "mps" else torch.float64  # the one device without float64
        return x.reshape(*lead, -1).to(wide), lead

    def _turn(self, flat: Tensor, matrix: Tensor) -> Tensor:
        matrix = matrix.to(flat)
        return flat * matrix if matrix.dim() == 1 else flat @ matrix

    def enter(self, x: Tensor, seed: int, like: Tensor | None = None) -> Tensor:
        """Rows to train on: u, with normal noise along directions in which the rows (or `like`) do not vary.

        A column that never changes, or follows from others, has no density. It is given one: a small spread, which
        in u is 1, so that nothing is narrower than anything else. Where the noise of training gives it one, it is
        left, and where all numbers share a unit, too, as that would be as much as they have.
        """
        if self.trivial:
            return x
        u = self.forward(x)
        if self.kind == "common":
            return rounded(u)
        return rounded(self._filled(u, seed, None if like is None else self.forward(like)))

    def _filled(self, u: Tensor, seed: int, like: Tensor | None = None) -> Tensor:
        """u with normal noise along directions in which the rows of `like` do not vary."""
        flat, seen = u.flatten(1), (u if like is None else like).flatten(1)
        if self.matrix.dim() == 1:
            held = seen.var(0, correction=0) + self.noise_covariance.to(seen) > EMPTY
            if bool(held.all()):
                return u
            missing = torch.diag((~held).to(flat))
        else:
            spread = seen.T @ seen / len(seen) + self.noise_covariance.to(seen)
            variances, axes = torch.linalg.eigh(spread)
            empty = (variances < EMPTY).to(flat)
            if not bool(empty.any()):
                return u
            missing = (axes * empty) @ axes.T
        noise = torch.randn(flat.shape, generator=generator(seed), dtype=torch.float64).to(flat.device)
        return (flat + noise @ missing).view(u.shape)

    def as_json(self) -> dict[str, Any]:
        """The numbers, as a run's settings keep them."""
        numbers = {name: vars(self)[name].tolist() for name in ("mean", "matrix", "inverse_matrix")}
        noise = {"noise": self.noise} if self.noise else {}
        return {"kind": self.kind, "event_shape": list(self.event_shape), **numbers, **noise}

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Units:
        """The inverse of `as_json`."""
        numbers = [torch.tensor(kept[n], dtype=torch.float64) for n in ("mean", "matrix", "inverse_matrix")]
        units = cls(kept["kind"], tuple(kept["event_shape"]), *numbers, noise=float(kept.get("noise", 0.0)))
        require_choice("units.kind", units.kind, KINDS)
        require(0 <= units.noise < math.inf, "units.noise", "finite and at least 0", units.noise)
        D = math.prod(units.event_shape)
        for name, value in zip(("mean", "matrix", "inverse_matrix"), numbers, strict=True):
            ok = tuple(value.shape) in (((D,),) if name == "mean" else ((D,), (D, D)))
            require(
                ok and bool(value.isfinite().all()),
                f"units.{name}",
                f"finite, of size {D}",
                tuple(value.shape),
            )
        return units


@dataclass(frozen=True)
class Coordinates:
    """Units of the events, and of the contexts that they are given where there are some."""

    events: Units
    given: Units | None = None

    @property
    def trivial(self) -> bool:
        """Whether nothing is changed."""
        return self.events.trivial and (self.given is None or self.given.trivial)

    def as_json(self) -> dict[str, Any] | None:
        """As a run's settings keep them; None where nothing is changed."""
        if self.trivial:
            return None
        return {
            "events": self.events.as_json(),
            "given": None if self.given is None else self.given.as_json(),
        }

    @classmethod
    def from_json(cls, kept: Mapping[str, Any] | None) -> Coordinates | None:
        """The inverse of `as_json`."""
        if kept is None:
            return None
        given = kept.get("given")
        return cls(Units.from_json(kept["events"]), None if given is None else Units.from_json(given))


def require_squares(field: str, x: Tensor, most: float = LARGEST, where: str = "") -> None:
    """Refuse rows with numbers above `most` in size, by default those whose squares float64 cannot hold."""
    x = x.beside if isinstance(x, Frames) else x  # pixels are small
    low, high = torch.aminmax(x) if x.numel() else (0.0, 0.0)  # without a copy: pictures can fill the memory
    rule = f"at most {most:g} in size{where}, so that squares are numbers (drop rows far out, or rescale)"
    size = max(-float(low), float(high))
    require(size <= most, field, rule, size)


def require_near(field: str, u: Tensor) -> None:
    """Refuse rows, in the units of training, whose squares single precision cannot reckon with."""
    require_squares(field, u, NEAR, " in the units of training")


def rounded(u: Tensor) -> Tensor:
    """u to the millionth of a unit: what float64 computes of one table in two sets of units is then the same."""
    return torch.round(u * FINEST) / FINEST


def column_scales(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Means, standard deviations, and which columns change by more than rounding, each `(D,)`.

    One that does not is given a scale of its own: `STILL` of its value, or of 1 where that is zero.
    """
    mean, scale = x.mean(0), x.std(0, correction=0)
    largest = x.abs().amax(0)
    varies = scale > 10 * torch.finfo(x.dtype).eps * largest
    still = STILL * torch.where(largest > 0, largest, 1.0)
    return mean, torch.where(varies, scale, still), varies


def _shrunk_correlations(z: Tensor, least: float) -> Tensor:
    """(1 − α)R + αI for standardised rows, with the α that `_shrinkage` finds."""
    alpha = _shrinkage(z, least)
    return (1 - alpha) * (z.T @ z / len(z)) + alpha * torch.eye(z.shape[1], dtype=z.dtype)


def _shrinkage(z: Tensor, least: float) -> float:
    """α in [`least`, 1] at which a Gaussian with covariance (1 − α)R + αI predicts held-out rows best."""
    z = z[:: -(-len(z) // MOST_ROWS)]
    decades = -math.log10(least)
    candidates = torch.logspace(-decades, 0, 1 + round(4 * decades), dtype=z.dtype)
    total = torch.zeros_like(candidates)
    fold = torch.arange(len(z)) % FOLDS
    for k in range(min(FOLDS, len(z))):
        kept, out = z[fold != k], z[fold == k]
        centred = kept - kept.mean(0)
        variances, axes = torch.linalg.eigh(centred.T @ centred / max(len(kept), 1))
        shrunk = torch.outer(1 - candidates, variances.clamp(min=0)) + candidates[:, None]
        squares = ((out - kept.mean(0)) @ axes).square()
        total -= 0.5 * (squares.sum(0) / shrunk + len(out) * shrunk.log()).sum(1)
    return float(candidates[int(total.argmax())])


def default_kind(event_shape: tuple[int, ...], spread_of: Callable[[], float] = lambda: 1.0) -> str:
    """What `auto` means: vectors are whitened, or scaled where they are long; pixels share a unit already.

    Where that unit is not of the size of their spread, as in pictures from 0 to 255, they are given one that is;
    only pictures are asked for their spread.
    """
    if len(event_shape) != 1:
        spread = spread_of()
        return "none" if spread == 0 or 1 / FAR <= spread <= FAR else "common"
    return "whiten" if event_shape[0] <= WHITEN_LIMIT else "scale"


def require_kind(kind: str) -> None:
    """Refuse a word that names no units."""
    require(kind in ("auto", *KINDS), "units", f"one of auto, {', '.join(KINDS)}", kind)
