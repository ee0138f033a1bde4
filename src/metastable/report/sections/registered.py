"""Sections that somebody registered (`metastable.summary.register`): a table of numbers, and pictures of arrays.

A page is made from files alone, so what an array looks like follows from its shape: `(n,)` are values of a
histogram, `(2, n)` a line, x above y. Those of one section share a picture of either kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import plots
from ..figures import DATA, MODEL, palette
from ..formatting import is_number, label, sentence
from ..markup import Html, join, number_cell, section, table, tag
from ..parts import key, picture, pictures
from ..read import Run, mapping

OTHERS = (palette.green, palette.purple, palette.orange, palette.sky, palette.grey)
"""Colours of what is neither called `data` nor `samples`."""


def registered(run: Run) -> list[Html]:
    """A section of the page for each."""
    numbers = _by_section({**run.evaluation, **mapping(run.summary.get("scores"))})
    arrays = _by_section(run.arrays)
    return [
        section(
            f"own-{i}",
            sentence(label(name)),
            join([number_table(numbers.get(name, {})), _drawn(name, arrays.get(name, {}))]),
        )
        for i, name in enumerate(dict.fromkeys([*numbers, *arrays]))
    ]


def number_table(found: dict[str, Any]) -> Html:
    """Named numbers."""
    rows = [
        (tag("td", sentence(label(name))), number_cell(value) if is_number(value) else tag("td", str(value)))
        for name, value in found.items()
    ]
    return table((), rows, class_="numbers narrow") if rows else Html()


def _by_section(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is called `section/name`, by section and name."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        own, slash, what = name.partition("/")
        if slash:
            found.setdefault(own, {})[what] = value
    return found


def _drawn(name: str, arrays: dict[str, np.ndarray]) -> Html:
    others = [what for what in arrays if what not in ("data", "samples")]
    colours = {what: OTHERS[i % len(OTHERS)] for i, what in enumerate(others)} | {
        "data": DATA,
        "samples": MODEL,
    }
    clouds = [plots.Cloud(k, v, colours[k], k == "data") for k, v in arrays.items() if v.ndim == 1]
    lines = [
        plots.Series(k, v[0], v[1], colours[k]) for k, v in arrays.items() if v.ndim == 2 and len(v) == 2
    ]
    drawn = []
    if clouds:
        keys = [key(label(c.name), c.color, "block" if c.filled else "line") for c in clouds]
        drawn.append(picture("Histogram", plots.overlaid(f"{name}-values", clouds, label(name)), keys=keys))
    if lines:
        keys = [key(label(line.name), line.color) for line in lines]
        drawn.append(picture("Lines", plots.curves(f"{name}-lines", lines, x_label=""), keys=keys))
    return pictures(drawn)
