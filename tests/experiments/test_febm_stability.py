"""Theorem 4 by finite differences, a mutant of it, and why equal rates leave the offset neutral."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from metastable.experiments import febm_stability as stability
from metastable.experiments.base import reproduce
from metastable.experiments.febm_exact import divergence_named

over = pytest.mark.parametrize
F = ["kl", "reverse-kl", "js", "hellinger"]


def game(name: str, offset: bool = True) -> stability.Game:
    return stability.Game(divergence_named(name), stability.normal(stability.MU, stability.SIGMA), offset)


@over("name", F)
def test_curvature_at_one(name):
    exact = {"kl": 1.0, "reverse-kl": 1.0, "js": 0.25, "hellinger": 0.5}
    assert stability.curvature_at_one(divergence_named(name)) == pytest.approx(exact[name])


@over("offset", [False, True])
@over("name", F)
def test_the_equilibrium_rests_and_its_jacobian_is_theorem_4(name, offset):
    played = game(name, offset)
    at = stability.equilibrium(played)
    assert played.flow(at).abs().max() < 1e-8
    J, exact = played.jacobian(at, 0.3), played.theorem_4(at, 0.3)
    torch.testing.assert_close(J, exact, rtol=0, atol=1e-5)
    once = exact.clone()  # K_EE with the product of means taken once
    once[0, 0] += 0.05
    assert (J - once).abs().max() > 1e-2


@over("name", F)
def test_offsets_settle_at_one_minus_the_rate_and_at_equal_rates_never(name):
    played = game(name)
    at, curvature = stability.equilibrium(played), stability.curvature_at_one(divergence_named(name))
    for r in (0.2, 0.5, 2.0):
        values = sorted(stability.offsets(played, at, r).real.tolist())
        assert values == pytest.approx(sorted([0.0, (r - 1) * curvature]), abs=1e-5)
    assert (
        stability.offsets(played, at, 1.0).abs().max() < 2e-3
    )  # a double zero: the root of what rounding leaves


def test_at_equal_rates_the_energy_drifts_at_the_speed_of_what_is_off():
    played = game("kl")
    path = stability.drift(played, stability.equilibrium(played), 1.0, 2.0, 20)
    assert np.allclose(path[:, 1], 0.5)
    assert np.allclose(np.diff(path[:, 0]), 0.1 * (math.exp(0.5) - 1), atol=1e-8)


def test_a_smoke_run_holds(tmp_path):
    changes = {"divergences": ("kl",), "mixture": ("kl",), "euler": 60}
    result = reproduce(stability.EXPERIMENT, "smoke", 0, tmp_path, device="cpu", changes=changes)
    assert result.ok
    values = {row.metric: row.value for row in result.rows}
    assert values["mixture_mu/kl"] == pytest.approx(1.01, abs=1e-4)  # the data's mean, as KL has it
    assert values["slowest_eigenvalue/kl/bell"] < 0
    assert (tmp_path / "offset.png").exists()
