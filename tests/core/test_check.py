"""The check names what is wrong with each kind of callable, and lets every good one through."""

from __future__ import annotations

import pytest
import torch
from conftest import each
from torch import Tensor, nn

from metastable.core.errors import EnergyError, InputError, MetastableError
from metastable.energies import MLP, ConvNet, check_energy

ROWS = torch.tensor([[0.5, -1.0], [2.0, 0.3], [-0.7, 1.1], [0.1, 0.2]])


def quadratic(x: Tensor) -> Tensor:
    return 0.5 * x.square().flatten(1).sum(1)


def raises(x: Tensor) -> Tensor:
    raise KeyError("the weights")


def at_infinity(x: Tensor) -> Tensor:
    return torch.where(x[:, 0] > 1, torch.inf, quadratic(x))


def root_at_zero(x: Tensor) -> Tensor:
    return (x - ROWS[0]).square().sum(1).sqrt()


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return quadratic(x)


class Forgetful(nn.Module):
    """Its output has a gradient, but only towards its own parameter."""

    def __init__(self):
        super().__init__()
        self.level = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.level * quadratic(x.detach())


def last_layer(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Linear(2, 1), nn.Flatten(0))


BAD = {
    "column": (lambda x: quadratic(x)[:, None], r"returned shape \(3, 1\).*squeeze\(-1\)"),
    "scalar": (lambda x: quadratic(x).mean(), "returned a scalar.*mean or sum"),
    "wrong length": (lambda x: quadratic(x)[:2], r"returned shape \(2,\) for input \(3, 2\)"),
    "one per coordinate": (lambda x: x.square(), r"returned shape \(3, 2\)"),
    "sum over the batch": (lambda x: x.square().sum(0), r"returned shape \(2,\)"),
    "infinite": (at_infinity, "finite on the data, got inf on row 1"),
    "nan": (lambda x: torch.log(quadratic(x) - 100), "finite on the data, got nan on row 0"),
    "integer": (lambda x: quadratic(x).round().long(), "floating point numbers, got torch.int64"),
    "not a tensor": (lambda x: quadratic(x).tolist(), "must return a torch.Tensor.*got list"),
    "none": (lambda x: None, "must return a torch.Tensor.*got NoneType"),
    "raises": (raises, r"raised KeyError on a batch of shape \(3, 2\): 'the weights'"),
    "wrong event": (MLP(5), r"raised RuntimeError on a batch of shape \(3, 2\)"),
    "class": (MLP, r"the class MLP; pass an instance, MLP\(…\)"),
    "not callable": ([1.0, 2.0], "must be callable.*got list"),
    "string": ("mlp", "must be callable.*got str"),
    "constant": (lambda x: torch.zeros(len(x)), "does not depend on x"),
    "no_grad inside": (without_gradient, r"detach\(\), .item\(\), numpy call or torch.no_grad\(\)"),
    "detached": (lambda x: quadratic(x).detach(), r"detach\(\)"),
    "detached input": (Forgetful(), "no gradient reaches the input"),
    "infinite gradient": (root_at_zero, "gradient in x is not finite"),
    "batch norm": (last_layer(nn.BatchNorm1d(2)), "one row alone raised ValueError.*BatchNorm.*eval mode"),
    "batch mean": (lambda x: quadratic(x - x.mean(0)), "changes with the other rows.*BatchNorm and dropout"),
    "squeeze of everything": (
        lambda x: quadratic(x)[:, None].squeeze(),
        r"shape \(\) for a batch of one row",
    ),
}


@each("name", BAD)
def test_each_fault_is_named(name):
    energy, message = BAD[name]
    with pytest.raises(EnergyError, match=f"(?s)^energy: .*{message}"):
        check_energy(energy, ROWS)


def test_the_error_is_a_value_error_with_its_cause():
    with pytest.raises(ValueError) as raised:
        check_energy(raises, ROWS)
    assert isinstance(raised.value, MetastableError)
    assert isinstance(raised.value.__cause__, KeyError)


def test_dropout_is_found_and_eval_mode_is_not_refused():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        energy = last_layer(nn.Linear(2, 64), nn.Dropout(0.5), nn.Linear(64, 2))
    with pytest.raises(EnergyError, match="changes with the other rows"):
        check_energy(energy, ROWS)
    check_energy(energy.eval(), ROWS)
    check_energy(last_layer(nn.BatchNorm1d(2)).eval(), ROWS)


IMAGES = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
GOOD = {
    "function": (quadratic, ROWS),
    "lambda": (lambda x: x[:, 0] ** 2, ROWS),
    "module": (MLP(2, (4,)), ROWS),
    "float64": (MLP(2, (4,)).double(), ROWS.double()),
    "one row": (MLP(2, (4,)), ROWS[:1]),
    "image function": (quadratic, IMAGES),
    "image module": (ConvNet((1, 8, 8)), IMAGES),
    "three numbers an event": (quadratic, torch.ones(4, 3)),
    "bound method": (MLP(2, (4,)).forward, ROWS),
}


@pytest.mark.parametrize("name", GOOD)
def test_every_good_energy_passes_and_is_returned(name):
    energy, example = GOOD[name]
    assert check_energy(energy, example) is energy
    assert not example.requires_grad


def test_the_check_leaves_no_gradient_behind():
    energy = MLP(2, (4,))
    check_energy(energy, ROWS)
    assert all(p.grad is None for p in energy.parameters())


@pytest.mark.parametrize("example", [ROWS.long(), ROWS[:0], torch.tensor(1.0), [[1.0, 2.0]]])
def test_a_bad_example_is_named(example):
    with pytest.raises(InputError, match=r"^example: must be a floating point tensor"):
        check_energy(quadratic, example)
