"""Frames of path planning: a world that is moved and turned looks the same, and what is planned turns with it."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from metastable.cli.main import app
from metastable.core import ConfigError
from metastable.data import Scaling
from metastable.policies import (
    CentredPolicy,
    PathWorlds,
    Policy,
    PolicyConfig,
    centred,
    fit_policy,
    load_policy,
    path_demonstrations,
)
from metastable.policies.path_frames import DISCS, FAR, GOAL, PLACE, SIGHT, Frame, roll_paths, walking
from metastable.policies.path_world import CONTEXT, PREDICTION, scene

PLAN = PolicyConfig(CONTEXT, PREDICTION, PREDICTION, 1, 0, 0)


def window(worlds: PathWorlds) -> dict[str, torch.Tensor]:
    """Three points each, the last at the start of the world."""
    seen = {"place": worlds.start.float(), **scene(worlds)}
    windows = {key: value[:, None].expand(-1, CONTEXT, -1).clone() for key, value in seen.items()}
    windows["place"][:, :-1] += torch.tensor([[0.1, 0.2], [0.05, 0.1]])
    return windows


def moved(seen: dict[str, torch.Tensor], angle: float) -> dict[str, torch.Tensor]:
    turn = torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    shift = torch.tensor([0.3, -0.7])
    discs = seen["discs"].unflatten(2, (-1, 3)).flip(2)  # in another order, too
    discs = torch.cat([discs[..., :2] @ turn + shift, discs[..., 2:]], -1).flatten(2)
    return {key: seen[key] @ turn + shift for key in ("place", "goal")} | {"discs": discs}


@pytest.fixture(scope="module")
def seen():
    return window(PathWorlds.draw(5))


def test_the_goal_lies_ahead_and_the_nearest_disc_is_first(seen):
    found = Frame.of(seen).seen(seen)
    away = (seen["goal"][:, -1] - seen["place"][:, -1]).norm(dim=1)
    assert torch.allclose(found[GOAL][:, -1], torch.stack([away, torch.zeros(5)], 1), atol=1e-6)
    assert torch.allclose(found[PLACE][:, -1], torch.zeros(5, 2), atol=1e-6)
    discs = found[DISCS].unflatten(2, (-1, 3))
    edge = discs[..., :2].norm(dim=-1) - discs[..., 2]
    assert bool((edge.diff(dim=-1) >= 0).all())
    before = seen["discs"].unflatten(2, (-1, 3))[..., :2] - seen["place"][:, -1:, None]
    assert torch.allclose(discs[..., :2].norm(dim=-1).sort(-1)[0], before.norm(dim=-1).sort(-1)[0], atol=1e-5)


def test_a_world_that_is_moved_and_turned_looks_the_same(seen):
    ours, theirs = (Frame.of(x).seen(x) for x in (seen, moved(seen, 1.1)))
    for key, value in ours.items():
        assert torch.allclose(value, theirs[key], atol=1e-5), key


def test_one_sees_as_far_as_a_walk_is_free(seen):
    frame, ways = Frame.of(seen), 8
    found = frame.seen(seen, ways)[SIGHT][:, -1]
    theirs = Frame.of(moved(seen, 1.1)).seen(moved(seen, 1.1), ways)[SIGHT][:, -1]
    assert torch.allclose(found, theirs, atol=1e-5)
    angle = torch.arange(ways) * 2 * math.pi / ways - math.pi
    walk = torch.linspace(0, FAR, 7001)[:, None]
    discs = seen["discs"][:, -1].unflatten(1, (-1, 3))
    for k in range(ways):
        line = walk * torch.tensor([math.cos(angle[k]), math.sin(angle[k])])
        points = frame.outside(line.expand(5, -1, 2))
        free = (torch.cdist(points, discs[..., :2]) > discs[:, None, :, 2]).all(-1).int().cumprod(1).sum(1)
        assert torch.allclose(walk[(free - 1).clamp(min=0), 0], found[:, k], atol=3e-4)
    assert (found < FAR).any()


def test_who_was_shown_distances_walks_by_them():
    shown = centred(path_demonstrations(2, 1, refine=False), 8)
    assert shown.observations[SIGHT].shape[1] == 8
    policy = walking(fit_policy(shown, "flow", "density", PLAN, padded=False, steps=2))
    assert isinstance(policy, CentredPolicy)
    assert policy.seeing == (8, False)
    worlds = PathWorlds.draw(2)
    action = policy.select_action({"place": worlds.start.float(), **scene(worlds)})
    assert action.shape == (2, 2)


def test_outside_is_the_inverse_of_inside(seen):
    frame, points = Frame.of(seen), torch.randn(5, 4, 2, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(frame.outside(frame.inside(points)), points, atol=1e-6)


class AlongTheGoal:
    """A model whose chunk is ten points ahead and a little to the left."""

    has_chains = False

    def draw(self, contexts, n, seed):
        steps = torch.arange(1, PREDICTION + 1) / PREDICTION
        return torch.stack([steps, 0.2 * steps], 1).flatten().expand(len(contexts), n, -1)

    def energy(self, x, contexts):
        return x.sum(-1)

    def move(self, x, contexts, steps, seed, frozen=None):
        return x


def test_what_is_planned_turns_with_the_world(seen):
    shown = centred(path_demonstrations(2, 1, refine=False))
    made = Policy(
        AlongTheGoal(), Scaling.fit(shown), PolicyConfig(CONTEXT, PREDICTION, PREDICTION, 1, warm=0)
    )
    policy, chunks = walking(made), []
    assert isinstance(policy, CentredPolicy)
    for world in (seen, moved(seen, 0.7)):
        policy.reset(0)
        now = {key: value[:, -1].numpy() for key, value in world.items()}  # as environments have them
        chunks.append(torch.stack([policy.select_action(now) for _ in range(PREDICTION)], 1))
    as_one = {"place": chunks[0], "goal": chunks[0], "discs": seen["discs"][:, :1]}
    assert torch.allclose(moved(as_one, 0.7)["place"], chunks[1], atol=1e-5)


def test_what_was_seen_stays_as_it_was_and_is_of_the_same_worlds(seen):
    """A place that is written into one array, and observations that do not fit one another."""

    class Listening(AlongTheGoal):
        def draw(self, contexts, n, seed):
            self.told = contexts
            return super().draw(contexts, n, seed)

    shown, told = centred(path_demonstrations(2, 1, refine=False)), []
    for again in (False, True):
        model = Listening()
        policy = walking(Policy(model, Scaling.fit(shown), PolicyConfig(CONTEXT, PREDICTION, 1, 1, warm=0)))
        policy.reset(0)
        now = {key: value[:, -1].clone() for key, value in seen.items()}
        for _ in range(3):
            policy.select_action(now)
            now["place"] = now["place"].add_(0.1) if again else now["place"] + 0.1
        told.append(model.told)
    assert torch.equal(*told)
    with pytest.raises(ConfigError, match="observation: must be of the same worlds"):
        policy.select_action({key: torch.cat([value, value]) for key, value in now.items()})
    with pytest.raises(ConfigError, match="observation: must be by name, with place, goal, discs, got"):
        policy.select_action({"place": now["place"]})


def test_a_frame_that_moves_carries_nothing_over():
    shown = centred(path_demonstrations(2, 1, refine=False))
    config = PolicyConfig(CONTEXT, PREDICTION, PREDICTION - 1, 1, warm=0, freeze=1)
    with pytest.raises(ConfigError, match=r"policy\.warm: must be 0"):
        CentredPolicy(Policy(AlongTheGoal(), Scaling.fit(shown), config))


def test_centred_chunks_are_the_demonstrated_ones():
    shown = path_demonstrations(2, 1, refine=False)
    ours, theirs = (x.windows(CONTEXT, PREDICTION, padded=False) for x in (centred(shown), shown))
    frame = Frame.of({key: value.float() for key, value in theirs.contexts().items()})
    assert torch.allclose(frame.outside(ours.chunks()), theirs.chunks().float(), atol=1e-6)


def test_a_policy_walks_from_the_command_line_and_what_it_is_against_is_written(tmp_path):
    shown, config = (
        centred(path_demonstrations(2, 1, refine=False)),
        PolicyConfig(CONTEXT, PREDICTION, 10, 1, 0, 0),
    )
    mean = {"name": "regression", "width": 8, "layers": 3}
    for seed in (0, 1):
        fit_policy(shown, mean, "density", config, padded=False, steps=2, seed=seed, out=tmp_path / str(seed))
    command = ["rollout", str(tmp_path / "0"), "--env", "path-planning", "--against", str(tmp_path / "1")]
    made = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
    assert made.exit_code == 0, made.output
    kept = json.loads((tmp_path / "out" / "rollouts.json").read_text())
    other = roll_paths(load_policy(tmp_path / "1"), 1)["cost"].value
    assert kept["against"]["run"] == str(tmp_path / "1")
    apart = kept["against"]["differences"]["cost"]["value"]
    assert apart == pytest.approx(kept["cost"]["value"] - other)
    assert apart != 0
    none = CliRunner().invoke(app, [*command, "--rollouts", "0"])
    assert none.exit_code == 2
    assert "rollouts: must be an integer of at least 1, got 0" in none.output


def test_demonstrations_that_are_centred_already_are_named():
    seen = centred(path_demonstrations(worlds=1, paths=1, refine=False))
    with pytest.raises(
        ConfigError, match="path planning: observations: must be place, goal, discs, those of"
    ):
        centred(seen)


def test_left_of_the_way_to_the_goal_is_left():
    """Policies that were saved act by it: with right for left all would be mirrored."""
    frame = Frame.of({"place": torch.ones(1, CONTEXT, 2), "goal": torch.tensor([[[1.0, 3.0]] * CONTEXT])})
    points = torch.tensor([[[0.0, 1.0], [1.0, 2.0]]])  # one to the left, one ahead
    assert frame.inside(points).tolist() == [[[0.0, 1.0], [1.0, 0.0]]]


def windows_told(seen, steps: int, execute: int) -> list[torch.Tensor]:
    """Places that a walking policy was told of at each chunk, while it went on by 0.1 along both axes a step."""
    shown, told = centred(path_demonstrations(2, 1, refine=False)), []
    made = Policy(AlongTheGoal(), Scaling.fit(shown), PolicyConfig(CONTEXT, PREDICTION, execute, 1, warm=0))
    policy = walking(made)
    made.predict_action_chunk = lambda windows: told.append(windows) or torch.zeros(5, PREDICTION, 2)
    now = {key: value[:, -1] for key, value in seen.items()}
    for step in range(steps):
        policy.select_action(now | {"place": now["place"] + 0.1 * step})
    return [windows[PLACE] for windows in told]


def test_the_first_window_of_a_walk_repeats_its_start(seen):
    before, first, last = windows_told(seen, steps=2, execute=1)[1].unbind(1)
    assert torch.equal(before, first)
    assert torch.allclose(first.norm(dim=1), torch.full((5,), 0.1 * 2**0.5), atol=1e-6)
    assert torch.allclose(last, torch.zeros(5, 2), atol=1e-6)


def test_a_window_has_every_step_of_a_walk(seen):
    places = windows_told(seen, steps=3, execute=2)[1]
    away = 0.1 * 2**0.5 * torch.tensor([2.0, 1.0, 0.0])
    assert torch.allclose(places.norm(dim=2), away.expand(5, 3), atol=1e-6)
