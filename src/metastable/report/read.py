"""What lies in a folder: a run, a comparison of runs, or a reproduction of a paper's numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from metastable._version import __version__
from metastable.core.array_files import open_arrays
from metastable.core.errors import refuse_newer
from metastable.core.seals import check_seal

from .formatting import is_number, number

RUN_FILES = ("config.json", "metrics.jsonl", "summary.json")
_MOST_SAMPLES = 2000


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        folder: where it lies.
        config: resolved settings, nested.
        metrics: one array per metric over the logged steps, NaN where a step has no value; `step` is always
            there when anything was logged.
        summary: what the training concluded; empty while it runs or after it was killed.
        arrays: what `figures.npz` holds, with `samples` from `samples.npy` where only that exists.
        broken_tail: whether the last line of the log was cut short.
        evaluation: what `metastable evaluate` wrote to `evaluation.json`; empty where nobody asked.
        evaluation_arrays: the arrays behind its pictures, from `evaluation/figures.npz`.
        policy: what `policy.json` says of a policy that acts by it, such as how its actions were scaled.

    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, np.ndarray] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    broken_tail: bool = False
    evaluation: dict[str, Any] = field(default_factory=dict)
    evaluation_arrays: dict[str, np.ndarray] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """`finished`, `interrupted`, `diverged`, or `unfinished` where no summary was written."""
        return str(self.summary.get("status") or "unfinished")

    @property
    def method(self) -> str:
        """The training method's name."""
        return str(self.summary.get("method") or name_of(self.config.get("method")) or "unknown method")

    @property
    def data_name(self) -> str | None:
        """The data set's name, where the settings say it."""
        return name_of(self.config.get("data"))

    @property
    def event_shape(self) -> tuple[int, ...] | None:
        """Shape of one data point, from the summary or else from the stored arrays."""
        shape = self.summary.get("event_shape")
        if isinstance(shape, list) and all(isinstance(n, int) for n in shape):
            return tuple(shape)
        stored = [self.arrays[k].shape[1:] for k in ("data", "samples") if k in self.arrays]
        return stored[0] if stored else None

    @property
    def log_partition(self) -> dict[str, Any] | None:
        """The estimate of log Z with its error, from an evaluation where training made none, or None."""
        later = None if self.outdated else self.evaluation.get("log_partition")
        found = mapping(self.summary.get("log_partition") or later)
        return found if is_number(found.get("value")) else None

    @property
    def evaluated_at(self) -> str:
        """The update that an evaluation is of, in words, where training went on after it."""
        step = self.evaluation.get("step")
        return self.seen_at(step if is_number(step) else None)

    @property
    def outdated(self) -> bool:
        """Whether training went on after the evaluation."""
        judged = self.evaluation.get("step")
        if not is_number(judged):
            return False
        if self.status in ("diverged", "unfinished"):  # whose weights are those of the newest checkpoint
            saved = [path.name.removeprefix("step-") for path in (self.folder / "checkpoints").glob("step-*")]
            return any(int(step) > judged for step in saved if step.isdigit())
        now = [self.summary.get("steps"), self.summary.get("kept")]
        return is_number(now[0]) and judged not in now

    @property
    def diagnosis(self) -> list[dict[str, Any]]:
        """Findings, the worst first."""
        rank = {"problem": 0, "warning": 1}
        found = [f for f in sequence(self.summary.get("diagnosis")) if isinstance(f, dict)]
        return sorted(found, key=lambda f: rank.get(str(f.get("severity")), 2))

    @property
    def modes(self) -> dict[str, list[float]] | None:
        """Share of data and of samples in each mode, with standard errors where known, or None."""
        found = mapping(self.summary.get("modes"))
        columns = {k: numbers_of(found.get(k)) for k in ("data", "samples", "std_error")}
        n = len(columns["samples"])
        return {k: v for k, v in columns.items() if len(v) == n} if n else None

    def seen_at(self, step: float | None) -> str:
        """That numbers are of update `step`, in words; empty where training did not go on after it."""
        last = self.last("step")
        if step is None or last is None or step >= last or self.status in ("finished", "interrupted"):
            return ""
        stopped = f"; training diverged by update {number(last)}" if self.status == "diverged" else ""
        words = f"Seen at update {number(step)}, the last good checkpoint{stopped}."
        return (
            words if step else f"{words} Nothing was learned by then: a smaller checkpoint_every keeps more."
        )

    def last(self, metric: str) -> float | None:
        """The last finite value of a metric."""
        column = self.metrics.get(metric, np.empty(0))
        finite = column[np.isfinite(column)]
        return float(finite[-1]) if finite.size else None


@dataclass(frozen=True)
class Comparison:
    """Several methods on the same data at the same cost."""

    folder: Path
    table: dict[str, Any]
    runs: tuple[Run | None, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per method, in file order."""
        return [row for row in sequence(self.table.get("rows")) if isinstance(row, dict)]

    @property
    def truth(self) -> dict[str, Any]:
        """What is known exactly."""
        return mapping(self.table.get("truth"))


@dataclass(frozen=True)
class Reproduction:
    """A paper's numbers next to ours."""

    folder: Path
    result: dict[str, Any]
    pictures: tuple[Path, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per published or required number."""
        return [row for row in sequence(self.result.get("rows")) if isinstance(row, dict)]


def read_folder(folder: Path) -> Run | Comparison | Reproduction:
    """Recognise `folder` by its files and read it.

    Raises:
        InputError: the folder is missing, is none of the three kinds, or holds a file that cannot be read.

    """
    if not folder.is_dir():
        refuse(
            f"{folder}: is not a folder; give the folder that training, a comparison or a reproduction wrote"
        )
    if (folder / "result.json").exists():
        return read_reproduction(folder)
    if (folder / "compare.json").exists():
        return read_comparison(folder)
    if is_run(folder):
        return read_run(folder)
    return refuse(
        f"{folder}: holds nothing to report on. Looked for {', '.join(RUN_FILES)} (a run), "
        "compare.json (a comparison) and result.json (a reproduction)"
    )


def is_run(folder: Path) -> bool:
    """Whether any of a run's files is there."""
    return any((folder / name).exists() for name in RUN_FILES)


def read_run(folder: Path) -> Run:
    """Read a run; every file may be missing."""
    for name in (*RUN_FILES, "figures.npz", "samples.npy"):
        check_seal(folder, name)
    metrics, broken_tail = read_metrics(folder / "metrics.jsonl")
    return Run(
        folder,
        config=read_object(folder / "config.json"),
        metrics=metrics,
        summary=read_object(folder / "summary.json"),
        arrays=read_arrays(folder),
        broken_tail=broken_tail,
        evaluation=read_object(folder / "evaluation.json"),
        evaluation_arrays=_numeric(folder / "evaluation" / "figures.npz"),
        policy=read_object(folder / "policy.json"),
    )


def read_comparison(folder: Path) -> Comparison:
    """Read `compare.json` and the runs it names; a run that is missing or outside the folder becomes None."""
    table = read_object(folder / "compare.json")
    runs: list[Run | None] = []
    for row in Comparison(folder, table, ()).rows:
        name = row.get("run")
        path = folder / name if isinstance(name, str) and name else folder
        inside = folder.resolve() in path.resolve().parents
        runs.append(read_run(path) if inside and is_run(path) else None)
    return Comparison(folder, table, tuple(runs))


def read_reproduction(folder: Path) -> Reproduction:
    """Read `result.json` and the names of the pictures beside it."""
    pictures = tuple(sorted(p for p in folder.iterdir() if p.suffix.lower() == ".png" and p.is_file()))
    return Reproduction(folder, read_object(folder / "result.json"), pictures)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, `{}` where the file does not exist."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        refuse(f"{path}: is not readable JSON ({error}); write it again or remove it", error)
    if not isinstance(found, dict):
        refuse(f"{path}: must hold a JSON object, got {type(found).__name__}")
    if found.get("version", __version__) != __version__:
        refuse_newer(path, found["version"], __version__)
    return found


def read_metrics(path: Path) -> tuple[dict[str, np.ndarray], bool]:
    """Columns of the log, and whether its last line was cut short by a killed process."""
    if not path.exists():
        return {}, False
    try:
        lines = [(i, line) for i, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    except OSError as error:
        refuse(f"{path}: cannot be read ({error})", error)
    rows: list[dict[str, Any]] = []
    for i, line in lines:
        try:
            row = json.loads(line.decode("utf-8"))
            if not isinstance(row, dict):
                raise ValueError(f"got {type(row).__name__}")
            rows.append(row)
        except (ValueError, RecursionError) as error:
            if i == lines[-1][0]:
                return _columns(_in_order(rows)), True
            refuse(f"{path}: line {i} is not a JSON object ({error}); remove the line", error)
    return _columns(_in_order(rows)), False


def _in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A resumed run logs some steps twice: what was logged last is what happened."""
    ordered: list[dict[str, Any]] = []
    for i, row in enumerate(rows):
        step = row.get("step")
        row = (
            row
            if is_number(step) and math.isfinite(step)
            else {**row, "step": ordered[-1]["step"] + 1 if ordered else i}
        )
        while ordered and ordered[-1]["step"] >= row["step"]:
            ordered.pop()
        ordered.append(row)
    return ordered


def _columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for row in rows for name, value in row.items() if is_number(value))
    return {
        name: np.array([float(v) if is_number(v := row.get(name)) else math.nan for row in rows])
        for name in names
    }


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """The numeric arrays of `figures.npz`, and rows of `samples.npy` where that has no samples."""
    arrays = _numeric(folder / "figures.npz")
    path = folder / "samples.npy"
    if "samples" not in arrays and path.exists():
        with _readable(path):
            stored = np.atleast_1d(open_arrays(path, "r"))
            stride = max(math.ceil(len(stored) / _MOST_SAMPLES), 1)
            arrays["samples"] = np.array(stored[::stride], dtype=float)
    return {name: array for name, array in arrays.items() if array.size}


def _numeric(path: Path) -> dict[str, np.ndarray]:
    """The numeric arrays of an `.npz` file; none where it does not exist."""
    if not path.exists():
        return {}
    with _readable(path), open_arrays(path) as stored:
        names = [k for k in stored.files if stored[k].dtype.kind in "fiub"]
        return {k: np.asarray(stored[k], dtype=float) for k in names}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn whatever a damaged array file raises into one error that names it."""
    try:
        yield
    except Exception as error:
        refuse(f"{path}: is not a readable NumPy file ({error}); write it again or remove it", error)


def mapping(value: Any) -> dict[str, Any]:
    """`value` where it is a dict, else an empty one."""
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    """`value` where it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def numbers_of(value: Any) -> list[float]:
    """`value` as floats where it is a list of numbers, else an empty list."""
    found = sequence(value)
    return [float(v) for v in found] if found and all(is_number(v) for v in found) else []


def name_of(value: Any) -> str | None:
    """The name in a setting that is either a name or a dict that holds one."""
    if isinstance(value, str):
        return value
    found = [mapping(value).get(key) for key in ("name", "kind", "type", "path", "source")]
    return next((v for v in found if isinstance(v, str) and v), None)


def refuse(message: str, cause: BaseException | None = None) -> NoReturn:
    """Raise `InputError`, imported only now because its package brings torch."""
    from ..core.errors import InputError

    raise InputError(message) from cause
