"""The pieces of the AdaNCE experiments on inputs whose answers are known, and tiny runs of both."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from metastable.experiments import adance_interval as interval
from metastable.experiments import adance_stability as stability
from metastable.experiments.adance_stability import Digits, LeakyConv, digits
from metastable.experiments.base import Bench, Experiment, Result, reproduce
from metastable.experiments.trials import Arm, Curves, Trial
from metastable.methods import AdaptiveNCE


def tiny(experiment: Experiment, out: Path, **settings: Any) -> Result:
    """The experiment at its smoke scale with some settings made smaller."""
    scales = {"tiny": {**experiment.scales["smoke"], **settings}}
    return reproduce(dataclasses.replace(experiment, scales=scales), "tiny", 0, out, device="cpu")


def values(result: Result) -> dict[str, float]:
    return {row.metric: row.value for row in result.rows}


# ---- adance-interval


def test_trainings_are_compared_seed_by_seed():
    def courses(*kls: float) -> list[interval.Learned]:
        return [interval.Learned(kl, 0.0, 0.0, torch.ones(1, 1)) for kl in kls]

    assert interval.largest_difference(courses(0.1, 0.5), courses(0.2, 0.45)) == pytest.approx(0.1)


def test_a_tiny_interval_run(tmp_path):
    small = dict(rows=300, hidden=(8,), walkers=32, langevin=2, steps=40, repeats=2, intervals=(1, 5, 20))
    result = tiny(interval.EXPERIMENT, tmp_path, **small)
    got = values(result)
    assert got["var_log_g/K=1"] == 0
    assert got["kl_difference_over_spread/K=1_from_pcd"] < 0.1  # one algorithm; forty updates amplify little
    assert got["var_log_g/K=20"] > got["var_log_g/K=5"] > 0
    assert got["var_log_g/K=20_over_K=5"] == pytest.approx(got["var_log_g/K=20"] / got["var_log_g/K=5"])
    assert 0 < got["kl/K=1"] < 3
    assert {p.name for p in tmp_path.glob("*.png")} == {"interval.png", "densities.png"}
    json.loads((tmp_path / "result.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def test_the_methods_differ_in_nothing_but_the_interval(tmp_path):
    pcd, *others = interval.arms(Bench(interval.EXPERIMENT.scales["cpu"], "cpu", 0, "cpu", tmp_path))
    assert [arm.method.source for arm in others] == [pcd.method] * 5
    assert [arm.method.interval for arm in others] == [1, 5, 10, 20, 50]


# ---- adance-stability


def growth(v: list[float]) -> float:
    lines = [{"step": k + 1, "gradient_magnitude": value} for k, value in enumerate(v)]
    return stability.growth(Trial(Arm("spectral", AdaptiveNCE()), 0, Curves(lines)))


def test_growth_compares_the_windows_it_says():
    v = np.ones(100)
    v[20:30], v[90:] = 2.0, 7.0
    assert growth(v.tolist()) == pytest.approx(3.5)
    assert growth([1.0] * 50 + [math.nan] * 50) == stability.MOST
    assert growth([1.0] * 95 + [1e30] * 5) == stability.MOST


def test_digits_are_enlarged_and_their_classes_known():
    data = digits(16)
    assert data.x.shape == (1797, 1, 16, 16)
    assert data.centers.shape == (10, 1, 16, 16)
    assert data.x.min() >= -1
    assert data.x.max() <= 1
    assert data.shares.sum().item() == pytest.approx(1)
    assert data.shares.min() > 0.09


def test_long_chains_that_are_data_raise_no_finding_and_those_of_one_class_do():
    data: Digits = digits(8)
    every = data.x
    assert stability.spread(data, every) == pytest.approx(1)
    assert stability.distinct(data, every) > 0.98  # a few images have a twin
    assert stability.classes(data, every) > 9.5
    one = data.centers[3] + 0.01 * torch.randn((200, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    assert stability.classes(data, one) == pytest.approx(1)
    assert stability.distinct(data, one) < 0.1
    assert stability.spread(data, one) < 0.05
    named = [[f.name for f in stability.diagnose([], stability.facts(data, x, 100.0))] for x in (every, one)]
    assert "mode-collapse" not in named[0]
    assert "mode-collapse" in named[1]


def test_both_kinds_start_from_the_same_weights():
    class Bench:
        size, widths, hidden, seed = 8, (4,), 8, 0

    spectral, plain = (stability.network(Bench(), kind) for kind in stability.KINDS)  # type: ignore
    assert isinstance(plain, LeakyConv)
    original = spectral.state_dict()["network.body.0.parametrizations.weight.original"]
    assert torch.equal(original, plain.state_dict()["body.0.weight"])


def test_a_tiny_stability_run_reports_stopped_courses_and_goes_on(tmp_path, monkeypatch):
    """A network that explodes at once without normalisation: the guard's stop becomes a row."""
    make = stability.network

    def steep(bench: Any, kind: str) -> nn.Module:
        net = make(bench, kind)
        if kind == "plain":
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(50)
        return net

    monkeypatch.setattr(stability, "network", steep)
    small = dict(
        widths=(4,),
        hidden=8,
        steps=100,
        langevin=2,
        long_steps=10,
        rejuvenations=(0.25,),
        batch=16,
        rate=1e-3,
    )
    result = tiny(stability.EXPERIMENT, tmp_path, **small)
    got = values(result)
    assert got["updates_made/plain/R=25%"] < 100
    assert got["plain_grows_further_or_stops"] == 1
    assert {"diagnosis/constant-energy/R=25%", "long_run_classes/R=25%"} <= set(got)
    assert got["v_growth/spectral/R=25%"] < 10
    assert {p.name for p in tmp_path.glob("*.png")} == {"figure-3-1.png", "figure-3-2.png"}
    json.loads((tmp_path / "result.json").read_text(), parse_constant=lambda name: pytest.fail(name))
