"""`rnce-learned`: quadrature against closed forms, the adversary, Proposition 4.21, a small run."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from conftest import assert_within, mean_and_error

from metastable.experiments import EXPERIMENTS, TITLES
from metastable.experiments import rnce_game as game
from metastable.experiments import rnce_learned as learned
from metastable.experiments.base import reproduce

NORMAL = learned.Mixture(means=(1.0,), sds=(0.5,))
LOPSIDED = learned.LAWS["lopsided"]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_theorem_4_12_in_these_statistics():
    for K in (1, 4):
        curvature = learned.curvature_at(NORMAL, NORMAL.moments(), K)
        torch.testing.assert_close(curvature, K / (K + 1) * learned.fisher(NORMAL), rtol=1e-8, atol=1e-9)


def test_the_trace_of_proposition_4_21_is_that_of_no_mean():
    """3/σ², and not 3/σ² + 4μ²/σ⁴."""
    trace = float((learned.fisher(NORMAL).inverse() @ learned.slopes(NORMAL)).trace())
    assert trace == pytest.approx(3 / 0.5**2, rel=1e-8)
    assert trace < 0.2 * (3 / 0.5**2 + 4 / 0.5**4)


def test_the_fisher_distance_is_the_integral():
    theta = torch.tensor([[0.3, -0.2]], dtype=torch.float64)
    y, cell = learned.grid_of(NORMAL)
    slope = theta[0, 0] + 2 * theta[0, 1] * y
    integral = (cell * NORMAL.log_prob(y).exp() * slope.square()).sum()
    torch.testing.assert_close(learned.fisher_distance(theta, NORMAL)[0], integral)


def test_the_population_objective_is_that_of_draws():
    xi = torch.tensor([0.2, 0.7], dtype=torch.float64)
    y = LOPSIDED.sample((1, 40_000), rng())
    z = torch.randn((1, 40_000, 4), generator=rng(1), dtype=torch.float64)
    _, log_w = learned.points(LOPSIDED, y, z, xi[None])
    mean, error = mean_and_error(torch.log_softmax(log_w, 2)[0, :, 0])
    assert_within(learned.population(LOPSIDED, xi, 4), mean, error)
    assert abs(float(learned.population(LOPSIDED, xi + 1, 4) - mean)) > 10 * float(error)


def test_where_the_proposal_can_be_the_law_the_adversary_is_the_law():
    """Proposition 4.13: the least is −log(K + 1), and there."""
    moments = NORMAL.moments()
    assert float(learned.population(NORMAL, moments, 4)) == pytest.approx(-math.log(5), abs=1e-9)
    torch.testing.assert_close(learned.adversary(NORMAL, 4), moments, rtol=0, atol=1e-6)


def test_no_neighbour_of_the_adversary_is_worse_for_the_energy():
    found = learned.adversary(LOPSIDED, 4)
    value = learned.population(LOPSIDED, found, 4)
    for step in ((0.1, 0.0), (-0.1, 0.0), (0.0, 0.1), (0.0, -0.1)):
        assert learned.population(LOPSIDED, found + torch.tensor(step, dtype=torch.float64), 4) > value
    assert learned.population(LOPSIDED, LOPSIDED.moments(), 4) > value


def test_the_answer_on_many_data_is_the_adversary_of_the_truth():
    y = LOPSIDED.sample((2, 5000), rng(3))
    theta = torch.zeros(2, 2, dtype=torch.float64)
    found = learned.respond(LOPSIDED, y, theta, 4, LOPSIDED.moments(), both=True)
    truth = learned.adversary(LOPSIDED, 4)
    assert float((found - truth).abs().max()) < 0.2
    one = learned.respond(LOPSIDED, y, theta, 4, LOPSIDED.moments(), both=False)
    assert torch.equal(one[:, 1], LOPSIDED.moments()[1].expand(2))


def test_a_proposal_far_away_leaves_an_adversary_where_it_is():
    far = game.Play(adversarial=True, theta=(0.5, 0.0), xi=(12.0, 0.0))
    stuck, comes = (
        game.play(LOPSIDED, how, 20, 0, runs=2, batch=32)
        for how in (far, dataclasses.replace(far, adversarial=False))
    )
    assert float((stuck[-1, :, 2] - 12.0).abs().max()) < 0.5 * float((comes[-1, :, 2] - 12.0).abs().min())


def test_a_small_run_gives_every_row_and_the_figure(tmp_path):
    small = {"repeats": 20, "n": 100, "repeats_game": 2, "n_game": 100, "counts": (4,), "updates": 8}
    small["repeats_likelihood"] = 3
    experiment = dataclasses.replace(
        learned.EXPERIMENT, scales={"tiny": {**small, "tolerance": 1.0, "tolerance_game": 2.0}}
    )
    rows = {row.metric: row for row in reproduce(experiment, "tiny", 0, tmp_path, device="cpu").rows}
    assert rows["n_variance/learned/K=4"].oracle == pytest.approx(1.25)
    ours = ("n_variance/rare/K=4/likelihood", "adversary_mean/rare/K=4", "theta_error/near/adversary")
    assert all(rows[name].paper is None and rows[name].oracle is not None for name in ours)
    assert rows["fisher_trace/mu=1/sigma=1"].paper == 7
    assert rows["adversary_gain/lopsided/K=1"].value == pytest.approx(0.039, abs=0.001)
    assert rows["adversary_gain/rare/K=4"].value == pytest.approx(-0.105, abs=0.001)
    assert (tmp_path / "game.png").stat().st_size > 10_000


def test_the_error_of_a_variance_is_that_of_its_repeats():
    theta = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]], dtype=torch.float64)
    eye = torch.eye(2, dtype=torch.float64)
    rows = {row.metric: row for row in learned.law_rows("x", theta, 10, eye, eye, 1.0)}
    assert rows["n_variance/x"].value == pytest.approx(70 / 3)
    assert rows["n_variance/x"].oracle == 1
    assert rows["n_variance_se/x"].value == pytest.approx(
        math.sqrt((18.3333**2 + 3.3333**2 + 21.6667**2) / 6), rel=1e-4
    )


def test_the_title_is_the_one_in_the_index():
    assert EXPERIMENTS["rnce-learned"].title == TITLES["rnce-learned"]
