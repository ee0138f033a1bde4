"""A bare network whose walkers have left: what its run says and draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from metastable.core.batch import Batch
from metastable.core.types import LogPartition, Walkers
from metastable.core.units import Coordinates, Units, rounded
from metastable.energies import MLP, on_reference
from metastable.runs.run import Run
from metastable.summary import Judged
from metastable.summary.density import Density, _density_facts
from metastable.summary.folder import runaway
from metastable.summary.judge import _diagnosis
from metastable.summary.samples import Samples
from metastable.summary.section import Measured


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


X = torch.randn((400, 2), generator=rng()) * torch.tensor([1.0, 0.01]) + 2


def run_of(energy, x, log_z: float) -> Run:
    z, config = LogPartition(log_z, 0.1), {"event_shape": [2]}
    return Run(energy, "jarzynski", [], Walkers.equal(x), z, config=config)


def judged(run: Run) -> Judged:
    """With its likelihood told, and nothing else measured."""
    with torch.no_grad():
        value = float(-run.energy(X).mean()) - run.log_partition.value
    numbers = {"log_likelihood": value, "log_likelihood_se": 0.1}
    return Judged(run, Batch(X), 0, after_training=True, found={"likelihood": Measured(numbers)})


def found(run: Run) -> dict[str, str]:
    seen = judged(run)
    for section in (Samples(), Density()):
        seen.found[section.name] = section.measure(seen)
    run.diagnosis = _diagnosis(seen)
    return {finding.name: finding.severity for finding in run.diagnosis}


def test_a_bare_network_whose_walkers_have_left_is_told_so():
    run = run_of(MLP(2, (16,), seed=1), X + 300.0, log_z=-1500.0)
    findings = found(run)
    assert findings["mass-ran-away"] == findings["impossible-likelihood"] == "problem"
    ours = [f for f in run.diagnosis if f.name in ("mass-ran-away", "impossible-likelihood")]
    assert all('reference="gaussian"' in f.advice for f in ours)
    drawn = runaway(run, (X + 300.0).numpy(), X)
    assert np.median(drawn["radius_data"]) < 2
    assert np.median(drawn["radius_samples"]) > 1000  # in spreads of each column


def test_the_same_network_on_a_reference_has_nothing_to_answer_for():
    energy = on_reference(MLP(2, (16,), seed=1), X)  # log Z = 0 at the start
    run = run_of(energy, energy.reference.sample(400, rng(3)), log_z=0.0)
    findings = found(run)
    assert not {"mass-ran-away", "impossible-likelihood", "no-density"} & set(findings)
    assert runaway(run, X.numpy(), X) == {}
    facts = _density_facts(judged(run))
    assert facts["rays_down"] == 0
    assert facts["excess_mass"] < 1
    exact = math.log(2 * math.pi * math.e) + math.log(0.01)  # of the law that the rows were drawn from
    assert facts["entropy"] == pytest.approx(exact, abs=0.05 + 4 * facts["entropy_se"])


def test_the_likelihood_that_is_held_against_the_entropy_is_of_rows_held_out_with_their_noise():
    units = Units.fit(X, "scale", noise=0.01)
    run = run_of(lambda u: u.square().sum(1) / 2, X, math.log(2 * math.pi))
    run.config["trainer"] = {"data_noise": 0.01}
    told = {"likelihood": Measured({"log_likelihood": 0.0, "log_likelihood_se": 0.0})}
    train, held = Batch(rounded(units.forward(X))), Batch(torch.full((2000, 2), 3.0))
    seen = Judged(run, held, 0, train, after_training=True, coordinates=Coordinates(units), found=told)
    facts = _density_facts(seen)
    exact = -(18 + float(units.noise_covariance.sum())) / 2 - math.log(2 * math.pi)
    assert facts["log_likelihood"] == pytest.approx(exact, abs=4 * facts["log_likelihood_se"])
