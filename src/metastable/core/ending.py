"""What a Ctrl-C that meets a training ends: that training, or the whole program that it is a part of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_all: ContextVar[bool] = ContextVar("all", default=False)


@contextmanager
def ending_all() -> Iterator[None]:
    """Within, a signal ends more than the training that it meets, which raises `KeyboardInterrupt` once it is kept.

    For programs of many trainings, which would take one that was stopped for one that is done.
    """
    before = _all.set(True)
    try:
        yield
    finally:
        _all.reset(before)


def ends_all() -> bool:
    """Whether it does."""
    return _all.get()
