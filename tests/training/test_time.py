"""Schedules that follow the clock, and those of single players."""

from __future__ import annotations

import math
import shutil

import pytest
import torch

import metastable as ms
from metastable.core.errors import ConfigError
from metastable.data import load_array
from metastable.runs.plan import make_plan, trainer_of
from metastable.training import engine as engine_module
from metastable.training import trainer as trainer_module
from metastable.training.config import SGD, Schedule, TrainerConfig

DATA = torch.randn((60, 2), generator=torch.Generator().manual_seed(0))


class Clock:
    """A clock that goes on by one second each time it is looked at after an update, as `perf_counter`."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.5
        return self.now


def test_a_share_of_time_is_where_the_cosine_is():
    schedule = Schedule("cosine", warmup=10, final=0.1)
    for done in (0.2, 0.5, 0.9, 1.0):
        t = (1000 * done - 10) / 990
        expected = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * t))
        assert schedule.factor(40, 1000, done) == pytest.approx(expected)
    assert schedule.factor(4, 1000, 0.9) == 0.5  # a warm-up counts updates
    assert schedule.factor(12, 1000, 0.001) == 1.0  # of which a fast machine has made many
    assert Schedule("step", drops=(600,), drop=0.5).factor(3, 1000, 0.7) == 0.5
    same = [schedule.factor(k, 50) for k in range(50)]
    assert [schedule.factor(k, 50, k / 50) for k in range(50)] == pytest.approx(same)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_what_updates_need_is_imported_when_they_begin_and_before_time_counts(precision, monkeypatch):
    made, fabric, clock = [], engine_module._fabric_class, Clock()

    def slow() -> type:
        clock.now += 1000
        made.append("fabric")
        return fabric()

    monkeypatch.setattr(engine_module, "_fabric_class", slow)
    monkeypatch.setattr(trainer_module, "time", clock)
    config = TrainerConfig(steps=3, precision=precision)
    plan = make_plan("mlp", load_array(DATA), ms.methods.PersistentCD(walkers=8), config)
    training = trainer_of(plan)
    assert plan.engine.device == torch.device("cpu")
    assert not made
    assert training.run().seconds < 1000
    assert made == ["fabric"]


def test_noise_and_share_follow_what_is_spent_more():
    config = TrainerConfig(
        steps=100,
        max_seconds=10.0,
        follows="seconds",
        data_noise=1.0,
        data_noise_final=0.0,
        data_noise_over=0.5,
    )
    assert config.done(30, 2.0) == 0.3
    assert config.done(10, 4.0) == 0.4
    assert config.done(10, 40.0) == 1.0
    assert config.noise_at(10, 2.0) == pytest.approx(0.6)
    assert config.noise_at(40, 2.0) == pytest.approx(0.2)
    assert (
        TrainerConfig(steps=100, max_seconds=10.0).done(10, 9.0) == 0.1
    )  # by default the clock says nothing


def rates(engine: str, monkeypatch, **options) -> list[tuple[float, float]]:
    """Learning rates of a training whose clock ticks with its updates."""
    clock, seen = Clock(), []
    monkeypatch.setattr(trainer_module.time, "perf_counter", clock.perf_counter)
    settings = {"optimiser": SGD(1.0), "schedule": Schedule("linear"), "log_every": 1, "evaluate": False}
    settings |= {"max_seconds": 8.0, "checkpoint_seconds": None, "engine": engine, "follows": "seconds"}
    ms.fit("mlp", DATA, "cd", 1000, progress=lambda row: seen.append(row), **(settings | options))
    assert 8.0 <= seen[-1]["seconds"] <= 9.0
    return [(row["seconds"], row["learning_rate"]) for row in seen]


@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_a_training_by_the_clock_ends_at_the_end_of_its_schedule(engine, monkeypatch):
    found = rates(engine, monkeypatch)
    for seconds, rate in found:
        assert rate == pytest.approx(1 - (seconds - 0.5) / 8, abs=1e-9)  # told before the clock was looked at
    assert len(found) < 20


def test_a_resumed_training_goes_on_where_the_clock_was(monkeypatch, tmp_path):
    out = {"out": tmp_path / "run", "checkpoint_every": 1, "keep": 100}
    first = rates("eager", monkeypatch, **out)
    for step in range(5, len(first) + 1):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    second = rates("eager", monkeypatch, **out, resume=True)
    spent, rate = second[0]
    assert first[3][0] < spent < first[6][0]
    assert first[6][1] < rate < first[2][1]


def test_a_piece_of_a_longer_training_stops_in_the_midst_of_its_schedule(monkeypatch):
    for seconds, rate in rates("eager", monkeypatch, follows_seconds=16.0):
        assert rate == pytest.approx(1 - (seconds - 0.5) / 16, abs=1e-9)
    with pytest.raises(
        ConfigError, match=r"trainer\.follows_seconds: must be None unless follows is 'seconds'"
    ):
        TrainerConfig(max_seconds=8.0, follows_seconds=16.0)
    with pytest.raises(ConfigError, match=r"trainer\.follows_seconds: must be"):
        TrainerConfig(max_seconds=8.0, follows="seconds", follows_seconds=0.0)


def test_players_may_have_schedules_of_their_own():
    flow = {"name": "interpolant", "width": 4, "layers": 2, "steps": 2, "scored": 2}
    method = {"name": "ranking-nce", "negatives_per_datum": 2, "proposal": flow}
    seen = {}

    def kept(name):
        def made(optimiser):
            seen[name] = optimiser
            return Schedule("linear").build(optimiser, 4)

        return made

    options = {"optimiser": SGD(1e-3), "schedule": kept("others"), "evaluate": False}
    ms.fit("mlp", DATA, method, 3, schedules={"proposal": Schedule("constant")}, **options)
    assert seen["others"].param_groups[0]["lr"] == pytest.approx(1e-3 / 4)
    with pytest.raises(ConfigError, match=r"trainer\.schedules\.prosal: is no player of this run"):
        ms.fit("mlp", DATA, method, 3, schedules={"prosal": Schedule()}, **options)
    with pytest.raises(ConfigError, match=r"trainer\.follows: must be 'steps' without max_seconds"):
        TrainerConfig(follows="seconds")
