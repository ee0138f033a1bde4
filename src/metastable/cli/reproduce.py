"""`metastable reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .guard import FAILED
from .options import Device, Seed


def reproduce(
    name: Annotated[str | None, typer.Argument(help="The experiment; --list shows them all.")] = None,
    scale: Annotated[str, typer.Option(help="smoke, cpu or gpu.")] = "smoke",
    out: Annotated[Path | None, typer.Option(help="Folder; runs/NAME-SCALE-seedS by default.")] = None,
    seed: Seed = 0,
    device: Device = "auto",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE: a setting of the scale (--dry-run shows them)."),
    ] = None,
    joined: Annotated[
        list[Path] | None,
        typer.Option("--join", help="Run nothing: make one result of those in these folders; repeat it."),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the settings, run nothing.")] = False,
) -> None:
    """Run a paper's experiment and set our numbers beside the paper's; status 1 when one is not as it should be."""
    import json
    from functools import partial

    from metastable.core.errors import require, require_choice
    from metastable.experiments import EXPERIMENTS, TITLES

    from .console import clock, console, note, say, table
    from .rows import rows_table

    if show:
        console().print(table(["experiment", "what it shows"], TITLES.items(), words=2))
        return
    if name is None:
        raise typer.BadParameter("give the name of an experiment, or --list", param_hint="NAME")
    from metastable.experiments.base import changed, find
    from metastable.experiments.base import reproduce as run_experiment
    from metastable.experiments.joined import join

    from .settings import with_assignments

    experiment = find(EXPERIMENTS, name)
    folder = out or Path("runs") / f"{name}-{scale}-seed{seed}"
    changes = with_assignments({}, change or ())
    require_choice("scale", scale, experiment.scales)
    if dry_run:
        settings = json.dumps(changed(experiment.scales[scale], changes), indent=2, default=str)
        say(experiment.title, experiment.paper, settings)
        say(f"folder: {folder}", "dry run: nothing was written")
        return
    if joined:
        require(not changes, "--set", "left out beside --join: settings are those of the results", changes)
        result = join(experiment, scale, seed, joined, folder)
    else:
        say_all = partial(note, everywhere=True)
        result = run_experiment(experiment, scale, seed, folder, device=device, say=say_all, changes=changes)
    facts = f"scale {result.scale}, seed {result.seed}, {result.device}, {clock(result.seconds)}"
    console().print(rows_table(result.rows, experiment.title, facts))
    say(f"report: {folder / 'report.html'}")
    if not result.ok:
        raise typer.Exit(FAILED)
