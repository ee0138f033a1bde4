"""Which run files are of, and whether they are as they were written.

`seals.json` holds the run's identity and a sha256 of each file that a training or an evaluation left. An array that
changed since is refused. A changed text is named in a warning and read, as people move data and mend settings.
Folders without the file, from before there was one, are read as they are.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import InputError

SEALS = "seals.json"
TEXTS = (".json", ".jsonl")
TOLD_APART_BY = ("seed", "method", "energy", "held_out")


def identity(settings: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits of what makes a run the run it is: those settings that `resume` holds fast.

    A run that has them in its settings keeps them, whatever settings later releases add.

    >>> identity({"seed": 0, "data": {"sha256": "ab"}}) == identity({"seed": 1, "data": {"sha256": "ab"}})
    False
    """
    if isinstance(own := settings.get("run"), str):
        return own
    kept = {key: settings.get(key) for key in TOLD_APART_BY}
    data = settings.get("data")
    kept |= {"data": data.get("sha256") if isinstance(data, Mapping) else None}
    kept["units"] = settings.get("units", "none")
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def sealed(run: str, files: Mapping[str, str]) -> dict[str, Any]:
    """What `seals.json` holds: of which run, a sha256 of each file, and one of all this."""
    held = {"run": run, "files": dict(files)}
    return held | {"sha256": _own(held)}


def seal(folder: Path, run: str, names: Iterable[str]) -> dict[str, Any]:
    """What `seals.json` is to hold once these files, of which some may not be there, are written."""
    files = read_seals(folder).get("files", {})
    files |= {name: _sha(folder / name) for name in names if (folder / name).is_file()}
    return sealed(run, {name: sha for name, sha in files.items() if (folder / name).is_file()})


def read_seals(folder: Path) -> dict[str, Any]:
    """The seals of a folder; none where the file is missing or damaged, which is said."""
    path = folder / SEALS
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if (
            isinstance(found, dict)
            and isinstance(found.get("files"), dict)
            and found.pop("sha256", "") == _own(found)
        ):
            return found
    except (OSError, ValueError, RecursionError):
        pass
    warnings.warn(f"{path}: is damaged, so that no file of this run is checked", RuntimeWarning, stacklevel=3)
    return {}


def check_seal(folder: Path, name: str) -> None:
    """Refuse an array, or name a text, that is not as it was written."""
    expected, path = read_seals(folder).get("files", {}).get(name), folder / name
    if expected is None or not path.is_file() or (found := _sha(path)) == expected:
        return
    words = f"{path}: was altered since the run wrote it: sha256 {found}, expected {expected}"
    if path.suffix not in TEXTS:
        raise InputError(f"{words}; put back the file, or remove it")
    warnings.warn(words, RuntimeWarning, stacklevel=3)


def _own(seals: Mapping[str, Any]) -> str:
    """Of the seals themselves, so that a file is not called altered where its seal is."""
    return hashlib.sha256(json.dumps(seals, sort_keys=True).encode()).hexdigest()


def _sha(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
