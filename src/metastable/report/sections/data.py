"""What the data were: columns with their units, and what about them has no density."""

from __future__ import annotations

from typing import Any

from ..formatting import number
from ..markup import Html, join, number_cell, table, tag
from ..read import Run, mapping, numbers_of, sequence

_UNITS = {
    "common": "Training saw all numbers less one mean, in one standard deviation.",
    "scale": "Training saw every number in its column's standard deviation.",
    "whiten": "Training saw standard deviations of the columns, with their correlations undone.",
    "none": "Training saw the data as they are.",
}
_NOTES = {
    "constant": "constant: no density",
    "few values": "few values: spikes, no density",
    "far outliers": "values far out",
}
_MOST = 60


def data(run: Run) -> Html:
    """The columns of a table, and the units that training measured them in; nothing for events of other shapes."""
    if run.policy:
        return demonstrated(mapping(run.policy.get("scaling")))
    columns = [mapping(column) for column in sequence(run.config.get("columns"))]
    if not columns:
        return Html()
    words = _UNITS.get(str(run.config.get("units", "none")), "")
    spread = (
        " Columns of few values were spread between their neighbours." if run.config.get("dequantise") else ""
    )
    said = tag("p", f"{words}{spread} Everything on this page is in the columns' own units.", class_="note")
    head = ("column", "mean", "unit (standard deviation)", "least", "greatest", "different values", "")
    rows = [
        [
            tag("td", column.get("name")),
            *(number_cell(column.get(key)) for key in ("mean", "scale", "low", "high", "distinct")),
            tag("td", _NOTES.get(str(column.get("note")), "")),
        ]
        for column in columns[:_MOST]
    ]
    more = len(columns) - len(rows)
    rest = tag("p", f"And {number(more)} more columns.", class_="note") if more else None
    return join([said, table(head, rows, class_="numbers"), rest])


def demonstrated(scaling: dict[str, Any]) -> Html:
    """The numbers of observations and actions in the demonstrations' own units, which a policy sees scaled."""
    middle, half = mapping(scaling.get("middle")), mapping(scaling.get("half"))
    ends = [
        (f"{name}[{i}]" if len(values) > 1 else name, centre - width, centre + width)
        for name in middle
        for values in [numbers_of(middle[name])]
        for i, (centre, width) in enumerate(zip(values, numbers_of(half.get(name)), strict=False))
    ]
    rows = [[tag("td", name), number_cell(low), number_cell(high)] for name, low, high in ends[:_MOST]]
    more = f" And {number(len(ends) - len(rows))} more." if len(ends) > len(rows) else ""
    words = f"What was demonstrated reaches from −1 to 1 in training, and on the rest of this page.{more}"
    return join(
        [tag("p", words, class_="note"), table(("", "least", "greatest"), rows, class_="numbers narrow")]
    )
