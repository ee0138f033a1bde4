"""Draws of a proposal that serve many updates: the last rows with their negatives and densities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from metastable.core.batch import Batch
from metastable.core.pixels import Frames

from .base import Context, Negatives


class OnDensity(Protocol):
    """An energy that stands on the proposal of its method: network − log p_ξ."""

    network: nn.Module

    def attach(self, proposal: nn.Module) -> None:
        """Stand on this proposal."""
        ...


class Inheriting(Protocol):
    """An energy that may begin with layers of the proposal of its method."""

    inherits: bool

    def begin_as(self, proposal: nn.Module) -> None:
        """Take what fits, before the first update."""
        ...


class Refills(NamedTuple):
    """When a pool is drawn for, counted in updates of the energy.

    Attributes:
        pool: rows that it holds.
        reuse: times that a row is learned from, in the mean.
        drawn: rows that are drawn for at once; none where nobody says how many a batch has.
        learned: rows of one update.

    >>> Refills(4096, 2, 256, 64).every
    8
    """

    pool: int
    reuse: int
    drawn: int
    learned: int

    @property
    def filling(self) -> int:
        """Updates in which it is filled; all of them where nobody says how many rows one has."""
        return -(-self.pool // self.drawn) if self.drawn else 2**62

    @property
    def every(self) -> int:
        """Updates for each that draws, once it is full."""
        return max(1, self.reuse * self.drawn // max(1, self.learned))

    def at(self, k: int) -> bool:
        """Whether update `k` draws."""
        return k < self.filling or k % self.every == 0

    def filled(self, k: int) -> int:
        """Rows that it has in update `k`."""
        return min(self.pool, (k + 1) * self.drawn)


class DrawPool(NamedTuple):
    """P rows, written in order and over again.

    Attributes:
        x: data, `(P, *event)`.
        given: their contexts, `(P, *context)`, or `(P, 0)` where there are none; of those that end with pictures
            (`Frames`) the numbers before them.
        negatives: K for each, `(P, K, *event)`.
        log_prob: log p_ξ of the datum, then of its negatives, `(P, 1 + K)`; `(P, 0)` where nobody needs them.
        written: rows that were ever written, int64 `()`: it lies on the device, so that updates can be recorded.
        t: m times of each, `(P, m)`, or `(P, 0)` where points have none. With times, `negatives` are the 1 + K
            points of each of them, `(P, m (1 + K), *event)`, and `log_prob` their densities.
        seen: pictures that contexts end with, from −1 to 1 to the nearest byte, `(P, pixels)`, or `(P, 0)`: a pool
            is in every checkpoint, and with all their numbers it would be most of it.
    """

    x: Tensor
    given: Tensor
    negatives: Tensor
    log_prob: Tensor
    written: Tensor
    t: Tensor
    seen: Tensor

    def some(self, n: int, filled: int, rng: torch.Generator) -> DrawPool:
        """`n` of the first `filled` rows, with replacement."""
        return self._at(torch.randint(filled, (n,), generator=rng, device=self.x.device))

    def newest(self, n: int) -> DrawPool:
        """The `n` rows written last."""
        return self._at((self.written - n + torch.arange(n, device=self.x.device)) % len(self.x))

    def _at(self, rows: Tensor) -> DrawPool:
        return DrawPool(**{k: v if k == "written" else v[rows] for k, v in self._asdict().items()})


class Drawn(NamedTuple):
    """Rows of the pool: data with their log-density, and their negatives with theirs."""

    batch: Batch
    negatives: Negatives
    log_prob: Tensor | None


def empty_pool(context: Context, rows: int, K: int, weighs: bool, times: int = 0) -> DrawPool:
    """A pool for data like the context's, with K negatives each, or the 1 + K points of each of so many times."""
    points = times * (1 + K) if times else K
    densities = (points if times else 1 + K) if weighs else 0
    x, given = context.data, context.given
    numbers = given.beside if isinstance(given, Frames) else given
    beside = (0,) if numbers is None else tuple(numbers.shape[1:])
    pixels = given.shape[1] - beside[0] if isinstance(given, Frames) else 0
    return DrawPool(
        x.new_zeros(rows, *x.shape[1:]),
        x.new_zeros(rows, *beside, dtype=x.dtype if given is None else given.dtype),
        x.new_zeros(rows, points, *x.shape[1:]),
        x.new_zeros(rows, densities),
        torch.zeros((), dtype=torch.int64, device=x.device),
        x.new_zeros(rows, times),
        x.new_zeros(rows, pixels, dtype=torch.uint8),
    )


def kept_pool(tree: dict[str, Any]) -> DrawPool:
    """A pool as a checkpoint has it; those of earlier releases lack some parts."""
    filled, none = (tree["x"].flatten(1) != 0).any(1).sum(), tree["x"].new_zeros(len(tree["x"]), 0)
    return DrawPool(**{"written": filled, "t": none, "seen": none.to(torch.uint8), **tree})


def as_kept(pool: DrawPool, batch: Batch) -> Batch:
    """The batch as the pool keeps it, for which draws are made: noised pictures have the nearest bytes."""
    if not pool.seen.shape[1] or batch.given is None:
        return batch
    return replace(batch, given=given_of(pool._replace(**_given_parts(pool, batch.given))))


def keep_draws(pool: DrawPool, batch: Batch, drawn: Negatives, log_prob: Tensor | None) -> DrawPool:
    """The pool with a batch and its negatives, row by row."""
    B, densities = len(batch), {}
    if log_prob is not None and drawn.log_prob is not None:
        densities["log_prob"] = torch.cat([log_prob[:, None], drawn.log_prob.view(B, -1)], 1)
    return keep_rows(pool, batch, negatives=drawn.x.view(B, -1, *batch.event_shape), **densities)


def keep_rows(pool: DrawPool, batch: Batch, **parts: Tensor) -> DrawPool:
    """The pool with a batch and what belongs to its rows, behind those written last, counted around."""
    B, P = len(batch), len(pool.x)
    at = (pool.written + torch.arange(B, device=batch.device)) % P
    parts = {"x": batch.x, **parts} | ({} if batch.given is None else _given_parts(pool, batch.given))
    last = max(0, B - P)  # of more rows than there are places the last ones stay
    new: dict[str, Any] = {k: pool._asdict()[k].index_copy(0, at[last:], v[last:]) for k, v in parts.items()}
    return pool._replace(written=pool.written + B, **new)


def drawn_rows(rows: DrawPool) -> Drawn:
    """Rows of a pool as a batch and its negatives."""
    log_prob = rows.log_prob if rows.log_prob.shape[1] else None
    own, others = (None, None) if log_prob is None else (log_prob[:, 0], log_prob[:, 1:].flatten())
    return Drawn(Batch(rows.x, given_of(rows)), Negatives(rows.negatives.flatten(0, 1), log_prob=others), own)


def given_of(pool: DrawPool) -> Tensor | None:
    """Contexts of a pool's rows, where there are any."""
    if pool.seen.shape[1]:
        return torch.cat([pool.given, pool.seen.to(pool.given.dtype) / 127.5 - 1], 1)
    return pool.given if pool.given[0].numel() else None


def _given_parts(pool: DrawPool, given: Tensor) -> dict[str, Tensor]:
    """Contexts as a pool keeps them: pictures, where they end with some, as bytes."""
    if not pool.seen.shape[1]:
        return {"given": given}
    numbers, pixels = given[:, : pool.given.shape[1]], given[:, pool.given.shape[1] :]
    return {"given": numbers, "seen": ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)}
