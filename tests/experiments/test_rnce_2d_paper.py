"""`rnce-2d-paper`: arms are what they say, and rows ask for what the paper found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from metastable.core.random import derive
from metastable.experiments import EXPERIMENTS, TITLES
from metastable.experiments import rnce_2d as rnce
from metastable.experiments import rnce_2d_paper as paper
from metastable.experiments.base import Bench
from metastable.methods.ranking import RankingNCE


def bench(folder: Path = Path()) -> Bench:
    return Bench(paper.EXPERIMENT.scales["cpu"], "cpu", 0, "cpu", folder)


def test_arms_have_the_papers_turns_rates_and_sizes():
    jobs = {(job.arm, job.toy): job for job in paper.jobs(bench())}
    assert len(jobs) == 2 * len(paper.ARMS)
    for (arm, toy), job in jobs.items():
        ours = arm == "r-nce ours"
        assert (job.rate <= 1e-3 and job.schedule == "constant") is not ours
        pairs = rnce.toy_of(toy).sample(64, seed=derive(0, "data"))
        model, method = rnce.build(job, pairs)
        if isinstance(method, RankingNCE) and not ours:
            assert f"{method.proposal_steps}+{method.energy_steps}" in arm
            energy_steps = (
                rnce.updates(job) * method.energy_steps // (method.proposal_steps + method.energy_steps)
            )
            assert energy_steps == job.energy_steps
        assert sum(p.numel() for p in model.parameters()) < (11_000 if "11k" in arm else 22_000)


def test_rows_and_the_picture_of_table_2(tmp_path):
    at = bench(tmp_path)
    likelihood = rnce.Likelihood(-2.0, (), ())
    own = {
        job.arm: rnce.Outcome(
            job, np.zeros(0), 0.9 if job.model == rnce.IBC else 0.98, 10_000, likelihood, (1.0, 1.0)
        )
        for job in paper.jobs(at)
        if job.toy == "spiral"
    }
    rows = {row.metric: row for row in paper.rows_of(at, "spiral", own, 0.99)}
    assert rows["bc/r-nce turns 5+2/spiral"].target == at.least_bc
    assert rows["bc_margin/ibc/spiral"].value == pytest.approx(0.08)
    assert rows["parameters/r-nce turns 5+5, 11k/spiral"].paper == "11k"
    rng = np.random.default_rng(0)
    samples = {name: rng.normal(size=(3, 100, 2)) for name in paper.DRAWN}
    paper.draw_densities(at, "spiral", samples)
    assert (tmp_path / "densities-spiral.png").stat().st_size > 10_000


def test_the_title_is_the_one_in_the_index():
    assert EXPERIMENTS["rnce-2d-paper"].title == TITLES["rnce-2d-paper"]
