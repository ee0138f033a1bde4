"""Pictures of `path-planning`: collision rates of all arms, and world by world (Figure 4), and paths (Table 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from metastable.policies.intervals import clopper_pearson
from metastable.policies.path_world import TEST_WORLDS, PathWorlds
from metastable.report.figures import INK, MODEL, MUTED, palette, picture

from .base import Bench, Row
from .pieces import Piece

SHOWN, LINES = 3, 64
"""Worlds whose paths are kept and drawn, and paths that are drawn of each."""


def draw(bench: Bench, worlds: PathWorlds, found: dict[tuple[str, str], Piece]) -> None:
    """Figure 4 of the arms that take the best of their draws, and the paths of all in a few worlds."""
    best = {arm: piece for (arm, kind), piece in found.items() if kind == "best"}
    if best:
        draw_rates(bench, best)
    shown = best | {arm: piece for (arm, _), piece in found.items() if arm == "straight"}
    if shown:
        draw_paths(bench, worlds, shown)


def draw_arms(bench: Bench, known: Mapping[str, Row]) -> None:
    """Collision rates of all arms that are in these rows, with their intervals, and the paper's beside them."""
    named = dict.fromkeys(name.split("/")[1] for name in known if name.startswith("collisions/"))
    arms = sorted(named, key=lambda arm: f"collisions/{arm}/best" not in known)  # who learns nothing is last
    with picture(bench.folder / "collisions.png", 7, 3.4) as axes:
        for off, colour, kind in ((-0.2, palette.blue, "best"), (0.2, palette.sky, "one")):
            at = {i + off: f"collisions/{arm}/{kind}" for i, arm in enumerate(arms)}
            at = {x: name for x, name in at.items() if name in known}
            values = np.array([known[name].value for name in at.values()])
            ends = np.array(
                [
                    [known.get(f"{name}/{end}", known[name]).value for name in at.values()]
                    for end in ("low", "high")
                ]
            )
            label = "best of ℓ draws" if kind == "best" else "one draw"
            axes.bar(list(at), values, 0.4, yerr=abs(ends - values), color=colour, ecolor=MUTED, label=label)
            paper = {x: known[name].paper for x, name in at.items() if known[name].paper is not None}
            label = "paper" if kind == "best" else None
            axes.plot(list(paper), list(paper.values()), "D", ms=4, color=INK, label=label)
        axes.set(ylabel="collision rate", ylim=(0, None))
        axes.set_xticks(range(len(arms)), arms, rotation=30, ha="right")
        axes.legend(fontsize=7, loc="upper center")  # those that learn nothing are at the right


def draw_rates(bench: Bench, best: dict[str, Piece]) -> None:
    """Collision rate of each arm in each of the first worlds, with Clopper and Pearson's intervals."""
    with picture(bench.folder / "figure-4.png", 11, 3.4) as axes:
        width = 0.8 / len(best)
        for i, (arm, piece) in enumerate(best.items()):
            hits = piece.arrays["collisions"][:TEST_WORLDS]
            rates = [clopper_pearson(int(row.sum()), len(row)) for row in hits]
            value = np.array([rate.value for rate in rates])
            ends = np.array([[rate.value - rate.low, rate.high - rate.value] for rate in rates]).T
            at = np.arange(len(rates)) + (i - (len(best) - 1) / 2) * width
            label = f"{arm}: {piece.numbers['collisions'][0]:.3f}, cost {piece.numbers['cost'][0]:.3f}"
            axes.bar(at, value, width, yerr=ends, color=palette[i % len(palette)], label=label, ecolor=MUTED)
        axes.set(xlabel="world", ylabel="collision rate", ylim=(0, None))
        axes.legend(fontsize=7, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))  # above the bars


def draw_paths(bench: Bench, worlds: PathWorlds, shown: dict[str, Piece]) -> None:
    """Paths of each arm, a row of worlds for each."""
    across = min(SHOWN, len(worlds))
    size = (2.2 * across, 2.2 * len(shown))
    with picture(bench.folder / "table-3.png", *size, rows=len(shown), columns=across) as grid:
        for axes, (arm, piece) in zip(np.reshape(grid, (len(shown), across)), shown.items(), strict=True):
            for w, each in enumerate(axes):
                draw_world(each, worlds, w)
                for path in piece.arrays["paths"][w, :LINES]:
                    each.plot(*path.T, color=MODEL, lw=0.6, alpha=0.4)
                rate = piece.arrays["collisions"][w].mean()
                each.set_title(f"{arm}: {rate:.0%} collide", fontsize=7)


def draw_world(axes: Any, worlds: PathWorlds, w: int) -> None:
    """Discs, start and goal of one world."""
    from matplotlib.patches import Circle

    for centre, radius in zip(worlds.centres[w].tolist(), worlds.radii[w].tolist(), strict=True):
        axes.add_patch(Circle(centre, radius, color=MUTED, alpha=0.35, lw=0))
    axes.plot(*worlds.start[w].tolist(), "o", color=palette.blue, ms=4)
    axes.plot(*worlds.goal[w].tolist(), "*", color=palette.orange, ms=8)
    axes.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05), aspect="equal", xticks=[], yticks=[])
    axes.grid(False)
