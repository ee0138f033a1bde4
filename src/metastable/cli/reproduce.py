"""`metastable reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .guard import FAILED

if TYPE_CHECKING:
    from metastable.experiments.base import Result


def reproduce(
    name: Annotated[str | None, typer.Argument(help="The experiment; --list shows them all.")] = None,
    scale: Annotated[str, typer.Option(help="smoke, cpu or gpu.")] = "smoke",
    out: Annotated[Path | None, typer.Option(help="Folder; runs/NAME-SCALE-seedS by default.")] = None,
    seed: Annotated[int, typer.Option(help="Of every random number.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    show: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
) -> None:
    """Run a paper's experiment and set our numbers beside the paper's; status 1 when one is not as it should be."""
    from metastable.experiments import EXPERIMENTS, TITLES

    from .console import console, note, say, table

    if show:
        console().print(table(["experiment", "what it shows"], TITLES.items()))
        return
    if name is None:
        raise typer.BadParameter("give the name of an experiment, or --list", param_hint="NAME")
    from metastable.experiments.base import find
    from metastable.experiments.base import reproduce as run_experiment

    experiment = find(EXPERIMENTS, name)
    folder = out or Path("runs") / f"{name}-{scale}-seed{seed}"
    result = run_experiment(experiment, scale, seed, folder, device=device, say=note)
    console().print(result_table(result, experiment.title))
    say(f"report: {folder / 'report.html'}")
    if not result.ok:
        raise typer.Exit(FAILED)


def result_table(result: Result, title: str) -> Any:
    """Our numbers, what they have to satisfy, the paper's, and the verdict."""
    from .console import clock, number, table

    rows = []
    for row in result.rows:
        required = "" if row.relation is None else f"{row.relation} {number(row.target)}"
        rows.append((row.metric, number(row.value), required, number(row.paper), _verdict(row)))
    caption = f"scale {result.scale}, seed {result.seed}, {result.device}, {clock(result.seconds)}"
    return table(["metric", "ours", "required", "paper", "verdict"], rows, title, caption)


def _verdict(row: Any) -> Any:
    from rich.text import Text

    if row.relation is None:
        return Text("")
    return Text("holds", style="green") if row.ok else Text("fails", style="bold red")
