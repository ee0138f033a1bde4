"""The page that sets several methods side by side."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from . import plots
from .figures import INK, line_look
from .formatting import ABSENT, clock, count, is_number, label, method_title, number, plus_minus, value_text
from .markup import Html, card, document, empty, join, number_cell, section, table, tag
from .parts import contents, findings, key, masthead, picture, pictures, settings, status_badge
from .read import Comparison, Run, name_of, numbers_of
from .sections.density import density_panels, flat, grid_of, ramp

_LOW_IS_GOOD = {
    "kl",
    "error",
    "seconds",
    "loss",
    "nll",
    "mmd",
    "wasserstein",
    "distance",
    "fid",
    "tv",
    "rmse",
}
_LOW_IS_GOOD_NAMES = {"cross_entropy", "label_cross_entropy"}
_HIGH_IS_GOOD = {"ess", "likelihood", "coverage", "accuracy", "auc", "precision", "recall"}
_ERRORS = ("_se", "_std_error")
_MODE_KEYS = ("mode_weights", "modes", "weights")
_MOST_WEIGHTS = 6


def compare_page(comparison: Comparison, links_from: Path) -> str:
    """The whole page; `links_from` is the folder it will lie in."""
    sections = [
        section("table", "Methods side by side", method_table(comparison, links_from)),
        section("densities", "Densities", densities(comparison)),
        section("modes", "Mode weights", modes(comparison)),
        section("curves", "Training", overlaid(comparison)),
        section("diagnosis", "Diagnosis", diagnoses(comparison)),
        settings({k: v for k, v in comparison.table.items() if k not in ("rows", "columns")}, "Details", ""),
    ]
    name = name_of(comparison.table.get("data"))
    methods = count(len(comparison.rows), "method")
    title = f"{methods} on {name}" if name else methods
    budget = comparison.table.get("budget")
    facts = [
        tag("code", comparison.folder.resolve().name),
        f"budget {value_text(budget)} each" if budget is not None else None,
    ]
    top = masthead("comparison", title, None, facts)
    return document(f"{title} · metastable", top, contents(sections), winners(comparison), *sections)


# ----------------------------------------------------------------------------------------------- table


def columns(comparison: Comparison) -> list[str]:
    """Columns in the order the file gives, or in order of appearance; standard errors join their value."""
    given = [c for c in comparison.table.get("columns") or [] if isinstance(c, str)]
    named = given or list(dict.fromkeys(k for row in comparison.rows for k in row))
    errors = {column + ending for column in named for ending in _ERRORS}
    return [c for c in named if c not in errors and c not in ("method", "run", "status")]


def direction(column: str, comparison: Comparison) -> str | None:
    """`low`, `high`, `truth` (closest to a known value) or None.

    log Z has none: every method's energy has its own. Time has none under a common budget.
    """
    if column in ("log_z", "log_partition") or (
        column == "seconds" and comparison.table.get("budget") is not None
    ):
        return None
    words = set(column.replace("/", "_").split("_"))
    if words & _LOW_IS_GOOD or column in _LOW_IS_GOOD_NAMES:
        return "low"
    if words & _HIGH_IS_GOOD:
        return "high"
    return "truth" if column in comparison.truth or column in _MODE_KEYS else None


def best_rows(column: str, comparison: Comparison) -> set[int]:
    """Rows with the best value of a column; a diverged run cannot win, and where all agree nobody does."""
    way = direction(column, comparison)
    cost = {
        i: _cost(row.get(column), way, true_value(column, comparison))
        for i, row in enumerate(comparison.rows)
    }
    states = [
        (row.get("status"), run.status if run else None)
        for row, run in zip(comparison.rows, comparison.runs, strict=True)
    ]
    able = {i: c for i, c in cost.items() if math.isfinite(c) and "diverged" not in states[i]}
    if len(able) < 2 or len(set(able.values())) == 1:
        return set()
    return {i for i, c in able.items() if c == min(able.values())}


def _cost(value: Any, way: str | None, truth: Any) -> float:
    if way == "truth":
        ours, theirs = (
            np.atleast_1d(numbers_of(v) or (v if is_number(v) else np.nan)) for v in (value, truth)
        )
        return float(np.abs(ours - theirs).max()) if ours.shape == theirs.shape else math.inf
    if way is None or not is_number(value):
        return math.inf
    return float(value) if way == "low" else -float(value)


def true_value(column: str, comparison: Comparison) -> Any:
    """What a column should read, where it is known."""
    if column in comparison.truth:
        return comparison.truth[column]
    return next(
        (comparison.truth[k] for k in _MODE_KEYS if column in _MODE_KEYS and k in comparison.truth), None
    )


def method_table(comparison: Comparison, links_from: Path) -> Html:
    """One row per method under a row of what is true; the best of each column is marked."""
    if not comparison.rows:
        return empty("compare.json has no rows.")
    named = columns(comparison)
    best = {c: best_rows(c, comparison) for c in named}
    near = reference(comparison)
    rows: list[list[Html]] = []
    if comparison.truth:
        cells = [_value_cell(c, {c: true_value(c, comparison)}, False, "truth") for c in named]
        rows.append([tag("td", near, class_="truth"), *cells])
    for i, row in enumerate(comparison.rows):
        run, name, status = comparison.runs[i], method_name(comparison, i), None
        if run is not None and (report := run.folder / "report.html").exists():
            path = Path(os.path.relpath(report.resolve(), links_from.resolve())).as_posix()
            name = tag("a", name, href=f"./{quote(path)}")
        if run is not None and run.status != "finished":
            status = join([" ", status_badge(run.status)])
        rows.append([tag("td", name, status), *(_value_cell(c, row, i in best[c]) for c in named)])
    legend = f"Bold on green: best of the column. ↓ low is good, ↑ high is good, → close to the {near}."
    arrows = {"low": " ↓", "high": " ↑", "truth": " →", None: ""}
    head = ["method", *(label(c) + arrows[direction(c, comparison)] for c in named)]
    return join([table(head, rows, class_="numbers methods"), tag("p", legend, class_="caption")])


def reference(comparison: Comparison) -> str:
    """What methods are held against: shares of modes are the data's, where nothing exact stands beside them."""
    return "truth" if set(comparison.truth) - set(_MODE_KEYS) else "data"


def method_name(comparison: Comparison, i: int) -> str:
    """The method of row `i`."""
    row, run = comparison.rows[i], comparison.runs[i]
    return method_title(str(row.get("method") or (run.method if run else row.get("run") or f"row {i + 1}")))


def _value_cell(column: str, row: dict[str, Any], best: bool, class_: str = "") -> Html:
    value = row.get(column)
    error = next((row[column + e] for e in _ERRORS if column + e in row), None)
    class_ = "best" if best else class_
    if numbers_of(value):
        return number_cell(value, _joined(numbers_of(value)), class_)
    if column == "seconds":
        return number_cell(value, clock(value), class_)
    if is_number(value) or value is None:
        text = ABSENT if value is None else plus_minus(value, error)
        return number_cell(value, text, class_)
    return tag("td", value_text(value), class_=class_ or None)


def _joined(values: Sequence[float]) -> str:
    text = " / ".join(number(v, 3) for v in values[:_MOST_WEIGHTS])
    return text + (" / …" if len(values) > _MOST_WEIGHTS else "")


def winners(comparison: Comparison) -> Html:
    """A card for each of the first four columns that somebody wins."""
    words = {"low": "Lowest", "high": "Highest", "truth": "Closest"}
    cards = []
    for column in columns(comparison):
        best = best_rows(column, comparison)
        if len(best) == 1 and len(cards) < 4:
            (i,) = best
            way = words[direction(column, comparison) or "low"]
            value = comparison.rows[i].get(column)
            text = _joined(numbers_of(value)) if numbers_of(value) else value_text(value)
            cards.append(card(f"{way} {label(column)}", method_name(comparison, i), text))
    return tag("div", *cards, class_="cards") if cards else Html()


# -------------------------------------------------------------------------------------------- pictures


def found_runs(comparison: Comparison) -> list[tuple[int, str, Run]]:
    """Row, method and run, for the rows whose run is there."""
    return [(i, method_name(comparison, i), run) for i, run in enumerate(comparison.runs) if run is not None]


def densities(comparison: Comparison) -> Html:
    """The truth and every method's density on one colour scale, or samples where there are no densities."""
    maps = []
    for _, name, run in found_runs(comparison):
        if (g := grid_of(run, "log_density")) is not None:
            maps.append((name, g, run.arrays["grid_x"], run.arrays["grid_y"]))
        if (g := grid_of(run, "truth_log_density")) is not None and (not maps or maps[0][0] != "Truth"):
            maps.insert(0, ("Truth", g, run.arrays["grid_x"], run.arrays["grid_y"]))
    if maps:
        panels = density_panels(maps)
        return join([pictures([p for p, _ in panels], "quarter"), ramp(panels)])
    clouds = [(i, n, c) for i, n, run in found_runs(comparison) if (c := flat(run, "samples", 2)) is not None]
    if not clouds:
        return Html()
    window = plots.window_of([c for *_, c in clouds])
    drawn = [
        picture(n, plots.scatter(f"samples {i}", c, window, line_look(i)["color"]), class_="cloud")
        for i, n, c in clouds
    ]
    return pictures(drawn, "quarter")


def modes(comparison: Comparison) -> Html:
    """Every method's mode weights against the truth, or against the data where the truth is unknown."""
    runs = [(i, n, run.modes) for i, n, run in found_runs(comparison) if run.modes]
    if not runs:
        return Html()
    truth = next((numbers_of(comparison.truth.get(k)) for k in _MODE_KEYS if k in comparison.truth), [])
    name, target = (reference(comparison), truth) if truth else ("data", runs[0][2].get("data", []))
    found = [plots.Weights(n, m["samples"], line_look(i)["color"], m.get("std_error")) for i, n, m in runs]
    drawing = plots.mode_weights("modes", target, INK, found, width=7.5)
    keys = [key(name, INK, "block")] if target else []
    keys += [key(w.name, w.color, "dot") for w in found]
    return pictures([picture("Share of each mode", drawing, "", keys)], "full")


def overlaid(comparison: Comparison) -> Html:
    """Energy gap, effective sample size and log Z of every method over the same cost."""
    runs = [(i, n, run) for i, n, run in found_runs(comparison) if run.metrics]
    if not runs:
        return empty("No run logged any step.")
    timed = all(np.isfinite(run.metrics.get("seconds", [np.nan])).all() for *_, run in runs)
    across, x_label = ("seconds", "seconds of training") if timed else ("step", "step")
    drawn = [
        _overlay(runs, "energy_gap", "Energy gap", across, x_label, level=0),
        _overlay(runs, "ess", "Effective sample size", across, x_label, floor=0),
        _overlay(runs, "log_z", "log Z", across, x_label),
    ]
    looks = [(n, line_look(i)) for i, n, _ in runs]
    lead = tag("p", [key(n, k["color"], dashes=k["linestyle"]) for n, k in looks], class_="keys lead")
    shown = [d for d in drawn if d]
    return (
        join([lead, pictures(shown, "third")])
        if shown
        else empty("The runs share no metric to draw together.")
    )


def _overlay(
    runs: list[tuple[int, str, Run]], metric: str, title: str, across: str, x_label: str, **kwargs: Any
) -> Html | None:
    lines = [
        plots.Series(n, run.metrics[across], run.metrics[metric], **line_look(i))
        for i, n, run in runs
        if metric in run.metrics and np.isfinite(run.metrics[metric]).any()
    ]
    if not lines:
        return None
    drawing = plots.curves(
        f"all {metric}", lines, x_label=x_label, y_label=label(metric), small=True, **kwargs
    )
    missing = [n for _, n, run in runs if n not in {line.name for line in lines}]
    return picture(title, drawing, f"Not given by {', '.join(missing)}." if missing else "")


def diagnoses(comparison: Comparison) -> Html:
    """What was found about each method."""
    parts = []
    for _, name, run in found_runs(comparison):
        parts += [tag("h3", name, " ", status_badge(run.status), class_="method"), findings(run, folded=True)]
    absent = [method_name(comparison, i) for i, run in enumerate(comparison.runs) if run is None]
    if absent:
        parts.append(empty(f"No run folder was found for {', '.join(absent)}."))
    return join(parts)
