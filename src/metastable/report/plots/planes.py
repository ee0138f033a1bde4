"""Densities and points in a plane."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..figures import density_colours, new_figure, style, to_svg
from ..formatting import count
from .drawing import Drawing, Window


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
        (x0, x1), (y0, y1), (x, y) = window.x, window.y, points.T
        outside = len(points) - int(((x >= x0) & (x <= x1) & (y >= y0) & (y <= y1)).sum())
        notes = (f"{count(outside, 'point')} outside the window.",) if outside else ()
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
