"""Environments that are not there are named."""

import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from metastable.core.errors import ConfigError, InputError, MissingDependencyError
from metastable.data import Demonstrations
from metastable.policies import PolicyConfig, fit_policy, gym_environments, rollout
from metastable.policies.environments import Environments


def test_an_environment_of_a_package_that_is_not_there_is_named():
    pytest.importorskip("gymnasium", reason="environments are those of Gymnasium")
    with pytest.raises(MissingDependencyError, match=r"env: must be .* got 'nosuchmod:Env-v0': .*nosuchmod"):
        gym_environments("nosuchmod:Env-v0", [0])


def test_an_environment_of_a_module_in_the_working_directory_is_found(tmp_path, monkeypatch):
    gymnasium = pytest.importorskip("gymnasium", reason="environments are those of Gymnasium")
    text = (
        "import gymnasium\ngymnasium.register('Near/Here-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    (tmp_path / "near_and_here.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert gym_environments("near_and_here:Near/Here-v0", [0]).each[0].spec.id == "Near/Here-v0"
    assert sys.path == before
    gymnasium.registry.pop("Near/Here-v0")


class Strict:
    """Takes actions of its box alone, and shows what it was built with."""

    def __init__(self, seen, kind=np.float32):
        self.seen, self.action_space = seen, SimpleNamespace(low=np.zeros(2, kind), high=np.full(2, 9, kind))

    def reset(self, seed=None):
        return self.seen, {}

    def step(self, action):
        assert action.dtype == self.action_space.low.dtype
        self.taken = action
        return self.seen, 0.0, False, False, {}


class Aiming:
    def reset(self, seed=None):
        pass

    def select_action(self, observation):
        return torch.full((1, 2), 3.6)


@pytest.mark.parametrize(("kind", "taken"), [(np.float32, np.float32(3.6)), (np.int64, 4)])
def test_actions_are_of_the_kind_of_the_box(kind, taken):
    worlds = Environments(lambda: Strict(np.zeros(3), kind), [0])
    rollout(Aiming(), lambda starts: worlds, [0], steps=1)
    assert worlds.each[0].taken.tolist() == [taken, taken]


def test_pictures_may_have_their_channels_first_and_texts_are_left_alone():
    seen = {"last": np.zeros((8, 6, 3), np.uint8), "first": np.zeros((3, 8, 6), np.uint8), "mission": "go"}
    found = Environments(lambda: Strict(seen), [0, 1]).reset()
    assert list(found) == ["last", "first"]
    assert {tuple(value.shape) for value in found.values()} == {(2, 3, 8, 6)}
    with pytest.raises(InputError, match="observations must be numbers, or numbers by name, got 'go'"):
        Environments(lambda: Strict("go"), [0]).reset()


class Faulty(Strict):
    """An environment whose own code fails."""

    def __init__(self, at):
        super().__init__(np.zeros(3))
        self.at = at

    def reset(self, seed=None):
        assert self.at != "reset", "keys differ:\nplace"
        return super().reset(seed)

    def step(self, action):
        return super().step(action) if self.at != "step" else super().step(action)[:4]  # as Gym once had it


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("reset", r"mine: reset of environment 0 raised AssertionError: keys differ: place"),
        ("step", r"mine: step of environment 0 raised ValueError: not enough values"),
    ],
)
def test_what_an_environment_raises_is_one_line_that_names_it(at, said):
    with pytest.raises(InputError, match=said):
        rollout(Aiming(), lambda starts: Environments(lambda: Faulty(at), starts, "mine"), [0], steps=1)


def test_what_an_environment_shows_and_takes_is_told_in_one_line():
    with pytest.raises(InputError, match=r"got \(array\(\[\[1") as refused:
        Environments(lambda: Strict((np.eye(3), np.eye(4))), [0]).reset()
    assert "\n" not in str(refused.value)
    worlds = Environments(lambda: Strict(np.zeros(3)), [0])
    worlds.each[0].action_space = SimpleNamespace(low=-np.eye(3), high=np.eye(3))
    with pytest.raises(InputError, match=r"a Box of shape \(A,\), got .*low") as refused:
        assert worlds.box
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("low", [(9.5, 0.0), (np.nan, 0.0), (1.0, 0.0)])
def test_boxes_are_of_numbers_in_order_and_the_same_everywhere(low):
    """Of one that holds nothing every action was its edge, or 0; of several the first was taken for all."""
    worlds = Environments(lambda: Strict(np.zeros(3)), [0, 1])
    worlds.each[1].action_space.low[:] = low
    if low[0] != 1:
        worlds.each[0].action_space.low[:] = low
    with pytest.raises(ConfigError, match="actions: must be from low to high, the same in every environment"):
        assert worlds.box


def test_episodes_do_not_share_an_environment():
    """Each would go on where the other is, and nothing would say so."""
    one = Strict(np.zeros(3))
    assert len(Environments(lambda: one, [0])) == 1
    with pytest.raises(InputError, match="mine: make: must be a function that makes a new environment every"):
        Environments(lambda: one, [0, 1], "mine")


def test_a_module_of_environments_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    pytest.importorskip("gymnasium", reason="environments are those of Gymnasium")
    (tmp_path / "half_written.py").write_text("raise RuntimeError('no\\nscreen')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"env: making 'half_written:A-v0' raised RuntimeError: no screen"):
        gym_environments("half_written:A-v0", [0])


def test_environments_may_show_the_same_array_at_every_step():
    """The last observation was written into the one before, and a policy was asked about NaN."""

    class InPlace(Strict):
        def reset(self, seed=None):
            self.seen[:] = self.left = seed
            return super().reset()

        def step(self, action):
            self.left -= 1
            self.seen[:] = self.left or np.nan
            return self.seen, 0.0, self.left == 0, False, {}

    worlds = Environments(lambda: InPlace(np.zeros(1)), [1, 3])
    worlds.reset()
    seen = [worlds.step(torch.zeros(2, 2))["state"].flatten().tolist() for _ in range(3)]
    assert seen == [[1, 2], [1, 1], [1, 1]]
    shared = np.zeros(1)
    assert Environments(lambda: InPlace(shared), [1, 3]).reset()["state"].flatten().tolist() == [1, 3]


def test_environments_may_show_tensors_with_a_graph():
    """A simulator in torch was a traceback: numpy takes no tensor with a graph, and none of bfloat16."""
    place = torch.full((3,), 2.0, requires_grad=True)

    class Differentiable(Strict):
        def step(self, action):
            return self.seen, 2 * place[:1], False, False, {}

    worlds = Environments(lambda: Differentiable({"near": 2 * place, "far": place.bfloat16()}), [0, 1])
    assert {key: value.tolist() for key, value in worlds.reset().items()} == {
        "near": [[4.0] * 3] * 2,
        "far": [[2.0] * 3] * 2,
    }
    worlds.step(torch.zeros(2, 2))
    assert worlds.progress.tolist() == [4.0, 4.0]


def test_seeds_that_are_no_whole_numbers_are_refused():
    """They were cut, so that several starts were one."""
    made = Environments(lambda: Strict(np.zeros(3)), [0.25, 0.75])
    with pytest.raises(ConfigError, match=r"starts: must be whole numbers, the seed of each, got 0\.25"):
        made.reset()
    assert len(Environments(lambda: Strict(np.zeros(3)), np.arange(2.0)).reset()["state"]) == 2


TOP = np.zeros((8, 6, 3), np.uint8)
NESTED = {"pixels": {"top": TOP}, "at": np.zeros(3), "task": "go", "near": [[1.0], [1.0, 2.0]], "none": {}}


def test_what_lies_within_what_is_shown_has_dotted_names_and_the_rest_is_told():
    """Of pixels within observations nothing was left, and nothing said so."""
    seen = Environments(lambda: Strict(NESTED), [0, 1]).reset()
    assert {key: tuple(value.shape) for key, value in seen.items()} == {
        "pixels.top": (2, 3, 8, 6),
        "at": (2, 3),
    }
    twice = {"a": {"b": TOP}, "a.b": TOP}
    with pytest.raises(ConfigError, match=r"environment 0: must be of names that differ.*, got \['a\.b'\]"):
        Environments(lambda: Strict(twice), [0]).reset()


@pytest.fixture(scope="module")
def sees_places():
    seen = {"pixels": {"top": np.zeros((8, 2))}, "task": np.zeros((8, 2))}
    flow = {"name": "flow", "layers": 1, "hidden": (8,)}
    return fit_policy(Demonstrations.of(seen, np.eye(8)), flow, "density", PolicyConfig(1, 2, 2, 1), steps=1)


def shown_to_two(starts):
    return Environments(partial(Strict, NESTED, np.float32), starts)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_policy_says_what_was_left_out_of_what_it_needs(sees_places, workers):
    left = r"task \(not an array of numbers\), near \(of several shapes\), none \(not an array of numbers\)"
    with pytest.raises(
        InputError, match=rf"must have pixels\.top, task, .* got pixels\.top, at; left out: {left}"
    ):
        rollout(sees_places, shown_to_two, [0, 1], steps=1, workers=workers)


def test_a_policy_takes_observations_within_observations(sees_places):
    found = [{"pixels": {"top": torch.zeros(3, 2)}}, {"pixels.top": torch.zeros(3, 2)}]
    actions = []
    for seen in found:
        sees_places.reset(0)
        actions.append(sees_places.select_action({**seen, "task": torch.zeros(3, 2)}))
    assert torch.equal(*actions)
    windows = {"pixels": {"top": torch.zeros(3, 1, 2)}, "task": torch.zeros(3, 1, 2)}
    assert sees_places.predict_action_chunk(windows).shape == (3, 2, 8)


@pytest.mark.parametrize("flag", [np.zeros(2, bool), None, "no", 2])
@pytest.mark.parametrize("which", ["terminated", "truncated"])
def test_flags_that_are_neither_true_nor_false_are_named(which, flag):
    """An array was a traceback, and a text was true."""

    class Flagged(Strict):
        def step(self, action):
            return (
                self.seen,
                0.0,
                *(flag if which == name else False for name in ("terminated", "truncated")),
                {},
            )

    with pytest.raises(ConfigError, match=f"mine: {which}: must be true or false, got "):
        rollout(
            Aiming(), lambda starts: Environments(lambda: Flagged(np.zeros(3)), starts, "mine"), [0], steps=1
        )


@pytest.mark.parametrize("flag", [True, np.True_, np.ones(1, bool), torch.tensor(True), 1])
def test_flags_may_be_arrays_of_one(flag):
    class Flagged(Strict):
        def step(self, action):
            return self.seen, 0.0, False, flag, {}

    worlds = Environments(lambda: Flagged(np.zeros(3)), [0])
    assert rollout(Aiming(), lambda starts: worlds, [0], steps=3).lengths.tolist() == [[1]]
