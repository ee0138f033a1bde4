"""Values and gradients of a `TokenBody` by a few kernels: those of automatic differentiation.

The kernels run on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1); what they are given is checked anywhere.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from metastable.core.plain import plain_layers
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
    "wide": (TokenBody(32, 2, 1, 128, 3, 4, 0, 2), 5, 4),
    "long": (TokenBody(48, 2, 1, 64, 1, 2), 9, 4),
}
"""A body, how many tokens stand beside its event, and how many events share them."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(HOME)


def scattered(module: nn.Module) -> nn.Module:
    """Weights of such sizes that every part is felt in the value."""
    for i, p in enumerate(module.parameters()):
        p.data = normal(*p.shape, seed=i) * (0.3 if p.dim() < 2 else p.shape[-1] ** -0.5)
    return module.to(HOME)


def require_as_autograd(body: TokenBody, x: Tensor, beside: Tensor) -> Tensor:
    """Values and gradients of the kernels are torch's own, which are returned."""
    y = x.clone().requires_grad_(True)
    E = body.beside(y, beside)
    (grad,) = torch.autograd.grad(E.sum(), y)
    energy, slope = value_and_grad(body, x, beside)
    assert torch.allclose(energy, E, rtol=1e-5, atol=1e-5)
    assert torch.allclose(slope, grad, rtol=1e-5, atol=1e-5 * float(grad.abs().max()))
    return E


@needs_triton
@over("name", LAYOUTS)
def test_values_and_gradients_are_those_of_autograd(name):
    body, S, each = LAYOUTS[name]
    scattered(body)
    x, beside = normal(4, body.place.shape[0] * body.step), normal(4 // each, S, body.width, seed=1)
    assert why_not(body, x, beside) is None
    E = require_as_autograd(body, x, beside)
    if S > 1 and body.past:  # tokens of the path in the wrong place
        assert not torch.allclose(value_and_grad(body, x, beside.flip(1))[0], E, rtol=1e-3)


@needs_triton
@over("name", ["path", "wide", "long"])
def test_one_event_whose_kernels_read_their_weights_first(name):
    body, S, _ = LAYOUTS[name]
    scattered(body)
    x, beside = normal(1, body.place.shape[0] * body.step), normal(1, S, body.width, seed=1)
    assert fused_body._parts(len(x), x.device) == fused_body.MOST
    require_as_autograd(body, x, beside)


@over("width, step, fits", [(128, 8, True), (128, 9, False), (64, 8, True), (64, 9, False)])
def test_tokens_of_more_numbers_than_the_way_back_can_hold_are_not_fused(width, step, fits):
    body = TokenBody(2 * step, step, 1, width, 1, 4)
    refused = fused_body._why_not_sizes(body.to(HOME), normal(1, 2 * step), normal(1, 3, width, seed=1))
    assert fits == (refused is None)
    assert fits or f"5 of {step} " in str(refused)


@needs_triton
@over("width, step", [(128, 8), (64, 8), (32, 7)])
def test_long_tokens_of_one_event_have_their_gradients(width, step):
    body = scattered(TokenBody(2 * step, step, 1, width, 1, 4))
    require_as_autograd(body, normal(1, 2 * step), normal(1, 3, width, seed=1))


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
    assert torch.allclose(after, body.beside(x, beside), rtol=1e-5, atol=1e-5)


def energy_of(**options) -> TransformerEnergy:
    made = TransformerEnergy(
        8, 14, step=2, width=32, layers=1, heads=2, time=True, past=[(0, 2, 2)], tokens=[(4, 5, 2)], **options
    )
    return scattered(made).to(HOME)  # pyright: ignore


@pytest.fixture
def stand_in(monkeypatch) -> list[int]:
    """By torch what kernels would do; how many sets of tokens they were given, each time."""
    taken = []

    def made(body: TokenBody, x: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        taken.append(len(beside))
        with torch.enable_grad():
            y = x.detach().requires_grad_(True)
            E = body.beside(y, beside.detach())
            return E.detach(), torch.autograd.grad(E.sum(), y)[0]

    monkeypatch.setattr(fused_body, "value_and_grad", made)
    for room in (fused_body, transformer):
        monkeypatch.setattr(room, "interpreted", lambda: True)
    monkeypatch.setattr(fused_body, "triton_is_here", lambda: True)
    return taken


def without(monkeypatch, call):
    """What a call makes without kernels."""
    with monkeypatch.context() as patch:
        patch.setattr(transformer, "why_not", lambda *_: "for comparison")
        return call()


@over("reads", ["future", "path"])
@over("time", ["shared", "of each context"])
def test_an_energy_hands_over_its_tokens_as_the_kernels_want_them(reads, time, stand_in, monkeypatch):
    energy, given, x = energy_of(reads=reads), normal(3, 14, seed=2), normal(12, 8, seed=3)
    target = bind(energy, given, 0.7)
    target = target if time == "shared" else target.at(torch.tensor([0.2, 0.5, 0.9], device=HOME))
    E, grad = without(monkeypatch, lambda: energy_and_grad(target, x))
    assert not stand_in
    made = energy_and_grad(target, x)
    assert stand_in == [3]
    assert torch.allclose(made.energy, E, rtol=1e-5, atol=1e-6)
    assert torch.allclose(made.grad, grad, rtol=1e-5, atol=1e-6)
    assert not in_events_alone()
    assert energy(x[:3], given, torch.tensor([0.1, 0.2, 0.3], device=HOME)).requires_grad
    assert stand_in == [3]  # a loss needs gradients in the weights


def test_a_context_that_is_a_part_of_the_event_has_its_gradient(stand_in, monkeypatch):
    energy, z = energy_of(), normal(3, 22, seed=4)
    joint = lambda z: energy(z[:, 14:], z[:, :14], 0.5)  # noqa: E731
    E, grad = without(monkeypatch, lambda: energy_and_grad(joint, z))
    made = energy_and_grad(joint, z)
    assert not stand_in
    assert torch.equal(made.grad, grad)
    assert bool((made.grad[:, :14] != 0).any())
    assert torch.equal(made.energy, E)


@over("how", ["twice", "functional"])
def test_energies_that_are_made_of_gradients(how, stand_in, monkeypatch):
    """Derivatives of a body inside an energy: a second one by torch, and those of `torch.func` without kernels."""
    energy, x, given = energy_of(), normal(3, 8, seed=5), normal(3, 14, seed=6)

    def steep(x: Tensor) -> Tensor:
        total = lambda y: energy(y, given, 0.5).sum()  # noqa: E731
        with plain_layers():
            if how == "functional":
                return torch.func.grad(total)(x).square().sum(1)
            return torch.autograd.grad(total(x), x, create_graph=True)[0].square().sum(1)

    E, grad = without(monkeypatch, lambda: energy_and_grad(steep, x))
    made = energy_and_grad(steep, x)
    assert bool(stand_in) == (how == "twice")
    assert torch.allclose(made.energy, E, rtol=1e-4)
    assert torch.allclose(made.grad, grad, rtol=1e-4, atol=1e-6)
    assert float(grad.abs().max()) > 1e-4


def test_compilers_see_the_body_as_it_is(stand_in):
    energy, x, given = energy_of(), normal(3, 8, seed=5), normal(3, 14, seed=6)
    compiled = torch.compile(energy_and_grad, fullgraph=True, backend="eager")
    made = compiled(bind(energy, given, 0.5), x)
    assert not stand_in
    torch._dynamo.reset()
    assert torch.allclose(made.energy, energy_and_grad(bind(energy, given, 0.5), x).energy, rtol=1e-5)
    assert stand_in


def test_a_recording_keeps_the_table_that_it_reads(monkeypatch):
    body = TokenBody(8, 2, 1, 32, 1, 2)
    weight = body.dense.weight
    first, other = weight.data, weight.data.clone()
    with monkeypatch.context() as patch:
        patch.setattr(fused_body, "is_recording", lambda: True)
        table = fused_body._table(body)
    for _ in range(3):
        weight.data = other.clone()
        moved = fused_body._table(body)
        assert not torch.equal(moved, table)
        assert weight.data_ptr() in moved.tolist()
    weight.data = first
    assert fused_body._table(body) is table


def test_what_cannot_be_fused_is_named(monkeypatch):
    monkeypatch.setattr(fused_body, "triton_is_here", lambda: True)
    monkeypatch.setattr(fused_body, "interpreted", lambda: True)
    x, beside = torch.zeros(2, 8), torch.zeros(1, 3, 32)
    ok = TokenBody(8, 2, 1, 32, 1, 2)
    assert why_not(ok, x, beside) is None
    assert "float32" in (why_not(ok.double(), x, beside) or "")
    ok.float()
    for sizes in ((8, 2, 1, 48, 1, 3), (8, 2, 8, 32, 1, 2), (8, 2, 1, 32, 1, 4), (34, 17, 1, 32, 1, 2)):
        body = TokenBody(*sizes)
        assert f"{body.width} in {body.heads} heads" in (
            why_not(body, torch.zeros(2, sizes[0]), beside) or ""
        )
    assert "64 tokens" in (why_not(ok, x, torch.zeros(1, 61, 32)) or "")
    assert "513 events" in (why_not(ok, torch.zeros(513, 8), beside) or "")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in (why_not(ok, x, beside) or "")
    hook = ok.norm.register_forward_hook(lambda *_: None)
    assert "norm has hooks" in (why_not(ok, x, beside) or "")
    hook.remove()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    assert "TF32" in (why_not(ok, x, beside) or "")
    torch.set_float32_matmul_precision(before)
    leaf = beside.clone().requires_grad_(True)
    assert "differentiated" in (why_not(ok, x, leaf) or "")
    assert "differentiated" in (why_not(ok, x, 2 * leaf) or "")
    for changed in (
        lambda body: spectral_norm(body.dense),
        lambda body: body.embed.__setitem__(1, nn.GELU()),
        lambda body: setattr(body.blocks[0], "first", nn.LayerNorm(32, eps=1e-3)),
        lambda body: setattr(body, "dense", nn.Linear(4 * 32, 32, bias=False)),
    ):
        body = TokenBody(8, 2, 1, 32, 1, 2)
        changed(body)
        assert why_not(body, x, beside) is not None
    monkeypatch.setattr(fused_body, "interpreted", lambda: False)
    assert "CUDA" in (why_not(TokenBody(8, 2, 1, 32, 1, 2), x, beside) or "")


@over("name", ["triton", "folder", "other", "later"])
def test_a_kernel_that_fails_is_said_once_and_not_tried_again(name, monkeypatch):
    error = type("CompilationError", (Exception,), {"__module__": f"{name}.errors"})
    error = OSError if name in ("folder", "later") else error

    def broken(*_):
        raise error("no such instruction")

    monkeypatch.setattr(fused_body, "value_and_grad", broken)
    body, x, beside = TokenBody(8, 2, 1, 32, 1, 2), torch.zeros(2, 8), torch.zeros(1, 3, 32)
    if name == "later":
        fused_body._RAN.add(body)  # it could be compiled before
    if name in ("other", "later"):
        with pytest.raises(error):
            fused_body.fused_value(body, x, beside)
        return
    with pytest.warns(RuntimeWarning, match="no such instruction"):
        assert fused_body.fused_value(body, x, beside) is None
    monkeypatch.setattr(fused_body, "triton_is_here", lambda: True)
    monkeypatch.setattr(fused_body, "interpreted", lambda: True)
    assert "no such instruction" in (why_not(body, x, beside) or "")
