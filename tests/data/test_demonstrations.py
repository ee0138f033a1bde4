"""Windows over episodes by hand, files of every layout, and input that is refused by name."""

import io
import json
import math
import os
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import metastable as ms
from metastable.core import ConfigError, InputError
from metastable.core.batch import Batch
from metastable.core.pixels import Frames
from metastable.core.units import Coordinates, Units
from metastable.data import (
    Dataset,
    Demonstrations,
    Scaling,
    load_episodes,
    load_lasa,
    load_lerobot,
    load_pusht,
    save_episodes,
)
from metastable.data.demonstration_files import pusht_corners, pusht_observation, pusht_states
from metastable.policies import Environments, PolicyConfig, fit_policy, pusht_pictures, rollout
from metastable.training.batches import Batches
from metastable.training.config import TrainerConfig


def counted(*lengths: int, **options) -> Demonstrations:
    """Episodes whose observation at step i is i, and whose action is 100 + i."""
    T = sum(lengths)
    return Demonstrations.of(np.arange(T), 100 + np.arange(T), np.cumsum(lengths), **options)


def test_pictures_have_the_digest_of_their_rows_and_a_copy_of_their_own():
    """Whether they are kept as bytes or as numbers; a picture that no window shows is none of the data's."""
    rng = np.random.default_rng(0)
    camera, state = rng.integers(0, 256, (30, 1, 4, 4), dtype=np.uint8), rng.normal(size=(30, 2))
    shown = Demonstrations.of({"camera": camera, "state": state}, rng.normal(size=(30, 1)), [15, 30])
    data = shown.windows(2, 4, padded=False).dataset()
    assert isinstance(data.given, Frames)
    assert Dataset.of(data.x, "rows", given=data.given.plain()).digest == data.digest
    double = Dataset.of(data.x.double(), "rows", given=data.given)
    assert double.given.dtype == torch.float64
    before = data.given.plain()
    camera[14] = 255 - camera[14]  # the last step of an episode, behind its last window
    again = Demonstrations.of({"camera": camera, "state": state}, shown.actions, [15, 30])
    assert again.windows(2, 4, padded=False).dataset().digest == data.digest
    camera[:] = 0
    assert torch.equal(data.given.plain(), before)
    assert again.windows(2, 4, padded=False).dataset().digest != data.digest
    alone = Demonstrations.of({"camera": camera}, shown.actions, [15, 30]).windows(2, 4).dataset()
    assert Dataset.of(alone.x.double(), "rows", given=alone.given).given.dtype == torch.float64


def test_padded_windows_repeat_the_ends_of_their_own_episode():
    windows = counted(3, 2).windows(context=2, prediction=3)
    seen, chunks = windows.contexts()["state"][..., 0], windows.chunks()[..., 0]
    assert seen.tolist() == [[0, 0], [0, 1], [1, 2], [3, 3], [3, 4]]
    assert (chunks - 100).tolist() == [[0, 1, 2], [1, 2, 2], [2, 2, 2], [3, 4, 4], [4, 4, 4]]
    assert windows.episode.tolist() == [0, 0, 0, 1, 1]


def test_windows_without_padding_lie_inside_their_episode():
    windows = counted(4, 5).windows(context=2, prediction=3, padded=False)
    assert windows.contexts()["state"][..., 0].tolist() == [[0, 1], [4, 5], [5, 6]]
    assert (windows.chunks()[..., 0] - 100).tolist() == [[1, 2, 3], [5, 6, 7], [6, 7, 8]]


def test_an_episode_shorter_than_the_window_is_named():
    with pytest.raises(
        InputError, match="episode 1 has 3 steps, and a window of 2 observations and 3 actions needs 4"
    ):
        counted(4, 3).windows(context=2, prediction=3, padded=False)


def test_some_rows_are_the_rows_of_all():
    windows = counted(7, 4).windows(2, 3)
    rows = torch.tensor([8, 0, 5])
    assert torch.equal(windows.chunks(rows), windows.chunks()[rows])
    assert torch.equal(windows.contexts(rows)["state"], windows.contexts()["state"][rows])


def test_splits_share_no_episode():
    train, held = counted(*range(3, 13)).split(0.3, seed=1)
    assert (len(train), len(held)) == (7, 3)
    assert not set(train.actions.flatten().tolist()) & set(held.actions.flatten().tolist())
    assert sorted(train.lengths.tolist() + held.lengths.tolist()) == list(range(3, 13))


def test_fit_holds_out_whole_groups():
    data = counted(*[5] * 20).windows(1, 2).dataset()
    train, held = data.split(0.25, seed=0)
    assert len(held) == 25
    assert not set(train.groups.tolist()) & set(held.groups.tolist())
    again = Dataset.of(data.x, "same", given=data.given)
    assert again.digest == data.digest, "groups are not numbers of the rows"


def test_rows_are_scaled_to_the_box_and_come_back():
    rng = np.random.default_rng(0)
    made = Demonstrations.of(
        {"a": rng.normal(3, 5, (50, 2)), "b": rng.normal(size=(50, 3))}, rng.normal(size=(50, 2)), [20, 50]
    )
    windows, scaling = made.windows(2, 4), Scaling.fit(made)
    data = windows.dataset()
    assert data.event_shape == (8,)
    assert data.given.shape == (50, 2 * 2 + 2 * 3)
    assert data.x.abs().max() == pytest.approx(1)
    assert data.given.abs().max() == pytest.approx(1)
    back = scaling.to_actions(data.x.view(-1, 4, 2))
    torch.testing.assert_close(back, windows.chunks())
    kept = Scaling.from_json(json.loads(json.dumps(scaling.as_json())))
    assert torch.equal(kept.pack(windows.contexts()), data.given)


def test_a_number_that_never_changes_is_not_divided_by_nothing():
    data = Demonstrations.of(np.full((4, 1), 7.0), np.arange(4.0), [4]).windows(1, 1).dataset()
    assert data.given.tolist() == [[0.0]] * 4


@pytest.mark.parametrize("value", [0.0, 3.0, -2e-4, 1e-40])
def test_an_action_that_never_changes_is_carried_out_as_it_was_shown(value):
    actions = np.stack([np.arange(4.0), np.full(4, value)], 1)
    scaling = Scaling.fit(Demonstrations.of(np.zeros(4), actions, [4]))
    torch.testing.assert_close(scaling.scale_actions(torch.from_numpy(actions))[:, 1], torch.zeros(4))
    drawn = scaling.to_actions(torch.full((5, 2), 0.01))[:, 1]  # as far off as the noise of training
    assert (drawn - value).abs().max() <= 2e-8 * max(abs(value), 1.0)


def test_pictures_stay_bytes_until_they_are_packed():
    pictures = np.arange(4 * 3 * 2 * 2, dtype=np.uint8).reshape(4, 3, 2, 2)
    made = Demonstrations.of({"state": np.arange(4.0), "camera": pictures}, np.arange(4.0), [4])
    windows = made.windows(2, 1)
    assert windows.contexts()["camera"].dtype == torch.uint8
    assert windows.contexts()["camera"].shape == (4, 2, 3, 2, 2)
    packed = windows.dataset().given
    assert packed.shape == (4, 2 * 1 + 2 * 12)
    assert packed[3, -1].item() == pytest.approx(47 / 127.5 - 1)
    assert Scaling.fit(made).noise_mask(2) == (1.0,) * 2 + (0.0,) * 24


def test_pictures_that_may_not_be_written_to_are_taken_without_a_warning(tmp_path):
    """As memory maps, broadcasts and what other libraries lend are."""
    pictures = np.random.default_rng(0).integers(0, 256, (4, 1, 3, 2), dtype=np.uint8)
    np.save(tmp_path / "camera.npy", pictures)
    lent = np.load(tmp_path / "camera.npy", mmap_mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = Demonstrations.of({"camera": lent}, np.arange(4.0))
        packed = Scaling.fit(made).pack({"camera": lent[:, None]})
    assert np.array_equal(made.observations["camera"], pictures)
    assert torch.equal(packed, made.windows(1, 1).dataset().given.plain())


def test_pictures_from_0_to_1_are_not_taken_for_black_ones():
    pictures = torch.arange(4 * 3 * 2 * 2, dtype=torch.uint8).reshape(4, 1, 3, 2, 2)
    scaling = Scaling.fit(Demonstrations.of({"camera": pictures[:, 0]}, np.arange(4.0), [4]))
    packed = scaling.pack({"camera": pictures})
    assert torch.equal(scaling.pack({"camera": pictures.double()}), packed)
    for wrong, words in ((pictures / 255, "0 to 0.1843"), (pictures / 24 - 1, "-1 to 0.9583")):
        with pytest.raises(InputError, match=rf"camera: must be bytes, or numbers from 0 to 255, .*{words}"):
            scaling.pack({"camera": wrong})


# --- σ_pert -------------------------------------------------------------------------------------------


def test_noise_falls_over_the_first_half_and_is_held():
    config = TrainerConfig(steps=100, data_noise=0.01, data_noise_final=0.005, data_noise_over=0.5)
    assert [config.noise_at(k) for k in (0, 25, 50, 99)] == pytest.approx([0.01, 0.0075, 0.005, 0.005])


def test_noise_on_contexts_has_its_own_numbers_in_the_units_of_the_data():
    rows = Batch(torch.zeros(4000, 1), torch.zeros(4000, 2))
    double = Units(
        "scale", (2,), torch.zeros(2).double(), torch.full((2,), 2.0).double(), torch.full((2,), 0.5).double()
    )
    units = Coordinates(Units.none((1,)), double)
    noisy = Batches(rows, None, seed=0, coordinates=units, given_noise=(1.0, 0.0)).at(3, 0.1)
    assert noisy.given[:, 0].std().item() == pytest.approx(0.2, rel=0.05)
    assert not noisy.given[:, 1].any()
    triple = Units("scale", (1,), *(torch.tensor([v]).double() for v in (0.0, 3.0, 1 / 3)))
    events = Batches(rows, None, seed=0, coordinates=Coordinates(triple)).at(3, 0.1).x
    assert events.std().item() == pytest.approx(0.3, rel=0.05)
    alone = Batches(rows, None, seed=0).at(3, 0.1)
    assert torch.equal(alone.x, noisy.x), "noise on contexts leaves that on events as it was"
    assert abs(torch.corrcoef(torch.stack([noisy.x[:, 0], noisy.given[:, 0]]))[0, 1]) < 0.06


@pytest.mark.parametrize(
    ("share", "words"), [((1.0, 1.0, 1.0), "each of the 2"), (1.0, "which these have not")]
)
def test_noise_that_fits_no_context_is_refused(share, words):
    rows = Batch(torch.zeros(5, 1), torch.zeros(5, 2)) if share != 1.0 else torch.zeros(5, 1)
    with pytest.raises(ConfigError, match=words):
        Batches(rows, None, seed=0, given_noise=share)


# --- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observations", "actions", "ends", "words"),
    [
        (np.zeros(4), np.zeros(5), [5], r"observations.state: must be one for each of the 5 actions, got 4"),
        (np.array([0, np.nan, 0]), np.zeros(3), [3], r"observations.state: .*row 1"),
        (np.zeros(3), np.array([0, 0, np.inf]), [3], r"actions: .*row 2"),
        (
            np.zeros(3),
            np.zeros(3),
            [2],
            r"ends: must be one past the last step .* 3 steps there are, got \[2\]",
        ),
        (np.zeros(3), np.zeros(3), [2, 2, 3], r"ends: must be"),
        (np.zeros(3), np.zeros(3), [], r"ends: must be"),
        (
            np.zeros(3),
            np.array([0, 1e39, -1e39]),
            [3],
            r"actions: must be at most 3.4e\+38, in other units, got 1e\+39",
        ),
        ({}, np.zeros(3), [3], r"observations: must be at least one array"),
        (
            np.array(["a", "b", "c"]),
            np.zeros(3),
            [3],
            r"observations.state: must hold numbers, got dtype <U1",
        ),
        (None, np.zeros(3), [3], r"observations.state: must be one for each of the 3 actions, got None"),
        ({"action": np.zeros(3)}, np.zeros(3), [3], r"observations: must be named anything but 'action'"),
        (
            {1: np.zeros(3), "a": np.zeros(3)},
            np.zeros(3),
            [3],
            r"observations: must be named by text, got \[1",
        ),
        (np.zeros(3) * 1j, np.zeros(3), [3], r"observations.state: must hold numbers, got dtype complex128"),
        (
            {"camera": np.zeros((3, 8, 9, 3), np.uint8)},
            np.zeros(3),
            [3],
            r"camera: pictures must be \(T, C, H, W\), got \(3, 8, 9, 3\), whose channels are last",
        ),
        (
            {"camera": np.zeros((3, 3, 0, 8), np.uint8)},
            np.zeros(3),
            [3],
            r"camera: must have at least one number in a row, got shape \(3, 3, 0, 8\)",
        ),
        ([[0.0], [1.0, 2.0], [3.0]], np.zeros(3), [3], r"state: must be rows of equal length"),
        (
            [torch.ones(2, requires_grad=True)] * 3,
            np.zeros(3),
            [3],
            r"state: must be .* no list of tensors: .*grad",
        ),
        (
            np.zeros(3),
            [torch.ones(2).to_sparse()] * 3,
            [3],
            r"actions: must be .* no list of tensors: .*Sparse",
        ),
        (np.ma.masked_less(np.arange(3.0), 1), np.zeros(3), [3], r"state: must have no masked values"),
        (np.zeros(3), np.ma.masked_less(np.arange(3.0), 1), [3], r"actions: must have no masked values"),
        (
            {"camera": np.ma.masked_less(np.arange(192, dtype=np.uint8).reshape(3, 1, 8, 8), 1)},
            np.zeros(3),
            [3],
            r"camera: must have no masked values",
        ),
    ],
)
def test_bad_demonstrations_are_named(observations, actions, ends, words):
    with pytest.raises(InputError, match=words):
        Demonstrations.of(observations, actions, ends, "mine")


def test_a_context_that_lacks_a_name_or_has_another_shape_is_named():
    scaling = Scaling.fit(counted(3))
    with pytest.raises(InputError, match="must have state"):
        scaling.pack({"picture": torch.zeros(1, 2, 1)})
    with pytest.raises(InputError, match=r"observation.state: must have shape \(1,\)"):
        scaling.pack({"state": torch.zeros(1, 2, 3)})
    with pytest.raises(InputError, match=r"observation.state: must be finite, got 1 NaN or infinite of 4"):
        scaling.pack({"state": torch.tensor([[[0.0], [1.0]], [[float("nan")], [1.0]]])})
    with pytest.raises(InputError, match=r"observation.state: must be real numbers, got torch.complex64"):
        scaling.pack({"state": torch.zeros(1, 2, 1, dtype=torch.complex64)})


@pytest.mark.parametrize("camera", [False, True])
def test_rows_by_the_scaling_of_other_demonstrations_are_refused_by_name(camera):
    x, pictures = np.arange(12.0).reshape(6, 2), np.zeros((6, 1, 4, 6), np.uint8)
    seen = {"camera": pictures} if camera else {}
    windows = Demonstrations.of({"pen": x} | seen, x).windows(2, 1)
    other = Demonstrations.of({"pen": x, "goal": x} | seen, x, relative="goal")
    with pytest.raises(InputError, match="observation: must have pen, goal"):
        windows.dataset(Scaling.fit(other))
    if camera:
        small = Demonstrations.of({"pen": x, "camera": pictures[..., :4]}, x)
        with pytest.raises(InputError, match=r"camera: must have shape \(1, 4, 4\).*got \(1, 4, 6\)"):
            windows.dataset(Scaling.fit(small))


def test_coordinates_far_from_zero_keep_their_millimetres():
    place = 4_500_000 + np.linspace(0, 1, 11)[:, None]  # in metres, as a map has them; float32 knows halves
    scaling = Scaling.fit(Demonstrations.of(place, place + 0.01, [11]))
    expected = torch.linspace(-1, 1, 11)
    for again in (scaling, Scaling.from_json(json.loads(json.dumps(scaling.as_json())))):
        packed = again.pack({"state": torch.from_numpy(place)[:, None]})
        torch.testing.assert_close(packed[:, 0], expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(
            again.to_actions(packed), torch.from_numpy(place + 0.01), atol=1e-6, rtol=0
        )
    for same in (place[:, None].tolist(), place[:, None].astype(">f8")):  # as remote environments send them
        assert torch.equal(scaling.pack({"state": same})[:, 0], packed[:, 0])
    assert "wide" not in Scaling.fit(counted(3)).as_json()


@pytest.mark.parametrize("unit", [1e-60, 1e-41, 1e-36])
def test_numbers_too_small_for_single_precision_are_not_taken_for_zero(unit):
    x = np.random.default_rng(0).normal(size=(40, 2))
    shown, same = (Demonstrations.of(u * x, u * x[:, 1]) for u in (unit, 1.0))
    rows, expected = (d.windows(2, 3).dataset() for d in (shown, same))
    torch.testing.assert_close(rows.x, expected.x, atol=1e-4, rtol=0)
    torch.testing.assert_close(rows.given, expected.given, atol=1e-4, rtol=0)
    back = Scaling.fit(shown).to_actions(shown.windows(1, 1).dataset().x[:, None])
    torch.testing.assert_close(back[:, 0] / unit, torch.from_numpy(x[:, 1:]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("relative", ["", "place"])
def test_actions_that_are_where_one_stands_keep_their_digits(relative):
    """Of the difference alone, which is nothing, no digit is lost."""
    place = 1e7 + np.random.default_rng(0).normal(size=(40, 1)).cumsum(0)
    shown = Demonstrations.of({"place": place}, place, relative=relative)
    assert np.array_equal(shown.observations["place"].numpy(), place)
    assert np.array_equal(shown.actions.numpy(), place)


def test_what_each_episode_holds_still_keeps_its_digits(tmp_path):
    rows = [{"goal": np.full(4, 1e7 + 0.15 * k), "near": np.full(4, 0.1 * k)} for k in range(5)]
    for k, row in enumerate(rows):
        np.savez(tmp_path / f"{k}.npz", **row, actions=np.arange(4.0))
    parts = [Demonstrations.of(row, np.arange(4.0), wide=True) for row in rows]
    for found in (load_episodes(tmp_path), Demonstrations.joined(parts)):
        goal = found.observations["goal"].flatten()
        assert np.array_equal(goal.numpy(), np.concatenate([row["goal"] for row in rows]))
        assert {x.dtype for x in (found.observations["near"], found.actions)} == {torch.float32}
    for part in (found.some([3]), parts[3]):  # digits that its own numbers do not show
        again = load_episodes(save_episodes(tmp_path / "part" / "3.npz", part))
        assert again.observations["goal"].tolist() == [[1e7 + 0.15 * 3]] * 4
        assert all(torch.equal(part.observations[key], x) for key, x in again.observations.items())
        assert [part.observations[key].dtype for key in again.observations] == [
            x.dtype for x in again.observations.values()
        ]


def test_places_far_from_zero_in_the_space_of_the_actions_are_a_warning():
    place = np.random.default_rng(0).uniform(-2, 2, size=(40, 2))
    far = Demonstrations.of({"place": 1000 + place}, 1000 + place, name="mine", space="place")
    with pytest.warns(
        UserWarning, match=r"mine: space: actions have a spread of 0\.001\d* .*origin .*from place"
    ):
        Scaling.fit(far)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Scaling.fit(Demonstrations.of({"place": place}, place, space="place"))
        Scaling.fit(Demonstrations.of({"place": place}, np.ones(40), space="place"))


def of_one_column(kind: str) -> np.ndarray:
    rng, n = np.random.default_rng(0), 2000
    return {
        "plain": lambda: rng.uniform(-1, 1, n),
        "heavy tails": lambda: rng.standard_t(2, n),
        "lognormal": lambda: rng.lognormal(0, 2, n),
        "a rare one": lambda: 1.0 * (np.arange(n) % 200 == 0),
        "a rare one, measured": lambda: (np.arange(n) % 200 == 0) + 1e-4 * rng.normal(size=n),
        "constant": lambda: np.full(n, 0.3),
        "rounding": lambda: 0.3 + 1e-8 * rng.normal(size=n) + (np.arange(n) == 7),
        "not seen, often": lambda: np.where(np.arange(n) % 20 == 0, -9999, rng.normal(size=n)),
        "dead zone": lambda: np.where(rng.random(n) < 0.8, 0, rng.normal(size=n)),
        "choices": lambda: 1.0 * (rng.integers(0, 7, n) == 0),
        "two rows": lambda: np.array([0.0, 1e6]),
        "one row": lambda: np.array([1e6]),
    }[kind]()


def warnings_of(shown: Demonstrations) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Scaling.fit(shown, 4)
    return [str(each.message) for each in found]


@pytest.mark.parametrize("glitch", [1e3, 1e6, -9999.0])
@pytest.mark.parametrize("kind", ["plain", "dead zone"])
def test_one_glitch_that_leaves_nothing_to_learn_is_a_warning(kind, glitch):
    """A policy's error was some 200 times that without it, and nothing was said."""
    column, action = of_one_column(kind), np.stack(2 * [of_one_column("plain")], 1)
    seen = np.stack([of_one_column("plain"), column], 1)
    seen[777, 1] = glitch
    (said,) = warnings_of(Demonstrations.of({"arm": seen}, action, name="mine"))
    told = f"mine: observations.arm: column 1: row 777 is {glitch:.6g}, where nearly all lie from -"
    assert said.startswith(told), said
    action[[5, 9]] = glitch
    (said,) = warnings_of(Demonstrations.of({"arm": seen[:, :1]}, action))
    assert "actions: column 0 (the first of 2 such): row 5 is" in said
    assert "(and 1 more so far off)" in said


@pytest.mark.parametrize("where", ["action", "place"])
def test_a_glitch_of_what_is_counted_from_an_observation_is_told_by_its_row(where):
    place = np.random.default_rng(0).normal(size=(2000, 2)).cumsum(0)
    found = {"action": place + 0.1 + 0.01 * place, "place": place}
    assert not warnings_of(Demonstrations.of(found["place"], found["action"], relative="state"))
    found[where][777, 1] = 1e6
    told = warnings_of(Demonstrations.of(found["place"], found["action"], relative="state"))
    assert re.search(r"actions: column 1: row 777 is -?\S+ from state, where", told[-1])
    assert len(told) == (2 if where == "place" else 1)


@pytest.mark.parametrize(
    "kind",
    [
        *("plain", "heavy tails", "lognormal", "a rare one", "a rare one, measured", "constant", "rounding"),
        *("not seen, often", "dead zone", "choices", "two rows", "one row"),
    ],
)
def test_what_is_rare_or_far_without_being_a_glitch_is_no_warning(kind):
    column = of_one_column(kind)
    assert not warnings_of(Demonstrations.of(column, column))


class Choosing:
    """An environment whose goal is one of three, a number of no dimensions, seen together with a place."""

    action_space = SimpleNamespace(low=np.full(1, -9.0), high=np.full(1, 9.0))

    def reset(self, seed: int):
        return {"goal": np.int64(seed % 3), "place": np.array([0.5])}, {}

    def step(self, action: np.ndarray):
        return {"goal": 2, "place": action}, 1.0, False, False, {}


def test_an_observation_of_one_number_needs_no_dimension_of_its_own():
    goal, place = np.arange(40) % 3, np.linspace(0, 1, 40)
    shown = Demonstrations.of({"goal": goal, "place": place}, place, [20, 40])
    policy = fit_policy(shown, "flow", "density", PolicyConfig(2, 4, 2), steps=5)
    for rows in (np.array([0, 1, 2]), np.array([0])):
        answers = []
        for each in (
            {"goal": rows, "place": 0.1 * rows},
            {"goal": rows[:, None], "place": 0.1 * rows[:, None]},
        ):
            policy.reset()
            answers.append(policy.select_action(each))
        assert torch.equal(*answers)
        policy.reset()
        window = {"goal": np.stack([rows, rows], 1), "place": 0.1 * np.stack([rows, rows], 1)}
        assert torch.equal(policy.predict_action_chunk(window)[:, 0], answers[0])
    found = rollout(policy, lambda starts: Environments(Choosing, starts, "choosing"), [0, 1], steps=3)
    assert found.progress[..., -1].flatten().tolist() == [3, 3]
    alone = fit_policy(Demonstrations.of(goal, place), "flow", "density", PolicyConfig(1, 2, 1), steps=1)
    assert alone.select_action(np.array([1, 2])).shape == (2, 1)
    with pytest.raises(InputError, match=r"goal: must have shape \(1,\)"):
        policy.acting().select_action({"goal": np.zeros((3, 2)), "place": np.zeros(3)})


# --- files --------------------------------------------------------------------------------------------


def test_an_npz_file(tmp_path):
    file = tmp_path / "mine.npz"
    np.savez(file, action=np.arange(6.0), episode_ends=[2, 6], pose=np.ones((6, 3)), force=np.zeros(6))
    found = load_episodes(file)
    assert list(found.observations) == ["pose", "force"]
    assert found.lengths.tolist() == [2, 4]
    assert list(load_episodes(file, ["force"]).observations) == ["force"]
    with pytest.raises(InputError, match="did you mean 'pose'"):
        load_episodes(file, ["posse"])
    np.savez(file, actions=np.arange(6.0))
    with pytest.raises(InputError, match="must hold an array 'episode_ends'"):
        load_episodes(file)
    np.savez(file, actions=np.arange(6.0), episode_ends=[6], pose=np.array([None] * 6))
    with pytest.raises(InputError, match=r"mine\.npz: pose: is not a readable array"):
        load_episodes(file)
    for held in (b"", b"no arrays", file.read_bytes()[:200]):
        file.write_bytes(held)
        with pytest.raises(
            InputError, match=r"mine\.npz: is not a readable \.npz file: it is of another kind"
        ):
            load_episodes(file)


def test_what_is_no_array_is_refused_in_one_line():
    with pytest.raises(InputError, match=r"observations\.arm: must be one for each of the 4") as refused:
        Demonstrations.of({"arm": [{"pose": np.ones((4, 2))}]}, np.ones(4))
    assert "\n" not in str(refused.value)


def test_a_scaling_that_is_not_finite_is_refused():
    kept = Scaling.fit(Demonstrations.of(np.arange(4.0), np.arange(4.0))).as_json()
    with pytest.raises(ConfigError, match="scaling: must be finite numbers"):
        Scaling.from_json(kept | {"half": {**kept["half"], "state": [math.nan]}})


def test_what_demonstrations_say_of_themselves_is_kept_in_their_file(tmp_path):
    rng = np.random.default_rng(0)
    seen = {"tool": 1e6 + rng.normal(size=(6, 2)), "goal": rng.normal(size=(6, 2)), "force": np.arange(6.0)}
    pictures = {"view": np.arange(6 * 48, dtype=np.uint8).reshape(6, 3, 4, 4)}
    kinds = {"noisy": ("tool",), "space": ("tool", "goal"), "relative": "tool"}
    shown = Demonstrations.of(seen | pictures, seen["tool"] + seen["goal"], [2, 6], **kinds)
    file = save_episodes(tmp_path / "mine.npz", shown)
    found = load_episodes(file)
    assert {key: vars(found)[key] for key in kinds} == kinds
    assert found.digest() == shown.digest()
    for key, value in shown.observations.items():
        assert torch.equal(found.observations[key], value)
    assert torch.equal(found.actions, shown.actions)
    assert found.actions.dtype == torch.float64, "a difference keeps its digits"
    part = load_episodes(file, ["goal", "force"])
    assert (part.noisy, part.space, part.relative) == ((), ("goal",), "")
    none = Demonstrations.of(seen, seen["goal"], noisy=())
    assert load_episodes(save_episodes(tmp_path / "none.npz", none)).noisy == ()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["mine.npz", "none.npz"]


def test_names_of_observations_come_as_one_text_or_as_an_array():
    seen = {"tool": np.arange(3.0), "goal": np.arange(3.0)}
    found = Demonstrations.of(seen, np.arange(3.0), noisy="tool", space=np.array(["goal", "tool"]))
    assert (found.noisy, found.space) == (("tool",), ("goal", "tool"))
    assert Demonstrations.of(seen, np.arange(3.0), noisy=np.array(["goal", "tool"])).noisy == ("goal", "tool")


def test_an_observation_may_be_called_as_what_is_said_of_others(tmp_path):
    file, x = tmp_path / "mine.npz", np.arange(4.0)
    np.savez(file, space=x, tool=x, actions=x, ends=[4], relative="tool", noisy=["tool"])
    found = load_episodes(file)
    assert list(found.observations) == ["space", "tool"]
    assert (found.noisy, found.space, found.relative) == (("tool",), (), "tool")
    with pytest.raises(
        ConfigError, match=r"observations: must be named, as nothing else in the file is, .*got \['space'\]"
    ):
        save_episodes(file, found)
    for names, words in {
        "tol": r"relative: must be of its observations, tool, far, got \['tol'\]",
        "actions": "relative: must be of its observations",
        ("tool", "far"): "relative: must be one name",
    }.items():
        np.savez(file, tool=x, far=x, actions=x, ends=[4], relative=names)
        with pytest.raises(InputError, match=words):
            load_episodes(file)
    np.savez(file, tool=x, actions=x, ends=[4], noisy=[])
    assert load_episodes(file).noisy == ()
    np.savez(file, tool=x, actions=x, ends=[4], noisy=np.array([b"tool"]))
    with pytest.raises(ConfigError, match=r"mine\.npz: noisy: must be text, not bytes, got"):
        load_episodes(file)
    np.savez(file, tool=x, actions=x, ends=[4])
    found = load_episodes(file)
    assert found.noisy == ("tool",), "as files without them always were"
    with pytest.raises(ConfigError, match=r"path: must be a file that ends with \.npz, got .*mine'"):
        save_episodes(tmp_path / "mine", found)
    assert save_episodes(tmp_path / "new" / "mine.npz", found).is_file()
    for odd in ("x.npy", "a\0b", "actions", "ends"):
        with pytest.raises(ConfigError, match=r"observations: must be named, .*, got \["):
            save_episodes(file, Demonstrations.of({odd: x}, x))


def test_a_folder_of_episodes(tmp_path):
    rows = {"pose": np.arange(6.0).reshape(3, 2), "actions": np.arange(3.0)}
    np.savez(tmp_path / "a.npz", **rows)
    np.savez(tmp_path / "b.npz", **{k: np.concatenate([v, 10 + v]) for k, v in rows.items()}, ends=[2, 6])
    found = load_episodes(tmp_path)
    assert found.lengths.tolist() == [3, 2, 4]
    assert found.actions.flatten().tolist() == [0, 1, 2, 0, 1, 2, 10, 11, 12]
    assert found.observations["pose"][6].tolist() == [10, 11]
    assert repr(found).endswith("3 episodes, 9 steps, pose (2,), action (1,))")
    np.savez(tmp_path / "c.npz", pose=np.ones((3, 5)), actions=np.arange(3.0))
    with pytest.raises(InputError, match=r"c\.npz: must be of the shapes of a\.npz, .*got {'pose': \(5,\)"):
        load_episodes(tmp_path)
    np.savez(tmp_path / "c.npz", pose=np.ones((4, 2)), actions=np.arange(3.0))
    with pytest.raises(InputError, match=r"c\.npz: observations\.pose: .* leave out the last of an episode"):
        load_episodes(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match=r"holds no \.npz file"):
        load_episodes(tmp_path / "none")


def test_push_t_sees_corners_that_do_not_jump_at_a_full_turn(tmp_path):
    states = np.array([[10, 20, 256, 256, 2 * math.pi - 1e-4], [10, 20, 256, 256, 1e-4]])
    np.savez(tmp_path / "pusht.npz", action=np.zeros((2, 2)), state=states, episode_ends=[2])
    found = load_pusht(tmp_path)
    assert found.noisy == ("agent",)
    before, after = found.observations["block"]
    assert (before - after).abs().max() < 0.05
    side = pusht_corners(torch.tensor([0.0, 0.0, 1.2]))
    assert torch.linalg.norm(side[0] - side[1]).item() == pytest.approx(120)
    assert torch.linalg.norm(side[4] - side[5]).item() == pytest.approx(90)
    whole = torch.tensor([[10, 20, 256, 256, 1]])
    assert torch.equal(pusht_observation(whole)["block"], pusht_observation(whole.float())["block"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.astype(str), r"must hold numbers, got dtype <U"),
        (lambda x: x[:, :4], r"must be agent x, y and block x, y, angle, \(T, 5\), got \(4, 4\)"),
        (lambda x: np.where(np.arange(5) == 4, np.nan, x), r"must be finite, got 4 NaN .* row 0, column 4"),
    ],
)
def test_states_of_push_t_are_looked_at_before_anything_is_drawn(tmp_path, change, words):
    states, file = np.full((4, 5), 100), tmp_path / "pusht.npz"
    np.savez(file, action=np.zeros((4, 2)), state=states, episode_ends=[4])
    drawn = load_pusht(file, lambda x: np.zeros((len(x), 3, 8, 8), np.uint8)).observations
    assert drawn["agent"].dtype == torch.float32
    np.savez(file, action=np.zeros((4, 2)), state=change(states), episode_ends=[4])
    with pytest.raises(InputError, match=r"pusht\.npz: state: " + words):
        load_pusht(file, lambda _: pytest.fail("was drawn"))
    for check in (pusht_states, pusht_pictures):
        with pytest.raises(InputError, match="states: " + words):
            check(change(states))


@pytest.mark.skipif("METASTABLE_PUSHT" not in os.environ, reason="METASTABLE_PUSHT names no demonstrations")
def test_the_published_demonstrations():
    found = load_pusht(os.environ["METASTABLE_PUSHT"])
    assert (len(found), len(found.actions)) == (206, 25_650)
    assert (int(found.lengths.min()), int(found.lengths.max())) == (49, 246)
    for shown in (found, load_pusht(os.environ["METASTABLE_PUSHT"], centred=False)):
        assert not warnings_of(shown)


def test_lasa_motions_say_the_next_position(tmp_path):
    from scipy.io import savemat

    pos = np.arange(14.0).reshape(2, 7)
    demo = np.empty(2, dtype=object)
    demo[:] = [{"pos": pos}, {"pos": pos + 100}]
    savemat(tmp_path / "Angle.mat", {"demos": demo, "dt": 0.1})
    found = load_lasa("Angle", tmp_path, every=2)
    assert found.observations["state"].tolist()[:3] == [[0, 7], [2, 9], [4, 11]]
    assert found.actions.tolist()[:3] == [[2, 9], [4, 11], [6, 13]]
    assert found.ends.tolist() == [3, 6]
    with pytest.raises(InputError, match="did you mean 'Angle'"):
        load_lasa("Angel", tmp_path)
    with pytest.raises(ConfigError, match="every: must be below the 7 points of a motion, got 7"):
        load_lasa("Angle", tmp_path, every=7)
    whole = (tmp_path / "Angle.mat").read_bytes()
    for part in (0, 60, 200, len(whole) - 40):
        (tmp_path / "Angle.mat").write_bytes(whole[:part])
        with pytest.raises(InputError, match=r"Angle\.mat: is not a LASA motion") as refused:
            load_lasa("Angle", tmp_path)
        assert "\n" not in str(refused.value)
    for odd in (np.zeros((3, 7)), np.zeros(3)):
        demo[:] = [{"pos": pos}, {"pos": odd}]
        savemat(tmp_path / "Angle.mat", {"demos": demo})
        with pytest.raises(
            InputError, match=r"Angle\.mat: demos: must be motions with pos \(2, T\) each, got \[\(3"
        ):
            load_lasa("Angle", tmp_path)


def lerobot(folder: Path, version: str = "v3.0", video: bool = False) -> Path:
    """Two files of one data set, rows out of order across episodes 0 and 1."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="LeRobot data sets are read by pyarrow")
    import pyarrow as pa

    (folder / "meta").mkdir()
    features = {key: {"dtype": "float32"} for key in ("observation.state", "action")}
    features |= {"observation.images.top": {"dtype": "video"}} if video else {}
    (folder / "meta" / "info.json").write_text(
        json.dumps({"codebase_version": version, "features": features})
    )
    (folder / "data" / "chunk-000").mkdir(parents=True)
    for name, steps in (("file-000", [1, 0, 2]), ("file-001", [3, 4])):
        columns = {
            "observation.state": [[float(i), 0.0] for i in steps],
            "action": [[float(i)] for i in steps],
            "episode_index": [0 if i < 2 else 1 for i in steps],
            "index": steps,
        }
        parquet.write_table(pa.table(columns), folder / "data" / "chunk-000" / f"{name}.parquet")
    return folder


def test_a_lerobot_folder(tmp_path):
    said = r"left out: images\.top \(video, which is not read\); decode .*; observations=\['state'\] takes the rest"
    with pytest.warns(UserWarning, match=said):
        found = load_lerobot(lerobot(tmp_path, video=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what was asked for is all there
        for name in ("state", "observation.state", ["observation.state", "state"]):
            assert list(load_lerobot(tmp_path, name).observations) == ["state"]
    assert list(found.observations) == ["state"]
    assert found.actions.flatten().tolist() == [0, 1, 2, 3, 4]
    assert found.ends.tolist() == [2, 5]
    for name in ("images.top", "observation.images.top"):
        with pytest.raises(InputError, match=r"observation\.images\.top is a video, .*; decode its frames"):
            load_lerobot(tmp_path, [name])
    info = tmp_path / "meta" / "info.json"
    held = info.read_text()
    info.write_text(held.replace("observation.state", "state"))
    with pytest.raises(
        InputError, match=r"has no observations but images\.top \(video, which is not read\); "
    ):
        load_lerobot(tmp_path)
    info.write_text(held.replace("observation.images.top", "observation.action").replace("video", "float32"))
    with pytest.raises(
        InputError, match=r"observation\.action has the actions' name; .* observations=\['state'\]"
    ):
        load_lerobot(tmp_path)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        *((mode, "") for mode in ("1", "L", "P", "RGB", "LA", "RGBA")),
        ("I;16", r"must be pictures of 8 bits for each value, of mode 1, L, .*, got 'I;16'"),
        ("CMYK", "must be pictures of 8 bits"),
        ("clear", r"must be opaque pictures, got '1 transparent pixels in one'"),
    ],
)
def test_pictures_of_lerobot_are_of_eight_bits_and_opaque(tmp_path, mode, words):
    parquet = pytest.importorskip("pyarrow.parquet", reason="LeRobot data sets are read by pyarrow")
    import pyarrow as pa

    info, held = lerobot(tmp_path) / "meta" / "info.json", io.BytesIO()
    picture = Image.new("RGBA" if mode == "clear" else mode, (8, 8), 0 if mode == "I;16" else "black")
    if mode == "clear":
        picture.putpixel((0, 0), (9, 9, 9, 0))
    picture.save(held, "tiff" if mode == "CMYK" else "png")
    said = json.loads(info.read_text())
    said["features"]["observation.depth"] = {"dtype": "image"}
    info.write_text(json.dumps(said))
    for path in sorted((tmp_path / "data" / "chunk-000").iterdir()):
        table = parquet.read_table(path)
        column = pa.array([{"bytes": held.getvalue(), "path": None}] * len(table))
        parquet.write_table(table.append_column("observation.depth", column), path)
    if words:
        with pytest.raises(InputError, match=r"observation\.depth: row 0: " + words):
            load_lerobot(tmp_path)
        return
    assert load_lerobot(tmp_path).observations["depth"].unique().tolist() == [0]


@pytest.mark.parametrize("feature", [{"shape": [2]}, 3, {"dtype": None}])
def test_a_feature_of_lerobot_without_its_kind_is_named(tmp_path, feature):
    features = {"action": {"dtype": "float32"}, "observation.state": feature}
    (tmp_path / "meta").mkdir()
    said = {"codebase_version": "v3.0", "features": features}
    (tmp_path / "meta" / "info.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=r"features.observation.state: must be a table with a dtype, got"):
        load_lerobot(tmp_path)


def test_another_layout_of_lerobot_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no meta/info.json"):
        load_lerobot(tmp_path)
    with pytest.raises(InputError, match=r"codebase_version: must be v3.…, got v2.1"):
        load_lerobot(lerobot(tmp_path, "v2.1"))


def test_rows_of_demonstrations_train():
    data = counted(6, 6, 6).windows(2, 2).dataset()
    options = {"data_noise": 0.01, "data_noise_final": 0.005, "data_noise_over": 0.5, "given_noise": 1.0}
    run = ms.fit("flow", data, "density", steps=3, evaluate=False, held_out=0.3, **options)
    assert run.config["context_shape"] == [2]
    assert run.config["trainer"]["given_noise"] == 1.0


def test_a_number_that_never_changed_says_nothing_later():
    scaling = Scaling.fit(Demonstrations.of(np.stack([np.full(4, 7.0), np.arange(4.0)], 1), np.arange(4.0)))
    for kept in (scaling, Scaling.from_json(json.loads(json.dumps(scaling.as_json())))):
        assert kept.pack({"state": torch.tensor([[[7.001, 0.0]], [[1e6, 3.0]]])}).tolist() == [
            [0, -1],
            [0, 1],
        ]
        assert kept.noise_mask(2) == (0.0, 1.0, 0.0, 1.0)


@pytest.mark.parametrize("unit", [1.0, 1000.0, 0.001])
@pytest.mark.parametrize("kind", ["float64", "float32", "float32 held in float64"])
def test_a_number_that_changes_by_rounding_alone_says_nothing_later(kind, unit):
    """A height that is reckoned, as that of a joint from its angles."""
    rng = np.random.default_rng(0)
    angle, along = rng.uniform(0, 6, 400).astype(kind[:7]), rng.normal(size=400)
    height = (0.7 * np.cos(angle) ** 2 + 0.7 * np.sin(angle) ** 2).astype(kind[:7])
    assert len(np.unique(height)) > 1
    height = unit * height.astype("float64" if "held" in kind else height.dtype)
    height = height if kind == "float64" else height.astype("float32").astype(height.dtype)
    place = np.stack([height, unit * along], 1)
    scaling = Scaling.fit(Demonstrations.of({"pen": place}, place))
    seen = scaling.pack({"pen": torch.tensor([[[0.7 * unit, 0.0]], [[0.7001 * unit, 0.0]]])})
    assert torch.equal(seen[0], seen[1])
    assert scaling.scale_actions(torch.from_numpy(place))[:, 0].abs().max() < 0.5
    # chunks that are counted from it do not leave it where it moves later
    held = Scaling.fit(Demonstrations.of({"pen": place}, place, relative="pen"), 4)
    later = held.recounted(
        torch.zeros(1, 4, 2), torch.tensor([[0.7, 0.0]]) * unit, {"pen": torch.tensor([[[0.8, 0.0]]]) * unit}
    )
    assert later[0, :, 0].tolist() == [0.0] * 4


@pytest.mark.parametrize("unit", [1.0, 1000.0, 0.001])
@pytest.mark.parametrize("reckoned", [True, False])
def test_chunks_counted_from_what_has_fewer_digits_are_no_rounding(reckoned, unit):
    """Actions in double precision, counted from a height that was measured in single precision."""
    rng = np.random.default_rng(0)
    angle, along = rng.uniform(0, 6, 400), unit * rng.normal(size=400)
    ones = [np.cos(x) ** 2 + np.sin(x) ** 2 for x in (angle.astype("float32"), angle)]
    place = np.stack([along.astype("float32"), np.float32(0.7 * unit) * ones[0]], 1)
    action = np.stack([along, 0.7 * unit * (ones[1] if reckoned else np.ones(400))], 1)
    assert len(np.unique(place[:, 1])) > 1
    shown = Demonstrations.of({"pen": place}, action, relative="pen")
    scaling = Scaling.fit(shown, 4)
    later = scaling.recounted(
        torch.zeros(1, 4, 2), torch.tensor([[0.7, 0.0]]) * unit, {"pen": torch.tensor([[[0.8, 0.1]]]) * unit}
    )
    assert later[0, :, 1].tolist() == [0.0] * 4
    assert not shown.windows(1, 4).dataset(scaling).x.view(-1, 4, 2)[..., 1].any()


@pytest.mark.parametrize("unit", [1.0, 1000.0, 0.001])
def test_what_chunks_hold_still_is_zero_in_every_unit(unit):
    """Heights of where one stands and of where one goes, each rounded by itself."""
    rng = np.random.default_rng(0)
    angle, along = rng.uniform(0, 6, (400, 2)).astype("float32"), unit * rng.normal(size=400)
    height = np.float32(0.7 * unit) * (np.cos(angle) ** 2 + np.sin(angle) ** 2)
    place, action = (np.stack([along, x], 1).astype("float32") for x in height.T)
    shown = Demonstrations.of({"pen": place}, action, relative="pen")
    assert not shown.windows(1, 4).dataset().x.view(-1, 4, 2)[..., 1].any()
    scaling, windows = Scaling.fit(shown, 4), shown.windows(1, 4)
    back = scaling.to_actions(windows.dataset(scaling).x.view(-1, 4, 2), windows.contexts())
    torch.testing.assert_close(back, windows.chunks().to(back.dtype), rtol=1e-6, atol=1e-6 * unit)


def test_counts_are_exact_and_few_of_many_are_no_rounding():
    ticks = 16e6 + np.arange(40) % 5
    scaling = Scaling.fit(Demonstrations.of(ticks, ticks + np.arange(40) % 3, relative="state"), 2)
    assert {key: float(half) for key, half in scaling.half.items()} == {"state": 2.0, "action": 3.5}


def test_episodes_are_chosen_by_a_mask_or_by_number():
    all_of_them = counted(2, 3, 4)
    for chosen in ([2, 0], torch.tensor([2, 0]), [-1, 0]):
        assert all_of_them.some(chosen).ends.tolist() == [4, 6]
    masked, numbered = all_of_them.some(torch.tensor([True, False, True])), all_of_them.some([0, 2])
    assert torch.equal(masked.actions, numbered.actions)
    assert masked.ends.tolist() == numbered.ends.tolist() == [2, 6]
    for bad in ([], [3], [-4], 1, [[0, 1]], [False] * 3):
        with pytest.raises(InputError, match="episodes: must be one or more from -3 to 2, in a list"):
            all_of_them.some(bad)
    for bad in ([0.5], ["a"], [[0], [1, 2]], [None]):
        with pytest.raises(InputError, match=r"episodes: must be (integers|one integer)"):
            all_of_them.some(bad)
    for bad in ([True, False], np.ones(4, bool), torch.ones(3, 1, dtype=torch.bool)):
        with pytest.raises(InputError, match="episodes: must be a mask of all 3 of them, got"):
            all_of_them.some(bad)


def test_pictures_as_bytes_and_as_numbers_do_not_join():
    """Bytes from 0 to 255 beside numbers from 0 to 1 became numbers of one range."""
    camera, x = np.zeros((3, 1, 8, 8), np.uint8), np.arange(3.0)
    parts = [
        Demonstrations.of({"camera": c, "pen": x}, x, name=n, noisy="pen")
        for n, c in (("a", camera), ("b", camera / 255))
    ]
    for order, rule in ((parts, "pictures as bytes, as in a"), (parts[::-1], "numbers, as in b")):
        with pytest.raises(InputError, match=rf"{order[1].name}: camera: must be {rule}, got torch\."):
            Demonstrations.joined(order)


def test_arrays_in_another_order_join():
    first = Demonstrations.of({"a": np.arange(3.0), "b": np.ones(3)}, np.arange(3.0))
    second = Demonstrations.of({"b": np.ones(3), "a": np.arange(3.0)}, np.arange(3.0))
    both = Demonstrations.joined([first, second])
    assert both.observations["a"].flatten().tolist() == [0, 1, 2] * 2


@pytest.mark.parametrize("change", [lambda x: x.astype(int) * 10 - 5, lambda x: x > 100])
def test_pictures_of_other_numbers_than_bytes_are_looked_at(change):
    pictures = np.random.default_rng(0).integers(0, 256, (4, 3, 5, 5), dtype=np.uint8)
    scaling = Scaling.fit(Demonstrations.of({"top": pictures[:, ::-1]}, np.arange(4.0)))
    backwards = scaling.pack({"top": pictures[:, None, ::-1]})
    assert torch.equal(backwards, scaling.pack({"top": pictures[:, None, ::-1].copy()}))
    with pytest.raises(InputError, match=r"observation\.top: must be bytes, or numbers from 0 to 255"):
        scaling.pack({"top": change(pictures)[:, None]})


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("index", [0, 1, 0], "index: must be another in every row"),
        ("index", ["0", "1", "2"], "index: must be a whole number"),
        ("episode_index", [0, None, 1], "episode_index: must be a whole number"),
        ("episode_index", [0, 1, 0], "episode_index: must be one stretch"),
    ],
)
def test_rows_of_lerobot_whose_order_is_unclear_are_refused(tmp_path, column, values, words):
    parquet = pytest.importorskip("pyarrow.parquet", reason="LeRobot data sets are read by pyarrow")
    import pyarrow as pa

    path = lerobot(tmp_path) / "data" / "chunk-000"
    (path / "file-001.parquet").unlink()
    columns = parquet.read_table(path / "file-000.parquet").to_pydict() | {"index": [0, 1, 2], column: values}
    parquet.write_table(pa.table(columns), path / "file-000.parquet")
    with pytest.raises(InputError, match=words):
        load_lerobot(tmp_path)


def test_steps_of_lerobot_that_are_missing_are_named(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="LeRobot data sets are read by pyarrow")
    info = lerobot(tmp_path) / "meta" / "info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"total_frames": 5}))
    assert len(load_lerobot(tmp_path).actions) == 5
    file = tmp_path / "data" / "chunk-000" / "file-001.parquet"
    rows = parquet.read_table(file)
    file.unlink()
    with pytest.raises(
        InputError, match=r"data: must be with all 5 frames that meta/info\.json counts.*got 3"
    ):
        load_lerobot(tmp_path)
    moved = rows.set_column(rows.column_names.index("index"), "index", [[3, 5]])
    parquet.write_table(moved, file)
    with pytest.raises(
        InputError, match=r"index: must be one more in each row of an episode, got \[\[3, 5\]\]"
    ):
        load_lerobot(tmp_path)


def test_numbers_of_lerobot_are_kept_as_fine_as_they_are(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="LeRobot data sets are read by pyarrow")
    import pyarrow as pa

    path = lerobot(tmp_path) / "data" / "chunk-000"
    (path / "file-001.parquet").unlink()
    columns = parquet.read_table(path / "file-000.parquet").to_pydict()
    columns["observation.state"] = [[1.7e9 + i] for i in range(3)]
    parquet.write_table(pa.table(columns), path / "file-000.parquet")
    found = load_lerobot(tmp_path).observations["state"].flatten()
    assert sorted((found - 1.7e9).tolist()) == [0, 1, 2]


@pytest.mark.parametrize("kind", [int, np.uint8, bool, list, torch.tensor])
def test_discrete_choices_are_learned_as_numbers_and_that_is_said(kind, tmp_path):
    rows = np.arange(80) % (2 if kind is bool else 4)
    actions = kind(rows) if kind in (list, torch.tensor) else rows.astype(kind)
    with pytest.warns(
        UserWarning, match=r"actions: .* discrete choices are learned as numbers, .*numpy\.eye"
    ):
        Demonstrations.of(np.zeros(80), actions)
    for k in range(3):
        np.savez(tmp_path / f"{k}.npz", state=np.zeros(80), actions=rows)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        load_episodes(tmp_path)
    assert len(found) == 1


def test_whole_numbers_that_are_amounts_are_no_choices():
    ticks = np.arange(80)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for actions in (ticks, ticks[:5], ticks % 4 * 1.0, ticks * 0, np.eye(4, dtype=int)[ticks % 4]):
            Demonstrations.of(np.zeros(len(actions)), actions)


@pytest.mark.parametrize("padded", ["no", 0, None])
def test_windows_are_padded_or_not(padded):
    with pytest.raises(ConfigError, match="padded: must be true or false, got "):
        counted(6).windows(2, 2, padded=padded)


def test_one_name_of_an_observation_is_no_row_of_letters(tmp_path):
    np.savez(
        tmp_path / "mine.npz", place=np.arange(4.0), goal=np.arange(4.0), actions=np.arange(4.0), ends=[4]
    )
    assert list(load_episodes(tmp_path / "mine.npz", "place").observations) == ["place"]
    (tmp_path / "robot").mkdir()
    assert list(load_lerobot(lerobot(tmp_path / "robot"), "state").observations) == ["state"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda table, held: held[:-9],
            r"file-001\.parquet: is no parquet file, or not a whole one; .* \(Parquet",
        ),
        (lambda table, held: b"", r"file-001\.parquet: is no parquet file, or not a whole one"),
        (
            lambda table, held: table.drop_columns(["observation.state"]),
            r"file-001\.parquet: must be a table that has observation\.state, too, got \['action', 'epis",
        ),
        (lambda table, held: table.drop_columns(["index"]), r"must be a table that has index, too"),
        (
            lambda table, held: [[1.0], []],
            r"action: must be .*: row 4 \(by index\) has \(0,\), and most \(1,\)$",
        ),
        (
            lambda table, held: [[1.0, 2.0], [1.0]],
            r"action: .* row 3 \(by index\) has \(2,\), and most \(1,\)$",
        ),
        (lambda table, held: [None, [1.0]], r"action: .* row 3 \(by index\) has \(\), and most \(1,\)$"),
    ],
)
def test_what_is_wrong_with_a_lerobot_folder_is_one_line_that_names_it(tmp_path, change, words):
    parquet = pytest.importorskip("pyarrow.parquet", reason="LeRobot data sets are read by pyarrow")
    path = lerobot(tmp_path) / "data" / "chunk-000" / "file-001.parquet"
    table = parquet.read_table(path)
    made = change(table, path.read_bytes())
    if isinstance(made, bytes):
        path.write_bytes(made)
    else:
        rows = isinstance(made, list)
        column = table.column_names.index("action")
        parquet.write_table(table.set_column(column, "action", [made]) if rows else made, path)
    with pytest.raises(InputError, match=words) as refused:
        load_lerobot(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("unit", [1.0, 1000.0, 0.001])
def test_what_lies_in_the_space_of_the_actions_keeps_its_distances(unit):
    rng = np.random.default_rng(0)
    seen = {"discs": unit * (3 + rng.normal(size=(20, 6))), "angle": rng.normal(size=20)}
    shown = Demonstrations.of(seen, unit * rng.normal(size=(20, 2)), space=("discs",))
    scaling = Scaling.fit(shown)
    packed = scaling.pack({key: value[:, None] for key, value in shown.observations.items()})[:, :6]
    most = shown.actions.abs().max()
    torch.testing.assert_close(packed, shown.observations["discs"] / most)
    torch.testing.assert_close(scaling.scale_actions(shown.actions), shown.actions / most)
    torch.testing.assert_close(scaling.to_actions(shown.actions / most), shown.actions)
    apart = Scaling.fit(Demonstrations.of(seen, shown.actions))
    assert float(apart.half["angle"]) == float(scaling.half["angle"])  # which lies in no space
    assert shown.some([0]).space == Demonstrations.joined([shown, shown]).space == ("discs",)
    with pytest.raises(
        InputError, match=r"demonstrations: space: must be as in demonstrations, \['discs'\], got"
    ):
        Demonstrations.joined([shown, Demonstrations.of(seen, shown.actions)])
    wider = Demonstrations.of({**seen, "more": shown.actions}, shown.actions)
    with pytest.raises(InputError, match=r"must be of the shapes of demonstrations, .*, got .*'more'"):
        Demonstrations.joined([shown, wider])


def test_a_space_names_observations():
    with pytest.raises(ConfigError, match="space"):
        Demonstrations.of(np.arange(3.0), np.arange(3.0), space=("disks",))


def test_the_digest_knows_other_demonstrations_and_no_last_bits():
    rng = torch.Generator().manual_seed(0)
    seen = {"state": 300 * torch.rand(40, 3, generator=rng), "picture": torch.zeros(40, 2, dtype=torch.uint8)}
    shown = Demonstrations.of(seen, torch.rand(40, 2, generator=rng), [25, 40])
    same = {**seen, "state": torch.nextafter(seen["state"], torch.tensor(1e9))}
    assert Demonstrations.of(same, shown.actions, [25, 40]).digest() == shown.digest()
    moved = seen["state"].clone()
    moved[3, 1] += 20
    others = [
        Demonstrations.of({**seen, "state": moved}, shown.actions, [25, 40]),
        Demonstrations.of({**seen, "state": 1.01 * seen["state"]}, shown.actions, [25, 40]),
        Demonstrations.of({**seen, "picture": seen["picture"] + 1}, shown.actions, [25, 40]),
        Demonstrations.of(seen, shown.actions.flip(0), [25, 40]),
        Demonstrations.of(seen, shown.actions, [24, 40]),
        Demonstrations.of({"other": seen["state"], "picture": seen["picture"]}, shown.actions, [25, 40]),
    ]
    assert len({each.digest() for each in (shown, *others)}) == 7


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
def test_digests_of_numbers_about_zero_and_far_from_it(unit):
    angle = torch.arange(400)[:, None] * (2 * torch.pi / 400)
    turns = unit * torch.cat([angle.cos(), angle.sin(), torch.full_like(angle, 7.0)], 1)
    again, seen = torch.nextafter(turns, torch.tensor(1e9)), {"a": torch.zeros(400, 1)}
    assert Demonstrations.of(seen, turns, [400]).digest() == Demonstrations.of(seen, again, [400]).digest()
    rng = torch.Generator().manual_seed(0)
    far = [1e5 * unit + unit * k * torch.rand(400, 2, generator=rng) for k in (1, 1, 2)]
    assert len({Demonstrations.of(seen, actions, [400]).digest() for actions in far}) == 3


def test_episodes_in_a_dimension_of_their_own_are_no_steps():
    """Of 6 episodes of 5 steps one of 6 was made, whose actions were all ten numbers of an episode."""
    seen, actions = np.zeros((6, 5, 4)), np.zeros((6, 5, 2))
    with pytest.raises(InputError, match=r"actions: must be \(T, A\) without ends; .* got \(6, 5, 2\)"):
        Demonstrations.of(seen, actions)
    rows = [x.reshape(-1, x.shape[2]) for x in (seen, actions)]
    assert Demonstrations.of(*rows, 5 * np.arange(1, 7)).lengths.tolist() == [5] * 6


def test_files_of_one_episode_each_may_have_actions_of_two_dimensions(tmp_path):
    for k in range(2):
        np.savez(tmp_path / f"{k}.npz", actions=np.zeros((5, 2, 3)), arms=np.zeros((5, 2, 3)))
    assert load_episodes(tmp_path).shapes == {"arms": (2, 3), "action": (6,)}


@pytest.mark.parametrize("centred", [True, False])
def test_push_t_is_seen_from_the_agent_or_from_the_window(tmp_path, centred):
    states = np.array([[10.0, 20, 100, 200, 0.3], [30, 50, 110, 220, 1.0]])
    np.savez(tmp_path / "pusht.npz", action=states[:, :2] + 1, state=states, episode_ends=[2])
    found = load_pusht(tmp_path, centred=centred)
    corners = pusht_corners(torch.from_numpy(states[:, 2:])).float()
    assert torch.equal(found.observations["block"], corners.flatten(1))
    assert list(found.observations) == ["agent", "block", *(["beside"] if centred else [])]
    assert (found.noisy, found.relative) == (("agent",), "agent" if centred else "")
    if centred:
        there = found.observations["beside"].unflatten(1, (8, 2)) + found.observations["agent"][:, None]
        torch.testing.assert_close(there, corners)


def test_observations_within_observations_have_dotted_names():
    """They were refused as an observation that is not one for each action."""
    top = np.zeros((4, 3, 8, 6), np.uint8)
    found = Demonstrations.of({"pixels": {"top": top, "hand": {"left": top}}, "at": np.eye(4)}, np.eye(4))
    assert list(found.observations) == ["pixels.top", "pixels.hand.left", "at"]
    with pytest.raises(ConfigError, match=r"observations: must be of names that differ.*, got \['a\.b'\]"):
        Demonstrations.of({"a.b": np.eye(4), "a": {"b": np.eye(4)}}, np.eye(4))
