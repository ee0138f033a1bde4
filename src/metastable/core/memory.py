"""What fits into memory: rows that go through an energy together, and words where something did not fit.

Outside training nobody says how many rows an energy is given at once, so that it is decided here: as many as memory
holds. What fits goes through in one part, as if nobody had asked. Rows of an energy must not depend on each other,
which is looked at before they are parted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from .errors import InputError, OutOfMemoryError
from .room import free_bytes

SHARE = 0.5
"""Of the memory that is free, which one pass through an energy may take."""
OVERHEAD = 4
"""Bytes of a pass for each byte that it keeps for its way back: gradients, and what operations need meanwhile."""
PROBE = 7
"""Rows that a pass is measured with; no layer is as narrow, so that a parameter is not taken for an activation."""
SMALL = 1 << 16
"""Numbers of input up to which nobody asks: a few megabytes, whatever the energy."""
FULL = ("out of memory", "not enough memory", "can't allocate memory", "defaultcpuallocator")

_at_once: ContextVar[int | None] = ContextVar("at_once", default=None)


def ran_out(error: BaseException) -> bool:
    """Whether it says that memory was not enough, on whichever device: on the CPU torch has no error of its own.

    >>> ran_out(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate …"))
    True
    >>> ran_out(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in FULL)


def rows_in_words(x: Tensor, what: str = "rows") -> str:
    """How many, of which shape, and where.

    >>> rows_in_words(torch.zeros(64, 3, 32, 32), "chains")
    '64 chains of shape (3, 32, 32) in float32 on cpu'
    """
    return f"{len(x)} {what} of shape {tuple(x.shape[1:])} in {str(x.dtype)[6:]} on {x.device}"


@contextmanager
def within_memory(
    part: str | Callable[[], str], batch: Tensor | Callable[[], str], lower: Mapping[str, Any]
) -> Iterator[None]:
    """What stands inside must fit: where it does not, `OutOfMemoryError` says which batch of which part.

    Args:
        part: what is being done, or what says it when it is asked.
        batch: rows, or what says in words what is held at once; a part within this one knows it better.
        lower: settings to lower, with their values; those that are None are not in use.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        settings = " or ".join(f"{name}={value}" for name, value in lower.items() if value is not None)
        name = part if isinstance(part, str) else part()
        if isinstance(error, OutOfMemoryError):  # this part knows the settings, that one what it held
            raise OutOfMemoryError(name, error.batch, settings, error.why) from error.__cause__
        words = rows_in_words(batch) if isinstance(batch, Tensor) else batch()
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OutOfMemoryError(name, words, settings, why) from error


def kept_for_backward(energy: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Bytes that one row of a forward pass keeps until the backward pass."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.shape[0] == len(x):
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        energy(x.detach().requires_grad_(True))
    return sum(sizes.values()) // len(x)


def rows_at_once(energy: Callable[[Tensor], Tensor], x: Tensor, most: int | None = None) -> int:
    """Rows of `x` that may go through an energy together: all, or `most`, where memory holds them.

    Measured with a few rows, of which a pass keeps so many bytes each; memory is what is free now.
    """
    most = len(x) if most is None else min(most, len(x))
    free = free_bytes(x.device) if x[:1].numel() * most > SMALL and x.is_floating_point() else math.inf
    if free == math.inf:
        return max(1, most)
    some = x[:PROBE]
    try:
        row = 2 * some[0].numel() * some.element_size() + kept_for_backward(energy, some)
        able = int(SHARE * free / (OVERHEAD * row))
        return max(1, most if able >= most or not _apart(energy, some) else able)
    except InputError:  # rows that belong to contexts by their order, of which there are other numbers
        return max(1, most)


@torch.no_grad()
def _apart(energy: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether rows give the same alone: those that belong to contexts by their order do not."""
    unlike = x + 0.1 * torch.arange(len(x), device=x.device).view(-1, *[1] * (x.dim() - 1))
    parts = torch.cat([energy(part) for part in unlike.split(max(1, len(x) // 2))])
    return torch.allclose(parts, energy(unlike), rtol=1e-3, atol=1e-3, equal_nan=True)


@contextmanager
def in_rows_that_fit(energy: Callable[[Tensor], Tensor], x: Tensor) -> Iterator[None]:
    """Inside, gradients of energies are made for so many rows at once as fit (`core.types.energy_and_grad`)."""
    rows = rows_at_once(energy, x)
    token = _at_once.set(None if rows >= len(x) else rows)
    try:
        yield
    finally:
        _at_once.reset(token)


def part_of(x: Tensor) -> int | None:
    """Rows of `x` that one pass may take; None for all of them."""
    rows = _at_once.get()
    return rows if rows is not None and rows < len(x) else None
