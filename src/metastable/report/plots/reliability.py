"""How often a classifier is right, against how sure it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..figures import DATA, MODEL, MUTED, new_figure, style, to_svg
from .drawing import Drawing


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
