"""Trainings on pictures by minutes: parcels, pieces, cold chains, and the rows of `cifar10`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from metastable.api import fit
from metastable.core.errors import ConfigError, InputError
from metastable.core.types import Walkers, energy_and_grad
from metastable.energies.network_configs import ShortRunConfig
from metastable.evaluation.frechet import Statistics
from metastable.experiments import cifar10, image_figures, image_runs, parcels
from metastable.experiments.base import Bench, changed
from metastable.experiments.image_runs import ImageTrials, Measures, measure, measures_of, rows_of
from metastable.experiments.pieces import Piece
from metastable.kernels import ULA, run_chain
from metastable.training.checkpoints import CheckpointStore

TINY = {
    **{"steps": 2, "walkers": 12, "chains": 4, "batch": 4, "chain_steps": 2, "exact_chains": 4, "images": 12},
    **{"energy": ShortRunConfig(filters=2), "log_every": 1, "arms": ("pcd",)},
}


def bench(folder, **changes) -> Bench:
    settings = changed({**cifar10.EXPERIMENT.scales["smoke"], **TINY}, changes)
    return Bench(settings, "smoke", 0, "cpu", folder)


def trials(asked: Bench) -> ImageTrials:
    data = image_runs.pictures_of(asked)
    return ImageTrials(asked, data, lambda name: cifar10.arm_of(asked, name), measures_of(asked, data))


def weights_and_state(folder):
    checkpoint = CheckpointStore(folder / "checkpoints").load()
    assert checkpoint is not None
    return checkpoint.weights, checkpoint.state


def test_a_parcel_is_the_training_but_for_the_rounding_of_its_chains(tmp_path, monkeypatch):
    monkeypatch.setattr(parcels, "MOST", 10_000)
    monkeypatch.setattr(parcels, "LARGE", 100)
    trials(bench(tmp_path)).run(cifar10.ALL_ARMS)
    training = tmp_path / "training" / "pcd"
    weights, state = weights_and_state(training)
    log = (training / "metrics.jsonl").read_bytes()
    (files,) = parcels.parcels_of(tmp_path / "parcels", "pcd").values()
    assert len(files) > 2
    assert max(path.stat().st_size for path in files) == 10_000
    assert not parcels.unpark(training, tmp_path / "parcels", "pcd")  # what is there is not written over
    shutil.rmtree(training)
    assert parcels.unpark(training, tmp_path / "parcels", "pcd")
    again, back = weights_and_state(training)
    for name, value in weights["energy"].items():
        assert torch.equal(value, again["energy"][name])
    off = (state["method"]["buffer"] - back["method"]["buffer"]).abs().max()
    assert 0 < off < 3 / 255
    first = state["optimisers"]["energy"]["state"][0]
    left = back["optimisers"]["energy"]["state"][0]
    assert torch.equal(first["exp_avg_sq"], left["exp_avg_sq"])
    assert first["exp_avg"].abs().max() > 0
    assert left["exp_avg"].abs().max() == 0
    assert torch.equal(state["rng"], back["rng"])
    assert (training / "metrics.jsonl").read_bytes() == log


def test_a_training_goes_on_from_its_parcel(tmp_path):
    trials(bench(tmp_path)).run(cifar10.ALL_ARMS)
    shutil.rmtree(tmp_path / "training")
    found = trials(bench(tmp_path, steps=3, marks=(10.0, 20.0), minutes=20.0)).advance
    assert found(cifar10.arm_of(bench(tmp_path), "pcd"), 20.0)
    lines = (tmp_path / "training" / "pcd" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


@pytest.mark.parametrize(("arm", "off"), [("jarzynski-exact", 0), ("jarzynski-systematic", 1e-4)])
def test_weights_go_on_from_a_parcel_as_from_a_checkpoint(arm, off, tmp_path, monkeypatch):
    monkeypatch.setattr(parcels, "LARGE", 100)
    trials(bench(tmp_path, arms=arm)).run(cifar10.ALL_ARMS)
    shutil.copytree(tmp_path / "parcels", tmp_path / "moved" / "parcels")
    lines = {}
    for folder in (tmp_path, tmp_path / "moved"):
        asked = trials(bench(folder, steps=4, arms=arm))
        asked.advance(asked.arm(arm), 20.0)
        line = json.loads((folder / "training" / arm / "metrics.jsonl").read_text().splitlines()[-1])
        lines[folder] = [line[key] for key in ("step", "ess", "energy_gap")]
    assert lines[tmp_path / "moved"] == pytest.approx(lines[tmp_path], abs=off, rel=0)


def test_walkers_of_mild_weights_take_a_quarter_and_keep_their_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(parcels, "LARGE", 100)
    trials(bench(tmp_path, arms="jarzynski-systematic")).run(cifar10.ALL_ARMS)
    training = tmp_path / "training" / "jarzynski-systematic"
    before = weights_and_state(training)[1]["method"]["steering"]
    shutil.rmtree(training)
    assert parcels.unpark(training, tmp_path / "parcels", "jarzynski-systematic")
    after = weights_and_state(training)[1]["method"]["steering"]
    assert 0 < (before["x"] - after["x"]).abs().max() < 3 / 255
    assert all(torch.equal(before[key], after[key]) for key in ("log_weight", "energy", "ancestor"))


def test_half_a_parcel_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parcels, "MOST", 10_000)
    trials(bench(tmp_path)).run(cifar10.ALL_ARMS)
    (files,) = parcels.parcels_of(tmp_path / "parcels", "pcd").values()
    files[-1].unlink()
    with pytest.raises(InputError, match="no whole parcel"):
        parcels.unpark(tmp_path / "new", tmp_path / "parcels", "pcd")


def test_a_parcel_is_whole_while_the_next_one_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(parcels, "MOST", 10_000)
    trials(bench(tmp_path)).run(cifar10.ALL_ARMS)
    training, folder = tmp_path / "training" / "pcd", tmp_path / "parcels"
    write, written = Path.write_bytes, []

    def killed(path, content):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        return write(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", killed)
        with pytest.raises(KeyboardInterrupt):
            parcels.park(training, folder, "pcd")
    assert len(parcels.parcels_of(folder, "pcd")) == 2
    assert parcels.unpark(tmp_path / "new", folder, "pcd")
    parcels.park(training, folder, "pcd")
    assert list(parcels.parcels_of(folder, "pcd")) == [3]


def test_a_parcel_without_a_number_is_opened(tmp_path):
    trials(bench(tmp_path)).run(cifar10.ALL_ARMS)
    (path,) = (tmp_path / "parcels").iterdir()
    path.rename(tmp_path / "parcels" / "pcd.parcel-00")
    assert parcels.unpark(tmp_path / "new", tmp_path / "parcels", "pcd")


def test_a_training_that_is_broken_off_leaves_a_parcel(tmp_path, monkeypatch):
    asked = trials(bench(tmp_path, parcels=False))
    asked.run(cifar10.ALL_ARMS)

    def broken_off(*args, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(image_runs, "fit", broken_off)
    for folder, files in ((tmp_path, 1), (tmp_path / "at once", 0)):  # the latter has no checkpoint yet
        with pytest.raises(KeyboardInterrupt):
            trials(bench(folder)).advance(cifar10.arm_of(bench(folder), "pcd"), 20.0)
        assert len(parcels.parcels_of(folder / "parcels", "pcd")) == files


def test_a_first_moment_that_counts_is_kept():
    adam = {"optimisers": {"energy": {"param_groups": [{"betas": (0.9, 0.999)}, {"betas": (0.0, 0.9)}]}}}
    assert parcels.first_decay(adam) == 0.9
    assert parcels.first_decay({"optimisers": {"energy": {"param_groups": [{"lr": 0.1}]}}}) == 1


@pytest.mark.parametrize("arm", cifar10.ALL_ARMS)
def test_every_arm_is_trained_and_measured(arm, tmp_path):
    found = trials(bench(tmp_path, arms=arm, denoised=True, parcels=False)).run(cifar10.ALL_ARMS)
    numbers = found[arm, 10.0].numbers
    assert numbers["updates"] == 2
    assert numbers["pixels_over_noise"] > 0
    assert "fid" not in numbers  # no network, no FID
    assert found[arm, 10.0].arrays["samples"].shape == (12, 1, 8, 8)


def test_a_mark_that_training_did_not_reach_is_not_measured(tmp_path):
    """Both updates take no second: neither mark has its own model. At scale smoke it is updates that count."""
    asked, said = bench(tmp_path, marks=(5.0, 10.0), parcels=False), []
    asked.scale, asked.say = "cpu", said.append
    assert trials(asked).run(cifar10.ALL_ARMS) == {}
    assert len(said) == 1
    assert said[0].startswith("pcd-5: not measured: its 2 updates took 0.0")
    asked.scale = "smoke"
    rows = rows_of(asked, trials(asked).run(cifar10.ALL_ARMS), {})
    taken = {row.metric: row.value for row in rows if row.metric.startswith("minutes/")}
    assert taken.keys() == {"minutes/pcd/minutes=5", "minutes/pcd/minutes=10"}
    assert 0 < taken["minutes/pcd/minutes=10"] < 1


def test_rates_at_a_mark_are_on_the_way_to_the_last(tmp_path):
    """Half a second of two: the rate has fallen by a quarter of its way, whatever updates take."""
    falls = {"falls_over": 2 / 60, "marks": (0.5 / 60,), "steps": 10**6, "final_rate": 0.0, "parcels": False}
    trials(bench(tmp_path, **falls)).run(cifar10.ALL_ARMS)
    lines = (tmp_path / "training" / "pcd" / "metrics.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    before = json.loads(lines[-2])["seconds"]
    assert last["seconds"] >= 0.5
    full = cifar10.EXPERIMENT.scales["smoke"]["rate"]
    assert full * (1 - last["seconds"] / 2) <= last["learning_rate"] <= full * (1 - before / 2) + 1e-6
    assert first["learning_rate"] > last["learning_rate"]


def test_an_unknown_arm_too_few_minutes_and_rows_that_are_no_pictures_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="arms: unknown value 'pdc'"):
        trials(bench(tmp_path, arms="pdc")).run(cifar10.ALL_ARMS)
    with pytest.raises(ConfigError, match=r"minutes: must be at least the first of the marks, 10, got 2\.0"):
        trials(bench(tmp_path, minutes=2.0)).run(cifar10.ALL_ARMS)
    with pytest.raises(ConfigError, match="data: must be pictures"):
        image_runs.pictures_of(bench(tmp_path, data="toy:two-modes"))
    np.save(tmp_path / "bytes.npy", np.arange(256, dtype=np.uint8).reshape(4, 1, 8, 8))
    with pytest.raises(ConfigError, match=r"data: must be pictures on \[−1, 1\], got '0 … 255'"):
        image_runs.pictures_of(bench(tmp_path, data=str(tmp_path / "bytes.npy")))


def test_a_cold_chain_moves_as_one_of_its_temperature():
    def energy(x):
        return 3 * x.square().sum(1) + x[:, 0] ** 4

    x = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    kernels = cifar10.Cold(0.01, noise=0.02), ULA(0.01, noise=0.02)
    rngs = [torch.Generator().manual_seed(1) for _ in kernels]
    noises = [kernel.draw(x, rng).normal for kernel, rng in zip(kernels, rngs, strict=True)]
    assert torch.equal(*noises)
    cold, ula = (
        kernel.step(energy, kernel.init(energy, x), kernel.draw(x, rng), 0.01)[0]
        for kernel, rng in zip(kernels, [torch.Generator().manual_seed(1) for _ in kernels], strict=True)
    )
    assert torch.allclose(cold.x, ula.x)
    assert torch.allclose(cold.energy, energy(cold.x))
    ended = run_chain(kernels[0], energy, x, 3, torch.Generator().manual_seed(2)).state
    assert torch.allclose(ended.energy, energy(ended.x))


@pytest.mark.filterwarnings("ignore:Along .* rays")
def test_noise_is_taken_off_by_the_power_of_the_chains(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(image_runs, "measure", lambda found, walkers, *more: seen.append(walkers.x) or {})
    for arm, scale in (("pcd", 1.0), ("jarzynski-systematic", 4.0)):
        asked = trials(bench(tmp_path / arm, arms=arm, weight_power=scale, denoised=True))
        run = fit_of(asked, arm)
        asked.judge(run, asked.arm(arm).power)
        noisy, clean = seen[-2:]
        step = 0.03**2 * 20_000 / scale * energy_and_grad(run.energy, noisy).grad
        assert step.abs().max() > 1e-3
        assert torch.allclose(clean, noisy - step, atol=1e-5)


def fit_of(asked: ImageTrials, arm: str):
    chosen, settings = asked.arm(arm), image_runs.shared_settings(asked.bench)
    return fit(chosen.energy(asked.data, 1), asked.data.x, chosen.method, **settings)


def flat(x):
    return 0 * x.flatten(1).sum(1)


def test_samples_like_the_data_are_near_and_weights_count(tmp_path):
    data = image_runs.pictures_of(bench(tmp_path))
    found = measures_of(bench(tmp_path), data)
    half = Walkers(torch.cat([data.x, -data.x]), torch.zeros(2 * len(data), dtype=torch.float64))
    half.log_weight[len(data) :] = -torch.inf
    near = measure(found, half, 10**6)
    assert near["pixels"] < 1e-6
    assert near["images"] == pytest.approx(len(data))
    assert measure(found, Walkers.equal(half.x), 10**6)["pixels_over_noise"] > 0.01


def test_samples_that_are_worth_one_image_have_no_distance(tmp_path):
    data = image_runs.pictures_of(bench(tmp_path))
    one = torch.full((40,), -200.0, dtype=torch.float64).index_fill(0, torch.tensor([3]), 0.0)
    numbers = measure(measures_of(bench(tmp_path), data), Walkers(data.x[:40], one), 40)
    assert numbers["images"] == pytest.approx(1)
    assert np.isnan(numbers["pixels_over_noise"])


@pytest.mark.parametrize(("is_inception", "key"), [(True, "fid"), (False, "frechet_distance")])
def test_a_network_that_is_there_gives_its_distance_only_of_enough_samples(is_inception, key, tmp_path):
    class Network:
        width, device = 3, torch.device("cpu")

        def __call__(self, pictures):
            return type("Features", (), {"values": pictures.bytes.flatten(1)[:, :3].float()})

    x = 2 * torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0)) - 1
    pixels, known = (Statistics(torch.zeros(width).double(), torch.eye(width).double()) for width in (64, 3))
    network = Network()
    network.is_inception = is_inception  # pyright: ignore
    found = Measures(pixels, 1.0, network, known)  # pyright: ignore
    numbers = measure(found, Walkers.equal(x), 100)
    assert numbers[f"{key}_low"] < numbers[key] < numbers[f"{key}_high"]
    assert ("fid" in numbers) is is_inception
    assert key not in measure(found, Walkers.equal(x[:3]), 100)
    piece = Piece("", numbers | {"updates": 5, "ms_per_update": 2.0}, {})
    rows = {row.metric: row for row in rows_of(bench(tmp_path), {("pcd", 5.0): piece}, cifar10.PAPER)}
    assert rows[f"{key}/pcd/minutes=5"].paper == (38.25 if is_inception else None)
    assert f"{key}_se/pcd/minutes=5" in rows
    assert image_figures.distances_in(rows.values())[0] == key


def test_the_papers_fid_stands_beside_the_last_mark_and_stopped_ones_are_told(tmp_path):
    numbers = {"fid": 50.0, "pixels_over_noise": 0.1, "images": 9.0, "updates": 5, "ms_per_update": 2.0}
    found = {("pcd", mark): Piece("", numbers, {}) for mark in (5.0, 20.0)}
    found["pcd-flip", 20.0] = found["pcd", 20.0]
    found["pcd", 30.0] = found["pcd-kept", 5.0] = Piece("", {"stopped": 77}, {})
    required = ("pcd", "pcd-augmented", "pcd-kept")
    rows = {row.metric: row for row in rows_of(bench(tmp_path), found, cifar10.PAPER, required)}
    assert rows["fid/pcd/minutes=5"].paper is None
    assert rows["fid/pcd/minutes=20"].paper == 38.25
    assert rows["fid/pcd-flip/minutes=20"].paper == "36.43 to 38.25"
    assert rows["stopped_at_update/pcd-kept/minutes=5"].value == 77
    assert rows["pixels_over_noise/pcd/minutes=20"].ok
    assert not rows["pixels_over_noise/pcd-augmented"].ok
    assert not rows["pixels_over_noise/pcd-kept"].ok
    assert "pixels_over_noise/pcd" not in rows


def test_an_arm_that_stopped_is_not_trained_again(tmp_path, monkeypatch):
    asked = trials(bench(tmp_path, marks=(5.0, 10.0)))
    asked.pieces.keep("pcd-5", {"stopped": 3}, {})
    monkeypatch.setattr(ImageTrials, "advance", lambda self, arm, mark: pytest.fail(f"trained to {mark}"))
    assert list(asked.run(cifar10.ALL_ARMS)) == [("pcd", 5.0)]
