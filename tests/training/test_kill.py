"""A process killed at twenty random moments, and resumed each time, ends where the undisturbed one does."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import torch

STEPS = 1200
KILLS = 20


def train(folder: str) -> None:
    torch.set_num_threads(1)
    from metastable.api import fit
    from metastable.energies import MLP, Tilted
    from metastable.methods import Jarzynski
    from metastable.proposals import fit_gaussian

    data = torch.randn((300, 2), generator=torch.Generator().manual_seed(0))
    energy = Tilted(fit_gaussian(data), MLP(2, hidden=(16,)))
    method = Jarzynski(walkers=256, populations=4, batch=64)
    options = {"checkpoint_every": 20, "log_every": 7, "ema": 0.99, "batch_size": 64, "evaluate": False}
    fit(energy, data, method, STEPS, out=folder, resume=True, **options)


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
    context.set_forkserver_preload(["metastable.api", "metastable.estimator"])
    undisturbed = context.Process(target=train, args=(str(tmp_path / "whole"),))
    undisturbed.start()
    began = time.monotonic()
    undisturbed.join()
    whole = time.monotonic() - began
    assert undisturbed.exitcode == 0
    moments = random.Random(0)
    folder = tmp_path / "killed"
    kills = 0
    while kills < KILLS:
        process = context.Process(target=train, args=(str(folder),))
        process.start()
        process.join(moments.uniform(0.02, 1.5) * whole / KILLS + 0.2)
        if process.exitcode is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
    last = context.Process(target=train, args=(str(folder),))
    last.start()
    last.join()
    assert last.exitcode == 0
    assert kills >= KILLS, f"the run ended after {kills} kills; make it longer"
    assert digest(folder) == digest(tmp_path / "whole")
