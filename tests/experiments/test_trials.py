"""Trials: who is trained with what, what is seen of it, and what happens where the guard stops a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metastable.core.errors import DivergenceError
from metastable.core.random import derive
from metastable.experiments import trials as room
from metastable.experiments.base import Bench
from metastable.experiments.trials import Arm, Curves, Problem, Trial, Trials, by_scale, draw_curves, last
from metastable.methods import PersistentCD
from metastable.report.figures import new_figure

BENCH = Bench({}, "tiny", 5, "cpu", Path())


class Counter:
    """A model that counts its updates."""

    def __init__(self, start: int):
        self.value = start


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, Any]]:
    """A fit that adds one to the model in each update, and is stopped where `stop` says; its calls."""
    made: list[dict[str, Any]] = []

    def fit(model, data, method, steps, *, progress, stop=None, **settings):
        made.append({"method": method, "data": data, "steps": steps, **settings})
        for step in range(1, steps + 1):
            if step == stop:
                raise DivergenceError("energies explode", step=step)
            model.value += 1
            progress({"step": step, "loss": 10.0 * step})
        return "the run"

    monkeypatch.setattr(room, "fit", fit)
    return made


def trials(*arms: Arm, **fields: Any) -> Trials:
    problem = lambda arm, seed: Problem(Counter(arm.about), [seed], truth=100)  # noqa: E731
    watch = lambda at, line: {"left": at.truth - at.model.value}  # noqa: E731
    return Trials(arms, problem, {"steps": 2, "batch_size": 7}, watch=watch, **fields)


SLOW = Arm("slow", PersistentCD(walkers=4), about=0)
LONG = Arm("long", PersistentCD(walkers=8), {"steps": 3}, about=50)


def test_every_arm_is_trained_on_every_repeat_with_its_own_settings(calls):
    found = trials(SLOW, LONG, repeats=2, keep=lambda trial, at, run: (trial.arm.name, run)).run(BENCH)
    assert [(c["method"], c["steps"], c["batch_size"]) for c in calls] == [
        (SLOW.method, 2, 7),
        (LONG.method, 3, 7),
    ] * 2
    seeds = [derive(5, "repeat", r) % 2**31 for r in range(2)]
    assert [c["data"] for c in calls] == [[s] for s in seeds for _ in range(2)]
    assert [t.seed for t in found["long"]] == seeds
    assert [t.kept for t in found["slow"]] == [("slow", "the run")] * 2
    assert all(c["units"] == "none" and c["evaluate"] is False and c["device"] == "cpu" for c in calls)


def test_curves_hold_what_was_logged_and_what_was_watched(calls):
    (trial,) = trials(LONG).run(BENCH)["long"]
    assert trial.curves["step"].tolist() == [1, 2, 3]
    assert trial.curves["loss"].tolist() == [10, 20, 30]
    assert trial.curves["left"].tolist() == [49, 48, 47]
    assert last([trial], "left").tolist() == [47]


def test_watching_from_the_start_sees_the_model_before_its_first_update(calls):
    (trial,) = trials(SLOW, from_start=True).run(BENCH)["slow"]
    assert trial.curves["step"].tolist() == [0, 1, 2]
    assert trial.curves["left"].tolist() == [100, 99, 98]
    assert np.isnan(trial.curves["loss"][0])


def test_a_stop_is_an_outcome_only_where_the_experiment_says_so(calls):
    stopped = Arm("stopped", PersistentCD(), {"stop": 2}, about=0)
    (trial,) = trials(stopped, may_stop=True, keep=lambda *_: 1).run(BENCH)["stopped"]
    assert (trial.stopped, trial.kept, len(trial.curves)) == (2, None, 1)
    with pytest.raises(DivergenceError):
        trials(stopped).run(BENCH)


def test_a_table_of_scales_must_be_complete():
    assert by_scale({"a": 1}, b=(2, 3, 4))["gpu"] == {"a": 1, "b": 4}
    with pytest.raises(ValueError):
        by_scale(a=(1, 2), b=(1, 2, 3))


def test_a_figure_names_the_first_line_and_marks_a_stop():
    curves = Curves([{"step": 1, "v": 2.0}, {"step": 2, "v": 8.0}])
    axes = new_figure().subplots()
    draw_curves(axes, [Trial(SLOW, 0, curves), Trial(SLOW, 1, curves, stopped=3)], "v", "black", "slow")
    first, second, cross = axes.get_lines()
    assert (first.get_label(), second.get_label().startswith("_")) == ("slow", True)
    assert (cross.get_marker(), cross.get_xydata().tolist()) == ("x", [[2.0, 8.0]])
