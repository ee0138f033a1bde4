"""`rnce-profiles`: its mixture against quadrature and draws, and a small run of the five regimes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from conftest import assert_within, mean_and_error, quadrature

from metastable.experiments import EXPERIMENTS, TITLES
from metastable.experiments import rnce_profiles as profiles
from metastable.experiments.base import reproduce


def test_the_mixture_is_normalised_and_draws_from_its_density():
    law = profiles.truth().double()
    on_grid = quadrature(lambda x: -law.log_prob(x).detach(), [(-8, 8, 201)] * 2)
    assert float(on_grid.log_partition) == pytest.approx(0.0, abs=1e-9)
    x = law.sample(20_000, torch.Generator().manual_seed(0))

    def moments(y):
        return torch.cat([y, y.square()], 1)

    assert_within(mean_and_error(moments(x))[0], on_grid.mean(moments), mean_and_error(moments(x))[1])


def test_divergence_from_the_data_by_quadrature():
    law, shifted = profiles.truth(), profiles.NormalMixture(1, 1.0)
    assert profiles._kl(law, lambda x: -law.log_prob(x)) == pytest.approx(0.0, abs=1e-6)
    x = law.sample(40_000, torch.Generator().manual_seed(1))
    mean, error = mean_and_error(law.log_prob(x).detach() - shifted.log_prob(x).detach())
    assert_within(profiles._kl(law, lambda x: -shifted.log_prob(x)), mean, error)


def test_a_small_run_gives_every_row_and_the_figure(tmp_path):
    small = {"data": 1000, "batch": 32, "steps": 40, "pretrain": 10, "rate": 5e-3, "width": 8}
    experiment = dataclasses.replace(profiles.EXPERIMENT, scales={"tiny": small})
    rows = {row.metric: row for row in reproduce(experiment, "tiny", 0, tmp_path, device="cpu").rows}
    for name in profiles.REGIMES:
        assert (rows[f"named/{name}"].relation, rows[f"named/{name}"].target) == (">=", 1.0)
        assert math.isfinite(rows[f"objective/{name}"].value)
    assert rows["distance_from_matched/proposal-caught-up"].target == 0.05
    assert (tmp_path / "figure-2.png").stat().st_size > 10_000


def test_the_title_is_the_one_in_the_index():
    assert EXPERIMENTS["rnce-profiles"].title == TITLES["rnce-profiles"]
