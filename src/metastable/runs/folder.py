"""The folder of a run: what is in it, and how it is opened, read and written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from metastable._version import __version__
from metastable.core.configure import build, describe
from metastable.core.errors import InputError, MetastableError, UnsupportedError, refuse_newer, short
from metastable.core.seals import SEALS, check_seal, identity, read_seals, seal, sealed
from metastable.core.units import Coordinates
from metastable.data.arrays import same_toy
from metastable.methods import METHODS
from metastable.training.config import TrainerConfig
from metastable.training.records import Row, read_jsonl

from .lock import LOCK, one_writer


def check_folder(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    """Refuse a folder that a run cannot be put into, or that is not the run that is being resumed."""
    config = folder / "config.json"
    if "\0" in str(folder):
        raise InputError(f"out: a path must have no null character, got {str(folder)!r}")
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"out: {folder} cannot be written, as {above} is no folder of yours; choose another")
    if config.exists():
        if not resume:
            raise InputError(f"out: {folder} already holds a run; resume=True (--resume), or another folder")
        before = read_config(folder)
        if "exported" in before:
            raise InputError(f"resume: {folder} holds exported weights alone; go on where they were trained")
        for key in ("seed", "data", "method", "energy", "held_out", "units"):
            then = before.get(key, "none" if key == "units" else None)
            same = (
                key == "data" and then is not None and same_rows(before, settings["data"], lambda: settings)
            )
            if not same and not _alike(then, settings[key]):
                raise InputError(
                    f"resume: {key} differs from the run in {folder}: it was {before.get(key)!r}, "
                    f"now {settings[key]!r}"
                )
    elif folder.exists() and any(not is_leftover(path) for path in folder.iterdir()):
        raise InputError(f"out: {folder} is not empty and not a run; choose another folder")


def same_rows(
    before: Mapping[str, Any], data: Mapping[str, Any], settings: Callable[[], Mapping[str, Any]]
) -> bool:
    """Whether rows are those of a run: to the bit, wherever they come from, or a toy set that another machine drew.

    There normal draws differ in their last digits; their columns have the same means and spreads but for that.

    Args:
        before: the settings of the run.
        data: what `data_settings` says of the rows.
        settings: what else a run on them would keep (`row_settings`), asked for where digests differ.
    """
    then = before["data"]
    if then.get("sha256") == data["sha256"]:
        return True
    if not same_toy(str(then.get("source")), str(data["source"])) or then.get("rows") != data["rows"]:
        return False
    now = settings()
    if any(before.get(key) not in (None, now.get(key)) for key in ("class_rows", "context_shape")):
        return False  # labels or contexts that were not the set's own
    columns = [config.get("columns") or [] for config in (before, now)]
    if not all(map(CONFIG["columns"][1], columns)):  # in a file of settings, which nobody has looked through
        return False
    old, new = ([c.get(key) for c in found for key in ("mean", "scale")] for found in columns)
    return _are_numbers(old, len(new)) and np.allclose(old, new, rtol=1e-4, atol=1e-6)


def noise_before(folder: Path | None) -> float | None:
    """What the units of the run in a folder hold of its noise; None where there is no run, or it has no units."""
    if folder is None or not (folder / "config.json").exists():
        return None
    with reading(folder / "config.json"):
        units = Coordinates.from_json(read_config(folder).get("coordinates"))
    return None if units is None else units.events.noise


def is_leftover(path: Path) -> bool:
    """Whether a file is what a killed process may leave: half of another file, or its lock."""
    return path.suffix == ".partial" or path.name == LOCK


@contextmanager
def opened(folder: Path | None, settings: dict[str, Any], resume: bool) -> Iterator[None]:
    """Make the run folder, or check that it is the run to resume; nobody else writes to it meanwhile.

    The run's identity, which its checkpoints carry, is put into `settings`.
    """
    if folder is None:
        yield
        return
    check_folder(folder, settings, resume)
    folder.mkdir(parents=True, exist_ok=True)
    with one_writer(folder):
        check_folder(folder, settings, resume)  # again: another process may have been here just now
        is_new = not (folder / "config.json").exists()
        settings["run"] = identity(settings if is_new else read_config(folder))
        (folder / SEALS).unlink(missing_ok=True)
        write_json(folder / "config.json", settings)
        seal_files(folder, settings, "config.json")
        try:
            yield
        except (InputError, UnsupportedError):
            if is_new and not (folder / "checkpoints").exists():  # refused before it began: it is free
                for name in ("config.json", "metrics.jsonl", SEALS):
                    (folder / name).unlink(missing_ok=True)
            raise


def seal_files(folder: Path, settings: Mapping[str, Any], *names: str) -> None:
    """Vouch for files of the run as they are now."""
    write_json(folder / SEALS, seal(folder, identity(settings), names))


@contextmanager
def rewriting(folder: Path, *names: str) -> Iterator[None]:
    """Files of a run that is vouched for are written anew: until they are whole, nothing vouches for them."""
    seals = read_seals(folder)
    if seals:
        files = {name: sha for name, sha in seals["files"].items() if name not in names}
        write_json(folder / SEALS, sealed(seals.get("run", ""), files))
    yield
    if seals:
        write_json(folder / SEALS, seal(folder, seals.get("run", ""), names))


def _alike(then: Any, now: Any) -> bool:
    """Whether settings are the same; one that there was not yet, off or as usual, says nothing new."""
    if isinstance(then, dict) and isinstance(now, dict):
        kind = METHODS.get(str(now.get("name"))) if now.keys() - then.keys() else None
        usual = {} if kind is None else describe(kind())
        return then.keys() <= now.keys() and all(
            _alike(then[k], v) if k in then else not v or usual.get(k) == v for k, v in now.items()
        )
    if isinstance(then, list) and isinstance(now, list):
        return len(then) == len(now) and all(map(_alike, then, now))
    return then == now


def require_run_folder(folder: str | Path) -> Path:
    """The folder, if it is a run."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise InputError(f"run: no such folder: {folder}")
    if not (folder / "config.json").is_file() or not (folder / "checkpoints").is_dir():
        raise InputError(
            f"run: {folder} is not a run (it should hold config.json, metrics.jsonl and checkpoints/)"
        )
    return folder


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What a damaged file raises while it is read, as one error that names it."""
    try:
        yield
    except MetastableError as error:
        raise InputError(f"{path}: {error}") from error
    except Exception as error:  # JSON, NumPy and zip files each have errors of their own
        why = f"{type(error).__name__}: {error}"
        raise InputError(f"{path}: is damaged ({why:.200}); put back the file, or remove it") from error


def read_table(path: Path, kinds: Mapping[str, Any], needed: Iterable[str] = ()) -> dict[str, Any]:
    """A JSON object whose `needed` keys are there, and whose values are of the `kinds` that others rely on."""
    with reading(path):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise InputError(f"{path}: must hold a JSON object, got {short(found)}")
    refuse_newer(path, found.get("version"), __version__)
    for key in needed:
        if key not in found:
            raise InputError(f"{path}: {key} is missing: the file is damaged, or not of a run")
    for key, (rule, holds) in kinds.items():
        if key in found and not holds(found[key]):
            raise InputError(f"{path}: {key}: must be {rule}, got {short(found[key])}: the file is damaged")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**63


def _is_count(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int) and value >= 0


def _is_shape(value: Any) -> bool:
    ok = isinstance(value, list) and all(_is_count(n) and n for n in value)
    return ok and math.prod(value) < MOST_NUMBERS


def _is_table(value: Any, *names: str) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in names)


def _are_numbers(value: Any, count: int | None = None) -> bool:
    """So many numbers, which may be infinite or NaN, as what is measured may be."""
    right = isinstance(value, list) and all(_is_number(v) or type(v) is float for v in value)
    return right and count in (None, len(value))


def _is_estimate(value: Any) -> bool:
    return isinstance(value, dict) and _are_numbers(
        [value.get("value"), value.get("std_error"), value.get("degrees", 0)]
    )


def _are_scores(value: Any) -> bool:
    """A table; what runs are compared by are numbers there, where it is known."""
    return _is_table(value) and _are_numbers([v for key in COMPARED if (v := value.get(key)) is not None])


def _are_modes(value: Any) -> bool:
    """Weights of modes in data and samples, their errors and places, where those are known: one for each mode."""
    if not isinstance(value, dict) or not isinstance(weights := value.get("data"), list) or not weights:
        return value is None
    places = [[]] * len(weights) if value.get("centers") is None else value["centers"]
    lists = [weights, value.get("samples"), weights if value.get("std_error") is None else value["std_error"]]
    placed = isinstance(places, list) and len(places) == len(weights) and all(map(_are_numbers, places))
    return placed and all(_are_numbers(numbers, len(weights)) for numbers in lists)


COMPARED = ("log_likelihood", "log_likelihood_se", "kl_estimated", "kl_exact", "mmd")
"""Scores that stand beside those of other runs."""
LASTING = (
    *("steps", "max_seconds", "follows", "follows_seconds", "precision"),
    *("data_noise", "data_noise_final", "data_noise_over", "augment"),
)
"""Settings of the trainer that a run is judged and gone on with by."""
MOST_NUMBERS = 1 << 31
"""Numbers in one event, beyond which a shape is taken for damage."""
WHOLE = ("an integer", lambda v: isinstance(v, int) and not isinstance(v, bool))
COUNT = ("a count", _is_count)
NUMBER = ("a number", _is_number)
SHAPE = ("a shape", _is_shape)
TEXT = ("text", lambda v: isinstance(v, str))
TABLE = ("a table", _is_table)
NAMED = ("a table with a name", lambda v: _is_table(v, "name"))
TABLE_OR_NONE = ("a table", lambda v: v is None or _is_table(v))
TABLES = ("a list of tables", lambda v: isinstance(v, list) and all(map(_is_table, v)))
CONFIG = {
    "seed": WHOLE,
    "event_shape": SHAPE,
    "context_shape": SHAPE,
    "classes": ("a count of at least 1", lambda v: _is_count(v) and 1 <= v < MOST_NUMBERS),
    "class_names": ("a list of names", lambda v: isinstance(v, list) and all(map(TEXT[1], v))),
    "class_rows": ("a list of counts", lambda v: isinstance(v, list) and all(map(_is_count, v))),
    "data": TABLE,
    "energy": NAMED,
    "method": NAMED,
    "trainer": ("a table with a precision", lambda v: _is_table(v, "precision")),
    "held_out": ("a share of at least 0 and below 1", lambda v: _is_number(v) and 0 <= v < 1),
    "coordinates": TABLE,
    "columns": (
        "a list of tables with names",
        lambda v: TABLES[1](v) and all(_is_table(c, "name") for c in v),
    ),
}
SUMMARY = {
    "status": TEXT,
    "steps": COUNT,
    "kept": ("a count", lambda v: v is None or _is_count(v)),
    "ended": TEXT,
    "seconds": NUMBER,
    "power": ("a number above 0", lambda v: _is_number(v) and v > 0),
    "scores": (f"a table in which {', '.join(COMPARED)} are numbers", _are_scores),
    "modes": ("a table with weights in data and samples", _are_modes),
    "contexts": TABLE_OR_NONE,
    "log_partition": ("a table with numbers", lambda v: v is None or _is_estimate(v)),
    "log_z_source": TEXT,
    "samples_source": TEXT,
    "engine": TABLE,
    "diagnosis": (
        "a list of tables with name, severity and text",
        lambda v: TABLES[1](v) and all(_is_table(found, "name", "severity", "text") for found in v),
    ),
}


def read_config(folder: Path) -> dict[str, Any]:
    """The resolved settings of a run."""
    check_seal(folder, "config.json")
    needed = ("seed", "event_shape", "data", "energy", "method", "trainer")
    config = read_table(path := folder / "config.json", CONFIG, needed)
    with reading(path):
        trainer_again(config)
    return config


def trainer_again(config: Mapping[str, Any]) -> TrainerConfig:
    """What a run's settings say of its trainer, as far as it matters after training."""
    said = config.get("trainer", {})
    return build(TrainerConfig, {name: said[name] for name in LASTING if name in said}, "trainer")


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run, empty where it has none yet."""
    path = folder / "summary.json"
    check_seal(folder, path.name)
    return read_table(path, SUMMARY) if path.exists() else {}


def read_history(folder: Path) -> list[Row]:
    """The metrics of a run."""
    path = folder / "metrics.jsonl"
    check_seal(folder, path.name)
    with reading(path):
        return read_jsonl(path) if path.exists() else []


def partial_of(path: Path) -> Path:
    """What is written before it takes this place: of this process alone, as others may write the same file."""
    return path.with_name(f"{path.name}.{os.getpid()}.partial")


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    partial = partial_of(path)
    partial.write_text(json.dumps(value, indent=2, default=plain) + "\n")
    partial.replace(path)


def write_array(path: Path, array: np.ndarray) -> None:
    """Write an `.npy` file whole or not at all."""
    partial = partial_of(path)
    with partial.open("wb") as file:
        np.save(file, array)
    partial.replace(path)


def write_arrays(path: Path, **arrays: Any) -> None:
    """Write an `.npz` file whole or not at all."""
    partial = partial_of(path)
    with partial.open("wb") as file:
        np.savez_compressed(file, **arrays)
    partial.replace(path)


def plain(value: Any) -> Any:
    """What JSON has no word for, in its words."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    return str(value)
