"""Functions of many rows in memory that does not grow with their number, and where a module has its rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .memory import rows_at_once

NUMBERS = 1 << 20
"""Numbers of input in one part: a thousand small images, or half a million points of the plane."""


def in_parts(function: Callable[[Tensor], Tensor], x: Tensor, numbers: int = NUMBERS) -> Tensor:
    """`function`, `(B, *event)` to `(B, …)`, over the rows of `x`, a part at a time and without gradients.

    A part is `numbers` of input, or what memory holds where that is less.

    >>> in_parts(lambda part: part.sum(1), torch.ones(5, 2), numbers=4)
    tensor([2., 2., 2., 2., 2.])
    """
    rows = rows_at_once(function, x, max(1, numbers // max(1, x[:1].numel())))
    with torch.no_grad():
        return torch.cat([function(part).detach() for part in x.split(rows)])


def energies_of(energy: Callable[[Tensor], Tensor], x: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Energies of the rows in float64, `(N,)`, or of those that are chosen by number, which are not copied."""
    if chosen is None:
        return in_parts(energy, x).double()
    return in_parts(lambda rows: energy(x[rows]), chosen, max(1, NUMBERS // max(1, x[:1].numel()))).double()


def column_moments(x: Tensor, columns: int = 256) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (of the rows as they are) of every number of an event, float64 `(d,)`.

    So many columns at a time: rows of images in double precision can be more than the memory holds.

    >>> column_moments(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))[1]
    tensor([1., 0.], dtype=torch.float64)
    """
    mean, std = [], []
    for part in x.flatten(1).split(columns, 1):
        wide = part.double()
        mean.append(wide.mean(0))
        std.append(wide.std(0, correction=0))
    return torch.cat(mean), torch.cat(std)


def home_of(module: Any) -> Tensor:
    """A tensor with the dtype and device that a module works in; an empty one of the defaults for anything else."""
    tensors = chain(module.parameters(), module.buffers()) if isinstance(module, nn.Module) else ()
    return next((t for t in tensors if t.is_floating_point()), torch.empty(0))
