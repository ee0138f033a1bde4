"""`rnce-hutchinson`: the flow's density is exact, the estimate's noise as predicted, and a small run."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from metastable.experiments import EXPERIMENTS, TITLES
from metastable.experiments import rnce_hutchinson as footnote
from metastable.experiments.base import Bench, reproduce

TINY = {"dims": (3,), "probes": (1,), "batches": 200, "steps": 24, "scored": 13, "tolerance": 0.2}


def test_estimates_have_the_predicted_noise_and_the_trace_has_none(tmp_path):
    whole, one, three = footnote.rank(Bench(TINY, "tiny", 0, "cpu", tmp_path), 3)
    assert whole.noise < 0.02
    for each in (one, three):
        assert each.noise == pytest.approx(each.predicted, rel=0.1)
        assert float((each.found - each.exact).mean().abs()) < 5 * each.noise / math.sqrt(2000)  # unbiased
    assert one.predicted == pytest.approx(math.sqrt(3) * three.predicted)
    assert one.first < three.first < whole.first
    assert one.posterior < three.posterior < whole.posterior == pytest.approx(-math.log(10), abs=0.01)


def test_without_correlations_probes_of_signs_have_no_noise():
    field = footnote.CorrelatedField(4, 0)
    assert field.noise(1) > 0.5
    field.frame = torch.eye(4, dtype=torch.float64)
    assert field.noise(1) == 0.0


def test_a_small_run_gives_every_row_and_the_figure(tmp_path):
    experiment = dataclasses.replace(footnote.EXPERIMENT, scales={"tiny": {**TINY, "batches": 60}})
    rows = {row.metric: row for row in reproduce(experiment, "tiny", 0, tmp_path, device="cpu").rows}
    assert rows["noise/d=3/trace"].ok
    assert rows["right_first/d=3/trace"].value == 1.0
    assert rows["objective/d=3/probes=1"].value < -2.4
    assert rows["objective/d=3/probes=1"].oracle == pytest.approx(-math.log(10), abs=1e-4)
    assert rows["noise/d=3/probes=1"].oracle is not None
    assert all(row.paper is None for row in rows.values())  # the paper prints none of these
    assert (tmp_path / "footnote-6.png").stat().st_size > 10_000


def test_the_title_is_the_one_in_the_index():
    assert EXPERIMENTS["rnce-hutchinson"].title == TITLES["rnce-hutchinson"]
