"""Memory that tensors on the CPU gave back stays with the process while a model trains.

An update makes and frees the same tensors again and again. Those of megabytes glibc asks the system for each time,
which has to fill every page with zeros before it is seen for the first time: with 16,384 walkers that was a seventh
of an update's time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

TRIM, PAD, MAPPED = -1, -2, -3
"""Of glibc's malloc.h: what is free at the end before it goes back, what is asked for beyond need, and from which
size on memory is asked for by itself."""
LARGE, CHUNK = 1 << 30, 1 << 25
"""Bytes that may lie free, and the largest size that glibc lets lie among others."""
SAID = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""How a user says something else."""
_inside = 0


@contextmanager
def kept() -> Iterator[None]:
    """Keep what is freed inside, up to a gigabyte, and give it back at the end.

    Nothing changes without glibc, nor where torch has a malloc of its own, as its builds for ARM have.

    >>> with kept():
    ...     pass
    """
    global _inside
    libc = None if any(name in os.environ for name in SAID) else _libc()
    _inside += 1
    if libc is not None and _inside == 1:
        _set(libc, LARGE, CHUNK)
    try:
        yield
    finally:
        _inside -= 1
        if libc is not None and _inside == 0:
            _set(libc, 2 * CHUNK, 1 << 17)  # to where glibc's own rule leads, which ends with the first word
            libc.malloc_trim(0)


def _set(libc: ctypes.CDLL, free: int, beyond: int) -> None:
    for name, value in ((MAPPED, CHUNK), (TRIM, free), (PAD, beyond)):
        libc.mallopt(name, value)


def _libc() -> ctypes.CDLL | None:
    """The process's own, where it is glibc."""
    if os.name != "posix":
        return None
    libc = ctypes.CDLL(None)
    known = all(hasattr(libc, name) for name in ("gnu_get_libc_version", "mallopt", "malloc_trim"))
    return libc if known else None
