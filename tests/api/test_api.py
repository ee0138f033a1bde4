"""The public functions, as a user calls them."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import assert_within, drawn, mean_and_error

import metastable as ms
from metastable.core.errors import ConfigError, EnergyError, InputError

SMALL = {"name": "mlp", "hidden": (16,)}


def test_import_is_light():
    code = """
import sys, metastable
assert "torch" not in sys.modules
import metastable.api
assert not {"sklearn", "matplotlib", "rich", "arviz"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dir_lists_public_names_and_unknown_ones_raise():
    assert {"fit", "sample", "log_partition", "EnergyDensity"} <= set(dir(ms))
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        ms.fitt  # noqa: B018


def test_sample_reaches_the_target():
    energy = ms.energies.DoubleWell(separation=1.0, height=1.0, tilt=0.3)
    w = ms.sample(energy, 4000, kernel=ms.kernels.MALA(0.3), steps=200, seed=1)
    value, error = mean_and_error((w.x[:, 0] > 0).double())
    assert_within(value, energy.right_weight(), error)
    assert 0 < w.info["acceptance"] <= 1


def test_sample_says_the_temperature_of_the_sgld_trick():
    w = ms.sample(ms.energies.Banana(), 10, kernel=ms.kernels.ULA(0.1, noise=0.01), steps=3)
    assert w.info["temperature"] == pytest.approx(0.01**2 / 0.2)


def test_sample_is_reproducible_and_leaves_global_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    a, b = (ms.sample(ms.energies.Banana(), 20, steps=5, seed=3) for _ in range(2))
    assert torch.equal(a.x, b.x)
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(a.x, ms.sample(ms.energies.Banana(), 20, steps=5, seed=4).x)


def test_chain_diagnostics_come_from_arviz():
    az = pytest.importorskip("arviz")
    w = ms.sample(ms.energies.Banana(), 4, steps=400, warmup=100, record=1, seed=0)
    table = az.summary(w.to_arviz(), kind="diagnostics")
    assert {"ess_bulk", "ess_tail", "r_hat"} <= set(table.columns)
    assert len(table) == 2
    with pytest.raises(InputError, match="record"):
        ms.sample(ms.energies.Banana(), 4, steps=4).to_arviz()


def test_image_events_and_plain_functions():
    def energy(x):
        return 0.5 * x.square().sum((1, 2, 3))

    w = ms.sample(energy, 50, event_shape=(1, 3, 3), kernel=ms.kernels.MALA(0.2), steps=50)
    assert w.x.shape == (50, 1, 3, 3)
    z = ms.log_partition(energy, event_shape=(1, 3, 3), walkers=128)
    assert abs(z.value - 4.5 * math.log(2 * math.pi)) < 5 * z.std_error + 1e-6


@pytest.mark.parametrize(
    ("energy", "words"),
    [
        (lambda x: x.sum(1, keepdim=True), r"squeeze\(-1\)"),
        (lambda x: x.sum(), "scalar"),
        (lambda x: x.sum(1) * math.nan, "finite"),
    ],
)
def test_bad_energies_are_named(energy, words):
    with pytest.raises(EnergyError, match=words):
        ms.sample(energy, 5, event_shape=2, steps=1)
    with pytest.raises(EnergyError, match=words):
        ms.log_partition(energy, dim=2)


def test_bad_arguments():
    with pytest.raises(ConfigError, match="step_size"):
        ms.kernels.MALA(-0.1)
    with pytest.raises(InputError, match="event_shape"):
        ms.sample(lambda x: x.sum(1), 5)
    with pytest.raises(InputError, match="did you mean 'jarzynski'"):
        ms.fit(None, np.zeros((10, 2)) + np.arange(10)[:, None], "jarzinski", 5)
    with pytest.raises(InputError, match=r"method\.walker.*walkers"):
        ms.fit(None, np.random.default_rng(0).normal(size=(10, 2)), {"name": "pcd", "walker": 5}, 5)
    with pytest.raises(InputError, match=r"NaN|nan"):
        ms.fit(None, np.full((10, 2), np.nan), "cd", 5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "a"
    method = ms.methods.Jarzynski(walkers=512, step_size=0.05)
    with drawn():
        return ms.fit(SMALL, "toy:two-modes?n=1000", method, 60, out=out, held_out=0.1, seed=0)


def test_a_run_knows_what_it_is_worth(run):
    z = run.log_partition
    assert abs(z.value - run.scores["log_z_exact"]) < 6 * z.std_error
    assert run.scores["kl_exact"] > 0
    assert len(run.modes["samples"]) == 2
    assert run.diagnosis
    assert run.walkers.x.shape[1:] == (2,)


def test_a_run_folder_holds_what_the_design_promises(run):
    names = {p.name for p in run.folder.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoints", "samples.npy", "report.html"} <= names
    config = json.loads((run.folder / "config.json").read_text())
    assert config["method"]["name"] == "jarzynski"
    assert np.load(run.folder / "samples.npy").shape[1:] == (2,)


def test_a_loaded_run_is_the_run(run):
    again = ms.load_run(run.folder)
    x = torch.randn((20, 2), generator=torch.Generator().manual_seed(0))
    assert torch.equal(run.log_prob(x), again.log_prob(x))
    assert torch.equal(run.walkers.x, again.walkers.x)
    assert again.log_partition.value == run.log_partition.value
    assert [f.name for f in again.diagnosis] == [f.name for f in run.diagnosis]


def test_sampling_goes_on_with_more_walkers(run):
    w = run.sample(5000, steps=20)
    assert len(w) == 5000
    assert 0 < w.ess <= 5000
    share = float((w.resampled(seed=1).x[:, 0] < 0).double().mean())
    assert abs(share - run.modes["samples"][0]) < 0.1


def test_methods_without_walkers_get_samples_of_the_model_not_of_their_chain():
    run = ms.fit(SMALL, "toy:two-modes?n=500", "cd", 30, seed=0)
    assert run.log_partition.std_error > 0
    assert run.walkers is not None
    assert abs(run.log_partition.value - run.scores["log_z_exact"]) < 6 * run.log_partition.std_error + 0.01


def test_a_loaded_persistent_run_has_samples_of_the_model_not_its_buffer(tmp_path):
    run = ms.fit(SMALL, "toy:two-modes?n=500", ms.methods.PersistentCD(walkers=64), 20, out=tmp_path / "a")
    again = ms.load_run(tmp_path / "a")
    assert torch.equal(again.walkers.x, run.walkers.x)
    assert np.load(tmp_path / "a" / "samples.npy").shape[1:] == run.walkers.x.shape[1:]
    assert len(again.walkers) != 64
    assert again.log_partition.value == run.log_partition.value


def test_a_mixture_energy_on_images_is_refused():
    with pytest.raises(ConfigError, match="mixture"):
        ms.fit("mixture", torch.randn((20, 1, 4, 4)), "cd", 5)


def test_your_own_module_is_reloaded_into_your_own_module(tmp_path):
    class Mine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            return 0.5 * (x * self.scale).square().sum(1)

    x = torch.randn((300, 3), generator=torch.Generator().manual_seed(0))
    run = ms.fit(Mine(), x, ms.methods.Jarzynski(walkers=512), 20, out=tmp_path / "mine", seed=0)
    exact = 1.5 * math.log(2 * math.pi) - float(run.energy.scale.detach().abs().log().sum())
    assert abs(run.log_partition.value - exact) < 6 * run.log_partition.std_error
    with pytest.raises(InputError, match="Mine"):
        ms.load_run(tmp_path / "mine")
    again = ms.load_run(tmp_path / "mine", Mine())
    assert torch.equal(again.energy.scale, run.energy.scale)


def test_a_folder_that_is_not_a_run(tmp_path):
    with pytest.raises(InputError, match="not a run"):
        ms.load_run(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        ms.load_run(tmp_path / "nothing")


def test_log_partition_interval_uses_students_t():
    z = ms.LogPartition(1.0, 0.1, degrees=7)
    low, high = z.interval(0.95)
    assert high - low == pytest.approx(2 * 2.3646 * 0.1, rel=1e-3)
    assert ms.LogPartition.from_json(z.as_json()) == ms.LogPartition(1.0, 0.1, z.ess, 7) or math.isnan(z.ess)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            {"beta": 0.3},
            r"^beta: is a setting of the method: fit\(…, method=\{'name': 'robust', 'beta': 0.3\}\)",
        ),
        ({"learning_rat": 1}, "trainer.learning_rat: unknown setting .did you mean 'learning_rate'"),
        ({"lr": 1}, "trainer.lr: unknown setting .did you mean 'learning_rate'"),
    ],
)
def test_options_that_are_not_the_trainers_are_refused_and_placed(option, words):
    with pytest.raises(ConfigError, match=words):
        ms.fit(None, torch.zeros(5, 2), "robust", 1, **option)


def box(x):
    return torch.where(((x > 0) & (x < 1)).all(1), 0.0, math.inf)


@pytest.mark.parametrize("seed", range(3))
def test_chains_begin_inside_the_walls_of_a_region(seed):
    """Uniform on the unit square: means ½, variances 1/12, whichever standard normal draws fell outside."""
    w = ms.sample(box, 2000, event_shape=2, steps=60, seed=seed)
    assert bool(((w.x > 0) & (w.x < 1)).all())
    assert float((w.x.mean(0) - 0.5).abs().max()) < 5 / math.sqrt(12 * 2000)
    assert float((12 * w.x.var(0) - 1).abs().max()) < 5 * math.sqrt(0.8 / 2000)


def test_starts_outside_the_walls_are_named():
    with pytest.raises(InputError, match=r"init: the energy is \+inf on 1 of 2 starts"):
        ms.sample(box, 2, init=torch.tensor([[0.5, 0.5], [2.0, 0.5]]))
    with pytest.raises(InputError, match=r"\+inf on every draw of a standard normal"):
        ms.sample(lambda x: box(x - 90), 2, event_shape=2)
