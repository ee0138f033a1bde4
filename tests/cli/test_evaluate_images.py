"""`metastable evaluate` on samples that are pictures, of a run and without one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import drawn
from PIL import Image
from torch import Tensor, nn

from metastable.core.errors import InputError
from metastable.evaluation.frechet import frechet_distance, statistics_of
from metastable.evaluation.image_features import as_pictures, open_network


class Flat(nn.Module):
    """Features that are the first five pixels."""

    def __init__(self, classes: int = 0) -> None:
        super().__init__()
        self.side, self.classes = 0, classes

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, 7:12]


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.side = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.flatten(1)[:, 7:12], 5 * x.flatten(1)[:, 14:17]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Networks, and pictures of two classes: a bright upper or lower half."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, module in (("flat", Flat()), ("headed", Headed())):
        torch.jit.script(module).save(str(folder / f"{name}.pt"))
    rng = np.random.default_rng(0)
    for name, n in (("train", 400), ("fresh", 120), ("other", 60)):
        labels = (rng.random(n) < 0.25).astype(np.int64)
        x = rng.uniform(-1, -0.2, (n, 1, 6, 6))
        x[labels == 0, :, :3] += 1.1
        x[labels == 1, :, 3:] += 1.1
        np.savez(folder / f"{name}.npz", x=x.astype(np.float32), labels=labels)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("METASTABLE_DATA", str(tmp_path / "cache"))
    monkeypatch.delenv("METASTABLE_INCEPTION", raising=False)
    monkeypatch.setattr("metastable.evaluation.image_features.PACKAGE", "no_such_package")


@pytest.fixture(scope="module")
def picture_run(metastable, files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "pictures"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metastable.summary.likelihood.affordable", lambda *_: False)
        result = metastable(
            *("train", "--data", files / "train.npz", "--method", "pcd", "--steps", 3, "--no-progress"),
            *("--set", "energy.name=mlp", "--set", "energy.hidden=[4]", "--set", "method.walkers=40"),
            *("--set", "method.step_size=0.0001", "--out", folder),
        )
    assert result.exit_code == 0, result.output
    return folder


def features(files, name: str) -> Tensor:
    with np.load(files / f"{name}.npz") as stored:
        return open_network(files / "flat.pt")(as_pictures(torch.from_numpy(stored["x"]), name)).values


def test_two_sets_are_compared_without_a_run(metastable, files, tmp_path):
    out = tmp_path / "scores.json"
    command = ("evaluate", "--samples", files / "other.npz", "--reference", files / "train.npz")
    result = metastable(
        *command, "--data", files / "fresh.npz", "--inception", files / "flat.pt", "--out", out
    )
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())["images"]
    exact = frechet_distance(*(statistics_of(features(files, name)) for name in ("other", "train")))
    assert found["frechet_distance"]["value"] == pytest.approx(exact)
    assert found["frechet_distance"]["floor"]["images"] == pytest.approx(60)
    assert found["frechet_distance"]["reference_images"] == pytest.approx(400)
    for words in (
        "Fréchet distance by flat.pt",
        "KID",
        "precision",
        "60 to 400",
        "(60 images)",
        "has no class head",
    ):
        assert words in result.output, words
    assert "FID" not in result.output
    assert (tmp_path / "scores" / "nearest.png").read_bytes().startswith(b"\x89PNG")
    kept = list((tmp_path / "cache" / "features").iterdir())
    assert len(kept) == 4  # features and statistics of the data and of the fresh ones
    again = metastable(*command, "--inception", files / "flat.pt")
    assert f"{found['frechet_distance']['value']:.4g}" in again.output


def test_statistics_weights_and_bytes_may_be_given(metastable, files, tmp_path):
    whole = statistics_of(features(files, "train"))
    whole.save(tmp_path / "train.npz")
    with np.load(files / "other.npz") as stored:
        as_bytes = np.round((stored["x"] + 1) * 127.5).astype(np.uint8)
    np.save(tmp_path / "some.npy", np.concatenate([as_bytes, 0 * as_bytes]))
    np.save(tmp_path / "some.log_weight.npy", np.repeat([0.0, -80.0], 60))
    command = ("evaluate", "--samples", tmp_path / "some.npy", "--fid-statistics", tmp_path / "train.npz")
    command += ("--inception", files / "headed.pt", "--out", tmp_path / "e.json")
    result = metastable(*command, "--log-weight", tmp_path / "some.log_weight.npy")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "e.json").read_text())["images"]
    exact = frechet_distance(statistics_of(features(files, "other")), whole)
    assert found["frechet_distance"]["value"] == pytest.approx(exact, rel=1e-6)
    assert found["ess"] == pytest.approx(60)
    assert 1 <= found["class_score"]["value"] <= 3
    assert "class score by headed.pt" in result.output  # its three classes are not Inception's
    assert "Inception Score" not in result.output
    assert "inception_score" not in found
    assert "kid" not in found
    forgotten = metastable(*command)
    assert "has weights beside it that are not used" in forgotten.output


def test_bright_pictures_stay_on_their_scale(metastable, files, tmp_path):
    pixels = np.random.default_rng(0).integers(150, 250, (60, 6, 6), dtype=np.uint8)
    (tmp_path / "bright").mkdir()
    for i, picture in enumerate(pixels):
        Image.fromarray(picture).save(tmp_path / "bright" / f"{i:02}.png")
    np.save(tmp_path / "x.npy", pixels[:, None] / 127.5 - 1)
    bright, out = f"images:{tmp_path / 'bright'}", tmp_path / "e.json"
    command = ("evaluate", "--inception", files / "flat.pt", "--out", out)
    for samples in (bright, tmp_path / "x.npy"):
        result = metastable(*command, "--samples", samples, "--reference", bright)
        assert result.exit_code == 0, result.output
        found = json.loads(out.read_text())["images"]
        assert found["frechet_distance"]["value"] == pytest.approx(0, abs=1e-6)
        assert found["precision"]["value"] == pytest.approx(1)
    assert "x.npy goes from 0 to 1 and was read on [−1, 1]" in result.output
    x = open_network(files / "flat.pt")(as_pictures(torch.from_numpy(pixels[:, None]), "x")).values
    statistics_of(x).save(tmp_path / "own.npz")
    metastable(*command, "--samples", bright, "--fid-statistics", tmp_path / "own.npz")
    found = json.loads(out.read_text())["images"]
    assert found["frechet_distance"]["value"] == pytest.approx(0, abs=1e-6)
    with np.load(files / "other.npz") as stored:
        np.save(tmp_path / "y.npy", (stored["x"] + 1) / 2)
    result = metastable(*command, "--samples", tmp_path / "y.npy", "--reference", files / "other.npz")
    assert json.loads(out.read_text())["images"]["frechet_distance"]["value"] == pytest.approx(0, abs=1e-6)


def test_a_run_is_judged_as_pictures_on_its_page_too(metastable, picture_run, files):
    with drawn():
        result = metastable(
            *("evaluate", picture_run, "--inception", files / "flat.pt", "--images", 40, "--class-shares")
        )
    assert result.exit_code == 0, result.output
    found = json.loads((picture_run / "evaluation.json").read_text())["images"]
    assert (found["samples"], found["data_images"], found["held_out_images"]) == (40, 360, 40)
    assert found["kid"]["floor"]["images"] == pytest.approx(40)
    shares = found["class_shares"]
    assert shares["accuracy"] == 1
    assert sum(shares["samples"]) == pytest.approx(1)
    assert shares["data"] == pytest.approx([0.75, 0.25], abs=0.08)
    page = (picture_run / "report.html").read_text()
    for words in (
        "As pictures",
        "Fréchet distance by flat.pt",
        "Nearest training images",
        "Shares of classes",
    ):
        assert words in page, words
    assert "Shares of classes: 0 " in result.output
    assert (picture_run / "evaluation" / "nearest.png").is_file()


def test_more_images_than_walkers_are_drawn_and_the_environment_names_the_network(
    metastable, picture_run, files, tmp_path, monkeypatch
):
    monkeypatch.setenv("METASTABLE_INCEPTION", str(files / "flat.pt"))
    result = metastable("evaluate", picture_run, "--images", 2010, "--out", tmp_path / "e.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "e.json").read_text())["images"]
    assert found["samples"] == 2010
    assert found["ess"] <= 2000.5  # copies that went on are worth no more than the walkers
    plain = metastable("evaluate", picture_run, "--out", tmp_path / "p.json")
    assert plain.exit_code == 0, plain.output
    assert "images" not in json.loads((tmp_path / "p.json").read_text())


def test_a_network_of_an_installed_package_is_found_without_running_it(
    metastable, files, tmp_path, monkeypatch
):
    package = tmp_path / "site" / "a_package_of_networks"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('was imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr("metastable.evaluation.image_features.PACKAGE", package.name)
    command = ("evaluate", "--samples", files / "other.npz", "--reference", files / "train.npz")
    without = metastable(*command)
    assert "no network was named" in without.output
    assert "pip install 'metastable[fid]'" in without.output
    (package / "default_1.pt").write_bytes((files / "flat.pt").read_bytes())
    assert "Fréchet distance by default_1.pt" in metastable(*command).output
    monkeypatch.setenv("METASTABLE_INCEPTION", str(files / "flat.pt"))
    assert "Fréchet distance by flat.pt" in metastable(*command).output
    assert "class score by headed.pt" in metastable(*command, "--inception", files / "headed.pt").output


def test_a_classifier_that_errs_more_than_standard_errors_is_said_to():
    from metastable.report.sections.images import share_lines

    shares = {"classes": ["2", "3"], "samples": [0.4, 0.6], "data": [0.5, 0.5], "std_error": [0.02, 0.02]}
    shares |= {"accuracy_se": 0.01, "test_images": 400, "noise": 0.0, "confidence": 0.7}
    lines = [share_lines({"class_shares": {**shares, "accuracy": a}})[-1] for a in (0.7, 0.97)]
    assert "Shares may be off by its mistakes, 0.3 in all" in lines[0]
    assert "may be off" not in lines[1]


def test_what_cannot_be_judged_as_pictures_is_refused(refused, picture_run, pcd_folder, files, tmp_path):
    np.save(tmp_path / "colour.npy", np.zeros((8, 3, 6, 6)))
    np.save(tmp_path / "wide.npy", np.linspace(-9, 9, 8 * 36).reshape(8, 1, 6, 6))
    np.savez(tmp_path / "few.npz", mean=np.zeros(3), covariance=np.eye(3))
    train, flat = files / "train.npz", files / "flat.pt"
    assert "run: give the folder of a run, or --samples" in refused("evaluate")
    for option, words in (("ood", ("--ood", "toy:circles")), ("denoise", ("--denoise",))):
        line = refused("evaluate", "--samples", train, "--reference", train, *words)
        assert f"{option}: must be left out where pictures are judged without a run" in line
    assert "denoise: this run was trained without noise" in refused("evaluate", picture_run, "--denoise")
    assert "reference: give the images" in refused("evaluate", "--samples", train)
    assert "needs a run on pictures" in refused("evaluate", pcd_folder, "--images", 10)
    assert "no such file" in refused("evaluate", picture_run, "--inception", tmp_path / "none.pt")
    line = refused("evaluate", "--samples", tmp_path / "colour.npy", "--reference", train)
    assert "pictures must be 3 × 6 × 6 as the samples are, got 1 × 6 × 6" in line
    line = refused("evaluate", "--samples", train, "--reference", tmp_path / "wide.npy")
    assert "wide.npy: values must lie on" in line
    line = refused("evaluate", "--samples", tmp_path / "wide.npy", "--reference", train)
    assert "samples: values must lie on [−1, 1]" in line
    line = refused(
        *("evaluate", "--samples", train, "--fid-statistics", tmp_path / "few.npz", "--inception", flat)
    )
    assert "fid_statistics: must be of 5 features, as the network gives, got 3" in line
    line = refused("evaluate", "--samples", train, "--reference", tmp_path / "wide.npy", "--class-shares")
    assert "wide.npy: values must lie on" in line
    np.save(tmp_path / "bare.npy", np.zeros((8, 1, 6, 6)))
    line = refused("evaluate", "--samples", train, "--reference", tmp_path / "bare.npy", "--class-shares")
    assert "class_shares: needs labelled images" in line


def test_samples_of_noisy_images_are_said_to_be_noisy_and_told_by_a_classifier_of_such(
    picture_run, monkeypatch
):
    import metastable as ms
    from metastable.cli.images import ImageOptions, run_question
    from metastable.cli.runs import rows_for

    run = ms.load_run(picture_run)
    assert run.data_noise == 0
    for settings, noise in (({"data_noise": 0.3}, 0.3), ({"data_noise": 0.3, "data_noise_final": 0.1}, 0.1)):
        monkeypatch.setitem(run.config, "trainer", run.config["trainer"] | settings)
        asked = run_question(run, *rows_for(run, None), ImageOptions(class_shares=True), 0, None)
        assert asked.labelled is not None
        assert asked.labelled.noise == noise
        assert f"the noise of their training, {noise}" in asked.samples_from
        clean = run_question(
            run, *rows_for(run, None), ImageOptions(class_shares=True, denoise=True), 0, None
        )
        assert clean.labelled is not None
        assert clean.labelled.noise == 0
        assert torch.allclose(clean.samples.x, run.denoised(asked.samples.x).to(asked.samples.x))
        assert f"without the noise of their training, {noise}" in clean.samples_from


def test_a_run_without_samples_is_to_be_told_how_many(picture_run, monkeypatch):
    import metastable as ms
    from metastable.cli.images import ImageOptions, run_question
    from metastable.cli.runs import rows_for

    run = ms.load_run(picture_run)
    run.walkers = None
    with pytest.raises(InputError, match="images: this run kept no samples; say how many"):
        run_question(run, *rows_for(run, None), ImageOptions(class_shares=True), 0, None)


def test_log_weights_that_are_none_are_named(refused, files, tmp_path):
    (tmp_path / "junk.npy").write_bytes(b"junk")
    np.save(tmp_path / "words.npy", np.array(["a"] * 60))
    np.save(tmp_path / "short.npy", np.zeros(3))
    np.savez(tmp_path / "two.npz", a=np.zeros(60), b=np.zeros(60))
    np.save(tmp_path / "nan.npy", np.full(60, np.nan))
    command = ("evaluate", "--samples", files / "other.npz", "--reference", files / "train.npz")
    for name, words in (
        ("none.npy", "log_weight: no such file: "),
        ("junk.npy", "junk.npy is not a readable .npy file"),
        ("words.npy", "log_weight: must be 60 numbers, one for each of --samples, got <U1 of shape (60,)"),
        ("short.npy", "log_weight: must be 60 numbers, one for each of --samples, got float64 of shape (3,)"),
        ("two.npz", "log_weight: must be 60 numbers, one for each of --samples, got several arrays"),
        ("nan.npy", "log_weight: must have a finite largest value"),
    ):
        assert words in refused(*command, "--log-weight", tmp_path / name)


def test_one_sample_with_all_the_weight_is_no_pair(metastable, files, tmp_path):
    np.save(tmp_path / "one.npy", np.where(np.arange(60) == 7, 0.0, -np.inf))
    command = ("evaluate", "--samples", files / "other.npz", "--reference", files / "train.npz")
    command += ("--inception", files / "flat.pt", "--out", tmp_path / "e.json")
    result = metastable(*command, "--log-weight", tmp_path / "one.npy")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "e.json").read_text())["images"]
    assert not {"kid", "precision", "recall"} & found.keys()
    assert any("the samples are worth 1.0 images" in note for note in found["notes"])


def test_features_that_cannot_be_kept_are_made_all_the_same(metastable, files, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("METASTABLE_DATA", str(tmp_path / "file"))
    command = ("evaluate", "--samples", files / "other.npz", "--reference", files / "train.npz")
    result = metastable(*command, "--inception", files / "flat.pt")
    assert result.exit_code == 0, result.output
    assert "Fréchet distance by flat.pt" in result.output
    assert "train.npz are not kept for the next time (" in " ".join(result.output.split())
