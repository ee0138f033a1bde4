"""`metastable evaluate` on classifiers that are energy models, and on events of many dimensions."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import drawn
from PIL import Image

JEM = (
    *("--method", "jem", "--set", "energy.name=joint-mlp", "--set", "energy.hidden=[16]"),
    *(
        "--set",
        "energy.output_scale=2",
        "--set",
        "method.source.name=pcd",
        "--set",
        "method.source.walkers=200",
    ),
    *("--set", "method.source.batch=32", "--set", "method.source.step_size=0.01"),
    *("--set", "trainer.optimiser.learning_rate=0.02", "--set", "trainer.batch_size=64"),
)
DATA = "toy:digits?n=600"


@pytest.fixture(scope="module")
def jem_folder(metastable, tmp_path_factory):
    """A classifier of small digits; tests may evaluate it into its own folder."""
    folder = tmp_path_factory.mktemp("cli") / "jem"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "metastable.summary.likelihood.affordable", lambda *_: False
        )  # its own walkers are enough here
        result = metastable("train", "--data", DATA, *JEM, "--steps", 60, "--no-progress", "--out", folder)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def evaluated(metastable, jem_folder, tmp_path_factory):
    far = tmp_path_factory.mktemp("data") / "far.npy"
    np.save(far, np.random.default_rng(0).uniform(-1, 1, (100, 1, 8, 8)))
    with pytest.MonkeyPatch.context() as patch, drawn():
        patch.setattr("metastable.summary.likelihood.affordable", lambda *_: False)
        result = metastable("evaluate", jem_folder, "--ood", far, "--ood", "toy:digits?n=300&seed=5")
    assert result.exit_code == 0, result.output
    return result, json.loads((jem_folder / "evaluation.json").read_text())


def test_a_classifier_is_judged_and_the_numbers_are_written(evaluated):
    result, found = evaluated
    judged = found["classifier"]
    assert judged["rows"] == found["rows"] == 60  # a tenth of 600
    assert judged["classes"] == 10
    assert judged["accuracy"] > 0.5  # chance is a tenth
    assert f"{judged['accuracy']:.3f} ± {judged['accuracy_se']:.3f}" in result.output
    assert 0 <= judged["calibration_error"]["value"] <= 1
    assert sum(judged["reliability"]["events"]) == 60


def test_outsiders_are_scored_by_the_run_s_own_energy(evaluated, jem_folder):
    import metastable as ms
    from metastable.cli.runs import rows_for
    from metastable.data import load_array
    from metastable.evaluation.outliers import auroc, ood_scores

    result, found = evaluated
    far, same = found["classifier"]["ood"]
    run = ms.load_run(jem_folder)
    inside = ood_scores(run.energy, rows_for(run, None)[0].x)
    outside = ood_scores(run.energy, load_array(far["name"]).x)
    assert set(far["auroc"]) == {"log_density", "confidence", "gradient"}
    for score, value in far["auroc"].items():
        assert tuple(value.values()) == pytest.approx(auroc(inside[score], outside[score]), abs=1e-6)
        assert f"{value['value']:.3f} ± {value['std_error']:.3f}" in result.output
    again = same["auroc"]["log_density"]  # more of the same kind
    assert abs(again["value"] - 0.5) < 6 * again["std_error"]


def test_log_z_is_said_to_be_missing_and_not_shown(evaluated):
    result, found = evaluated
    assert found["log_partition"] is None
    assert found["log_likelihood"] is None
    assert "log Z was not estimated" in result.output
    assert "ask for it with --log-z" in result.output
    assert found["samples"] == "the method's own chains when training ended"
    assert found["energy_distance"] > 0


def test_pictures_lie_beside_the_numbers_and_on_the_page(evaluated, jem_folder):
    folder = jem_folder / "evaluation"
    for name in ("reliability.png", "scores.png", "class_samples.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    with np.load(folder / "figures.npz") as stored:
        assert stored["class_samples"].shape == (10, 8, 1, 8, 8)
        assert stored["outside_0_log_density"].shape == (100,)
    page = (jem_folder / "report.html").read_text()
    for words in ("As a classifier", "Reliability", "AUROC by", "against far.npy", "Samples of each class"):
        assert words in page, words


def test_samples_of_one_class_are_of_that_class(metastable, jem_folder, tmp_path):
    import torch

    import metastable as ms

    out = tmp_path / "threes.npy"
    result = metastable("sample", jem_folder, "--label", 3, "--n", 40, "--steps", 5, "--out", out)
    assert result.exit_code == 0, result.output
    assert "weighed by p(y = 3 | x)" in result.output
    x = torch.from_numpy(np.load(out))
    guess = ms.load_run(jem_folder).energy.logits(x).argmax(1)
    assert float((guess == 3).double().mean()) > 0.5  # chance is a tenth
    refused = metastable("sample", jem_folder, "--label", 10, "--out", out)
    assert "labels: must be from 0 to 9, got 10" in refused.output


def test_log_z_can_be_asked_for_and_another_file_leaves_the_run_alone(
    metastable, jem_folder, evaluated, tmp_path, monkeypatch
):
    from metastable.core.types import LogPartition

    z = LogPartition(1.25, 0.01, 100.0, 3)
    monkeypatch.setattr("metastable.summary.samples.log_partition", lambda *_, **__: z)
    before = (jem_folder / "report.html").read_bytes()
    result = metastable("evaluate", jem_folder, "--log-z", "--out", tmp_path / "e.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["log_partition"]["value"] == 1.25
    assert "1.250 ± 0.010" in result.output
    assert (tmp_path / "e" / "reliability.png").is_file()
    assert (jem_folder / "report.html").read_bytes() == before


def test_data_without_labels_are_scored_as_a_density_only(metastable, jem_folder, tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(0, 1, (30, 1, 8, 8)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metastable.summary.likelihood.affordable", lambda *_: False)
        result = metastable(
            "evaluate", jem_folder, "--data", tmp_path / "x.npy", "--out", tmp_path / "e.json"
        )
    assert result.exit_code == 0, result.output
    assert "classifier" not in json.loads((tmp_path / "e.json").read_text())
    assert "not judged as a classifier: the data have no labels" in result.output
    assert "not estimated: the energy has an output scale of 2," in result.output  # not its dimensions


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (("energy.name=joint-mlp", "energy.classes=3"), "labels: must be from 0 to 2, got"),
        (("energy.name=mlp",), "energy: ClassEnergy has no 'marginal', which JEM needs"),
    ],
)
def test_a_dry_run_refuses_labels_that_are_no_classes_and_energies_that_are_no_classifiers(
    refused, assignments, words
):
    settings = [part for assignment in assignments for part in ("--set", assignment)]
    assert words in refused("train", "--data", DATA, "--method", "jem", "--dry-run", *settings)


def test_outsiders_need_a_classifier_labels_and_the_same_shape(refused, jem_folder, pcd_folder, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((5, 1, 8, 8)))
    np.save(tmp_path / "three.npy", np.zeros((5, 3)))
    assert "ood: needs a run of a classifier" in refused("evaluate", pcd_folder, "--ood", DATA)
    line = refused("evaluate", jem_folder, "--data", tmp_path / "x.npy", "--ood", DATA)
    assert "the data have no labels" in line
    line = refused("evaluate", jem_folder, "--ood", tmp_path / "three.npy")
    assert "ood: rows must have the run's shape (1, 8, 8), got (3,)" in line


def test_a_picture_run_is_evaluated_without_log_z(metastable, refused, tmp_path):
    """From training to evaluation, at 225 dimensions and with nothing patched: nobody waits for log Z."""
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(120, 1, 15, 15)))
    out = tmp_path / "run"
    result = metastable(
        *("train", "--data", tmp_path / "x.npy", "--method", "short-run", "--steps", 2, "--out", out),
        *(
            "--no-progress",
            "--set",
            "method.steps=2",
            "--set",
            "energy.name=mlp",
            "--set",
            "energy.hidden=[4]",
        ),
    )
    assert result.exit_code == 0, result.output
    assert "log Z was not estimated: events have 225 dimensions" in result.output
    result = metastable("evaluate", out)
    assert result.exit_code == 0, result.output
    found = json.loads((out / "evaluation.json").read_text())
    assert found["samples"] == "none were kept"
    assert found["outlier_share"] is None
    assert "ask for it with --log-z" in result.output


def test_chains_that_ran_away_are_of_no_class():
    import torch
    from torch import Tensor, nn

    from metastable.energies import JointEnergy
    from metastable.methods import JEM, ShortRun
    from metastable.runs.run import Run
    from metastable.summary.classifier import sampled

    class Bowl(nn.Module):
        """The same logits for both classes, on which a step of 10 multiplies x by −9."""

        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.shift - 0.5 * x.square().sum(1, keepdim=True).expand(-1, 2)

    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    energy = JointEnergy(Bowl(), output_scale=1.0, classes=2)
    run = Run(energy, "jem", [], None, None, trained_with=JEM(source=ShortRun(step_size=10.0)))
    numbers, arrays = sampled(run, x, [], 0)
    assert not np.isfinite(arrays["class_samples"]).any()
    assert numbers["agreement"] == 0


def test_classes_of_another_folder_are_matched_by_name(metastable, refused, tmp_path):
    rng = np.random.default_rng(0)
    for folder, names in (("both", "ab"), ("second", "b"), ("odd", "bc")):
        for name in names:
            (tmp_path / folder / name).mkdir(parents=True)
            for i in range(40):
                pixels = rng.integers(0, 60, (8, 8), dtype=np.uint8) + (180 if name == "b" else 0)
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / folder / name / f"{i}.png")
    both, second, odd = (f"images:{tmp_path / name}" for name in ("both", "second", "odd"))
    run, out = tmp_path / "run", tmp_path / "e.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metastable.summary.likelihood.affordable", lambda *_: False)
        noise = ("--set", "trainer.data_noise=0.1")
        result = metastable(
            "train", "--data", both, *JEM, *noise, "--steps", 40, "--no-progress", "--out", run
        )
        assert result.exit_code == 0, result.output
        result = metastable("evaluate", run, "--data", second, "--class-shares", "--out", out)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["classifier"]["accuracy"] > 0.9
    assert found["images"]["class_shares"]["accuracy"] > 0.9
    assert "data: classes must be among a, b, got c" in refused("evaluate", run, "--data", odd)
    words = ("--images", second, "--mask", "left", "--n", 4, "--steps", 2, "--out", tmp_path / "out")
    result = metastable("restore", run, *words)
    assert result.exit_code == 0, result.output
    errors = json.loads((tmp_path / "out" / "restored.json").read_text())["mean_squared_error"]
    assert errors["class_mean"] < 0.1  # of class a it would be 2
