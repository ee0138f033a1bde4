"""Layers by plain operations: the numbers torch's have, and derivatives that torch's have not."""

from __future__ import annotations

import pytest
import torch
from conftest import each
from torch import Tensor, nn

from metastable.core.plain import plain_layers

over = pytest.mark.parametrize


class Sum(nn.Module):
    """Σ f(W x)³ over tokens `(B, 4, 2)`, of a layer f of width 8."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer = nn.Linear(2, 8), layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.first(x)).pow(3).sum((1, 2))


class Channels(nn.Module):
    """GroupNorm over the features of tokens."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(h.mT).mT


def transformer(**options) -> nn.Module:
    settings = {"dropout": 0.0, "batch_first": True, "activation": "gelu", **options}
    return nn.TransformerEncoderLayer(8, 2, 16, **settings)


LAYERS = {
    "layer norm": lambda: nn.LayerNorm(8),
    "layer norm of two": lambda: nn.LayerNorm([4, 8], elementwise_affine=False),
    "group norm": Channels,
    "transformer": transformer,
    "norm first": lambda: transformer(norm_first=True),
}


def double(name: str) -> tuple[Sum, Tensor]:
    model = Sum(LAYERS[name]()).double()
    return model, torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@each("train", [True, False])
@each("name", LAYERS)
def test_numbers_are_those_of_torch(name, train):
    model, x = double(name)
    model.train(train)
    with torch.no_grad():
        usual = model(x)
        with plain_layers():
            assert torch.allclose(model(x), usual, rtol=1e-9)


def bend(model: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    """vᵀ∇²E v, summed, from a graph that was recorded by plain operations."""
    x = x.clone().requires_grad_(True)
    with plain_layers():
        E = model(x).sum()
    (g,) = torch.autograd.grad(E, x, create_graph=True)
    (Hv,) = torch.autograd.grad((g * v).sum(), x, create_graph=True)
    return (Hv * v).sum()


@over("name", LAYERS)
def test_second_derivatives_are_learned_by_right_gradients(name):
    """The third derivative by which score matching learns, against differences; torch's own norms have it wrong."""
    model, x = double(name)
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parameters = [p for p in model.parameters()]
    gradients = torch.autograd.grad(bend(model, x, v), parameters, allow_unused=True, materialize_grads=True)
    along = [torch.randn_like(p) for p in parameters]
    exact, eps, ends = sum(float((g * d).sum()) for g, d in zip(gradients, along, strict=True)), 1e-5, []
    for sign in (1, -2):
        with torch.no_grad():
            for p, d in zip(parameters, along, strict=True):
                p.add_(sign * eps * d)
        ends.append(float(bend(model, x, v).detach()))
    assert exact == pytest.approx((ends[0] - ends[1]) / (2 * eps), rel=1e-5)


@over("train", [True, False])
def test_derivatives_forwards_under_vmap(train):
    model, x = double("transformer")
    model.train(train)
    basis = torch.eye(8, dtype=torch.float64).view(8, 1, 4, 2)

    def slope(direction: Tensor) -> Tensor:
        return torch.func.jvp(model, (x,), (direction.expand_as(x),))[1]

    with plain_layers(), torch.no_grad():
        forwards = torch.vmap(slope)(basis)
    y = x.clone().requires_grad_(True)
    (backwards,) = torch.autograd.grad(model(y).sum(), y)
    assert torch.allclose(forwards.T.reshape(x.shape), backwards, rtol=1e-8, atol=1e-10)


@over("raises", [False, True])
def test_settings_of_torch_are_put_back(raises):
    fast = torch.backends.mha.get_fastpath_enabled()
    flash = torch.backends.cuda.flash_sdp_enabled()
    try:
        with plain_layers():
            assert not torch.backends.mha.get_fastpath_enabled()
            assert not torch.backends.cuda.flash_sdp_enabled()
            if raises:
                raise KeyError
    except KeyError:
        pass
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert torch.backends.cuda.flash_sdp_enabled() == flash
