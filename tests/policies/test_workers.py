"""Environments in several processes: the same numbers, the same errors, and nothing that is left behind."""

import multiprocessing
import os
import pickle
import signal
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from metastable.cli.main import app
from metastable.core.errors import ConfigError, InputError, MissingDependencyError, ProcessError
from metastable.data import Demonstrations
from metastable.policies import PolicyConfig, fit_policy, pusht_starts, rollout, rollout_pusht, workers
from metastable.policies.environments import Environments


class Walk:
    """A point on a line with noise of its own; beyond 3 the episode ends. From seed 2 on `fault` goes wrong."""

    action_space = SimpleNamespace(low=np.full(1, -1, np.float32), high=np.ones(1, np.float32))

    def __init__(self, fault=""):
        self.fault = fault

    def reset(self, seed=None):
        self.seed, self.rng = seed, np.random.default_rng(seed)
        self.at = self.rng.normal(size=1)
        return {"at": self.at, "picture": np.full((8, 6, 3), seed, np.uint8)}, {}

    def step(self, action):
        if self.seed >= 2 and self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        assert self.seed < 2 or self.fault != "raises", "off the\nline"
        reward = float("nan") if self.seed >= 2 and self.fault == "nan" else float(action[0])
        self.at = self.at + action + 0.1 * self.rng.normal(size=1)
        seen = {"at": self.at, "picture": np.full((8, 6, 3), self.seed, np.uint8)}
        return seen, reward, bool(self.at > 3), False, {}


class Drawing:
    """Actions at random, a little to the right, that depend on what is seen, which is kept."""

    def __init__(self, size=1, scale=1.0):
        self.size, self.scale = size, scale

    def reset(self, seed=None):
        self.rng, self.seen = torch.Generator().manual_seed(seed % 2**31), []

    def select_action(self, observation):
        self.seen += observation.values()
        seen = sum(value.double().flatten(1).mean(1) for value in observation.values())
        drawn = torch.rand(len(seen), self.size, generator=self.rng)
        return self.scale * (drawn + 0.01 * torch.sin(seen)[:, None])


def walks(starts, fault=""):
    return Environments(partial(Walk, fault), starts, "walk")


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    assert not multiprocessing.active_children()


@pytest.fixture
def quickly(monkeypatch):
    """Processes are forked off one that has imported what they need: spawned ones take seconds each."""
    multiprocessing.set_forkserver_preload([workers.__name__, "metastable.cli.main"])
    monkeypatch.setattr(workers, "get_context", lambda kind: multiprocessing.get_context("forkserver"))


def with_workers(*counts, size=1, scale=1.0, by=rollout, **options):
    """Episodes with so many workers each, which saw the same, to the bit."""
    policies = [Drawing(size, scale) for _ in counts]
    made = [by(policy, workers=n, **options) for policy, n in zip(policies, counts, strict=True)]
    for policy, each in zip(policies[1:], made[1:], strict=True):
        assert all(map(torch.equal, policies[0].seen, policy.seen))
        assert torch.equal(made[0].lengths, each.lengths)
        facts = [(one.name, one.measure, one.clipped) for one in (made[0], each)]
        assert facts[0] == facts[1]
    return made


def test_numbers_do_not_depend_on_workers(quickly):
    one, *more = with_workers(1, 2, 3, 9, make=walks, starts=range(5), steps=9, seed=3)
    assert all(torch.equal(one.progress, each.progress) for each in more)
    assert len(set(one.lengths.flatten().tolist())) > 1, "one ends before another"


class Recorded(Walk):
    """Writes what it holds when it is closed, as Gymnasium's videos are."""

    def __init__(self, folder, fault):
        super().__init__(fault)
        self.folder = folder

    def close(self):
        (self.folder / str(self.seed)).write_text(str(self.at))


def recorded(starts, folder, fault=""):
    return Environments(partial(Recorded, folder, fault), starts, "recorded")


@pytest.mark.parametrize("count", [1, 2])
def test_environments_are_closed(quickly, tmp_path, count):
    """A video of the last episode was never written."""
    rollout(Drawing(), partial(recorded, folder=tmp_path), range(3), steps=2, workers=count)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def test_environments_are_closed_when_one_goes_wrong(tmp_path):
    make = partial(recorded, folder=tmp_path, fault="raises")
    with pytest.raises(InputError, match="step of environment 2 raised AssertionError"):
        rollout(Drawing(), make, range(3), steps=2)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("pictures", [False, True])
def test_push_t_does_not_depend_on_workers(quickly, pictures):
    pytest.importorskip("gym_pusht", reason="the simulator of Push-T is not installed")
    how = {"starts": pusht_starts(3), "pictures": pictures, "steps": 25, "seed": 1}
    one, two = with_workers(1, 2, size=2, scale=512.0, by=rollout_pusht, **how)
    # shapely adds the parts of the block up in any order, in one process, too
    assert torch.allclose(one.progress, two.progress, rtol=0, atol=1e-15)
    assert (one.progress[..., -1] != one.progress[..., 0]).any(), "something was pushed"


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("raises", InputError, "^walk: step of environment 2 raised AssertionError: off the line$"),
        ("nan", ConfigError, "^walk: reward: must be finite, got nan$"),
        ("killed", ProcessError, "^process 1 ended .one of 2 workers, exit status -9; .*memory is short"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_said_here(quickly, fault, kind, said):
    with pytest.raises(kind, match=said) as caught:
        rollout(Drawing(), partial(walks, fault=fault), range(3), steps=3, workers=2)
    assert type(caught.value) is kind


def test_errors_travel_with_all_that_they_have():
    for error in (ConfigError("a.b", "must be 1"), MissingDependencyError("no x"), ProcessError(3, "why")):
        found = pickle.loads(pickle.dumps(error))
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
    found = pickle.loads(pickle.dumps(MissingDependencyError("no x", name="x", path="y")))
    assert (found.msg, found.name, found.path) == ("no x", "x", "y")


def test_nobody_is_left_after_ctrl_c(quickly):
    def stopped(step):
        assert len(multiprocessing.active_children()) == 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout(Drawing(), walks, [0, 1], steps=2, workers=2, on_step=stopped)


def test_what_cannot_be_sent_is_refused():
    with pytest.raises(InputError, match=r"^workers: .* must be a function or class of a module.*<lambda>"):
        rollout(Drawing(), lambda starts: walks(starts), [0, 1], workers=2)
    with pytest.raises(ConfigError, match="workers: must be an integer of at least 1, got 0"):
        rollout(Drawing(), walks, [0], workers=0)
    assert rollout(Drawing(), lambda starts: walks(starts), [0], steps=1, workers=2).progress.numel() == 1


def test_the_command_line_spreads_environments_of_a_module_that_lies_here(tmp_path, monkeypatch):
    gymnasium = pytest.importorskip("gymnasium", reason="environments are those of Gymnasium")
    text = (
        "import gymnasium\ngymnasium.register('Spread-v0', 'gymnasium.envs.classic_control:PendulumEnv', 9)\n"
    )
    (tmp_path / "lies_here.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    shown = Demonstrations.of({"state": rng.normal(size=(30, 3))}, rng.normal(size=(30, 1)), [30])
    flow = {"name": "flow", "layers": 1, "hidden": (8,)}
    fit_policy(shown, flow, "density", PolicyConfig(2, 4, 4, candidates=2), steps=2, out="run")
    command = ["rollout", "run", "--env", "lies_here:Spread-v0", "--starts", "3", "--steps", "5"]
    made = [CliRunner().invoke(app, [*command, "--workers", str(n)]) for n in (1, 2)]
    gymnasium.registry.pop("Spread-v0")
    said = [[line for line in each.output.splitlines() if "episodes in" not in line] for each in made]
    assert made[0].exit_code == 0, made[0].output
    assert said[0] == said[1]
    assert any("final at 5" in line for line in said[0])
    refused = CliRunner().invoke(app, ["rollout", "run", "--env", "path-planning", "--workers", "2"])
    assert refused.exit_code == 2
    assert "workers: path-planning has no environments to step, got 2" in refused.output
