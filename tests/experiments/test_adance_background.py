"""Hidden units, masses, exact draws of a network in the plane: against closed forms, and tiny runs."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from metastable.core.random import generator
from metastable.energies import BoltzmannMachine
from metastable.experiments import adance_background as background
from metastable.experiments import adance_chains as chains
from metastable.experiments import adance_mnist as mnist
from metastable.experiments.adance_stability import handwritten
from metastable.experiments.base import Bench, Experiment, Result, reproduce
from metastable.experiments.trials import Curves, Trial


def tiny(experiment: Experiment, out: Path, **settings: Any) -> Result:
    scales = {"tiny": {**experiment.scales["smoke"], **settings}}
    return reproduce(dataclasses.replace(experiment, scales=scales), "tiny", 0, out, device="cpu")


def test_parity_is_log_2_from_independent_units():
    law = background.parity_law(4)
    assert law.sum() == 1
    assert sorted(set(law.tolist())) == [0.0, 1 / 8]
    free = BoltzmannMachine(4, scale=1e-9).double()
    assert background.kl_from(law, free) == pytest.approx(math.log(2), abs=1e-8)


def test_a_full_mass_makes_every_direction_alike():
    covariance = background.tilted_covariance(6, 0.8, 10.0)
    assert covariance.diagonal().sqrt()[[0, -1]].tolist() == pytest.approx([1.0, 10.0])
    widths = {}
    for name, mass in background.masses(covariance).items():
        L = torch.linalg.cholesky(mass)
        own = torch.linalg.eigvalsh(L.T @ covariance @ L)
        widths[name] = float(own[-1] / own[0])
    assert widths["full"] == pytest.approx(1.0)
    assert widths["unit"] > widths["diagonal"] > 10


def test_background_runs(tmp_path):
    small = dict(rows=100, walkers=50, steps=10, chains=2000, sweeps=3, dim=5, kl_target=5.0)
    result = tiny(background.EXPERIMENT, tmp_path, **small)
    rows = {row.metric: row for row in result.rows}
    assert rows["kl/visible-only"].oracle == pytest.approx(math.log(2))
    off = [row.value for name, row in rows.items() if name.startswith("correlation_off_exact")]
    assert len(off) == 3
    assert max(off) < 0.1
    assert (tmp_path / "parity.png").exists()


def test_draws_of_a_grid_have_its_moments():
    energy = chains.GridSampled((4,), 0)
    with torch.no_grad():
        for p in energy.parameters():
            p.zero_()
    x = energy.sample(40_000, generator(0))
    assert x.std(0).tolist() == pytest.approx([2.0, 2.0], rel=0.02)  # cut at three widths
    assert x.mean(0).abs().max() < 0.05
    assert x.abs().max() <= chains.REACH


def test_chains_run(tmp_path):
    result = tiny(chains.EXPERIMENT, tmp_path, rows=100, hidden=(8,), walkers=32, langevin=2, steps=4)
    values = {row.metric: row.value for row in result.rows}
    assert values["var_log_g/converged/K=1"] == 0
    ratio = values["kl/short-run/K=20"] / values["kl/converged/K=20"]
    assert values["kl_of_short_run_over_converged/K=20"] == pytest.approx(ratio)
    assert len([name for name in values if name.startswith("kl/")]) == 8


def test_mnist_has_the_thesis_settings_and_its_smoke_needs_no_files(tmp_path):
    settings = mnist.EXPERIMENT.scales["gpu"]
    assert (settings["rate"], settings["langevin"], settings["buffer"]) == (1e-4, 100, 10_000)
    assert {0.25, 0.5, 1.0} <= set(settings["rejuvenations"])
    bench = Bench(mnist.EXPERIMENT.scales["smoke"], "smoke", 0, "cpu", tmp_path)
    assert handwritten(bench).x.shape == (1797, 1, 8, 8)


def test_chains_whose_runs_all_stopped_are_counted_and_have_no_number(tmp_path, monkeypatch):
    def run(trials, bench):
        return {
            arm.name: [Trial(arm, 0, Curves(), None, 3)]
            if arm.name == "short-run/K=1"
            else [Trial(arm, 0, {"var_log_g": [0.5, 0.25]}, 0.1), Trial(arm, 1, Curves(), None, 0)]  # pyright: ignore
            for arm in trials.arms
        }

    monkeypatch.setattr(chains.Trials, "run", run)
    scale = {**chains.EXPERIMENT.scales["smoke"], "judged": True}
    rows = {row.metric: row for row in chains.body(Bench(scale, "smoke", 0, "cpu", tmp_path))}
    assert rows["runs_stopped/short-run/K=1"].value == 1
    assert math.isnan(rows["kl/short-run/K=1"].value)
    assert not rows["kl_of_short_run_over_converged/K=1"].ok
    assert (rows["kl/converged/K=20"].value, rows["var_log_g/converged/K=20"].value) == (0.1, 0.25)
