"""`nce-bias`: the quadrature against closed forms and Monte Carlo, and a small run."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from conftest import assert_within, mean_and_error, z_scores

from metastable.experiments import EXPERIMENTS, TITLES
from metastable.experiments import nce_bias as bias
from metastable.experiments.base import reproduce

over = pytest.mark.parametrize


@over("K", [1, 10, 100])
def test_nothing_tells_points_apart_where_model_and_proposal_agree(K):
    assert bias.population_objective("rnce", 0.0, K) == pytest.approx(-math.log(K + 1), abs=1e-9)


def by_sampling(kind: str, theta: float, K: int, n: int = 20_000) -> tuple[torch.Tensor, torch.Tensor]:
    """The objective and its standard error, from draws."""
    rng = torch.Generator().manual_seed(K)
    x0 = 1 + torch.randn((n, 1), generator=rng, dtype=torch.float64)
    x = torch.cat([x0, torch.randn((n, K), generator=rng, dtype=torch.float64)], 1)
    r = bias.score(kind, torch.tensor(theta, dtype=torch.float64), x)
    return mean_and_error(torch.log_softmax(r, 1)[:, 0])


@over("kind", ["rnce", "ibc"])
@over("K", [1, 10, 100])
@over("theta", [-0.5, 1.0, 2.5])
def test_quadrature_agrees_with_draws(kind, K, theta):
    assert_within(bias.population_objective(kind, theta, K), *by_sampling(kind, theta, K))


def test_quadrature_of_the_other_objective_does_not_agree():
    mean, error = by_sampling("ibc", 1.0, 10)
    assert float(z_scores(bias.population_objective("rnce", 1.0, 10), mean, error)) > 20


@over(("kind", "K"), bias.OPTIMA)
def test_optima(kind, K):
    found = bias.optimum(kind, K)
    assert abs(found - bias.OPTIMA[kind, K]) <= bias.TOLERANCE
    if kind == "rnce":
        assert found == pytest.approx(1.0, abs=1e-4)  # Theorem 4.4: whatever K


def test_ibc_tends_to_the_ratio_of_data_and_proposal():
    """Proposition 4.7: N(1, 1)/N(0, 1) is e^x up to a constant; in this family that is θ = 2 as K grows."""
    distances = [2 - bias.optimum("ibc", K) for K in (1, 10, 100, 1000)]
    assert distances == sorted(distances, reverse=True)
    assert 0 < distances[-1] < 1e-3


def test_the_likelihood_is_highest_at_the_data():
    assert bias.log_likelihood(1.0) == pytest.approx(-0.5 * math.log(2 * math.pi * math.e))
    assert bias.log_likelihood(0.0) == pytest.approx(bias.log_likelihood(1.0) - 0.5)


def test_a_small_run_gives_every_row_and_the_figure(tmp_path):
    small = {"data": 2000, "batch": 200, "steps": 60, "rate": 0.1, "repeats": 2, "points": 15}
    experiment = dataclasses.replace(bias.EXPERIMENT, scales={"tiny": small})
    result = reproduce(experiment, "tiny", 0, tmp_path, device="cpu")
    rows = {row.metric: row for row in result.rows}
    for kind, K in bias.OPTIMA:
        assert rows[f"optimum_error/{kind}/K={K}"].ok
        error = rows[f"trained_error/{kind}/K={K}"]
        assert (error.relation, error.target) == ("<=", 0.02)
        assert abs(rows[f"trained/{kind}/K={K}"].value - bias.OPTIMA[kind, K]) < 0.3
    assert (tmp_path / "figure-1.png").stat().st_size > 10_000
    assert (tmp_path / "report.html").is_file()


def test_the_title_is_the_one_in_the_index():
    assert EXPERIMENTS["nce-bias"].title == TITLES["nce-bias"]
