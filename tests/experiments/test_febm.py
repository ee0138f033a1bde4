"""The f-EBM paper's one-dimensional experiment: its exact answers, and a tiny run of all of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from metastable.core.random import generator
from metastable.experiments import febm_1d as febm
from metastable.experiments.base import reproduce

ORACLE = {
    "kl": (1.0100, 1.8304),
    "reverse-kl": (1.5841, 1.6294),
    "js": (1.3125, 1.7525),
    "hellinger": (1.3175, 1.7316),
    "alpha=-0.5": (1.7449, 1.5587),
    "alpha=-1": (1.8286, 1.5171),
    "alpha=0.9": (1.0694, 1.8132),
    "neyman": (1.8286, 1.5171),
    "pearson": (0.5663, 1.9268),
}
"""Found independently, on another grid, with f written out in u and another minimiser."""


@pytest.mark.parametrize("name", ORACLE)
def test_the_optimum_is_that_of_an_independent_quadrature(name):
    assert febm.optimum(name) == pytest.approx(ORACLE[name], abs=2e-4)


def test_kl_has_the_moments_of_the_data():
    mean = 0.33 * -1 + 0.67 * 2
    variance = 0.33 * (0.0625 + 1) + 0.67 * (2 + 4) - mean**2
    assert febm.optimum("kl") == pytest.approx((mean, math.sqrt(variance)), abs=1e-5)


@pytest.mark.parametrize("name", ORACLE)
def test_the_divergence_is_the_integral_of_q_f(name):
    """Against q·f(p/q) with f itself, on another grid."""
    f = febm.divergence_named(name)
    x = torch.linspace(-12, 13, 5001, dtype=torch.float64)
    log_p, log_q = -febm.target()(x[:, None]), febm.log_model(x, 1.4, 1.6)
    direct = torch.trapezoid(log_q.exp() * f.f((log_p - log_q).exp()), x)
    assert febm.exact_divergence(f, 1.4, 1.6) == pytest.approx(float(direct), rel=1e-6)


def test_the_bell_draws_from_its_own_density():
    bell = febm.Bell(1.0, 2.0)
    x = bell.sample(20_000, generator(0))
    assert x.mean().item() == pytest.approx(1.0, abs=5 * 2 / math.sqrt(20_000))
    assert bell(torch.tensor([[3.0]])).item() == pytest.approx(0.5)
    assert bell.place == pytest.approx((1.0, 2.0))


def test_every_divergence_of_the_table_has_a_setting():
    assert set(febm.SETTINGS) == set(ORACLE)
    assert set(febm.EXPERIMENT.scales["cpu"]["divergences"]) == set(ORACLE)


def test_a_tiny_run_reports_every_row_and_draws_every_figure(tmp_path: Path):
    tiny = {
        **febm.EXPERIMENT.scales["smoke"],
        "divergences": ("js", "alpha=0.9"),
        "corrected": ("js",),
        "baselines": ("js",),
        "far": ("kl",),
        "paths": ("js",),
        "chains": ("js", "pearson"),
        "chain_tolerance": 3.0,
        "steps": 40,
        "path_steps": 20,
        "batch": 200,
        "rows": 5000,
        "draws": 5000,
        "log_every": 10,
        "tolerance": 3.0,
        "fold": 0.1,
    }
    experiment = dataclasses.replace(febm.EXPERIMENT, scales={"tiny": tiny})
    result = reproduce(experiment, "tiny", 0, tmp_path, device="cpu")
    assert result.ok
    values = {row.metric: row.value for row in result.rows}
    assert all(math.isfinite(v) for v in values.values())
    for name in ("js", "alpha=0.9"):
        assert values[f"mu_error/{name}"] == pytest.approx(
            abs(values[f"mu/{name}"] - ORACLE[name][0]), abs=1e-3
        )
    assert values["w1_fold/js"] == pytest.approx(values["w1_before/js"] / values["w1_after/js"])
    assert {
        "mu_error/js/theorem1",
        "sigma_error/kl/far/theorem1",
        "mu_error/kl/far/theorem3",
        "worst_error_of_five_starts/js",
        "error/js/chains",
        "error/pearson/paper's start",
    } <= set(values)
    exact = {row.metric: row.oracle for row in result.rows if row.oracle is not None}
    assert exact["mu/js"] == exact["mu/js/chains"] == pytest.approx(ORACLE["js"][0], abs=2e-4)
    assert exact["sigma/pearson/paper's start"] == pytest.approx(ORACLE["pearson"][1], abs=2e-4)
    assert {p.name for p in tmp_path.glob("*.png")} == {f"figure-{i}.png" for i in (1, 2, 3, 4)}
    assert json.loads((tmp_path / "result.json").read_text())["experiment"] == "febm-1d"


def test_the_example_script_fits_by_four_divergences():
    path = Path(__file__).resolve().parents[2] / "examples" / "f_divergence.py"
    spec = importlib.util.spec_from_file_location("f_divergence_example", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example  # dataclasses look their module up
    spec.loader.exec_module(example)
    rows = example.compare(rows=4000, steps=60)
    assert [row.name for row in rows] == ["kl", "js", "reverse-kl", "jeffreys"]
    assert all(0 < row.acceptance < 1 and row.plain > 0 for row in rows)
    assert len({row.mu for row in rows}) == 4
