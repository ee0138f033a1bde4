"""Times in [0, 1], from noise to data, checked wherever they are given."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import require
from .waiting import may_look


def require_times(field: str, t: Tensor) -> None:
    """Every time must lie in [0, 1]; on an accelerator they are not always looked at."""
    if not may_look(t):
        return
    outside = ~((t >= 0) & (t <= 1))
    if bool(outside.any()):
        require(False, field, "within [0, 1]", float(f"{t[outside].flatten()[0]:.6g}"))


def checked_times(field: str, t: float | Tensor, like: Tensor) -> Tensor:
    """Times as a tensor like `like`; every one must lie in [0, 1].

    >>> checked_times("t", 0.5, torch.zeros(3, dtype=torch.float64))
    tensor(0.5000, dtype=torch.float64)
    >>> checked_times("t", -3.0, torch.zeros(3))
    Traceback (most recent call last):
    ...
    metastable.core.errors.ConfigError: t: must be within [0, 1], got -3.0
    """
    if isinstance(t, (int, float)):  # a copy from the host would wait for the device
        require(0 <= t <= 1, field, "within [0, 1]", t)
        return torch.full((), float(t), dtype=like.dtype, device=like.device)
    t = torch.as_tensor(t)
    require_times(field, t)
    return t.to(like)
