"""Gradients of energies go into one full graph, keep it while parameters move, and can be differentiated again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from metastable.core.types import energy_and_grad, traced_energy_and_grad
from metastable.core.units import Coordinates, Units
from metastable.energies import MLP, ConvNet, on_reference, spectral_norm
from metastable.energies.in_units import in_data_units, in_training_units

over = pytest.mark.parametrize
ROWS = torch.randn((50, 2), generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 30.0])
UNITS = Coordinates(Units.fit(ROWS, "whiten"))
ENERGIES = {
    "mlp": lambda: MLP(2, (8,), seed=1),
    "tilted": lambda: on_reference(MLP(2, (8,), seed=1), ROWS, zero_start=False),
    "spectral": lambda: spectral_norm(MLP(2, (8,), seed=1), scale=2.0, learn_scale=True),
    "data-units": lambda: in_data_units(MLP(2, (8,), seed=1), UNITS),
    "training-units": lambda: in_training_units(MLP(2, (8,), seed=1), UNITS),
    "convnet": lambda: ConvNet((1, 8, 8), seed=1),
}


def problem(name: str) -> tuple[nn.Module, Tensor]:
    shape = (3, 1, 8, 8) if name == "convnet" else (5, 2)
    return ENERGIES[name]().double(), torch.randn(
        shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@over("name", ENERGIES)
def test_one_graph_serves_all_parameters(name):
    energy, x = problem(name)
    traced = torch.compile(energy_and_grad, fullgraph=True, dynamic=False, backend="eager")
    with torch.no_grad():
        for again in (False, True):
            with torch._dynamo.config.patch(error_on_recompile=again):
                for own, eager in zip(traced(energy, x), energy_and_grad(energy, x), strict=True):
                    torch.testing.assert_close(own, eager)
                    assert not own.requires_grad
            for parameter in energy.parameters():
                parameter.mul_(1.5)


def score_loss(energy: nn.Module, x: Tensor) -> Tensor:
    E, g = traced_energy_and_grad(energy, x)
    return g.square().mean() + E.mean()


def autograd_loss(energy: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    E = energy(x)
    (g,) = torch.autograd.grad(E.sum(), x, create_graph=True)
    return g.square().mean() + E.mean()


@over("name", ["mlp", "tilted", "spectral", "convnet"])
def test_parameters_are_differentiated_through_the_gradient(name):
    energy, x = problem(name)
    traced = torch.compile(score_loss, fullgraph=True, dynamic=False, backend="aot_eager")
    parameters = [p for p in energy.parameters() if p.requires_grad]
    own, other = (
        torch.autograd.grad(loss(energy, x.clone()), parameters, materialize_grads=True)
        for loss in (traced, autograd_loss)
    )
    for a, b in zip(own, other, strict=True):
        torch.testing.assert_close(a, b)
    assert any(bool(a.any()) for a in own)
