"""Looks at numbers on an accelerator, each of which waits until everything asked of it before is done.

A check such as `bool(x.isfinite().all())` costs nothing on the CPU. On an accelerator the host stops until the
device has caught up, and the device then idles until the host is ahead again; where processes share a device, each
look also waits for the others' turns. A loop of many short updates therefore looks now and then only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_unwatched: ContextVar[bool] = ContextVar("unwatched", default=False)


@contextmanager
def unwatched(really: bool = True) -> Iterator[None]:
    """Leaves out checks of numbers that lie on an accelerator; on the CPU, and where not `really`, all are made.

    >>> import torch
    >>> with unwatched():
    ...     may_look(torch.zeros(1)), may_look(torch.zeros(1, device="meta"))
    (True, False)
    """
    token = _unwatched.set(really or _unwatched.get())
    try:
        yield
    finally:
        _unwatched.reset(token)


def may_look(values: Tensor) -> bool:
    """Whether a check may read these numbers: they are on the host, or waiting for them is allowed."""
    return values.device.type == "cpu" or not _unwatched.get()
