"""The ODE of a flow, hundreds of small kernels, recorded once as a CUDA graph launched as a whole after that."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from metastable.core.capture import CaptureError, Replays, is_recording

_REPLAYS: WeakKeyDictionary[nn.Module, Replays] = WeakKeyDictionary()
"""Recordings of a flow's ODE, beside it, since graphs can be neither copied nor saved."""


def replayed(
    owner: nn.Module, solve: Callable[..., Any], key: Hashable, x: Tensor, code: Tensor | None, t: Tensor
) -> Any:
    """`solve(x, code, t, 0)` of a module, recorded as long as its parameters and buffers stay where they are."""
    if is_recording():
        return solve(x, code, t, 0)
    places = tuple(tensor.data_ptr() for tensor in (*owner.parameters(), *owner.buffers()))
    replays = _REPLAYS.setdefault(owner, Replays())
    try:
        if code is None:
            return replays(lambda x, t: solve(x, None, t, 0), (key, places), x, t)
        return replays(lambda x, t, code: solve(x, code, t, 0), (key, places), x, t, code)
    except CaptureError as error:
        raise CaptureError(f"replay: {error}; build the flow with replay=False") from error
