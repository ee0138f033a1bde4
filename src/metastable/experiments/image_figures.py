"""Pictures of trainings on pictures: distances over minutes, samples, and effective sample sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from metastable.evaluation.image_distances import Measure
from metastable.report.figures import line_look, palette, picture, save_image_rows

from .base import Bench, Row
from .image_runs import BY_NETWORK, Found

COLUMNS = 12
"""Samples in a row."""
FEW = 4
"""Arms up to which each has a second row."""
DPI = 80
"""Of pictures of many rows, which stay small."""
THIN = {"linewidth": 0.8, "linestyle": ":"}
"""Lines of distances of pictures without their noise."""
WIDE = 3.0
"""Ratio of the largest distance to the smallest above which their axis is logarithmic."""


def shown(images: np.ndarray) -> np.ndarray:
    """Bytes as numbers from −1 to 1."""
    return images[:COLUMNS].astype(np.float32) / 127.5 - 1


def arms_of(found: Found) -> list[str]:
    """In the order in which they are found."""
    return list(dict.fromkeys(arm for arm, _ in found))


def over_minutes(rows: Iterable[Row], name: str) -> dict[str, dict[float, float]]:
    """The rows `NAME/ARM/minutes=M` by arm and minutes."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        first, _, at = row.metric.partition("/")
        arm, _, minutes = at.partition("/minutes=")
        if first == name and minutes:
            found.setdefault(arm, {})[float(minutes)] = row.value
    return found


def distances_in(rows: Iterable[Row]) -> tuple[str, str]:
    """What distance rows tell, and its name: FID, that by another network, or pixels' where there is none."""
    first = {row.metric.partition("/")[0] for row in rows}
    by = [(key, name) for key, name in BY_NETWORK.items() if key in first]
    return by[0] if by else ("pixels_over_noise", "pixels, share of noise's distance")


def half_width(std_error: float) -> float:
    """Of a 95 % interval."""
    return Measure(0.0, std_error, math.nan).interval[1]


def draw_distances(bench: Bench, rows: list[Row], arms: Sequence[str] = ()) -> list[Row]:
    """FID over minutes of training where there is one, pixels' distance where there is none; 95 % intervals.

    Without their noise, where that is known, they have thin lines. Where all arms have one and the same mark, they
    stand side by side, in the order of `arms` or else of `rows`.
    """
    key, name = distances_in(rows)
    found, bars = over_minutes(rows, key), over_minutes(rows, f"{key}_se")
    thin = over_minutes(rows, f"denoised_{key}")
    if not found:
        return rows
    marks = {mark for own in found.values() for mark in own}
    with picture(bench.folder / "distances.png", 6, 3.6) as axes:
        if len(marks) == 1:
            draw_side_by_side(axes, rows, [arm for arm in arms or found if arm in found])
            axes.set(ylabel=f"{name}, {marks.pop():g} min")
            return rows
        for index, (arm, own) in enumerate(found.items()):
            marks, values = list(own), np.array(list(own.values()))
            axes.plot(marks, values, marker="o", ms=3, label=arm, **line_look(index))
            off = np.array([half_width(bars.get(arm, {}).get(mark, 0.0)) for mark in marks])
            axes.fill_between(marks, values - off, values + off, alpha=0.15, color=line_look(index)["color"])
            clean = thin.get(arm, {})
            axes.plot(list(clean), list(clean.values()), marker="o", ms=2, **line_look(index) | THIN)
        axes.set(xlabel="minutes of training", ylabel=f"{name}, dotted: without noise" if thin else name)
        values = [value for own in found.values() for value in own.values() if value > 0]
        if max(values, default=1) > WIDE * min(values, default=1):
            axes.set_yscale("log", subs=(2, 3, 5))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
        axes.legend(fontsize=7)
    return rows


def draw_side_by_side(axes: Any, rows: list[Row], arms: Sequence[str]) -> None:
    """The last distance of every arm that has one, with its 95 % interval, in the order of `arms`."""
    key, name = distances_in(rows)
    found, bars = over_minutes(rows, key), over_minutes(rows, f"{key}_se")
    last = {arm: max(found[arm]) for arm in arms if arm in found}
    values = [found[arm][mark] for arm, mark in last.items()]
    off = [half_width(bars.get(arm, {}).get(mark, 0.0)) for arm, mark in last.items()]
    look = {"marker": "o", "ls": "", "capsize": 3, "color": palette.blue, "label": "ours"}
    axes.errorbar([arms.index(arm) for arm in last], values, off, **look)
    axes.set(ylabel=name)
    axes.set_xticks(range(len(arms)), arms, rotation=20, ha="right")
    axes.margins(x=0.08)


def draw_samples(bench: Bench, found: Found, data: Tensor, name: str = "samples.png") -> None:
    """A row of samples of each arm at its last mark, two where arms are few, below data."""
    rows = {"training pictures": data[:COLUMNS].cpu().numpy()}
    for arm in arms_of(found):
        drawn = {
            mark: piece.arrays
            for (one, mark), piece in found.items()
            if one == arm and "samples" in piece.arrays
        }
        if drawn:
            mark = max(drawn)
            rows[f"{arm}, {mark:g} min"] = shown(drawn[mark]["samples"])
            if len(arms_of(found)) <= FEW:
                rows[f"{arm}, more"] = shown(drawn[mark]["samples"][COLUMNS:])
    save_image_rows(bench.folder / name, {key: images for key, images in rows.items() if len(images)}, DPI)


def draw_curves(bench: Bench, found: Found, keys: Iterable[tuple[str, str]], name: str) -> None:
    """What was logged over minutes of training, a panel for each key; arms that do not log it are left out."""
    keys = list(keys)
    with picture(bench.folder / name, 4.4 * len(keys), 3.2, columns=len(keys), squeeze=False) as axes:
        for index, arm in enumerate(arms_of(found)):
            last = found[max(key for key in found if key[0] == arm)].arrays
            for axis, (key, title) in zip(axes[0], keys, strict=True):
                values = last.get(f"curve_{key}")
                if values is not None and np.isfinite(values).any():
                    axis.plot(last["curve_seconds"] / 60, values, label=arm, lw=0.9, **line_look(index))
                axis.set(title=title, xlabel="minutes of training")
        axes[0, 0].legend(fontsize=7)
