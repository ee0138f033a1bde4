"""Weights of the modes in data and samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import plots
from ..figures import DATA, MODEL
from ..formatting import count, number, plus_minus
from ..markup import Html, card, number_cell, table, tag
from ..parts import key, picture, pictures
from ..read import Run

_MOST_MODES = 24


def modes(run: Run) -> Html:
    """Every mode's weight among samples against the data."""
    found = run.modes
    if not found:
        return Html()
    data, samples, error = found.get("data", []), found["samples"], found.get("std_error")
    drawing = plots.mode_weights("modes", data, DATA, [plots.Weights("samples", samples, MODEL, error)])
    keys = [key("data", DATA, "block")] if data else []
    keys.append(key("samples ± 2 s.e." if error else "samples", MODEL, "dot"))
    drawn = [picture("Share of each mode", drawing, "", keys)]
    if len(samples) <= _MOST_MODES:
        head = ["mode", *(["data"] if data else []), "samples", *(["difference"] if data else [])]
        rows = []
        for i, weight in enumerate(samples):
            row: list[Any] = [tag("td", i + 1), *([number_cell(data[i])] if data else [])]
            row.append(number_cell(weight, plus_minus(weight, error[i]) if error else None))
            if data:
                gap = weight - data[i]
                row.append(number_cell(gap, f"{gap:+.3f}".replace("-", "−")))
            rows.append(row)
        drawn.append(table(head, rows, class_="numbers"))
    return pictures(drawn)


def modes_card(run: Run) -> Html | None:
    """The mode that is furthest off."""
    found = run.modes
    if not found or "data" not in found:
        return None
    gaps = np.abs(np.subtract(found["samples"], found["data"]))
    worst = int(gaps.argmax())
    note = f"mode {worst + 1}: {number(found['samples'][worst], 3)}, data {number(found['data'][worst], 3)}"
    return card("Largest mode error", number(float(gaps[worst]), 3), note, count(len(gaps), "mode"))
