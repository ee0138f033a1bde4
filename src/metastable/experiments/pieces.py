"""Trainings that are made one at a time, perhaps on machines that are gone in between, and gathered in the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metastable.core.errors import InputError
from metastable.runs.folder import write_json


@dataclass(frozen=True)
class Piece:
    """What is kept of one training: numbers, and arrays for pictures."""

    name: str
    numbers: dict[str, Any]
    arrays: dict[str, np.ndarray]


def refuse_other(path: Path, kept: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse what lies at `path` and was made with other settings than these."""
    for key, value in json.loads(json.dumps(dict(settings), default=str)).items():
        if kept.get(key) != value:
            raise InputError(
                f"out: {path} was made with {key} = {kept.get(key)!r}, now it is {value!r}; choose another folder"
            )


@dataclass(frozen=True)
class Pieces:
    """Finished trainings in a folder, two small files for each.

    Attributes:
        folder: where they lie.
        settings: what all of them must have been made with.
    """

    folder: Path
    settings: Mapping[str, Any]

    def names(self) -> list[str]:
        """Of all that are there."""
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def find(self, name: str) -> Piece | None:
        """A piece that was made before; one of other settings is refused."""
        path = self.folder / f"{name}.json"
        if not path.is_file():
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
        refuse_other(path, kept["settings"], self.settings)
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as stored:
            return Piece(name, kept["numbers"], {key: stored[key] for key in stored.files})

    def keep(self, name: str, numbers: dict[str, Any], arrays: dict[str, np.ndarray]) -> Piece:
        """Write a piece; its numbers come last, so that what is found is whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(self.folder / f"{name}.npz", **arrays)  # pyright: ignore
        write_json(self.folder / f"{name}.json", {"settings": dict(self.settings), "numbers": numbers})
        return Piece(name, numbers, arrays)
