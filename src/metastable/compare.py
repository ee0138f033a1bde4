"""Several methods on the same data, with the same energy, at the same cost.

Every method begins from the same weights and sees the same batches. What is compared is the model that each
one learned, not the state of its chains: chains that never leave the mode they began in show the data's mode
weights whatever the energy says. In one and two dimensions mode weights, log Z and KL are therefore computed by
quadrature; beyond that they are estimated from weighted samples of the energy.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from metastable.api import fit
from metastable.core import processes
from metastable.core.batch import Batch
from metastable.core.configure import describe
from metastable.core.errors import DivergenceError, InputError, UnsupportedError, require_choice
from metastable.data import Dataset
from metastable.energies.build import MLPConfig
from metastable.methods import METHODS, Method
from metastable.report import write_report
from metastable.runs.folder import plain, write_json
from metastable.runs.resolve import resolve_method
from metastable.runs.rows import needed_beside
from metastable.runs.run import Run
from metastable.summary import Exact, Judged, judge
from metastable.training.config import Adam, Schedule, TrainerConfig
from metastable.training.interrupts import stop_on_interrupt
from metastable.training.trainer import OnRow

STEPS = 1500
RATE = 1e-3
"""Of Adam, unless somebody chooses: one that chains of every method can follow."""
HIDDEN = (64, 64)
"""Layers of the perceptron, unless somebody chooses: several trainings should not take several coffees."""
WALKERS = 8192
"""Negatives of the methods that keep a population; the others make one chain for each row of the batch."""
COLUMNS = (
    "mode_weights",
    "mode_weight_error",
    "kl",
    "kl_exact",
    "log_likelihood",
    "log_likelihood_se",
    "mmd",
    "log_z",
    "log_z_se",
    "log_z_exact",
    "steps",
    "evaluations",
    "seconds",
    "diagnosis",
)
SEVERITIES = ("problem", "warning", "note")
TRUTH = "truth"
"""Under which a row of the table carries what its run knows of the data."""
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

Bar = Callable[[str, TrainerConfig], AbstractContextManager[OnRow | bool]]
"""Makes the progress display of one training from the method's name and the settings."""


@dataclass
class Comparison:
    """What was compared and what came out, as `compare.json` holds it.

    Attributes:
        folder: holds one run for each method, `compare.json` and `report.html`.
        data: where the rows came from.
        budget: what each method could spend, in words; None for finished runs, which had their own.
        methods: names of all methods, or of finished runs, in order.
        rows: one for each method that was trained.
        truth: what is known: `mode_weights` of the training data.
        interrupted: whether somebody pressed Ctrl-C.
        notes: in words, what cannot be compared.
    """

    folder: Path
    data: str
    budget: str | None
    methods: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    truth: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def columns(self) -> list[str]:
        """Columns that at least one row fills."""
        return [c for c in COLUMNS if any(row.get(c) is not None for row in self.rows)]

    def fill(self, made: Mapping[int, Mapping[str, Any]]) -> None:
        """Take the rows of methods by their numbers, each with what it knows of the data."""
        every = [dict(made[i]) for i in sorted(made)]
        self.truth = {key: value for row in every for key, value in row.pop(TRUTH, {}).items()}
        self.rows, self.interrupted = every, any(row["status"] == "interrupted" for row in every)

    def write(self) -> None:
        """Write `compare.json`."""
        names = ("data", "budget", "methods", "truth", "rows", "columns", *(["notes"] if self.notes else []))
        write_json(self.folder / "compare.json", {name: getattr(self, name) for name in names})


def parse_budget(text: str) -> float:
    """Seconds of a duration such as `60s`, `2m` or `1.5h`.

    >>> parse_budget("60s"), parse_budget("1.5m")
    (60.0, 90.0)
    """
    digits = text.strip().rstrip("hmins")
    unit = text.strip()[len(digits) :]
    try:
        seconds = float(digits) * _UNITS[unit]
    except (ValueError, KeyError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InputError(f"budget: must be a time above 0 such as 60s, 2m or 1h, got {text!r}")
    return seconds


def trainer_for(
    trainer: TrainerConfig, steps: int | None, seconds: float | None, evaluations: int | None = None
) -> TrainerConfig:
    """`trainer` with a limit on steps, seconds or energy evaluations, or several; `STEPS` where none is given.

    Under a limit on steps alone the learning rate falls to zero along a cosine, unless a schedule was chosen:
    how many steps fit into a time nobody knows beforehand.
    """
    trainer = replace(trainer, patience=None)  # the same cost for all
    if trainer.optimiser is None:
        trainer = replace(trainer, optimiser=Adam(RATE))
    if seconds is not None or evaluations is not None:
        most = 10**9 if steps is None else steps
        return replace(trainer, steps=most, max_seconds=seconds, max_evaluations=evaluations)
    if trainer.schedule in (None, Schedule()):
        trainer = replace(trainer, schedule=Schedule("cosine"))
    return replace(trainer, steps=STEPS if steps is None else steps)


def compact(energy: Any) -> Any:
    """The settings of an energy with smaller layers, where it is a perceptron."""
    return replace(energy, hidden=HIDDEN) if isinstance(energy, MLPConfig) else energy


def methods_for(
    names: Sequence[str], settings: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Method]:
    """Methods by name, with `WALKERS` where they keep some and then `settings` (by method) on top.

    >>> [m.walkers for m in methods_for(["pcd", "cd"], {"pcd": {"walkers": 64}})]
    [64, None]
    """
    if not names:
        raise InputError(f"methods: give at least one of {', '.join(sorted(METHODS))}")
    for name in names:
        require_choice("methods", name, METHODS)
    if len(set(names)) < len(names):
        raise InputError(f"methods: each may be named once, got {', '.join(names)}")
    own = settings or {}
    kept = {name: {"walkers": WALKERS} if METHODS[name].keeps_walkers else {} for name in names}
    return [resolve_method({"name": name, **kept[name], **own.get(name, {})}) for name in names]


def compare_methods(
    energy: Any,
    data: Dataset,
    methods: Sequence[Method],
    out: str | Path,
    *,
    trainer: TrainerConfig | None = None,
    seed: int = 0,
    held_out: float = 0.1,
    units: str = "auto",
    overwrite: bool = False,
    bar: Bar | None = None,
) -> Comparison:
    """Train the same energy with each method, and write runs, table and report into `out`.

    Processes of a group share the methods, each trained by one of them as if it were alone; all return the same.

    Args:
        energy: a module, the settings of a built-in energy, its name, or `"default"` (None means the same); each
            method trains a copy of its own.
        data: the rows.
        methods: no two of the same name.
        out: the folder; one that holds an earlier comparison is cleared if `overwrite` is set.
        trainer: settings that all share; see `trainer_for`.
        seed: of every random number.
        held_out: share of the rows kept for scores.
        units: what training measures columns in, see `fit`.
        overwrite: replace an earlier comparison.
        bar: progress of one training.
    """
    require_no_contexts(data)
    for method in methods:  # what one of them needs is asked for before the first is trained
        needed_beside(data, method)
    trainer = trainer_for(TrainerConfig(), None, None) if trainer is None else trainer
    folder, names = Path(out).expanduser(), [m.name for m in methods]
    found = Comparison(folder, data.name, _budget_words(trainer), names)
    train = data.split(held_out, seed)[0] if held_out > 0 else data
    own: dict[int, dict[str, Any]] = {}
    many = processes.is_many()
    told = {"energy": energy, "methods": {m.name: m for m in methods}, "data": data.digest, "seed": seed}
    told |= {"held_out": held_out, "units": units, "out": str(folder), "overwrite": overwrite}
    told["trainer"] = describe(trainer) | {"device": ""}
    processes.require_same("compare", describe(told))
    with processes.together():
        processes.by_first(lambda: _opened(found, overwrite))
        for i in processes.dealt("methods", len(methods)) if many else range(len(methods)):
            method = methods[i]
            with processes.alone(), bar(method.name, trainer) if bar else nullcontext(False) as on_row:
                row, run = _train(energy, data, method, trainer, folder, seed, held_out, units, on_row)
                own[i] = row if run is None else row | scores(run, train.x) | {TRUTH: truth_of(run)}
            found.fill(own)
            if processes.is_first():
                found.write()
            if found.interrupted:
                break
        with stop_on_interrupt(lambda number: None):  # whoever trains stops, and its row comes soon
            words = json.dumps(own, default=plain)
            every = processes.exchanged("rows", words) if many else [words]
        for words in every:
            own |= {int(i): row for i, row in json.loads(words).items()}
        found.fill(own)
        processes.by_first(lambda: _closed(found))
    return found


def _opened(found: Comparison, overwrite: bool) -> None:
    open_folder(found.folder, overwrite)
    found.write()


def _closed(found: Comparison) -> None:
    found.write()
    write_report(found.folder)


def require_no_contexts(data: Dataset) -> None:
    """Its scores are those of densities without contexts."""
    if data.given is not None:
        raise UnsupportedError(
            f"data: {data.name} has contexts, and a comparison is of densities without them; train each method "
            "with `metastable train`, and score it with `metastable evaluate`"
        )


def _budget_words(trainer: TrainerConfig) -> str:
    words = [] if trainer.max_seconds is None else [f"{trainer.max_seconds:g} s"]
    words += [] if trainer.max_evaluations is None else [f"{trainer.max_evaluations:,} energy evaluations"]
    return " or ".join(words) or f"{trainer.steps} steps"


def open_folder(folder: Path, overwrite: bool) -> None:
    """Make the folder, or clear it of an earlier comparison and of nothing else."""
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / "compare.json").is_file():
            raise InputError(f"out: {folder} is not empty and not a comparison; choose another folder")
        if not overwrite:
            raise InputError(f"out: {folder} already holds a comparison; give --overwrite, or another folder")
        _clear(folder)
    folder.mkdir(parents=True, exist_ok=True)


def _clear(folder: Path) -> None:
    """Remove what an earlier comparison wrote."""
    try:
        kept = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
        trained, names = kept["budget"] is not None, list(map(str, kept["methods"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"out: {folder / 'compare.json'} is not readable; remove {folder} yourself"
        ) from error
    for name in set(names) & set(METHODS) if trained else {f"run-{i + 1}" for i in range(len(names))}:
        is_copy = not (folder / name / "checkpoints").exists()  # of finished runs only copies lie here
        if (folder / name / "config.json").is_file() and (trained or is_copy):
            shutil.rmtree(folder / name)
    for name in ("compare.json", "report.html"):
        (folder / name).unlink(missing_ok=True)


def _train(
    energy: Any,
    data: Dataset,
    method: Method,
    trainer: TrainerConfig,
    folder: Path,
    seed: int,
    held_out: float,
    units: str,
    on_row: OnRow | bool,
) -> tuple[dict[str, Any], Run | None]:
    """One training; a method that diverges gets a row that says so, and the others go on."""
    row: dict[str, Any] = {"method": method.name, "run": method.name}
    try:
        run = fit(
            copy.deepcopy(energy),
            data,
            method,
            seed=seed,
            out=folder / method.name,
            held_out=held_out,
            units=units,
            trainer=trainer,
            progress=on_row,
        )
    except DivergenceError as error:
        return {**row, "status": "diverged", "steps": error.step, "diagnosis": "diverged"}, None
    return {**row, "status": run.status}, run


def truth_of(run: Run) -> dict[str, Any]:
    """What a run knows of its data: the weights of their modes."""
    return {} if run.modes is None else {"mode_weights": run.modes["data"]}


def scores(run: Run, train: Tensor) -> dict[str, Any]:
    """One row of the table. Numbers that cannot be had are None."""
    exact = judge(Judged(run, Batch(train), 0), [Exact()])
    weights = exact.get("mode_weights", None if run.modes is None else run.modes["samples"])
    z, found = run.log_partition, run.scores
    row = {
        "mode_weights": weights,
        "mode_weight_error": _worst(weights, run),
        "kl": found.get("kl_estimated"),
        "kl_exact": found.get("kl_exact"),
        "log_likelihood": found.get("log_likelihood"),
        "log_likelihood_se": found.get("log_likelihood_se"),
        "mmd": found.get("mmd"),
        "log_z": None if z is None else z.value,
        "log_z_se": None if z is None else z.std_error,
        "log_z_exact": exact.get("log_z_exact"),
        "steps": run.steps,
        "evaluations": int(run.history[-1]["evaluations"]) if run.history else 0,
        "seconds": run.seconds,
        "diagnosis": main_finding(run),
    }
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _worst(weights: list[float] | None, run: Run) -> float | None:
    if weights is None or run.modes is None:
        return None
    return max(abs(w - d) for w, d in zip(weights, run.modes["data"], strict=True))


def main_finding(run: Run) -> str | None:
    """The name of the gravest finding, in words; None where nothing was found."""
    rank = {severity: i for i, severity in enumerate(SEVERITIES)}
    found = sorted(run.diagnosis, key=lambda f: rank.get(f.severity, len(rank)))
    return found[0].name.replace("_", " ").replace("-", " ") if found else None
