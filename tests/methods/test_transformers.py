"""torch's transformer layers as energies and as fields of flows, with every derivative that these need."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import metastable as ms
from metastable.methods.curvature import curvature, kink_share
from metastable.proposals import Diffusion, DiffusionEnergy, InterpolantFlow

over = pytest.mark.parametrize


def layer(**options) -> nn.Module:
    settings = {"dropout": 0.0, "batch_first": True, "activation": "gelu", **options}
    return nn.TransformerEncoderLayer(8, 2, 16, **settings)


class Attending(nn.Module):
    """E of events (4, 2) by one layer of attention over four tokens, with a Gaussian below it."""

    event_shape = (4, 2)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(2, 8), nn.Linear(8, 1)
        self.layer = layer()
        self.place = nn.Parameter(0.1 * torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x) + self.place)).sum((1, 2)) + 0.5 * x.square().sum((1, 2))


class Velocity(nn.Module):
    """v(x, given, t) of the same tokens, flattened: x `(…, 8)`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer, self.last = nn.Linear(3, 8), layer(), nn.Linear(8, 2)
        self.place = nn.Parameter(0.1 * torch.randn(4, 8))

    def forward(self, x: Tensor, given: Tensor | None, t: Tensor) -> Tensor:
        lead = x.shape[:-1]
        tokens = x.reshape(-1, 4, 2)
        time = t.expand(lead).reshape(-1, 1, 1).expand(len(tokens), 4, 1)
        h = self.layer(self.first(torch.cat([tokens, time], -1)) + self.place)
        return self.last(h).reshape(*lead, 8)


def data(n: int = 300) -> Tensor:
    """Walks: tokens that depend on each other."""
    return torch.randn(n, 4, 2, generator=torch.Generator().manual_seed(0)).cumsum(1) / 2


@over("train", [True, False])
def test_second_derivatives_are_those_of_differences(train):
    energy, x = Attending().double().train(train), data(5).double()
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, eps = x.clone().requires_grad_(True), 1e-5
    ends = [torch.autograd.grad(energy(y + s * eps * v).sum(), y)[0] for s in (1, -1)]
    by_differences = ((ends[0] - ends[1]) * v).sum((1, 2)) / (2 * eps)
    assert torch.allclose(curvature(energy, x, v[None]).bend, by_differences, rtol=1e-6, atol=1e-8)
    parameters = list(energy.parameters())
    assert kink_share(energy, parameters, x, x + 0.1 * v) < 0.05  # what score matching asks before it starts


@over("method", ["score-matching", "denoising-score-matching", "ranking-nce"])
def test_a_transformer_is_trained_as_an_energy(method):
    run = ms.fit(Attending(), data(), method, steps=12, learning_rate=1e-2, batch_size=50, evaluate=False)
    name = "score_loss" if "score" in method else "objective"
    values = [row[name] for row in run.history]
    assert all(math.isfinite(v) for v in values)
    if method == "score-matching":
        assert values[-1] < values[0] - 0.2


@over("train", [True, False])
def test_a_transformer_is_the_field_of_a_flow(train):
    """Draws know their density: the ODE back gives what the ODE forth gave."""
    flow = InterpolantFlow((4, 2), field=Velocity(), steps=20, scored=21).fit(data(), steps=5).train(train)
    x, log_prob = flow.sample_and_log_prob(6, torch.Generator().manual_seed(0))
    assert torch.allclose(flow.log_prob(x), log_prob, atol=5e-3)
    code, clock = None, flow.field.clock(torch.tensor(0.5))
    rows = flow._white(x)[None]
    jacobian = torch.autograd.functional.jacobian(lambda r: flow.field.velocity(r, code, clock), rows[:, :1])
    exact = torch.einsum("bkdbkd->bk", jacobian)
    with torch.no_grad():
        assert torch.allclose(flow.field.divergence(rows[:, :1], code, clock), exact, atol=1e-5)
    flow.log_prob(x).sum().backward()  # as an adversary learns


def test_a_transformer_denoises_and_is_a_potential():
    class Phi(Velocity):
        def forward(self, x: Tensor, given: Tensor | None, t: Tensor) -> Tensor:
            return super().forward(x, given, t).sum(-1)

    rng = torch.Generator().manual_seed(0)
    for model in (
        Diffusion((4, 2), network=Velocity(), steps=4, scored=3),
        DiffusionEnergy((4, 2), potential=Phi(), steps=4, scored=3),
    ):
        model.loss(data(9), rng=rng).backward()
        constant = ("last.bias", "norm2.bias")  # to which ∇φ is blind
        assert all(p.grad is not None for name, p in model.named_parameters() if not name.endswith(constant))
        _, log_prob = model.sample_and_log_prob(3, rng)
        assert bool(log_prob.isfinite().all())


def test_a_transformer_is_a_conditional_energy():
    class Given(Attending):
        def forward(self, x: Tensor, given: Tensor) -> Tensor:
            single = x.dim() == 3
            x = x[:, None] if single else x
            centred = x - given[:, None, None]
            E = super().forward(centred.flatten(0, 1)).view(x.shape[:2])
            return E[:, 0] if single else E

    given = torch.randn(300, 2, generator=torch.Generator().manual_seed(2))
    method = ms.methods.RankingNCE(proposal={"name": "interpolant", "field": Conditional(), "steps": 4})
    run = ms.fit(
        Given(), data() + given[:, None], method, given=given, steps=3, batch_size=32, evaluate=False
    )
    assert run.sample(5, given=given[:2], steps=3).x.shape == (2, 5, 4, 2)


class Conditional(Velocity):
    def forward(self, x: Tensor, given: Tensor | None, t: Tensor) -> Tensor:
        return super().forward(x, None, t) + given.sum(-1, keepdim=True)
