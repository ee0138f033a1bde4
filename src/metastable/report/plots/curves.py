"""Curves along training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..figures import INK, MUTED, new_figure, style, to_svg
from ..formatting import count, number
from .drawing import Drawing, Series

_MOST_POINTS, _BINS = 400, 160
MOST_TICKS = 120


def curves(
    name: str,
    series: Sequence[Series],
    *,
    x_label: str = "step",
    y_label: str = "",
    log: bool = False,
    floor: float | None = None,
    ceiling: float | None = None,
    ticks: np.ndarray | None = None,
    level: float | None = None,
    small: bool = False,
) -> Drawing:
    """Lines over training. Long logs are drawn as the mean and range of bins.

    Args:
        name: salts the identifiers of the SVG.
        series: the lines; values that are not finite leave gaps and are counted in the notes.
        x_label: what runs along.
        y_label: what runs up.
        log: logarithmic where every value is above 0 and they span more than a factor of 30.
        floor: lower end of the axis, where it has a meaning.
        ceiling: upper end of the axis, where it has a meaning.
        ticks: places along x that get a small mark at the foot, unless they would run together.
        level: a dashed horizontal line.
        small: for three in a row.

    """
    figure = new_figure(3.6, 2.2) if small else new_figure(5.0, 2.6)
    with style():
        axes = figure.subplots()
        values = np.concatenate([s.y[np.isfinite(s.y)] for s in series])
        log = bool(log and values.size and values.min() > 0 and values.max() > 30 * values.min())
        for line in series:
            _draw_line(axes, line)
        if level is not None:
            axes.axhline(level, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        if ticks is not None and 0 < len(ticks) <= MOST_TICKS:
            axes.plot(
                ticks,
                np.full(len(ticks), 0.025),
                "|",
                color=INK,
                markersize=7,
                markeredgewidth=0.9,
                transform=axes.get_xaxis_transform(),
                clip_on=False,
            )
        outside = 0 if log else _limit_y(axes, values, floor, ceiling)
        if log:
            _log_axis(axes)
        else:
            axes.locator_params(axis="y", nbins=5)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        plain_numbers(axes.xaxis)
        return Drawing(to_svg(figure, name), _curve_notes(series, outside))


def _draw_line(axes: Any, line: Series) -> None:
    x, mean, low, high = thinned(line.x, line.y)
    if low is not None and high is not None:
        axes.fill_between(x, low, high, color=line.color, alpha=0.18, linewidth=0)
    alone = np.isfinite(mean).sum() == 1
    axes.plot(
        x, mean, color=line.color, linestyle=line.linestyle, marker="o" if alone else None, markersize=4
    )
    if line.band is not None:
        half = thinned(line.x, line.band)[1]
        axes.fill_between(x, mean - half, mean + half, color=line.color, alpha=0.22, linewidth=0)


def thinned(
    x: np.ndarray, y: np.ndarray, most: int = _MOST_POINTS, bins: int = _BINS
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """More than `most` points as `bins`: centres, means, and lowest and highest of each (None if not binned).

    A bin without a finite value is NaN, so that a gap stays a gap.

    >>> thinned(np.arange(4.0), np.array([1.0, 3.0, 5.0, np.nan]), most=3, bins=2)[1]
    array([2., 5.])
    """
    y = np.where(np.isfinite(y), y, np.nan)
    if len(x) <= most:
        return x, y, None, None
    edges = np.linspace(0, len(x), bins + 1).astype(int)
    parts = [(x[a:b], y[a:b][np.isfinite(y[a:b])]) for a, b in pairwise(edges)]

    def each(reduce: Any) -> np.ndarray:
        return np.array([reduce(values) if values.size else np.nan for _, values in parts])

    return np.array([places.mean() for places, _ in parts]), each(np.mean), each(np.min), each(np.max)


def _limit_y(axes: Any, values: np.ndarray, floor: float | None, ceiling: float | None) -> int:
    """Keep a blow-up from flattening everything else; returns how many values the axis leaves out."""
    if values.size > 20:
        low, high = np.quantile(values, [0.05, 0.9])
        reach = 25 * max(high - low, 1e-12)
        if values.max() > high + reach or values.min() < low - reach:
            inside = values[(values <= high + reach) & (values >= low - reach)]
            margin = 0.06 * max(float(np.ptp(inside)), 1e-12)
            axes.set_ylim(inside.min() - margin, inside.max() + margin)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom if floor is None else floor, top if ceiling is None else ceiling)
    bottom, top = axes.get_ylim()
    return int(((values < bottom) | (values > top)).sum())


def _log_axis(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    few = high < 300 * low  # under two and a half decades the powers of ten alone leave an axis bare
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=12 if few else 6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: number(v).removeprefix("1 × ")))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", which="minor", length=0)


def plain_numbers(axis: Any, most: int = 6) -> None:
    """Ticks as plain numbers, few of them."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(most))
    axis.set_major_formatter(FuncFormatter(lambda v, _: number(v)))


def _curve_notes(series: Sequence[Series], outside: int) -> tuple[str, ...]:
    broken = sum(int(np.isinf(s.y).sum()) for s in series)
    notes = []
    if any(len(s.x) > _MOST_POINTS for s in series):
        notes.append("Line: mean over neighbouring steps; shade: their range.")
    if outside:
        notes.append(f"{count(outside, 'value')} outside the axis.")
    if broken:
        notes.append(f"{count(broken, 'infinite value')} not drawn.")
    return tuple(notes)
