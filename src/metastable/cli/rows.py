"""Rows of an experiment or a benchmark: our number, what it has to satisfy, the paper's, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from metastable.experiments.base import Row


def rows_table(rows: Iterable[Row], title: str, caption: str = "") -> Table:
    """One line for each row."""
    from .console import number, table

    cells = []
    for row in rows:
        required = "" if row.relation is None else f"{row.relation} {number(row.target)}"
        cells.append((row.metric, number(row.value), required, number(row.paper), _verdict(row)))
    return table(["metric", "ours", "required", "paper", "verdict"], cells, title, caption)


def _verdict(row: Row) -> Any:
    from rich.text import Text

    if row.relation is None:
        return Text("")
    return Text("holds", style="green") if row.ok else Text("fails", style="bold red")
