"""A process killed at twenty random moments, and resumed each time, ends where the undisturbed one does."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import threading
from pathlib import Path

import torch

STEPS = 240
KILLS = 20


class Bomb:
    """Ends its own process from another thread, at a random moment after some updates or of starting up."""

    def __init__(self, seed: int):
        moments = random.Random(seed)
        self.updates, self.seconds = moments.randrange(STEPS // (2 * KILLS)), moments.uniform(0, 0.015)
        self.began: float | None = None
        if seed % 4 == 0:
            self.light(moments.uniform(0, 0.1))

    def light(self, seconds: float) -> None:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def __call__(self, row: dict[str, float]) -> None:
        self.began = row["step"] if self.began is None else self.began
        if row["step"] >= self.began + self.updates:
            self.light(self.seconds)


def train(folder: str, seed: int | None = None) -> None:
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
    fit(energy, data, method, STEPS, out=folder, resume=True, progress=progress, **options)


def digest(folder: Path) -> dict[str, str]:
    """Hashes of the final weights and the final state; the state holds wall-clock seconds, so that is redone."""
    from metastable.training.checkpoints import CheckpointStore, pack

    checkpoint = CheckpointStore(folder / "checkpoints").load(STEPS)
    state = {k: v for k, v in checkpoint.state.items() if k != "seconds"}
    tensors, skeleton = pack({"weights": checkpoint.weights, "state": state})
    hashes = {k: hashlib.sha256(v.contiguous().numpy().tobytes()).hexdigest() for k, v in tensors.items()}
    return {**hashes, "skeleton": str(skeleton)}


def test_twenty_kills_change_nothing(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["metastable.api", "metastable.estimator", "lightning_fabric"])

    def ended(*args: object) -> int | None:
        process = context.Process(target=train, args=args)
        process.start()
        process.join()
        return process.exitcode

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert ended(str(whole)) == 0
    assert [ended(str(killed), seed) for seed in range(KILLS)] == [-signal.SIGKILL] * KILLS
    assert len(list((killed / "checkpoints").iterdir())) > 1  # some came after others had been killed
    assert ended(str(killed)) == 0
    assert digest(killed) == digest(whole)
