"""Pictures for the page, each an SVG without title or legend: the page writes those as text around it."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .figures import DATA, INK, MODEL, MUTED, density_colours, new_figure, style, to_svg
from .formatting import count, number

_MOST_POINTS, _BINS = 400, 160
MOST_TICKS = 120
_MOST_TILES = 64


@dataclass(frozen=True)
class Series:
    """A line: values over x, with an error band, a colour and a dash pattern."""

    name: str
    x: np.ndarray
    y: np.ndarray
    color: str
    linestyle: Any = "-"
    band: np.ndarray | None = None


@dataclass(frozen=True)
class Drawing:
    """An SVG and what should be said about it."""

    svg: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Window:
    """The rectangle that every panel of a plane shows."""

    x: tuple[float, float]
    y: tuple[float, float]


# ---------------------------------------------------------------------------------------------- curves


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
        log = log and _spans_decades(series)
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
        outside = 0 if log else _limit_y(axes, series, floor, ceiling)
        if log:
            _log_axis(axes)
        else:
            axes.locator_params(axis="y", nbins=5)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        _plain_numbers(axes.xaxis)
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


def _limit_y(axes: Any, series: Sequence[Series], floor: float | None, ceiling: float | None) -> int:
    """Keep a blow-up from flattening everything else; returns how many values the axis leaves out."""
    values = np.concatenate([s.y[np.isfinite(s.y)] for s in series])
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


def _spans_decades(series: Sequence[Series]) -> bool:
    values = np.concatenate([s.y[np.isfinite(s.y)] for s in series])
    return bool(values.size and values.min() > 0 and values.max() > 30 * values.min())


def _log_axis(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    few = high < 300 * low  # under two and a half decades the powers of ten alone leave an axis bare
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=12 if few else 6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _power(v)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", which="minor", length=0)


def _power(value: float) -> str:
    text = number(value)
    return text.removeprefix("1 × ")


def _plain_numbers(axis: Any, most: int = 6) -> None:
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


# ---------------------------------------------------------------------------------------------- planes


def log_window_mass(log_density: np.ndarray, grid_x: np.ndarray, grid_y: np.ndarray) -> float:
    """The log of ∫ exp(log_density) over the window, by the trapezoid rule; `log_density` is `(m, n)`."""
    top = _finite_max(log_density)
    p = np.exp(np.where(np.isfinite(log_density), log_density, -np.inf) - top)
    return top + math.log(float(area(area(p, grid_x), grid_y)))


def area(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Trapezoid rule along the last dimension."""
    return ((values[..., 1:] + values[..., :-1]) / 2 * np.diff(places)).sum(-1)


def scaled_to_window(log_density: np.ndarray, grid_x: np.ndarray, grid_y: np.ndarray) -> np.ndarray:
    """The log-density shifted so that it integrates to one over the window."""
    return log_density - log_window_mass(log_density, grid_x, grid_y)


def _finite_max(values: np.ndarray) -> float:
    return float(values[np.isfinite(values)].max())


def density_map(
    name: str, log_density: np.ndarray, grid_x: np.ndarray, grid_y: np.ndarray, highest: float
) -> Drawing:
    """A density over the plane with contours 2, 4 and 8 nats below its own peak; colours end at `highest`."""
    figure, axes = _plane(Window((grid_x[0], grid_x[-1]), (grid_y[0], grid_y[-1])))
    with style():
        p = np.exp(np.where(np.isfinite(log_density), log_density, -np.inf))
        axes.pcolormesh(
            grid_x,
            grid_y,
            p,
            vmin=0,
            vmax=highest,
            cmap=density_colours(),
            shading="gouraud",
            rasterized=True,
        )
        levels = _finite_max(log_density) - np.array([8.0, 4.0, 2.0])
        low = np.where(np.isfinite(log_density), log_density, levels[0] - 1)
        axes.contour(
            grid_x,
            grid_y,
            low,
            levels=levels,
            colors="#6f7c8c",
            linewidths=0.6,
            linestyles="solid",
            alpha=0.6,
        )
        return Drawing(to_svg(figure, name))


def scatter(name: str, points: np.ndarray, window: Window, color: str) -> Drawing:
    """Points of the plane, `(n, 2)`."""
    figure, axes = _plane(window)
    with style():
        size = float(np.clip(4000 / max(len(points), 1), 1.5, 14))
        axes.plot(
            points[:, 0],
            points[:, 1],
            "o",
            color=color,
            markersize=math.sqrt(size),
            alpha=0.45,
            markeredgewidth=0,
            rasterized=True,
        )
        inside = _inside(points, window)
        notes = (
            (f"{count(len(points) - inside, 'point')} outside the window.",) if inside < len(points) else ()
        )
        return Drawing(to_svg(figure, name), notes)


def window_of(clouds: Sequence[np.ndarray]) -> Window:
    """The central 99 % of the points with a margin, so that one stray point does not set the scale."""
    points = np.concatenate([c[np.isfinite(c).all(1)] for c in clouds])
    low, high = np.quantile(points, [0.005, 0.995], axis=0) if len(points) else (np.zeros(2), np.ones(2))
    margin = 0.08 * np.maximum(high - low, 1e-6)
    (x0, y0), (x1, y1) = low - margin, high + margin
    return Window((float(x0), float(x1)), (float(y0), float(y1)))


def coloured_scatter(
    name: str, clouds: Sequence[np.ndarray], window: Window, colors: Sequence[str]
) -> Drawing:
    """Points of the plane, `(n, 2)` of each colour."""
    figure, axes = _plane(window)
    with style():
        for points, color in zip(clouds, colors, strict=True):
            axes.plot(
                points[:, 0], points[:, 1], "o", color=color, markersize=4, alpha=0.7, markeredgewidth=0
            )
        return Drawing(to_svg(figure, name))


def _plane(window: Window) -> tuple[Any, Any]:
    wide, tall = (end - start for start, end in (window.x, window.y))
    equal = 0.4 < tall / wide < 2.5
    figure = new_figure(2.7, 0.25 + 2.4 * float(np.clip(tall / wide, 0.6, 1.4)) if equal else 2.5)
    with style():
        axes = figure.subplots()
        axes.grid(False)
        axes.spines[["top", "right"]].set_visible(True)
        axes.set(xlim=window.x, ylim=window.y, xlabel="x₁", ylabel="x₂")
        if equal:
            axes.set_aspect("equal")
        axes.tick_params(axis="both", length=3, width=0.7)
        axes.locator_params(nbins=5, steps=[1, 2, 5, 10])
    return figure, axes


def _inside(points: np.ndarray, window: Window) -> int:
    (x0, x1), (y0, y1) = window.x, window.y
    x, y = points[:, 0], points[:, 1]
    return int(((x >= x0) & (x <= x1) & (y >= y0) & (y <= y1)).sum())


# ------------------------------------------------------------------------------------------- marginals


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
        _plain_numbers(axes.xaxis, 4 if small else 6)
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
        notes += _left_out(cloud, values, inside)
    axes.set(xlabel=x_label, ylabel="share")
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="y", nbins=4)
    _plain_numbers(axes.xaxis, 4)
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


def _left_out(cloud: Cloud, finite: np.ndarray, inside: np.ndarray) -> list[str]:
    broken, outside = cloud.values.size - finite.size, finite.size - inside.size
    notes = [f"{count(broken, 'value')} of {cloud.name} not finite."] if broken else []
    few = outside <= 0.01 * cloud.values.size  # the quantiles of the axis leave out some of any cloud
    return notes if few else [*notes, f"{count(outside, 'value')} of {cloud.name} outside the axis."]


# ------------------------------------------------------------------------------------------ reliability


@dataclass(frozen=True)
class Bins:
    """A reliability curve: confidence, accuracy and its error, and the number of events, for each bin."""

    confidence: np.ndarray
    accuracy: np.ndarray
    std_error: np.ndarray
    events: np.ndarray
    low: np.ndarray
    high: np.ndarray


def reliability(name: str, bins: Bins) -> Drawing:
    """Accuracy against confidence with ± 2 standard errors, over where the confidences lie."""
    figure = new_figure(4.4, 4.0)
    with style():
        draw_reliability(figure, bins)
        return Drawing(to_svg(figure, name))


def draw_reliability(figure: Any, bins: Bins) -> None:
    """The curve above, the share of events in each bin below."""
    axes, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3.4, 1]})
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.errorbar(
        bins.confidence,
        bins.accuracy,
        np.clip(2 * bins.std_error, 0, [bins.accuracy, 1 - bins.accuracy]),  # of a share
        fmt="o",
        color=MODEL,
        markersize=4.5,
        elinewidth=1.3,
    )
    axes.set(ylabel="accuracy", xlim=(0, 1.02), ylim=(0, 1.04))
    share = bins.events / max(bins.events.sum(), 1)
    below.bar(bins.low, share, bins.high - bins.low, align="edge", color=DATA, alpha=0.35, linewidth=0)
    below.set(xlabel="confidence", ylabel="share")
    below.locator_params(axis="y", nbins=3)


# ------------------------------------------------------------------------------------------------ modes


@dataclass(frozen=True)
class Weights:
    """Weight of every mode as one source sees it."""

    name: str
    values: Sequence[float]
    color: str
    std_error: Sequence[float] | None = None


def mode_weights(
    name: str, truth: Sequence[float], truth_color: str, found: Sequence[Weights], width: float = 5.0
) -> Drawing:
    """For every mode a bar for what it should weigh and a dot with ± 2 standard errors for what was found."""
    n = max([len(truth), *(len(w.values) for w in found)])
    figure = new_figure(width, 2.6)
    with style():
        axes = figure.subplots()
        if len(truth):
            axes.bar(range(1, len(truth) + 1), truth, width=0.72, color=truth_color, alpha=0.28, linewidth=0)
        spread = np.linspace(-0.24, 0.24, len(found)) if len(found) > 1 else [0.0]
        for shift, w in zip(spread, found):
            error = None if w.std_error is None else 2 * np.abs(np.asarray(w.std_error))
            axes.errorbar(
                np.arange(1, len(w.values) + 1) + shift,
                w.values,
                yerror(error),
                fmt="o",
                color=w.color,
                markersize=4.5,
                elinewidth=1.3,
            )
        axes.set(xlabel="mode", ylabel="weight", xlim=(0.4, n + 0.6))
        axes.set_ylim(bottom=0)
        axes.xaxis.set_ticks(range(1, n + 1, max(n // 12, 1)))
        axes.locator_params(axis="y", nbins=5)
        return Drawing(to_svg(figure, name))


def yerror(error: np.ndarray | None) -> np.ndarray | None:
    """Error bars that matplotlib takes: finite or none."""
    return None if error is None or not np.isfinite(error).all() else error


# ----------------------------------------------------------------------------------------------- images


def image_side(shape: tuple[int, ...] | None) -> tuple[int, int] | None:
    """Height and width where `shape` is that of a picture: (1 or 3, H, W), or (H, W) of at least 4 by 4."""
    if shape is None:
        return None
    if len(shape) == 3 and shape[0] in (1, 3):
        return shape[1], shape[2]
    return (shape[0], shape[1]) if len(shape) == 2 and min(shape) >= 4 else None


def image_grid(
    images: np.ndarray, low: float, high: float, columns: int = 8, most: int = _MOST_TILES
) -> bytes:
    """Up to `most` pictures `(n, *event)` as one PNG, `columns` in a row; `low` is black and `high` white."""
    from matplotlib.image import imsave

    images = images[:most]
    if images.ndim == 3:
        images = images[:, None]
    scaled = np.nan_to_num(np.clip((images - low) / max(high - low, 1e-12), 0, 1))
    tiles = np.round(255 * np.moveaxis(scaled, 1, -1)).astype(np.uint8)
    tiles = np.repeat(tiles, 3, axis=-1) if tiles.shape[-1] == 1 else tiles
    buffer = io.BytesIO()
    imsave(buffer, _enlarged(_tiled(tiles, min(len(tiles), columns))), format="png")
    return buffer.getvalue()


def _tiled(tiles: np.ndarray, columns: int) -> np.ndarray:
    n, height, width, _ = tiles.shape
    rows = math.ceil(n / columns)
    sheet = np.zeros(
        (rows * (height + 1) + 1, columns * (width + 1) + 1, 4), np.uint8
    )  # gaps are transparent
    for i, tile in enumerate(tiles):
        top, left = 1 + (i // columns) * (height + 1), 1 + (i % columns) * (width + 1)
        sheet[top : top + height, left : left + width] = np.dstack(
            [tile, np.full((height, width), 255, np.uint8)]
        )
    return sheet


def _enlarged(sheet: np.ndarray) -> np.ndarray:
    """Whole multiples only, so that every pixel keeps its value."""
    times = max(round(640 / sheet.shape[1]), 1)
    return sheet.repeat(times, axis=0).repeat(times, axis=1)
