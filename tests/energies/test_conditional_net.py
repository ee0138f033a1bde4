"""Conditional networks: contexts are encoded once, and joining them to events is what the paper does."""

from __future__ import annotations

import pytest
import torch
from conftest import each
from torch import Tensor, nn
from torch.nn.functional import silu

from metastable.core.batch import Batch
from metastable.core.configure import build_tagged
from metastable.core.errors import ConfigError, InputError
from metastable.core.types import bind
from metastable.energies import ConditionalNet, check_conditional, check_energy
from metastable.energies.build import ENERGIES, ConditionalConfig, default_config
from metastable.proposals.encoders import Borrowed, Standardise

B, K = 5, 7


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Counting(nn.Module):
    """A small convolutional encoder of images that counts the contexts it sees."""

    def __init__(self):
        super().__init__()
        self.body, self.seen = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), 0

    def forward(self, given: Tensor) -> Tensor:
        self.seen += len(given)
        return self.body(given)


def test_each_context_is_encoded_once_whatever_the_number_of_its_events():
    encoder = Counting()
    energy = ConditionalNet(2, (1, 4, 4), width=8, depth=3, encoder=encoder)
    encoder.seen = 0
    x, given = torch.randn(B, K, 2), torch.randn(B, 1, 4, 4)
    E = energy(x, given)
    assert encoder.seen == B
    bound = bind(energy, given)
    for _ in range(3):
        torch.testing.assert_close(bound(x.flatten(0, 1)).view(B, K), E)
    assert encoder.seen == 2 * B
    one_by_one = torch.stack([energy(x[:, k], given) for k in range(K)], 1)
    torch.testing.assert_close(one_by_one, E)


@pytest.mark.parametrize("time", [False, True])
def test_it_equals_one_dense_layer_over_everything_joined(time):
    energy = ConditionalNet(2, 3, width=16, depth=5, time=time, seed=3).double()
    x, given, t = normal(B, K, 2), normal(B, 3, seed=1), torch.rand(B, K, dtype=torch.float64)
    parts, weights = (
        [x, given[:, None].expand(B, K, 3)],
        [energy.from_event.weight, energy.from_context.weight],
    )
    if time:
        parts.append(energy.embed(-torch.log(1.1 - t)[..., None]))
        weights.append(energy.from_time.weight)
    h = silu(torch.cat(parts, -1) @ torch.cat(weights, 1).T + energy.from_event.bias)
    for layer in energy.inner:
        h = h + silu(layer(h))
    got = energy(x, given, t if time else None)
    torch.testing.assert_close(got, energy.head(h)[..., 0], rtol=0, atol=1e-14)
    without = silu(parts[0] @ weights[0].T + energy.from_event.bias)
    assert not torch.allclose(h, without)  # the context does count


def test_times_are_numbers_or_one_for_each_context_or_event_and_the_datas_is_left_out():
    energy = ConditionalNet(2, 3, width=8, depth=3, time=True).double()
    x, given = normal(B, K, 2), normal(B, 3)
    per_context = torch.rand(B, dtype=torch.float64)
    per_event = per_context[:, None].expand(B, K)
    torch.testing.assert_close(energy(x, given, per_context), energy(x, given, per_event))
    torch.testing.assert_close(energy(x[:, 0], given, per_context), energy(x, given, per_context)[:, 0])
    torch.testing.assert_close(
        bind(energy, given, per_context)(x.flatten(0, 1)).view(B, K), energy(x, given, per_event)
    )
    assert torch.equal(energy(x, given), energy(x, given, 1.0))
    assert not torch.allclose(energy(x, given), energy(x, given, 0.3))


def test_without_contexts_it_is_a_plain_energy():
    energy = ConditionalNet((2, 2), width=8, depth=3, time=True)
    check_energy(energy, torch.randn(4, 2, 2))
    x, t = torch.randn(4, 2, 2), torch.rand(4)
    assert energy(x, None, t).shape == (4,)
    torch.testing.assert_close(energy(x, None, t)[2:3], energy(x[2:3], None, t[2:3]))


def test_units_of_events_and_contexts_do_not_matter():
    x, given = normal(50, 2), normal(50, 1, seed=1)
    plain = ConditionalNet(2, 1, width=8, data=Batch(x, given))
    scaled = ConditionalNet(2, 1, width=8, data=Batch(7 + 1000 * x, 600 + 100 * given))
    torch.testing.assert_close(plain(x, given), scaled(7 + 1000 * x, 600 + 100 * given))


def test_the_reference_is_a_gaussian_of_the_data():
    x, given = 3 + 2 * normal(500, 2), normal(500, 1, seed=1)
    bare = ConditionalNet(2, 1, width=8, data=Batch(x, given))
    tilted = ConditionalNet(2, 1, width=8, data=Batch(x, given), inflate=1.5)
    expected = 0.5 * ((x - x.mean(0)) / (1.5 * x.std(0))).square().sum(1)
    torch.testing.assert_close(tilted(x, given) - bare(x, given), expected)


def test_settings_build_it():
    rows = Batch(torch.randn(20, 2), torch.randn(20, 3))
    assert isinstance(default_config((2,), "given"), ConditionalConfig)
    assert default_config((2,), "", time=True).time
    energy = build_tagged(ENERGIES, {"name": "conditional", "width": 8, "reference": "none"}, "energy").build(
        rows, 0
    )
    check_conditional(energy, rows)
    assert (energy.event_shape, energy.context_shape, energy.inflate) == ((2,), (3,), None)
    assert ConditionalConfig().build(rows.x, 0).context_shape is None
    with pytest.raises(ConfigError, match=r"energy\.depth: must be an integer of at least 2"):
        ConditionalConfig(depth=1)


@each(
    "call, words",
    [
        (
            lambda E: E(torch.zeros(4, 2), torch.zeros(3, 1)),
            "given: must be one for each of the 4 rows of events, got 3",
        ),
        (
            lambda E: E(torch.zeros(4, 2), torch.zeros(4, 2)),
            r"given: contexts must have shape \(1,\), got \(2,\)",
        ),
        (lambda E: E(torch.zeros(4, 2)), "given: this energy needs contexts"),
        (
            lambda E: E(torch.zeros(4, 3), torch.zeros(4, 1)),
            r"x: must be \(B, \*event\) or \(B, K, \*event\)",
        ),
        (lambda E: E(torch.zeros(4, 2), torch.zeros(4, 1), 1.5), r"t: must be within \[0, 1\], got 1.5"),
        (
            lambda E: E(torch.zeros(4, 2), torch.zeros(4, 1), torch.zeros(3)),
            "t: must be a number, or one for each",
        ),
        (
            lambda E: ConditionalNet(2)(torch.zeros(4, 2), torch.zeros(4, 1)),
            "given: this energy has no contexts",
        ),
        (lambda E: ConditionalNet(2)(torch.zeros(4, 2), None, 0.5), "t: this energy has no time"),
        (
            lambda E: ConditionalNet(2, encoder=nn.Linear(1, 1)),
            "encoder: an energy without contexts has none",
        ),
        (lambda E: ConditionalNet(2, 1, encoder=lambda given: given[None]), "encoder: must map contexts"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(InputError, match=words):
        call(ConditionalNet(2, 1, width=8, depth=3, time=True))


def test_a_borrowed_encoder_is_called_without_gradients_and_never_owned():
    encoder = nn.Linear(3, 4)
    energy = ConditionalNet(2, 3, width=8, depth=3, encoder=Borrowed(encoder))
    assert not any(p is encoder.weight for p in energy.parameters())
    assert not any("encoder" in name for name in energy.state_dict())
    energy(torch.zeros(5, 2), torch.randn(5, 3)).sum().backward()
    assert encoder.weight.grad is None
    assert energy.from_context.weight.grad is not None


def test_a_coordinate_that_never_varies_does_not_explode():
    rows = torch.cat([torch.randn(50, 1), torch.full((50, 1), 3.0)], 1)
    assert bool((Standardise((2,), rows)(rows).abs() < 10).all())
