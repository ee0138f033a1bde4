"""Many rows through an ODE, a tile of them at a time, so that memory does not grow with their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Solution = tuple[Tensor, Tensor]
"""States `(B, …, K, d)` and log-densities `(B, …, K)`."""
Solver = Callable[[Tensor, Tensor | None, Tensor, int], Solution]
"""From rows `(B, K, d)`, encoded contexts, times and the number of the first context."""
LIGHT = 64
"""So many kept states of a row are as much to remember as that row in one layer of a network."""
FAST_MEMORY, DEVICE_MEMORY = 2**13, 2**22
"""Rows times dimensions at once, for layers of usual width: what a CPU's caches hold; else a gigabyte."""
HOST_BYTES, SHARE = 2**28, 0.25
"""What wider networks may take of a host's memory at once, and of a device's that is free."""


class _Held(TorchDispatchMode):
    """Counts the bytes of what operations made and nobody has let go of."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            for memory in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)):
                if memory._cdata not in self.known:
                    self.known[memory._cdata] = memory.nbytes()
                    finalize(memory, self.known.pop, memory._cdata, 0)
            self.peak = max(self.peak, sum(self.known.values()))
        return out


@torch.no_grad()
def bytes_held(function: Callable[[], Any]) -> int:
    """The most bytes that `function` holds at a time, of what it makes.

    >>> x = torch.ones(8)
    >>> bytes_held(lambda: (x + 1).mul(2).add(3).mul(4))
    64
    """
    with _Held() as held:
        function()
    return held.peak


def at_once(most: int, one: int, device: torch.device) -> int:
    """How many things of `one` byte number each are in memory at once: `most`, or a power of two below that."""
    room = HOST_BYTES
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        room = int(SHARE * (torch.cuda.mem_get_info(device)[0] + unused))
    fit = max(1, room // max(1, one))
    return most if fit >= most else 2 ** (fit.bit_length() - 1)


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
