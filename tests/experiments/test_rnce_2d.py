"""rnce-2d by its pieces: sizes, the number of updates, what the rows ask for, a small training of each kind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import each, z_limit

from metastable.experiments import rnce_2d as rnce
from metastable.experiments.base import Bench
from metastable.proposals.cnf import ContinuousFlow, InterpolantFlow

TINY = rnce.EXPERIMENT.scales["smoke"] | {
    "rows": 500,
    "batch": 16,
    "density_steps": 3,
    "energy_steps": 3,
    "interpolating_steps": 3,
    "samples": 40,
    "heun_steps": 4,
    "z_ode": (8, 5),
    "chain_steps": 6,
    "tested": 20,
    "draws": 512,
    "z_error": None,
    "points": 81,
}


def job(model: str, toy: str, **changes) -> rnce.Job:
    return rnce.Job(model, toy, 0, 1, 2, "cpu", TINY | changes)


@each("scale", rnce.EXPERIMENT.scales)
@each("toy", rnce.SETS)
def test_every_model_is_within_its_size(scale, toy):
    pairs = rnce.toy_of(toy).sample(50, seed=0)
    for model in rnce.MODELS:
        made, method = rnce.build(rnce.Job(model, toy, 0, 1, 2, "cpu", rnce.EXPERIMENT.scales[scale]), pairs)
        players = [made, *method.companions(made, pairs, None, 0).values()]
        size = sum(p.numel() for player in players for p in player.parameters())
        assert 0.8 * rnce.MOST_PARAMETERS < size <= rnce.MOST_PARAMETERS, model


def test_updates_give_every_energy_its_steps():
    grid = {"density_steps": 7, "energy_steps": 20_000, "interpolating_steps": 30_000}
    assert rnce.updates(job("nf", "spiral", **grid)) == 7
    for turns, outer in (((5, 5), 4000), ((5, 2), 10_000)):  # Appendix B.2
        assert rnce.updates(job("r-nce", "spiral", turns=turns, **grid)) == outer * sum(turns)
    assert rnce.updates(job("i-r-nce", "spiral", turns=(1, 1), **grid)) == 30_000
    assert rnce.updates(job("ibc", "spiral", turns=(5, 2), **grid)) == 20_000


@pytest.mark.parametrize("model", rnce.MODELS)
def test_one_training_of_each_kind(model):
    outcome = rnce.learn(job(model, "spiral"))
    assert outcome.samples.shape == (3, 40, 2)
    assert np.isfinite(outcome.samples).all()
    assert np.isfinite(outcome.likelihood.mean)
    assert len(outcome.likelihood.log_z) == (0 if model in rnce.DENSITIES else 3)
    again = rnce.learn(job(model, "spiral"))
    assert np.array_equal(outcome.samples, again.samples)


@pytest.mark.parametrize("model", rnce.DENSITIES)
def test_samples_are_drawn_in_the_steps_of_the_scale(model, monkeypatch):
    used, grid = set(), ContinuousFlow._grid
    for kind in (InterpolantFlow, ContinuousFlow):
        monkeypatch.setattr(kind, "_grid", lambda flow, t: used.add(flow.steps) or grid(flow, t))
    own = job(model, "spiral", heun_steps=7)
    run = rnce.train(own, rnce.toy_of("spiral").sample(100, seed=0))
    before = getattr(run.energy, "proposal", run.energy).steps
    rnce.draw(own, run, torch.zeros(2, 1), torch.Generator().manual_seed(0))
    rnce.likelihood(own, run, torch.zeros(3, 1), torch.Generator().manual_seed(0))
    assert used == {7}
    assert getattr(run.energy, "proposal", run.energy).steps == before  # a run is left as it was


def test_an_energy_is_sampled_and_normalised_in_steps_of_their_own(monkeypatch):
    used, grid = [], InterpolantFlow._grid
    own = job("r-nce", "spiral", heun_steps=7, z_ode=(9, 6))
    run = rnce.train(own, rnce.toy_of("spiral").sample(100, seed=0))
    monkeypatch.setattr(InterpolantFlow, "_grid", lambda flow, t: used.append(flow.steps) or grid(flow, t))
    rng = torch.Generator().manual_seed(0)
    rnce.draw(own, run, torch.zeros(3, 1), rng)
    assert set(used) == {7}
    used.clear()
    rnce.likelihood(own, run, torch.zeros(3, 1), rng)
    assert set(used) == {9, 18}  # twice as many for the error of the ODE
    proposal = run.players["proposal"]
    assert {"steps": proposal.steps, "scored": proposal.scored} == own.ode  # a run is left as it was


def test_log_z_by_sampling_is_that_of_the_grid():
    """A hardly trained energy is near its Gaussian base, and so is the proposal: weights hardly vary."""
    own, toy = job("r-nce", "pinwheel", draws=4096), rnce.toy_of("pinwheel")
    run = rnce.train(own, toy.sample(500, seed=0))
    given = torch.stack([toy.context(v) for v in (4.0, 7.0, 4.0, 7.0)])
    found = rnce.likelihood(own, run, given, torch.Generator().manual_seed(0))
    gap = np.abs(np.array(found.log_z) - np.array(found.log_z_grid))
    assert gap.max() < z_limit(4) * 0.02
    assert abs(found.log_z_grid[0] - found.log_z_grid[2]) == 0


def bench(folder: Path, **changes) -> Bench:
    return Bench(TINY | {"least_bc": 0.97} | changes, "cpu", 0, "cpu", folder)


GOOD = {"nf": [0.99], "diffusion": [0.985], "diffusion-phi": [0.98], "r-nce": [0.99], "i-r-nce": [0.989]}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, set()),
        ({"nf": [0.96]}, {"bc/nf/spiral"}),
        ({"i-r-nce": [0.98]}, {"bc_gain/i-r-nce/spiral"}),
        ({"ibc": [0.975, 0.97, 0.985]}, {"bc_margin/ibc/spiral"}),  # lowest on average, but within its spread
        ({"ibc": [0.99, 0.99, 0.99]}, {"bc_margin/ibc/spiral"}),
    ],
)
def test_rows_ask_for_what_the_paper_found(tmp_path, changes, wrong):
    found = {**GOOD, "ibc": [0.90, 0.91, 0.92], **changes}
    rows = list(rnce.overlap_rows(bench(tmp_path), "spiral", found, 0.998))
    assert {row.metric for row in rows if not row.ok} == wrong
    assert {row.metric: row.value for row in rows}["bc/truth/spiral"] == 0.998
    silent = list(rnce.overlap_rows(bench(tmp_path, least_bc=None), "spiral", found, 0.998))
    assert all(row.relation is None for row in silent)


def test_the_smallest_overlap_is_over_contexts():
    toy = rnce.toy_of("pinwheel")
    truth, second = (rnce.true_samples(toy, 300, 0, name) for name in "ab")
    assert rnce.least_overlap(second, truth) > 0.95
    second[2] = 0.3 * second[2]
    assert rnce.least_overlap(second, truth) < 0.8


def test_overlaps_are_kept_by_model():
    none = rnce.Likelihood(0.0, (), ())
    jobs = [dataclasses.replace(job("ibc", "pinwheel"), repeat=r) for r in range(2)] + [job("nf", "pinwheel")]
    outcomes = [
        rnce.Outcome(j, np.zeros(0), bc, 0, none, (0, 0)) for j, bc in zip(jobs, (0.8, 0.9, 0.7), strict=True)
    ]
    assert rnce.overlaps(outcomes) == {"ibc": [0.8, 0.9], "nf": [0.7]}
