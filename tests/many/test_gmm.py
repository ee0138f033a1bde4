"""The paper's two modes in fifty dimensions, trained by one, two and three processes with the same walkers."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from group import on

from metastable.experiments.base import Bench
from metastable.experiments.jarzynski_gmm import EXPERIMENT, arms, trials_of
from metastable.experiments.trials import Problem, Trial
from metastable.runs.run import Run

LIMIT = 3.0
"""Standard errors."""


class Learned(NamedTuple):
    """The mass that a model has in its first mode, its error, and by how many errors log Z is off."""

    mass: float
    error: float
    log_z_off: float
    walkers: int
    resamplings: float


def learned(trial: Trial, at: Problem, run: Run) -> Learned:
    """Of a training; the error of the mass is what independent populations that only followed disagree by."""
    walkers, z = run.walkers, run.log_partition
    assert walkers is not None
    assert z is not None
    sizes, first = (
        walkers.info["populations"],
        (walkers.x[:, 0] < at.model.means.detach()[:, 0].mean()).double(),
    )
    parts = zip(walkers.log_weight.split(sizes), first.split(sizes), strict=True)
    followed = torch.stack([torch.softmax(log_weight, 0) @ own for log_weight, own in parts])[1:]
    error = float(followed.var() / len(followed)) ** 0.5  # they are as many walkers as those that steer
    off = (z.value - float(at.model.log_partition())) / z.std_error
    return Learned(at.model.first_mass(), error, off, len(walkers), run.history[-1]["resamplings"])


def smoke(changes: dict[str, int]) -> Learned:
    """Jarzynski's arm of the experiment at its smallest scale."""
    settings = {**EXPERIMENT.scales["smoke"], **changes}
    bench = Bench(settings, "smoke", 0, "cpu", Path())
    trials = trials_of(bench, arms(bench)[:1], keep=learned)
    return trials.train(bench, trials.arms[0], seed=1).kept


QUICK = {"steps": 80, "walkers": 2000, "data": 2000}


@pytest.mark.parametrize(
    "changes", [QUICK, pytest.param({}, marks=pytest.mark.slow)], ids=["quick", "as it is"]
)
def test_mode_weights_and_log_z_are_those_of_one_process_on_two_and_three(changes):
    every = [on(count, smoke, changes) for count in (1, 2, 3)]
    for own in every:
        assert all(one == own[0] for one in own)  # one model, one population
        assert own[0].walkers == 2 * changes.get("walkers", 4000)
        assert own[0].resamplings > 10
        assert abs(own[0].log_z_off) < LIMIT
        assert 0.15 < own[0].mass < 0.35  # of 0.25, from a half
    for (a, *_), (b, *_) in combinations(every, 2):
        assert abs(a.mass - b.mass) < LIMIT * (a.error**2 + b.error**2) ** 0.5
        assert a.mass != b.mass  # another draw of the same law
        assert max(a.error, b.error) < 0.04
