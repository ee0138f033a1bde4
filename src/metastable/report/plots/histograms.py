"""Histograms of clouds of numbers, one over another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..figures import DATA, MODEL, new_figure, style, to_svg
from ..formatting import count
from .curves import plain_numbers
from .drawing import Drawing, Series


def histogram(
    name: str,
    data: np.ndarray | None,
    samples: np.ndarray | None,
    x_label: str,
    densities: Sequence[Series] = (),
    small: bool = True,
) -> Drawing:
    """Data and samples of one coordinate over the same bins, with densities on top."""
    figure = new_figure(2.9, 1.9) if small else new_figure(6.4, 3.0)
    clouds = {DATA: _finite(data), MODEL: _finite(samples)}
    bins = _bins([c for c in clouds.values() if c.size], 30 if small else 60)
    with style():
        axes = figure.subplots()
        if clouds[DATA].size:
            axes.hist(clouds[DATA], bins, density=True, color=DATA, alpha=0.35, linewidth=0)
        if clouds[MODEL].size:
            axes.hist(clouds[MODEL], bins, density=True, histtype="step", color=MODEL, linewidth=1.4)
        for line in densities:
            axes.plot(line.x, line.y, color=line.color, linestyle=line.linestyle)
        axes.set(xlabel=x_label, ylabel="" if small else "density")
        axes.set_ylim(bottom=0)
        axes.locator_params(nbins=4 if small else 7)
        return Drawing(to_svg(figure, name))


def _finite(values: np.ndarray | None) -> np.ndarray:
    values = np.empty(0) if values is None else np.ravel(values)
    return values[np.isfinite(values)]


def _bins(clouds: Sequence[np.ndarray], most: int) -> Any:
    """Edges over the central 99.8 % of both, so that a stray sample does not leave one bin."""
    if not clouds:
        return np.linspace(0, 1, 3)
    values = np.concatenate(clouds)
    low, high = np.quantile(values, [0.001, 0.999])
    distinct = np.unique(values)
    half = np.diff(distinct).min() / 2 if len(distinct) > 1 else 0.0
    if 1 < len(distinct) <= 16 < len(values) and np.ptp(distinct) < 64 * half:  # bits, counts: a bar each
        return np.arange(distinct[0] - half, distinct[-1] + 1.01 * half, 2 * half)
    width = max(high - low, 1e-9)
    return np.linspace(low - 0.02 * width, high + 0.02 * width, most + 1)


@dataclass(frozen=True)
class Cloud:
    """Values of one kind for a histogram: filled, or an outline with a dash pattern."""

    name: str
    values: np.ndarray
    color: str
    filled: bool = False
    linestyle: Any = "-"


def overlaid(
    name: str, clouds: Sequence[Cloud], x_label: str, *, small: bool = False, reach: int | None = None
) -> Drawing:
    """Histograms over the same bins, each of height 1 in all; values outside the axis are counted in the notes.

    Args:
        name: salts the identifiers of the SVG.
        clouds: what to draw, from the back to the front.
        x_label: what runs along.
        small: for three in a row.
        reach: the axis follows this many of the clouds, and the others no further than three times as wide; all
            of them by default.

    """
    figure = new_figure(3.6, 2.2) if small else new_figure(6.4, 2.9)
    with style():
        axes = figure.subplots()
        notes = draw_overlaid(axes, clouds, x_label, 30 if small else 60, reach)
        plain_numbers(axes.xaxis, 4 if small else 6)
        return Drawing(to_svg(figure, name), notes)


def draw_overlaid(
    axes: Any, clouds: Sequence[Cloud], x_label: str, bins: int, reach: int | None = None
) -> tuple[str, ...]:
    """Histograms of every cloud on `axes`; returns what should be said about values that are not shown.

    There are at most `bins`, and fewer where the smallest cloud has few values.
    """
    finite = [_finite(cloud.values) for cloud in clouds]
    low, high = _reach(finite, len(clouds) if reach is None else reach)
    fewest = min(cloud.values.size for cloud in clouds)
    bins = min(bins, max(15, round(2 * math.sqrt(fewest))))
    edges, notes = np.linspace(low, high, bins + 1), []
    for cloud, values in zip(clouds, finite, strict=True):
        inside = values[(values >= low) & (values <= high)]
        look: dict[str, Any] = {"alpha": 0.35, "linewidth": 0, "histtype": "stepfilled"}
        if not cloud.filled:
            look = {"linewidth": 1.4, "histtype": "step", "linestyle": cloud.linestyle}
        axes.hist(
            inside, edges, weights=np.full(len(inside), 1 / cloud.values.size), color=cloud.color, **look
        )
        broken, outside = cloud.values.size - values.size, values.size - inside.size
        if broken:
            notes.append(f"{count(broken, 'value')} of {cloud.name} not finite.")
        if outside > 0.01 * cloud.values.size:  # the quantiles of the axis leave out some of any cloud
            notes.append(f"{count(outside, 'value')} of {cloud.name} outside the axis.")
    axes.set(xlabel=x_label, ylabel="share")
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="y", nbins=4)
    plain_numbers(axes.xaxis, 4)
    return tuple(notes)


def _reach(clouds: Sequence[np.ndarray], leading: int) -> tuple[float, float]:
    """Ends of an axis: the central 99.6 % of each leading cloud, and of the others within three times that."""
    ends = [np.quantile(c, [0.002, 0.998]) for c in clouds[:leading] if c.size]
    low, high = (min(e[0] for e in ends), max(e[1] for e in ends)) if ends else (0.0, 1.0)
    width = max(high - low, 1e-6 * max(abs(low), abs(high), 1.0))
    for values in (c for c in clouds[leading:] if c.size):
        first, last = np.quantile(values, [0.002, 0.998])
        low, high = min(low, max(first, low - 1.5 * width)), max(high, min(last, high + 1.5 * width))
    margin = 0.02 * max(high - low, width)
    return low - margin, high + margin
