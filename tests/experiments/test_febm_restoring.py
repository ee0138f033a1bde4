"""Arms, tasks and rows of `febm-restoring`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from metastable.energies.build import MLPConfig
from metastable.experiments import febm_restoring as room
from metastable.experiments.base import Bench, changed
from metastable.experiments.finished import Finished
from metastable.experiments.three_digits import digits
from metastable.experiments.trials import Arm, Trial
from metastable.methods import FDivergence, PersistentCD

TINY = {"steps": 2, "walkers": 16, "batch": 8, "restored": 4, "restore_steps": 2, "draws": 2, "log_every": 1}


def bench(folder, **changes) -> Bench:
    energy = MLPConfig(hidden=(4,), reference="gaussian")
    settings = changed({**room.EXPERIMENT.scales["smoke"], **TINY, "energy": energy}, changes)
    return Bench(settings, "smoke", 0, "cpu", folder)


def test_both_tasks_are_made_of_digits_that_were_not_seen(tmp_path):
    rows = {row.metric: row.value for row in room.body(bench(tmp_path, arms="js", required=()))}
    shares = ("over_start", "over_class_mean")
    assert rows.keys() == {f"{what}/{task}/js" for what in shares for task in room.TASKS}
    assert all(value > 0 for value in rows.values())
    assert all((tmp_path / f"{task}.png").stat().st_size > 1000 for task in room.TASKS)


def test_trials_are_kept_and_taken_again(tmp_path):
    def rows() -> tuple[list[str], list[str]]:
        said: list[str] = []
        own = bench(tmp_path, arms="js", required=())
        finished = Finished(tmp_path / "trials", say=said.append)
        return [str(row) for row in room.body(replace(own, say=said.append, finished=finished))], said

    (made, new), (taken, old) = rows(), rows()
    assert made == taken
    assert [line.endswith("(made before)") for line in new + old] == [False, True]


def test_half_is_missing_in_one_and_noise_is_on_all_in_the_other(tmp_path):
    asked, seen = bench(tmp_path, restored_noise=0.7), []

    def restore(given, mask=None, **words):
        seen.append((given, mask, words))
        return SimpleNamespace(errors=lambda truth, class_mean: {"mean": float((given - truth).std())})

    run: Any = SimpleNamespace(restore=restore)
    found = room.restore(asked, digits(asked), run)
    (half, left, plain), (noisy, nothing, words) = seen
    assert (left, nothing) == ("left", None)
    assert "noise" not in plain
    assert words["noise"] == 0.7
    assert found["inpainting"].errors["mean"] == 0
    assert found["denoising"].errors["mean"] == pytest.approx(0.7, rel=0.1)
    assert half.shape == noisy.shape == (4, 1, 8, 8)


def test_arms_are_divergences_on_the_chains_of_cd(tmp_path):
    js, cd = (arm.method for arm in room.arms(bench(tmp_path)))
    assert isinstance(js, FDivergence)
    assert isinstance(cd, PersistentCD)
    assert js.source == cd
    assert js.divergence.name == "js"


def test_rows_are_shares_and_a_stopped_arm_is_told(tmp_path):
    errors = {"given": 2.0, "mean": 0.5, "class_mean": 0.25}
    task = room.Task(torch.zeros(1), errors)  # pyright: ignore
    method: Any = PersistentCD()
    done = Trial(Arm("cd", method), 0, kept=dict.fromkeys(room.TASKS, task))
    stopped = Trial(Arm("js", method), 0, stopped=7)
    targets = {"inpainting": (1.0, None), "denoising": (1.0, 1.0)}
    asked = bench(tmp_path, targets=targets)
    rows = {row.metric: row for row in room.rows_of(asked, {"cd": [done], "js": [stopped]})}
    assert rows["over_start/inpainting/cd"].value == 0.25
    assert rows["over_class_mean/denoising/cd"].value == 2
    assert rows["over_start/inpainting/cd"].ok
    assert not rows["over_class_mean/denoising/cd"].ok
    assert rows["over_class_mean/inpainting/cd"].ok
    assert rows["stopped_at_update/js"].value == 7
