"""`metastable restore` and `sample --denoise`: what they write, and what they refuse."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import metastable as ms
from metastable.cli.restore import look_at_scale
from metastable.core.errors import InputError
from metastable.core.types import Walkers
from metastable.data import load_array
from metastable.runs.model import Model
from metastable.runs.restoring import events_of, require_scale
from metastable.runs.run import Run

SIDE = 8


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """The folder of a run of small pictures with noise on them, beside its data and a mask."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    level = rng.normal(
        0, 1, (80, 1, 1, 1)
    )  # all pixels of a picture agree: half of it says what the other is
    x = (level + 0.1 * rng.normal(0, 1, (80, 1, SIDE, SIDE))).astype(np.float32)
    np.save(folder / "x.npy", x)
    np.save(folder / "mask.npy", np.eye(SIDE))
    method = ms.methods.PersistentCD(walkers=80)
    energy = {"name": "mlp", "hidden": [8], "reference": "gaussian"}
    ms.fit(energy, folder / "x.npy", method, 2, out=folder / "run", data_noise=0.2, seed=0)
    return folder


def test_half_of_a_picture_comes_back_from_the_other(metastable, pictures, tmp_path):
    out = tmp_path / "out"
    words = ("--images", pictures / "x.npy", "--mask", "left", "--n", 3, "--draws", 4, "--steps", 40)
    result = metastable("restore", pictures / "run", *words, "--out", out)
    assert result.exit_code == 0, result.output
    assert "mean squared error of what was not known" in result.output
    kept, x = np.load(out / "restored.npz"), np.load(pictures / "x.npy")[:3]
    assert kept["draws"].shape == (3, 4, 1, SIDE, SIDE)
    assert np.array_equal(kept["mean"][..., SIDE // 2 :], x[..., SIDE // 2 :])
    assert np.allclose(kept["spread"], kept["draws"].std(1, ddof=1), atol=1e-6)
    said = json.loads((out / "restored.json").read_text())
    error = float(((kept["mean"] - x)[..., : SIDE // 2] ** 2).mean())
    assert said["mean_squared_error"]["mean"] == pytest.approx(error, rel=1e-5)
    assert error < 0.5 * said["mean_squared_error"]["given"]
    assert (out / "restored.png").stat().st_size > 0


def test_noise_that_is_added_is_taken_off(metastable, pictures, tmp_path):
    words = ("--images", pictures / "x.npy", "--noise", 0.6, "--add-noise", "--n", 5, "--draws", 6)
    result = metastable("restore", pictures / "run", *words, "--steps", 60, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    errors = json.loads((tmp_path / "restored.json").read_text())["mean_squared_error"]
    assert errors["given"] == pytest.approx(0.36, rel=0.2)  # over all pixels: none of them was known
    assert errors["mean"] < 0.85 * errors["given"]  # the reference says 1.44/(1.44 + 0.36) of it


def test_without_chains_no_acceptance_is_told(metastable, pictures, tmp_path):
    words = ("--images", pictures / "x.npy", "--noise", 0.1, "--n", 2, "--draws", 2, "--out", tmp_path)
    result = metastable("restore", pictures / "run", *words)
    assert result.exit_code == 0, result.output
    assert "2 draws each, and no chains" in result.output
    assert "accepted" not in result.output
    assert "acceptance" not in json.loads((tmp_path / "restored.json").read_text())


@pytest.mark.parametrize("mask", [(), ("--mask", "left")])
def test_noise_without_a_truth_has_no_error(metastable, pictures, tmp_path, mask):
    words = ("--images", pictures / "x.npy", "--noise", 0.6, "--n", 2, "--draws", 1, "--steps", 2)
    result = metastable("restore", pictures / "run", *words, *mask, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "restored.json").read_text())["mean_squared_error"] is None


def test_what_was_given_may_be_the_truth_itself(metastable, pictures, tmp_path):
    words = ("--images", pictures / "x.npy", "--truth", pictures / "x.npy", "--noise", 0.2, "--steps", 2)
    result = metastable("restore", pictures / "run", *words, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out" / "restored.json").read_text())["mean_squared_error"]["given"] == 0


def test_a_mask_from_a_file_is_of_all_channels(metastable, pictures, tmp_path):
    words = ("--images", pictures / "x.npy", "--mask", pictures / "mask.npy", "--n", 2, "--steps", 2)
    assert metastable("restore", pictures / "run", *words, "--out", tmp_path).exit_code == 0
    missing = np.load(tmp_path / "restored.npz")["missing"]
    assert np.array_equal(missing, np.broadcast_to(np.eye(SIDE, dtype=bool), missing.shape))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--mask", "middle"), "mask: must be one of left"),
        (("--mask", "none.npy"), "mask: must be one of left"),
        (("--mask", "left", "--noise", -1), "noise: must be a finite number of at least 0, got -1"),
        ((), "mask: hides nothing, and noise is 0"),
        (
            ("--mask", "left", "--truth", "toy:circles"),
            "truth: must have the run's shape (1, 8, 8), got (2,)",
        ),
    ],
)
def test_what_cannot_be_restored_is_refused(refused, pictures, words, said):
    assert said in refused("restore", pictures / "run", "--images", pictures / "x.npy", *words)


def test_a_mask_of_words_is_refused(refused, pictures, tmp_path):
    np.save(tmp_path / "words.npy", np.full((SIDE, SIDE), "x"))
    words = ("--images", pictures / "x.npy", "--mask", tmp_path / "words.npy")
    assert "mask: must be numbers, 1 where one is missing and 0 where not, got" in refused(
        "restore", pictures / "run", *words
    )


@pytest.mark.parametrize(
    ("rows", "level", "said"),
    [
        (1, 1.0, "truth: must be 2 pictures or more, one for each of those to restore, got 1"),
        (2, 255.0, "truth: must be on the scale of the run's pictures"),
    ],
)
def test_a_truth_that_does_not_fit_is_refused_before_chains_run(
    refused, pictures, tmp_path, monkeypatch, rows, level, said
):
    monkeypatch.setattr("metastable.runs.run.Run.restore", lambda *_, **__: pytest.fail("chains ran"))
    truth = (level * np.random.default_rng(0).uniform(0, 1, (rows, 1, SIDE, SIDE))).round()
    np.save(tmp_path / "truth.npy", truth)
    words = ("--images", pictures / "x.npy", "--mask", "left", "--n", 2, "--truth", tmp_path / "truth.npy")
    assert said in refused("restore", pictures / "run", *words)


def test_a_file_in_the_place_of_the_folder_is_refused_before_chains_run(refused, pictures, monkeypatch):
    monkeypatch.setattr("metastable.runs.run.Run.restore", lambda *_, **__: pytest.fail("chains ran"))
    words = ("--images", pictures / "x.npy", "--mask", "left", "--out", pictures / "mask.npy")
    assert "out: must be a folder, got" in refused("restore", pictures / "run", *words)


@pytest.mark.parametrize("kind", ["words", "objects", "cut"])
def test_a_mask_that_cannot_be_read_is_refused(refused, pictures, tmp_path, kind):
    file = tmp_path / "bad.npy"
    np.save(file, np.eye(SIDE, dtype=object if kind == "objects" else float), allow_pickle=True)
    held = file.read_bytes()
    file.write_bytes({"words": b"no array", "objects": held, "cut": held[:-9]}[kind])
    words = ("--images", pictures / "x.npy", "--mask", file)
    assert f"error: mask: {file}: " in refused("restore", pictures / "run", *words)


@pytest.mark.parametrize(
    ("end", "noise", "said"),
    [(1.5, 0.0, "go from -1.5 to 1.5"), (3.0, 0.5, ""), (1.0, 0.0, ""), (None, 0.0, "go from 0 to 2")],
)
def test_pictures_beyond_the_scale_of_a_set_of_images_are_told(capsys, end, noise, said):
    run: Any = SimpleNamespace(config={"data": {"source": "mnist:somewhere"}})
    values = torch.arange(3.0) if end is None else torch.linspace(-end, end, 8)  # the first as dark bytes are
    look_at_scale(run, values, noise)
    assert said in (heard := capsys.readouterr().out)
    assert bool(heard) == bool(said)


def test_bright_pictures_of_a_set_are_not_taken_for_others_from_0_to_1(capsys):
    run: Any = SimpleNamespace(config={"data": {"source": "images:somewhere"}})
    look_at_scale(run, torch.linspace(0.2, 0.9, 8), known=True)
    assert not capsys.readouterr().out
    look_at_scale(run, torch.linspace(0.2, 0.9, 8))
    assert "go from 0 to 1" in capsys.readouterr().out


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_pictures_far_beyond_it_are_refused_whatever_their_noise(noise):
    run: Any = SimpleNamespace(config={"data": {"source": "mnist:somewhere"}})
    far = 5 * torch.randn(4000, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match=r"images: values must lie on \[−1, 1\]"):
        look_at_scale(run, far, noise)
    with pytest.raises(InputError, match=r"truth: values must lie on \[−1, 1\] .* scale them$"):
        look_at_scale(run, far, noise, "truth")
    reach = 2 + 4 * noise
    look_at_scale(run, torch.cat([torch.linspace(-reach, reach, 995), far.new_full((5,), 40.0)]), noise)


def test_pictures_come_from_all_that_data_come_from(pictures):
    run = ms.load_run(pictures / "run")
    loaded = load_array(pictures / "x.npy")
    expected = run.restore(loaded.x, "left", draws=2, steps=2).draws
    for same in (str(pictures / "x.npy"), pictures / "x.npy", loaded, loaded.x.tolist()):
        assert torch.equal(run.restore(same, "left", draws=2, steps=2).draws, expected)
    assert torch.equal(run.denoised(loaded), run.denoised(loaded.x))
    with pytest.raises(InputError, match="images: must hold numbers, got dtype object"):
        run.restore(None, "left")


def test_a_folder_of_pictures_is_restored(tmp_path):
    run = Run(lambda x: x.flatten(1).square().sum(1), "cd", [], None, None, config={"event_shape": [3, 4, 4]})
    for k in range(2):
        Image.new("RGB", (4, 4), (40 * k, 90, 200)).save(tmp_path / f"{k}.png")
    found = run.restore(f"images:{tmp_path}", "left", draws=2, steps=2)
    assert torch.equal(found.given[..., 2:], load_array(f"images:{tmp_path}").x[..., 2:])


def test_pictures_of_another_size_are_told_how_to_shrink(pictures):
    model = ms.load_run(pictures / "run").model
    with pytest.raises(InputError, match=r"got \(1, 28, 28\): an image set is shrunk to it with \?size=8$"):
        events_of(model, torch.zeros(2, 1, 28, 28))
    with pytest.raises(InputError, match=r"got \(1, 4, 4\)$"):
        events_of(model, torch.zeros(2, 1, 4, 4))


def test_values_that_a_mask_hides_may_lie_anywhere(metastable, tmp_path, monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr("metastable.cli.restore.look_at_scale", lambda run, x, *_, **__: seen.append(x))
    x = np.full((2, 1, SIDE, SIDE), 0.5, np.float32)
    x[..., : SIDE // 2] = -999
    np.save(tmp_path / "x.npy", x)
    energy = {"name": "mlp", "hidden": [4], "reference": "gaussian"}
    data = torch.rand(60, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    method = ms.methods.PersistentCD(walkers=20)
    ms.fit(energy, data, method, 2, out=tmp_path / "run", data_noise=0.2, evaluate=False)
    words = ("--images", tmp_path / "x.npy", "--mask", "left", "--steps", 2, "--out", tmp_path / "out")
    assert metastable("restore", tmp_path / "run", *words).exit_code == 0
    assert bool((seen[0] == 0.5).all())


def test_pictures_on_another_scale_are_refused(refused, pictures, tmp_path):
    bytes_of = np.random.default_rng(0).uniform(0, 255, (2, 1, SIDE, SIDE)).astype(np.float32)
    np.save(tmp_path / "bytes.npy", bytes_of)
    words = ("--images", tmp_path / "bytes.npy", "--mask", "left")
    line = refused("restore", pictures / "run", *words)
    assert "images: must be on the scale of the run's pictures, whose samples go from" in line


@pytest.mark.parametrize(
    ("own", "given", "fits"),
    [
        ((-1, 1), (0, 255), False),
        ((-1, 1), (0, 9), False),  # integers, however dark
        ((-1, 1), (-1, 1), True),
        ((0, 16), (0, 16), True),
        ((0, 255), (0, 255), True),
        ((0, 255), (0, 9), True),
        ((0, 255), (0, 1), False),
    ],
)
def test_integers_are_bytes_for_a_model_of_bytes_alone(own, given, fits):
    samples = torch.linspace(*own, 64).view(4, 1, 4, 4)
    model = Model(None, walkers=Walkers.equal(samples), event_shape=(1, 4, 4))
    seen = torch.linspace(*given, 48).round()
    with (
        contextlib.nullcontext() if fits else pytest.raises(InputError, match="images: must be on the scale")
    ):
        require_scale(model, seen)


def test_samples_without_their_noise(metastable, pictures, tmp_path):
    files = [tmp_path / "noisy.npy", tmp_path / "clean.npy"]
    for file, more in zip(files, ((), ("--denoise",)), strict=True):
        result = metastable("sample", pictures / "run", "--n", 20, "--steps", 3, "--out", file, *more)
        assert result.exit_code == 0, result.output
    noisy, clean = map(np.load, files)
    expected = ms.load_run(pictures / "run").denoised(noisy).numpy()
    assert np.allclose(clean, expected, atol=1e-5)
    assert not np.allclose(clean, noisy, atol=1e-2)


def test_a_run_without_noise_refuses_to_take_it_off(refused, run_folder, tmp_path):
    assert "denoise: this run was trained without noise" in refused(
        "sample", run_folder, "--n", 5, "--denoise", "--out", tmp_path / "x.npy"
    )


def test_the_report_shows_samples_without_their_noise(pictures):
    run = ms.load_run(pictures / "run")
    figures = np.load(pictures / "run" / "figures.npz")
    assert np.allclose(figures["without_noise"], run.denoised(figures["samples"][:64]).numpy(), atol=1e-5)
    assert "Without noise" in (pictures / "run" / "report.html").read_text()


def test_errors_stand_beside_that_of_the_mean_of_the_class(metastable, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng, labels = np.random.default_rng(0), np.arange(60) % 2
    x = (labels[:, None, None, None] + 0.1 * rng.normal(size=(60, 1, 4, 4))).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x, labels=labels)
    energy = {"name": "mlp", "hidden": [8], "reference": "gaussian"}
    method = ms.methods.PersistentCD(walkers=20)
    ms.fit(energy, tmp_path / "x.npz", method, 2, out=tmp_path / "run", evaluate=False)
    words = (
        "--images",
        tmp_path / "x.npz",
        "--mask",
        "top",
        "--n",
        4,
        "--steps",
        2,
        "--out",
        tmp_path / "out",
    )
    result = metastable("restore", tmp_path / "run", *words)
    assert result.exit_code == 0, result.output
    errors = json.loads((tmp_path / "out" / "restored.json").read_text())["mean_squared_error"]
    means = np.stack([x[labels == k].mean(0) for k in labels[:4]])
    assert errors["class_mean"] == pytest.approx(float(((means - x[:4])[..., :2, :] ** 2).mean()), rel=1e-4)
    less = 1 - errors["mean"] / errors["given"]
    assert f"the mean of the draws has {less:.0%} less of it than what was given" in result.output
