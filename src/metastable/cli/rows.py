"""Rows of an experiment or a benchmark: our number, what it has to satisfy, the paper's, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from metastable.experiments.base import Row


def rows_table(rows: Iterable[Row], title: str, caption: str = "") -> Table:
    """One line for each row."""
    from rich.text import Text

    from .console import number, table

    cells = []
    for row in rows:
        required, verdict = "", Text("")
        if row.relation is not None:
            required = f"{row.relation} {number(row.target)}"
            verdict = Text("holds", style="green") if row.ok else Text("fails", style="bold red")
        cells.append((row.metric, number(row.value), required, number(row.paper), verdict))
    return table(["metric", "ours", "required", "paper", "verdict"], cells, title, caption)
