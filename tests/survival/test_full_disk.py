"""A disk that is full at any moment costs no checkpoint, and training goes on when there is space again."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz import quick
from test_one_writer import DATA, ENERGY, METHOD

import metastable as ms
from metastable.cli.guard import explain
from metastable.training.checkpoints import CheckpointStore

POINTS = 20
STEPS = 6


class Disk:
    """Files below a folder, of which only so many bytes can be written; what still fits is."""

    def __init__(self, folder: Path, room: float, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.room, self.written = folder, room, 0
        opened = Path.open

        def open_(path: Path, mode: str = "r", *args: Any, **named: Any) -> Any:
            file = opened(path, mode, *args, **named)
            here = folder in path.parents and set(mode) & set("wax+")
            return Limited(file, self) if here else file

        monkeypatch.setattr(Path, "open", open_)


class Limited:
    """A file on such a disk."""

    def __init__(self, file: Any, disk: Disk):
        self.file, self.disk = file, disk

    def write(self, content: Any) -> int:
        size, left = len(content), self.disk.room - self.disk.written
        if size > left:
            self.file.write(content[: max(0, int(left))])
            self.disk.written = self.disk.room
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.disk.written += size
        return self.file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Limited:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


def train(folder: Path, judged: bool) -> ms.Run:
    options = {"batch_size": 16, "log_every": 1, "checkpoint_every": 2, "learning_rate": 1e-3, "keep": 10}
    return ms.fit(ENERGY, DATA, METHOD, STEPS, out=folder, resume=True, evaluate=judged, **options)


def logged(run: ms.Run) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in run.history]


@pytest.mark.parametrize("judged", [False, True])
def test_a_full_disk_at_any_moment_loses_no_checkpoint(judged, tmp_path):
    moments, stopped = random.Random(int(judged)), 0
    with quick():
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(tmp_path, float("inf"), patch)
            whole = train(tmp_path / "whole", judged)
        for i in range(POINTS // 5 if judged else POINTS):
            folder = tmp_path / str(i)
            with pytest.MonkeyPatch.context() as patch:
                Disk(tmp_path, moments.randrange(disk.written), patch)
                with pytest.raises((OSError, RuntimeError)) as caught:
                    train(folder, judged)
            message, status = explain(caught.value) or ("", 0)
            assert status == 2
            assert "No space left" in message
            store = CheckpointStore(folder / "checkpoints")
            for step in store.steps():
                store.verify(store.folder / f"step-{step:08d}")
            stopped += bool(store.steps())
            again = train(folder, judged)
            assert logged(again) == logged(whole)
            pairs = zip(again.energy.parameters(), whole.energy.parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
            assert again.scores.keys() == whole.scores.keys()
    assert stopped > 2  # some came late enough to have saved something
