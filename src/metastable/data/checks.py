"""What may become rows, labels and contexts: finite numbers of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import InputError, require
from ..core.labels import integers, within
from ..core.pixels import Frames

BLURRED = 1e-5
"""Share of a column's spread that rounding may take from it."""


def check_labels(labels: Any, n: int, classes: int | None = None, name: str = "labels") -> Tensor:
    """`labels` as int64 `(n,)`, each at least 0 and below `classes`, or an `InputError` that says why.

    >>> check_labels([0, 2, 1], 3, classes=3)
    tensor([0, 2, 1])
    """
    values = integers(labels, name)
    if tuple(values.shape) != (n,):
        raise InputError(f"{name}: must be one for each of {n} rows, shape ({n},), got {tuple(values.shape)}")
    return within(values, classes, name)


def check_given(
    given: Any, n: int, name: str = "given", *, dtype: torch.dtype | None = torch.float32
) -> Tensor:
    """Contexts as a finite floating tensor, `(n, *context)`, or an `InputError` that says why.

    >>> check_given([1, 2, 3], 3).shape
    torch.Size([3, 1])
    """
    rows = len(given) if hasattr(given, "__len__") else 0
    if rows != n:
        raise InputError(f"{name}: must be one for each of {n} rows, got {rows}")
    if isinstance(given, Frames):  # of bytes, which are finite, and numbers
        numbers = given.beside
        some = numbers.numel() > 0
        beside = (
            check_data(numbers, name, dtype=dtype, least=1) if some else numbers.to(dtype or numbers.dtype)
        )
        return Frames(beside, given.codes, given.shown, given.table.to(beside))
    return check_data(given, name, dtype=dtype, least=1)


def check_data(
    x: Any,
    name: str = "data",
    *,
    dtype: torch.dtype | None = torch.float32,
    least: int = 2,
    columns: Sequence[str] = (),
) -> Tensor:
    """`x` as a finite floating tensor `(n, *event)` with `least` rows or more, or an `InputError` that says why.

    A one-dimensional array is n rows of one number, `(n, 1)`. Integers and booleans become floating. Memory
    is shared with `x` where nothing had to change. With `dtype=None` rows that float32 would blur stay float64.
    Missing cells are named by their `columns`, where those have names.

    >>> check_data([1, 2, 3]).shape
    torch.Size([3, 1])
    """
    asked = torch.float32 if dtype is None else dtype
    require(asked.is_floating_point, "dtype", "a floating dtype such as torch.float32", dtype)
    values = as_tensor(x, name)
    if values.dim() == 1:
        values = values[:, None]
    check_shape(values, name, least)
    _check_finite(values, name, columns)
    if dtype is None:
        dtype = _needed_dtype(values)
    narrow = values.to(dtype)
    if not _all_finite(narrow):
        largest = float(values.abs().max())
        raise InputError(
            f"{name}: must fit in {dtype}, got values up to {largest:.3g}; rescale them or pass "
            "dtype=torch.float64"
        )
    return narrow.contiguous()


def _needed_dtype(values: Tensor) -> torch.dtype:
    """float64 for columns whose spread float32 would round by more than a millionth, else float32."""
    if values.dtype != torch.float64:
        return torch.float32
    flat = values.flatten(1)
    blur = torch.finfo(torch.float32).eps * flat.abs().amax(0)
    spread = flat.std(0, correction=0)
    coarse = (blur > BLURRED * spread) & (spread > 0)
    too_large = flat.abs().amax() > torch.finfo(torch.float32).max
    return torch.float64 if bool(coarse.any() | too_large) else torch.float32


def as_tensor(x: Any, name: str) -> Tensor:
    """A dense real tensor of the numbers in `x`."""
    if not isinstance(x, Tensor):
        return _from_numpy(x, name)
    if x.layout != torch.strided or x.is_quantized:
        raise InputError(f"{name}: must be a dense tensor, got layout {x.layout}; call .to_dense() first")
    if x.is_complex():
        raise InputError(f"{name}: must be real, got {x.dtype}; stack x.real and x.imag as coordinates")
    return x.detach() if x.is_floating_point() else x.detach().double()


def as_array(x: Any, name: str) -> np.ndarray:
    """An array of what is no tensor, of any dtype, with nothing masked."""
    if np.ma.is_masked(x):
        raise InputError(
            f"{name}: must have no masked values; fill or drop them, for they would count as data"
        )
    try:
        return np.asarray(x)
    except (ValueError, TypeError, RuntimeError) as error:  # the last two of tensors in a list
        raise InputError(f"{name}: must be rows of equal length, and no list of tensors: {error}") from error


def _from_numpy(x: Any, name: str) -> Tensor:
    array = as_array(x, name)
    if array.dtype.kind not in "fiub":
        raise InputError(
            f"{name}: must hold numbers, got dtype {array.dtype}; convert text, dates, objects or complex "
            "values to floating numbers first"
        )
    kept = array.dtype in (np.float16, np.float32)
    native = array.dtype.newbyteorder("=") if kept else np.dtype(np.float64)
    array = np.ascontiguousarray(array, dtype=native) if array.ndim else array.astype(native)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def check_shape(x: Tensor, name: str, least: int = 2) -> None:
    """Refuse what is no `least` rows of one number or more."""
    if x.dim() == 0:
        raise InputError(f"{name}: must have shape (n, *event), got a single number")
    if x.shape[0] < least:
        raise InputError(f"{name}: must have at least {least} rows, got shape {tuple(x.shape)}")
    if x.numel() == 0:
        raise InputError(f"{name}: must have at least one number in a row, got shape {tuple(x.shape)}")


def _all_finite(x: Tensor) -> bool:
    """Whether all numbers are finite; by the ends of their range, which is no number where one of them is none.

    So nothing of the size of `x` is made, as `isfinite` does.
    """
    return all(bool(end.isfinite()) for end in x.aminmax())


def _check_finite(x: Tensor, name: str, columns: Sequence[str]) -> None:
    if _all_finite(x):
        return
    bad = ~torch.isfinite(x)
    row, *rest = bad.nonzero()[0].tolist()
    place = f"column {rest[0]}" if len(rest) == 1 else f"index {tuple(rest)}"
    where = f"the first at row {row}, {place} (counting from 0): {float(x[(row, *rest)])}"
    if columns:
        counts = zip(columns, bad.sum(0).tolist(), strict=True)
        named = ", ".join(f"{count} in {column!r}" for column, count in counts if count)
        where = f"{named}, the first in row {row + 1} below the header"
    raise InputError(
        f"{name}: must be finite, got {int(bad.sum())} NaN or infinite of {x.numel()} values, {where}; drop or "
        "fill those rows"
    )
