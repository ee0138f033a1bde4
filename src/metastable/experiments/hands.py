"""Several processes at one experiment: they share its trials, and the first does all else.

The others come when the first has trials to share. They run the experiment up to those, make the next that nobody
has begun until none is left, and take what the others made from where it is kept. When the first has done what
follows the last trial, they go. An experiment that is not made of trials is so done by the first alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from metastable.core import processes

if TYPE_CHECKING:
    from .base import Bench


class NoneLeft(BaseException):
    """The first process has no more trials to share, and what it does with them is its own."""


class Hands:
    """The processes of a group, as one of them sees them.

    Args:
        say: told of the trials that this process makes; the first also tells of all else.
    """

    def __init__(self, say: Callable[[str], None]):
        self.rank, self.count, self.round = processes.rank(), processes.count(), 0
        self.voice, self.speaks = say, self.rank == 0

    def say(self, text: str) -> None:
        """Words of an experiment that every process runs, said once."""
        if self.speaks:
            self.voice(text)

    def work(self, body: Callable[[Bench], Any], bench: Bench) -> Any:
        """What the first process makes of an experiment; the others help, and have nothing."""
        bench.finished.hands = self
        self.say(f"{self.count} processes share the trials; all that is no trial is done by the first")
        with processes.alone():
            if self.rank == 0:
                made = body(bench)
                processes.tell(self._key(self.round + 1), "none left")
                if not self.round:
                    self.say("there were no trials to share: the first process did everything")
                return made
            with TemporaryDirectory() as unread, suppress(NoneLeft):
                self.wait()
                body(replace(bench, folder=Path(unread)))
        return None

    def deal(self, n: int) -> Iterator[int]:
        """Which of `n` trials this process makes; it ends when all of them are done."""
        self.round += 1
        key = self._key(self.round)
        if self.rank == 0:
            processes.tell(key, "trials")
        self.speaks = True
        yield from processes.dealt(f"{key}: begun", n)
        self.speaks = False
        processes.exchanged(f"{key}: done")

    def wait(self) -> None:
        """The first goes on; the others do so when it has trials again."""
        self.speaks = self.rank == 0
        if self.rank > 0 and processes.told(self._key(self.round + 1)) == "none left":
            raise NoneLeft

    @staticmethod
    def _key(number: int) -> str:
        return f"trials, part {number}"
