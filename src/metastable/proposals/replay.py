"""Functions that launch many small kernels, recorded once as a CUDA graph and then replayed.

The ODE of a small flow is hundreds of kernels of a few microseconds each, which the host cannot launch as fast as a
GPU runs them. A graph is launched as a whole. It reads the memory it was recorded with, so parameters may change in
place, as optimisers change them, but not move.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

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
        made = self.recordings.pop(key, None)
        if made is None:
            while len(self.recordings) >= self.most:
                self.recordings.pop(next(iter(self.recordings)))  # the one not used for longest
            made = self._made(function, inputs)
        self.recordings[key] = made
        for kept, new in zip(made.inputs, inputs, strict=True):
            kept.copy_(new)
        made.graph.replay()
        return tuple(x.clone() for x in made.outputs)

    def _made(self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Recording:
        try:
            return self.record(function, inputs)
        except RuntimeError as error:
            raise UnsupportedError(
                f"replay: could not be recorded as a CUDA graph ({error}); build the flow with replay=False"
            ) from error

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
