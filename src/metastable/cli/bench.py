"""`metastable bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .guard import FAILED


def bench(
    suite: Annotated[
        list[str] | None, typer.Option(help="A suite; repeatable; all of them by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder, in which DEVICE.json gets the rows as well.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the suite sampler on a GPU a problem, as mlp/1024; of the suite policy a model or training."
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the suites.")] = False,
) -> None:
    """Measure speed: every claim is a ratio of two things timed in one run; status 1 when one does not hold."""
    from metastable.benchmarks import SUITES, run_suite, write_rows
    from metastable.core.errors import require, require_choice

    from .console import console, say
    from .rows import rows_table

    if show:
        say(*SUITES)
        return
    chosen = suite or list(SUITES)
    for name in chosen:
        require_choice("suite", name, SUITES)
    rule = "left out, or given with --suite sampler or --suite policy alone"
    require(not only or chosen in (["sampler"], ["policy"]), "only", rule, only)
    ok = True
    for name in chosen:
        for part in only or [""]:  # each is written when it is done
            rows = run_suite(name, **({"only": [part]} if part else {}))
            ok = ok and all(row.ok for row in rows)
            console().print(rows_table(rows, f"{name} {part}".strip()))
            if out is not None:
                say(f"written to {write_rows(out, {name: rows}, partly=bool(part))}")
    if not ok:
        raise typer.Exit(FAILED)
