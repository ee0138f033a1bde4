"""Pictures of `jarzynski-mnist`: samples, errors over noise, curves, walkers by weight, and what was restored."""

from __future__ import annotations

import math

import numpy as np
import torch

from metastable.report.figures import draw_level, palette, picture, save_image_rows

from .base import Bench
from .pieces import Piece
from .three_digits import Digits

SHOWN = 12
"""Pictures in a row."""
DPI = 90
"""Of pictures of many rows, which stay small."""
Found = dict[tuple[str, float], Piece]
"""By arm and noise."""


def shown(images: np.ndarray) -> np.ndarray:
    """Bytes as numbers from −1 to 1."""
    return images[:SHOWN].astype(np.float32) / 127.5 - 1


def draw(bench: Bench, data: Digits, found: Found) -> None:
    """Figures 2 and 12 (samples with and without weights), 4 (curves), 11 (by weight), and what was restored."""
    names = {key: f"{key[0]}, {key[1]:g}" for key in found}
    weighted = {key: piece for key, piece in found.items() if key[0].startswith("jarzynski")}
    without = {key: piece for key, piece in found.items() if key not in weighted}
    draw_samples(bench, data, {names[key]: piece for key, piece in without.items()}, "figure-12.png")
    draw_samples(bench, data, {names[key]: piece for key, piece in weighted.items()}, "figure-2.png")
    if not weighted:
        return
    draw_curves(bench, {names[key]: piece for key, piece in weighted.items()})
    by_weight, restored = {}, {}
    for key, piece in weighted.items():
        heavy, light = piece.arrays["by_weight"][:SHOWN], piece.arrays["by_weight"][SHOWN:]
        by_weight |= {f"{names[key]}, heavy": shown(heavy), f"{names[key]}, light": shown(light)}
        for what in ("truth", "given", "mean", "draw"):
            restored[f"{names[key]}, {what}"] = shown(piece.arrays[f"restored_{what}"])
    save_image_rows(bench.folder / "figure-11.png", by_weight, DPI)
    save_image_rows(bench.folder / "restored.png", restored, DPI)


def draw_samples(bench: Bench, data: Digits, found: dict[str, Piece], name: str) -> None:
    """Samples without their noise below pictures that were not seen; of those with weights, as they are, too."""
    if not found:
        return
    rows = torch.linspace(0, len(data.held_out) - 1, SHOWN).long()
    samples = {"pictures": data.held_out.cpu()[rows].numpy()}
    for title, piece in found.items():
        samples[title] = shown(piece.arrays["clean"])
        if title.startswith("jarzynski, "):
            samples[f"{title}, with noise"] = shown(piece.arrays["noisy"])
    save_image_rows(bench.folder / name, samples, DPI)


def draw_errors(bench: Bench, errors: dict[tuple[str, float], float], values: dict[str, float]) -> None:
    """Figure 3, over the data noise: errors of the weights of each arm, with what the values say of their bars."""
    with picture(bench.folder / "figure-3.png", 5.5, 3.4) as axes:
        for arm, colour in zip(dict.fromkeys(arm for arm, _ in errors), palette, strict=False):
            own = {noise: error for (name, noise), error in errors.items() if name == arm}
            bars = [values.get(f"weight_error_se/{arm}/noise={noise:g}", math.nan) for noise in own]
            axes.errorbar(list(own), list(own.values()), bars, color=colour, marker="o", capsize=3, label=arm)
        draw_level(axes, bench.error_target)
        axes.set(xlabel="data noise", ylabel="mean relative error of the weights", ylim=(0, None))
        axes.legend(fontsize=7)


def draw_curves(bench: Bench, weighted: dict[str, Piece]) -> None:
    """Figure 4: cross-entropy and effective sample size over updates."""
    with picture(bench.folder / "figure-4.png", 9, 3.3, columns=2) as (entropy, ess):
        for (name, piece), colour in zip(weighted.items(), palette, strict=False):
            steps = piece.arrays["curve_step"]
            entropy.plot(steps, piece.arrays["curve_cross_entropy"], color=colour, lw=1, label=name)
            ess.plot(steps, piece.arrays["curve_ess"], color=colour, lw=1)
        entropy.set(title="cross-entropy", xlabel="update")
        ess.set(title="effective sample size", xlabel="update", ylim=(0, 1.02))
        entropy.legend(fontsize=7)
