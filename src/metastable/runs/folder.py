"""The folder of a run: what is in it, and how it is opened, read and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from metastable._version import __version__
from metastable.core.errors import InputError, refuse_newer
from metastable.training.records import Row, read_jsonl


def open_folder(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    """Make the run folder, or check that it is the run that is being resumed."""
    config = folder / "config.json"
    if config.exists():
        if not resume:
            raise InputError(f"out: {folder} already holds a run; give --resume to go on, or another folder")
        before = read_config(folder)
        for key in ("seed", "data", "method", "energy", "held_out", "units"):
            then = before.get(key, "none" if key == "units" else None)
            # rows are told by what they are, wherever they come from
            same = key == "data" and then is not None and then.get("sha256") == settings["data"]["sha256"]
            if not same and not _alike(then, settings[key]):
                raise InputError(
                    f"resume: {key} differs from the run in {folder}: it was {before.get(key)!r}, "
                    f"now {settings[key]!r}"
                )
    elif folder.exists() and any(folder.iterdir()):
        raise InputError(f"out: {folder} is not empty and not a run; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(config, settings)


def _alike(then: Any, now: Any) -> bool:
    """Whether settings are the same; one that there was not yet, and that is off, says nothing new."""
    if isinstance(then, dict) and isinstance(now, dict):
        return then.keys() <= now.keys() and all(
            _alike(then[k], v) if k in then else not v for k, v in now.items()
        )
    if isinstance(then, list) and isinstance(now, list):
        return len(then) == len(now) and all(map(_alike, then, now))
    return then == now


def require_run_folder(folder: str | Path) -> Path:
    """The folder, if it is a run."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"run: no such folder: {folder}")
    if not (folder / "config.json").is_file() or not (folder / "checkpoints").is_dir():
        raise InputError(
            f"run: {folder} is not a run (it should hold config.json, metrics.jsonl and checkpoints/)"
        )
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """The resolved settings of a run."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"{folder / 'config.json'}: is not valid JSON: {error}") from error
    refuse_newer(folder / "config.json", config.get("version"), __version__)
    return config


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run, empty where it has none yet."""
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def read_history(folder: Path) -> list[Row]:
    """The metrics of a run."""
    path = folder / "metrics.jsonl"
    return read_jsonl(path) if path.is_file() else []


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(json.dumps(value, indent=2, default=_plain) + "\n")
    partial.replace(path)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    return str(value)
