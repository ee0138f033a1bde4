"""Functions that launch many small kernels, recorded once as a CUDA graph and then replayed.

The ODE of a small flow is hundreds of kernels of a few microseconds each, which the host cannot launch as fast as a
GPU runs them. A graph is launched as a whole. It reads the memory it was recorded with, so parameters may change in
place, as optimisers change them, but not move.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from metastable.core.errors import UnsupportedError

WARM = 3
"""Runs before the recording, in which libraries set themselves up."""


class Recording(NamedTuple):
    """A graph, and the memory that it reads from and writes to."""

    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    graph: torch.cuda.CUDAGraph


class Replays:
    """Recordings of functions from tensors to a tuple of tensors, one for each key and shapes of the inputs.

    Functions are called on a GPU, without gradients, and must not look at any number. A key says what else their
    results depend on, such as where parameters lie. The function itself is not kept.
    """

    def __init__(self, most: int = 8):
        self.most = most
        self.recordings: dict[Hashable, Recording] = {}

    def __call__(
        self, function: Callable[..., tuple[Tensor, ...]], key: Hashable, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """`function(*inputs)`."""
        key = (key, *((x.shape, x.dtype, x.device) for x in inputs))
        recording = self.recordings.pop(key, None)
        if recording is None:
            while len(self.recordings) >= self.most:
                self.recordings.pop(next(iter(self.recordings)))  # the one not used for longest
            try:
                recording = self.record(function, inputs)
            except RuntimeError as error:
                raise UnsupportedError(
                    f"replay: could not be recorded as a CUDA graph ({error}); build the flow with replay=False"
                ) from error
        self.recordings[key] = recording
        for own, new in zip(recording.inputs, inputs, strict=True):
            own.copy_(new)
        recording.graph.replay()
        return tuple(x.clone() for x in recording.outputs)

    def record(self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Recording:
        """The function on memory of its own, on a stream of its own while libraries set themselves up."""
        own = [x.clone() for x in inputs]
        with torch.cuda.device(own[0].device):
            stream, here = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                for _ in range(WARM):
                    function(*own)
            here.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may load data
                outputs = function(*own)
        return Recording(own, outputs, graph)


_REPLAYS: WeakKeyDictionary[nn.Module, Replays] = WeakKeyDictionary()
"""Recordings of a flow's ODE, beside it, since graphs can be neither copied nor saved."""


def replayed(
    owner: nn.Module, solve: Callable[..., Any], key: Hashable, x: Tensor, code: Tensor | None, t: Tensor
) -> Any:
    """`solve(x, code, t, 0)` of a module, recorded as long as its parameters and buffers stay where they are."""
    places = tuple(tensor.data_ptr() for tensor in (*owner.parameters(), *owner.buffers()))
    replays = _REPLAYS.setdefault(owner, Replays())
    if code is None:
        return replays(lambda x, t: solve(x, None, t, 0), (key, places), x, t)
    return replays(lambda x, t, code: solve(x, code, t, 0), (key, places), x, t, code)
