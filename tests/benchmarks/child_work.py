"""Work for a process of its own; nothing heavy is imported, so that its memory is what it asks for."""

from __future__ import annotations


def hold(megabytes: int) -> None:
    assert len(b"x" * (megabytes * 1_000_000)) > 0


def fail() -> None:
    raise RuntimeError("out of cheese")


def double(value: int) -> int:
    return 2 * value
