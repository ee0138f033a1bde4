"""Wide residual networks without normalisation: size, shapes, and activations that keep their size."""

from __future__ import annotations

import pytest
import torch
from conftest import each
from torch import nn

from metastable.core.errors import ConfigError
from metastable.energies import WideResNet, check_energy
from metastable.energies.build import WideResNetConfig


def test_28_10_has_the_published_size_less_normalisation_and_with_biases():
    """36,479,194 with batch normalisation and without biases of convolutions, as usually reported."""
    with torch.device("meta"):
        network = WideResNet((3, 32, 32), 28, 10, outputs=10)
    by_group = [(16, 160), (160, 320), (320, 640)]
    channels = sum(before + after + 3 * 2 * after for before, after in by_group) + 640
    normalisation = 2 * channels
    biases = 16 + sum(9 * after for _, after in by_group)  # eight convolutions of a group and its shortcut
    assert sum(p.numel() for p in network.parameters()) == 36_479_194 - normalisation + biases == 36_471_338


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 9, 5)])
@pytest.mark.parametrize(("depth", "width"), [(10, 1), (16, 2)])
def test_shapes(shape, depth, width):
    x = torch.zeros((2, *shape))
    assert WideResNet(shape, depth, width, outputs=10)(x).shape == (2, 10)
    assert WideResNet(shape, depth, width)(x).shape == (2,)


def test_there_is_nothing_that_mixes_rows():
    network = WideResNet((1, 8, 8), 16, 1)
    x = torch.randn((5, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    check_energy(network, x)
    assert not any(isinstance(m, (nn.BatchNorm2d, nn.Dropout)) for m in network.modules())


def features(network: WideResNet, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return network.blocks(network.stem(x))


@pytest.mark.parametrize("depth", [10, 28, 52])
def test_deep_networks_keep_the_size_of_activations_at_the_start(depth):
    """By at most e in variance, whatever the depth; He's variance on every branch would give 2^((depth − 4)/2)."""
    x = torch.randn((4, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    network = WideResNet((3, 16, 16), depth, 1, seed=0)
    scale = features(network, x).square().mean().sqrt().item()
    assert 0.4 < scale < 2.5
    for block in network.blocks:
        nn.init.kaiming_normal_(block.second.weight, 0.2)  # the wrong start
    assert features(network, x).square().mean().sqrt().item() > 1.5 * scale


def test_the_same_seed_gives_the_same_weights_and_leaves_torch_alone():
    before = torch.random.get_rng_state()
    one, two, other = (WideResNet((1, 8, 8), 10, 1, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.stem.weight, two.stem.weight)
    assert not torch.equal(one.stem.weight, other.stem.weight)
    assert torch.equal(before, torch.random.get_rng_state())


@each(
    "make, field",
    [
        (lambda: WideResNet((1, 8, 8), depth=12), "depth"),
        (lambda: WideResNet((1, 8, 8), depth=4), "depth"),
        (lambda: WideResNet((1, 8, 8), width=0), "width"),
        (lambda: WideResNet((8, 8)), "event_shape"),
        (lambda: WideResNet((1, 3, 8)), "event_shape"),
    ],
)
def test_bad_settings_name_the_field(make, field):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.path == field


def test_an_energy_of_its_own_on_a_reference_starts_exact():
    x = torch.randn((20, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    energy = WideResNetConfig().build(x, 0)
    assert torch.allclose(energy(x), -energy.reference.log_prob(x))
