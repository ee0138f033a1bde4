"""Trainings that are made one at a time, perhaps on machines that are gone in between, and gathered in the end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from metastable.core.errors import InputError, require_count
from metastable.runs.folder import plain, write_arrays, write_json


@dataclass(frozen=True)
class Piece:
    """What is kept of one training: numbers, and arrays for pictures."""

    name: str
    numbers: dict[str, Any]
    arrays: dict[str, np.ndarray]


def refuse_other(path: Path, kept: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse what lies at `path` and was made with other settings than these; what is empty may be new."""
    for key, value in json.loads(json.dumps(dict(settings), default=str)).items():
        if kept.get(key) != value and (key in kept or value not in (None, False, {}, [])):
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
        """A piece that was made before; one of other settings is refused, and one that is damaged."""
        path = self.folder / f"{name}.json"
        if not path.is_file():
            return None
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            numbers, settings = kept["numbers"], kept["settings"]
            content = path.with_suffix(".npz").read_bytes()
            if kept.get("sha256") not in (None, sha_of(numbers, content)):  # None: from before there was one
                raise ValueError("it is not as it was written")
            with np.load(BytesIO(content), allow_pickle=False) as stored:
                piece = Piece(name, numbers, {key: stored[key] for key in stored.files})
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, BadZipFile) as error:
            raise InputError(f"out: {path} or its arrays are damaged ({error}); remove it") from error
        refuse_other(path, settings, self.settings)
        return piece

    def keep(self, name: str, numbers: dict[str, Any], arrays: dict[str, np.ndarray]) -> Piece:
        """Write a piece; its numbers come last, so that what is found is whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}.json"
        arrays_path = path.with_suffix(".npz")
        write_arrays(arrays_path, **arrays)
        kept = json.loads(json.dumps({"settings": dict(self.settings), "numbers": numbers}, default=plain))
        write_json(path, kept | {"sha256": sha_of(kept["numbers"], arrays_path.read_bytes())})
        return Piece(name, numbers, arrays)

    def blocks(
        self,
        name: str,
        n: int,
        size: int,
        make: Callable[[range], dict[str, np.ndarray]],
        axis: int = 0,
        counts: Sequence[str] = (),
    ) -> dict[str, np.ndarray]:
        """Arrays of n things, made `size` at a time and joined along `axis`; each block is kept when it is made.

        A command that was stopped goes on with the next block, so that `make` must depend on its range alone.
        `finish` removes them, once the piece of this name is kept. Blocks of another size serve, too. Settings
        named in `counts` say how many things there are: blocks of fewer or of more are the same ones.
        """
        require_count("block", size)
        settings = {key: value for key, value in self.settings.items() if key not in counts}
        own, made, stop = Pieces(self.folder / name, settings), [], 0
        while (first := stop) < n:
            kept = (int(path.stem.partition("-")[2]) for path in own.folder.glob(f"{first}-*.json"))
            stop = max((end for end in kept if end <= n), default=min(first + size, n))
            at = f"{first}-{stop}"
            made.append((own.find(at) or own.keep(at, {}, make(range(first, stop)))).arrays)
        return {key: np.concatenate([each[key] for each in made], axis) for key in made[0]}

    def finish(
        self, name: str, numbers: dict[str, Any], arrays: dict[str, np.ndarray], parts: Iterable[str] = ()
    ) -> Piece:
        """Write a piece, and remove the blocks that it was made of: those of its name, and of `parts` below it."""
        piece, folder = self.keep(name, numbers, arrays), self.folder / name
        for at in (*(folder / part for part in parts), folder):
            for path in (*at.glob("*.json"), *at.glob("*.npz")):
                path.unlink()
            if at.is_dir() and not any(at.iterdir()):
                at.rmdir()
        return piece


def sha_of(numbers: Any, content: bytes) -> str:
    """Of numbers as JSON gives them back, and of the file of arrays."""
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode() + content).hexdigest()
