"""A Boltzmann machine with hidden units against enumeration of all of its units."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_within, z_scores
from torch import Tensor

import metastable as ms
from metastable.core.errors import ConfigError
from metastable.energies import BoltzmannMachine, HiddenBoltzmannMachine
from metastable.energies.build import BoltzmannConfig
from metastable.kernels import Gibbs, run_chain
from metastable.proposals import Signs
from metastable.proposals.signs import state_numbers, states

F64 = torch.float64


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def machine() -> HiddenBoltzmannMachine:
    made = HiddenBoltzmannMachine(4, 3, scale=0.6, seed=2).double()
    with torch.no_grad():
        made.bias.copy_(0.4 * torch.randn(7, generator=rng(1), dtype=F64))
    return made


def whole(machine: HiddenBoltzmannMachine) -> BoltzmannMachine:
    """The machine in which all units are seen."""
    return BoltzmannMachine.of(machine.weight.detach(), machine.bias.detach())


def test_probabilities_are_the_margins_of_all_units(machine):
    joint = whole(machine).exact_probabilities().view(16, 8)  # visible units first, the last changes fastest
    torch.testing.assert_close(machine.exact_probabilities(), joint.sum(1), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(machine.log_partition(), whole(machine).log_partition(), rtol=1e-12, atol=0)
    h = states(3)
    direct = torch.stack([-torch.logsumexp(-machine.joint_energy(v.expand(8, -1), h), 0) for v in states(4)])
    torch.testing.assert_close(machine(states(4)), direct, rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", ["fixed", "random"])
def test_a_sweep_leaves_the_model_invariant_and_moves_it(machine, order):
    n, p = 40_000, machine.exact_probabilities()
    with torch.no_grad():
        x = machine.sample(n, rng(3)).double()
        y = run_chain(Gibbs(order), machine, x, 1, rng(4)).state.x
    found = torch.bincount(state_numbers(y), minlength=16) / n
    assert_within(found, p, torch.sqrt(p * (1 - p) / n))
    assert float((y != x).double().mean()) > 0.1


def test_a_sweep_with_hidden_units_at_random_is_seen(machine):
    """The mutant draws h whatever v is."""
    n, p = 40_000, machine.exact_probabilities()
    with torch.no_grad():
        x = machine.sample(n, rng(3)).double()
        blind = machine.structure()
        V = blind.visible
        h = states(3)[torch.randint(0, 8, (n,), generator=rng(5))]
        given = x
        for i in range(V):
            field = given @ blind.weight[:V, i] + blind.bias[i] + h @ blind.weight[V:, i]
            up = torch.rand(n, generator=rng(6 + i), dtype=F64) < torch.sigmoid(2 * field)
            given = given.clone()
            given[:, i] = torch.where(up, 1.0, -1.0).double()
    found = torch.bincount(state_numbers(given), minlength=16) / n
    assert float(z_scores(found, p, torch.sqrt(p * (1 - p) / n)).abs().max()) > 8


def test_a_sweep_holds_what_is_clamped(machine):
    x, free = machine.sample(50, rng(1)).double(), torch.tensor([True, False, True, False])
    u = torch.rand((50, machine.sweep_uniforms), generator=rng(2), dtype=F64)
    y = machine.sweep(x, u, free)
    assert torch.equal(y[:, ~free], x[:, ~free])
    assert not torch.equal(y[:, free], x[:, free])


def test_the_path_begins_at_the_reference_and_ends_at_the_energy(machine):
    fields, s = 0.5 * torch.randn(4, generator=rng(7), dtype=F64), states(4)
    torch.testing.assert_close(
        machine.tempered(fields, 0.0)(s), -Signs(fields).log_prob(s), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(machine.tempered(fields, 1.0)(s), machine(s), rtol=0, atol=1e-12)


def parity(n: int) -> Tensor:
    """Three units whose product is +1: pairs of them are independent."""
    x = torch.where(torch.rand((n, 3), generator=rng(8)) < 0.5, 1.0, -1.0)
    x[:, 2] = x[:, 0] * x[:, 1]
    return x


def test_hidden_units_learn_what_pairs_cannot_see():
    """Parity: no machine of visible units comes nearer than log 2; one hidden unit already does."""
    x, law = parity(400), torch.tensor([0.0, 0.25, 0.25, 0.0, 0.25, 0.0, 0.0, 0.25], dtype=F64)
    law = torch.where(states(3).prod(1) > 0, 0.25, 0.0).double()
    found = {}
    for name, energy in (
        ("seen", BoltzmannMachine(3, 0.3)),
        ("hidden", HiddenBoltzmannMachine(3, 2, 0.5, seed=1)),
    ):
        run = ms.fit(
            energy,
            x,
            ms.methods.ExactDraws(walkers=400),
            steps=150,
            learning_rate=0.05,
            units="none",
            evaluate=False,
        )
        p = run.energy.exact_probabilities()
        found[name] = float((law[law > 0] * (law[law > 0] / p[law > 0]).log()).sum())
    assert found["seen"] > 0.65
    assert found["hidden"] < 0.2


def test_more_hidden_units_than_can_be_listed_are_refused_with_how_many_can():
    with pytest.raises(ConfigError, match="hidden: must be at most 12"):
        HiddenBoltzmannMachine(4, 13)
    with pytest.raises(ConfigError, match=r"energy\.hidden: must be at most 12"):
        BoltzmannConfig(hidden=20)
    built = BoltzmannConfig(hidden=2).build(parity(50), 0)
    assert isinstance(built, HiddenBoltzmannMachine)
    assert built.hidden == 2
