"""`metastable sample`: where its samples come from, what they are worth, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import metastable as ms
from metastable.cli import runs
from metastable.core.batch import Batch
from metastable.core.types import Walkers
from metastable.kernels import MALA, ULA, run_chain
from metastable.methods import JEM, PersistentCD, Robust, ScoreMatching, ShortRun
from metastable.runs.run import Run
from metastable.summary.classifier import moves_of

SIDE = 15
"""Of pictures with 225 dimensions, of which log Z is not estimated."""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """The folder of a classifier of pictures that kept no samples, beside its data."""
    folder = tmp_path_factory.mktemp("pictures")
    x = np.random.default_rng(0).normal(3, 1, (60, 1, SIDE, SIDE)).astype(np.float32)
    np.savez(folder / "x.npz", x=x, labels=np.arange(60) % 3)
    energy = {"name": "joint-mlp", "hidden": [8], "output_scale": 1.0}
    method = JEM(source=ShortRun(steps=7, step_size=1e-3))
    ms.fit(energy, folder / "x.npz", method, 2, out=folder / "run", held_out=0.1)
    config = folder / "run" / "config.json"  # as the command line names its data
    config.write_text(config.read_text().replace('"x.npz"', f'"{folder / "x.npz"}"'))
    return folder


@pytest.fixture
def no_smc(monkeypatch):
    """Sequential Monte Carlo would take minutes, and must not be begun."""

    def refuse(*_, **__):
        raise AssertionError("sequential Monte Carlo was begun")

    monkeypatch.setattr("metastable.summary.samples.log_partition", refuse)


def test_a_run_of_many_dimensions_without_samples_starts_chains_from_noise(
    metastable, pictures, no_smc, tmp_path
):
    out = tmp_path / "x.npy"
    result = metastable("sample", pictures / "run", "--n", 10, "--label", 1, "--out", out)
    assert result.exit_code == 0, result.output
    for words in (
        "from 10 chains of 7 steps by ULA(step_size=0.001",  # of its own length and kernel
        "from noise with the mean and covariance of the data",
        "since the run kept no samples and events have 225 dimensions",
    ):
        assert words in result.output, result.output
    assert "effective sample size" not in result.output  # nobody knows
    x = np.load(out)
    assert x.shape == (10, 1, SIDE, SIDE)
    assert abs(x.mean() - 3) < 0.5  # where the data are
    again = tmp_path / "again.npy"
    metastable("sample", pictures / "run", "--n", 10, "--label", 1, "--out", again)
    assert np.array_equal(np.load(again), x)


def test_chains_from_noise_do_without_the_data_and_take_steps(
    metastable, pictures, no_smc, tmp_path, monkeypatch
):
    monkeypatch.setattr(runs, "data_of", lambda _: (_ for _ in ()).throw(runs.InputError("gone")))
    result = metastable(
        "sample", pictures / "run", "--n", 4, "--steps", 3, "--weighted", "--out", tmp_path / "x.npy"
    )
    assert result.exit_code == 0, result.output
    assert "4 chains of 3 steps by ULA(" in result.output
    assert "from standard normal noise" in result.output
    assert abs(np.load(tmp_path / "x.npy").mean()) < 0.5
    assert not np.load(tmp_path / "x.log_weight.npy").any()


def test_affordable_runs_without_samples_still_go_through_sequential_monte_carlo(
    metastable, pcd_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("metastable.summary.samples.kept_walkers", lambda _: (None, "none were kept"))
    result = metastable("sample", pcd_folder, "--n", 5, "--steps", 2, "--out", tmp_path / "x.npy")
    assert "from sequential Monte Carlo on the energy" in result.output


def few_of_a_class() -> Run:
    """200 walkers, one of them of class 1, with weights so that they are the run's own."""
    classifier = nn.Linear(2, 2)
    nn.init.constant_(classifier.bias, 0.0)
    classifier.weight.data.copy_(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
    x = torch.tensor([[-30.0, 0.0]]).repeat(200, 1)
    x[3, 0] = 30.0
    weight = torch.zeros(200, dtype=torch.float64).index_fill(0, torch.tensor([0]), 1e-3)
    energy = ms.energies.JointEnergy(classifier, output_scale=1.0)
    return Run(energy, "jem", [], Walkers(x, weight), None, config={"event_shape": [2]})


def test_the_effective_sample_size_counts_the_walkers_of_the_class(metastable, monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "open_run", lambda *_: few_of_a_class())
    words = ("sample", "any", "--n", 100, "--steps", 2, "--out", tmp_path / "x.npy")
    result = metastable(*words, "--label", 1)
    assert "weighed by p(y = 1 | x), effective sample size 1\n" in result.output
    assert "warning: to begin with there were 1.0 effective walkers of class 1" in result.output
    for more in (("--label", 0), ()):  # there are 199 of class 0
        result = metastable(*words, *more)
        assert result.exit_code == 0, result.output
        assert "warning" not in result.output


def test_mode_weights_are_printed_with_an_error_that_knows_the_start(metastable, monkeypatch, tmp_path):
    """1,000 samples of 100 walkers, a fifth of them on the left: ± √(0.2 · 0.8 / 100), not / 1000."""
    energy = ms.energies.GaussianMixture(torch.tensor([[-5.0], [5.0]]))
    x = torch.where(torch.arange(100)[:, None] < 20, -5.0, 5.0)
    weight = torch.zeros(100, dtype=torch.float64).index_fill(0, torch.tensor([0]), 1e-6)
    modes = {"centers": [[5.0], [-5.0]]}

    def run(*_, **more):
        return Run(energy, "own", [], Walkers(x, weight), None, config={"event_shape": [1]}, **more)

    words = ("sample", "any", "--n", 1000, "--steps", 5, "--out", tmp_path / "x.npy")
    monkeypatch.setattr(runs, "open_run", lambda *_: run(modes=modes))
    assert "mode weights: 0.800 ± 0.040, 0.200 ± 0.040" in metastable(*words).output
    for unknown in (None, {"centers": None}):  # one mode, or pictures whose centres were not written
        monkeypatch.setattr(runs, "open_run", lambda *_, m=unknown: run(modes=m))
        assert "mode weights" not in metastable(*words).output


def test_a_density_draws_for_itself(metastable, refused, monkeypatch, tmp_path):
    def run(*_):
        drawing = SimpleNamespace(sample=lambda players, n, rng: Walkers.equal(torch.full((n, 2), 7.0)))
        return Run(
            nn.Linear(2, 1), "density", [], None, None, config={"event_shape": [2]}, trained_with=drawing
        )

    monkeypatch.setattr(runs, "open_run", run)
    words = ("sample", "any", "--n", 6, "--out", tmp_path / "x.npy")
    result = metastable(*words)
    assert "6 samples of shape (2,) from the density's own draws, effective sample size 6" in result.output
    assert (np.load(tmp_path / "x.npy") == 7).all()
    assert "steps: this run is of a density, which draws for itself" in refused(*words, "--steps", 3)


# ---- what the kernel of a run's chains is


@pytest.mark.parametrize("noise", [0.2, 0.01])
def test_chains_of_another_temperature_are_the_same_chains_on_what_was_learned(noise):
    """ULA(h, σ) on E is ULA(σ²/2) on E/T: no number of a step differs."""
    method = PersistentCD(kernel=ULA(0.1, noise=noise))
    energy = ms.energies.GaussianMixture(torch.zeros(1, 2, dtype=torch.float64))
    run = Run(energy, "pcd", [], None, None, trained_with=method, power=1 / method.temperature)
    x = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kernels = ((method.moves, run.energy), (moves_of(run, x, 0), run.learned_energy))
    one, two = (
        run_chain(k, e, k.init(e, x), 3, torch.Generator().manual_seed(1)).state.x for k, e in kernels
    )
    torch.testing.assert_close(one, two)
    assert not torch.allclose(one, x, atol=1e-3)


def test_a_method_without_chains_gets_a_warmed_up_kernel():
    energy = ms.energies.GaussianMixture(torch.zeros(1, 2))
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    run = Run(energy, "score-matching", [], None, None, trained_with=ScoreMatching())
    assert isinstance(moves_of(run, x, 0), MALA)
    assert runs.own_steps(run.trained_with) is None
    assert runs.own_steps(JEM(source=Robust(source=ShortRun(steps=9)))) == 9


# ---- what is refused


@pytest.fixture(scope="module")
def contexts_folder(tmp_path_factory):
    rng = torch.Generator().manual_seed(0)
    data = Batch(torch.randn(40, 1, generator=rng), torch.randn(40, 1, generator=rng))
    folder = tmp_path_factory.mktemp("contexts") / "run"
    method = ms.methods.RankingNCE(negatives_per_datum=2, proposal="gaussian")
    ms.fit(None, data.x, method, 2, given=data.given, out=folder, evaluate=False)
    return folder


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--label", 0), "label: samples of contexts have no classes"),
        (("--weighted",), "weighted: samples of contexts are written with equal weights"),
        (("--corrected",), "corrected: samples of contexts are of the model itself"),
    ],
)
def test_options_that_samples_of_contexts_do_not_have_are_refused(refused, contexts_folder, option, words):
    assert words in refused("sample", contexts_folder, "--given", "0.5", *option)


def test_contexts_for_a_classifier_are_told_to_be_labels(refused, pictures):
    assert "samples of one class: label=" in refused("sample", pictures / "run", "--given", "1")


def test_evaluate_says_why_labels_of_a_file_were_not_taken(metastable, refused, pictures, tmp_path):
    path = tmp_path / "names.npz"
    np.savez(path, x=np.zeros((6, 1, SIDE, SIDE), np.float32), labels=list("abcabc"))
    result = metastable("evaluate", pictures / "run", "--data", path, "--out", tmp_path / "e.json")
    assert "not judged as a classifier: labels: must be integers, got <U1, 'a' in row 0" in result.output
    line = refused("evaluate", pictures / "run", "--data", path, "--ood", path)
    assert "labels: must be integers, got <U1, 'a' in row 0" in line
