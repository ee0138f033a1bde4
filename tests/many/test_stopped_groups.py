"""Groups of which one process is killed or told to stop go on as if nothing had been; and real launchers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from group import on
from test_processes import digest, two_modes

import metastable as ms
from metastable.core import processes
from metastable.energies import MLP, Tilted
from metastable.proposals import fit_gaussian
from metastable.training import agreement
from metastable.training.checkpoints import CheckpointStore

STEPS = 12


class Called(Tilted):
    """An energy in whose `at`-th call the process `who` sends itself a signal."""

    def __init__(self, *parts: Any, who: int, at: int, number: int):
        super().__init__(*parts)
        self.who, self.left, self.number = who, at, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0 and processes.rank() == self.who:
            os.kill(os.getpid(), self.number)
        return super().forward(x)


def trained(folder: str, who: int = -1, number: int = 0, **more: Any) -> tuple[str, list[int]]:
    """A training in which somebody may get a signal: its status, and the updates in its log."""
    agreement.EVERY = 0.0  # they agree in every update
    x = two_modes(120)
    energy = Called(fit_gaussian(x), MLP(1, hidden=(8,)), who=who, at=60, number=number)
    method = ms.methods.Jarzynski(walkers=62, populations=4, threshold=1.0, batch=10)
    options = {"batch_size": 30, "log_every": 3, "checkpoint_every": 100, "evaluate": False, **more}
    run = ms.fit(energy, x, method, STEPS, out=folder, learning_rate=0.01, **options)
    return run.status, [row["step"] for row in run.history]


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_killed_costs_nothing_that_the_clock_has_saved(tmp_path, who):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    on(2, trained, str(whole))
    every = on(2, trained, str(killed), who, signal.SIGKILL, checkpoint_seconds=1e-9)
    assert every[who] is None
    assert every[1 - who].startswith(f"ProcessError: process {who} ended")
    assert CheckpointStore(whole / "checkpoints").steps() == [0, STEPS]
    assert 0 < CheckpointStore(killed / "checkpoints").latest_step() < STEPS
    assert on(2, trained, str(killed), resume=True) == [("finished", [3, 6, 9, 12])] * 2
    assert digest(killed, STEPS) == digest(whole, STEPS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_stops_all_at_one_update_with_a_checkpoint(tmp_path, number):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    on(2, trained, str(whole))
    first, second = on(2, trained, str(stopped), 1, number)
    assert first == second
    assert first[0] == "interrupted"
    assert 0 < CheckpointStore(stopped / "checkpoints").latest_step() == first[1][-1] < STEPS
    on(2, trained, str(stopped), resume=True)
    assert digest(stopped, STEPS) == digest(whole, STEPS)


# ---- launchers


def ended(words: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=place, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_torchrun_trains_and_one_process_goes_on(tmp_path):
    small = ["energy.hidden=[4]", "method.walkers=64", "trainer.batch_size=16", "trainer.checkpoint_every=2"]
    train = ["-m", "metastable", "train", "--out", "run", "--no-progress"]
    new = ["--data", "toy:two-modes?n=60", "--steps", "4", *(w for s in small for w in ("--set", s))]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = ended([*torchrun, *train, *new], tmp_path)
    assert done.returncode == 0, done.stderr
    assert CheckpointStore(tmp_path / "run" / "checkpoints").latest_step() == 4
    done = ended([sys.executable, *train, "--resume", "--steps", "6"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert CheckpointStore(tmp_path / "run" / "checkpoints").latest_step() == 6


FABRIC = """
import json, torch, metastable as ms
from lightning_fabric import Fabric
from metastable.core import processes

def work(fabric):
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    method = ms.methods.Jarzynski(walkers=64)
    run = ms.fit(None, x, method, 3, batch_size=16, evaluate=False, out="run", device="cpu")
    told = [processes.count(), len(run.walkers), sum(float(p.sum()) for p in run.energy.parameters())]
    open(f"{processes.rank()}.json", "w").write(json.dumps(told))

if __name__ == "__main__":
    Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn").launch(work)
"""


@pytest.mark.slow
def test_a_program_that_fabric_launches_trains_one_model(tmp_path):
    (tmp_path / "own.py").write_text(FABRIC)
    done = ended([sys.executable, "own.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first[:2] == [2, 64]
