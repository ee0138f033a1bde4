"""Ctrl-C while training, and SIGTERM, which clusters and `timeout` send."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_on_interrupt(stop: Callable[[int], None]) -> Iterator[None]:
    """The first signal calls `stop` with its number: training ends after this update. The second acts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def interrupt(number: int, frame: Any) -> None:
        stop(number)
        put_back()

    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        put_back()
