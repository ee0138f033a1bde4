"""Many rows through an ODE, a tile of them at a time, so that memory does not grow with their number."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Solution = tuple[Tensor, Tensor]
"""States `(B, …, K, d)` and log-densities `(B, …, K)`."""
Solver = Callable[[Tensor, Tensor | None, Tensor, int], Solution]
"""From rows `(B, K, d)`, encoded contexts, times and the number of the first context."""
LIGHT = 64
"""So many kept states of a row are as much to remember as that row in one layer of a network."""
FAST_MEMORY, DEVICE_MEMORY = 2**13, 2**22
"""Rows times dimensions at once, for layers of usual width: what a CPU's caches hold; else a gigabyte."""


def tiled(
    solve: Solver, x: Tensor, code: Tensor | None, t: Tensor, numbers: int, states: int = 1
) -> Solution:
    """`solve` on tiles of the rows.

    Args:
        solve: of one tile.
        x: rows, `(B, K, d)`.
        code: encoded contexts, `(B, 1, c)`.
        t: `()`, `(B, 1)` or, of trajectories, `(B, 1, m)` for a context's time; `(B, K)` for an event's.
        numbers: rows times dimensions that are in memory at once.
        states: of a row that are remembered.
    """
    B, K, d = x.shape
    limit = max(1, numbers * LIGHT // (max(states, LIGHT) * d))
    contexts, own_time = max(1, limit // max(1, K)), t.dim() == 2 and t.shape[1] > 1
    done = []
    for i in range(0, max(1, B), contexts):
        rows = slice(i, min(i + contexts, B))
        code_i, t_i = None if code is None else code[rows], t[rows] if t.dim() else t
        parts = []
        for k in range(0, max(1, K), limit):
            draws = slice(k, min(k + limit, K))
            parts.append(solve(x[rows, draws], code_i, t_i[:, draws] if own_time else t_i, i))
        done.append((torch.cat([p[0] for p in parts], -2), torch.cat([p[1] for p in parts], -1)))
    return torch.cat([p[0] for p in done]), torch.cat([p[1] for p in done])
