"""Steps of chains recorded as a CUDA graph: a few of them in one launch, replayed for as long as a chain is.

The noise is drawn inside the graph from a generator of its own that takes up the caller's state and hands it back,
so that a chain makes the moves that it makes eagerly. A recording belongs to an energy whose parameters stay where
they are, and is made anew when anything that the energy reads has moved or changed (`watch`). What an energy was
bound to, contexts, times and codes, is copied in before each chain: a policy records once for all its chunks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from metastable.core.capture import CaptureError, Recording, in_force, own_copies, record
from metastable.core.errors import OutOfMemoryError
from metastable.core.precision import cast_once
from metastable.core.types import Bound, Energy

from .base import Kernel
from .compiled import Walk, compiled_for, several, steps_per_call
from .watch import UnwatchedError, key_of, modules_in, reads

STRIDE = 16
"""Steps in one launch: enough to hide it, few enough to be recorded in the time of some eager steps."""
MOST = 4
"""Recordings kept for one energy."""
KINDS = 64
"""Kinds of short chains whose gradients are counted."""


class Known(NamedTuple):
    """What is known of an energy, for as long as it lives: its recordings, why engines cannot run it, and how many
    gradients were asked for in chains that are too short to be recorded for themselves.
    """

    alive: weakref.ref
    loops: dict[Hashable, Loop]
    refused: dict[Hashable, str]
    asked: dict[Hashable, int]


_KNOWN: dict[int, Known] = {}


def unbound(energy: Energy) -> tuple[Any, tuple[Any, ...]]:
    """A conditional energy, and the tensors it was bound to; any other energy, and nothing."""
    if isinstance(energy, Bound) and all(part is None or isinstance(part, Tensor) for part in energy.parts()):
        return energy.energy, energy.parts()
    return energy, ()


def watched(energy: Energy, device: torch.device, anew: bool = False) -> Hashable:
    """What a recording of this energy depends on: all that it reads, and the shapes of what it was bound to.

    `anew` is as `key_of` takes it.
    """
    inner, parts = unbound(energy)
    for part in parts:
        if part is not None and part.device != device:
            raise UnwatchedError(f"contexts are on {part.device}, not on {device}")
    return key_of(inner, device, anew=anew), tuple(None if x is None else (x.shape, x.dtype) for x in parts)


def known_of(energy: Energy) -> Known:
    """What is known of this energy, whatever it is bound to; `UnwatchedError` where its end goes unnoticed."""
    energy, _ = unbound(energy)
    place = id(energy)
    if place not in _KNOWN:
        try:
            alive = weakref.ref(energy, lambda _: _KNOWN.pop(place, None))
        except TypeError:
            raise UnwatchedError(
                f"energy is a {type(energy).__name__}, whose end would not be noticed"
            ) from None
        _KNOWN[place] = Known(alive, {}, {}, {})
    return _KNOWN[place]


def worth(energy: Energy, kind: Callable[[], Hashable], gradients: int, least: int) -> bool:
    """Whether a chain of so many gradients is worth a recording, which costs as much as `least` of them.

    One that is shorter is, too, once so many were asked for in chains like it of an energy that is bound and does
    not train: a policy asks for the same chain in every chunk.
    """
    if gradients >= least:
        return True
    if not isinstance(energy, Bound) or any(modes_of(energy)):
        return False
    try:
        asked, chain = known_of(energy).asked, kind()
    except UnwatchedError:
        return False
    while len(asked) >= KINDS and chain not in asked:
        asked.pop(next(iter(asked)))
    asked[chain] = asked.get(chain, 0) + gradients
    return asked[chain] >= least


def stride_of(kernel: Kernel, steps: int, compiled: bool = False) -> int:
    """Steps in one launch of a chain of `steps`: as many as leave the fewest over, in whole compiled calls.

    >>> [stride_of(Kernel(), steps) for steps in (1000, 101, 5)]
    [10, 10, 5]
    """
    most = min(steps, max(1, STRIDE // max(1, kernel.gradients_per_step)))
    unit = min(most, steps_per_call(kernel)) if compiled else 1
    return max(range(unit, most + 1, unit), key=lambda n: (n >= most // 2, -(steps % n), n))


class Loop:
    """`count` steps of a kernel on memory of their own, recorded."""

    def __init__(
        self, kernel: Kernel, energy: Energy, walk: Walk, h: Tensor, slopes: bool, count: int, compiled: bool
    ):
        inner, parts = unbound(energy)
        self.kernel, self.energy, self.slopes, self.count = kernel, weakref.ref(inner), slopes, count
        self.parts: tuple[Any, ...] = tuple(None if x is None else own_copies([x])[0] for x in parts)
        self.several = compiled_for(kernel) if compiled else several
        self.per_call = steps_per_call(kernel) if compiled else 1
        self.walk, (self.h,) = Walk.of(own_copies(walk.tensors())), own_copies([h])
        self.rng, self.stream = torch.Generator(h.device), in_force(h.device)[0]
        own = self.walk.tensors()
        pool = _shared_pool(self.stream)
        self.recording: Recording = record(
            self._steps, h.device, changes=own, generators=(self.rng,), pool=pool
        )

    def _steps(self) -> tuple[Tensor, ...]:
        """The steps, written back to where they began; while libraries warm up one call is enough."""
        energy, walk, rng = self.energy(), self.walk, self.rng
        assert energy is not None
        energy = Bound(energy, *self.parts) if self.parts else energy
        warming = self.h.is_cuda and not torch.cuda.is_current_stream_capturing()
        left = min(self.per_call, self.count) if warming else self.count
        # a parametrised weight is made once in a launch; the compiler sees to that by itself
        once = nullcontext() if self.per_call > 1 else parametrize.cached()
        with torch.no_grad(), once, cast_once(self.h.device):
            while left > 0:
                some = range(min(self.per_call, left))
                noises = [self.kernel.draw(walk.state.x, rng, energy) for _ in some]
                walk = self.several(self.kernel, energy, walk, noises, self.h, self.slopes)
                left -= len(noises)
            for own, new in zip(self.walk.tensors(), walk.tensors(), strict=True):
                own.copy_(new)
        return ()

    def run(self, energy: Energy, walk: Walk, h: Tensor, rng: torch.Generator, times: int) -> Walk:
        """The steps `times` times from `walk`, on what the energy is bound to, with the caller's random numbers."""
        _, parts = unbound(energy)
        mine, theirs = (*self.walk.tensors(), self.h, *self.parts), (*walk.tensors(), h, *parts)
        for own, new in zip(mine, theirs, strict=True):
            if own is not None:
                own.copy_(new)
        self.rng.set_state(rng.get_state())
        for _ in range(times):
            self.recording.replay()
        rng.set_state(self.rng.get_state())
        return Walk.of(tuple(own.clone() for own in self.walk.tensors()))


def loop_of(
    kernel: Kernel, energy: Energy, walk: Walk, h: Tensor, slopes: bool, count: int, compiled: bool
) -> Loop:
    """The recording of these steps, made now where there is none; raises `UnwatchedError` or `CaptureError`."""
    known, device = known_of(energy), h.device
    setting = (count, compiled, slopes, *in_force(device))
    shapes = tuple((t.shape, t.stride(), t.dtype) for t in (*walk.tensors(), h))
    key = (watched(energy, device), reads(kernel, device, "kernel").key, shapes, setting)
    loop = known.loops.pop(key, None)
    if loop is None:
        while len(known.loops) >= MOST:
            known.loops.pop(next(iter(known.loops)))  # the one not used for longest
            known.asked.clear()  # too many kinds of short chains to record them all
        prove(kernel, energy, walk, h)
        loop = Loop(kernel, energy, walk, h, slopes, count, compiled)
        key = (watched(energy, device, True), *key[1:])  # a first call may have kept what it made
    known.loops[key] = loop
    return loop


def prove(kernel: Kernel, energy: Energy, walk: Walk, h: Tensor) -> None:
    """Two steps that must leave the energy, and every random number but their own, as they were.

    Buffers and generators that an energy changes are put back, and `UnwatchedError` says what it did.
    """
    rng = torch.Generator(h.device)
    step = lambda: several(kernel, energy, walk, [kernel.draw(walk.state.x, rng, energy)], h, False)  # noqa: E731
    prove_call(step, energy, h.device)


def prove_call(call: Callable[[], Any], own: Any, device: torch.device, name: str = "energy") -> None:
    """The same of any call, and of what is its `own`."""
    mode = "; it is in training mode" if any(modes_of(own)) else ""
    for last in (False, True):  # a first call may keep something for later ones
        found, noise = reads(own, device, name), _random_states(device)
        kept = {n: t.clone() for n, t in found.tensors.items() if not isinstance(t, nn.Parameter)}
        with torch.no_grad():
            call()
            written = [n for n, old in kept.items() if not torch.equal(old, found.tensors[n])]
            for name in written:
                found.tensors[name].copy_(kept[name])
        for source, before in noise:
            if not torch.equal(source.get_state(), before):
                source.set_state(before)
                raise UnwatchedError(f"the {name} draws random numbers of its own{mode}")
        if written:
            raise UnwatchedError(f"the {name} writes to {written[0]} when it is called{mode}")
        if last and reads(own, device, name).key != found.key:
            raise UnwatchedError(
                f"the {name} changes what it reads each time it is called, as a counter does"
            )


def modes_of(energy: Any) -> tuple[bool, ...]:
    """Which of its modules are in training mode."""
    return tuple(m.training for m in modules_in(energy))


def _random_states(device: torch.device) -> list[tuple[torch.Generator, Tensor]]:
    """Torch's own generators, which no chain draws from, with their states."""
    ours = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        ours.append(torch.cuda.default_generators[index])
    return [(source, source.get_state()) for source in ours]


def _shared_pool(stream: Hashable) -> Any:
    """The memory of another recording that runs in the same stream, never at the same time."""
    graphs = (
        loop.recording.graph
        for known in _KNOWN.values()
        for loop in known.loops.values()
        if loop.stream == stream
    )
    return next((graph.pool() for graph in graphs if graph is not None), None)


NO_ROOM = (torch.OutOfMemoryError, OutOfMemoryError)
"""Why a recording could not be made now, though it may be later."""
REFUSALS = (UnwatchedError, CaptureError, *NO_ROOM)
"""Why a recording could not be made; the chain then runs eagerly."""
