"""The pieces of jem-stability on courses whose answers are known, and a tiny run in which chains explode."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metastable.cli.settings import method_of as method_from_settings
from metastable.cli.settings import read_settings
from metastable.experiments import jem_stability as stability
from metastable.experiments.base import reproduce
from metastable.experiments.jem_cifar10 import PAPER_ACCURACY, name_of
from metastable.experiments.jem_stability import CLASSIFIER, IN_SMALL, PUBLISHED, Scenario
from metastable.experiments.trials import Arm, Curves, Trial
from metastable.methods import JEM, Robust


def trial(accuracies: list[float], stopped: int | None = None, grad_scale: float = 0.7) -> Trial:
    usual = {"grad_scale": grad_scale, "negatives_ignored": 0.25, "energy_gap": -4e4}
    lines = [{"step": 10 * (k + 1), "test_accuracy": a, **usual} for k, a in enumerate(accuracies)]
    return Trial(Arm("", JEM()), 0, Curves(lines), stopped=stopped)


def test_accuracy_is_that_of_the_end_or_the_best_before_a_stop():
    assert stability.accuracy(trial([0.1] * 8 + [0.9, 0.8])) == pytest.approx(0.85)
    assert stability.accuracy(trial([0.1, 0.7, 0.2], stopped=30)) == pytest.approx(0.7)
    assert stability.accuracy(trial([], stopped=3)) == 0.0
    assert stability.best(trial([0.95] + [0.2] * 9)) == 0.95


class Bench:
    """Settings of a scale as attributes."""

    def __init__(self, **settings: Any):
        self.__dict__ |= {**stability.EXPERIMENT.scales["cpu"], "scale": "cpu", **settings}


@pytest.fixture
def courses():
    return {
        ("digits", 2, CLASSIFIER): [trial([0.95] * 5)] * 5,
        ("digits", 2, 0.0): [trial([0.6, 0.9], stopped=200)] * 4 + [trial([0.94] + [0.92] * 4)],
        ("digits", 2, 0.5): [trial([0.945] * 5)] * 5,
        ("digits", 2, 2.0): [trial([0.93] * 5)] * 4 + [trial([0.2], stopped=5)],
    }


def rows_of(courses, names=("digits",), **settings) -> dict[str, Any]:
    bench: Any = Bench(**{"data": {"digits": (2,), "mnist": (2,)}, **settings})
    return {row.metric: row for row in stability.rows_of(bench, names, courses)}


def test_rows_say_who_was_stopped_and_what_it_cost(courses):
    rows = rows_of(courses)
    where = "digits/scenario_2"
    assert rows[f"stopped/{where}/beta_o=0"].value == pytest.approx(0.8)
    assert rows[f"stopped/{where}/beta_o=0.5"].value == 0
    assert rows[f"stopped/{where}/beta_o=2"].value == pytest.approx(0.2)
    assert rows[f"accuracy_lost/{where}/beta_o=0.5_to_classifier"].value == pytest.approx(0.005)
    assert rows[f"accuracy_lost/{where}/beta_o=0.5_to_plain_at_its_best"].value == pytest.approx(
        0.908 - 0.945
    )
    assert rows[f"accuracy/{where}/beta_o=0"].value == pytest.approx(0.904)
    assert rows[f"updates_made/{where}/beta_o=0"].value == 200
    assert rows[f"grad_scale/{where}/beta_o=0.5"].value == pytest.approx(0.7)
    assert rows[f"gap/{where}/beta_o=0.5"].value == pytest.approx(1.0)  # o = 40,000; data above negatives
    assert (rows["data_found/digits"].value, rows["data_found/mnist"].value) == (1, 0)
    assert [m for m, row in rows.items() if not row.ok] == ["data_found/mnist"]


def failing(courses, beta_o, made) -> list[str]:
    courses["digits", 2, beta_o] = made
    return [m.split("/")[0] for m, row in rows_of(courses, data={"digits": (2,)}).items() if not row.ok]


def test_a_stop_with_β_or_a_loss_of_accuracy_or_a_dead_density_fails(courses):
    assert failing(dict(courses), 0.5, [trial([0.95], stopped=100)] * 5) == ["stopped"]
    assert failing(dict(courses), 0.5, [trial([0.91] * 5)] * 5) == ["accuracy_lost"]  # 0.04 to the classifier
    assert failing(dict(courses), 0.0, [trial([0.96, 0.1], stopped=9)] * 5) == ["accuracy_lost"]  # to plain
    assert failing(dict(courses), 0.0, [trial([0.9] * 5)] * 5) == ["stopped"]
    dead = [trial([0.945] * 5, grad_scale=0.0025)]
    assert failing(dict(courses), 0.5, dead * 5) == ["grad_scale"]


def test_the_papers_numbers_stand_beside_its_own_settings_only(courses):
    """And beside the β·o that they were measured at: 0.883 of scenario 2 is at 2, not at 0.5."""
    where = "accuracy/digits/scenario_2/beta_o="
    assert rows_of(courses)[f"{where}0"].paper is None
    gpu = {
        **stability.EXPERIMENT.scales["gpu"],
        "scale": "gpu",
        "data": {"digits": (2,)},
        "more": {2: (2.0,)},
    }
    rows = rows_of(courses, **gpu)
    assert [rows[f"{where}{at}"].paper for at in ("0", "0.5", "2")] == ["0.100", None, "0.883"]


def test_its_table_is_that_of_the_other_experiment():
    for number, line in stability.PAPER.items():
        for beta_o, value in line.items():
            assert float(value) == PAPER_ACCURACY[name_of(number, beta_o)]


def test_kept_rows_have_the_papers_number_only_where_it_belongs():
    kept = Path(__file__).parents[2] / "results/jem-stability/gpu/result.json"
    for row in json.loads(kept.read_text())["rows"]:
        found = re.fullmatch(r"accuracy/cifar10/scenario_(\d)/beta_o=([\d.]+)", row["metric"])
        paper = None if found is None else stability.PAPER[int(found[1])].get(float(found[2]))
        assert row["paper"] == paper, row["metric"]


def test_limits_of_the_gap_hold_every_scenario():
    from metastable.report.figures import new_figure

    axes = new_figure(4, 2).subplots(1, 3, sharey="row")
    for axis, highest in zip(axes, (5.0, 4e5, 50.0), strict=True):
        axis.plot([0, 1], [-2.0, highest])
    stability._symmetric_log(axes)
    assert axes[0].get_ylim()[1] > 4e5
    assert axes[2].get_ylim() == axes[0].get_ylim()


@pytest.mark.parametrize("number", [1, 2, 6])
def test_the_gpu_scale_is_the_preset_of_the_same_scenario(number):
    bench, scenario = Bench(**stability.EXPERIMENT.scales["gpu"]), PUBLISHED[number]
    settings = read_settings(f"jem-{number}")
    preset: Any = method_from_settings(settings["method"])
    ours: Any = stability.method_of(bench, scenario, 2.0)  # type: ignore
    assert ours.source.source == preset.source.source
    assert ours.beta_o(0, scenario.output_scale) == pytest.approx(2.0)
    assert settings["energy"]["output_scale"] == scenario.output_scale
    rate = settings["trainer"]["optimiser"]["learning_rate"]
    assert bench.rate / scenario.slower == pytest.approx(rate)  # type: ignore
    assert (bench.depth, bench.width) == (settings["energy"]["depth"], settings["energy"]["width"])  # type: ignore


def test_plain_training_and_β_differ_in_nothing_else():
    plain, robust = (stability.method_of(Bench(), IN_SMALL[2], b) for b in (0.0, 0.5))  # type: ignore
    assert isinstance(plain.source, Robust)
    assert dataclasses.replace(robust.source, beta=0.0) == plain.source  # type: ignore
    assert stability.method_of(Bench(), IN_SMALL[2], CLASSIFIER).generative == 0  # type: ignore


def test_on_mnist_chains_move_by_a_quarter_and_nothing_else_of_a_scenario_changes():
    bench: Any = Bench()
    for number, digits in IN_SMALL.items():
        mnist = stability.scenario_of(bench, "mnist", number)
        assert mnist.output_scale == digits.output_scale / 4
        made = stability.method_of(bench, mnist, 0.5)
        assert made.generative == pytest.approx(mnist.generative / mnist.output_scale)
        assert made.beta_o(0, mnist.output_scale) == pytest.approx(0.5)
        same = dataclasses.replace(mnist, output_scale=digits.output_scale, generative=1.0)
        assert same == digits == stability.scenario_of(bench, "digits", number)


def test_digits_are_split_once_and_no_picture_is_on_both_sides():
    task = stability.digits(0.2)
    assert (len(task.train), len(task.test)) == (1438, 359)
    again = stability.digits(0.2)
    assert torch.equal(task.test.x, again.test.x)
    kept = {row.numpy().tobytes() for row in task.train.x}
    twins = sum(row.numpy().tobytes() in kept for row in task.test.x)
    assert twins <= 2  # scikit-learn's set has a few pictures twice


def test_a_tiny_run_counts_the_guards_stops_and_leaves_out_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("METASTABLE_DATA", str(tmp_path))
    monkeypatch.setitem(IN_SMALL, 2, Scenario(2, alpha=1.0, output_scale=2e5, steps=1))  # a step of 100,000
    small = dict(
        data={"digits": (2,), "mnist": (2,)},
        more={},
        seeds=1,
        steps=20,
        batch=8,
        buffer=16,
        rate=1e-2,
    )
    scales = {"tiny": {**stability.EXPERIMENT.scales["cpu"], **small}}
    said: list[str] = []
    experiment = dataclasses.replace(stability.EXPERIMENT, scales=scales)
    result = reproduce(experiment, "tiny", 0, tmp_path / "out", device="cpu", say=said.append)
    got = {row.metric: row.value for row in result.rows}
    assert got["stopped/digits/scenario_2/beta_o=0"] == 1
    assert got["updates_made/digits/scenario_2/beta_o=0"] < 20
    assert got["stopped/digits/scenario_2/beta_o=0.5"] == 0
    assert got["data_found/mnist"] == 0
    assert not result.ok
    assert any(line.startswith("mnist is left out") for line in said)
    assert 0 < got["accuracy/digits/scenario_2/classifier"] <= 1
    assert {p.name for p in (tmp_path / "out").glob("*.png")} == {"stability-digits.png", "chains-digits.png"}
    json.loads((tmp_path / "out" / "result.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert np.isfinite(list(got.values())).all()
