"""Rollouts in a world of one line by hand, and Push-T against its demonstrations where its simulator is there."""

import json
import os

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from metastable import policies as policies_module
from metastable.cli import rollout as rollout_command
from metastable.cli.main import app
from metastable.core import InputError
from metastable.core.errors import MissingDependencyError
from metastable.data import Demonstrations, Scaling
from metastable.policies import (
    PolicyConfig,
    PushT,
    fit_policy,
    pusht_pictures,
    pusht_starts,
    rollout,
    rollout_pusht,
)
from metastable.policies import environments as environments_module
from metastable.policies.environments import Environments, PushTEasel
from metastable.policies.intervals import clopper_pearson, score_over_starts, t_interval
from metastable.policies.models import Sizes, layout_of, policy_model
from metastable.policies.rollouts import Rollouts


class Box:
    def __init__(self, size=1):
        self.low, self.high, self.shape = -np.ones(size), np.ones(size), (size,)


class Line:
    """A point on a line; the reward is how far it went, and beyond 3 the episode ends."""

    action_space = Box()

    def reset(self, seed=None):
        self.at = float(seed)
        return np.array([self.at]), {}

    def step(self, action):
        self.at += float(action[0])
        return np.array([self.at]), float(action[0]), self.at > 3, False, {}


class Pushing:
    """Goes right by `pace`, and remembers what it saw."""

    def __init__(self, pace=1.0):
        self.pace, self.seeds, self.seen = pace, [], []

    def reset(self, seed=None):
        self.seeds.append(seed)

    def select_action(self, observation):
        self.seen.append(observation["state"].flatten().tolist())
        return torch.full((len(observation["state"]), 1), self.pace)


def on_a_line(starts):
    return Environments(Line, starts, "line")


def test_episodes_end_for_themselves_and_keep_their_last_value():
    found = rollout(Pushing(), on_a_line, [0, 2], rollouts=2, steps=6)
    assert found.lengths.tolist() == [[4, 4], [2, 2]]
    assert found.progress[0, 0].tolist() == [1, 2, 3, 4, 4, 4]
    assert found.progress[1, 1].tolist() == [1, 2, 2, 2, 2, 2]
    assert found.final(3).tolist() == [[3, 3], [2, 2]]
    rows = found.table()
    assert rows[2] == {"start": 1, "rollout": 0, "steps": 2, "final_4": 2.0}, "a return has no maximum"
    assert list(found.scores()) == ["final at 4"]


def test_actions_outside_of_the_box_are_brought_in_and_counted():
    found = rollout(Pushing(1.5), on_a_line, [0], steps=2)
    assert found.progress[0, 0].tolist() == [1, 2]
    assert found.clipped == 1.0
    assert rollout(Pushing(0.5), on_a_line, [0], steps=2).clipped == 0.0


def test_another_seed_is_another_seed_of_the_policy():
    policy = Pushing()
    for seed in (0, 0, 1):
        rollout(policy, on_a_line, [0], steps=1, seed=seed)
    assert policy.seeds[0] == policy.seeds[1] != policy.seeds[2]


def test_spaces_that_do_not_fit_are_named():
    class Wide(Line):
        action_space = Box(2)

    class Choice(Line):
        action_space = "Discrete(3)"

    with pytest.raises(InputError, match="actions of the policy have 1 numbers, those of the environment 2"):
        rollout(Pushing(), lambda starts: Environments(Wide, starts, "wide"), [0])
    with pytest.raises(InputError, match=r"must be a vector of numbers.*Discrete\(3\)"):
        rollout(Pushing(), lambda starts: Environments(Choice, starts, "choice"), [0])
    with pytest.raises(InputError, match="not finite"):
        rollout(Pushing(float("nan")), on_a_line, [0])


def covered(*values, steps=300) -> Rollouts:
    progress = torch.tensor(values, dtype=torch.float64)[:, None, None].repeat(1, 1, steps)
    progress[:, :, :250] *= 0.5
    return Rollouts(progress, torch.full((len(values), 1), steps), "coverage", "Push-T")


def test_scores_are_the_papers():
    found = covered(0.95, 0.19, 0.97)
    assert found.best(300).flatten().tolist() == pytest.approx([1, 0.2, 1])
    assert found.best(200).flatten().tolist() == pytest.approx([0.5, 0.1, 0.485 / 0.95])
    assert found.final(300).flatten().tolist() == pytest.approx([0.95, 0.19, 0.97])
    scores = found.scores()
    assert list(scores) == ["maximum at 200", "final at 200", "maximum at 300", "final at 300", "full score"]
    assert scores["full score"].value == pytest.approx(2 / 3)
    assert scores["maximum at 300"] == score_over_starts(found.best(300))
    assert scores["maximum at 300"].high == 1


def test_successes_are_a_rate_whose_interval_is_no_point():
    won = torch.ones(6, 1, 4, dtype=torch.float64)
    all_of_them = Rollouts(won, torch.full((6, 1), 4), "return", "mine").scores()["final at 4"]
    assert all_of_them == clopper_pearson(6, 6)
    assert all_of_them.low < 0.6
    won[0] = 0
    assert Rollouts(won, torch.full((6, 1), 4), "return", "mine").scores()["final at 4"] == clopper_pearson(
        5, 6
    )
    won[0] = 0.5
    assert Rollouts(won, torch.full((6, 1), 4), "return", "mine").scores()["final at 4"] == t_interval(
        won[:, 0, 0]
    )


def test_comparisons_are_paired_by_start():
    first, second = covered(0.9, 0.5, 0.1), covered(0.8, 0.4, 0.0)
    ahead = first.ahead_of(second)
    assert ahead.value == pytest.approx(0.1 / 0.95)
    assert ahead.high - ahead.low < 1e-9
    few = covered(0.9, 0.5, 0.1).ahead_of(covered(0.8, 0.4, 0.1))
    assert few.low < 0 < few.high < 1
    with pytest.raises(InputError, match="must be 3 starts of Push-T, got 2"):
        first.ahead_of(covered(0.1, 0.2))


def test_rollouts_are_written(tmp_path):
    covered(0.9, 0.5).write(tmp_path)
    said = json.loads((tmp_path / "rollouts.json").read_text())
    assert said["scores"]["final at 300"]["value"] == pytest.approx(0.7)
    assert len(said["episodes"]) == 2
    assert "against" not in said
    assert np.load(tmp_path / "rollouts.npz")["progress"].shape == (2, 1, 300)


def test_starts_are_fixed_for_good():
    starts = pusht_starts(256)
    assert starts[0, :4].tolist() == [170, 66, 319, 382]
    assert np.array_equal(pusht_starts(3), starts[:3])
    assert (starts[:, :2] >= 50).all()
    assert (starts[:, :2] < 450).all()
    assert (starts[:, 2:4] >= 100).all()
    assert (starts[:, 2:4] < 400).all()
    assert np.abs(starts[:, 4]).max() <= np.pi
    assert len(np.unique(starts[:, 0])) > 100


def test_a_missing_simulator_names_its_extra(monkeypatch):
    def missing(module, extra, purpose):
        raise MissingDependencyError(f"{purpose} needs {module}: metastable[{extra}]")

    monkeypatch.setattr(environments_module, "need", missing)
    with pytest.raises(MissingDependencyError, match=r"metastable\[policies\]"):
        PushT(pusht_starts(1))


def test_starts_that_are_no_states_are_refused():
    with pytest.raises(InputError, match=r"\(B, 5\), got shape \(2, 3\)"):
        PushT(np.zeros((2, 3)))


# --- Push-T -------------------------------------------------------------------------------------------


@pytest.fixture
def simulator():
    return pytest.importorskip("gym_pusht", reason="the simulator of Push-T is not installed")


class Replay:
    """The actions of one demonstration."""

    def __init__(self, actions):
        self.actions = actions

    def reset(self, seed=None):
        self.left = iter(self.actions)

    def select_action(self, observation):
        return torch.as_tensor(next(self.left))[None]


needs_demonstrations = pytest.mark.skipif(
    "METASTABLE_PUSHT" not in os.environ, reason="METASTABLE_PUSHT names no demonstrations"
)


def demonstrations():
    folder = os.environ["METASTABLE_PUSHT"]
    file = next(os.path.join(folder, f) for f in os.listdir(folder) if f.endswith(".npz"))
    with np.load(file) as held:
        return tuple(held[key] for key in ("state", "action", "episode_ends"))


@needs_demonstrations
def test_demonstrations_replay_to_the_pixel(simulator):
    states, actions, ends = demonstrations()
    world = PushT(states[:1])
    world.reset()
    for i in range(ends[0] - 1):
        world.step(torch.from_numpy(actions[i])[None])
        assert np.abs(world.raw[0] - states[i + 1])[:4].max() < 1e-3


@needs_demonstrations
@pytest.mark.slow
def test_the_score_of_all_demonstrations_is_the_known_one(simulator):
    states, actions, ends = demonstrations()
    begins = [0, *ends[:-1]]
    scores = [
        rollout_pusht(Replay(actions[b:e]), states[b : b + 1], steps=int(e - b)).best(300).item()
        for b, e in zip(begins, ends, strict=True)
    ]
    assert np.mean(scores) == pytest.approx(0.946, abs=0.001)
    assert sum(score >= 1 for score in scores) == 7


def test_states_are_set_to_the_bit(simulator):
    states = pusht_starts(2)
    world = PushT(states)
    seen = world.reset()
    for env, state in zip(world.each, states, strict=True):
        assert np.array_equal([*env.agent.position, *env.block.position, env.block.angle], state)
        corners = env.get_keypoints(env._block_shapes)
        own = world.observations()["block"][0 if env is world.each[0] else 1].view(8, 2).numpy()
        assert np.abs(np.sort(corners, 0) - np.sort(own, 0)).max() < 1e-3
    assert seen["agent"].tolist() == states[:, :2].tolist()
    assert world.picture(0).shape == (96, 96, 3)


def test_coverage_knows_no_last_digits_which_depend_on_where_shapes_lie_in_memory(simulator):
    world = PushT(pusht_starts(1))
    near = [world.progress_of(0.0, 0.0, {"coverage": float(np.nextafter(0.3, end))}) for end in (0, 1)]
    assert near == [0.3, 0.3]


def test_a_policy_pushes_from_the_command_line(simulator, tmp_path):
    rng = np.random.default_rng(0)
    seen = {"agent": rng.uniform(0, 512, (30, 2)), "block": rng.uniform(0, 512, (30, 16))}
    shown = Demonstrations.of(seen, rng.uniform(0, 512, (30, 2)), [30])
    flow = {"name": "flow", "layers": 1, "hidden": (8,)}
    fit_policy(shown, flow, "density", PolicyConfig(2, 4, 4, candidates=2), steps=2, out=tmp_path / "run")
    options = [
        "--starts",
        "2",
        "--steps",
        "5",
        "--out",
        str(tmp_path / "out"),
        "--against",
        str(tmp_path / "run"),
    ]
    made = CliRunner().invoke(app, ["rollout", str(tmp_path / "run"), *options])
    assert made.exit_code == 0, made.output
    assert "maximum at 5" in made.output
    assert "0.000 (0.000 … 0.000)" in made.output, "the same policy from the same starts"
    kept = json.loads((tmp_path / "out" / "rollouts.json").read_text())
    assert len(kept["episodes"]) == 2
    assert kept["against"]["differences"] == {"maximum at 5": {"value": 0.0, "low": 0.0, "high": 0.0}}


class Unsaid:
    """A policy that does not say when it looks."""

    def __init__(self, policy):
        self.reset, self.select_action = policy.reset, policy.select_action


def test_pictures_are_drawn_where_a_policy_looks_and_nowhere_else(simulator, monkeypatch):
    states = pusht_starts(40)
    shown = Demonstrations.of(
        {"agent": states[:, :2], "picture": pusht_pictures(states)}, states[:, :2], [20, 40], noisy=("agent",)
    )
    model = policy_model(
        "flow", layout_of(Scaling.fit(shown), 2), Sizes(field_width=8, field_layers=1, ode=(2, 2))
    )
    policy = fit_policy(
        shown, model.energy, model.method, PolicyConfig(2, 8, 5, 1, 0, 0), **model.options | {"steps": 1}
    )
    drawn, draw = [], PushTEasel.draw
    monkeypatch.setattr(PushTEasel, "draw", lambda self, state: drawn.append(1) or draw(self, state))
    found = []
    for who in (policy, Unsaid(policy)):
        drawn.clear()
        found.append((rollout_pusht(who, states[:3], pictures=True, steps=12), len(drawn)))
    (looking, some), (staring, every) = found
    assert torch.allclose(looking.progress, staring.progress, rtol=0, atol=1e-12)
    assert every == 3 * 13
    assert some == 3 * (1 + 2 + 2), "at the start, and before each of the two chunks that follow"
    world = PushT(states[:1], pictures=True)
    world.looked = False  # as an episode may have left it
    assert world.reset()["picture"].any(), "a start is looked at"


def test_how_a_run_acts_is_changed_of_it_alone(tmp_path, monkeypatch):
    asked = {}

    def load(folder, *, device, **changed):
        asked[folder.name] = changed
        return

    monkeypatch.setattr(policies_module, "load_policy", load)
    monkeypatch.setattr(rollout_command, "_walk", lambda *_: None)
    for name in ("energy", "flow"):
        (tmp_path / name).mkdir()
    command = [
        "rollout",
        str(tmp_path / "energy"),
        "--env",
        "path-planning",
        "--against",
        str(tmp_path / "flow"),
    ]
    found = CliRunner().invoke(app, [*command, "--rank", "network", "--candidates", "3"])
    assert found.exit_code == 0, found.output
    assert asked == {"energy": {"rank": "network", "candidates": 3}, "flow": {}}


def test_rollouts_of_other_starts_or_fewer_steps_are_not_compared():
    made = [
        rollout(Pushing(), on_a_line, starts, steps=n)
        for starts, n in (([0, 1], 4), ([0, 2], 4), ([0, 1], 3))
    ]
    assert made[0].ahead_of(made[0]).value == 0
    with pytest.raises(InputError, match="same starts"):
        made[0].ahead_of(made[1])
    with pytest.raises(InputError, match="steps: must be at most what both have, 3, got 4"):
        made[0].ahead_of(made[2])


def test_a_reward_that_is_no_number_is_refused():
    class Broken(Line):
        def step(self, action):
            return np.zeros(1), float("nan"), False, False, {}

    with pytest.raises(InputError, match="broken: reward: must be finite, got nan"):
        rollout(Pushing(), lambda starts: Environments(Broken, starts, "broken"), [0], steps=1)


class Boxed:
    """Remembers the action that it was given."""

    def __init__(self, kind, low, high):
        self.action_space = Box()
        self.action_space.low, self.action_space.high = np.array([low], kind), np.array([high], kind)

    def reset(self, seed=None):
        return np.zeros(1), {}

    def step(self, action):
        self.given = action
        return np.zeros(1), 0.0, True, False, {}


@pytest.mark.parametrize(
    ("kind", "low", "high", "asked", "given", "clipped"),
    [
        (np.uint8, 0, 10, -5, 0, 1),
        (np.uint8, 0, 10, 1e10, 10, 1),
        (np.uint8, 0, 10, 3.4, 3, 0),
        (np.int64, -3, 10, 1e30, 10, 1),
        (np.bool_, False, True, 0.8, True, 0),
        (np.float32, -1, 1, -1, -1, 0),
    ],
)
def test_actions_are_brought_into_boxes_of_every_kind_of_number(kind, low, high, asked, given, clipped):
    made = Environments(lambda: Boxed(kind, low, high), [0], "box")
    found = rollout(Pushing(asked), lambda starts: made, [0], steps=1)
    assert made.each[0].given.dtype == kind
    assert (made.each[0].given.item(), found.clipped) == (given, clipped)


class Ending(Line):
    """The first of two ends, and what is seen then is of no use."""

    last = None

    def step(self, action):
        seen, reward, ended, cut, info = super().step(action)
        return (self.last if ended else seen), np.array([reward]), ended, cut, info


@pytest.mark.parametrize("last", [np.array([np.nan]), {}, None])
def test_what_is_seen_after_an_end_stops_nobody(last):
    def make(starts):
        found = Environments(Ending, starts, "line")
        for env in found.each:
            env.last = last
        return found

    acts = Pushing()
    found = rollout(acts, make, [2, 0], steps=6)
    assert found.lengths.flatten().tolist() == [2, 4]
    assert np.isfinite(acts.seen).all()


def test_names_that_differ_between_environments_and_odd_resets_are_said():
    class Named(Line):
        def reset(self, seed=None):
            return {"at" if seed else "where": np.zeros(1)}, {}

    with pytest.raises(
        InputError, match="line: observation of environment 1: must be by the names of all, where"
    ):
        Environments(Named, [0, 1], "line").reset()

    class Bare(Line):
        def reset(self, seed=None):
            return np.zeros(1)

    with pytest.raises(InputError, match="line: reset: must be a pair"):
        Environments(Bare, [0], "line").reset()

    class Spaceless(Line):
        action_space = None

    with pytest.raises(InputError, match="line: actions must be a vector of numbers"):
        rollout(Pushing(), lambda starts: Environments(Spaceless, starts, "line"), [0])


@pytest.mark.parametrize("reward", [None, "much", np.ones(2)])
def test_rewards_that_are_no_number_are_named(reward):
    class Odd(Line):
        def step(self, action):
            return np.zeros(1), reward, False, False, {}

    with pytest.raises(InputError, match="line: reward: must be finite"):
        rollout(Pushing(), lambda starts: Environments(Odd, starts, "line"), [0])


@pytest.mark.parametrize("steps", [0, -1, 2.5])
def test_scores_are_of_a_number_of_steps(steps):
    for measure in ("return", "coverage"):
        found = Rollouts(torch.rand(3, 1, 4).double(), torch.full((3, 1), 4), measure, "line")
        for ask in (found.best, found.final, lambda n, found=found: found.ahead_of(found, n)):
            with pytest.raises(InputError, match="steps"):
                ask(steps)


def test_rates_of_several_rollouts_of_a_start_are_no_points():
    found = Rollouts(torch.ones(5, 2, 4).double(), torch.full((5, 2), 4), "coverage", "Push-T")
    scores = found.scores()
    assert scores["full score"].high == 1
    assert scores["full score"].low < 0.75
    assert found.ahead_of(found).high > 0.2


def test_rollouts_that_are_copies_count_once():
    """Of a policy that draws nothing: intervals of 16 copies of 25 episodes held the rate in 37 % of draws."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(200):
        hits = torch.from_numpy(rng.random((25, 1, 1)) < 0.98).double().repeat(1, 16, 4)
        found = Rollouts(hits, torch.full((25, 16), 4), "coverage", "Push-T")
        once = Rollouts(hits[:, :1], torch.full((25, 1), 4), "coverage", "Push-T")
        assert found.scores() == once.scores()
        assert found.ahead_of(found) == once.ahead_of(once)
        interval = found.scores()["full score"]
        held += interval.low <= 0.98 <= interval.high
    assert held >= 185
    hits[0, 0, 2:] = 1 - hits[0, 0, 2:]
    assert Rollouts(hits, found.lengths, "coverage", "Push-T").scores() != once.scores(), "not all are copies"


def test_frames_first_and_frames_last_keep_their_axes():
    class Stacked(Line):
        def reset(self, seed=None):
            return np.zeros(self.shape, np.uint8), {}

    for shape, seen in (((6, 12, 12), (6, 12, 12)), ((12, 10, 3), (3, 12, 10)), ((3, 12, 10), (3, 12, 10))):
        Stacked.shape = shape
        assert Environments(Stacked, [0], "frames").reset()["state"].shape == (1, *seen)


def test_a_package_of_the_simulator_that_is_missing_is_one_line(simulator, monkeypatch):
    def fails(*args, **options):
        raise ModuleNotFoundError("No module named 'cv2'")

    import gymnasium

    monkeypatch.setattr(gymnasium, "make", fails)
    with pytest.raises(MissingDependencyError, match="Push-T: No module named 'cv2'; pip install"):
        PushT(pusht_starts(1))


@pytest.mark.parametrize("starts", [4, "ab", np.array(3), (i for i in range(3))])
def test_starts_are_several(starts):
    """`rollout(policy, make, 32)`, as `--starts 32` is said, was a TypeError."""
    with pytest.raises(InputError, match=r"starts: must be several: .* such as range\(32\)"):
        rollout(Pushing(), on_a_line, starts, steps=2)
    with pytest.raises(InputError, match=r"starts: must be finite states of Push-T, \(B, 5\)"):
        rollout_pusht(Pushing(), 32)


@pytest.mark.parametrize("starts", [[3, 3], np.repeat(pusht_starts(1), 2, 0), torch.zeros(2)])
def test_starts_that_are_the_same_do_not_count_as_several(starts):
    """Intervals over starts of which 32 were one were those of 32."""
    with pytest.raises(InputError, match=r"starts: must be all different; .* rollouts=…"):
        rollout(Pushing(), on_a_line, starts, steps=2)


def test_what_is_made_are_environments():
    with pytest.raises(InputError, match=r"make: must be a function from starts to Environments"):
        rollout(Pushing(), lambda starts: Line(), range(2), steps=2)
    with pytest.raises(InputError, match=r"make: must be a function from starts to Environments.*, got 3"):
        rollout(Pushing(), 3, range(2), steps=2)


def test_scores_that_no_start_tells_apart_are_not_known_to_be_the_same():
    """Of 8 starts, one in ten of which would differ, the interval was the point 0 in 44 % of comparisons."""
    rng, within, courses = np.random.default_rng(0), 0, 400
    for _ in range(courses):
        reached = torch.from_numpy(rng.uniform(0.1, 0.5, 8))[:, None, None].repeat(1, 1, 2)
        better = torch.from_numpy((rng.random(8) < 0.1) * rng.uniform(0.05, 0.4, 8))[:, None, None]
        reached[..., 1] /= 2  # what followed was no better, and another course in each
        other = torch.cat([reached[..., :1], reached[..., 1:] / 2], -1)
        each = (Rollouts(x, torch.full((8, 1), 2), "coverage", "Push-T") for x in (reached + better, other))
        ahead = next(each).ahead_of(next(each))
        within += ahead.low <= 0.1 * 0.225 / 0.95 <= ahead.high
    assert within > 0.95 * courses
    same = covered(0.3, 0.4)
    assert same.ahead_of(same) == (0, 0, 0), "of the same course"


def test_policies_of_other_numbers_of_rollouts_are_compared():
    progress = torch.rand(12, 3, 5, generator=torch.Generator().manual_seed(0)).double()
    some = Rollouts(progress, torch.full((12, 3), 5), "coverage", "Push-T")
    few = Rollouts(0.9 * progress[:, :2], torch.full((12, 2), 5), "coverage", "Push-T")
    ahead = some.ahead_of(few)
    assert ahead.value == pytest.approx(float((some.best(5).mean(1) - few.best(5).mean(1)).mean()))


def test_an_episode_that_is_cut_ends_as_one_that_ended():
    class Cut(Line):
        def step(self, action):
            seen, reward, *_ = super().step(action)
            return seen, reward, False, self.at > 3, {}

    found = rollout(Pushing(), lambda starts: Environments(Cut, starts, "line"), [0, 2], steps=6)
    assert found.lengths.tolist() == [[4], [2]]
    assert found.progress[:, 0, -1].tolist() == [4, 2]


def test_the_share_of_actions_outside_is_of_those_that_were_carried_out():
    assert rollout(Pushing(1.5), on_a_line, [0, 2], steps=6).clipped == 1.0


def test_coverage_is_that_of_a_step_whatever_it_was_before(simulator):
    world = PushT(pusht_starts(2))
    world.reset()
    world.progress[:] = 0.9
    world.step(torch.full((2, 2), 256.0))
    assert world.progress.tolist() == [round(env._get_coverage(), 9) for env in world.each]
    assert (world.progress < 0.9).all()


def test_returns_are_read_where_episodes_get():
    """Of episodes that end at step 25 the same number stood at 200 and at 300."""
    progress = torch.arange(1.0, 301).double().clamp(max=25).repeat(3, 1, 1)
    short = Rollouts(progress, torch.full((3, 1), 25), "return", "mine")
    assert list(short.scores()) == ["final at 25"]
    assert list(short.table()[0]) == ["start", "rollout", "steps", "final_25"]
    long = Rollouts(
        1.0 * torch.arange(300).double().repeat(3, 1, 1), torch.full((3, 1), 250), "return", "mine"
    )
    assert long.horizons == [200, 250]
    assert short.ahead_of(long).value == 25 - 249, "where the longer of the two ends"
    pushed = Rollouts(progress / 25, torch.full((3, 1), 25), "coverage", "Push-T")
    assert pushed.horizons == [200, 300], "however early all of them are done"


def test_one_start_has_means_and_is_told_why_no_intervals(tmp_path, monkeypatch):
    """Nothing was printed or written of its scores."""
    monkeypatch.setattr(policies_module, "load_policy", lambda *args, **options: Pushing(0.75))
    monkeypatch.setattr(environments_module, "gym_environments", lambda name, starts: on_a_line(starts))
    options = ["--env", "line", "--starts", "1", "--rollouts", "3", "--steps", "2", "--out", str(tmp_path)]
    made = CliRunner().invoke(app, ["rollout", str(tmp_path), *options])
    assert made.exit_code == 0, made.output
    assert "final at 2: 1.500 (an interval needs at least 2 starts)" in made.output
    kept = json.loads((tmp_path / "rollouts.json").read_text())
    assert kept["scores"] == {"final at 2": {"value": 1.5, "low": None, "high": None}}
    assert "1.500 (an interval needs at least 2 starts)" in (tmp_path / "rollouts.html").read_text()
    assert covered(0.95, 0.19).means()["full score"] == 0.5


def test_environments_have_arguments_from_the_command_line(tmp_path, monkeypatch):
    gymnasium = pytest.importorskip("gymnasium", reason="environments are those of Gymnasium")
    monkeypatch.setattr(policies_module, "load_policy", lambda *args, **options: Pushing())
    made, make = [], gymnasium.make
    monkeypatch.setattr(gymnasium, "make", lambda *name, **own: made.append(own) or make(*name, **own))
    command = ["rollout", str(tmp_path), "--env", "Pendulum-v1", "--starts", "2", "--steps", "2"]
    found = CliRunner().invoke(app, [*command, "--set-env", "g=3.5", "--set-env", "render_mode=rgb_array"])
    assert found.exit_code == 0, found.output
    assert made == [{"g": 3.5, "render_mode": "rgb_array"}] * 2
    for own, said in (
        ("name=3", "env: making 'Pendulum-v1' raised TypeError: PendulumEnv.__init__() got an unexpected"),
        ("mass", "set-env: must read NAME=VALUE, as in max_episode_steps=50, got 'mass'"),
    ):
        refused = CliRunner().invoke(app, [*command, "--set-env", own])
        assert refused.exit_code == 2, refused.output
        assert said in refused.stderr
        assert refused.stderr.count("\n") == 1
    refused = CliRunner().invoke(app, ["rollout", str(tmp_path), "--set-env", "g=3"])
    assert "set-env: must be left out, as pusht takes no arguments, got {'g': 3}" in refused.stderr


class Reaching(Line):
    """Rewards nothing, and says of some steps whether the point is where it should be."""

    said = "is_success"

    def step(self, action):
        seen, _, ended, *_ = super().step(action)
        return seen, 0.0, ended, False, {self.said: 1 < self.at < 2.5} if self.at > 0.5 else {}


class Finding(Reaching):
    said = "success"


def reaching(starts):
    return Environments(Reaching, starts, "reach")


def finding(starts):
    return Environments(Finding, starts, "find")


@pytest.mark.parametrize("make", [reaching, finding])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_episode_has_succeeded_where_a_step_said_so(make, workers, tmp_path):
    """Of environments that reward nothing there was a return of 0, and nothing else."""
    found = rollout(Pushing(), make, [-9, 0, 2, 3], steps=5, workers=workers)
    assert found.success is not None
    assert found.success.tolist() == [[0], [1], [0], [0]], "one of them said nothing at all"
    assert found.table()[1]["success"] == 1
    assert found.scores()["success"] == clopper_pearson(1, 4)
    assert found.means()["success"] == 0.25
    kept = json.loads(found.write(tmp_path).read_text())
    assert kept["scores"]["success"]["value"] == 0.25
    assert kept["episodes"][1]["success"] == 1


def test_nothing_is_said_of_success_where_environments_do_not():
    found = rollout(Pushing(), on_a_line, [0, 2], steps=3)
    assert found.success is None
    assert "success" not in found.scores() | found.table()[0]
    worlds = reaching([0])
    for info, said in (
        ({"is_success": True, "success": False}, 1),
        ({"is_success": np.zeros(2), "success": np.ones(1)}, 1),
        ({"success": torch.tensor(0.5)}, 0.5),
        ({"success": "no", "is_success": np.inf}, np.nan),
        (None, np.nan),
    ):
        assert worlds.success_of(info) == pytest.approx(said, nan_ok=True)


def test_successes_of_rollouts_that_are_no_copies_all_count():
    """By rewards of 0 alone they all took the same course."""
    won = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).double()
    found = Rollouts(torch.zeros(2, 2, 3).double(), torch.full((2, 2), 3), "return", "mine", success=won)
    assert found.scores()["success"].value == 0.75


def test_the_command_line_tells_successes_and_how_far_they_are_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(
        policies_module, "load_policy", lambda run, **options: Pushing(1.0 if run.name == "a" else 0.1)
    )
    monkeypatch.setattr(environments_module, "gym_environments", lambda name, starts: reaching(starts))
    command = ["rollout", "a", "--env", "reach", "--starts", "2", "--steps", "2", "--against", "b"]
    made = CliRunner().invoke(app, [*command, "--out", str(tmp_path)])
    assert made.exit_code == 0, made.output
    assert "success: 1.000 (" in made.output
    assert "success, a − b: 0.500 (" in made.output
    kept = json.loads((tmp_path / "rollouts.json").read_text())
    assert kept["against"]["differences"]["success"]["value"] == 0.5
    assert "<td>success</td>" in (tmp_path / "rollouts.html").read_text()


def test_full_scores_of_push_t_are_its_successes(simulator):
    found = rollout_pusht(Replay([[256.0, 256.0]] * 2), pusht_starts(1), steps=2)
    assert found.success is None
    assert list(found.table()[0]) == ["start", "rollout", "steps", "maximum_2", "final_2"]
