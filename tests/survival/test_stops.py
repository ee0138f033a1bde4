"""SIGTERM leaves a checkpoint, the clock asks for some, and neither changes a number."""

from __future__ import annotations

import importlib
import os
import signal

import pytest
import torch
from test_one_writer import DATA, ENERGY, METHOD

import metastable as ms
from metastable.core.errors import DivergenceError
from metastable.experiments.base import Experiment, reproduce
from metastable.training.checkpoints import CheckpointStore

SETTINGS = {"steps": 12, "batch_size": 16, "log_every": 5, "evaluate": False, "learning_rate": 1e-3}


def train(folder, **settings):
    return ms.fit(ENERGY, DATA, METHOD, out=folder, **SETTINGS | settings)


def same(a, b) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.energy.parameters(), b.energy.parameters(), strict=True))


def without_time(run):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in run.history]


def test_checkpoints_by_the_clock_change_no_number(tmp_path):
    plain = train(tmp_path / "plain", checkpoint_seconds=None)
    often = train(tmp_path / "often", checkpoint_seconds=1e-9, keep=20)
    assert CheckpointStore(tmp_path / "plain" / "checkpoints").steps() == [0, 12]
    assert CheckpointStore(tmp_path / "often" / "checkpoints").steps() == list(range(13))
    assert same(plain, often)
    assert without_time(plain) == without_time(often)


def test_a_run_goes_on_from_a_checkpoint_of_the_clock_as_if_nothing_had_been(tmp_path):
    def die(row):
        if row["step"] == 10:
            raise KeyboardInterrupt

    whole = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", checkpoint_seconds=1e-9, progress=die)
    assert CheckpointStore(tmp_path / "killed" / "checkpoints").latest_step() == 9  # within a line of the log
    resumed = train(tmp_path / "killed", resume=True)
    assert same(whole, resumed)
    assert without_time(whole) == without_time(resumed)


def test_the_clock_saves_nothing_that_diverged_or_could_be_rolled_back_to(tmp_path):
    wild = {"learning_rate": 1e6, "checkpoint_seconds": 1e-9, "log_every": 12, "energy_limit": 1e-3}
    with pytest.raises(DivergenceError):
        train(tmp_path / "wild", **wild)
    assert CheckpointStore(tmp_path / "wild" / "checkpoints").steps() == [0]
    train(tmp_path / "careful", checkpoint_seconds=1e-9, on_divergence="rollback")
    assert CheckpointStore(tmp_path / "careful" / "checkpoints").steps() == [0, 12]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint_and_its_handler(number, tmp_path):
    def send(row):
        if row["step"] == 5:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    stopped = train(tmp_path / "run", progress=send)
    assert signal.getsignal(number) is before
    assert stopped.status == "interrupted"
    assert CheckpointStore(tmp_path / "run" / "checkpoints").latest_step() == stopped.history[-1]["step"] < 12
    assert same(train(tmp_path / "run", resume=True), train(tmp_path / "whole"))


def test_sigterm_ends_without_judging(tmp_path, monkeypatch):
    def send(row):
        if row["step"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    def never(*_):
        raise AssertionError("a section was measured")

    monkeypatch.setattr(importlib.import_module("metastable.summary.judge"), "_measured", never)
    stopped = train(tmp_path / "run", progress=send, evaluate=True)
    assert "metastable evaluate" in stopped.ended
    assert ms.load_run(tmp_path / "run").status == "interrupted"
    monkeypatch.undo()
    again = train(tmp_path / "run", resume=True, evaluate=True)
    assert again.status == "finished"
    assert "log_likelihood" in again.scores


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_experiment_and_not_only_the_training_that_it_meets(tmp_path, number):
    trained = []

    def body(bench):
        for name in ("first", "second"):
            trained.append(name)
            train(bench.folder / name, progress=lambda row: row["step"] == 5 and os.kill(os.getpid(), number))
        return []

    own = Experiment("own", "An experiment", "nobody", {"smoke": {}}, body)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        reproduce(own, "smoke", 0, tmp_path, device="cpu")
    assert signal.getsignal(number) is before
    assert trained == ["first"]
    assert not (tmp_path / "result.json").exists()
    assert CheckpointStore(tmp_path / "first" / "checkpoints").latest_step() == 5
    assert train(tmp_path / "again").status == "finished"  # outside, a training ends by itself
