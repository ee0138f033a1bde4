"""What a user may say in more than one way, and what is refused with the name of the field."""

from __future__ import annotations

import inspect
import json

import numpy as np
import pytest
import torch
from torch import nn

import metastable as ms
from metastable._version import __version__
from metastable.core.errors import ConfigError, EnergyError, InputError, refuse_newer
from metastable.estimator import EnergyDensity
from metastable.evaluation.log_partition import log_partition as estimate
from metastable.report import write_report
from metastable.training.config import SGD, TrainerConfig

ROWS = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))


def fitted(energy, **options):
    method = ms.methods.PersistentCD(walkers=32, step_size=0.05)
    return ms.fit(energy, ROWS, method, steps=2, evaluate=False, **options)


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


# ---- the energy


def test_default_by_name_trains_the_same_energy_as_none():
    assert same(fitted("default").energy, fitted(None).energy)


def test_the_default_may_have_settings():
    small = fitted({"name": "default", "hidden": (4,)}).energy
    assert same(small, fitted({"name": "mlp", "hidden": (4,)}).energy)


def test_an_unknown_energy_is_still_refused_by_name():
    with pytest.raises(ConfigError, match=r"energy\.name: unknown value 'mpl' \(did you mean 'mlp'\?\)"):
        fitted("mpl")


@pytest.mark.parametrize("energy", ["default", None])
def test_the_estimator_takes_the_default_with_its_own_widths(energy):
    assert EnergyDensity(energy=energy, hidden=(8,))._energy() == EnergyDensity(hidden=(8,))._energy()


# ---- log Z


def test_log_partition_is_the_estimate_itself():
    assert ms.log_partition is estimate


def test_an_energy_is_looked_at_where_the_data_are():
    """One that is no number far from its data was refused at draws of a standard normal."""
    far = torch.randn(200, 2, generator=torch.Generator().manual_seed(0)) + 50

    def energy(x):
        return ((x - 50).square() / 2).sum(1) + 0 * (x - 20).log().sum(1)

    z = ms.log_partition(energy, data=far, walkers=64, populations=4, seed=0)
    assert abs(z.value - np.log(2 * np.pi)) < 4 * z.std_error
    with pytest.raises(EnergyError, match="must be finite on the data"):
        ms.log_partition(energy, dim=2)
    with pytest.raises(EnergyError, match="must be finite on the data"):
        ms.log_partition(energy, data=far - 50)
    with pytest.raises(EnergyError, match="returned a scalar"):
        ms.log_partition(lambda x: x.square().sum(), data=far)


@pytest.mark.parametrize("said", [{"dim": 2}, {"event_shape": 2}, {"event_shape": (2,)}])
def test_the_shape_of_an_event_is_said_alike(said):
    z = ms.log_partition(lambda x: x.square().sum(1), walkers=16, populations=2, refinements=0, **said)
    assert (
        z.value
        == ms.log_partition(
            lambda x: x.square().sum(1), walkers=16, populations=2, refinements=0, dim=2
        ).value
    )
    if "event_shape" in said:
        kernel = ms.kernels.MALA(step_size=0.1)
        assert ms.sample(lambda x: x.square().sum(1), 3, kernel=kernel, steps=1, **said).x.shape == (3, 2)


# ---- the learning rate


@pytest.mark.parametrize("name", ["lr", "rate"])
def test_other_words_for_the_learning_rate_are_shown_the_right_one(name):
    with pytest.raises(
        ConfigError, match=rf"trainer\.{name}: unknown setting \(did you mean 'learning_rate'\?\)"
    ):
        fitted(None, **{name: 0.1})


def test_a_table_is_no_optimiser():
    rule = r"trainer\.optimiser: must be Adam.*\(the rate alone: fit\(learning_rate=…\)\), got \{'lr': 0\.1\}"
    with pytest.raises(ConfigError, match=rule):
        TrainerConfig(optimiser={"lr": 0.1})  # pyright: ignore
    with pytest.raises(ConfigError, match=r"trainer\.optimisers\.ratio: must be"):
        TrainerConfig(optimisers={"ratio": 0.1})  # pyright: ignore
    assert TrainerConfig(optimiser=SGD(0.1), optimisers={"ratio": torch.optim.SGD}).optimiser == SGD(0.1)


# ---- the step size


@pytest.mark.parametrize("method", [ms.methods.Jarzynski, ms.methods.PersistentCD, ms.methods.ShortRun])
def test_a_count_is_not_taken_for_a_step_size(method):
    with pytest.raises(ConfigError, match=rf"^{method.name}\.step_size: stands first, and 4096 is a count"):
        method(4096)
    assert method(0.25).step_size == 0.25
    assert method(step_size=2).step_size == 2  # by its name any number will do
    assert "step_size" in inspect.signature(method).parameters


# ---- files of another release


@pytest.mark.parametrize("version", ["0.0.9", __version__, "none of ours", None, 3])
def test_what_an_earlier_release_wrote_is_read(version):
    refuse_newer("config.json", version, __version__)


@pytest.mark.parametrize("version", ["99.0.0", "0.100.0", "99.0.dev1"])
def test_a_run_of_a_later_release_says_so_everywhere(version, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"version": version}))
    for read in (ms.load_run, write_report):
        with pytest.raises(InputError, match=rf"config\.json: version: must be at most .*, got {version}; "):
            read(tmp_path)
