"""Classifiers as energies: shapes, errors, precision, and how they are built from settings."""

from __future__ import annotations

import pytest
import torch
from conftest import each
from torch import Tensor, nn

import metastable as ms
from metastable.core.batch import Batch
from metastable.core.configure import build_tagged, describe
from metastable.core.errors import ConfigError, EnergyError, InputError
from metastable.core.types import bind
from metastable.energies import MLP, ConvNet, JointEnergy, WideResNet, check_energy
from metastable.energies.build import ENERGIES, JointMLPConfig, JointWRNConfig, default_config


def joint(output_scale: float = 7.0, classes: int = 4) -> JointEnergy:
    return JointEnergy(MLP(2, hidden=(16,), outputs=classes, seed=1), output_scale)


def points(n: int = 6) -> Tensor:
    return torch.randn((n, 2), generator=torch.Generator().manual_seed(0))


def test_classes_are_read_off_the_network():
    assert joint(classes=5).classes == 5
    assert JointEnergy(nn.Sequential(nn.Linear(2, 9), nn.ReLU(), nn.Linear(9, 3))).classes == 3
    with pytest.raises(ConfigError, match="classes: cannot be read off Identity"):
        JointEnergy(nn.Identity())
    assert JointEnergy(nn.Identity(), classes=2).classes == 2


def test_the_joint_energy_may_be_asked_for_rows_or_for_several_events_of_each_label():
    energy, x, labels = joint(), points(6), torch.tensor([3, 0, 1])
    by_row = energy(x, labels.repeat_interleave(2))
    torch.testing.assert_close(energy(x.view(3, 2, 2), labels), by_row.view(3, 2))
    torch.testing.assert_close(bind(energy, labels)(x), by_row)
    torch.testing.assert_close(energy.given(labels)(x), by_row)
    torch.testing.assert_close(energy.given(3)(x), energy(x, 3))
    torch.testing.assert_close(energy(x, 3), energy(x, torch.full((6,), 3)))


def test_it_passes_the_check_of_energies_and_so_does_each_class():
    energy, x = joint(), points()
    assert check_energy(energy, x) is energy
    check_energy(energy.given(2), x)
    check_energy(energy.given([0, 1, 2]), x)


def test_chains_of_a_class_begin_where_the_energy_works():
    """With its shape, its dtype and its device, as chains of the energy itself do."""
    energy = joint().double()
    for target in (energy, energy.given(2), energy.given([0, 3])):
        drawn = ms.sample(target, 4, kernel=ms.kernels.ULA(0.01), steps=1).x
        assert (drawn.shape, drawn.dtype) == ((4, 2), torch.float64)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(8), nn.Dropout(0.5)])
def test_layers_under_which_rows_depend_on_each_other_or_on_chance_are_refused(layer):
    network = nn.Sequential(nn.Linear(2, 8), layer, nn.Linear(8, 3))
    with pytest.raises(EnergyError, match="BatchNorm"):
        check_energy(JointEnergy(network, 1.0), points())


class Wrong(nn.Module):
    def __init__(self, shape: tuple[int, ...] | None, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.shape, self.dtype = shape, dtype

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros((len(x), *(self.shape or ())), dtype=self.dtype)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Wrong((4,)), r"shape \(6, 3\), got \(6, 4\)"),
        (Wrong(None), r"shape \(6, 3\), got \(6,\)"),
        (Wrong((3,), torch.int64), "got torch.int64"),
    ],
)
def test_logits_of_another_shape_are_refused(network, message):
    with pytest.raises(EnergyError, match=message):
        JointEnergy(network, classes=3)(points())


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"output_scale": 0.0}, "output_scale"),
        ({"output_scale": float("nan")}, "output_scale"),
        ({"classes": 1}, "classes"),
    ],
)
def test_bad_settings_name_the_field(settings, field):
    with pytest.raises(ConfigError) as caught:
        JointEnergy(nn.Linear(2, 3), **settings)
    assert caught.value.path == field


@each(
    "labels, message",
    [
        ([0, 4], r"labels: must be from 0 to 3, got 4 in row 1 \(counting from 0\)"),
        (-1, "from 0 to 3, got -1 in row 0"),
        ([1.0, 0.5], r"must be integers, got torch.float64, 0.5 in row 1 \(counting from 0\)"),
        (["a"], "must be integers, got <U1, 'a' in row 0"),
        ([], "one label or a row of them"),
        ([[0, 1]], r"one label or a row of them, got shape \(1, 2\)"),
    ],
)
def test_bad_labels_are_named(labels, message):
    with pytest.raises(InputError, match=message):
        joint().given(labels)


def test_a_wrong_number_of_labels_is_named():
    with pytest.raises(InputError, match="one label for each of 6 rows, got 5 labels"):
        joint()(points(6), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(InputError, match="multiple of the 4 contexts"):
        joint().given([0, 1, 2, 3])(points(6))


def test_half_precision_logits_are_widened_before_they_are_scaled():
    energy = JointEnergy(nn.Linear(2, 3).to(torch.bfloat16), 20_000.0)
    x = points().to(torch.bfloat16)
    E = energy(x)
    assert E.dtype == torch.float32
    h = energy.network(x).float()
    torch.testing.assert_close(E, -20_000 * h.logsumexp(1))


@pytest.mark.parametrize("network", [MLP, ConvNet, WideResNet])
def test_networks_give_logits_on_request(network):
    shape = (1, 8, 8)
    x = torch.zeros(2, *shape)
    assert network(shape, outputs=5)(x).shape == (2, 5)
    assert network(shape)(x).shape == (2,)


def labelled(shape: tuple[int, ...], classes: int) -> Batch:
    x = torch.randn((12, *shape), generator=torch.Generator().manual_seed(0))
    return Batch(x, torch.arange(12) % classes)


@pytest.mark.parametrize(
    ("name", "shape"), [("joint-mlp", (3,)), ("joint-conv", (1, 8, 8)), ("joint-wrn", (1, 8, 8))]
)
def test_a_joint_energy_is_built_from_settings_and_labels(name, shape):
    data = labelled(shape, 4)
    config = build_tagged(ENERGIES, {"name": name, "output_scale": 5.0}, "energy")
    energy = config.build(data, seed=3)
    assert (energy.classes, energy.output_scale, energy.event_shape) == (4, 5.0, shape)
    check_energy(energy, data.x)
    again = build_tagged(ENERGIES, describe(config), "energy").build(data, seed=3)
    assert torch.equal(again(data.x), energy(data.x))
    assert not torch.equal(config.build(data, seed=4)(data.x), energy(data.x))


def test_without_labels_the_number_of_classes_must_be_given():
    x = labelled((3,), 4).x
    with pytest.raises(ConfigError, match=r"energy.classes: say how many there are"):
        JointMLPConfig().build(x, 0)
    assert JointMLPConfig(classes=7).build(x, 0).classes == 7


def test_the_default_for_labelled_data_is_a_classifier():
    assert isinstance(default_config((1, 28, 28), "labels"), JointWRNConfig)
    assert isinstance(default_config((5,), "labels"), JointMLPConfig)


def test_a_classifier_is_read_back_with_the_scale_it_was_trained_at(tmp_path):
    import metastable as ms

    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    settings = {"labels": (x[:, 0] > 0).long(), "evaluate": False}
    method = ms.methods.JEM(ms.methods.ShortRun(step_size=1e-3))
    ms.fit(JointEnergy(nn.Linear(2, 2), output_scale=1.0), x, method, 1, out=tmp_path / "own", **settings)
    with pytest.raises(InputError, match="does not fit the module made for it"):
        ms.load_run(tmp_path / "own", nn.Linear(2, 2))  # its scale would be a guess
    ms.fit(nn.Linear(2, 2), x, method, 1, out=tmp_path / "plain", **settings)
    assert ms.load_run(tmp_path / "plain", nn.Linear(2, 2)).energy.output_scale == 20_000
