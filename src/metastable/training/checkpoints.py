"""Checkpoints that survive a killed run, a full disk and a damaged file.

A checkpoint is a folder `step-00000042` with three files:

- `weights.safetensors`: parameters and buffers of every player, named `player/parameter`;
- `state.safetensors`: the tensors of everything else (optimisers, walkers, random state);
- `manifest.json`: step, sha256 and size of both files, and the shape of the two trees.

Nothing in it is code: reading is safetensors and JSON. A folder appears under its final name only after all
of its bytes are on disk, so what has the name is whole or was damaged later, and damage is seen on reading.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from ..core.errors import CheckpointError, require, require_count
from .durable import sync_folder, write_file
from .packing import Tree, pack, unpack

Weights = dict[str, dict[str, Tensor]]

FORMAT = 1
WEIGHTS, STATE, MANIFEST = "weights.safetensors", "state.safetensors", "manifest.json"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What was saved at `step`: state dicts of the players by name, and the rest as a tree.

    `log` is the sha256 of the log of metrics up to then, where there was one.
    """

    step: int
    weights: Weights
    state: Tree
    path: Path
    log: str = ""


class CheckpointStore:
    """The checkpoints of one run: saved whole or not at all, the newest `keep` kept, damage refused by name.

    One process writes; any number may read.

    Args:
        folder: holds one folder per checkpoint; it is made at the first save.
        keep: how many of the newest checkpoints stay.
        run: identity of the run: checkpoints that say another one are refused.
        on_refused: told of each damaged checkpoint that `load` passes over; by default `warnings.warn`.

    Attributes:
        refused: one line for each checkpoint passed over so far.

    Example:
        >>> import tempfile
        >>> store = CheckpointStore(tempfile.mkdtemp(), keep=2)
        >>> path = store.save(42, {"energy": {"bias": torch.ones(1)}}, {"lr": 0.1})
        >>> path.name, store.load().weights["energy"]["bias"]
        ('step-00000042', tensor([1.]))
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int = 3,
        *,
        run: str = "",
        on_refused: Callable[[str], None] | None = None,
    ) -> None:
        require_count("keep", keep)
        self.folder = Path(folder)
        self.keep, self.run = keep, run
        self.refused: list[str] = []
        self._on_refused = on_refused or _warn
        self._damaged: set[int] = set()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, damaged ones included, in order."""
        found = (_step_of(path.name) for path in self.folder.glob("*step-*"))
        return sorted({step for step in found if step is not None})

    def latest_step(self) -> int | None:
        """The newest step that has a checkpoint, None where there is none."""
        return max(self.steps(), default=None)

    def save(
        self, step: int, weights: Mapping[str, Mapping[str, Tensor]], state: Tree, log: str = ""
    ) -> Path:
        """Write the checkpoint of `step`, then drop the ones beyond `keep`.

        Args:
            step: number of updates made.
            weights: state dict of each player by its name.
            state: everything else needed to go on, a tree that `pack` takes.
            log: sha256 of the log of metrics so far.

        Raises:
            CheckpointError: it could not be written, or the folder holds a good checkpoint of a later step
                (that is another course of training: see `rewind`). Earlier checkpoints are as they were.
        """
        require_count("step", step, least=0)
        self._refuse_later(step)
        facts = {name: value for name, value in (("run", self.run), ("log", log)) if value}
        files = _serialise(step, weights, state, facts)
        try:
            path = self._write(step, files)
        except OSError as error:
            raise CheckpointError(self._could_not_save(step, error)) from error
        self._damaged.discard(step)
        self._prune(step)
        return path

    @overload
    def load(self, step: int) -> Checkpoint: ...
    @overload
    def load(self, step: None = None) -> Checkpoint | None: ...
    def load(self, step: int | None = None) -> Checkpoint | None:
        """The checkpoint of `step`, or the newest good one; None where nothing was ever saved.

        Without `step`, a checkpoint that is truncated, altered or incomplete is added to `refused` and the
        one before it is tried.

        Raises:
            CheckpointError: the checkpoint of `step` is missing or damaged, or every checkpoint is damaged.
        """
        if step is not None:
            return _read(self._path(step), self.run) if step in self.steps() else self._no_such(step)
        steps = self.steps()
        for candidate in reversed(steps):
            try:
                return _read(self._path(candidate), self.run)
            except CheckpointError as error:
                self._refuse(candidate, str(error))
        if steps:
            lines = "\n  ".join(self.refused[-len(steps) :])
            raise CheckpointError(f"{self.folder}: none of {len(steps)} checkpoints is whole:\n  {lines}")
        return None

    def verify(self, path: str | Path) -> None:
        """Raise `CheckpointError`, naming checkpoint, file, and what was expected and found, unless whole."""
        _read_files(Path(path), self.run)

    def rewind(self, step: int) -> None:
        """Remove every checkpoint later than `step`, so that training can go on from there."""
        for later in self.steps():
            if later > step:
                self._remove(later)

    def _path(self, step: int) -> Path:
        """Where the checkpoint of `step` is: a save that was killed may have left it set aside."""
        final = self.folder / _name(step)
        aside = self.folder / _aside(step)
        return aside if aside.exists() and not final.exists() else final

    def _no_such(self, step: int) -> Checkpoint:
        have = ", ".join(map(str, self.steps())) or "none"
        raise CheckpointError(f"{self.folder}: no checkpoint of step {step}; steps saved: {have}")

    def _refuse(self, step: int, message: str) -> None:
        self._damaged.add(step)
        self.refused.append(message)
        self._on_refused(f"checkpoint refused: {message}")

    def _refuse_later(self, step: int) -> None:
        for later in self.steps():
            if later > step and self._whole(later):
                raise CheckpointError(
                    f"{self.folder}: cannot save step {step} beside the later {_name(later)}; resume from "
                    f"that, save to another folder, or call rewind({step}) to drop what is later"
                )

    def _whole(self, step: int) -> bool:
        try:
            self.verify(self._path(step))
        except CheckpointError:
            self._damaged.add(step)
            return False
        return True

    def _write(self, step: int, files: dict[str, bytes]) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clean()
        partial = self.folder / f".saving-{_name(step)}"
        try:
            partial.mkdir()
            for name, content in files.items():
                write_file(partial / name, content)
            sync_folder(partial)
            self._put_in_place(partial, step)
        finally:
            # Gone already after a rename; after any error nothing half-written may stay.
            shutil.rmtree(partial, ignore_errors=True)
        return self.folder / _name(step)

    def _put_in_place(self, partial: Path, step: int) -> None:
        """Rename `partial` to its final name; a checkpoint that has the name steps aside until then."""
        final, aside = self.folder / _name(step), self.folder / _aside(step)
        if final.exists():
            os.replace(final, aside)
        try:
            os.replace(partial, final)
        except BaseException:
            if aside.exists():
                os.replace(aside, final)
            raise
        sync_folder(self.folder)
        shutil.rmtree(aside, ignore_errors=True)

    def _clean(self) -> None:
        """Remove what a killed save left, and put back a checkpoint that it had set aside."""
        for partial in self.folder.glob(".saving-step-*"):
            shutil.rmtree(partial)
        for aside in self.folder.glob(".replaced-step-*"):
            final = self.folder / aside.name.removeprefix(".replaced-")
            if final.exists():
                shutil.rmtree(aside)
            else:
                os.replace(aside, final)

    def _prune(self, newest: int) -> None:
        """Remove what is older than the newest `keep` checkpoints up to `newest`.

        Those known to be damaged do not count, so that they never push out a good one.
        """
        steps = self.steps()
        good = [step for step in steps if step <= newest and step not in self._damaged]
        for step in steps:
            if step < good[-self.keep :][0]:
                self._remove(step)

    def _remove(self, step: int) -> None:
        """Under a name that no reader takes, so that a half-removed checkpoint is never seen."""
        doomed = self.folder / f".saving-{_name(step)}"
        shutil.rmtree(doomed, ignore_errors=True)
        try:
            os.replace(self._path(step), doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            self._on_refused(f"could not remove the old checkpoint {self.folder / _name(step)}: {error}")

    def _could_not_save(self, step: int, error: OSError) -> str:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = f"the disk is full ({error.strerror})" if full else str(error)
        good = next((_name(s) for s in reversed(self.steps()) if self._whole(s)), None)
        before = f"the previous checkpoint {good} is intact" if good else "there is no earlier checkpoint"
        advice = "; free some space and resume" if full else ""
        return f"{self.folder}: could not save {_name(step)}: {why}; {before}{advice}"


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _aside(step: int) -> str:
    return f".replaced-{_name(step)}"


def _step_of(name: str) -> int | None:
    found = re.fullmatch(r"(?:\.replaced-)?step-(\d{8,})", name)
    return int(found[1]) if found else None


def _serialise(
    step: int, weights: Mapping[str, Mapping[str, Tensor]], state: Tree, facts: dict[str, str]
) -> dict[str, bytes]:
    """Bytes of each file of a checkpoint, the manifest last."""
    for player, module in weights.items():
        require("/" not in player, "player name", "a name without '/'", player)
        odd = [key for key, value in module.items() if not isinstance(value, Tensor)]
        require(not odd, f"weights of {player}", "tensors only (put the rest in state)", odd)
    weight_tensors, weight_skeleton = pack(weights)
    state_tensors, state_skeleton = pack(state)
    files = {WEIGHTS: tensors_to_bytes(weight_tensors), STATE: tensors_to_bytes(state_tensors)}
    body = {
        "format": FORMAT,
        "step": step,
        **facts,
        "files": {name: {"sha256": _sha(data), "bytes": len(data)} for name, data in files.items()},
        "weights": weight_skeleton,
        "state": state_skeleton,
    }
    return {**files, MANIFEST: _seal(body)}


# The manifest vouches for the other files and this line vouches for the manifest: the sha256 of all bytes
# that follow it, at a fixed place, so that the file is checked before any of it is believed.
SEAL = b'{"seal": "'


def _seal(body: dict[str, Any]) -> bytes:
    rest = b'",\n' + json.dumps(body, allow_nan=False)[1:].encode() + b"\n"
    return SEAL + _sha(rest).encode() + rest


def _unseal(content: bytes) -> dict[str, Any] | None:
    """The body of a manifest, None when any byte of it changed."""
    start, stop = len(SEAL), len(SEAL) + 64
    if content[:start] != SEAL or content[start:stop] != _sha(content[stop:]).encode():
        return None
    return json.loads(content)


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read(path: Path, run: str = "") -> Checkpoint:
    manifest, files = _read_files(path, run)
    trees = [_read_tree(path, name, files[name], manifest[key]) for name, key in _TREES]
    return Checkpoint(manifest["step"], *trees, path=path, log=manifest.get("log", ""))


_TREES = ((WEIGHTS, "weights"), (STATE, "state"))


def _read_tree(path: Path, name: str, content: bytes, skeleton: Any) -> Tree:
    try:
        return unpack(tensors_from_bytes(content), skeleton)
    except (CheckpointError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error


def _read_files(path: Path, run: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Manifest and contents of a checkpoint, each byte checked; what is checked is what is used."""
    manifest = _read_manifest(path)
    if run and manifest.get("run", run) != run:
        raise CheckpointError(f"{path}: is of another run: it says {manifest['run']}, and this run is {run}")
    return manifest, {name: _read_checked(path, name, manifest["files"][name]) for name in (WEIGHTS, STATE)}


def _read_manifest(path: Path) -> dict[str, Any]:
    content = _read_bytes(path, MANIFEST)
    manifest = _unseal(content)
    if manifest is None:
        expected, found = content[len(SEAL) : len(SEAL) + 64], _sha(content[len(SEAL) + 64 :])
        readable = expected.decode("ascii", "replace") or "64 digits"
        raise CheckpointError(
            f"{path}: {MANIFEST} is truncated or altered: sha256 {found}, expected {readable}"
        )
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: {MANIFEST} has format {manifest['format']}, this version reads format {FORMAT}"
        )
    if manifest["step"] != _step_of(path.name):
        raise CheckpointError(
            f"{path}: holds step {manifest['step']}, which is not what the folder's name says"
        )
    return manifest


def _read_checked(path: Path, name: str, expected: dict[str, Any]) -> bytes:
    content = _read_bytes(path, name)
    if len(content) != expected["bytes"]:
        raise CheckpointError(f"{path}: {name} has {len(content)} bytes, expected {expected['bytes']}")
    if _sha(content) != expected["sha256"]:
        raise CheckpointError(f"{path}: {name} has sha256 {_sha(content)}, expected {expected['sha256']}")
    return content


def _read_bytes(path: Path, name: str) -> bytes:
    try:
        return (path / name).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {name} cannot be read: {error.strerror or error}") from error


def on_device(tree: Any, device: torch.device) -> Any:
    """A tree of tensors and plain values with every tensor on `device`."""
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {k: on_device(v, device) for k, v in tree.items()}
    return type(tree)(on_device(v, device) for v in tree) if isinstance(tree, (list, tuple)) else tree
