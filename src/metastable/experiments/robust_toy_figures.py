"""Pictures of `robust-toy` in the shape of the paper's: densities and their logarithms, learned and sampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.evaluation.quadrature import grid_density
from metastable.report.figures import density_colours, picture

from .base import Bench
from .robust_students import BETAS, DEFAULT, TOYS, VARIANTS, Score, Scores, Student, Toy

POINTS = 101
"""Of a drawn density along each axis."""
LEVELS = 24
"""Colours of a drawn density: few of them keep the files small."""
BANDWIDTH = 0.15
"""Of the kernel density estimate of samples: the standard deviation of a mode, and of a ring."""
DEPTH = 12.0
"""Nats below its maximum at which a drawn log density ends."""


class Line(NamedTuple):
    """Two rows of pictures: a set, and students on it by their labels."""

    title: str
    setup: str
    toy: Toy
    students: Mapping[str, Student]


def _by_beta(**kind: Any) -> dict[str, Student]:
    return {f"β = {b:g}": Student(b, **kind) for b in BETAS}


def _by_variant(beta: float) -> dict[str, Student]:
    return {v: Student(beta, v) for v in VARIANTS}


def plans() -> dict[str, list[Line]]:
    """The paper's figures by name."""
    gaussians, circles = TOYS["gaussians"], TOYS["circles"]
    both = (gaussians, circles)
    restricted = [(b, f"β = {b:g}: ") for b in BETAS if b]
    return {
        "figure-2": [Line("", DEFAULT, t, _by_beta()) for t in both],
        "figure-5": [
            Line("", DEFAULT, circles, _by_beta()),
            Line("twice as long: ", "longer", circles, _by_beta()),
        ],
        "figure-6": [Line("", DEFAULT, t, _by_beta(shifted=True)) for t in both],
        "figure-7": [Line("", DEFAULT, t, _by_variant(0.5)) for t in both],
        "figure-8": [Line("", "degenerate", t, _by_variant(0.5)) for t in both],
        "figure-9": [Line("", "degenerate", t, _by_beta()) for t in both],
        "figure-10": [Line(title, "restricted", gaussians, _by_variant(b)) for b, title in restricted],
        "figure-11": [Line(title, "restricted", circles, _by_variant(b)) for b, title in restricted],
    }


def draw(bench: Bench, scores: Scores) -> None:
    """Every figure with at least one line whose students were all trained."""
    for name, lines in plans().items():
        drawn = [line for line in lines if all(_key(line, s) in scores for s in line.students.values())]
        if drawn and not (name == "figure-5" and len(drawn) == 1):  # it compares two
            # columns: data, then for each student p_θ and SGLD(p_θ), those of the first seed
            columns = 1 + 2 * max(len(line.students) for line in drawn)
            size, shape = (1.25 * columns + 0.5, 2.6 * len(drawn) + 0.3), (2 * len(drawn), columns)
            with picture(bench.folder / f"{name}.png", *size, *shape, dpi=90, squeeze=False) as axes:
                for a in axes.flat:
                    a.set_axis_off()
                for i, line in enumerate(drawn):
                    shown = [(label, scores[_key(line, s)][0]) for label, s in line.students.items()]
                    _draw_line(axes[2 * i : 2 * i + 2], line, shown)


def _key(line: Line, student: Student) -> tuple[str, str, Student]:
    return line.setup, line.toy.name, student


def _draw_line(axes: Any, line: Line, students: Sequence[tuple[str, Score]]) -> None:
    """A density above, its logarithm below, from its own maximum down.

    Colours end at the data's maximum, so that what is too peaked shows as such, or below it at one's own.
    """
    toy, half = line.toy, line.toy.half_width
    colours = density_colours().resampled(LEVELS)
    look: dict[str, Any] = {"origin": "lower", "extent": (-half, half) * 2, "cmap": colours}
    look["interpolation"] = "nearest"
    data = learned(toy, lambda x: -toy.log_density(x))
    pictures = [("data", data)]
    for label, score in students:
        pictures += [(f"{label}\npθ, KL {score.kl:.3g}", learned(toy, score.energy))]
        pictures += [("\nSGLD(pθ)", smoothed(toy, score.samples))]
    for pair, (title, density) in zip(axes.T, pictures, strict=True):
        log_density = density.clamp(min=1e-300).log()
        top = min(float(data.max()), float(density.max()))
        pair[0].imshow(density.T.numpy(), vmin=0, vmax=top, **look)
        pair[1].imshow((log_density - log_density.max()).T.numpy(), vmin=-DEPTH, vmax=0, **look)
        pair[0].set_title(title, fontsize=8, fontweight="normal", loc="center", pad=3)
    for a, text in ((axes[0, 0], f"{line.title}density"), (axes[1, 0], "log density")):
        a.text(-0.08, 0.5, text, rotation=90, ha="right", va="center", fontsize=8, transform=a.transAxes)


def learned(toy: Toy, energy: Callable[[Tensor], Tensor]) -> Tensor:
    """exp(−E)/Z on the drawn grid, `(POINTS, POINTS)`."""
    return grid_density(energy, toy.box, POINTS).density


def smoothed(toy: Toy, samples: Tensor) -> Tensor:
    """A kernel density estimate of `samples`, `(n, 2)`, on the drawn grid, `(POINTS, POINTS)`."""
    axis = torch.linspace(-toy.half_width, toy.half_width, POINTS, dtype=torch.float64)
    along = torch.exp(-((axis[:, None, None] - samples.double()) / BANDWIDTH).square() / 2)  # (grid, n, 2)
    return along[..., 0] @ along[..., 1].T / (len(samples) * 2 * math.pi * BANDWIDTH**2)
