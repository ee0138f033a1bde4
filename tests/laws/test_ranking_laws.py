"""Laws of ranking noise contrast, in float64: (3.5)–(3.7), (4.3) and their gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from metastable.energies import MLP
from metastable.methods.base import Context, Nothing
from metastable.methods.ranking import ImplicitBC, Ranked, RankingNCE, ranking_loss
from metastable.proposals import Gaussian

B, K, D = 6, 4, 2
over = pytest.mark.parametrize


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Learned(nn.Module):
    """N(mean, e^{2·log_scale}) with both as parameters."""

    def __init__(self, dim: int = D):
        super().__init__()
        self.event_shape = (dim,)
        self.mean = nn.Parameter(torch.full((dim,), 0.3, dtype=torch.float64))
        self.log_scale = nn.Parameter(torch.full((dim,), 0.1, dtype=torch.float64))

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        noise = torch.randn((n, *self.event_shape), generator=rng, dtype=torch.float64)
        return self.mean + self.log_scale.exp() * noise

    def log_prob(self, x: Tensor) -> Tensor:
        white = (x - self.mean) / self.log_scale.exp()
        constant = self.log_scale.sum() + 0.5 * x.shape[1] * math.log(2 * math.pi)
        return -0.5 * white.square().sum(1) - constant


class Minus(nn.Module):
    """E = −log p of a proposal, plus a constant."""

    def __init__(self, proposal, constant: float = 0.0):
        super().__init__()
        self.proposal, self.constant = proposal, constant

    def forward(self, x: Tensor) -> Tensor:
        return self.constant - self.proposal.log_prob(x)


def context_of(energy: nn.Module, proposal: nn.Module) -> Context:
    rng = torch.Generator().manual_seed(1)
    players = {"energy": energy, "proposal": proposal}
    return Context(energy, players, normal(B, D), Gaussian(torch.zeros(D)), rng)


def losses(method: Ranked, energy: nn.Module, proposal: nn.Module) -> tuple[Tensor, dict, Tensor]:
    """Loss, metrics and negatives of one update."""
    context = context_of(energy, proposal)
    negatives, state, _ = method.negatives(context, Nothing(), context.data)
    loss, metrics = method.loss(context, state, "energy", context.data, negatives)
    return loss, metrics, negatives


@over("shared", [False, True])
@over("count", [1, 4, 100])
@over("constant", [0.0, -37.0])
def test_a_proposal_that_is_the_model_leaves_a_fair_guess(shared, count, constant):
    proposal = Learned()
    method = RankingNCE(negatives_per_datum=count, shared=shared)
    loss, metrics, _ = losses(method, Minus(proposal, constant), proposal)
    assert loss.item() == pytest.approx(math.log(count + 1), abs=1e-12)
    assert metrics["objective"].item() == pytest.approx(-math.log(count + 1), abs=1e-12)
    assert metrics["positive_weight"].item() == pytest.approx(count / (count + 1), abs=1e-12)
    assert metrics["ess_negatives"].item() == pytest.approx(1, abs=1e-12)
    biased = ImplicitBC(negatives_per_datum=count, shared=shared)
    assert abs(losses(biased, Minus(proposal, constant), proposal)[0].item() - math.log(count + 1)) > 1e-3


@dataclass(frozen=True)
class Uncorrected(RankingNCE):
    """A mutant: −log p_ξ with the wrong sign."""

    def scores(self, E: Tensor, log_prob: Tensor) -> Tensor:
        return log_prob - E


def test_a_wrong_sign_of_the_proposal_is_no_fair_guess():
    proposal = Learned()
    loss = losses(Uncorrected(negatives_per_datum=K), Minus(proposal), proposal)[0]
    assert abs(loss.item() - math.log(K + 1)) > 0.1


@over("method", [RankingNCE(negatives_per_datum=K), ImplicitBC(negatives_per_datum=K)])
def test_a_constant_in_the_energy_changes_nothing(method):
    proposal, energy = Learned(), MLP(D, hidden=(8,)).double()
    first = losses(method, energy, proposal)[0]
    with torch.no_grad():
        energy.head.bias += 11.0
    assert losses(method, energy, proposal)[0].item() == pytest.approx(first.item(), abs=1e-12)


@over("kind", [RankingNCE, ImplicitBC])
@over("shared", [False, True])
def test_loss_is_the_softmax_of_the_paper(kind, shared):
    """(3.7) and (4.3) written out: −log of the datum's share among itself and its negatives."""
    proposal, energy = Learned(), MLP(D, hidden=(8,)).double()
    method = kind(negatives_per_datum=K, shared=shared)
    loss, _, negatives = losses(method, energy, proposal)
    x = normal(B, D)
    total = 0.0
    for i in range(B):
        own = negatives.x if shared else negatives.x[i * K : (i + 1) * K]
        points = torch.cat([x[i : i + 1], own])
        scores = -energy(points) - (proposal.log_prob(points) if kind is RankingNCE else 0)
        total -= torch.log_softmax(scores, 0)[0] / B
    torch.testing.assert_close(loss, total, rtol=0, atol=1e-12)


@over("kind", [RankingNCE, ImplicitBC])
@over("shared", [False, True])
def test_gradient_is_a_weighted_contrast(kind, shared):
    """(1 − q₀)∇E(x₀) − Σ qₖ∇E(xₖ), averaged over the data."""
    proposal, energy = Learned(), MLP(D, hidden=(8,)).double()
    weights = [p for name, p in energy.named_parameters() if name != "head.bias"]  # whose gradient is zero
    method = kind(negatives_per_datum=K, shared=shared)
    loss, metrics, negatives = losses(method, energy, proposal)
    got = torch.autograd.grad(loss, weights)
    x, expected, data_weight = normal(B, D), [torch.zeros_like(w) for w in weights], 0.0
    for i in range(B):
        own = negatives.x if shared else negatives.x[i * K : (i + 1) * K]
        points = torch.cat([x[i : i + 1], own])
        scores = -energy(points) - (proposal.log_prob(points) if kind is RankingNCE else 0)
        q = torch.softmax(scores.detach(), 0)
        signed = torch.cat([(1 - q[:1]), -q[1:]]) / B
        data_weight += (1 - q[0].item()) / B
        for total, part in zip(expected, torch.autograd.grad(signed @ energy(points), weights), strict=True):
            total += part
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=1e-12)
    assert max(float(e.abs().max()) for e in expected) > 1e-3
    assert metrics["positive_weight"].item() == pytest.approx(data_weight, abs=1e-12)


def test_the_energys_loss_leaves_the_proposal_alone():
    """And the proposal's own loss is the negative log-likelihood of the data, which leaves the energy alone."""
    proposal, energy = Learned(), MLP(D, hidden=(8,)).double()
    method, context = RankingNCE(negatives_per_datum=K), context_of(energy, proposal)
    negatives, state, _ = method.negatives(context, Nothing(), context.data)
    assert method.turns(context) == ("energy", "proposal")
    loss, _ = method.loss(context, state, "energy", context.data, negatives)
    loss.backward()
    assert all(p.grad is None for p in proposal.parameters())
    assert any(p.grad is not None for p in energy.parameters())
    energy.zero_grad(set_to_none=True)
    nll, _ = method.loss(context, state, "proposal", context.data, negatives)
    nll.backward()
    assert all(p.grad is None for p in energy.parameters())
    white = (context.data - proposal.mean) / proposal.log_scale.exp()
    torch.testing.assert_close(proposal.mean.grad, (-white / proposal.log_scale.exp()).mean(0).detach())


def test_loss_is_exact_where_one_point_has_all_the_weight():
    """log(1 + e^s) for s = ±800, where a softmax in float64 has lost everything."""
    far = torch.tensor([800.0, -800.0], dtype=torch.float64, requires_grad=True)
    loss = ranking_loss(far, torch.zeros(2, 1, dtype=torch.float64))
    assert loss.tolist() == [0.0, 800.0]
    assert torch.autograd.grad(loss.sum(), far)[0].tolist() == [0.0, -1.0]


def test_the_model_mean_in_the_log_is_that_of_importance_sampling():
    proposal, energy = Learned(), MLP(D, hidden=(8,)).double()
    _, metrics, negatives = losses(RankingNCE(negatives_per_datum=K), energy, proposal)
    with torch.no_grad():
        E = energy(negatives.x)
    w = torch.exp(-E - negatives.log_prob)
    torch.testing.assert_close(metrics["energy_negatives"], (w * E).sum() / w.sum(), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        metrics["ess_negatives"], w.sum() ** 2 / (len(w) * w.square().sum()), rtol=0, atol=1e-12
    )
