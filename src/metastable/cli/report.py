"""`metastable report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run, a comparison or a reproduction.")],
    out: Annotated[Path | None, typer.Option(help="The .html file to write; RUN/report.html.")] = None,
) -> None:
    """Write the page of a run, a comparison or a reproduction as one HTML file, and print its path."""
    from metastable.report import write_report

    from .console import say

    say(str(write_report(run, out)))
