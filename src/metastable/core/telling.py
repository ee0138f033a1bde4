"""Long work says how far it is to whoever listens; where nobody does, saying so costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, int, int], None]
"""Told of what is being done, how much of it is, and how much there is."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """`listener` is told of all long work within.

    >>> with listening(print):
    ...     total = sum(counted("adding", 3))
    adding 1 3
    adding 2 3
    adding 3 3
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def counted(what: str, n: int) -> Iterator[int]:
    """0 to n − 1, each told of when the work on it is done."""
    for k in range(n):
        yield k
        listener = _listener.get()
        if listener is not None:
            listener(what, k + 1, n)
