"""Classes of events: integers from 0."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import InputError


def integers(labels: Any, name: str) -> Tensor:
    """`labels` as int64: whole numbers and truth values of any dtype; anything else is an `InputError`.

    >>> integers([True, False], "labels"), integers(2.0, "labels")
    (tensor([1, 0]), tensor(2))
    """
    values = labels.detach() if isinstance(labels, Tensor) else _numbers(labels, name)
    if values.is_complex():
        raise _refused(name, values.dtype, values)
    whole = values.to(torch.int64)
    if not values.is_floating_point():
        return whole
    bad = whole.to(values.dtype) != values  # also of what is not finite, or beyond int64
    if bool(bad.any()):
        raise _refused(name, values.dtype, values, int(bad.flatten().nonzero()[0]))
    return whole


def _numbers(labels: Any, name: str) -> Tensor:
    try:
        array = np.asarray(labels)
    except ValueError as error:
        raise InputError(f"{name}: must be one integer for each row: {error}") from error
    if array.dtype.kind not in "iufb":
        rows = enumerate(array.ravel().tolist())
        raise _refused(name, array.dtype, array, next((i for i, v in rows if not isinstance(v, Real)), 0))
    if array.dtype.kind != "f":
        return torch.from_numpy(array.astype(np.int64))
    long = array.dtype.itemsize > 8  # which torch has not; nor has it the other order of bytes
    return torch.from_numpy(array.astype(np.float64 if long else array.dtype.newbyteorder("=")))


def _refused(name: str, dtype: Any, values: Any, at: int = 0) -> InputError:
    """What was given, its first value that is no integer, and what to do where it is text."""
    found = values.flatten()[at : at + 1].tolist()
    place = f" in row {at} (counting from 0)" if len(values.shape) == 1 else ""
    first = f", {found[0]!r}{place}" if found else ""
    text = isinstance(dtype, np.dtype) and dtype.kind in "USO"
    hint = "; numpy.unique(labels, return_inverse=True)[1] numbers classes that have names" if text else ""
    return InputError(f"{name}: must be integers, got {dtype}{first}{hint}")


def within(values: Tensor, classes: int | None, name: str) -> Tensor:
    """Integers `(N,)` as int64, each at least 0 and below `classes`, or an `InputError` that names one."""
    bad = values < 0 if classes is None else (values < 0) | (values >= classes)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        rule = "at least 0" if classes is None else f"from 0 to {classes - 1}"
        raise InputError(f"{name}: must be {rule}, got {int(values[row])} in row {row} (counting from 0)")
    return values.to(torch.int64)
