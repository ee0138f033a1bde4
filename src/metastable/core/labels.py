"""Classes of events: integers from 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import InputError


def integers(labels: Any, name: str) -> Tensor:
    """`labels` as a tensor of integers, or an `InputError`."""
    values = torch.as_tensor(labels)
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise InputError(f"{name}: must be integers, got {values.dtype}")
    return values


def within(values: Tensor, classes: int | None, name: str) -> Tensor:
    """Integers `(N,)` as int64, each at least 0 and below `classes`, or an `InputError` that names one."""
    bad = values < 0 if classes is None else (values < 0) | (values >= classes)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        rule = "at least 0" if classes is None else f"from 0 to {classes - 1}"
        raise InputError(f"{name}: must be {rule}, got {int(values[row])} in row {row} (counting from 0)")
    return values.to(torch.int64)
