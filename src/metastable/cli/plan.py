"""What a training would do, without doing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from metastable._version import __version__
from metastable.core.protocols import is_costly
from metastable.core.room import bytes_in_words
from metastable.data.columns import Column, columns_of, dequantised
from metastable.runs.folder import check_folder, noise_before
from metastable.runs.memory import planned_bytes
from metastable.runs.plan import make_plan, trainer_of

from .bars import work_bar
from .console import console, say, table
from .settings import Job

MOST_COLUMNS = 40


def print_plan(job: Job, folder: Path, resume: bool = False) -> None:
    """The resolved settings, the size of everything, what the columns are, and whether the energy is one."""
    dataset = dequantised(job.dataset, job.seed) if job.dequantise else job.dataset
    plan = make_plan(
        job.energy,
        dataset,
        job.method,
        job.trainer,
        seed=job.seed,
        held_out=job.held_out,
        units=job.units,
        noise_before=noise_before(folder) if resume else None,
    )
    check_folder(folder, plan.settings(__version__), resume)
    rows, energy, x = plan.rows, plan.energy, plan.rows.x
    say(json.dumps(job.described() | {"units": plan.units}, indent=2), "")
    if columns := columns_of(plan.train):
        console().print(column_table(columns))
    state = " (holds a run, which goes on)" if (folder / "config.json").exists() else ""
    parameters = sum(p.numel() for p in energy.parameters())
    limit = "" if job.trainer.max_seconds is None else f", at most {job.trainer.max_seconds:g} s"
    say(
        f"data        {job.dataset}",
        f"rows        {len(x)} to train on, {len(job.dataset) - len(x)} held out",
        f"units       {UNITS[plan.units]}",
        f"energy      {type(energy).__name__}, {parameters:,} parameters, checked on the data",
        f"device      {plan.engine.device}, {plan.engine.precision}",
        f"updates     {plan.updates}",
        f"steps       {plan.trainer.steps}{limit}",
        f"memory      about {bytes_in_words(planned_bytes(job.method, plan.trainer, energy, rows))}",
        f"folder      {folder}{state}",
        *job.notes,
        *([] if plan.doubt is None else [f"energy: {plan.doubt}"]),
    )
    if is_costly(energy):  # a start may ask for second derivatives of an ODE's solution, which takes a minute
        say("dry run: nothing was written, and the start was not tried: every energy is an ODE solved")
        return
    with work_bar("trying to begin"):  # refuses what training does before its first update; may take as long
        plan.method.start(trainer_of(plan).context)
    say("dry run: nothing was written")


UNITS = {
    "none": "none: training sees the data as they are",
    "common": "common: training sees all numbers less one mean, in one standard deviation",
    "scale": "scale: training sees every number in its column's standard deviation",
    "whiten": "whiten: training sees standard deviations of the columns, their correlations undone",
}


def column_table(columns: list[Column]) -> Any:
    """What each column is, in its own units."""
    rows = [
        (c.name, f"{c.mean:.6g}", f"{c.scale:.4g}", f"{c.low:.6g} … {c.high:.6g}", f"{c.distinct}", c.note)
        for c in columns[:MOST_COLUMNS]
    ]
    more = len(columns) - len(rows)
    return table(
        ["column", "mean", "unit (sd)", "range", "values", ""], rows, "", f"and {more} more" if more else ""
    )
