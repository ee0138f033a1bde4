"""The reference under a built-in network: which one the data get, and that a run with it comes back from disk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import metastable as ms
from metastable.core.errors import ConfigError
from metastable.energies.network_configs import MIXTURE_COLUMNS, MIXTURE_ROWS, ConvConfig, MLPConfig
from metastable.proposals import Gaussian, ScaleMixture, fit_gaussian


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((50, 2), ScaleMixture),
        ((MIXTURE_ROWS, 1), ScaleMixture),
        ((MIXTURE_ROWS + 1, 1), Gaussian),
        ((20, MIXTURE_COLUMNS + 1), Gaussian),
        ((20, 4, 3), Gaussian),
    ],
)
def test_few_vectors_get_a_mixture_and_anything_else_a_gaussian(shape, expected):
    x = rows(*shape)
    config = MLPConfig(hidden=(8,))
    energy = config.build(x, 0)
    assert type(energy.reference) is expected
    settled = config.settled(x)
    assert settled.reference == ("mixture" if expected is ScaleMixture else "gaussian")
    assert settled == settled.settled(x)
    torch.testing.assert_close(energy(x), -energy.reference.log_prob(x))


def test_a_gaussian_is_the_inflated_fit_as_ever():
    x = rows(100, 3)
    q = MLPConfig("gaussian").build(x, 0).reference
    truth = fit_gaussian(x, inflate=1.2)
    assert torch.equal(q.mean, truth.mean)
    assert torch.equal(q.scale, truth.scale)
    assert isinstance(MLPConfig(inflate=1.5).build(x, 0).reference, Gaussian)  # a width is asked for


def test_settings_that_exclude_each_other_are_named():
    with pytest.raises(ConfigError, match=r"energy\.inflate: must be left out for a mixture"):
        MLPConfig("mixture", inflate=1.5)
    with pytest.raises(
        ConfigError, match=r"energy\.reference: must be 'gaussian', 'none' or 'auto' for events"
    ):
        ConvConfig("mixture").build(rows(8, 1, 8, 8), 0)


def test_a_run_on_a_mixture_comes_back_with_its_own_number_of_components(tmp_path):
    x = rows(300, 2)
    x[150:] += 8
    method = ms.methods.Jarzynski(walkers=64, kernel=ms.kernels.MALA(0.05))
    settings = {"evaluate": False, "learning_rate": 1e-3}
    run = ms.fit(None, x, method, 5, out=tmp_path / "run", **settings)
    assert run.config["energy"]["reference"] == "mixture"
    assert len(run.inside["energy"].reference.mean) > 1
    loaded = ms.load_run(tmp_path / "run")
    assert torch.equal(loaded.energy(x), run.energy(x))
    more = ms.fit(None, x, method, 8, out=tmp_path / "run", resume=True, **settings)
    straight = ms.fit(None, x, method, 8, **settings)
    assert torch.equal(more.energy(x), straight.energy(x))
