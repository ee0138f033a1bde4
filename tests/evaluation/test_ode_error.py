"""log Z from draws of continuous flows: the error that their ODE leaves is small, known, and in the error bar."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from conftest import z_limit
from torch import Tensor, nn

from metastable.core.batch import Batch
from metastable.evaluation.conditional import conditional_log_prob, log_partition_given
from metastable.methods import RankingNCE
from metastable.methods.base import Context, Nothing
from metastable.proposals import DiffusionEnergy, Gaussian, InterpolantFlow, MixtureField
from metastable.proposals.diffusion import coefficients
from metastable.runs.run import Run
from metastable.summary import contexts
from metastable.walkers.importance import importance_log_partition, importance_walkers

MEANS = torch.tensor([[1.0, 1.0], [-1.0, 0.5], [0.3, -1.2]])
SD = 0.05
GIVEN = torch.tensor([[0.0], [1.0]])
TRAINED = {"steps": 16, "scored": 9}
"""As coarse as flows are trained with; log Z is then off by about 0.09."""
EXACT = MixtureField(MEANS, torch.full((3,), SD))


class Truth(nn.Module):
    """−log of the mixture, whatever the context: log Z = 0."""

    event_shape = (2,)

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        return -EXACT.log_prob(x)


def flow(**settings: int) -> InterpolantFlow:
    """The exact flow to the mixture, whose only error is that of its ODE."""
    return InterpolantFlow(2, field=EXACT, **settings)


def run_of(energy: nn.Module, **players: nn.Module) -> Run:
    config = {"event_shape": [2], "context_shape": [1]}
    return Run(energy, "ranking-nce", [], None, None, config=config, players=players)


# ---- the error bar


def test_an_ode_that_is_too_coarse_is_in_the_error_bar_and_said():
    z = log_partition_given(Truth(), flow(**TRAINED), GIVEN, 1024)
    assert float((z.value.abs() / z.spread).min()) > 10  # draws alone would be sure of a wrong number
    ratio = z.ode_shift / -z.value
    assert 0.6 < float(ratio.min()) <= float(ratio.max()) < 1.5
    assert bool((z.value.abs() < 2 * z.std_error).all())
    assert "ODE is solved too coarsely" in z.warnings[0]
    assert not bool(z.trusted.any())
    assert bool(replace(z, std_error=z.std_error + torch.inf).spread.isinf().all())


def test_the_error_falls_with_the_square_of_the_steps_and_is_known_by_then():
    z = log_partition_given(Truth(), flow(steps=64, scored=33), GIVEN, 1024)
    assert torch.allclose(z.ode_shift, -z.value, rtol=0.25)
    assert z.warnings == ()  # below a hundredth it is in the bar only
    assert bool((z.value.abs() < 2 * z.std_error).all())


def test_a_density_without_an_ode_has_no_such_error():
    z = log_partition_given(Truth(), Gaussian(torch.zeros(2), 1.5), GIVEN, 256)
    assert z.ode_shift is None
    assert z.spread is z.std_error


def test_the_error_of_a_solver_does_not_average_out_over_contexts():
    given = torch.arange(20.0)[:, None]
    x = EXACT.means[:1].expand(20, 2)
    found = conditional_log_prob(Truth(), flow(**TRAINED), x, given, 512)
    _, error = found.mean_and_error()
    assert error >= float(found.log_partition.ode_shift.mean()) > 0.06
    assert abs(float(found.value.mean()) - float(EXACT.log_prob(x[:1]))) < 2 * error


# ---- where a run uses it


def test_runs_solve_the_ode_of_their_proposal_finely():
    run = run_of(Truth(), proposal=flow(**TRAINED))
    z = run.log_partition_given(GIVEN, draws=1024)
    assert float(z.value.abs().max()) < 0.004
    assert bool((z.value.abs() < z_limit(2) * z.std_error).all())
    x = MEANS[:2] + 0.03
    assert torch.allclose(run.log_prob(x, GIVEN, draws=512), EXACT.log_prob(x), atol=0.004)
    proposal = run.players["proposal"]
    assert (proposal.steps, proposal.scored) == (16, 9)  # a copy was refined
    assert (run.importance_density().steps, run.importance_density().scored) == (128, 64)
    assert run_of(Truth(), proposal=flow(steps=500, scored=100)).importance_density().steps == 500


def test_the_likelihood_of_a_finished_run_does_too(monkeypatch):
    monkeypatch.setattr(contexts, "DRAWS_ODE", 1024)
    run = run_of(Truth(), proposal=flow(**TRAINED))
    x = EXACT.means.repeat(10, 1) + SD
    found = contexts.likelihoods(run, Batch(x, GIVEN.repeat(15, 1)), 0)
    assert found is not None
    gap = found.value - EXACT.log_prob(x[:1]).double()
    assert float(gap.abs().max()) < 0.004


def test_runs_without_contexts_do_too():
    energy, coarse = Truth(), flow(**TRAINED)
    walkers = importance_walkers(energy, coarse, 2048)
    z = importance_log_partition(walkers)
    assert walkers.info["ode_shift"].value > 0.06
    assert z.std_error >= walkers.info["ode_shift"].value
    assert abs(z.value) > 0.06
    assert "ODE is solved too coarsely" in z.warnings[0]
    method = RankingNCE(proposal=coarse, walkers=2048)
    players = {"energy": energy, "proposal": coarse}
    context = Context(energy, players, EXACT.means, Gaussian(torch.zeros(2)), torch.Generator())
    z = method.log_partition(context, Nothing())
    assert abs(z.value) < 0.004
    assert z.warnings == ()
    assert abs(z.value) < z_limit() * z.std_error


# ---- Diffusion-φ


def exact_potential(u: Tensor, given: Tensor | None, c_noise: Tensor) -> Tensor:
    """φ of the mixture with noise: r of (B.1) is then log Σ_k N(y; μ_k, s² I) up to log 2π, s² = SD² + σ²."""
    sigma = torch.exp(4 * torch.as_tensor(c_noise))
    c = coefficients(sigma, 0.5)
    y = u / c.inside[..., None]
    s2 = (SD**2 + sigma.square())[..., None]
    away = (y[..., None, :] - 0.5 * MEANS).square().sum(-1)
    log_p = torch.logsumexp(-0.5 * away / s2 - s2.log(), -1)
    return c.inside / c.out * ((1 - c.skip) * y.square().sum(-1) / 2 + sigma.square() * log_p)


def test_own_draws_of_a_diffusion_are_solved_finely():
    model = DiffusionEnergy(2, 1, potential=exact_potential, sigma_rel=0.005, steps=512)
    run = run_of(model)
    assert (run.importance_density().steps, run.importance_density().scored) == (192, 33)
    z = run.log_partition_given(GIVEN[:1], draws=1024)
    away = abs(float(z.value) - math.log(6 * math.pi))
    assert away < 0.007  # with 64 steps 0.017
    assert away < z_limit() * float(z.std_error) < 0.02
