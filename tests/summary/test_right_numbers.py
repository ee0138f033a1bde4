"""Numbers of a judged run that once were wrong because of where rows stood or how often they were copied."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import metastable as ms
from metastable.core.batch import Batch
from metastable.core.types import LogPartition, Walkers
from metastable.data import Dataset
from metastable.evaluation.distances import energy_distance
from metastable.evaluation.modes import independent_size, sampled_mode_weights
from metastable.runs.run import Run
from metastable.summary import Judged, judge_again, judge_training
from metastable.summary.contexts import CONTEXTS, _chosen, _nearest
from metastable.summary.density import _energy_facts

FAR = 6.0


class TwoModes(nn.Module):
    """Two normal modes at ±6 of the first column with weights ¼ and ¾: log Z is log 2π."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        centers = torch.tensor([[-FAR, 0.0], [FAR, 0.0]])
        apart = (x[:, None] - centers).square().sum(-1)
        log_weight = torch.tensor([0.25, 0.75]).log()
        return -self.scale * torch.logsumexp(log_weight - apart / 2, 1)


def rows_of(n: int, seed: int) -> Tensor:
    """Draws of `TwoModes`, the lighter mode first."""
    rng = torch.Generator().manual_seed(seed)
    x, light = torch.randn(n, 2, generator=rng), n // 4
    x[:light, 0] -= FAR
    x[light:, 0] += FAR
    return x


def run_of(walkers: Walkers, **settings) -> Run:
    config = {"seed": 0, "event_shape": [2]}
    z = LogPartition(float(np.log(2 * np.pi)), 0.001)
    return Run(TwoModes(), "cd", [], walkers, z, config=config, **settings)


@pytest.fixture
def judged(monkeypatch):
    """A run of the true density, judged by rows that are sorted by their mode, without a second log Z."""
    monkeypatch.setattr("metastable.summary.likelihood.affordable", lambda *_: False)

    def judge(walkers: Walkers, train: Tensor, validation: Tensor | None = None, **settings) -> Run:
        validation = train if validation is None else validation
        return judge_training(run_of(walkers, **settings), Batch(train), Batch(validation), None, seed=0)

    return judge


def test_rows_sorted_by_class_do_not_move_distances_or_pictures(judged, tmp_path):
    data = rows_of(10_000, 1)  # its first 2500 rows are of one mode
    run = judged(Walkers.equal(rows_of(2000, 0)), data, folder=tmp_path)
    assert abs(run.scores["energy_distance"]) < 0.05  # 11.6 from the first 2000 rows
    assert run.scores["mmd"] < 0.05
    with np.load(tmp_path / "figures.npz") as stored:
        shown = stored["data"]
    assert len(shown) == 2000
    assert (shown[:, 0] < 0).mean() == pytest.approx(0.25, abs=0.05)


def test_the_spread_of_energies_is_of_all_the_data(judged):
    data = rows_of(10_000, 1)
    run = run_of(Walkers.equal(data))
    # noise fitted to one mode alone would lie in that mode: a spread of 1 instead of tens
    assert _energy_facts(Judged(run, Batch(data), 0))["energy_spread"] > 5


def test_contexts_of_sorted_pairs_are_all_looked_at():
    given = torch.linspace(0, 1, 1000)[:, None]
    run = run_of(Walkers.equal(rows_of(8, 0)))
    chosen = _chosen(run, Batch(torch.zeros(1000, 2), given), 0).given
    assert len(chosen) == CONTEXTS
    assert chosen.mean().item() == pytest.approx(0.5, abs=0.1)  # 0.13 of the first ones
    x = torch.arange(4000.0)[:, None]
    near = _nearest(Batch(x, torch.zeros(4000, 1)), torch.zeros(1))
    assert near.mean().item() == pytest.approx(2000, abs=250)


def test_distances_of_few_heavy_walkers_are_of_no_copies(judged):
    """Fifty of 4000 walkers carry all the weight: copies of them would be pairs at distance zero."""
    x = rows_of(4000, 0)
    x = x[torch.randperm(4000, generator=torch.Generator().manual_seed(2))]
    log_weight = torch.where(torch.arange(4000) < 50, 0.0, -60.0).double()
    heavy = judged(Walkers(x, log_weight), rows_of(2000, 1)).scores["energy_distance"]
    alone = judged(Walkers.equal(x[:50]), rows_of(2000, 1)).scores["energy_distance"]
    assert heavy == pytest.approx(alone, abs=1e-2)  # 0.1 more with copies
    copied = energy_distance(x[:50].repeat(40, 1), rows_of(2000, 1))
    assert float(copied) > alone + 0.05


def test_as_many_held_out_rows_as_training_rows_show_what_was_learnt_by_heart(judged):
    walkers, train = Walkers.equal(rows_of(500, 0)), rows_of(400, 1)
    names = {f.name for f in judged(walkers, train, 1.5 * rows_of(400, 2)).diagnosis}
    assert "overfitting" in names
    assert "overfitting" not in {f.name for f in judged(walkers, train, train.clone()).diagnosis}


def test_errors_of_evaluated_mode_weights_are_those_of_independent_populations(judged):
    """Sixteen populations, in each of which all walkers descend from ten: worth 160 walkers, not 2560."""
    few = rows_of(160, 3)[torch.randperm(160, generator=torch.Generator().manual_seed(0))]
    walkers = Walkers.equal(few.repeat_interleave(16, 0), info={"populations": [160] * 16})
    data, centers = rows_of(4000, 1), torch.tensor([[-FAR, 0.0], [FAR, 0.0]])
    found = judged(walkers, data).modes["std_error"]
    size = independent_size(walkers, centers)
    assert 60 < size < 400
    kept = Walkers(walkers.x, torch.full((2560,), 0.5, dtype=torch.float64), walkers.info)  # as if weighted
    said = judge_again(run_of(kept), Dataset.of(data, "rows"))[0]["mode_weights"]["std_error"]
    assert said == pytest.approx(found)
    assert said[0] == pytest.approx((0.25 * 0.75 * (1 / size + 1 / 4000)) ** 0.5, rel=1e-3)


def test_walkers_drawn_from_populations_may_be_resampled():
    start = Walkers.equal(rows_of(160, 0), info={"populations": [40] * 4})
    moved = ms.continue_sampling(TwoModes(), start, 320, steps=1, step_size=0.1)
    again = moved.resampled(40)
    assert sampled_mode_weights(again, torch.tensor([[-FAR, 0.0], [FAR, 0.0]])).ess <= 40


def test_one_walker_with_all_the_weight_has_no_distance(judged):
    log_weight = torch.full((3000,), -80.0, dtype=torch.float64).index_fill(0, torch.tensor([7]), 0.0)
    assert "energy_distance" not in judged(Walkers(rows_of(3000, 0), log_weight), rows_of(400, 1)).scores
    assert "energy_distance" not in judged(Walkers(rows_of(30, 0), log_weight[:30]), rows_of(400, 1)).scores


def test_advice_about_a_doubtful_log_z_is_for_the_walkers_behind_it(monkeypatch):
    """A log Z that was estimated after training owes nothing to the walkers of training."""
    doubted = LogPartition(1.0, 0.2, 9.0, warnings=("no Gaussian was found",))
    monkeypatch.setattr("metastable.summary.likelihood.log_partition", lambda *_, **__: doubted)
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    run = ms.fit({"name": "mlp", "hidden": [4]}, x, "pcd", 2)
    found = next(f for f in run.diagnosis if f.name == "log-z-doubtful")
    assert "Use more walkers" not in found.advice
    assert "metastable.log_partition(run.learned_energy" in found.advice
