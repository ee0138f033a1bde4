"""Rows of `path-planning`: collisions and costs of every arm with their intervals, then differences."""

from __future__ import annotations

import math
import re
from typing import Any

from metastable.policies.intervals import difference_of

from .base import Bench, Row
from .path_planning_figures import draw_arms
from .pieces import Piece

PAPER = {
    "r-nce": (0.030, 0.116, 0.194, 2.287),
    "flow": (0.054, 0.101, 0.220, 0.500),
    "diffusion": (0.056, 0.099, 0.286, 0.569),
    "diffusion-phi": (0.039, 0.087, 0.237, 0.489),
    "ibc": (0.107, 0.203, 0.855, 8.734),
    "r-nce-7": (0.061, None, 0.20, None),
    "r-nce-31": (0.052, None, 0.212, None),
    "r-nce-pretrained": (0.058, None, 0.24, None),
}
"""Collisions of the best draw and of one, then costs, in the paper's own units: Tables 4 and 5, and Section 7.3 for
the proposal that is learned before."""
BEST, WORST = re.compile("collisions/[^/]+/best"), "collisions_above_all/ibc"
"""Rows of rates by the best of ℓ draws, and the row of what is asked to be the worst."""
NOTHING = ("straight", "random")
"""Those that learn nothing."""
Found = dict[tuple[str, str], Piece]
"""By arm, and whether it takes the `best` of ℓ draws or `one`."""


def interval_rows(name: str, at: list[float], judged: tuple[Any, Any], paper: Any) -> list[Row]:
    """A number with the ends of its interval."""
    value, low, high = at
    return [Row(name, value, *judged, paper), Row(f"{name}/low", low), Row(f"{name}/high", high)]


def rows_of(bench: Bench, found: Found) -> list[Row]:
    """Collisions and costs of every arm, what ranking gains, how far from walking straight, and comparisons."""
    rows = []
    for (arm, kind), piece in found.items():
        n, limit = piece.numbers, bench.most_collisions.get(arm) if kind == "best" else None
        judged = (None, None) if limit is None else ("<=", limit)
        paper = PAPER.get(arm, (None,) * 4)[kind == "one" :]
        rows += interval_rows(f"collisions/{arm}/{kind}", n["collisions"], judged, paper[0])
        rows += interval_rows(f"cost/{arm}/{kind}", n["cost"], (None, None), paper[2])
        rows.append(Row(f"goal_missed_by/{arm}/{kind}", n["goal missed by"][0]))
        if kind == "best":
            rows += best_rows(bench, found, arm)
    return rows


def best_rows(bench: Bench, found: Found, arm: str) -> list[Row]:
    """Of an arm that takes the best of ℓ: against one draw, against walking straight or anywhere, against r-nce."""
    best, one = found[arm, "best"], found.get((arm, "one"))
    rows = [Row(f"parameters/{arm}", best.numbers["parameters"], "<=", bench.most_parameters)]
    rows.append(Row(f"seconds/{arm}", best.numbers["seconds"]))
    if one is not None:
        share = best.numbers["collisions"][0] / max(one.numbers["collisions"][0], 1e-9)
        asked = ("<=", 0.5) if arm in bench.halved else (None, None)
        rows.append(Row(f"best_over_one/{arm}", share, *asked))
    for other in NOTHING:
        simple = found.get((other, "one"))
        if simple is not None:
            measure = "collisions" if other == "straight" else "goal missed by"
            gap = simple.numbers[measure][1] - best.numbers[measure][2]  # its low end above our high one
            asked = (">=", 0.0) if f"{other}/{arm}" in bench.required else (None, None)
            rows.append(Row(f"clear_of_{other}/{arm}", gap, *asked))
    first = found.get(("r-nce", "best"))
    if first is not None and arm != "r-nce":
        apart = difference_of(best.arrays["collisions"], first.arrays["collisions"])
        asked = (">=", 0.0) if arm in bench.behind else (None, None)
        name = f"collisions_above_r-nce/{arm}"
        rows += [Row(name, apart.value), Row(f"{name}/high", apart.high, *asked)]
    others = [piece for (other, kind), piece in found.items() if kind == "best" and other != arm]
    if arm == "ibc" and others:
        hits = [difference_of(best.arrays["collisions"], other.arrays["collisions"]) for other in others]
        least, asked = min(hits), (">=", 0.0) if arm in bench.worst else (None, None)
        rows += [
            Row(WORST, least.value, *asked),
            Row(f"{WORST}/low", least.low),
        ]
    return rows


def compared(bench: Bench, rows: list[Row]) -> list[Row]:
    """What sets arms apart of which several commands walked, by the rates that stand beside it.

    Worlds are the same, so the mean of differences in each world is the difference of means. Pairs, of which
    intervals are made, are in the pieces of one folder alone: of arms from several the upper end is that of arms
    which have nothing in common.
    """
    known = {row.metric: row for row in rows}
    rates = {name.split("/")[1]: row for name, row in known.items() if BEST.fullmatch(name)}
    if rates:
        draw_arms(bench, known)
    rates, made = {arm: row for arm, row in rates.items() if math.isfinite(row.value)}, {}
    for arm in (arm for arm in rates if arm != "r-nce" and "r-nce" in rates):
        name, (first, other) = f"collisions_above_r-nce/{arm}", (rates["r-nce"], rates[arm])
        made[name] = [Row(name, other.value - first.value)]
        ends = known.get(f"{other.metric}/high"), known.get(f"{first.metric}/low")
        if None not in ends:
            half = math.hypot(ends[0].value - other.value, first.value - ends[1].value)  # pyright: ignore
            asked = (">=", 0.0) if arm in bench.behind else (None, None)
            made[name].append(Row(f"{name}/high", made[name][0].value + half, *asked))
    others = [row.value for arm, row in rates.items() if arm != "ibc"]
    if "ibc" in rates and others:
        asked = (">=", 0.0) if "ibc" in bench.worst else (None, None)
        made[WORST] = [Row(WORST, rates["ibc"].value - max(others), *asked)]
    for name, new in made.items():
        if name in known and abs(known[name].value - new[0].value) < 1e-9:
            continue  # that of pairs, with its interval
        rows = [row for row in rows if row.metric not in (name, f"{name}/low", f"{name}/high")] + new
    return rows
