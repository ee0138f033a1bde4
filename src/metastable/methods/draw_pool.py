"""Draws of a proposal that serve many updates: the last rows with their negatives and densities."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from metastable.core.batch import Batch

from .base import Context, Negatives


class OnDensity(Protocol):
    """An energy that stands on the proposal of its method: network − log p_ξ."""

    network: nn.Module

    def attach(self, proposal: nn.Module) -> None:
        """Stand on this proposal."""
        ...


class DrawPool(NamedTuple):
    """P rows, written in order and over again.

    Attributes:
        x: data, `(P, *event)`.
        given: their contexts, `(P, *context)`, or `(P, 0)` where there are none.
        negatives: K for each, `(P, K, *event)`.
        log_prob: log p_ξ of the datum, then of its negatives, `(P, 1 + K)`; `(P, 0)` where nobody needs them.
        written: rows that were ever written, int64 `()`: it lies on the device, so that updates can be recorded.
    """

    x: Tensor
    given: Tensor
    negatives: Tensor
    log_prob: Tensor
    written: Tensor


class Drawn(NamedTuple):
    """Rows of the pool: data with their log-density, and their negatives with theirs."""

    batch: Batch
    negatives: Negatives
    log_prob: Tensor | None


def empty_pool(context: Context, rows: int, K: int, weighs: bool) -> DrawPool:
    """A pool for data like the context's."""
    x, given = context.data, context.given
    beside = (0,) if given is None else tuple(given.shape[1:])
    return DrawPool(
        x.new_zeros(rows, *x.shape[1:]),
        (x if given is None else given).new_zeros(rows, *beside),
        x.new_zeros(rows, K, *x.shape[1:]),
        x.new_zeros(rows, 1 + K if weighs else 0),
        torch.zeros((), dtype=torch.int64, device=x.device),
    )


def kept_pool(tree: dict[str, Any]) -> DrawPool:
    """A pool as a checkpoint has it; earlier releases did not say how many rows were written."""
    filled = (tree["x"].flatten(1) != 0).any(1).sum()
    return DrawPool(**{"written": filled, **tree})


def keep_draws(pool: DrawPool, batch: Batch, drawn: Negatives, log_prob: Tensor | None) -> DrawPool:
    """The pool with a batch and its negatives, row by row, behind those written last, counted around."""
    B, P = len(batch), len(pool.x)
    at = (pool.written + torch.arange(B, device=batch.device)) % P
    parts: dict[str, Any] = {"x": batch.x, "negatives": drawn.x.view(B, -1, *batch.event_shape)}
    if batch.given is not None:
        parts["given"] = batch.given
    if log_prob is not None and drawn.log_prob is not None:
        parts["log_prob"] = torch.cat([log_prob[:, None], drawn.log_prob.view(B, -1)], 1)
    last = max(0, B - P)  # of more rows than there are places the last ones stay
    new = {k: pool._asdict()[k].index_copy(0, at[last:], v[last:]) for k, v in parts.items()}
    return pool._replace(written=pool.written + B, **new)


def drawn_rows(pool: DrawPool, n: int, filled: int, rng: torch.Generator) -> Drawn:
    """`n` of the first `filled` rows, with replacement."""
    at = torch.randint(filled, (n,), generator=rng, device=pool.x.device)
    given = pool.given[at] if pool.given[0].numel() else None
    log_prob = pool.log_prob[at] if pool.log_prob.shape[1] else None
    own, others = (None, None) if log_prob is None else (log_prob[:, 0], log_prob[:, 1:].flatten())
    return Drawn(Batch(pool.x[at], given), Negatives(pool.negatives[at].flatten(0, 1), log_prob=others), own)
