"""Functions that launch many small kernels, recorded once as a CUDA graph and launched as a whole after that.

A step of a chain or an update of a training is hundreds of kernels of a few microseconds each, which no host can
launch as fast as a GPU runs them. A graph reads and writes the memory it was recorded with: parameters may change
in place, as optimisers change them, but not move, and what Python decides is decided when it is recorded.

Where there are no graphs, as on the CPU, the same function is called again on the same memory. Nothing is gained
there, and everything but the graph itself can be tested: memory that was not written back, a stale closure, a
decision that should have been made anew.
"""

from __future__ import annotations

import functools
import gc
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import UnsupportedError
from .precision import convolutions_said, products_said
from .waiting import unwatched

WARM = 3
"""Runs before the recording, in which libraries set themselves up; in the last of them nobody may wait."""
LATER = 2
"""The lane of what nobody asks for soon, and which would hold up what is short."""
_TORCH = str(Path(torch.__file__).parent)

Function = Callable[[], tuple[Tensor, ...]]
_recording: ContextVar[bool] = ContextVar("recording", default=False)


class CaptureError(UnsupportedError):
    """A function cannot be recorded; the message names the line and why. What it changed is put back."""


def is_recording() -> bool:
    """Whether a function is being recorded now: a recording within another is neither needed nor possible."""
    return _recording.get()


@contextmanager
def aside(device: torch.device, really: bool = True, lane: int = 1) -> Iterator[Callable[[], None]]:
    """What stands inside is recorded as running beside what comes after it, until the function given is called.

    Two that run aside in one lane run one after the other.

    Nothing outside may be changed inside, and nothing made inside be used before that call. Random numbers are
    those of the order in which the code stands. Where nothing is recorded, everything is done in that order.

    >>> with aside(torch.device("cpu")) as join:
    ...     x = torch.ones(1)
    >>> join()
    """
    if not (really and is_recording() and device.type == "cuda"):
        yield lambda: None
        return
    here, beside = torch.cuda.current_stream(device), _stream(torch.cuda.current_device(), lane)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        yield lambda: here.wait_stream(beside)


def together_again(device: torch.device, lane: int = 1) -> None:
    """What comes now is recorded as running after all that ran aside in the lane."""
    with aside(device, lane=lane) as join:
        pass
    join()


class Recording(NamedTuple):
    """A function on its own memory: its graph, or itself where there are no graphs, and where its outputs lie.

    Generators are kept because a graph goes on drawing from them.
    """

    outputs: tuple[Tensor, ...]
    graph: torch.cuda.CUDAGraph | None
    function: Function | None
    generators: tuple[torch.Generator, ...] = ()

    def replay(self) -> tuple[Tensor, ...]:
        """Run it; the outputs are written over by the next run."""
        if self.graph is not None:
            self.graph.replay()
        elif self.function is not None:
            with _inside():
                for own, new in zip(self.outputs, self.function(), strict=True):
                    own.copy_(new.detach())
        return self.outputs


def record(
    function: Function,
    device: torch.device,
    *,
    changes: Sequence[Tensor] = (),
    generators: Sequence[torch.Generator] = (),
    pool: Any = None,
    warm: int = WARM,
) -> Recording:
    """`function` recorded, with everything that it `changes` and draws from as it was before.

    Args:
        function: reads tensors that stay where they are and returns a tuple of tensors; it must look at no number
            and make no generator.
        device: where it runs; a graph is made on `cuda`.
        changes: every tensor that it writes to in place, on the host too.
        generators: every generator that it draws from. A replay draws what the function would have drawn.
        pool: the memory of another recording (`recording.graph.pool()`), to be shared with recordings that never
            run at the same time and whose outputs are not needed any more.
        warm: runs before the recording; none where all that it does was recorded before in other functions.

    Raises:
        CaptureError: it cannot be recorded.
    """
    generators = tuple(generators)
    kept = [(tensor, tensor.detach().clone(), _version(tensor)) for tensor in changes]
    states = [rng.get_state() for rng in generators]

    def undo() -> None:
        with torch.no_grad():
            for tensor, old, version in kept:  # one that nobody wrote to has not been written to
                same = version is not None and _version(tensor) == version
                with torch.autograd._unsafe_preserve_version_counter(tensor) if same else nullcontext():
                    tensor.copy_(old)
        for rng, state in zip(generators, states, strict=True):
            rng.set_state(state)

    try:
        with _inside(), _uncached(device):
            if device.type == "cuda":
                return _graphed(function, device, generators, pool, undo, warm)
            outputs = tuple(x.detach().clone() for x in function())
            return Recording(outputs, None, function, generators)
    finally:
        undo()


def _version(tensor: Tensor) -> int | None:
    """How often it was written to, where that is counted."""
    return None if tensor.is_inference() else tensor._version


def _graphed(
    function: Function,
    device: torch.device,
    generators: tuple[torch.Generator, ...],
    pool: Any,
    undo: Callable[[], None],
    warm: int,
) -> Recording:
    """Warmed up and recorded on a stream of its own."""
    with torch.cuda.device(device):
        stream, here = _stream(torch.cuda.current_device()), torch.cuda.current_stream()
        stream.wait_stream(here)
        try:
            with torch.cuda.stream(stream):
                for _ in range(warm - 1):
                    function()
                with _nobody_waits():
                    function() if warm else None
        finally:
            here.wait_stream(stream)
        undo()  # so that what is recorded is the same code path as what will run
        graph = torch.cuda.CUDAGraph()
        for rng in generators:
            graph.register_generator_state(rng)
        try:
            # other threads may load data meanwhile
            with (
                _nothing_collected(),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                outputs = tuple(x.detach() for x in function())
        except Exception as error:
            torch.cuda.set_stream(here)  # what failed has left its stream in force
            _give_up(graph, device, generators)
            raise CaptureError(_words(error)) from error
    return Recording(outputs, graph, None, generators)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """No garbage is collected inside: a graph of another time that went would break this one. Nor is it before: a
    search of all memory is a tenth of a second, and a training makes many recordings.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def _stream(device: int, place: int = 0) -> torch.cuda.Stream:
    """The one on which everything is recorded, and those beside it: streams share no memory."""
    return torch.cuda.Stream(device)


def _give_up(
    graph: torch.cuda.CUDAGraph, device: torch.device, generators: tuple[torch.Generator, ...]
) -> None:
    """After a recording that failed: memory and random numbers out of its hands, in which torch leaves them."""
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), graph.pool())  # pyright: ignore
    for rng in (torch.cuda.default_generators[torch.cuda.current_device()], *generators):
        fresh = torch.Generator(device)
        with suppress(RuntimeError):
            fresh.set_state(rng.get_state())
        rng.graphsafe_set_state(fresh.graphsafe_get_state())


@contextmanager
def _inside() -> Iterator[None]:
    """What is made inside is written over later, which tensors of inference mode forbid outside of it."""
    token, grad = _recording.set(True), torch.is_grad_enabled()
    try:
        with unwatched(), torch.inference_mode(False), torch.set_grad_enabled(grad):
            yield
    finally:
        _recording.reset(token)


def own_copies(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Memory of a recording's own: no part of a graph of gradients, and written over in any mode."""
    with torch.inference_mode(False):
        return tuple(x.detach().clone() for x in tensors)


def in_force(device: torch.device) -> tuple[Hashable, ...]:
    """The stream and settings of the process that a recording keeps as they were."""
    kind = device.type
    stream = torch.cuda.current_stream(device).cuda_stream if kind == "cuda" else 0
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    exact = torch.are_deterministic_algorithms_enabled()
    return (stream, autocast, exact, products_said(), convolutions_said())


def _uncached(device: torch.device) -> AbstractContextManager:
    """The precision that is in force, without its store of weights: it would outlive the graph's memory."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, torch.get_autocast_dtype(device.type), cache_enabled=False)


@contextmanager
def _nobody_waits() -> Iterator[None]:
    """Every wait for the device is an error that says where: a recording would say less and break more."""
    before = torch.cuda.get_sync_debug_mode()
    _answer_to_waits("error")
    try:
        yield
    except RuntimeError as error:
        raise CaptureError(_words(error)) from error
    finally:
        _answer_to_waits(before)


def _answer_to_waits(mode: int | str) -> None:
    """What a wait for the device is met with; torch warns whoever asks that it does not see all of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode(mode)


def _words(error: BaseException) -> str:
    """Which line could not be recorded, and why: the first error, as ending a broken recording is one more."""
    while error.__context__ is not None:
        error = error.__context__
    why = str(error).strip().split("\n")[0] or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_TORCH) and f.filename != __file__]
    path = Path(own[-1].filename) if own else Path()
    where = f"{path.parent.name}/{path.name}:{own[-1].lineno}, `{own[-1].line}`: " if own else ""
    return f"could not be recorded as a CUDA graph: {where}{why}"


class Replays:
    """Recordings of functions from tensors to a tuple of tensors, one for each key and shapes of the inputs,
    and for the precision and stream in force.

    Functions must not look at any number. A key says what else their results depend on, such as where parameters
    lie. On a GPU the function itself is not kept.
    """

    def __init__(self, most: int = 8):
        self.most = most
        self.recordings: dict[tuple[Any, ...], tuple[tuple[Tensor, ...], Recording]] = {}

    def __call__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        key: Hashable,
        *inputs: Tensor,
        generators: Sequence[torch.Generator] = (),
    ) -> tuple[Tensor, ...]:
        """`function(*inputs)`, of which `generators` are those that it draws from."""
        shapes = ((x.shape, x.stride(), x.dtype, x.device) for x in inputs)
        full = (key, *map(id, generators), *in_force(inputs[0].device), *shapes)
        known = self.recordings.pop(full, None)
        if known is None:
            while len(self.recordings) >= self.most:
                self.recordings.pop(next(iter(self.recordings)))  # the one not used for longest
            known = self.record(function, inputs, generators)
        self.recordings[full] = known
        own, recording = known
        for mine, new in zip(own, inputs, strict=True):
            mine.copy_(new.detach())
        return tuple(x.clone() for x in recording.replay())

    def record(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        inputs: Sequence[Tensor],
        generators: Sequence[torch.Generator] = (),
    ) -> tuple[tuple[Tensor, ...], Recording]:
        """The function on memory of its own."""
        own = own_copies(inputs)
        return own, record(lambda: function(*own), own[0].device, generators=generators)
