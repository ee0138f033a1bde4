"""Several processes at one training: who this one is, and what they tell each other.

The processes are those of torch.distributed's default group, which `torchrun`, Fabric's launcher or the user's own
script starts. In a process that is alone everything here is the identity, so that nobody has to ask. What is asked
of all processes must be asked by all of them, in the same order.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import ConfigError, MetastableError, ProcessError, require, short
from .heartbeat import Heartbeat, blamed
from .random import derive

T = TypeVar("T")
POLL = 0.05
"""Seconds between two looks at whether the first process has done what it alone does."""
sent: Counter[str] = Counter()
"""Bytes that this process gave to others so far, by occasion."""
messages: Counter[str] = Counter()
"""Messages that it took part in so far, likewise."""
_alone: ContextVar[bool] = ContextVar("alone", default=False)
_calls: Counter[str] = Counter()
"""What all processes have asked for so far, in step, so that names made of it are the same in all."""


def in_group() -> bool:
    """Whether there are others, be this process alone for the moment or not."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_many() -> bool:
    """Whether there are others, and this process is not alone for the moment."""
    return not _alone.get() and in_group()


def count() -> int:
    """How many processes work together."""
    return dist.get_world_size() if is_many() else 1


def rank() -> int:
    """The number of this one, from 0."""
    return dist.get_rank() if is_many() else 0


def is_first() -> bool:
    """Whether this process writes files and shows progress; one that is alone for the moment does so, too."""
    return rank() == 0


@contextmanager
def alone() -> Iterator[None]:
    """Within, this process works as if there were no others: on everything, and without waiting for them."""
    before = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(before)


def join() -> None:
    """Join the processes that a launcher started with this one, unless the program has done so itself."""
    launched = "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    if launched and dist.is_available() and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank() % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def local_rank() -> int:
    """The number of this process on its own machine, which is that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def together() -> Iterator[None]:
    """Within, processes watch each other: one that dies, or leaves by an error, ends the others with its name."""
    if not is_many():
        yield
        return
    _calls["together"] += 1
    with Heartbeat(_store(), dist.get_rank(), dist.get_world_size()) as beating:
        try:
            yield
        except ProcessError as error:
            # it may be known here, and no longer in the store, which has gone since
            if beating.heard is not None:
                raise ProcessError(*beating.heard) from error
            raise
        except BaseException as error:
            beating.leave(f"{type(error).__name__}: {error}")
            raise


# ---- shares


def shares(n: int) -> list[int]:
    """How many of `n` things each process has: as equal as can be, the first ones one more.

    >>> shares(5)
    [5]
    """
    every = count()
    return [n // every + (i < n % every) for i in range(every)]


def share(n: int) -> int:
    """How many of `n` things this process has."""
    return shares(n)[rank()]


def even_share(field: str, n: int) -> int:
    """The same where all must have as many, so that the mean of their means is the mean."""
    every = count()
    require(n % every == 0, field, f"a multiple of the {every} processes, which have as many each", n)
    return n // every


def own_rows(n: int) -> slice:
    """Which of `n` things those are."""
    before = sum(shares(n)[: rank()])
    return slice(before, before + share(n))


def own_seed(seed: int, *names: object) -> int:
    """As `derive`, with a stream of its own for each process; that of the first is what it is alone."""
    return derive(seed, *names) if rank() == 0 else derive(seed, *names, "process", rank())


# ---- what all of them say


def stacked(value: Tensor) -> Tensor:
    """The same tensor of every process, `(R, …)`; shapes are equal."""
    return asked(value)()


def asked(value: Tensor) -> Callable[[], Tensor]:
    """`stacked`, on its way: nobody waits but the function that is returned."""
    if not is_many():
        return lambda: value[None]
    value = value.detach().contiguous()
    made = value.new_empty((count(), value.numel()))
    with _blaming():
        work = dist.all_gather(list(made), value.reshape(-1), async_op=True)
    _counted("numbers", value)

    def arrived() -> Tensor:
        with _blaming():
            work.wait()  # pyright: ignore
        return made.view(len(made), *value.shape)

    return arrived


@dataclass(frozen=True)
class Shared:
    """A metric of things that lie on several processes, which nobody asks the others for before it is logged.

    Attributes:
        own: what those of this process say, `(k,)`.
        total: things of all processes, of which each has its share.
        read: the metric, of `(…, total)`.
        plus: what is added to it, the mean over processes, `()`.
    """

    own: Tensor
    total: int
    read: Callable[[Tensor], Tensor]
    plus: Tensor

    def __add__(self, number: Tensor) -> Shared:
        return replace(self, plus=self.plus + number)


def shared(own: Tensor, total: int, read: Callable[[Tensor], Tensor]) -> Any:
    """`read` of what things of all processes say, where each has some of `total`; at once when alone."""
    return Shared(own, total, read, own.new_zeros(())) if is_many() else read(own)


def joined(rows: Tensor, total: int | None = None) -> Tensor:
    """The rows of all processes, one after the other; they are `shares(total)` where that is given."""
    if not is_many():
        return rows
    counted = torch.tensor([len(rows)], device=rows.device)
    sizes = stacked(counted).flatten().tolist() if total is None else shares(total)
    wide = rows.new_zeros((max(sizes), *rows.shape[1:]))
    if not wide.numel():
        return rows
    wide[: len(rows)] = rows.detach()
    every = stacked(wide)
    return torch.cat([part[:size] for part, size in zip(every, sizes, strict=True)])


def average(value: Tensor) -> Tensor:
    """The mean over all processes."""
    if not is_many():
        return value
    made = value.detach().clone()
    with _blaming():
        dist.all_reduce(made)
    _counted("numbers", made)
    return made / count()


def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Gradients become their means over all processes, in one message for each kind of number."""
    gradients = [p.grad for p in parameters if p.grad is not None] if is_many() else []
    for kind in dict.fromkeys(g.dtype for g in gradients):
        same = [g for g in gradients if g.dtype == kind]
        flat = torch.cat([g.reshape(-1) for g in same])
        with _blaming():
            dist.all_reduce(flat)
        _counted("gradients", flat)
        parts = (flat / count()).split([g.numel() for g in same])
        for gradient, part in zip(same, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def as_first(tensors: Sequence[Tensor]) -> None:
    """The tensors of all processes become those of the first, in place."""
    if is_many():
        with _blaming(), torch.no_grad():
            for tensor in tensors:
                whole = tensor.detach().contiguous()
                dist.broadcast(whole, 0)
                tensor.copy_(whole)


def by_first(work: Callable[[], T]) -> T:
    """What `work` gives to the first process, for all of them; however long it takes, the others wait.

    While it works, it is alone. An error of its is everybody's.
    """
    if not is_many():
        return work()
    _calls["by first"] += 1
    key = f"by first {_calls['by first']}"
    said: list[Any] = [None, ""]
    if dist.get_rank() == 0:
        try:
            with alone():
                said[0] = work()
        except Exception as error:
            _store().set(key, f"{type(error).__name__}: {error}")
            raise
        _store().set(key, "")
    elif why := told(key):
        raise ProcessError(0, why)
    with _blaming():
        dist.broadcast_object_list(said, 0)
    return said[0]


def require_same(what: str, told: Mapping[str, Any]) -> None:
    """Refuse processes that were told different things; one that was told another than the first is named."""
    if not is_many():
        return
    every: list[Any] = [None] * count()
    with _blaming():
        dist.all_gather_object(every, told)
    for process, own in enumerate(every):
        if other := _other(own, every[0]):
            rule = f"must be the same in all processes, and process {process} has another than 0"
            raise ConfigError(what, f"{rule}: {other}")


def _other(own: Any, first: Any, name: str = "") -> str:
    """The first place at which two nested tables differ, in words; nothing where they do not."""
    if isinstance(own, Mapping) and isinstance(first, Mapping):
        inside = (
            _other(own.get(key), first.get(key), f"{name}.{key}" if name else key) for key in {**first, **own}
        )
        return next(filter(None, inside), "")
    return "" if str(own) == str(first) else f"{name} is {short(own)}, not {short(first)}"


# ---- words that are left for others, also by one that is alone for the moment


def tell(key: str, word: str = "") -> None:
    """Leave a word under a key that is used once."""
    with _blaming():
        _store().set(key, word)


def told(key: str) -> str:
    """That word, however long it takes until somebody leaves it."""
    store = _store()
    with _blaming():  # looks again and again: a message of the group would give up after some minutes
        while not store.check([key]):
            if (who := blamed(store)) is not None:
                raise ProcessError(*who)
            time.sleep(POLL)
        return store.get(key).decode()


def dealt(pile: str, n: int) -> Iterator[int]:
    """Which of `n` things this process does: the next that nobody has begun, and all where there are no others."""
    if not in_group():
        yield from range(n)
        return
    while True:
        with _blaming():
            i = _store().add(pile, 1) - 1
        if i >= n:
            return
        yield i


def exchanged(key: str, word: str = "") -> list[str]:
    """What each process says under a key, in their order, however long the slowest takes."""
    if not in_group():
        return [word]
    tell(f"{key}: {dist.get_rank()}", word)
    return [told(f"{key}: {rank}") for rank in range(dist.get_world_size())]


# ---- what some of them send to some


def moved(rows: Tensor, surplus: Sequence[tuple[int, int, int]]) -> Tensor:
    """Rows of bytes, `(k, width)`, from process to process: `surplus` says (from, to, how many).

    This process sends the first of its `rows`, in the order of `surplus`; returned is what it is sent.
    """
    me, used, operations, arrived = dist.get_rank(), 0, [], [rows[:0]]
    for source, target, k in surplus:
        if source == me:
            part, used = rows[used : used + k].contiguous(), used + k
            operations.append(dist.P2POp(dist.isend, part, target))
            _counted("walkers", part)
        elif target == me:
            arrived.append(rows.new_empty((k, rows.shape[1])))
            operations.append(dist.P2POp(dist.irecv, arrived[-1], source))
    with _blaming():
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
    return torch.cat(arrived)


def _counted(occasion: str, value: Tensor) -> None:
    sent[occasion] += value.nbytes
    messages[occasion] += 1


def _store() -> dist.Store:
    """Where processes leave words for each other: a new place in every training."""
    return dist.PrefixStore(f"metastable {_calls['together']}", dist.distributed_c10d._get_default_store())


@contextmanager
def _blaming() -> Iterator[None]:
    """A message that failed because somebody is gone says who."""
    try:
        yield
    except MetastableError:
        raise
    except RuntimeError as error:
        who = blamed(_store(), dist.get_rank(), dist.get_world_size())
        raise ProcessError(*(who or (None, str(error).splitlines()[0]))) from error
