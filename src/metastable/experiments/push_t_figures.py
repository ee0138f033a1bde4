"""Pictures of `push-t`: scores over steps and against milliseconds, and episodes (Table 6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from metastable.core.random import derive
from metastable.policies.environments import FULL, pusht_starts
from metastable.policies.films import films_pusht
from metastable.policies.policy import Policy
from metastable.report.figures import palette, picture

from .base import Bench
from .pieces import Piece

SHOWN = 4
"""Starts that are drawn."""
SEEING = "pictures-"
"""What names of those begin with that are of policies which see pictures."""
STYLES = ("-", "--", ":")
"""Of lines of the same colour."""
TICKS = [first * 10**k for k in range(5) for first in (1, 2, 5)]
"""Milliseconds that are named."""
Found = dict[tuple[str, str], Piece]
"""By arm, and how it acts: by the `best` of ℓ draws, by `one`, or by fewer gradients, such as `g100`."""


def drawing(bench: Bench, name: str) -> Path:
    """Where a picture lies: those of policies that see pictures have names of their own, to lie beside others."""
    return bench.folder / f"{SEEING if bench.pictures else ''}{name}.png"


def draw(bench: Bench, found: Found) -> None:
    """Mean score over steps of every arm, by `best` where it has that, and what every kind costs."""
    first = [key for key in found if key[1] == "best" or (key[1] == "one" and (key[0], "best") not in found)]
    with picture(drawing(bench, "scores"), 6, 3.6) as axes:
        for k, (arm, kind) in enumerate(first):
            score = (
                np.maximum.accumulate(found[arm, kind].arrays["progress"] / FULL, -1).clip(max=1).mean((0, 1))
            )
            axes.plot(
                np.arange(1, len(score) + 1),
                score,
                STYLES[k // len(palette) % len(STYLES)],
                lw=1.2,
                label=f"{arm}, {kind}",
            )
        axes.set(xlabel="step", ylabel="maximum of coverage/0.95 so far", ylim=(0, 1))
        if found:
            axes.legend(fontsize=7)
    timed = {key: piece for key, piece in found.items() if "chunk_ms" in piece.numbers}
    if timed:
        draw_costs(bench, timed)


def draw_costs(bench: Bench, timed: Found) -> None:
    """The score within the first horizon against milliseconds of a chunk, a line for the kinds of an arm."""
    with picture(drawing(bench, "milliseconds"), 6, 3.6) as axes:
        for arm in dict.fromkeys(arm for arm, _ in timed):
            points = sorted(
                (piece.numbers["chunk_ms"], *scored(piece), kind)
                for (other, kind), piece in timed.items()
                if other == arm
            )
            at, value, low, high = (np.array(column) for column in list(zip(*points, strict=True))[:4])
            off = (value - low, high - value)
            axes.errorbar(at, value, off, marker="o", ms=3, lw=1, capsize=2, label=arm)
            for x, y, *_, kind in points:
                axes.annotate(kind, (x, y), textcoords="offset points", xytext=(3, 3), fontsize=6)
        axes.set(xscale="log", xlabel="milliseconds of a chunk, one environment", ylabel="score", ylim=(0, 1))
        ends = [piece.numbers["chunk_ms"] for piece in timed.values()]
        ticks = [t for t in TICKS if min(ends) / 2.5 < t < 2.5 * max(ends)]
        axes.set_xticks(ticks or axes.get_xticks())
        axes.legend(fontsize=7)


def scored(piece: Piece) -> Any:
    """The mean maximum of the first horizon, with the ends of its interval."""
    return piece.numbers[min((key for key in piece.numbers if key.startswith("maximum/")), key=steps_of)]


def steps_of(name: str) -> int:
    """200 of `maximum/200`."""
    return int(name.rpartition("/")[2])


def show(bench: Bench, arm: str, policy: Policy) -> None:
    """Table 6: a few episodes, the last frame with the commanded points from light to dark; the first as a GIF.

    They are made where the table is missing, which is written last.
    """
    table = drawing(bench, f"table-6-{arm}")
    if table.is_file():
        return
    seed, starts = derive(bench.seed, "film") % 2**31, pusht_starts(SHOWN, bench.start_seed)
    films = films_pusht(policy, starts, bench.horizon, seed, pictures=bench.pictures)
    films[0].write(bench.folder / f"{arm}.gif", every=4)
    with picture(table, 2.2 * SHOWN, 2.3, columns=SHOWN) as grid:
        for axes, each in zip(grid, films, strict=True):
            axes.imshow(each.frames[-1], extent=(0, 512, 512, 0))
            axes.scatter(*each.actions.T, c=np.arange(len(each.actions)), cmap="Blues", s=3)
            score = min(each.progress.max() / FULL, 1)
            axes.set(xticks=[], yticks=[], title=f"{arm}: {score:.2f}")
            axes.grid(False)
