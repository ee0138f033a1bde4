"""Identities of a classifier as p(x, y), by (38) to (41), and of the gradient that trains it."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from conftest import assert_within, each, mean_and_error, quadrature
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from metastable.api import sample
from metastable.core.batch import Batch
from metastable.energies import MLP, JointEnergy
from metastable.kernels import MALA
from metastable.methods import JEM, Context, Negatives, PersistentCD, Robust
from metastable.proposals import fit_gaussian

SCALES = (0.5, 1.0, 3.0, 20_000.0)


def network(classes: int = 3, dim: int = 2) -> nn.Module:
    return MLP(dim, hidden=(16,), outputs=classes, seed=2).double()


def points(n: int = 40, dim: int = 2) -> Tensor:
    return 2 * torch.randn((n, dim), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@each("o", SCALES)
def test_classes_add_up_to_the_marginal(o):
    energy, x = JointEnergy(network(), o), points()
    each = torch.stack([energy(x, y) for y in range(3)], 1)
    torch.testing.assert_close(torch.logsumexp(-each, 1), -energy(x), rtol=1e-12, atol=1e-10)


@each("o", SCALES)
def test_p_of_y_given_x_is_the_classifier_whatever_the_output_scale(o):
    energy, x = JointEnergy(network(), o), points()
    each = torch.stack([energy(x, y) for y in range(3)], 1)
    logits = energy.network(x)
    torch.testing.assert_close(torch.log_softmax(-each, 1), torch.log_softmax(logits, 1), rtol=0, atol=1e-9)
    torch.testing.assert_close(energy.log_prob_labels(x), torch.log_softmax(logits, 1), rtol=0, atol=1e-14)


@each("o", SCALES)
def test_the_joint_energy_is_that_of_41(o):
    energy, x = JointEnergy(network(), o), points()
    h = energy.network(x)
    for y in range(3):
        by_hand = -(o - 1) * torch.logsumexp(h, 1) - h[:, y]
        torch.testing.assert_close(energy(x, y), by_hand, rtol=1e-12, atol=1e-12)


# ---- class-conditional sampling against quadrature


class Bowls(nn.Module):
    """Logits b_y − (x − m_y)²/(2s²) in one dimension: for o = 1 a mixture of normals."""

    classes, event_shape = 3, (1,)
    m = torch.tensor([-2.0, 0.0, 1.5], dtype=torch.float64)
    b = torch.tensor([0.3, -0.2, 0.8], dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b - (x - self.m).square() / 2


class Mutant(JointEnergy):
    """Forgets that log p(y | x) already holds one log Σ e^h."""

    def joint(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.marginal(logits) - logits.gather(1, labels[:, None])[:, 0]


def moments(energy: JointEnergy, y: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and square of x given y, from chains: estimate, standard error, and the truth by quadrature."""
    start = 2 * torch.randn((4000, 1), generator=torch.Generator().manual_seed(y), dtype=torch.float64)
    x = sample(energy.given(y), 4000, kernel=MALA(0.4), steps=60, init=start, seed=y).x[:, 0]
    got, error = mean_and_error(torch.stack([x, x.square()], 1))

    def minus_log_p(grid: Tensor) -> Tensor:  # (41), written out
        h = energy.network(grid)
        return -(energy.output_scale - 1) * torch.logsumexp(h, 1) - h[:, y]

    grid = quadrature(minus_log_p, [(-12, 12, 4001)])
    truth = grid.mean(lambda x: torch.cat([x, x.square()], 1))
    return got, error, truth


@pytest.mark.parametrize("o", [1.0, 2.5])
def test_class_conditional_chains_have_the_moments_of_quadrature(o):
    for y in range(3):
        got, error, truth = moments(JointEnergy(Bowls(), o), y)
        assert_within(got, truth, error)


def test_a_wrong_joint_energy_does_not():
    got, error, truth = moments(Mutant(Bowls(), 1.0), 0)
    with pytest.raises(AssertionError):
        assert_within(got, truth, error)


def test_one_batch_of_chains_samples_several_classes():
    energy, labels = JointEnergy(Bowls(), 1.0), torch.tensor([2, 0])
    x = sample(energy.given(labels), 2000, kernel=MALA(0.4), steps=60, event_shape=1, seed=0).x
    for y, part in zip(labels.tolist(), x.view(2, 1000), strict=True):
        mean, error = mean_and_error(part)
        assert_within(mean, Bowls.m[y], error)


# ---- the gradient that trains it


def context(o: float) -> Context:
    x, rng = points(12), torch.Generator().manual_seed(3)
    energy = JointEnergy(network(), o)
    labels = torch.randint(3, (len(x),), generator=rng)
    return Context(energy, {"energy": energy}, x, fit_gaussian(x), rng, given=labels)


def gradient(loss: Tensor, energy: nn.Module) -> Tensor:
    made = torch.autograd.grad(loss, list(energy.parameters()))
    return torch.cat([g.flatten() for g in made])


def parts(o: float, source: Robust, method: JEM) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of JEM's loss, of its source's and of the cross-entropy, on the same negatives."""
    made = context(o)
    batch = Batch(made.data, made.given)
    negatives = (Negatives(points(9) + 0.5, torch.randn(9, generator=made.rng, dtype=torch.float64)),)
    own, _ = method.loss(made, (), "energy", batch, negatives)
    of_source, _ = source.loss(made, (), "energy", batch.x, negatives)
    entropy = cross_entropy(made.energy.network(batch.x), batch.given)
    return tuple(gradient(loss, made.energy) for loss in (own, of_source, entropy))  # pyright: ignore


@pytest.mark.parametrize("o", [1.0, 40.0, 20_000.0])
@pytest.mark.parametrize("beta_o", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("generative", [None, 0.3])
def test_the_gradient_is_one_over_o_times_the_sources_plus_that_of_the_cross_entropy(o, beta_o, generative):
    source = Robust(beta=min(beta_o / o, 0.9))
    own, of_source, entropy = parts(o, source, JEM(source=source, generative=generative))
    weight = 1 / o if generative is None else generative
    assert (own - weight * of_source - entropy).abs().max() < 1e-10 * (1 + own.abs().max())


@pytest.mark.parametrize("wrong", [1.0, 1 / 20])
def test_another_weight_or_a_β_that_is_scaled_twice_is_seen(wrong):
    o, source = 40.0, Robust(beta=0.0125)
    own, of_source, entropy = parts(o, source, JEM(source=source, generative=wrong))
    assert (own - of_source / o - entropy).abs().max() > 1e-3
    own, of_source, entropy = parts(o, source, JEM(source=replace(source, beta=0.0125 * o)))
    assert (own - of_source / o - entropy).abs().max() > 1e-3


@pytest.mark.parametrize("o", [1.0, 2.5])
def test_with_exact_negatives_it_is_the_gradient_of_the_objective(o):
    """−(1/o)·log p(x) − log p(y | x), with log Z by quadrature; at o = 1 that is −log p(x, y)."""
    x, labels = points(7, 1), torch.tensor([0, 2, 1, 1, 0, 2, 2])
    bowls = Bowls()
    shape = nn.Parameter(torch.tensor([0.2, -0.1, 0.4], dtype=torch.float64))
    energy = JointEnergy(_Shifted(bowls, shape), o)
    grid = quadrature(energy, [(-14, 14, 3001)])
    negatives = Negatives(grid.points, grid.log_mass.detach())
    made = Context(energy, {"energy": energy}, x, fit_gaussian(x), torch.Generator(), given=labels)
    loss, _ = JEM(source=PersistentCD()).loss(made, (), "energy", Batch(x, labels), negatives)
    log_p = (-energy(x) - grid.log_partition) / o + energy.log_prob_labels(x).gather(1, labels[:, None])[:, 0]
    (own,) = torch.autograd.grad(loss, shape)
    (truth,) = torch.autograd.grad(-log_p.mean(), shape)
    torch.testing.assert_close(own, truth, rtol=0, atol=1e-9)


class _Shifted(nn.Module):
    classes, event_shape = 3, (1,)

    def __init__(self, bowls: nn.Module, shift: nn.Parameter):
        super().__init__()
        self.bowls, self.shift = bowls, shift

    def forward(self, x: Tensor) -> Tensor:
        return self.bowls(x - self.shift.mean()) + self.shift


def test_values_of_the_data_that_are_known_are_those_of_the_energy():
    """The source sees E at the batch without evaluating it, and at every other point by evaluation."""
    made = context(5.0)
    seen: list[Tensor] = []

    class Spy(PersistentCD):
        def loss(self, context, state, player, batch, negatives):
            seen.extend((context.energy(batch), context.energy(batch.clone())))
            return super().loss(context, state, player, batch, negatives)

    calls: list[int] = []
    energy = copy.deepcopy(made.energy)
    energy.network.register_forward_hook(lambda module, given, out: calls.append(len(out)))
    batch = Batch(made.data, made.given)
    JEM(source=Spy()).loss(replace(made, energy=energy), (), "energy", batch, Negatives(points(4)))
    assert torch.equal(*seen)
    assert sorted(calls) == [4, 12, 12]  # negatives, the data once, and the copy that the spy asked for
