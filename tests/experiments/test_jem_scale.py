"""`jem-scale`: the same density in other units, drifts by hand, and a small run."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from metastable.energies import JointEnergy
from metastable.experiments import EXPERIMENTS, TITLES
from metastable.experiments import jem_scale as scale
from metastable.experiments.base import Bench, reproduce
from metastable.experiments.trials import Arm, Trial


def test_o_on_h_sharpens_what_o_on_the_energy_leaves_in_doubt():
    torch.manual_seed(0)
    network, x = nn.Linear(4, 3).requires_grad_(False), torch.randn(5, 4)
    on_energy, on_h = JointEnergy(network, 50.0), JointEnergy(scale.Louder(network, 50.0), 1.0)
    torch.testing.assert_close(on_h.logits(x), 50 * on_energy.logits(x))
    assert float(on_h.logits(x).softmax(1).amax(1).min()) > float(
        on_energy.logits(x).softmax(1).amax(1).max()
    )


def test_the_drift_beside_the_noise_by_hand():
    class Bowl(nn.Module):
        def forward(self, x):
            return 3 * x.sum(1)

    assert scale.drift_to_noise(Bowl(), torch.zeros(7, 2), 1e-4) == pytest.approx(0.5e-4 * 3 / 1e-2)  # pyright: ignore


def test_a_small_run_gives_every_row_and_the_chains(tmp_path):
    tiny = {**scale.EXPERIMENT.scales["smoke"], "steps": 1, "buffer": 40, "batch": 8, "test_share": 0.02}
    experiment = dataclasses.replace(scale.EXPERIMENT, scales={"tiny": tiny})
    rows = {row.metric: row for row in reproduce(experiment, "tiny", 0, tmp_path, device="cpu").rows}
    assert rows["drift_ratio/one to energy/beta_o=0.5"].value < 0.1
    assert {f"accuracy/{name}/beta_o=0.5" for name in scale.PLACES} <= rows.keys()
    assert (tmp_path / "chains.png").stat().st_size > 1_000


def test_where_all_runs_stopped_there_is_no_number(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "train", lambda bench, *args: [Trial(Arm("a", None), 0, stopped=2)])  # pyright: ignore
    monkeypatch.setattr(scale, "mean_accuracy", lambda found: 0.5)
    settings = scale.EXPERIMENT.scales["smoke"]
    rows = {row.metric: row for row in scale.body(Bench(settings, "smoke", 0, "cpu", tmp_path))}
    assert not rows[f"drift_ratio/one to energy/beta_o={settings['stated']:g}"].ok
    assert rows["stopped/energy/beta_o=0"].value == 1


def test_the_title_is_the_one_in_the_index():
    assert EXPERIMENTS["jem-scale"].title == TITLES["jem-scale"]
