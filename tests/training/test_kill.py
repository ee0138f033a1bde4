"""A process killed at eight random moments (slow: twenty) and resumed each time ends where the undisturbed does."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch

UPDATES = 6  # a killed process makes fewer, and half of all updates are left when the last was killed


class Bomb:
    """Ends its own process from another thread, at a random moment after some updates or of starting up."""

    def __init__(self, seed: int):
        moments = random.Random(seed)
        self.updates, self.seconds = moments.randrange(UPDATES), moments.uniform(0, 0.015)
        self.began: float | None = None
        if seed % 4 == 0:
            self.light(moments.uniform(0, 0.1))

    def light(self, seconds: float) -> None:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def __call__(self, row: dict[str, float]) -> None:
        self.began = row["step"] if self.began is None else self.began
        if row["step"] >= self.began + self.updates:
            self.light(self.seconds)


def train(folder: str, steps: int, seed: int | None = None) -> None:
    """The same training always; with a `seed` it does not survive."""
    torch.set_num_threads(1)
    from metastable.api import fit
    from metastable.energies import MLP, Tilted
    from metastable.methods import Jarzynski
    from metastable.proposals import fit_gaussian

    data = torch.randn((300, 2), generator=torch.Generator().manual_seed(0))
    energy = Tilted(fit_gaussian(data), MLP(2, hidden=(16,)))
    method = Jarzynski(walkers=64, populations=4, batch=32)
    options = {"checkpoint_every": 5, "log_every": 3, "ema": 0.99, "batch_size": 64, "evaluate": False}
    progress = None if seed is None else Bomb(seed)
    fit(energy, data, method, steps, out=folder, resume=True, progress=progress, **options)


def digest(folder: Path, steps: int) -> dict[str, str]:
    """Hashes of the final weights and the final state; the state holds wall-clock seconds, so that is redone."""
    from metastable.training.checkpoints import CheckpointStore, pack

    checkpoint = CheckpointStore(folder / "checkpoints").load(steps)
    state = {k: v for k, v in checkpoint.state.items() if k != "seconds"}
    tensors, skeleton = pack({"weights": checkpoint.weights, "state": state})
    hashes = {k: hashlib.sha256(v.contiguous().numpy().tobytes()).hexdigest() for k, v in tensors.items()}
    return {**hashes, "skeleton": str(skeleton)}


@pytest.mark.parametrize("kills", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_change_nothing(kills, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["metastable.api", "metastable.estimator", "lightning_fabric"])

    def ended(*args: object) -> int | None:
        process = context.Process(target=train, args=args)
        process.start()
        process.join()
        return process.exitcode

    whole, killed, steps = tmp_path / "whole", tmp_path / "killed", 2 * UPDATES * kills
    assert ended(str(whole), steps) == 0
    assert [ended(str(killed), steps, seed) for seed in range(kills)] == [-signal.SIGKILL] * kills
    assert len(list((killed / "checkpoints").iterdir())) > 1  # some came after others had been killed
    assert ended(str(killed), steps) == 0
    assert digest(killed, steps) == digest(whole, steps)
