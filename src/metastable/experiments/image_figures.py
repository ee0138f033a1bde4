"""Pictures of trainings on pictures: distances over minutes, samples, and effective sample sizes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from metastable.report.figures import line_look, picture, save_image_rows

from .base import Bench
from .image_runs import Found

COLUMNS = 12
"""Samples in a row."""


def shown(images: np.ndarray) -> np.ndarray:
    """Bytes as numbers from −1 to 1."""
    return images[:COLUMNS].astype(np.float32) / 127.5 - 1


def arms_of(found: Found) -> list[str]:
    """In the order in which they are found."""
    return list(dict.fromkeys(arm for arm, _ in found))


def draw_distances(bench: Bench, found: Found, name: str = "distances.png") -> None:
    """FID over minutes of training where there is one, pixels' distance where there is none; 95 % intervals."""
    key = "fid" if any("fid" in piece.numbers for piece in found.values()) else "pixels_over_noise"
    with picture(bench.folder / name, 6, 3.6) as axes:
        for index, arm in enumerate(arms_of(found)):
            own = {mark: piece.numbers for (one, mark), piece in found.items() if one == arm}
            own = {mark: numbers for mark, numbers in own.items() if key in numbers}
            if own:
                marks, values = list(own), [numbers[key] for numbers in own.values()]
                axes.plot(marks, values, marker="o", ms=3, label=arm, **line_look(index))
                if key == "fid":
                    ends = [[n[end] for n in own.values()] for end in ("fid_low", "fid_high")]
                    axes.fill_between(marks, *ends, alpha=0.15, color=line_look(index)["color"])
        axes.set(
            xlabel="minutes of training",
            ylabel="FID" if key == "fid" else "pixels, share of noise's distance",
        )
        axes.legend(fontsize=7)


def draw_samples(bench: Bench, found: Found, data: Tensor, name: str = "samples.png") -> None:
    """Two rows of samples of each arm at its last mark, below data."""
    rows = {"data": data[:COLUMNS].cpu().numpy()}
    for arm in arms_of(found):
        drawn = {
            mark: piece.arrays
            for (one, mark), piece in found.items()
            if one == arm and "samples" in piece.arrays
        }
        if drawn:
            mark = max(drawn)
            rows[f"{arm}, {mark:g} min"] = shown(drawn[mark]["samples"])
            rows[f"{arm}, more"] = shown(drawn[mark]["samples"][COLUMNS:])
    save_image_rows(bench.folder / name, {key: images for key, images in rows.items() if len(images)})


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
