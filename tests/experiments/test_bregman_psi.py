"""Variances of Bregman ratio matching against closed forms, and a tiny run."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from metastable.core.random import generator
from metastable.experiments import bregman_psi as experiment
from metastable.experiments.base import reproduce
from metastable.methods.bregman import as_bregman

over = pytest.mark.parametrize


bregman = experiment.bregman_of


@over("name", experiment.PSIS)
def test_noise_that_is_the_data_leaves_twice_the_variance_of_maximum_likelihood_for_every_psi(name):
    """Weights are constant: Cov = 2·Fisher⁻¹ = (2, 1) in (μ, log σ), and log Z is known exactly."""
    found = experiment.predicted(bregman(name), 1.0).diagonal()
    assert found.tolist() == pytest.approx([2.0, 1.0, 0.0], abs=1e-6)


@over(("name", "width"), [("nce", 3.0), ("kl", 3.0), ("squared", 3.0), ("root", 1.2)])
def test_theory_is_asked_for_where_fourth_moments_are_finite(name, width):
    """Of Ψ = −4√u they are ∫ p_n²/p, finite below √2."""
    assert experiment.is_reached(bregman(name), width)
    assert not experiment.is_reached(bregman("root"), 1.5)


def test_closed_halves_are_those_of_the_function():
    log_g = torch.linspace(-3, 3, 13, dtype=torch.float64)
    derived, closed = as_bregman(experiment.PSIS["root"]), experiment.CLOSED["root"]
    torch.testing.assert_close(derived.S0(log_g), closed.S0(log_g))
    torch.testing.assert_close(derived.S1(log_g), closed.S1(log_g))


@over("name", ["nce", "kl"])
def test_minimised_is_where_the_gradient_vanishes(name):
    rng = generator(0)
    data, noise = (torch.randn((3, 400), generator=rng, dtype=torch.float64) for _ in range(2))
    theta = experiment.minimised(bregman(name), data, 1.5 * noise, 1.5)
    width = torch.tensor(1.5).double().log()
    at = theta.clone().requires_grad_()
    log_g = [experiment.model(at, x) - experiment.log_normal(x, 0.0, width) for x in (1.5 * noise, data)]
    (slope,) = torch.autograd.grad(3 * bregman(name).loss(*log_g), at)
    assert slope.abs().max() < 1e-8
    assert 1e-3 < theta.abs().max() < 0.5


def test_a_tiny_run(tmp_path):
    small = dict(samples=20, n=200, rows=200, hidden=(8,), walkers=32, steps=5, tolerance=5.0, langevin=2)
    tiny = {**experiment.EXPERIMENT.scales["smoke"], **small}
    result = reproduce(
        dataclasses.replace(experiment.EXPERIMENT, scales={"tiny": tiny}), "tiny", 0, tmp_path, device="cpu"
    )
    rows = {row.metric: row for row in result.rows}
    assert all(math.isfinite(row.value) for row in result.rows)
    assert rows["variance/mu/nce/noise=1.5"].oracle == pytest.approx(
        experiment.predicted(bregman("nce"), 1.5)[0, 0].item()
    )
    assert {"kl/kl/fixed", "kl/nce/K=20", "runs_stopped/kl/fixed"} <= rows.keys()
    assert (tmp_path / "variance.png").exists()
