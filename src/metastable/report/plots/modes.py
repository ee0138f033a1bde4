"""Weights of modes, as bars with their errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..figures import new_figure, style, to_svg
from .drawing import Drawing


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
