"""Samples as pictures: measures beside their floors, shares of classes, and nearest training images."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import plots
from ..figures import DATA, MODEL
from ..formatting import is_number, number, plus_minus
from ..markup import Html, join, png, table, tag
from ..parts import frame, key, picture, pictures
from ..read import Run, mapping, numbers_of, sequence

MEASURES = {
    "fid": "FID",
    "frechet_distance": "Fréchet distance",
    "kid": "KID",
    "precision": "precision",
    "recall": "recall",
    "inception_score": "Inception Score",
    "class_score": "class score",
}
"""Each measure with its name for people, in the order of the table."""
BY_OTHERS = ("frechet_distance", "class_score")
"""What FID and Inception Score are called by a network that is not Inception, whose name stands beside them."""
NEAREST = "nearest_images"
LAW = 4
"""Standard errors by which held-out images must be nearer to one another to be of another law."""


def images(run: Run) -> Html:
    """The whole section; empty where no evaluation looked at pictures."""
    found = mapping(run.evaluation.get("images"))
    if not found:
        return Html()
    lead = (
        f"{number(found.get('samples'))} samples, worth {number(found.get('ess'), 4)} "
        f"({found.get('samples_from')}), "
        f"against {number(found.get('data_images'))} images of {found.get('data')}. {run.evaluated_at}"
    ).rstrip()
    head = ["measure", "value", "95 % interval", "images", "floor: fresh data"]
    rows = [[tag("td", cell) for cell in row] for row in measure_rows(found)]
    words = [*copying_lines(found), *(str(note) for note in sequence(found.get("notes")))]
    drawn = [drawing for drawing in (_nearest(run), _shares(found)) if drawing]
    return join(
        [
            tag("p", lead, class_="empty"),
            table(head, rows, class_="numbers") if rows else None,
            tag("ul", [tag("li", line) for line in words]) if words else None,
            pictures(drawn),
        ]
    )


def measure_rows(found: dict[str, Any]) -> list[list[str]]:
    """Name, value, interval, images, and the floor with its own number, of each measure that was made."""
    rows = []
    for name, title in MEASURES.items():
        measure = mapping(found.get(name))
        if not measure:
            continue
        ends = [number(end) for end in numbers_of(measure.get("interval"))]
        if name in BY_OTHERS:
            title += f" by {mapping(found.get('network')).get('name')}"
        behind = number(measure.get("images"), 6)
        if is_number(measure.get("reference_images")):
            behind += f" to {number(measure['reference_images'], 6)}"
        rows.append([title, number(measure.get("value")), " … ".join(ends), behind, _floor(measure)])
    return rows


def _floor(measure: dict[str, Any]) -> str:
    floor = mapping(measure.get("floor"))
    value = plus_minus(floor.get("value"), floor.get("std_error"))
    return f"{value} ({number(floor.get('images'), 6)} images)" if floor else "–"


def copying_lines(found: dict[str, Any]) -> list[str]:
    """Whether samples are copies of training images, in words."""
    lines = []
    for by, copied in mapping(found.get("copying")).items():
        copied = mapping(copied)
        value, error = copied.get("copied"), copied.get("copied_std_error")
        if not is_number(value) or not is_number(error):
            continue
        verdict = "copies are seen" if value > 3 * error else "no copying is seen"
        if _of_another_law(copied):
            verdict = (
                "which tells nothing: the held-out images are nearer to one another than to those of training, so "
                "that they are not of one law"
            )
        training, chance, ratio = (
            number(copied.get(name), 3) for name in ("nearest_is_training", "expected", "ratio")
        )
        compared, there = copied.get("training"), copied.get("training_images")
        unseen = there - compared if is_number(there) and is_number(compared) else 0
        limit = f"; copies of {number(unseen)} more training images are not seen" if unseen else ""
        lines.append(
            f"By {by}, the nearest image is one of training for {training} of the samples, {chance} by chance: "
            f"share copied {plus_minus(value, error)}, {verdict}; distance to training over distance to fresh "
            f"images {ratio}{limit}"
        )
    return lines


def _of_another_law(copied: dict[str, Any]) -> bool:
    """Whether held-out images are told from those of training by their nearest ones; older files do not know."""
    share, chance, error = (copied.get(f"fresh_{name}") for name in ("is_training", "expected", "std_error"))
    if not (is_number(share) and is_number(chance) and is_number(error)):
        return False
    return chance - share > LAW * error


def share_lines(found: dict[str, Any]) -> list[str]:
    """Shares of classes in words, with what the classifier is worth."""
    shares = mapping(found.get("class_shares"))
    if not shares:
        return []
    columns = [sequence(shares.get(name)) for name in ("classes", "samples", "std_error", "data")]
    each = ", ".join(
        f"{c} {plus_minus(s, e)} (data {number(d, 3)})" for c, s, e, d in zip(*columns, strict=False)
    )
    return [f"Shares of classes: {each}", _accuracy(shares)]


def _accuracy(shares: dict[str, Any]) -> str:
    return (
        f"By a classifier of accuracy {plus_minus(shares.get('accuracy'), shares.get('accuracy_se'))} on "
        f"{number(shares.get('test_images'))} images it was not trained on, at noise "
        f"{number(shares.get('noise'))}; its "
        f"mean confidence in samples is {number(shares.get('confidence'), 3)}.{_doubt(shares)}"
    )


def _doubt(shares: dict[str, Any]) -> str:
    """What the classifier's mistakes may do to the shares, where it is more than twice their standard errors."""
    accuracy, errors = shares.get("accuracy"), numbers_of(shares.get("std_error"))
    if not is_number(accuracy) or 1 - accuracy <= 2 * max(errors, default=0.0):
        return ""
    return (
        f" Shares may be off by its mistakes, {number(1 - accuracy, 2)} in all, which is more than their standard "
        "errors say."
    )


def _shares(found: dict[str, Any]) -> Html | None:
    shares = mapping(found.get("class_shares"))
    data, samples, error = (numbers_of(shares.get(name)) for name in ("data", "samples", "std_error"))
    if not samples or not len(data) == len(samples) == len(error):
        return None
    drawing = plots.mode_weights(
        "class shares", data, DATA, [plots.Weights("samples", samples, MODEL, error)]
    )
    names = ", ".join(f"{i + 1}: {name}" for i, name in enumerate(sequence(shares.get("classes"))))
    keys = [key("data", DATA, "block"), key("samples ± 2 s.e.", MODEL, "dot")]
    return picture("Shares of classes", drawing, f"{names}. {_accuracy(shares)}", keys)


def nearest_png(arrays: dict[str, np.ndarray]) -> bytes | None:
    """Samples in the first column with their nearest training images beside them, or None."""
    sheet = arrays.get(NEAREST)
    if sheet is None or sheet.ndim != 5 or plots.image_side(sheet.shape[2:]) is None:
        return None
    flat = sheet.reshape(-1, *sheet.shape[2:])
    return plots.image_grid(flat, 0.0, 1.0, columns=sheet.shape[1], most=len(flat))


def _nearest(run: Run) -> Html | None:
    grid = nearest_png(run.evaluation_arrays)
    if grid is None:
        return None
    caption = "In each row a sample, and the training images nearest to it by pixels, the nearest first."
    return frame(
        "Nearest training images", png(grid, "samples and their nearest training images", "pixels"), caption
    )
