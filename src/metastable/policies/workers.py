"""Environments in several processes, which step at the same time: each has a share of the starts, and one thread.

Numbers are those of one process. Processes are spawned: `make` is sent to them, and they know nothing of a GPU.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.core.errors import InputError, MetastableError, ProcessError, require_count, short

from .environments import SEVERAL, Environments, Seen, foreign

GRACE = 5.0
"""Seconds in which a process may end by itself once nothing more is asked of it."""
Make = Callable[[Sequence[Any]], Environments]


def work(pipe: Any, given: bytes, first: int) -> None:
    """What a process does: environments from `first` on, reset at None and stepped by actions that come in."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    os.environ.setdefault("OPENCV_FOR_THREADS_NUM", "1")  # of what draws pictures
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):  # nobody asks any more
        try:
            with foreign(f"workers: making environments from {first} on"):
                make, starts = pickle.loads(given)
                worlds = make(starts)
                worlds.first = first
                answer: Any = (worlds.name, worlds.measure, *(bound.numpy() for bound in worlds.box))
            with closing(worlds):
                while True:
                    pipe.send(answer)
                    asked = pipe.recv()
                    with foreign(f"{worlds.name}: environments from {first} on"):
                        seen = worlds.reset() if asked is None else stepped(worlds, *asked)
                        rows = {key: value.numpy() for key, value in seen.items()}
                        left = seen.left_out if isinstance(seen, Seen) else {}
                        answer = (rows, left, worlds.done, worlds.progress.numpy(), worlds.success)
        except (MetastableError, MemoryError) as error:
            pipe.send(error)


def stepped(worlds: Environments, actions: np.ndarray, looked: bool) -> dict[str, Tensor]:
    """What is seen after a step."""
    worlds.looked = looked
    return worlds.step(torch.from_numpy(actions))


class Workers:
    """What `rollout` asks of `Environments`, asked of several processes; `spread` begins and ends them."""

    looked: bool = True

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.pipes: list[Any] = []
        self.said: list[Any] = []

    def begin(self, make: Make, starts: Sequence[Any], count: int) -> None:
        """As many processes, each with environments of its own."""
        self.ends = [len(starts) * k // count for k in range(count + 1)]
        shares = [slice(*ends) for ends in zip(self.ends[:-1], self.ends[1:], strict=True)]
        given = [_packed(make, starts[share]) for share in shares]
        context = get_context("spawn")
        for share, packed in zip(shares, given, strict=True):
            here, there = context.Pipe()
            self.pipes.append(here)
            process: Any = context.Process(target=work, args=(there, packed, share.start), daemon=True)
            process.start()
            self.processes.append(process)
            there.close()  # so that a process that is gone is seen to be
        self.said = [self.hear(k) for k in range(count)]
        self.name, self.measure, low, high = self.said[0]
        self.box: tuple[Tensor, Tensor] = (torch.from_numpy(low), torch.from_numpy(high))

    def __len__(self) -> int:
        return self.ends[-1]

    def reset(self) -> dict[str, Tensor]:
        """Every environment at its start; what is seen there, by name, `(B, …)`."""
        return self.ask(dict.fromkeys(range(len(self.pipes))))

    def step(self, actions: Tensor) -> dict[str, Tensor]:
        """One step of those that have not ended; a process whose environments all have is not asked."""
        shares, going = np.split(actions.numpy(), self.ends[1:-1]), enumerate(self.said)
        return self.ask({k: (shares[k], self.looked) for k, (_, _, done, *_) in going if not done.all()})

    def ask(self, asked: Mapping[int, Any]) -> dict[str, Tensor]:
        """Some processes, all at once, then one answer after another; what is seen."""
        for k, what in asked.items():
            with suppress(OSError):  # what is gone is heard of next
                self.pipes[k].send(what)
        for k in asked:
            self.said[k] = self.hear(k)
        seen, left, done, progress, success = zip(*self.said, strict=True)
        self.done, self.success = np.concatenate(done), np.concatenate(success)
        self.progress = torch.from_numpy(np.concatenate(progress))
        common = {key: [each[key] for each in seen] for key in seen[0] if all(key in each for each in seen)}
        alike = {key: rows for key, rows in common.items() if len({part.shape[1:] for part in rows}) == 1}
        why = {k: SEVERAL for each in seen for k in each} | {k: x for each in left for k, x in each.items()}
        return Seen({**why, **{key: torch.from_numpy(np.concatenate(rows)) for key, rows in alike.items()}})

    def hear(self, k: int) -> Any:
        """The answer of a process, or the error that it had."""
        try:
            answer = self.pipes[k].recv()
        except (EOFError, OSError):
            self.processes[k].join(GRACE)
            raise ProcessError(
                k,
                f"one of {len(self.pipes)} workers, exit status {self.processes[k].exitcode}; give fewer where "
                'memory is short, and in a script ask for them below `if __name__ == "__main__":`',
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self, grace: float = GRACE) -> None:
        """End the processes, by force where they do not end by themselves."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(grace)
            process.kill()
            process.join()


def _packed(make: Make, starts: Sequence[Any]) -> bytes:
    """What a process is given."""
    try:
        return pickle.dumps((make, list(starts)))
    except Exception as error:
        raise InputError(
            "workers: more than 1 are sent what makes environments, which must be a function or class of a module, "
            f"or a `functools.partial` of one, got {short(make)}: {error}"
        ) from error


@contextmanager
def spread(make: Make, starts: Sequence[Any], workers: int = 1) -> Iterator[Environments | Workers]:
    """Environments from all starts, here or in as many processes, of which none is left after the block."""
    require_count("workers", workers)
    workers = min(workers, len(starts))
    if workers < 2:
        made = make(starts)
        with closing(made) if isinstance(made, Environments) else nullcontext():
            yield made
        return
    worlds = Workers()
    try:
        worlds.begin(make, starts, workers)
        yield worlds
    except BaseException:
        worlds.close(0)
        raise
    worlds.close()
