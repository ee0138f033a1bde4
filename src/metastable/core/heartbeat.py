"""Processes that watch each other, so that one that dies ends the others soon, and by its name.

Every process counts in the group's store, a few times a second, and each looks at the next one's count. Where a
message between processes fails, the one whose count has stopped is to blame; where messages only wait, as those
between GPUs may, a count that has stopped for a minute is.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Self

import torch.distributed as dist

BEAT = 0.25
"""Seconds between two beats."""
SILENT = 60.0
"""Seconds without one after which a process counts as dead though nothing has failed: much longer than anything
holds up a living one."""
LISTEN = 3.0
"""Seconds for which beats are listened to, once something has failed."""
GRACE = 10.0
"""Seconds that the program has to end by itself once somebody is dead."""
DEAD = "dead"
GONE = "it held the processes together, and is gone"


def _key(rank: int) -> str:
    return f"beat {rank}"


class Heartbeat:
    """Beats and watches in a thread of its own, while the program is within.

    Args:
        store: of the group.
        rank: of this process.
        count: of all of them.
    """

    def __init__(self, store: Any, rank: int, count: int):
        self.store, self.rank, self.count = store, rank, count
        self.heard: tuple[int, str] | None = None
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        if in_memory(self.store):  # a store in a file would grow with every beat
            self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()

    def leave(self, why: str) -> None:
        """Say that this process ends by an error of its own, unless nobody is there to hear it."""
        # whoever held the store has ended, and the error of this process is what counts
        with suppress(RuntimeError):
            if not self.store.check([DEAD]):
                self.store.set(DEAD, f"{self.rank} {why}")

    def _run(self) -> None:
        beat, heard, since = 0, b"", time.monotonic()
        after = (self.rank + 1) % self.count
        while not self.done.wait(BEAT):
            try:
                beat += 1
                self.store.set(_key(self.rank), str(beat))
                said = self.store.get(_key(after)) if self.store.check([_key(after)]) else b""
                if said != heard:
                    heard, since = said, time.monotonic()
                elif heard and time.monotonic() - since > SILENT and not self.store.check([DEAD]):
                    self.store.set(DEAD, f"{after} it was silent for {SILENT:.0f} s")
                who = blamed(self.store)
            except RuntimeError:  # the store is gone, and whoever held it
                who = (0, GONE)
            if who is not None:
                self.heard = who
                self._end(*who)
                return

    def _end(self, rank: int, why: str) -> None:
        """The program hears of it at its next message; one that waits in a message for ever is ended."""
        if rank != self.rank and not self.done.wait(GRACE):
            print(
                f"error: process {rank} ended: {why}; process {self.rank} ends, too",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)


def in_memory(store: Any) -> bool:
    """Whether a store lies in the memory of some process."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore)


def blamed(store: Any, rank: int | None = None, count: int = 0) -> tuple[int, str] | None:
    """Who is known to be dead, and why; a `rank` that has lost touch listens for beats of all `count`."""
    try:
        if rank is None:
            return _dead(store)
        who = _silent(store, rank, count)
        store.set(f"heard {rank}", "")
        others = [f"heard {i}" for i in range(count) if who is None or i != who[0]]
        end = time.monotonic() + LISTEN
        # the first may hold the store, in which others have yet to read who it was
        while rank == 0 and time.monotonic() < end and not store.check(others):
            time.sleep(BEAT)
        return who
    except RuntimeError:
        return (0, GONE) if rank else None


def _dead(store: Any) -> tuple[int, str] | None:
    if not store.check([DEAD]):
        return None
    who, _, why = store.get(DEAD).decode().partition(" ")
    return int(who), why


def _silent(store: Any, rank: int, count: int) -> tuple[int, str] | None:
    """Whose beats have stopped, or who was said to be dead meanwhile; None where nobody beats."""
    before, end = _counts(store, count), time.monotonic() + LISTEN
    while time.monotonic() < end:
        if (who := _dead(store)) is not None:
            return who
        time.sleep(BEAT)
    still = [i for i, (a, b) in enumerate(zip(before, _counts(store, count), strict=True)) if a == b]
    if not still or rank in still:
        return None
    if _dead(store) is None:
        store.set(DEAD, f"{still[0]} it died without a word")
    return _dead(store)


def _counts(store: Any, count: int) -> list[bytes]:
    return [store.get(_key(i)) if store.check([_key(i)]) else b"" for i in range(count)]
