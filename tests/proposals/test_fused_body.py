"""Values and gradients of a `TokenBody` by a few kernels: those of automatic differentiation.

The kernels run on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1); what they are given is checked anywhere.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from metastable.core.triton import interpreted, triton_is_here
from metastable.core.types import bind, energy_and_grad, in_events_alone
from metastable.energies.transformer import TransformerEnergy
from metastable.proposals import fused_body, transformer
from metastable.proposals.fused_body import value_and_grad, why_not
from metastable.proposals.transformer import TokenBody

HOME = "cuda" if torch.cuda.is_available() else "cpu"
READY = triton_is_here() and (HOME == "cuda" or interpreted())
needs_triton = pytest.mark.skipif(not READY, reason="needs Triton, with a GPU or TRITON_INTERPRET=1")
over = pytest.mark.parametrize
LAYOUTS = {
    "future": (TokenBody(12, 2, 1, 32, 2, 2, 0, 2, "future", True), 5, 2),
    "path": (TokenBody(12, 3, 1, 64, 1, 4, 3, 3, "path", True), 6, 2),
    "no prior": (TokenBody(16, 2, 1, 32, 1, 2, prior=False), 4, 4),
    "alone": (TokenBody(16, 4, 1, 32, 1, 1), 0, 4),
}
"""A body, how many tokens stand beside its event, and how many events share them."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(HOME)


def scattered(module: nn.Module) -> nn.Module:
    """Weights of such sizes that every part is felt in the value."""
    for i, p in enumerate(module.parameters()):
        p.data = normal(*p.shape, seed=i) * (0.3 if p.dim() < 2 else p.shape[-1] ** -0.5)
    return module.to(HOME)


def plain(body: TokenBody, rows: Tensor, beside: Tensor) -> Tensor:
    """The same by torch, from tokens in the kernels' order: those of the path last."""
    S, each = beside.shape[1], len(rows) // len(beside)
    tokens = torch.cat([beside[:, S - body.past :], beside[:, : S - body.past]], 1)
    return body(rows, tokens.repeat_interleave(each, 0).flatten(1) if S else None, None).squeeze(-1)


@needs_triton
@over("name", LAYOUTS)
def test_values_and_gradients_are_those_of_autograd(name):
    body, S, each = LAYOUTS[name]
    scattered(body)
    x, beside = normal(4, body.place.shape[0] * body.step), normal(4 // each, S, body.width, seed=1)
    assert why_not(body, x, beside) is None
    y = x.clone().requires_grad_(True)
    E = plain(body, y, beside)
    (grad,) = torch.autograd.grad(E.sum(), y)
    energy, slope = value_and_grad(body, x, beside)
    assert torch.allclose(energy, E, rtol=1e-5, atol=1e-5)
    assert torch.allclose(slope, grad, rtol=1e-5, atol=1e-5 * float(grad.abs().max()))
    if S > 1 and body.past:  # tokens of the path in the wrong place
        assert not torch.allclose(value_and_grad(body, x, beside.flip(1))[0], E, rtol=1e-3)


@needs_triton
def test_weights_are_read_where_they_lie():
    body, S, _ = LAYOUTS["no prior"]
    scattered(body)
    x, beside = normal(4, 16), normal(1, S, body.width, seed=1)
    before = value_and_grad(body, x, beside)[0]
    with torch.no_grad():
        body.blocks[0].dense[0].weight.mul_(1.5)
    after = value_and_grad(body, x, beside)[0]
    assert not torch.allclose(before, after, rtol=1e-3)
    assert torch.allclose(after, plain(body, x, beside), rtol=1e-5, atol=1e-5)


def energy_of(**options) -> TransformerEnergy:
    made = TransformerEnergy(
        8, 14, step=2, width=32, layers=1, heads=2, time=True, past=[(0, 2, 2)], tokens=[(4, 5, 2)], **options
    )
    return scattered(made).to(HOME)  # pyright: ignore


@over("reads", ["future", "path"])
@over("time", ["shared", "of each context"])
def test_an_energy_hands_over_its_tokens_as_the_kernels_want_them(reads, time, monkeypatch):
    energy, taken = energy_of(reads=reads), []

    def fused(body: TokenBody, rows: Tensor, beside: Tensor) -> Tensor:
        assert in_events_alone()
        taken.append(len(beside))
        monkeypatch.setattr(transformer, "why_not", lambda *_: "not within itself")
        made = plain(body, rows, beside)
        monkeypatch.setattr(transformer, "why_not", lambda *_: None)
        return made

    given, x = normal(3, 14, seed=2), normal(12, 8, seed=3)
    target = bind(energy, given, 0.7)
    target = target if time == "shared" else target.at(torch.tensor([0.2, 0.5, 0.9], device=HOME))
    monkeypatch.setattr(transformer, "why_not", lambda *_: "for comparison")
    E, grad = energy_and_grad(target, x)
    monkeypatch.setattr(transformer, "why_not", lambda *_: None)
    monkeypatch.setattr(transformer, "fused_value", fused)
    made = energy_and_grad(target, x)
    assert taken == [3]
    assert torch.allclose(made.energy, E, rtol=1e-5, atol=1e-6)
    assert torch.allclose(made.grad, grad, rtol=1e-5, atol=1e-6)
    taken.clear()
    assert energy(x[:3], given, torch.tensor([0.1, 0.2, 0.3], device=HOME)).requires_grad
    assert not taken  # a loss needs gradients in the weights


def test_what_cannot_be_fused_is_named(monkeypatch):
    monkeypatch.setattr(fused_body, "triton_is_here", lambda: True)
    monkeypatch.setattr(fused_body, "interpreted", lambda: True)
    x, beside = torch.zeros(2, 8), torch.zeros(1, 3, 32)
    ok = TokenBody(8, 2, 1, 32, 1, 2)
    assert why_not(ok, x, beside) is None
    assert "float32" in (why_not(ok.double(), x, beside) or "")
    ok.float()
    for sizes in ((8, 2, 1, 48, 1, 3), (8, 2, 8, 32, 1, 2), (8, 2, 1, 32, 1, 4)):
        body = TokenBody(*sizes)
        assert f"{body.width} in {body.heads} heads" in (why_not(body, x, beside) or "")
    assert "64 tokens" in (why_not(ok, x, torch.zeros(1, 61, 32)) or "")
    assert "513 events" in (why_not(ok, torch.zeros(513, 8), beside) or "")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in (why_not(ok, x, beside) or "")
    hook = ok.norm.register_forward_hook(lambda *_: None)
    assert "hooks" in (why_not(ok, x, beside) or "")
    hook.remove()
    spectral_norm(ok.dense)
    assert "parametrised" in (why_not(ok, x, beside) or "")
    monkeypatch.setattr(fused_body, "interpreted", lambda: False)
    assert "CUDA" in (why_not(TokenBody(8, 2, 1, 32, 1, 2), x, beside) or "")


@over("name", ["triton", "other"])
def test_a_kernel_that_fails_is_said_once_and_not_tried_again(name, monkeypatch):
    error = type("CompilationError", (Exception,), {"__module__": f"{name}.errors"})

    def broken(*_):
        raise error("no such instruction")

    monkeypatch.setattr(fused_body, "value_and_grad", broken)
    body, x, beside = TokenBody(8, 2, 1, 32, 1, 2), torch.zeros(2, 8), torch.zeros(1, 3, 32)
    if name == "other":
        with pytest.raises(error):
            fused_body.fused_value(body, x, beside)
        return
    with pytest.warns(RuntimeWarning, match="no such instruction"):
        assert fused_body.fused_value(body, x, beside) is None
    monkeypatch.setattr(fused_body, "triton_is_here", lambda: True)
    monkeypatch.setattr(fused_body, "interpreted", lambda: True)
    assert "no such instruction" in (why_not(body, x, beside) or "")
