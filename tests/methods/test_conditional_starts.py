"""Starts in proportion to exp(−E)/q: shares of branches by closed form, effective draws, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import assert_within, z_limit

from metastable.core.errors import ConfigError, InputError
from metastable.core.types import bind
from metastable.methods import conditional_starts
from metastable.methods.conditional_sampling import sample_from_proposal
from metastable.methods.conditional_starts import CANDIDATES, CANDIDATES_ODE, LEAST_ODE, draw_starts
from metastable.proposals import Gaussian, InterpolantFlow, Uniform

over = pytest.mark.parametrize
GIVEN = torch.tensor([[-2.4], [0.0], [2.4]])
Q = Gaussian(torch.zeros(1), 2.0)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def branches(y: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """−log[w N(y; −2, 0.2²) + (1 − w) N(y; 2, 0.2²)] with w = sigmoid(given): shares .083, .5 and .917."""
    left, right = (-0.5 * ((y[..., 0] - m) / 0.2).square() for m in (-2.0, 2.0))
    return -torch.logaddexp(given.sigmoid().log() + left, (-given).sigmoid().log() + right)


def left_share(y: torch.Tensor) -> torch.Tensor:
    return (y[..., 0] < 0).double().mean(1)


@over("q", [Q, Gaussian(torch.ones(1), 1.5), Uniform(torch.tensor([-4.0]), torch.tensor([5.0]))], ids=str)
def test_branches_have_the_shares_of_the_model(q):
    starts = draw_starts(bind(branches, GIVEN), q, 1000, rng(), CANDIDATES)
    share = GIVEN.sigmoid()[:, 0].double()
    error = (
        share * (1 - share) / starts.ess
    ).sqrt() + 1e-3  # of weighted draws, and one walker of a thousand
    assert_within(left_share(starts.y), share, error)
    assert float((left_share(starts.y) - share).abs().max()) < 0.03
    width = (starts.y.abs() - 2).std((1, 2))
    assert float((width / 0.2 - 1).abs().max()) < 0.1


@over("seed", range(4))
def test_chains_keep_them_by_default(seed):
    walkers = sample_from_proposal(branches, Q, 1000, GIVEN, rng(seed), steps=20)
    assert float((left_share(walkers.x) - GIVEN.sigmoid()[:, 0]).abs().max()) < 0.03
    assert walkers.info["warnings"] == ()


@over("wrong", ["own draws", "no density", "sign"])
def test_other_weights_have_other_shares(monkeypatch, wrong):
    """Mutants: the paper's starts, weights exp(−E) without q (here a q that leans to one side), and q·exp(−E)."""
    lean = Gaussian(torch.ones(1), 1.5)
    if wrong == "own draws":
        walkers = sample_from_proposal(branches, Q, 1000, GIVEN, rng(), steps=20, candidates=1)
        assert "start_ess" not in walkers.info
    else:
        right = conditional_starts.sample_and_log_prob_given
        factor = 0.0 if wrong == "no density" else -1.0
        scaled = lambda *a: (lambda y, log_q: (y, factor * log_q))(*right(*a))  # noqa: E731
        monkeypatch.setattr(conditional_starts, "sample_and_log_prob_given", scaled)
        walkers = sample_from_proposal(branches, lean, 1000, GIVEN, rng(), steps=20)
    assert float((left_share(walkers.x) - GIVEN.sigmoid()[:, 0]).abs().max()) > 0.1


@over("s", [0.1, 0.5, 1.0])
def test_effective_draws_are_those_of_the_closed_form(s):
    """q = N(0, 1), model N(0, s²): ESS/M = (E w)²/E w² = s⁻¹·√(2s² − s⁴)/… by Gaussian integrals."""

    def narrow(y, given):
        return 0.5 * (y / s).square().sum(-1)

    starts = draw_starts(bind(narrow, torch.zeros(2, 1)), Gaussian(torch.zeros(1)), 4000, rng())
    first = s  # E w = ∫ exp(−y²/2s²) dy = s√(2π)
    precision = 2 / s**2 - 1  # of w² q
    second = math.sqrt(2 * math.pi) / math.sqrt(precision) / math.sqrt(2 * math.pi)
    fraction = first**2 / second
    assert torch.allclose(
        starts.ess / starts.draws, torch.full((2,), fraction, dtype=torch.float64), rtol=0.03
    )


def test_contexts_in_parts_and_large_calls_are_bounded(monkeypatch):
    monkeypatch.setattr(conditional_starts, "ROWS", 5000)
    starts = draw_starts(bind(branches, GIVEN.repeat(4, 1)), Q, 100, rng())  # 3200 a context: one at a time
    assert starts.y.shape == (12, 100, 1)
    assert starts.rows == 12 * 3200
    share = GIVEN.sigmoid()[:, 0].double().repeat(4)
    limit = z_limit(12) * (share * (1 - share) / starts.ess).sqrt() + 0.02
    assert bool(((left_share(starts.y) - share).abs() < limit).all())
    assert draw_starts(bind(branches, GIVEN), Q, 1000, rng()).draws == 5000
    assert draw_starts(bind(branches, GIVEN), Q, 7000, rng()).draws == 7000


def test_a_flow_with_an_ode_is_asked_for_fewer_draws():
    flow = InterpolantFlow(1, 1, width=4, steps=2, scored=2)
    assert draw_starts(bind(branches, GIVEN), flow, 5, rng()).draws == LEAST_ODE
    assert draw_starts(bind(branches, GIVEN), flow, 100, rng()).draws == 100 * CANDIDATES_ODE


def test_a_density_that_is_an_estimate_weighs_nothing():
    class Estimate(Gaussian):
        biased = True

    starts = draw_starts(bind(branches, GIVEN), Estimate(torch.zeros(1), 2.0), 50, rng())
    assert (starts.ess, starts.rows) == (None, 0)
    assert torch.equal(starts.y.flatten(0, 1), Q.sample(150, rng()))


def test_few_effective_draws_are_said():
    far = Gaussian(torch.full((1,), 9.0), 1.0)
    walkers = sample_from_proposal(branches, far, 200, GIVEN, rng(), steps=5)
    (words,) = walkers.info["warnings"]
    assert "few draws of the proposal carry the weight" in words
    assert walkers.info["start_ess"] < 100
    assert walkers.of(1).info["start_ess"] == float(walkers.info["start_ess_given"][1])
    assert bool((walkers.info["start_ess_given"] < 50).all())


def test_energies_that_choose_nothing_are_refused_with_their_context():
    def outside(y, given):
        return torch.where(given < 1, y[..., 0].square(), torch.full_like(y[..., 0], math.inf))

    with pytest.raises(InputError, match=r"none of 3200 draws for context 2 .* finite energy"):
        sample_from_proposal(outside, Q, 100, GIVEN, rng())
    with pytest.raises(InputError, match=r"weight exp\(−E\)/q of .* not finite, first for context 1"):
        sample_from_proposal(lambda y, given: (y - given[:, None])[..., 0] / given, Q, 100, GIVEN, rng())
    with pytest.raises(ConfigError, match="candidates: must be an integer of at least 1, got 0"):
        sample_from_proposal(branches, Q, 100, GIVEN, rng(), candidates=0)


def test_a_region_without_mass_is_never_a_start():
    def half(y, given):
        return torch.where(y[..., 0] > 0, y[..., 0].square(), torch.full_like(y[..., 0], math.inf))

    assert float(draw_starts(bind(half, GIVEN), Q, 100, rng()).y.min()) > 0
