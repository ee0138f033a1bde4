"""What is bound to contexts is checked there: the time, and the shape of events."""

from __future__ import annotations

import pytest
import torch
from conftest import each

from metastable.core.errors import ConfigError, EnergyError, InputError
from metastable.core.types import bind, energy_and_grad
from metastable.energies import AsEnergy, ConditionalNet
from metastable.evaluation.conditional import log_partition_given
from metastable.methods.conditional_sampling import best_of
from metastable.proposals import DiffusionEnergy, Gaussian, InterpolantFlow

GIVEN = torch.zeros(3, 1)
X = torch.zeros(3, 4, 2)
SMALL = {"width": 8, "layers": 3}


def timed() -> ConditionalNet:
    return ConditionalNet(2, 1, width=8, depth=3, time=True)


def around(y: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return (y - given[:, None]).square().sum(-1)


@each("t", [1.05, -3.0, float("nan"), torch.tensor(1.05), torch.tensor([0.0, -3.0, 1.0])])
def test_times_outside_are_refused_wherever_an_energy_is_bound(t):
    energy = timed()
    for use in (
        lambda: bind(energy, GIVEN, t),
        lambda: bind(energy, GIVEN, 0.5).at(t),
        lambda: best_of(energy, X, GIVEN, t=t),
        lambda: log_partition_given(energy, Gaussian(torch.zeros(2)), GIVEN, 64, t=t),
    ):
        with pytest.raises(ConfigError, match=r"t: must be within \[0, 1\], got (1.05|-3.0|nan)"):
            use()


def test_times_inside_go_through_as_they_are():
    energy, t = timed(), torch.tensor([0.0, 0.3, 1.0])
    direct = energy(X, GIVEN, t)
    assert torch.equal(bind(energy, GIVEN, t)(X.flatten(0, 1)), direct.flatten())
    assert torch.equal(bind(energy, GIVEN, 0.0).at(t)(X.flatten(0, 1)), direct.flatten())
    # one time for all is another shape than one for each context, and a product may round it otherwise
    torch.testing.assert_close(bind(energy, GIVEN, 0)(X.flatten(0, 1)), energy(X, GIVEN, 0.0).flatten())
    assert not torch.allclose(bind(energy, GIVEN, 0)(X.flatten(0, 1)), energy(X, GIVEN, 0.5).flatten())
    with pytest.raises(InputError, match=r"one for each of the 3 contexts, got shape \(2,\)"):
        bind(energy, GIVEN, torch.zeros(2))


@pytest.mark.parametrize(
    "energy",
    [
        ConditionalNet(2, 1, width=8, depth=3),
        DiffusionEnergy(2, 1, **SMALL),
        AsEnergy(InterpolantFlow(2, 1, width=8)),
    ],
    ids=lambda energy: type(energy).__name__,
)
def test_a_time_is_refused_by_what_has_none(energy):
    for use in (lambda: best_of(energy, X, GIVEN, t=0.5), lambda: bind(energy, GIVEN).at(1.0)):
        with pytest.raises(InputError, match=r"t: this energy .* has no time"):
            use()


def test_a_diffusion_refuses_a_time_by_itself():
    energy = DiffusionEnergy(2, 1, **SMALL)
    with pytest.raises(InputError, match="t: a Diffusion-φ has no time"):
        energy.score(X, energy.encode(GIVEN), torch.ones(3))


@pytest.mark.parametrize("x", [X[:, 0], X[..., 0], X[..., None]], ids=lambda x: str(tuple(x.shape)))
def test_events_of_another_shape_are_named(x):
    with pytest.raises(InputError, match=r"x: must be \(B, K, \*event\) with event \(2,\)"):
        best_of(timed(), x, GIVEN)


def test_an_energy_of_any_kind_must_give_one_value_for_each_event():
    with pytest.raises(
        EnergyError, match=r"returned shape \(3, 3\) for events \(3, 1\) .* one for each event"
    ):
        best_of(around, torch.zeros(3, 1), GIVEN)
    assert best_of(around, torch.zeros(3, 4, 1), GIVEN).place.tolist() == [0, 0, 0]


def test_gradients_are_no_others_in_inference_mode():
    with torch.inference_mode():
        found = energy_and_grad(lambda x: x.square().sum(1), torch.ones(2, 3))
    assert found.grad.tolist() == [[2.0] * 3] * 2
