"""Trials that are done, each kept the moment it is, so that a command that was stopped goes on where it was.

A file is taken only by a command with the same experiment, scale, seed, settings, device, versions and code, for
the same trial: what comes out is then equal to the bit to what a command that was not stopped gives. What a file
holds is numbers and arrays, and nothing in it runs.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from metastable._version import __version__
from metastable.core.configure import describe
from metastable.core.errors import InputError, UnsupportedError

from .hands import Hands
from .pieces import Pieces

T = TypeVar("T")
Arrays = dict[str, np.ndarray]
APART = ("benchmarks", "cli", "report")
"""Rooms on whose code no trial depends."""


# ---- values as JSON and arrays

KINDS: Mapping[str, type] = {"$tensor": Tensor, "$array": np.ndarray, "$scalar": np.generic}


def is_object(value: Any) -> bool:
    """Whether it is an array of Python's own objects, which a file would have to run code to bring back."""
    return isinstance(value, np.ndarray) and value.dtype.hasobject


def parted(value: Any, arrays: Arrays, records: Sequence[type] = ()) -> Any:
    """A value as JSON can hold it; its arrays and tensors go into `arrays`.

    Of classes, only named tuples and dataclasses in `records` are known.

    >>> arrays = {}
    >>> parted({"kl": 0.5, "x": (torch.zeros(2), None)}, arrays), list(arrays)
    ({'kl': 0.5, 'x': {'$tuple': [{'$tensor': 'array_0'}, None]}}, ['array_0'])
    """
    if type(value) in records:
        own = vars(value) if is_dataclass(value) else value._asdict()
        return {"$record": type(value).__name__, "fields": parted(own, arrays, records)}
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return float(value)
        case Tensor() | np.ndarray() | np.generic() if not is_object(value):
            kind = next(word for word, known in KINDS.items() if isinstance(value, known))
            name = f"array_{len(arrays)}"
            arrays[name] = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.array(value)
            return {kind: name}
        case Mapping() if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: parted(one, arrays, records) for key, one in value.items()}
        case list():
            return [parted(one, arrays, records) for one in value]
        case tuple() if type(value) is tuple:
            return {"$tuple": [parted(one, arrays, records) for one in value]}
    raise UnsupportedError(f"keep: a {type(value).__name__} cannot be kept of a trial; name it in `records`")


def joined(value: Any, arrays: Mapping[str, np.ndarray], records: Sequence[type] = ()) -> Any:
    """The value that `parted` took apart; tensors on the CPU."""
    match value:
        case list():
            return [joined(one, arrays, records) for one in value]
        case {"$tuple": list(items)}:
            return tuple(joined(items, arrays, records))
        case {"$array": name}:
            return arrays[name]
        case {"$scalar": name}:
            return arrays[name][()]
        case {"$tensor": name}:
            return torch.from_numpy(arrays[name])
        case {"$record": name, "fields": own}:
            return {kind.__name__: kind for kind in records}[name](**joined(own, arrays, records))
        case dict():
            return {key: joined(one, arrays, records) for key, one in value.items()}
    return value


# ---- files


@functools.cache
def code() -> str:
    """Sixteen hexadecimal digits of the sources that a trial depends on."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] not in APART:
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def failed(future: Future[Any]) -> bool:
    """Whether nothing came of it."""
    return future.cancelled() or future.exception() is not None


def by_itself() -> None:
    """One thread, none of the processes that a launcher started, and no longer there than who began it."""
    torch.set_num_threads(1)
    os.environ.pop("RANK", None)
    Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """End this process when the one that began it ends, however it does: nobody waits for what it makes."""
    if (parent := parent_process()) is not None:
        wait([parent.sentinel])
        os._exit(1)


@contextmanager
def processes(count: int) -> Iterator[Executor]:
    """As many of one thread each; after an error or Ctrl-C, what has not begun does not begin."""
    with ProcessPoolExecutor(count, get_context("spawn"), by_itself) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@dataclass
class Finished:
    """The trials of an experiment that are done.

    Attributes:
        folder: where they are kept; None keeps none.
        settings: what all of them are made with.
        say: told which files are not taken, and why.
        begun: trials that were asked for.
        seconds: what those that were taken had needed.
        last: when the last one was done, or all began: what is done next took the time since then.
        hands: the processes that share trials; None where there is one.
    """

    folder: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    say: Callable[[str], None] = lambda text: None
    begun: int = 0
    seconds: float = 0.0
    last: float = field(default_factory=time.perf_counter)
    hands: Hands | None = None

    def slot(self, name: str, records: Sequence[type] = (), **about: Any) -> Slot:
        """The place of the next trial: its number and name are the file's, and `about` is what sets it apart."""
        self.begun += 1
        label = re.sub(r"[^\w.=+-]+", "-", name, flags=re.ASCII)
        return Slot(self, f"{self.begun:03d}-{label}", records, {"trial": name, **describe(about)})

    def once(
        self, name: str, make: Callable[[], T], records: Sequence[type] = (), **about: Any
    ) -> tuple[T, bool]:
        """What `make` gives, or what it gave before the command was stopped; and whether it was before."""
        slot = self.slot(name, records, **about)
        if (known := slot.find()) is not None:
            return known, True
        slot.keep(made := make())
        return made, False

    def each(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What every call gives, of which each asks for one trial; several processes share them.

        A process makes the next trial that nobody has begun. What others made it takes from where that is kept.
        """
        if self.hands is None:
            return [call() for call in calls]
        begun, made = self.begun, dict[int, T]()

        def call(i: int) -> None:
            self.begun, self.last = begun + i, time.perf_counter()
            made[i] = calls[i]()

        for i in self.hands.deal(len(calls)):
            call(i)
        seconds = self.seconds
        for i in range(len(calls)):
            if i not in made:
                call(i)
        self.begun, self.seconds = begun + len(calls), seconds  # others count what they took
        self.hands.wait()
        return [made[i] for i in range(len(calls))]

    def submit(
        self, pool: Executor, name: str, function: Callable[..., T], *given: Any, records: Sequence[type] = ()
    ) -> Future[T]:
        """What a function gives in another process, kept the moment that it is there; or what it gave before."""
        slot, future = self.slot(name, records, given=given), Future[T]()
        if (known := slot.find()) is not None:
            self.say(f"{name}: made before")
            future.set_result(known)
            return future
        future = pool.submit(function, *given)
        future.add_done_callback(lambda done: None if failed(done) else slot.keep(done.result()))
        return future


@dataclass(frozen=True)
class Slot:
    """The place of one trial, in which it is found or put."""

    finished: Finished
    name: str
    records: Sequence[type]
    about: Mapping[str, Any]

    @property
    def pieces(self) -> Pieces | None:
        """The folder, for files of just this trial."""
        if self.finished.folder is None:
            return None
        versions = {"version": __version__, "torch": torch.__version__, "code": code()}
        return Pieces(self.finished.folder, {**versions, **self.finished.settings, **self.about})

    def find(self) -> Any:
        """What was kept of the trial; None where it was not, and where it was made otherwise or is damaged."""
        if self.pieces is None:
            return None
        try:
            if (piece := self.pieces.find(self.name)) is None:
                return None
            value = joined(piece.numbers["value"], piece.arrays, self.records)
            self.finished.seconds += piece.numbers["seconds"]
        except (InputError, KeyError, TypeError) as error:
            self.finished.say(f"{self.name} is made anew: {error}")
            return None
        return value

    def keep(self, value: Any) -> None:
        """Put a trial that is done."""
        if self.pieces is not None:
            arrays: Arrays = {}
            before, self.finished.last = self.finished.last, time.perf_counter()
            seconds = self.finished.last - before
            try:
                numbers = {"seconds": seconds, "value": parted(value, arrays, self.records)}
            except (UnsupportedError, TypeError) as error:  # its numbers are right, so that all goes on
                self.finished.say(f"{self.name} is not kept: {error}")
            else:
                self.pieces.keep(self.name, numbers, arrays)
