"""Ctrl-C while training."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `stop`, which ends training after the update in flight; the second raises at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: Any) -> None:
        stop()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
