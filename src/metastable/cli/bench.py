"""`metastable bench`."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def bench(
    suite: Annotated[list[str] | None, typer.Option(help="A suite; repeatable; all of them by default.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the suites.")] = False,
) -> None:
    """Measure speed: every number is a ratio of two things timed in one run."""
    from metastable.benchmarks import SUITES, run_suite
    from metastable.core.errors import require_choice

    from .console import console, say

    if show:
        say(*SUITES)
        return
    chosen = suite or list(SUITES)
    for name in chosen:
        require_choice("suite", name, SUITES)
    for name in chosen:
        console().print(rows_table(name, run_suite(name)))


def rows_table(name: str, rows: list[Any]) -> Any:
    """Rows of a suite, one column for each key, in order of appearance."""
    from .console import number, table

    found = [row if isinstance(row, dict) else vars(row) for row in rows]
    columns = list(dict.fromkeys(key for row in found for key in row))
    return table(columns, [[number(row.get(c)) for c in columns] for row in found], name)
