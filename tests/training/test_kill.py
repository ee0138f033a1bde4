"""A process killed at random moments and resumed each time ends where the undisturbed does.

python tests/training/test_kill.py --kills 1000     # the long one, in rounds of fifty
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

ROUND = 50
UPDATES = 3  # a killed process makes fewer, and half of all updates are left when the last was killed


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
    options = {"checkpoint_every": 3, "log_every": 2, "ema": 0.99, "batch_size": 64, "evaluate": False}
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


def bit_equal(kills: int, first: int, place: Path) -> bool:
    """Whether a training killed so many times, at moments that follow from `first`, ends as one that was not."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["metastable.api", "metastable.estimator", "lightning_fabric"])

    def ended(*args: object) -> int | None:
        process = context.Process(target=train, args=args)
        process.start()
        process.join()
        return process.exitcode

    whole, killed, steps = place / "whole", place / "killed", 2 * UPDATES * kills
    assert ended(str(whole), steps) == 0
    seeds = range(first, first + kills)
    assert [ended(str(killed), steps, seed) for seed in seeds] == [-signal.SIGKILL] * kills
    assert len(list((killed / "checkpoints").iterdir())) > 1  # some came after others had been killed
    assert ended(str(killed), steps) == 0
    return digest(killed, steps) == digest(whole, steps)


@pytest.mark.parametrize("kills", [50])
def test_kills_change_nothing(kills, tmp_path):
    assert bit_equal(kills, 0, tmp_path)


def main() -> int:
    """Rounds of fifty kills; status 1 where one did not end as it should."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="of the seeds that say when, one for each kill")
    given, equal = parser.parse_args(), []
    end = given.first + given.kills
    for first in range(given.first, end, ROUND):
        with tempfile.TemporaryDirectory() as place:
            equal.append(bit_equal(min(ROUND, end - first), first, Path(place)))
        made = min(first + ROUND, end) - given.first
        print(f"{made} kills, {sum(equal)} of {len(equal)} rounds bit-equal", flush=True)
    return int(not all(equal))


if __name__ == "__main__":
    sys.exit(main())
