"""What an evaluation found about a classifier that is an energy model: calibration, outsiders, class samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from .. import plots
from ..figures import DATA, line_look, new_figure, palette, save_figure, style
from ..formatting import number, plus_minus, share
from ..markup import Html, card, join, number_cell, png, table, tag
from ..parts import frame, key, picture, pictures
from ..read import Run, mapping, numbers_of, sequence

SCORES = {
    "log_density": ("log p(x)", "log p(x) + log Z"),
    "confidence": ("max p(y | x)", "max p(y | x)"),
    "gradient": ("−‖∇ log p(x)‖", "−‖∇ log p(x)‖"),
}
"""Each score of an event with its name and the label of its axis."""
_MOST_CLASSES, _MOST_OUTSIDE = 20, 4
_OUTSIDE = (palette.vermillion, palette.green, palette.purple, palette.orange)


def classifier(run: Run) -> Html:
    """The whole section; empty where no evaluation looked at a classifier."""
    found = mapping(run.evaluation.get("classifier"))
    if not found:
        return Html()
    drawn = [_reliability(found), _outsiders_table(found)]
    scores = score_clouds(found, run.evaluation_arrays)
    histograms = []
    for score, clouds in scores.items():
        drawing = plots.overlaid(f"outsiders {score}", clouds, SCORES[score][1], small=True)
        keys = [key(c.name, c.color, "block" if c.filled else "line") for c in clouds]
        histograms.append(picture(f"By {SCORES[score][0]}", drawing, keys=keys))
    when = run.evaluated_at
    if run.outdated:
        step = number(run.evaluation.get("step"))
        when = f"Judged at step {step}; training has gone on since: evaluate again."
    lead = f"On {found.get('data', 'data')}: {number(found.get('rows'))} labelled events. {when}".rstrip()
    return join(
        [
            tag("p", lead, class_="empty"),
            tag("p", found["caveat"]) if found.get("caveat") else None,
            _cards(found),
            pictures([d for d in drawn if d]),
            pictures(histograms, "third"),
            _class_samples(run, found),
        ]
    )


def _cards(found: dict[str, Any]) -> Html:
    ece = mapping(found.get("calibration_error"))
    mass = mapping(found.get("calibration_error_equal_mass"))
    cards = [
        card("Accuracy", plus_minus(found.get("accuracy"), found.get("accuracy_se"))),
        card(
            "Calibration error",
            number(ece.get("value"), 3),
            f"{number(ece.get('by_chance'), 2)} by chance alone if calibrated",
            f"{number(mass.get('value'), 3)} with equal-mass bins",
        ),
        card(
            "Negative log-likelihood", number(found.get("negative_log_likelihood"), 3), "nats, of the labels"
        ),
        card("Brier score", number(found.get("brier_score"), 3), "0 is perfect, 2 the worst"),
    ]
    return tag("div", *cards, class_="cards")


def bins_of(found: dict[str, Any]) -> plots.Bins | None:
    """The reliability curve, or None where it is not whole."""
    curve = mapping(found.get("reliability"))
    names = ("confidence", "accuracy", "std_error", "events", "low", "high")
    columns = [np.array(numbers_of(curve.get(name))) for name in names]
    whole = len({len(c) for c in columns}) == 1 and len(columns[0]) > 0
    return plots.Bins(*columns) if whole else None


def _reliability(found: dict[str, Any]) -> Html | None:
    bins = bins_of(found)
    if bins is None:
        return None
    caption = "Dots (± 2 s.e.) on the line: confidence is a frequency. Below it: the classifier is too sure."
    keys = [key("accuracy in a bin", palette.vermillion, "dot"), key("share of events", DATA, "block")]
    return picture("Reliability", plots.reliability("reliability", bins), caption, keys)


def _outsiders(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in sequence(found.get("ood")) if isinstance(entry, dict)]


def _outsiders_table(found: dict[str, Any]) -> Html | None:
    entries = _outsiders(found)
    if not entries:
        return None
    rows = []
    for score, (name, _) in SCORES.items():
        aurocs = [mapping(mapping(entry.get("auroc")).get(score)) for entry in entries]
        cells = [number_cell(a.get("value"), plus_minus(a.get("value"), a.get("std_error"))) for a in aurocs]
        rows.append([tag("td", name), *cells])
    head = ["AUROC by", *(f"against {short(str(entry.get('name', '?')))}" for entry in entries)]
    caption = (
        "The chance that an event inside scores higher than one outside: 1 tells all apart, ½ is a coin."
    )
    return tag("div", table(head, rows, class_="numbers"), tag("p", caption, class_="caption"))


def score_clouds(found: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, list[plots.Cloud]]:
    """For each score the values inside, and those of every set outside; none where nothing was outside."""
    names = [str(entry.get("name", i)) for i, entry in enumerate(_outsiders(found)[:_MOST_OUTSIDE])]
    by_score: dict[str, list[plots.Cloud]] = {}
    for score in SCORES:
        inside = arrays.get(f"inside_{score}")
        outside = [(i, arrays.get(f"outside_{i}_{score}")) for i in range(len(names))]
        if inside is None or not names or any(values is None for _, values in outside):
            continue
        clouds = [plots.Cloud(short(str(found.get("data") or "data")), np.ravel(inside), DATA, filled=True)]
        clouds += [
            plots.Cloud(short(names[i]), np.ravel(v), _OUTSIDE[i]) for i, v in outside if v is not None
        ]
        by_score[score] = clouds
    return by_score


def short(name: str) -> str:
    """A data source without its folder and settings.

    >>> short("fashion-mnist:data/fashion?split=test"), short("runs/far.npy"), short("toy:moons, held-out rows")
    ('fashion-mnist', 'far.npy', 'toy:moons, held-out rows')
    """
    head = name.split("?")[0]
    if not head.startswith("toy:") and ":" in head:
        return head.split(":")[0]
    return head.rsplit("/", 1)[-1]


# -------------------------------------------------------------------------------------------- samples


def class_grid(run: Run) -> np.ndarray | None:
    """Samples `(C, k, *event)` of the first classes, where they are pictures."""
    samples, shape = run.evaluation_arrays.get("class_samples"), run.event_shape
    if samples is None or shape is None or plots.image_side(shape) is None or samples.shape[2:] != shape:
        return None
    return samples[:_MOST_CLASSES]


def grid_png(run: Run, samples: np.ndarray) -> bytes:
    """One row for each class, on the grey scale of the data."""
    low, high = plots.value_range(run.arrays.get("data", samples))
    flat = samples.reshape(-1, *samples.shape[2:])
    return plots.image_grid(flat, low, high, columns=samples.shape[1], most=len(flat))


def _class_samples(run: Run, found: dict[str, Any]) -> Html | None:
    facts = mapping(found.get("class_samples"))
    start, agreement = facts.get("start", "noise"), facts.get("agreement")
    caption = f"Draws of p(x | y): chains of {number(facts.get('steps'))} steps from {start}."
    if agreement is not None:
        caption += f" The classifier takes {share(agreement)} for their class."
    samples = class_grid(run)
    if samples is not None:
        names = [str(name) for name in sequence(facts.get("classes"))][: len(samples)]
        alt = "samples of each class, one class in a row"
        rows = f" Rows, from the top: {', '.join(names)}." if names else " One class in a row."
        image = png(grid_png(run, samples), alt, "pixels")
        return pictures([frame("Samples of each class", image, caption + rows)])
    samples = run.evaluation_arrays.get("class_samples")
    if samples is None or samples.shape[2:] != (2,) or len(samples) > _MOST_CLASSES:
        return None
    window = plots.window_of([samples.reshape(-1, 2)])
    looks = [line_look(i)["color"] for i in range(len(samples))]
    drawing = plots.coloured_scatter("class samples", list(samples), window, looks)
    keys = [key(f"class {i}", colour, "dot") for i, colour in enumerate(looks)]
    return pictures([picture("Samples of each class", drawing, caption, keys, class_="cloud")])


# ---------------------------------------------------------------------------------------------- files


def save_classifier_figures(run: Run, folder: Path | str) -> list[Path]:
    """Reliability, histograms of scores and class samples as PNG files of their own in `folder`."""
    folder, found = Path(folder), mapping(run.evaluation.get("classifier"))
    written = []
    bins = bins_of(found)
    if bins is not None:
        figure = new_figure(4.4, 4.0)
        with style():
            plots.draw_reliability(figure, bins)
        written.append(save_figure(figure, folder / "reliability.png"))
    clouds = score_clouds(found, run.evaluation_arrays)
    if clouds:
        figure = new_figure(3.4 * len(clouds), 2.6)
        with style():
            panels = figure.subplots(1, len(clouds), squeeze=False)[0]
            for axes, (score, parts) in zip(panels, clouds.items(), strict=True):
                plots.draw_overlaid(axes, parts, SCORES[score][1], 30)
                for c in parts:  # the legend's entries
                    look = {"color": c.color, "label": c.name, "alpha": 0.5 if c.filled else 1}
                    axes.plot([math.nan], [math.nan], **look)
            panels[0].legend(fontsize=8)
        written.append(save_figure(figure, folder / "scores.png"))
    samples = class_grid(run)
    if samples is not None:
        path = folder / "class_samples.png"
        path.write_bytes(grid_png(run, samples))
        written.append(path)
    return written
