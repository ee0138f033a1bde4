"""Finished runs of the same data in one table and one page."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from metastable.compare import Comparison, open_folder, scores, truth_of
from metastable.core.errors import InputError, UnsupportedError, short
from metastable.report import write_report
from metastable.runs.folder import same_rows
from metastable.runs.run import Run

PAGE_FILES = ("config.json", "metrics.jsonl", "summary.json", "figures.npz", "report.html")
"""What the page of a comparison shows of a run."""


def compare_runs(
    runs: Sequence[Run], train: Sequence[Tensor], out: str | Path, *, overwrite: bool = False
) -> Comparison:
    """Finished runs of the same data, scored as `compare_methods` scores its own; table and report go into `out`.

    Args:
        runs: from their folders, by `load_run`; two or more.
        train: the rows that each was trained on.
        out: the folder; it gets copies of what the page shows of each run, and never changes the runs themselves.
        overwrite: replace an earlier comparison.
    """
    notes = differences(runs)
    folder, names = Path(out).expanduser(), _names([run.folder or Path("run") for run in runs])
    copies = [folder / f"run-{i + 1}" for i in range(len(runs))]
    runs_there = [run.folder for run in runs if run.folder is not None]
    inside = [path for path in runs_there if folder.resolve() in (path.resolve(), *path.resolve().parents)]
    for path in inside + [path for path in copies if (path / "checkpoints").exists()]:
        raise InputError(f"out: {folder} holds the run {path}; choose another folder")
    open_folder(folder, overwrite)
    found = Comparison(folder, runs[0].config["data"]["source"], None, names, notes=notes)
    alike = len({len(run.modes["data"]) for run in runs if run.modes is not None}) < 2
    for name, run, rows, copy in zip(names, runs, train, copies, strict=True):
        row = {"method": f"{name} ({run.method})", "run": _copied(run, copy), "status": run.status}
        if run.status == "diverged":
            found.rows.append({**row, "steps": run.steps, "diagnosis": "diverged"})
            continue
        found.truth |= {} if found.truth or not alike else truth_of(run)
        left_out = {} if alike else {"mode_weights": None, "mode_weight_error": None}
        found.rows.append({**row, **scores(run, rows), **left_out})
    found.write()
    write_report(folder)
    return found


def differences(runs: Sequence[Run]) -> list[str]:
    """In words, what cannot be compared about finished runs; runs of other data or with contexts are refused."""
    if len(runs) < 2:
        raise InputError(f"runs: give at least two folders of finished runs, got {len(runs)}")
    first = runs[0]
    for run in runs:
        if run.conditional:
            raise UnsupportedError(
                f"runs: {run.folder} has contexts, and a comparison is of densities without them"
            )
        ours, theirs = first.config["data"], run.config["data"]
        if not {"source", "sha256"} <= theirs.keys():
            raise InputError(
                f"{run.folder}/config.json: data: must have source and sha256, got {short(theirs)}"
            )
        if not same_rows(first.config, theirs, lambda run=run: run.config):
            raise InputError(
                f"runs: must be of the same data; {first.folder} was trained on {ours['source']} (sha256 "
                f"{ours['sha256']}), {run.folder} on {theirs['source']} (sha256 {theirs['sha256']})"
            )
    asked = {
        "likelihoods, KL and MMD are of different held-out rows": ("held_out", "seed"),
        "the energies differ, and not the methods alone": ("energy",),
        "the units of training differ, and not the methods alone": ("units",),
    }
    kept = [{words: [run.config.get(key) for key in keys] for words, keys in asked.items()} for run in runs]
    notes = [words for words in asked if any(k[words] != kept[0][words] for k in kept)]
    if len({run.steps for run in runs}) > 1:
        notes.append("the runs had different budgets: see steps, evaluations and seconds")
    counts = {len(run.modes["data"]) for run in runs if run.modes is not None}
    if len(counts) > 1:
        notes.append(
            f"mode weights cannot be compared: {' or '.join(map(str, sorted(counts)))} modes were found"
        )
    return notes + [
        f"{run.folder} is {run.status}: it has no scores of a finished run" for run in runs if not run.scores
    ]


def _names(folders: Sequence[Path]) -> list[str]:
    """What tells the runs apart: the names of their folders, or their paths where two have one name."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise InputError(f"runs: each may be named once, got {', '.join(map(str, folders))}")
    short = [folder.resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _copied(run: Run, folder: Path) -> str:
    """The name of a folder beside the table with what the page shows of a run, so that it can be sent around."""
    folder.mkdir()
    for name in PAGE_FILES:
        if run.folder is not None and (run.folder / name).is_file():
            shutil.copy2(run.folder / name, folder / name)
    return folder.name
