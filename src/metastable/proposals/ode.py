"""dx/dt = v_t(x) by Heun's rule, and ∫ div v dt by the trapezoidal rule at some of its times.

States are tiles `(B, K, d)`: K rows for each of B contexts. Times are `(N + 1,)`, or `(N + 1, B, 1)` or
`(N + 1, B, K)` where rows have times of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from metastable.core.errors import InputError
from metastable.core.waiting import may_look

from .fields import VectorField, Velocity
from .tiles import Solution, tiled


def heun(
    field: VectorField, x: Tensor, code: Tensor | None, times: Tensor, keep: Sequence[int] | None = None
) -> Tensor:
    """States of dx/dt = v_t(x), (5.2) and (6.1), by Heun's rule from `times[0]` through all of `times`.

    Args:
        field: v.
        x: where it starts, `(B, K, d)`.
        code: encoded contexts, `(B, 1, c)`.
        times: `(N + 1,)`, or `(N + 1, B, 1)` or `(N + 1, B, K)` where rows have times of their own; forwards or
            backwards.
        keep: which of the N + 1 states to return; all of them by default.

    Returns:
        `(len(keep), B, K, d)`.
    """
    keep = range(len(times)) if keep is None else keep
    lengths = times.diff(dim=0)[..., None]
    wanted, states = set(keep), {0: x}
    for i, (here, after) in enumerate(itertools.pairwise(field.velocities(code, times))):
        x = heun_step(here, after, x, lengths[i])
        if i + 1 in wanted:
            states[i + 1] = x
    return torch.stack([states[i] for i in keep])


def heun_step(here: Velocity, after: Velocity, x: Tensor, length: Tensor) -> Tensor:
    """x + h/2 (v_t(x) + v_{t+h}(x + h v_t(x))), with v_t = `here` and v_{t+h} = `after`."""
    v = here(x)
    ahead = after(torch.addcmul(x, length, v))
    return torch.addcmul(x, length, v + ahead, value=0.5)


def coarse_subset(steps: int, count: int) -> list[int]:
    """`count` of the nodes 0 … `steps`, evenly spread, both ends among them; all of them if there are no more.

    >>> coarse_subset(10, 3)
    [0, 5, 10]
    """
    return list(range(steps + 1)) if count > steps else [round(i * steps / (count - 1)) for i in range(count)]


@cache
def coarse_nodes(steps: int, count: int, device: torch.device) -> Tensor:
    """`coarse_subset` on a device, copied there once and never dropped: recorded graphs read it where it lies."""
    return torch.tensor(coarse_subset(steps, count), device=device)


def divergences(field: VectorField, states: Tensor, code: Tensor | None, times: Tensor, chunk: int) -> Tensor:
    """div v at kept states, `(L, B, K, d)` to `(L, B, K)`, as many at once as `chunk` directions allow."""

    def one(x: Tensor, code: Tensor | None, t: Tensor, first: int) -> Solution:
        return x[..., :0], field.divergence(x, code, field.clock(t))

    if states[0].numel() > max(chunk, states.shape[-1]):
        parts = (tiled(one, x, code, t, chunk)[1] for x, t in zip(states, times, strict=True))
        return torch.stack(list(parts))
    aligned = times.view(*times.shape, 1, 1) if times.dim() == 1 else times
    at_once = max(1, chunk // 2 // max(1, states[0].numel()))  # old and new in cache together
    parts = zip(states.split(at_once), aligned.split(at_once), strict=True)
    return torch.cat([field.divergence(x, code, field.clock(t)) for x, t in parts])


def trapezoid(values: Tensor, times: Tensor) -> Tensor:
    """∫ values dt up to each of the times, by the trapezoidal rule: `(L, B, K)`, zero at the first."""
    lengths = times.diff(dim=0)
    lengths = lengths.view(*lengths.shape, 1, 1) if times.dim() == 1 else lengths
    pieces = 0.5 * lengths * (values[1:] + values[:-1])
    return torch.cat([torch.zeros_like(values[:1]), pieces.cumsum(0)])


def solve(
    field: VectorField,
    x: Tensor,
    code: Tensor | None,
    times: Tensor,
    keep: Sequence[int] | None = None,
    first: int = 0,
) -> Tensor:
    """`heun`, refused where it leaves every finite region; `first` is the number of the first context."""
    states = heun(field, x, code, times, keep)
    if may_look(states) and not bool(states[-1].isfinite().all()):
        with torch.no_grad():  # once more, with everything kept, to say where it began
            require_finite(heun(field, x, code, times), times, "the flow", first)
    return states


def require_finite(values: Tensor, times: Tensor, what: str, first: int) -> None:
    """Name the time and the context where `values`, `(L, B, K, d)`, are not finite for the first time."""
    if not may_look(values) or bool(values.isfinite().all()):
        return
    bad = ~values.isfinite().all(-1)
    node, row, draw = (int(i) for i in bad.nonzero()[0])
    t = float(times[node].expand(bad.shape[1:])[row, draw])
    raise InputError(
        f"{what} is not finite at t = {t:.4g}, first in context {first + row}, row {draw}; look for such values "
        "in the contexts and the weights, lower the learning rate, or raise steps"
    )
