"""What a conditional model learned: a few contexts, each with data, samples, and log Z."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import plots
from ..figures import DATA, INK, MODEL, palette
from ..formatting import count, number, plus_minus
from ..markup import Html, join, number_cell, table, tag
from ..parts import key, picture, pictures
from ..read import Run, mapping, numbers_of, sequence
from .density import density_panels

_MOST_MARGINALS = 4
_MOST_NUMBERS = 4


def is_conditional(run: Run) -> bool:
    """Whether samples for contexts were kept."""
    return {"given_shown", "samples_given"} <= set(run.arrays)


def contexts(run: Run) -> Html:
    """Data and samples for each of the contexts that were kept, and a table of log Z."""
    words = (
        "Samples of the model for a few contexts, beside the data that were given these, or the nearest ones."
    )
    drawn = [_one(run, i, samples) for i, samples in enumerate(run.arrays["samples_given"])]
    return join([tag("p", words), *drawn, _partitions(run)])


def context_name(given: np.ndarray) -> str:
    """The numbers of a context, the first few of them."""
    values = np.ravel(given)
    shown = ", ".join(number(float(v), 3) for v in values[:_MOST_NUMBERS])
    return shown + (", …" if len(values) > _MOST_NUMBERS else "")


def _one(run: Run, i: int, samples: np.ndarray) -> Html:
    dims = math.prod(samples.shape[1:])
    samples, data = samples.reshape(len(samples), dims), None
    rows, counts = run.arrays.get("data_given"), run.arrays.get("data_given_counts")
    if rows is not None and counts is not None:  # the data near each context, one after the other
        end = int(counts[: i + 1].astype(int).sum())
        data = rows[end - int(counts[i]) : end]
        data = data.reshape(len(data), dims)
    heading = tag("h3", f"Given {context_name(run.arrays['given_shown'][i])}")
    if dims == 2:
        return join([heading, pictures(list(_plane(run, i, data, samples)), "third")])
    if dims == 1:
        return join([heading, pictures([_line(run, i, data, samples)], "full")])
    drawn = []
    for j in range(min(dims, _MOST_MARGINALS)):
        columns = [None if c is None else c[:, j] for c in (data, samples)]
        drawing = plots.histogram(f"marginal {i} {j}", *columns, x_label="")
        drawn.append(picture(f"Coordinate {j + 1}", drawing))
    return join([heading, pictures(drawn, "quarter small")])


def _plane(run: Run, i: int, data: np.ndarray | None, samples: np.ndarray) -> Iterator[Html]:
    x, y, values = (run.arrays.get(k) for k in ("grid_given_x", "grid_given_y", "log_density_given"))
    clouds = [c for c in (data, samples) if c is not None]
    window = plots.window_of(clouds)
    if x is not None and y is not None and values is not None and np.isfinite(values[i]).any():
        window = plots.Window((x[0], x[-1]), (y[0], y[-1]))
        # the title also salts the picture's identifiers
        title = f"Density given {context_name(run.arrays['given_shown'][i])}"
        yield density_panels([(title, values[i], x, y)])[0][0]
    if data is not None:
        caption = f"{count(len(data), 'point')}."
        yield picture("Data", plots.scatter(f"data {i}", data, window, DATA), caption, class_="cloud")
    drawing = plots.scatter(f"samples {i}", samples, window, MODEL)
    yield picture("Samples", drawing, f"{count(len(samples), 'point')}.", class_="cloud")


def _line(run: Run, i: int, data: np.ndarray | None, samples: np.ndarray) -> Html:
    x, values = run.arrays.get("grid_given_x"), run.arrays.get("log_density_given")
    lines = []
    if x is not None and values is not None and values[i].size == x.size:
        lines = [plots.Series("model", x, np.exp(values[i]).ravel(), palette.green)]
    drawing = plots.histogram(f"line {i}", data, samples, "x", lines, small=False)
    keys = [key("data", DATA, "block"), key("samples", MODEL), *(key(s.name, s.color) for s in lines)]
    return picture("Density", drawing, "", keys)


def _partitions(run: Run) -> Html | None:
    """log Z of each context by importance sampling, and by quadrature where events lie in the plane."""
    found = mapping(run.summary.get("contexts"))
    values, errors = numbers_of(found.get("log_z")), numbers_of(found.get("log_z_se"))
    if not values or len(errors) != len(values):
        return None
    exact, ess, draws = (numbers_of(found.get(k)) for k in ("log_z_on_grid", "ess", "draws"))
    contexts = [numbers_of(one) for one in sequence(found.get("given"))]
    if any(len(one) != len(values) for one in (contexts, ess, draws, exact or values)):
        return None
    head = ["given", "log Z ± s.e.", *(["by quadrature"] if exact else []), "effective draws"]
    rows: list[list[Any]] = []
    for i, given in enumerate(contexts):
        row = [
            tag("td", context_name(np.asarray(given))),
            number_cell(values[i], plus_minus(values[i], errors[i])),
        ]
        row += [number_cell(exact[i])] if exact else []
        rows.append([*row, number_cell(ess[i], f"{ess[i]:.0f} of {draws[i]:.0f}")])
    return table(head, rows, class_="numbers")


def ranked_among(run: Run) -> int | None:
    """K, where the run logged the objective of ranking a datum among K negatives."""
    column = run.metrics.get("objective")
    K = mapping(run.config.get("method")).get("negatives_per_datum")
    return K if column is not None and np.isfinite(column).any() and isinstance(K, int) else None


def objective(run: Run) -> Html | None:
    """The objective of ranking NCE between 0 and −log(K + 1), which say what it means."""
    K = ranked_among(run)
    if K is None:
        return None
    steps, column = run.metrics["step"], run.metrics["objective"]
    traits, method = mapping(run.config.get("traits")), mapping(run.config.get("method"))
    weighed = traits.get("weighs", method.get("proposal") != "uniform")  # which folders without traits have
    matched, collapse = (np.full(len(steps), value) for value in (-math.log(K + 1), 0.0))
    lines = [
        plots.Series("objective", steps, column, palette.blue),
        plots.Series("matched", steps, matched, palette.green, (0, (4, 2))),
        plots.Series("collapse", steps, collapse, INK, (0, (1, 2))),
    ]
    words = (
        f"log-probability of the datum among itself and its {K} negatives. At −log(K+1) = {-math.log(K + 1):.2f} "
        "nothing tells them apart, at 0 everything does and nothing more is learned."
    )
    keys = [
        key("objective", palette.blue),
        key(
            f"−log(K+1), {'all matched' if weighed else 'nothing told apart'}",
            palette.green,
            dashes=(0, (4, 2)),
        ),
        key("0, posterior collapse", INK, dashes=(0, (1, 2))),
    ]
    return picture("Objective", plots.curves("objective", lines, y_label="nats"), words, keys)
