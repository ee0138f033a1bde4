"""rbm-exact: its pieces against what they should be, and its body on settings of a second."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from metastable.experiments import EXPERIMENTS
from metastable.experiments.base import Bench
from metastable.experiments.rbm_exact import (
    METHODS,
    annealed,
    body,
    exact_kl,
    independent_kl,
    marginal,
    relaxation_time,
    target_boltzmann,
    target_rbm,
)
from metastable.experiments.rbm_memory import completion_rate, letters
from metastable.kernels import Gibbs
from metastable.proposals import Signs
from metastable.proposals.signs import states

TINY = {
    "samplers": ("gibbs", "gibbs, boltzmann machine", "metropolis-hastings"),
    "chains": 500,
    "burn_in": 2,
    "kept": 2,
    "tv_target": 1.0,
    "machines": ((12, 8), (14, 4)),
    "seeds": 2,
    "ais_walkers": 20,
    "groups": 10,
    "temperatures": 3,
    "rows": 100,
    "methods": tuple(METHODS),
    "walkers": 64,
    "steps": 4,
    "kl_targets": {"pcd": 100.0},
    "side": 2,
    "bars_hidden": 3,
    "bars_steps": 4,
    "bars_methods": ("cd-10", "pcd"),
    "units": 30,
    "loads": (0.05,),
    "repeats": 2,
}


def test_the_body_gives_every_row_and_picture(tmp_path: Path):
    rows = {row.metric: row for row in body(Bench(TINY, "tiny", 0, "cpu", tmp_path))}
    assert all(math.isfinite(row.value) for row in rows.values())
    for name in ("gibbs", "gibbs/boltzmann-machine", "metropolis-hastings"):
        assert rows[f"total_variation/{name}"].target == 1.0
    for name in ("12x8", "14x4"):
        assert rows[f"log_z_worst_z/{name}"].target == 3.0
        assert rows[f"log_z_seeds_within_3_std_errors/{name}"].target == 2
    for name in METHODS:
        assert f"kl_exact/{name}" in rows
    assert rows["kl_exact/pcd"].ok
    pictures = {p.name for p in tmp_path.glob("*.png")}
    assert pictures == {"marginals.png", "log-z.png", "training.png", "completion.png"}


def test_every_scale_has_every_setting():
    for settings in EXPERIMENTS["rbm-exact"].scales.values():
        assert set(settings) == set(TINY)
        assert settings["tv_target"] == 0.02
        assert settings["seeds"] == 20


def test_frequencies_of_gibbs_chains_are_as_near_as_counting_allows():
    """Enough sweeps after the start: a tenth above what independent draws leave, plus its own spread."""
    energy = target_boltzmann(8)
    found = marginal(energy, Gibbs(), 20_000, 20, 10, 0)
    assert found.distance < 2 * found.noise
    wrong = marginal(energy, Gibbs(clamped=(True,) + (False,) * 7), 20_000, 20, 10, 0)
    assert wrong.distance > 10 * found.noise


def test_the_relaxation_time_is_that_of_a_function_along_the_chain():
    """𝔼[f(v₀) f(v_k)] of exact draws falls as exp(−k/τ) for large k, f any function: here by matrix powers."""
    energy = target_rbm(4, 3, coupling=0.8)
    v = states(4)
    with torch.no_grad():
        p = energy.exact_probabilities()
        forward = (energy.structure().hidden_field(v) @ states(3).T).softmax(1)
        back = (energy.structure().visible_field(states(3)) @ v.T).softmax(1)
    step = forward @ back
    f = v[:, 0] - p @ v[:, 0]
    far, further = (p * f @ torch.linalg.matrix_power(step, k) @ f for k in (40, 41))
    assert relaxation_time(energy) == pytest.approx(float(-1 / torch.log(further / far)), rel=1e-3)


def test_annealed_estimates_lie_within_their_errors():
    found = annealed(target_rbm(), 4, 400, 40, 40, seed=0)
    assert found.values.shape == (4,)
    assert bool((found.scores < 6).all())
    assert float(found.errors.max()) < 0.1


def test_kl_is_zero_at_the_truth_and_that_of_independence_elsewhere():
    teacher = target_rbm()
    truth = teacher.exact_probabilities()
    assert exact_kl(truth, teacher) == pytest.approx(0.0, abs=1e-12)
    free = Signs(torch.linspace(-1, 1, 5)).sample(200_000, torch.Generator().manual_seed(0))
    alone = target_rbm(5, 2, coupling=0.0)
    with torch.no_grad():
        alone.visible_bias.copy_(torch.linspace(-1, 1, 5))
    assert independent_kl(alone.exact_probabilities(), free) < 1e-3
    assert independent_kl(truth, teacher.sample(1000, torch.Generator().manual_seed(0)).float()) > 0.5


def test_memory_is_better_with_fewer_patterns():
    assert completion_rate("hebbian", 100, 0.05, 5, seed=0) > 0.9
    assert completion_rate("hebbian", 100, 0.4, 5, seed=0) < 0.5
    assert letters().shape == (7, 8, 7)


def test_the_example_completes_letters_and_forgets_above_capacity():
    path = Path(__file__).resolve().parents[2] / "examples" / "hopfield.py"
    spec = importlib.util.spec_from_file_location("hopfield_example", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.completed("pseudo-inverse", 4, None, 0)[2] == 1.0
    assert example.completed("hebbian", 4, None, 0)[2] < 1.0
    shares = example.capacity()
    assert shares[0.05] > 0.95 > 0.5 > shares[0.3]
    assert "?" in example.drawn(example.completed("hebbian", 4, None, 0)[0])
