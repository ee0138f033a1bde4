"""What a training would do, without doing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from metastable.core.batch import Beside
from metastable.core.memory import PROBE, kept_for_backward
from metastable.core.types import bind
from metastable.data.columns import Column, columns_of, dequantised
from metastable.methods.jem import check_joint
from metastable.runs.plan import make_plan

from .console import console, say, table
from .settings import Job

MOST_COLUMNS = 40
COPIES = 4  # of each parameter: itself, its gradient and Adam's two averages


def print_plan(job: Job, folder: Path) -> None:
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
    )
    rows, energy, x = plan.rows, plan.energy, plan.rows.x
    seen = energy
    if rows.kind is Beside.CONTEXTS:
        seen = bind(energy, rows.conditions[:PROBE])
    elif rows.kind is Beside.LABELS:
        check_joint(energy, rows.given)
    say(json.dumps(job.described() | {"units": plan.units}, indent=2), "")
    if columns := columns_of(plan.train):
        console().print(column_table(columns))
    state = ""
    if folder.exists() and any(folder.iterdir()):
        resumable = (folder / "config.json").exists()
        state = " (holds a run: --resume goes on with it)" if resumable else " (not empty)"
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
        f"memory      about {_size(memory(job, energy, x, seen))}",
        f"folder      {folder}{state}",
        *job.notes,
        *([] if plan.doubt is None else [f"energy: {plan.doubt}"]),
        "dry run: nothing was written",
    )


UNITS = {
    "none": "none: training sees the data as they are",
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


def memory(job: Job, energy: nn.Module, x: Tensor, seen: Any = None) -> int:
    """Bytes: parameters with their optimiser, data, walkers, and what one backward pass keeps.

    `seen` is the energy as rows alone see it, where it is given contexts.
    """
    batch = min(job.trainer.batch_size or len(x), len(x))
    moving, stored = job.method.moving(batch, len(x)), job.method.stored(batch, len(x))
    row = x[0].numel() * x.element_size()
    parameters = sum(p.numel() * p.element_size() for p in energy.parameters())
    held = COPIES * parameters + x.numel() * x.element_size() + 3 * stored * row
    return held + (batch + moving) * kept_for_backward(energy if seen is None else seen, x[:PROBE])


def _size(n: int) -> str:
    """Bytes as people say them.

    >>> _size(512), _size(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    value, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{n} B" if n < 1024 else f"{value:.1f} {units[0]}"
