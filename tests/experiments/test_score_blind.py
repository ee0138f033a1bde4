"""The pieces of score-blind against closed forms, and a tiny run of all of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path
from statistics import NormalDist

import pytest
import torch
from torch import nn

from metastable.energies import GaussianMixture
from metastable.evaluation.quadrature import grid_density
from metastable.experiments import score_blind as blind
from metastable.experiments.base import Bench, reproduce


@pytest.mark.parametrize("distance", [2.0, 12.0])
@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_left_mass_is_that_of_the_normal_law(distance, sigma):
    truth = blind.target(distance, sigma)
    density = grid_density(
        truth, blind.box(distance), (401, 161)
    )  # the middle lies between points of the grid
    beyond = NormalDist().cdf(-distance / 2 / math.sqrt(1 + sigma**2))
    exact = blind.LIGHT * (1 - beyond) + (1 - blind.LIGHT) * beyond
    assert blind.left_mass(density, truth.means) == pytest.approx(exact, abs=0.005)
    assert density.edge_mass < 1e-3


def test_score_error_is_zero_for_the_truth_and_one_without_a_score():
    truth = blind.target(2.0)
    density = grid_density(truth, blind.box(2.0), 121)

    class Flat(nn.Module):
        def forward(self, x):
            return 0 * x.sum(1)

    assert blind.score_error(truth.float(), blind.target(2.0), density) < 1e-9
    assert blind.score_error(Flat(), blind.target(2.0), density) == pytest.approx(1.0)


def test_scores_hardly_change_when_separated_modes_change_weights():
    """The point of the experiment, with no training at all: half against a fifth of the mass."""
    errors = {}
    for distance in (2.0, 12.0):
        truth = blind.target(distance)
        other = GaussianMixture(truth.means.detach(), 1.0).float()
        density = grid_density(truth, blind.box(distance), 161)
        errors[distance] = blind.score_error(other, truth, density)
    assert errors[12.0] < 1e-6
    assert errors[2.0] > 0.05


def test_weight_errors_are_averaged_over_repeats():
    density = grid_density(blind.target(2.0), blind.box(2.0), 21)
    found = [blind.Learned(density, mass, 0.2, 0.01) for mass in (0.0, 0.8)]
    assert blind.weight_error(found) == pytest.approx(0.4)
    rows = {
        r.metric: r for r in blind.mode_rows({"far": {"sliced": found, "cd": found}, "near": {"cd": found}})
    }
    assert rows["mode_weight_error/sliced/far"].ok
    assert rows["mode_weight_error/cd/far"].relation is None
    assert not rows["mode_weight_error/cd/near"].ok
    assert rows["left_mass_range/sliced/far"].value == pytest.approx(0.8)


def test_relative_error_is_in_the_frobenius_norm():
    assert blind.relative_error(torch.eye(2) * 3, torch.eye(2)) == pytest.approx(2.0)


def test_the_blind_are_among_the_arms():
    bench = Bench(blind.EXPERIMENT.scales["smoke"], "smoke", 0, "cpu", Path())
    assert set(blind.BLIND) < {arm.name for arm in blind.arms(bench)}


def test_score_blind_runs(tmp_path):
    small = {
        "rows": 2000,
        "noisy_steps": 20,
        "data": 300,
        "batch": 64,
        "width": 8,
        "steps": 15,
        "walkers": 256,
        "repeats": 1,
        "grid": 60,
    }
    scales = {"tiny": {**blind.EXPERIMENT.scales["smoke"], **small}}
    experiment = dataclasses.replace(blind.EXPERIMENT, scales=scales)
    result = reproduce(experiment, "tiny", 0, tmp_path, device="cpu")
    rows = {row.metric: row for row in result.rows}
    assert rows["precision_error/exact"].ok
    assert all(math.isfinite(row.value) for row in result.rows)
    assert len([name for name in rows if name.startswith("mode_weight_error/")]) == 10
    assert (tmp_path / "figure-densities.png").stat().st_size > 0
    assert (tmp_path / "figure-cuts.png").stat().st_size > 0


def test_the_example_script_tells_near_from_far():
    path = Path(__file__).resolve().parents[2] / "examples" / "score_matching.py"
    spec = importlib.util.spec_from_file_location("score_matching_example", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example  # dataclasses look their module up
    spec.loader.exec_module(example)
    rows = example.compare((2.0,), rows=500, steps=100)
    assert [row.method for row in rows] == ["sliced-score-matching", "denoising-score-matching", "jarzynski"]
    assert all(abs(row.left_mass - row.true_mass) < 0.1 for row in rows)
