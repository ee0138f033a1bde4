"""What the columns of a table are, and what about them has no density."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.random import derive, generator
from ..core.units import column_scales
from .arrays import Dataset

FEW = 20
"""A column with at most this many different values, each found often, is a code and not a measurement."""
OFTEN = 10
FAR = 10.0
"""Interquartile ranges beyond the quartiles at which a value is far out."""
COPIES = 0.05
"""Share of rows that are copies of others above which that is said."""
MOST_SHOWN = 200
"""Columns that a run's settings describe, and that are looked through for what follows from others."""
FOLLOWS = 1e-5
"""Share of a column's spread that the columns before it leave open, below which it follows from them."""
ROWS = 10_000
"""Rows on which that is measured."""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: from the header, or its number.
        mean: its mean.
        scale: its standard deviation, which is its unit.
        low: least value.
        high: greatest value.
        distinct: how many different values it has.
        note: `constant`, `few values`, `far outliers`, or nothing.
    """

    name: str
    mean: float
    scale: float
    low: float
    high: float
    distinct: int
    note: str = ""


def columns_of(data: Dataset) -> list[Column]:
    """Every column of a table, or of events that are vectors; none for events of other shapes.

    >>> [c.note for c in columns_of(Dataset.of(torch.tensor([[0.0, 5.0]] * 30 + [[1.0, 5.0]] * 30), "codes"))]
    ['few values', 'constant']
    """
    if len(data.event_shape) != 1:
        return []
    x = data.x.detach().cpu().double()
    mean, scale, varies = column_scales(x)
    names = data.columns or [f"column {i + 1}" for i in range(x.shape[1])]
    return [_column(name, x[:, i], mean[i], scale[i], bool(varies[i])) for i, name in enumerate(names)]


def _column(name: str, x: Tensor, mean: Tensor, scale: Tensor, varies: bool) -> Column:
    distinct = len(torch.unique(x))
    note = ""
    if not varies:
        note = "constant"
    elif is_code(x, distinct):
        note = "few values"
    elif bool(_far(x).any()):
        note = "far outliers"
    return Column(name, float(mean), float(scale), float(x.min()), float(x.max()), distinct, note)


def is_code(x: Tensor, distinct: int | None = None) -> bool:
    """Whether the values `(n,)` are few and found again and again, so that they are spikes and no density."""
    distinct = len(torch.unique(x)) if distinct is None else distinct
    return distinct <= FEW and len(x) >= OFTEN * distinct


def _far(x: Tensor) -> Tensor:
    """Which values lie far beyond the quartiles."""
    low, high = torch.quantile(x[:: -(-len(x) // 1_000_000)], x.new_tensor([0.25, 0.75]))
    reach = FAR * (high - low)
    return ((x < low - reach) | (x > high + reach)) & (reach > 0)


def oddities(data: Dataset, noise: float = 0.0, field: str = "") -> list[str]:
    """What has no density, or will draw the model where it should not go, in words.

    `noise` is the least that training puts on the rows, and `field` says it; empty where nobody asked for noise.
    """
    columns = columns_of(data)
    found = [_words(data, i, column, noise) for i, column in enumerate(columns) if column.note]
    more = f"set more noise than {field}={noise:g}" if field else "add a little noise (trainer.data_noise)"
    found += [
        f"{name} follows from the columns before it, so that the rows fill no volume and have no density: drop "
        f"the column, or {more}"
        for name in dependent(data, columns, noise)
    ]
    if columns:
        copies = 1 - len(torch.unique(data.x, dim=0)) / len(data)
        if copies > COPIES:
            what = "has peaks as narrow as its noise" if noise else "could be infinite"
            found.append(
                f"{copies:.0%} of the rows are copies of others, where a density {what}: drop them, or {more}"
            )
    return found


def dependent(data: Dataset, columns: list[Column], noise: float = 0.0) -> list[str]:
    """Columns that are sums of multiples of those before them, a copy or another unit of one among them.

    Those are no longer where training puts enough `noise` on them.

    >>> x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    >>> data = Dataset.of(torch.cat([x, 3 * x[:, :1] - x[:, 1:] + 1], 1), "plane")
    >>> dependent(data, columns_of(data)), dependent(data, columns_of(data), noise=0.01)
    (['column 3'], [])
    """
    vary = [i for i, column in enumerate(columns) if column.note != "constant"]
    x = data.x[:ROWS] if columns else data.x[:0]
    if not 1 < len(vary) <= min(MOST_SHOWN, len(x) - 1):  # fewer rows than columns say nothing
        return []
    x = x[:, vary].detach().cpu().double()
    scale = x.std(0).clamp_min(1e-300)
    left = torch.linalg.qr((x - x.mean(0)) / scale, mode="r").R.diagonal() / len(x) ** 0.5
    share = torch.hypot(left, noise / scale)
    return [columns[i].name for i, open_ in zip(vary, share.tolist(), strict=True) if open_ < FOLLOWS]


def _words(data: Dataset, i: int, column: Column, noise: float) -> str:
    if column.note == "constant":
        spread = f"that of its noise, {noise:g}" if noise else "a ten-thousandth of that"
        return (
            f"{column.name} is {column.low:g} in every row and has no density: it is given a spread, {spread}; "
            "drop the column"
        )
    if column.note == "few values":
        return (
            f"{column.name} has {column.distinct} different values in {len(data)} rows: spikes, which are no "
            "density; spread them with dequantise, or drop the column"
        )
    far = int(_far(data.x[:, i].detach().cpu().double()).sum())
    return (
        f"{column.name} has {far} values more than {FAR:g} interquartile ranges beyond the quartiles (up to "
        f"{max(abs(column.low), abs(column.high)):g}): look at them, or take the column's logarithm"
    )


def columns_settings(data: Dataset) -> dict[str, Any]:
    """What a run's settings keep of its columns; nothing for events that are no vectors."""
    columns = columns_of(data) if len(data.event_shape) == 1 and data.event_shape[0] <= MOST_SHOWN else []
    return {"columns": [asdict(column) for column in columns]} if columns else {}


def dequantised(data: Dataset, seed: int) -> Dataset:
    """The rows with every code spread evenly between the midpoints to its neighbours.

    A column of few values is then a histogram: a density, from which the codes come back by rounding.

    >>> codes = Dataset.of(torch.tensor([0.0, 1.0, 2.0] * 20)[:, None], "codes")
    >>> bool((dequantised(codes, 0).x.round() == codes.x).all())
    True
    """
    x = data.x.detach().clone().double()
    if x.dim() != 2:
        return data
    rng = generator(derive(seed, "dequantise"))
    for i in range(x.shape[1]):
        u = torch.rand(len(x), generator=rng, dtype=torch.float64).to(x.device)
        if is_code(x[:, i]) and bool((x[:, i] != x[0, i]).any()):
            x[:, i] = _spread(x[:, i], u)
    return replace(data, x=x)


def _spread(x: Tensor, u: Tensor) -> Tensor:
    values, place = torch.unique(x, return_inverse=True)
    half = values.diff() / 2
    low = values - torch.cat([half[:1], half])
    high = values + torch.cat([half, half[-1:]])
    return torch.lerp(low[place], high[place], u)
