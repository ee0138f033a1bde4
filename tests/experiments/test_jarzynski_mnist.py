"""The experiment `jarzynski-mnist`: its pieces, its energies and its rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from metastable.core.errors import ConfigError, DivergenceError, InputError
from metastable.core.types import LogPartition, Walkers
from metastable.energies import Tilted
from metastable.energies.build import MLPConfig
from metastable.energies.network_configs import ShortRunConfig
from metastable.evaluation.image_classifier import class_shares
from metastable.experiments import jarzynski_mnist as room
from metastable.experiments import jarzynski_mnist_figures as figures
from metastable.experiments.base import Bench, changed
from metastable.experiments.jarzynski_mnist import ALL_ARMS, EXPERIMENT, method_of
from metastable.experiments.jarzynski_mnist_rows import log_z_rows, relative_error, rows_of
from metastable.experiments.pieces import Piece, Pieces
from metastable.experiments.three_digits import CLASSES, TRUE, Sharpened, correlated, some_of
from metastable.methods import Jarzynski, PersistentCD
from metastable.proposals import Gaussian

TINY = {
    **{"steps": 4, "walkers": 32, "paper_walkers": 16, "populations": 2, "batch": 16, "epochs": 1},
    **{"energy": MLPConfig(hidden=(8,)), "smc_walkers": 2, "smc_ess": 0.5, "restored": 3, "restore_steps": 2},
}


def bench(folder, **changes) -> Bench:
    settings = changed({**EXPERIMENT.scales["smoke"], **TINY}, changes)
    return Bench(settings, "smoke", 0, "cpu", folder)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """Two pieces, made by two commands; their folder, the rows of the second, and what it said."""
    folder, seen = tmp_path_factory.mktemp("mnist"), []
    with pytest.MonkeyPatch.context() as patch:
        for module in (room, figures):
            patch.setattr(module, "SHOWN", 2)
        with pytest.MonkeyPatch.context() as quietly:
            quietly.setattr(room, "draw", lambda *_: None)
            room.body(bench(folder, arms="jarzynski"))
        again = bench(folder, arms=("jarzynski", "pcd-paper"))
        again.say = seen.append
        return folder, room.compared(again, room.body(again)), seen


def test_what_is_there_is_not_made_again_and_all_of_it_is_gathered(pieces):
    folder, rows, seen = pieces
    said = [line.split(":")[0] for line in seen]
    assert said == ["classifier", "pcd-paper-0.3"]
    found = {row.metric for row in rows}
    for arm in ("jarzynski", "pcd-paper"):
        assert f"weight_error/{arm}/noise=0.3" in found
    assert "error_over_jarzynski/pcd-paper/noise=0.3" in found
    assert "log_z_apart_in_joint_se/jarzynski/noise=0.3" in found
    assert {path.name for path in folder.glob("*.png")} == {
        *("figure-2.png", "figure-3.png", "figure-4.png", "figure-11.png", "figure-12.png", "restored.png")
    }


def test_an_unknown_arm_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="arms: unknown value 'pdc'"):
        room.body(bench(tmp_path, arms="pdc"))


def test_a_piece_of_other_settings_is_refused(pieces):
    folder, *_ = pieces
    with pytest.raises(InputError, match=r"jarzynski-0\.3\.json was made with batch = 16, now it is 5"):
        Pieces(folder / "pieces", {"batch": 5}).find("jarzynski-0.3")


def test_small_noises_have_settings_and_pieces_of_their_own(tmp_path):
    asked = bench(tmp_path, near_below=0.1, near={"walkers": 64, "betas": [0.999, 0.999]})
    far, near = (room.at_noise(asked, noise) for noise in (0.1, 0.05))
    assert far is asked
    assert (near.walkers, near.betas, near.batch) == (64, (0.999, 0.999), 16)
    assert room.method_of(near, "pcd", 0.05).walkers == 64
    of = {noise: room.pieces_of(asked, noise).settings for noise in (0.1, 0.05)}
    assert (of[0.1]["walkers"], of[0.05]["walkers"]) == (32, 64)
    assert not {"near", "seconds", "steps", "arms"} & of[0.05].keys()


def test_arms_with_the_papers_settings_have_them_at_every_noise(tmp_path, monkeypatch):
    arms, made = ("pcd", "pcd-paper", "jarzynski-paper"), {}
    asked = bench(tmp_path, arms=arms, noises=(0.1, 0.05), near_below=0.1, near={"batch": 64})

    def train(own, data, arm, noise):
        made[arm, noise] = room.settings_of(own, arm, noise)["batch_size"]

    monkeypatch.setattr(room, "train", train)
    room.make(asked, None, None)
    assert {arm: made[arm, 0.05] for arm in arms} == {"pcd": 64, "pcd-paper": 16, "jarzynski-paper": 16}
    assert {made[arm, 0.1] for arm in arms} == {16}
    of = {arm: room.pieces_of(asked, 0.05, arm).settings["batch"] for arm in arms}
    assert of == {arm: made[arm, 0.05] for arm in arms}


def test_an_arm_that_diverges_leaves_the_others_and_is_not_tried_again(tmp_path, monkeypatch):
    asked, tried, train = bench(tmp_path, arms=("jarzynski", "pcd")), [], room.train
    monkeypatch.setattr(room, "draw", lambda _, data, found: drawn.append(list(found)))
    drawn: list[list[tuple[str, float]]] = []

    def falls(own, data, arm, noise):
        tried.append(arm)
        if arm == "jarzynski":
            raise DivergenceError("energies explode", step=3)
        return train(own, data, arm, noise)

    monkeypatch.setattr(room, "train", falls)
    monkeypatch.setattr(room, "judge", lambda *_: (NUMBERS, {}))
    for _ in range(2):
        rows = {row.metric: row for row in room.body(asked)}
        assert rows["diverged_at_update/jarzynski/noise=0.3"].value == 3
        assert not rows["weight_error/jarzynski/noise=0.3"].ok  # it was required
        assert math.isfinite(rows["weight_error/pcd/noise=0.3"].value)
    assert tried == ["jarzynski", "pcd"]
    assert drawn == [[("pcd", 0.3)]] * 2


def test_precision_is_that_of_every_arm_and_of_its_pieces(tmp_path):
    coarse = bench(tmp_path, precision="bf16-mixed")
    for arm in ALL_ARMS:
        assert room.settings_of(coarse, arm, 0.1)["precision"] == "bf16-mixed"
    assert "precision" not in room.CHOICES
    with pytest.raises(ConfigError, match="precision: unknown value 'bf16'"):
        room.body(bench(tmp_path, precision="bf16"))


def test_pieces_of_another_classifier_are_refused(pieces):
    folder, *_ = pieces
    with pytest.raises(InputError, match=r"was made with classifier_noise = 0\.3, now it is 0\.2"):
        room.body(bench(folder, arms="jarzynski", classifier_noise=0.2))


def test_a_piece_that_ran_out_of_time_goes_on(tmp_path):
    data = room.digits(bench(tmp_path))
    assert room.train(bench(tmp_path, max_seconds=1e-9), data, "pcd", 0.3) is None
    run = room.train(bench(tmp_path), data, "pcd", 0.3)
    assert run is not None
    assert run.steps == 4
    whole = room.train(bench(tmp_path / "whole"), data, "pcd", 0.3)
    assert torch.equal(whole.walkers.x, run.walkers.x)


@pytest.mark.parametrize("arm", ALL_ARMS)
def test_every_arm_can_be_trained(arm, tmp_path):
    small = bench(tmp_path, steps=2)
    data = room.digits(small)
    run = room.train(small, data, arm, 0.1)
    assert run.steps == 2
    assert run.data_noise == pytest.approx(0.1)
    start = {"jarzynski": Jarzynski, "pcd": PersistentCD}[arm.split("-")[0]]
    assert isinstance(method_of(small, arm, 0.1), start)
    assert isinstance(run.energy.network, Sharpened) == arm.endswith("-annealed")


def test_the_reference_is_the_pictures_gaussian_with_their_noise():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(40, 1, 3, 3, generator=rng) @ torch.randn(3, 3, generator=rng)  # pixels go together
    reference = correlated(x, 0.5, 1.1)
    flat = x.double().flatten(1)
    covariance = 1.21 * (flat.T.cov(correction=0) + 0.25 * torch.eye(9))
    truth = torch.distributions.MultivariateNormal(flat.mean(0), covariance)
    found = reference.log_prob(x)
    assert torch.allclose(found.double(), truth.log_prob(flat), atol=1e-4)
    apart = Gaussian(x.mean(0), covariance.diagonal().sqrt().view(1, 3, 3).float())
    assert (found - apart.log_prob(x)).abs().max() > 0.1  # the same without correlations is another


def test_a_training_by_the_clock_ends_with_its_rate_at_zero_and_is_whole(tmp_path):
    timed = bench(tmp_path, seconds=1e-9, steps=50)
    run = room.train(timed, room.digits(timed), "jarzynski", 0.3)
    assert run is not None
    assert run.steps < 50
    settings = room.settings_of(timed, "jarzynski", 0.3)
    assert (settings["follows"], settings["max_seconds"]) == ("seconds", 1e-9)


def test_learned_precisions_are_those_of_a_gaussian():
    mean, std = torch.tensor([[[1.0, -2.0]]]), torch.tensor([[[0.5, 2.0]]])
    network = Sharpened(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 1), torch.nn.Flatten(0)), mean, std
    )
    energy = Tilted(Gaussian(mean, std), network)
    x = torch.randn(50, 1, 1, 2, generator=torch.Generator().manual_seed(0))
    assert energy.exact_start(x) is not None
    with torch.no_grad():
        network.log_precision.copy_(torch.tensor([[[math.log(4.0), math.log(0.25)]]]))
    narrower = Gaussian(mean, std * torch.tensor([[[0.5, 2.0]]]))  # precision times 4 is half the width
    assert torch.allclose(energy(x), -narrower.log_prob(x), atol=1e-4)


def test_shares_are_by_weight_and_their_error_is_relative():
    logits = torch.nn.functional.one_hot
    x = torch.tensor([2, 2, 3, 6, 9])
    walkers = Walkers(x, torch.tensor([3.0, 1.0, 2.0, 1.0, 1.0], dtype=torch.float64).log())
    found = class_shares(walkers, lambda labels: logits(labels, 10).float())
    assert found.shares[list(CLASSES)].tolist() == pytest.approx([0.5, 0.25, 0.125])
    error, _ = relative_error(found.shares[list(CLASSES)], found.std_error[list(CLASSES)])
    assert error == pytest.approx((1 / 8 + 1 / 8 + 1 / 8) / 3)
    assert relative_error(TRUE, torch.zeros(3)) == (0.0, 0.0)


def test_walkers_that_steer_are_the_first_population_or_all():
    x, log_weight = torch.arange(5.0)[:, None], torch.arange(5.0, dtype=torch.float64)
    first = room.steering(Walkers(x, log_weight, {"populations": [3, 1, 1]}))
    assert (first.x[:, 0].tolist(), first.log_weight.tolist()) == ([0, 1, 2], [0, 1, 2])
    assert len(room.steering(Walkers(x, log_weight))) == 5


def test_the_three_digits_come_four_two_one():
    labels = torch.arange(100) % 10
    x, chosen = some_of(labels[:, None], labels, 2)
    assert chosen.tolist() == [2] * 8 + [3] * 4 + [6] * 2
    assert torch.equal(x[:, 0], chosen)
    with pytest.raises(
        ConfigError, match="count: must be such that there are 4 times as many pictures of a 2"
    ):
        some_of(labels[:, None], labels, 3)


def piece(value: float, std_error: float, warnings: tuple[str, ...] = ()) -> dict[str, object]:
    return LogPartition(value, std_error, 10.0, 7, warnings).as_json()


NUMBERS = {
    **{"error": 3.0, "error_se": 0.1, "shares": [0.1, 0.1, 0.1], "log_z": None, "smc_log_z": piece(1.0, 0.1)},
    **{"restored_mean": 1.0, "restored_given": 1.0, "restored_class_mean": 1.0, "seconds": 1.0},
}


def test_log_z_must_agree_where_both_are_trusted():
    numbers = {"log_z": piece(1.0, 0.3), "smc_log_z": piece(3.0, 0.4)}
    rows = {row.metric: row for row in log_z_rows(numbers, "x")}
    assert rows["log_z_apart_in_joint_se/x"].value == pytest.approx(4.0)
    assert not rows["log_z_apart_in_joint_se/x"].ok
    numbers["smc_log_z"] = piece(3.0, 0.4, ("populations disagree",))
    rows = {row.metric: row for row in log_z_rows(numbers, "x")}
    assert rows["log_z_apart_in_joint_se/x"].ok
    assert rows["smc_log_z_trusted/x"].value == 0


def test_a_large_error_of_the_required_arm_fails_and_of_another_does_not(tmp_path):
    found = {(arm, 0.3): Piece(arm, NUMBERS, {}) for arm in ("jarzynski", "pcd")}
    ok = {row.metric: row.ok for row in rows_of(bench(tmp_path), found)}
    assert not ok["weight_error/jarzynski/noise=0.3"]
    assert ok["weight_error/pcd/noise=0.3"]


def test_fields_of_a_network_can_be_changed_and_only_those():
    settings = {"energy": ShortRunConfig(filters=4)}
    assert changed(settings, {"energy": {"filters": 8}}) == {"energy": ShortRunConfig(filters=8)}
    with pytest.raises(ConfigError, match=r"energy\.filter: unknown option \(did you mean 'energy\.filters'"):
        changed(settings, {"energy": {"filter": 8}})
    with pytest.raises(ConfigError, match="energy: must be given by its fields"):
        changed(settings, {"energy": 8})


def test_settings_of_a_scale_can_be_changed_and_only_those():
    settings = {"noises": (0.3, 0.1), "steps": 10}
    assert changed(settings, {"noises": [0.05], "steps": 5}) == {"noises": (0.05,), "steps": 5}
    with pytest.raises(ConfigError, match="unknown option"):
        changed(settings, {"noise": 0.1})


def test_pictures_are_bytes():
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 7.0])
    assert room.small(x).tolist() == [0, 0, 128, 255, 255]
    assert np.allclose(figures.shown(room.small(x[1:4])), [-1, 0, 1], atol=0.01)
