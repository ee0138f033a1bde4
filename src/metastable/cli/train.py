"""`metastable train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from .guard import STOPPED
from .options import Data, DryRun, Energy, HeldOut, SomeDevice

if TYPE_CHECKING:
    from metastable.runs.run import Run

    from .settings import Job, Settings

PRESETS = "two-modes, eight-gaussians, digits, jem-digits, jem-1, jem-2, jem-3, jem-4, jem-5, jem-6, jem-7"


def train(
    preset: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET|CONFIG",
            help=f"A preset ({PRESETS}), a settings file (.json, .toml), or the folder of a run.",
        ),
    ] = None,
    data: Data = None,
    method: Annotated[str | None, typer.Option(help="jarzynski, pcd, robust, jem, ranking-nce, …")] = None,
    energy: Energy = None,
    steps: Annotated[int | None, typer.Option(help="Updates.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of the optimiser.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/NAME-N by default.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of every random number.")] = None,
    device: SomeDevice = None,
    precision: Annotated[str | None, typer.Option(help="32-true, 64-true, tf32 or bf16-mixed.")] = None,
    held_out: HeldOut = None,
    units: Annotated[
        str | None,
        typer.Option(help="What training measures columns in: auto, none, common, scale or whiten."),
    ] = None,
    dequantise: Annotated[
        bool | None,
        typer.Option("--dequantise", help="Spread columns of few values (codes) between their neighbours."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A settings file, e.g. the config.json of a run.")
    ] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Any setting, e.g. method.walkers=1000; repeatable."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")
    ] = False,
    dry_run: DryRun = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Train an energy on data, and say what it is worth."""
    from metastable.core.processes import by_first

    from .settings import resolve, with_assignments, with_flags, with_method

    settings = with_method(_base(preset, config, out, resume), method)
    flags = {
        "data": data,
        "energy": energy,
        "trainer.steps": steps,
        "trainer.optimiser.learning_rate": learning_rate,
        "trainer.device": device,
        "trainer.precision": precision,
        "seed": seed,
        "held_out": held_out,
        "units": units,
        "dequantise": dequantise,
    }
    job = resolve(with_assignments(with_flags(settings, flags), assign or []))
    folder = by_first(lambda: out or next_free(Path("runs"), _name(preset, config, job)))
    if dry_run:
        from .plan import print_plan

        print_plan(job, folder, resume)
    else:
        _train(job, folder, resume, progress)


def _base(preset: str | None, config: Path | None, out: Path | None, resume: bool) -> Settings:
    """The settings to begin from: a file, a preset, or those of the run that is being resumed."""
    from metastable.core.errors import InputError

    from .settings import read_settings

    if preset is not None and config is not None:
        raise InputError(f"config: give either {preset!r} or --config {config}, not both")
    if resume and out is None:
        raise InputError("resume: give --out DIR, the folder of the run to go on with")
    source = preset if config is None else config
    if source is None and resume and out is not None:
        if not (out / "config.json").is_file():
            raise InputError(f"resume: {out} holds no run to go on with")
        source = out
    return {} if source is None else read_settings(source)


def _name(preset: str | None, config: Path | None, job: Job) -> str:
    """What a new run is called: its preset, its file, or its data."""
    from metastable.data.images import image_source

    data = job.dataset.name
    source = preset or (config and str(config)) or image_source(data)
    source = source or data.removeprefix("toy:").partition("?")[0]
    path = Path(source)
    return (path.parent if path.name == "config.json" else path).stem or "run"


def next_free(folder: Path, name: str) -> Path:
    """`folder/name-N` with the first N that nothing has."""
    number = 1
    while (folder / f"{name}-{number}").exists():
        number += 1
    return folder / f"{name}-{number}"


def _train(job: Job, folder: Path, resume: bool, progress: bool) -> None:
    from metastable.api import fit

    from .bars import training_bar
    from .console import note

    for line in job.notes:
        note(line)
    try:
        with training_bar(job.method.name, job.trainer, progress) as on_row:
            run = fit(
                job.energy,
                job.dataset,
                job.method,
                seed=job.seed,
                out=folder,
                resume=resume,
                held_out=job.held_out,
                units=job.units,
                dequantise=job.dequantise,
                trainer=job.trainer,
                progress=on_row,
            )
    except KeyboardInterrupt:
        _stopped(folder)
    print_run(run)
    if run.status == "interrupted":
        _stopped(folder)


def _stopped(folder: Path) -> NoReturn:
    from .console import note

    if (folder / "checkpoints").is_dir():
        note(f"stopped; go on with: metastable train --resume --out {folder}")
    else:
        note("stopped before the first checkpoint; nothing to resume")
    raise typer.Exit(STOPPED)


def print_run(run: Run) -> None:
    """What a run is worth: log Z, likelihood, mode weights, the diagnosis, and where the report is."""
    from metastable.evaluation.diagnosis import format_findings

    from .console import clock, console, plus_minus, say, table

    say(f"{run.method}: {run.status} after {run.steps} steps, {clock(run.seconds)}")
    if run.ended:
        say(run.ended)
    if run.log_partition is not None:
        say(str(run.log_partition))
    scores = run.scores
    if "log_likelihood" in scores:
        value = plus_minus(scores["log_likelihood"], scores.get("log_likelihood_se"))
        say(f"log-likelihood = {value} nats a row")
    if run.modes is not None:
        error = run.modes.get("std_error") or [None] * len(run.modes["samples"])
        columns = zip(run.modes["data"], run.modes["samples"], error, strict=True)
        rows = [(i + 1, f"{d:.3f}", plus_minus(m, e)) for i, (d, m, e) in enumerate(columns)]
        console().print(table(["mode", "data", "model"], rows, title="mode weights"))
    say(format_findings(run.diagnosis) or "diagnosis: nothing speaks against this run")
    if run.folder is not None:
        say(f"report: {run.folder / 'report.html'}")
