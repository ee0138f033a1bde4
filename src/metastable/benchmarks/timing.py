"""Timing by turns: cases run one after the other in every round, so that a slow moment hits all of them.

Every second round runs them backwards, and every second pair of rounds begins with the next case, so that what one
case leaves behind (a warm cache, a slower clock) meets all of them as often, itself included.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from metastable.core.errors import require_count
from metastable.experiments.base import Row

PLACEABLE = hasattr(os, "sched_setaffinity")
"""Whether this system lets a process say which CPUs it runs on."""


@dataclass(frozen=True)
class Timings:
    """Seconds of each case in each round."""

    seconds: Mapping[str, list[float]]

    def median(self, case: str) -> float:
        """Median seconds of a case."""
        return statistics.median(self.seconds[case])

    def ratio(self, case: str, other: str) -> float:
        """Seconds of `case` over those of `other`: the median of the rounds' own ratios.

        >>> round(Timings({"a": [1.0, 2.0, 30.0], "b": [2.0, 4.0, 6.0]}).ratio("a", "b"), 6)
        0.5
        """
        pairs = zip(self.seconds[case], self.seconds[other], strict=True)
        return statistics.median(a / b for a, b in pairs)


def pooled(parts: Iterable[Timings]) -> Timings:
    """The rounds of several timings of the same cases.

    >>> pooled([Timings({"a": [1.0, 2.0]}), Timings({"a": [3.0]})]).seconds
    {'a': [1.0, 2.0, 3.0]}
    """
    parts = list(parts)
    return Timings({name: [s for part in parts for s in part.seconds[name]] for name in parts[0].seconds})


def rotated(names: Iterable[str], by: int) -> list[str]:
    """The same names, another one first.

    >>> rotated("abc", 1), rotated("abc", 3)
    (['b', 'c', 'a'], ['a', 'b', 'c'])
    """
    names = list(names)
    first = by % len(names)
    return names[first:] + names[:first]


def by_turns(cases: Mapping[str, Callable[[], Any]], rounds: int) -> Timings:
    """Time every case `rounds` times; warming up is the caller's business."""
    require_count("rounds", rounds)
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        order = rotated(names, turn // 2)
        for name in order if turn % 2 == 0 else order[::-1]:
            began = time.perf_counter()
            cases[name]()
            seconds[name].append(time.perf_counter() - began)
    return Timings(seconds)


@contextmanager
def on_cores(count: int | None) -> Iterator[None]:
    """Run on at most `count` CPUs with as many torch threads, and put both back; None changes nothing.

    Threads that exist already stay where they are: a library that starts its own on first use should be
    started inside.
    """
    if count is None:
        yield
        return
    require_count("cores", count)
    threads, placed = torch.get_num_threads(), _affinity()
    chosen = sorted(placed)[:count]
    _set_affinity(chosen)
    torch.set_num_threads(len(chosen) or count)
    try:
        yield
    finally:
        _set_affinity(placed)
        torch.set_num_threads(threads)


def _affinity() -> set[int]:
    return os.sched_getaffinity(0) if PLACEABLE else set()


def _set_affinity(cpus: Any) -> None:
    if cpus and PLACEABLE:
        os.sched_setaffinity(0, cpus)


def machine(**versions: str) -> list[Row]:
    """Where the numbers were taken: rows that cannot fail."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    facts: dict[str, Any] = {
        "cpus": len(_affinity()) or os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": load,
        "torch": torch.__version__,
        **versions,
    }
    return [Row(f"machine/{name}", value) for name, value in facts.items()]
