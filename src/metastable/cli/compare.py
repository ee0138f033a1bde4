"""`metastable compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .guard import STOPPED
from .options import Data, DryRun, Energy, HeldOut, SomeDevice

if TYPE_CHECKING:
    from metastable.compare import Comparison

METHODS_SHOWN = "cd,pcd,jarzynski"
CLOSE = 0.05
"""A mode weight this near to the data's is shown in green."""
MOST_WEIGHTS = 4


def compare(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN RUN …]", help="Folders of finished runs, instead of --methods to train."
        ),
    ] = None,
    data: Data = None,
    methods: Annotated[
        str | None, typer.Option(help="Names with commas between them; cd,pcd,jarzynski.")
    ] = None,
    energy: Energy = None,
    budget: Annotated[str | None, typer.Option(help="Time for each method: 60s, 2m, 1h.")] = None,
    evaluations: Annotated[
        int | None, typer.Option(help="Energy evaluations for each method; a gradient counts as one.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Updates of each method; 1500 by default.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of the optimiser; 0.001 by default.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs, the table and the report.")] = Path(
        "runs/compare"
    ),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier comparison in --out.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Of every random number; 0 by default.")] = None,
    device: SomeDevice = None,
    held_out: HeldOut = None,
    assign: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting of energy, trainer or one method, e.g. pcd.walkers=1000; repeatable.",
        ),
    ] = None,
    dry_run: DryRun = False,
    progress: Annotated[bool, typer.Option(help="Show progress bars.")] = True,
) -> None:
    """Train the same energy with several methods at the same cost, or take finished runs; set them side by side."""
    from dataclasses import replace

    import metastable.compare as room
    from metastable.core import processes
    from metastable.core.errors import ConfigError, InputError
    from metastable.methods import METHODS

    from .bars import training_bar
    from .settings import resolve, trainer_of, with_assignments, with_flags

    asked: dict[str, Any] = {"methods": methods, "budget": budget, "evaluations": evaluations, "steps": steps}
    asked |= {"learning_rate": learning_rate, "seed": seed, "held_out": held_out, "set": assign}
    if runs:
        asked["dry_run"] = dry_run or None
        show(_finished(runs, asked, data, energy, device or "cpu", out, overwrite))
        return
    if data is None:
        raise InputError("data: give --data FILE to train on, or the folders of finished runs")
    names = [name.strip() for name in (methods or METHODS_SHOWN).split(",") if name.strip()]
    seconds = None if budget is None else room.parse_budget(budget)
    tree = with_assignments({}, assign or [])
    own = {name: tree.pop(name) for name in METHODS if name in tree}
    if "method" in tree:
        raise ConfigError("method", "name the method whose setting it is, as in jarzynski.walkers=1000")
    room.methods_for(names, own)  # refused before the data are read
    flags = {"data": data, "energy": energy, "seed": seed, "trainer.device": device, "held_out": held_out}
    flags |= {"trainer.optimiser.learning_rate": learning_rate}
    settings = with_flags(tree, flags)
    job = resolve(settings)
    room.require_no_contexts(job.dataset)
    if "hidden" not in (tree.get("energy") or {}):
        job = replace(job, energy=room.compact(job.energy))
    chosen = room.methods_for(names, own)
    trainer = room.trainer_for(trainer_of(settings.get("trainer")), steps, seconds, evaluations)
    if dry_run:
        _print_plan(job, chosen, trainer, out)
        return
    options = {"seed": job.seed, "held_out": job.held_out, "units": job.units, "overwrite": overwrite}
    shown = progress and processes.is_first()  # bars of several would be drawn over each other
    options |= {"bar": lambda name, config: training_bar(name, config, shown)}
    found = room.compare_methods(job.energy, job.dataset, chosen, out, trainer=trainer, **options)
    show(found)
    if found.interrupted:
        raise typer.Exit(STOPPED)


def show(found: Comparison) -> None:
    """The table, what cannot be compared, and where the page is."""
    from .console import console, say

    console().print(comparison_table(found))
    say(*(f"note: {words}" for words in found.notes), f"report: {found.folder / 'report.html'}")


def _finished(
    folders: list[Path],
    asked: dict[str, Any],
    data: str | None,
    energy: str | None,
    device: str,
    out: Path,
    overwrite: bool,
) -> Comparison:
    """Runs that are there already, side by side; what is asked of a training says nothing about them."""
    from metastable.compare_runs import compare_runs, differences
    from metastable.core import processes
    from metastable.core.errors import InputError
    from metastable.runs.folder import read_config, require_run_folder

    from .runs import open_run, training_set

    for option, value in asked.items():
        if value not in (None, []):
            raise InputError(f"{option}: is for training, and finished runs are given; leave it out")

    def work() -> Comparison:
        own = [read_config(require_run_folder(folder))["energy"]["name"] == "custom" for folder in folders]
        named = [energy if mine or not any(own) else None for mine in own]
        found = [open_run(folder, device, name) for folder, name in zip(folders, named, strict=True)]
        differences(found)  # refused before the data are read
        return compare_runs(found, [training_set(run, data).x for run in found], out, overwrite=overwrite)

    with processes.together():
        return processes.by_first(work)


def _print_plan(job: Any, chosen: list[Any], trainer: Any, out: Path) -> None:
    from dataclasses import replace

    from .console import say
    from .plan import print_plan

    for method in chosen:
        say(f"--- {method.name}")
        print_plan(replace(job, method=method, trainer=trainer), out / method.name)


def comparison_table(found: Comparison) -> Any:
    """One row for each method, under a row of what the data have."""
    from rich.text import Text

    from .console import clock, number, plus_minus, table

    def cells(row: dict[str, Any]) -> dict[str, Any]:
        error = row.get("mode_weight_error")
        near = error is not None and error <= CLOSE
        return {
            "method": row["method"],
            "mode weights": weights_text(row.get("mode_weights")),
            "|error|": "" if error is None else Text(f"{error:.3f}", style="green" if near else "red"),
            "KL est.": number(row.get("kl"), 3),
            "KL exact": number(row.get("kl_exact"), 3),
            "log-likelihood": plus_minus(row.get("log_likelihood"), row.get("log_likelihood_se")),
            "MMD": number(row.get("mmd"), 3),
            "log Z": plus_minus(row.get("log_z"), row.get("log_z_se")),
            "log Z exact": plus_minus(row.get("log_z_exact"), None),
            "steps": number(row.get("steps")),
            "evaluations": number(row.get("evaluations")),
            "time": clock(row["seconds"]) if "seconds" in row else "",
            "diagnosis": row.get("diagnosis") or "nothing found",
        }

    rows = [cells(row) for row in found.rows]
    truth = {"method": "data", "mode weights": weights_text(found.truth.get("mode_weights"))}
    # columns that others make superfluous are left out, so that the table fits a terminal
    same_steps = len({row.get("steps") for row in found.rows}) == 1
    by_evaluations = "evaluations" in (found.budget or "")
    left_out = set() if by_evaluations else {"evaluations"}
    left_out |= {"steps"} if same_steps or by_evaluations else set()
    left_out |= {"log-likelihood"} if any(row.get("kl") is not None for row in found.rows) else set()
    columns = [c for c in rows[0] if c not in left_out and any(str(row[c]) for row in rows)]
    first = [truth] if found.truth else []
    lines = [[row.get(c, "") for c in columns] for row in (*first, *rows)]
    budget = "finished runs" if found.budget is None else f"{found.budget} each"
    return table(columns, lines, f"{found.data}, {budget}", caption(found))


def caption(found: Comparison) -> str:
    """What the numbers are."""
    exact = any(row.get("log_z_exact") is not None for row in found.rows)
    how = "by quadrature of the learned energy" if exact else "of weighted samples of the learned energy"
    return f"mode weights {how}; |error|: the largest difference from the data's; KL(data ‖ model) in nats"


def weights_text(weights: list[float] | None) -> str:
    """Mode weights in one cell.

    >>> weights_text([0.25, 0.75]), weights_text([0.125] * 8)
    ('0.250 / 0.750', '0.125 / 0.125 / 0.125 / 0.125 / …')
    """
    if not weights:
        return ""
    text = " / ".join(f"{w:.3f}" for w in weights[:MOST_WEIGHTS])
    return text + (" / …" if len(weights) > MOST_WEIGHTS else "")
