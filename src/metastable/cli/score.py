"""`metastable score`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Device, LogZ, OwnEnergy, RunFolder, Seed

if TYPE_CHECKING:
    import numpy as np

    from metastable.runs.row_scores import RowScores
    from metastable.runs.run import Run

MOST_OWN, MOST_OWN_GIVEN = 10_000, 1000
"""Rows of the run's own behind the threshold; fewer where each has a log Z of its own."""


def score(
    run: RunFolder,
    data: Annotated[str, typer.Option(help="The rows: a .csv, .tsv, .npy or .npz file, mnist:FOLDER, …")],
    out: Annotated[Path, typer.Option(help="The .csv or .npz file to write.")] = Path("scores.csv"),
    outliers: Annotated[
        float, typer.Option(help="Share of the run's own rows beyond the threshold of an outlier.")
    ] = 0.01,
    log_z: LogZ = False,
    energy: OwnEnergy = None,
    seed: Seed = 0,
    device: Device = "cpu",
) -> None:
    """Score every row: its log-density, or its energy where log Z is not trusted, and whether it is an outlier."""
    from metastable.core.errors import require

    from .bars import work_bar
    from .console import say
    from .runs import open_run, rows_to_score

    require(out.suffix in (".csv", ".npz"), "out", "a file that ends in .csv or .npz", str(out))
    require(0 < outliers < 1, "outliers", "a share above 0 and below 1", outliers)
    found = open_run(run, device, energy)
    dataset = rows_to_score(found, data)
    x, given, whose = reference_rows(found, outliers, seed)
    with work_bar("scoring"):
        if found.log_partition is None and not found.conditional:
            estimate_log_z(found, dataset.x if x is None else x, log_z, seed)
        scores = found.score(dataset.x, dataset.given if found.conditional else None)
    columns = columns_of(scores)
    name = scores.kind.replace("_", "-")
    hint = "; ask for it with --log-z" if scores.kind == "energy" and found.log_partition is None else ""
    why = f" ({scores.why}{hint})" if scores.why else ""
    say(f"{run} on {data}, {len(dataset)} rows: {name} of each{why}")
    if x is None:
        say(f"no outliers were flagged: {whose}")
    else:
        threshold = found.score(x, given).threshold(outliers)
        flags = scores.outliers(threshold)
        columns |= {"outlier": flags.numpy()}
        side = "above" if scores.kind == "energy" else "below"
        words = f"{int(flags.sum())} outliers: {name} {side} {threshold:.6g}"
        say(f"{words}, as have at most {outliers:g} of {len(x)} {whose}")
    write(out, columns)
    say(f"wrote {out}")


def reference_rows(run: Run, share: float, seed: int) -> tuple:
    """Rows, contexts, and in words whose they are: the run's own, or samples of its model where those are gone."""
    from metastable.core.errors import InputError
    from metastable.core.random import derive, generator
    from metastable.summary.samples import kept_walkers
    from metastable.walkers.starts import random_rows

    from .runs import own_rows

    try:
        own, whose = own_rows(run, 1 / share)
    except InputError as error:
        kept = None if run.conditional else kept_walkers(run)[0]
        if kept is None:
            return None, None, f"the rows of training cannot be read ({error})"
        return kept.resampled(seed=seed).x, None, "samples of the model (the rows of training cannot be read)"
    most = MOST_OWN_GIVEN if run.conditional else MOST_OWN
    rows = random_rows(len(own), min(most, len(own)), generator(derive(seed, "score")), own.x.device)
    given = own.given[rows] if run.conditional and own.given is not None else None
    return own.x[rows], given, whose


def estimate_log_z(run: Run, x: object, log_z: bool, seed: int) -> None:
    """log Z for a run that has none, where that is a matter of seconds, or is asked for."""
    import torch

    from metastable.summary import affordable
    from metastable.summary.samples import normalised

    if not run.normalised and (log_z or affordable(run.learned_energy, torch.empty(1, *run.event_shape))):
        run.log_partition = normalised(run, torch.as_tensor(x), seed)


def columns_of(scores: RowScores) -> dict[str, np.ndarray]:
    """The row that each score belongs to, counting from 0, and the score."""
    import numpy as np

    columns = {"index": np.arange(len(scores.value)), scores.kind: scores.value.numpy()}
    return columns if scores.std_error is None else columns | {"std_error": scores.std_error.numpy()}


def write(out: Path, columns: dict[str, np.ndarray]) -> None:
    """One line for each row, or one array for each column."""
    import csv

    import numpy as np

    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".npz":
        np.savez(out, **columns)  # pyright: ignore
        return
    with out.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(columns)
        texts = (
            [f"{v:.12g}" if isinstance(v, float) else str(int(v)) for v in column.tolist()]
            for column in columns.values()
        )
        table.writerows(zip(*texts, strict=True))
