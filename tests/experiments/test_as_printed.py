"""The Jarzynski paper's algorithms as printed: their settings, and tiny runs."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from metastable.experiments import jarzynski_minibatch as minibatch
from metastable.experiments import jarzynski_published as published
from metastable.experiments.base import Bench, Experiment, Result, reproduce
from metastable.experiments.trials import Arm, Curves, Trial
from metastable.methods import Jarzynski


def tiny(experiment: Experiment, out: Path, **settings: Any) -> Result:
    scales = {"tiny": {**experiment.scales["smoke"], **settings}}
    return reproduce(dataclasses.replace(experiment, scales=scales), "tiny", 0, out, device="cpu")


def bench_of(experiment: Experiment, scale: str = "gpu") -> Bench:
    return Bench(experiment.scales[scale], scale, 0, "cpu", Path())


def test_figure_1_has_the_papers_settings():
    bench = bench_of(minibatch.EXPERIMENT)
    method = minibatch.printed(bench)
    assert (method.walkers, method.batch, bench.data, bench.repeats) == (100_000, 10_000, 100_000, 20)
    assert (bench.rate_means, bench.rate_z, method.step_size) == (0.2, 1.0, 0.1)
    assert method.counts == (100_000, 0)
    assert (method.order, method.scheme, method.gradient, method.pace) == ("none", "systematic", "all", None)
    assert 1 / method.threshold == pytest.approx(1.05)
    _, pcd, cd = minibatch.arms(bench)
    assert (pcd.method.walkers, pcd.method.batch, pcd.method.start_at) == (100_000, 10_000, "model")
    assert pcd.method.step_size == method.step_size
    (z, means) = cd.settings["optimiser"](minibatch.start(5, 0)).param_groups
    assert (z["lr"], means["lr"], cd.method.steps) == (10.0, 2.0, 4)


def test_figure_1_starts_with_both_means_drawn_alike():
    means = torch.stack([minibatch.start(50, seed).means.detach() for seed in range(40)])
    assert float(means.std()) == pytest.approx(0.1, rel=0.1)
    assert minibatch.start(50, 0).z.item() == 0
    assert float(means[:, 0, 0].std()) > 0.05  # the first coordinate is no exception


def test_one_thing_differs_in_each_remedy():
    bench = bench_of(minibatch.EXPERIMENT)
    sorted_, paced, slow = minibatch.tried(bench)
    printed = minibatch.printed(bench)
    assert dataclasses.replace(sorted_.method, order="none") == printed
    assert dataclasses.replace(paced.method, pace=None) == printed
    assert slow.method == printed
    assert slow.settings["steps"] == 4 * bench.steps


def test_minibatch_runs(tmp_path):
    result = tiny(minibatch.EXPERIMENT, tmp_path, dim=4, data=100, walkers=100, batch=10, steps=12)
    values = {row.metric: row.value for row in result.rows}
    assert all(math.isfinite(v) for v in values.values())
    assert {f"first_mass/{n}" for n in ("algorithm-2", "pcd", "cd", "sorted", "paced", "slow")} <= set(values)
    assert {p.name for p in tmp_path.glob("*.png")} == {"figure-1.png", "tried.png"}
    json.loads((tmp_path / "result.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def test_algorithm_1_as_printed_has_no_additions_and_as_many_walkers_steer_in_each():
    arms = {arm.name: arm.method for arm in published.arms(bench_of(published.EXPERIMENT))}
    printed = arms["printed/c=0.4"]
    assert isinstance(printed, Jarzynski)
    assert (printed.held_out, printed.order, printed.pace, printed.batch) == (0.0, "none", None, None)
    assert printed.threshold == pytest.approx(1 / 1.4)
    assert arms["held-out/c=0.1"].counts == (10_000, 10_000)
    assert arms["sorted/c=0.1"].counts == arms["printed/c=0.1"].counts == (10_000, 0)
    assert len([name for name in arms if name.startswith("printed")]) == 5
    settings = published.EXPERIMENT.scales["gpu"]
    assert (settings["steps"], settings["repeats"]) == (8000, 5)


def test_log_z_is_signed():
    lines = [{"step": 1, "exact_log_z": 2.0}]
    trial = Trial(Arm("printed/c=0.1", Jarzynski()), 0, Curves(lines), kept=1.5)
    assert published.log_z_errors([trial]) == [-0.5]


def test_published_runs(tmp_path):
    result = tiny(published.EXPERIMENT, tmp_path, dim=4, data=100, walkers=100, steps=12)
    values = {row.metric: row.value for row in result.rows}
    assert all(math.isfinite(v) for v in values.values())
    assert {"log_z_bias/printed", "log_z_bias/held-out", "first_mass_std/sorted/c=0.1"} <= set(values)
    assert (tmp_path / "published.png").exists()
