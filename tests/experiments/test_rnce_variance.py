"""`rnce-variance`: the optimum of the library's loss, quadrature against closed forms and draws, a small run."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import assert_within, mean_and_error, z_scores

from metastable.core.errors import MetastableError
from metastable.experiments import EXPERIMENTS, TITLES
from metastable.experiments import rnce_variance as variance
from metastable.experiments.base import reproduce
from metastable.methods.ranking import ranking_loss

over = pytest.mark.parametrize
WIDE, SHIFTED = variance.MISMATCHED["wide"], variance.MISMATCHED["shifted"]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@over("proposal", [variance.MATCHED, WIDE, SHIFTED])
def test_newtons_estimate_is_the_optimum_of_the_ranking_loss(proposal):
    y = variance.draw(3, 50, 4, proposal, rng())
    theta = variance.estimate(y, variance.offsets(y, proposal)).requires_grad_(True)
    r = -0.5 * (y - theta[:, None, None]).square().sum(-1) - proposal.log_prob(y)
    losses = ranking_loss(r[..., 0].flatten(), r[..., 1:].flatten(0, 1))
    (gradient,) = torch.autograd.grad(losses.sum(), theta)
    assert float(gradient.abs().max()) < 1e-8


def test_an_iteration_that_stops_early_is_an_error():
    y = variance.draw(3, 50, 4, variance.MATCHED, rng())
    with pytest.raises(MetastableError, match="has not converged"):
        variance.estimate(y, variance.offsets(y, variance.MATCHED), limit=1)


def test_theorem_4_12_by_quadrature():
    K = torch.tensor(variance.COUNTS)[:, None, None]
    V = variance.asymptotic_variance(variance.MATCHED, variance.COUNTS)
    assert torch.allclose(V, (1 + 1 / K) * torch.eye(2, dtype=torch.float64), atol=1e-10)


@over("proposal", [WIDE, SHIFTED])
@over("K", [1, 4])
def test_quadrature_agrees_with_draws(proposal, K):
    curvature = torch.linalg.inv(variance.asymptotic_variance(proposal, (K,))[0])
    assert_within(curvature.diagonal(), *by_sampling(proposal, K))


def by_sampling(proposal, K):
    """The diagonal of −∇²L at the truth and its standard error, from draws."""
    y = variance.draw(1, 20_000, K, proposal, rng(K))[0]
    q = torch.softmax(variance.offsets(y, proposal), 1)[..., None]
    return mean_and_error((q * y.square()).sum(1) - (q * y).sum(1).square())


def test_quadrature_of_another_proposal_does_not_agree():
    curvature = torch.linalg.inv(variance.asymptotic_variance(variance.MATCHED, (4,))[0]).diagonal()
    assert float(z_scores(curvature, *by_sampling(SHIFTED, 4)).min()) > 8


def test_fresh_negatives_lose_the_price_of_kept_ones():
    """At K = 1 kept negatives double the variance; fresh ones at 20 steps cost a twentieth."""
    kept = variance.estimates(1500, 60, 1, variance.MATCHED, 1)
    fresh = variance.fresh_estimates(1500, 60, 1, 20, 2)
    for theta, truth in ((kept, 2.0), (fresh, 1.05)):
        mean, error = mean_and_error(60 * theta.square().mean(1))
        assert (
            abs(float(mean) - truth) < 5 * float(error) + 0.05 * truth
        )  # the limit n → ∞ is 5 % away at n = 60


def test_the_law_of_the_divergence_is_told_from_another_scale():
    theta = variance.estimates(2000, 100, 4, variance.MATCHED, 3)
    scaled = 2 * 100 * variance.kl_to_truth(theta)
    assert variance.ks_p_value(scaled / 1.25, 2) > 1e-3
    assert variance.ks_p_value(scaled, 2) < 1e-3  # without 1 + 1/K
    assert variance.ks_p_value(scaled / 1.25, 3) < 1e-3


def test_a_small_run_gives_every_row_and_the_figure(tmp_path):
    small = {"repeats": 100, "n": 40, "n_mismatched": 40, "fresh_steps": 3}
    experiment = dataclasses.replace(variance.EXPERIMENT, scales={"tiny": small})
    rows = {row.metric: row for row in reproduce(experiment, "tiny", 0, tmp_path, device="cpu").rows}
    for name in ("kept/K=1", "kept/K=16", "fresh/K=4", "wide/K=16", "shifted/K=4"):
        assert (rows[f"variance_error/{name}"].relation, rows[f"variance_error/{name}"].target) == ("<=", 0.1)
        assert rows[f"variance_error/{name}"].value < 0.6
        assert rows[f"n_variance/{name}"].paper is None
        assert rows[f"n_variance/{name}"].oracle is not None
    assert rows["chi2_p_value/K=4"].target == 1e-3
    assert (tmp_path / "variance.png").stat().st_size > 10_000


def test_the_title_is_the_one_in_the_index():
    assert EXPERIMENTS["rnce-variance"].title == TITLES["rnce-variance"]
