"""Films of an environment that draws itself."""

import numpy as np
import pytest
import torch
from PIL import Image

from metastable.core import ConfigError, InputError
from metastable.policies import Environments, Film, film, rollout
from metastable.policies.films import films


class Box:
    low, high, shape = -np.ones(1), np.ones(1), (1,)


class Shade:
    """A number that is its own picture."""

    action_space = Box()

    def reset(self, seed=None):
        self.at = 0.0
        return np.array([self.at]), {}

    def step(self, action):
        self.at += float(action[0])
        return np.array([self.at]), float(action[0]), self.at >= 3, False, {}

    def render(self):
        return np.full((4, 5, 3), int(50 * self.at), dtype=np.uint8)


class Onwards:
    def reset(self, seed=None):
        pass

    def select_action(self, observation):
        return torch.full((1, 1), 5.0)


def test_a_film_has_every_step_and_ends_with_its_episode(tmp_path):
    found = film(Onwards(), Environments(Shade, [0]), steps=10)
    assert [int(frame[0, 0, 0]) for frame in found.frames] == [
        0,
        50,
        100,
        150,
    ]  # actions brought into the box
    assert found.progress.tolist() == [0, 1, 2, 3]
    with Image.open(found.write(tmp_path / "films" / "one.gif", every=2)) as gif:
        assert gif.n_frames == 3  # the first, the third, and the last
        gif.seek(2)
        assert gif.convert("RGB").getpixel((0, 0)) == (150, 150, 150)


@pytest.mark.parametrize(("fps", "ms", "count"), [(25, 40, 4), (100, 20, 3), (None, 100, 4), (-1, 100, 4)])
def test_a_film_is_shown_at_the_speed_of_its_environment(tmp_path, fps, ms, count):
    """Browsers show a GIF of more than fifty frames a second at ten."""

    class Timed(Shade):
        metadata = {"render_fps": fps}  # noqa: RUF012

    with Image.open(film(Onwards(), Environments(Timed, [0])).write(tmp_path / "a.gif")) as gif:
        assert (gif.info["duration"], gif.n_frames) == (ms, count)


def test_a_film_is_of_one_environment_that_draws():
    with pytest.raises(InputError, match="a film is of one environment, got 2"):
        film(Onwards(), Environments(Shade, [0, 1]))

    class Blind(Shade):
        def render(self):
            return None

    with pytest.raises(InputError, match="draws no pictures"):
        film(Onwards(), Environments(Blind, [0]))


def test_films_of_several_end_each_with_its_episode():
    class Further(Shade):
        def reset(self, seed=None):
            self.at = float(seed)
            return np.array([self.at]), {}

    class All(Onwards):
        def select_action(self, observation):
            return torch.ones(len(observation["state"]), 1)

    found = films(All(), Environments(Further, [0, 2]), steps=10)
    assert [len(each.frames) for each in found] == [4, 2]
    assert [each.actions.shape for each in found] == [(3, 1), (1, 1)]
    assert int(found[1].frames[-1][0, 0, 0]) == 150
    assert found[1].progress.tolist() == [0, 1]


def test_a_film_refuses_actions_that_do_not_fit():
    class Twice(Onwards):
        def select_action(self, observation):
            return torch.full((1, 2), 5.0)

    with pytest.raises(InputError, match="actions of the policy have 2 numbers, those of the environment 1"):
        film(Twice(), Environments(Shade, [0]))
    with pytest.raises(ValueError, match="steps"):
        film(Onwards(), Environments(Shade, [0]), steps=0)


@pytest.mark.parametrize("name", ["a.mp4", "a.jpg", "a"])
def test_a_film_is_a_gif(tmp_path, name):
    shown = Film([np.zeros((4, 4, 3), np.uint8)] * 2, np.zeros((1, 2)), np.zeros(2))
    with pytest.raises(ConfigError, match=r"path: must be a file that ends with \.gif, got '.*a"):
        shown.write(tmp_path / name)
    assert shown.write(tmp_path / "a.GIF").is_file()


def test_a_film_of_nothing_every_is_refused(tmp_path):
    still = Film([np.zeros((2, 2, 3), np.uint8)], np.zeros((0, 1)), np.zeros(1))
    with pytest.raises(ValueError, match="every"):
        still.write(tmp_path / "no.gif", every=0)


def test_pictures_that_share_their_memory_are_kept_apart():
    class Reused(Shade):
        board = np.zeros((4, 5, 3), np.uint8)

        def render(self):
            self.board[:] = int(50 * self.at)
            return self.board

    made = film(Onwards(), Environments(Reused, [0]))
    assert [int(frame.max()) for frame in made.frames] == [0, 50, 100, 150]


def test_a_film_goes_as_fast_as_its_episode(tmp_path):
    for every in (1, 2):
        made = film(Onwards(), Environments(Shade, [0])).write(tmp_path / f"{every}.gif", every)
        with Image.open(made) as gif:
            assert gif.info["duration"] == 100 * every, "ten steps a second"


def test_a_film_is_of_the_episode_that_a_rollout_of_its_seed_has():
    class Noting(Onwards):
        def reset(self, seed=None):
            seeds.append(seed)

    seeds = []
    film(Noting(), Environments(Shade, [0]), seed=3)
    rollout(Noting(), lambda starts: Environments(Shade, starts), [0], seed=3)
    assert seeds[0] == seeds[1]
