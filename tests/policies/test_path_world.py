"""The plane by hand, the prior in closed form, and a planner that finds both sides of a disc."""

import math

import pytest
import torch

from metastable.core import ConfigError, InputError
from metastable.core.random import derive
from metastable.policies import PolicyConfig, fit_policy, path_world
from metastable.policies.intervals import clopper_pearson
from metastable.policies.path_world import (
    MARGIN,
    PathWorlds,
    path_demonstrations,
    path_intervals,
    plan_paths,
    refine_snippets,
    rollout_paths,
)
from metastable.policies.planner import PathPrior, Planner

ONE = PathWorlds(
    torch.zeros(1, 1, 2, dtype=torch.float64),
    torch.full((1, 1), 0.5, dtype=torch.float64),
    torch.tensor([[-1.0, 0.0]], dtype=torch.float64),
    torch.tensor([[1.0, 0.0]], dtype=torch.float64),
)
"""One disc of radius ½ between start and goal."""


def path(*points: tuple[float, float]) -> torch.Tensor:
    return torch.tensor([[points]], dtype=torch.float64)


def test_obstacle_cost_by_hand():
    # the first segment passes at distance 0.3, its chord is 2·0.4; the second one is outside
    assert ONE.obstacle_cost(path((-1, 0.3), (1, 0.3), (1, 2))).item() == pytest.approx(0.4)
    # ends inside: the nearest point of a segment is its end
    assert ONE.obstacle_cost(path((-1, 0), (-0.3, 0))).item() == pytest.approx(0.4)
    assert ONE.obstacle_cost(path((-1, 0.6), (1, 0.6))).item() == 0
    assert ONE.obstacle_cost(path((0.1, 0), (0.1, 0))).item() == pytest.approx(math.sqrt(0.24)), (
        "a point at rest"
    )


def test_a_path_between_two_points_outside_can_collide():
    assert ONE.collides(path((-1, 0.3), (1, 0.3))).item()
    assert not ONE.collides(path((-1, 0.3), (0, 0.6), (1, 0.3))).item()
    assert ONE.in_the_way().tolist() == [[True]]


def test_objective_by_hand():
    straight = path((-1, 0.6), (0, 0.6), (1, 0.6))
    assert ONE.objective(straight).item() == pytest.approx(10 * 0.36 + 5 * 2)
    through = path((-1, 0.0), (1, 0.0))
    assert ONE.objective(through).item() == pytest.approx(1 * 0.5 + 5 * 4)


def test_sides_have_opposite_signs():
    above, below = path((-1, 0), (0, 1), (1, 0)), path((-1, 0), (0, -1), (1, 0))
    assert ONE.turning(above).item() == pytest.approx(-math.pi)
    assert ONE.turning(below).item() == pytest.approx(math.pi)


def test_costs_of_a_batch_are_those_of_each():
    worlds = PathWorlds.draw(3)
    paths = torch.rand(3, 4, 2, 6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = worlds.objective(paths)
    for i in range(3):
        alone = worlds.some(slice(i, i + 1)).objective(paths[i, 2, 1][None, None])
        assert together[i, 2, 1].item() == pytest.approx(alone.item())


def test_worlds_are_fixed_and_as_described():
    worlds = PathWorlds.test()
    assert len(worlds) == 25
    assert worlds.start[0].tolist() == pytest.approx(PathWorlds.draw(1, 2024).start[0].tolist())
    assert worlds.radii.min() >= 0.1
    assert worlds.radii.max() <= 0.2
    for end in (worlds.start, worlds.goal):
        gap = (worlds.centres - end[:, None]).norm(dim=-1) - worlds.radii
        assert gap.min() > 0.1
    assert (worlds.start - worlds.goal).norm(dim=-1).min() > 1.2


def test_the_prior_is_that_of_a_spline():
    prior = PathPrior(51, start=1e-5, goal=1e-5, acceleration=2.0)
    assert prior.covariance[25, 25].item() == pytest.approx(4 / 48, rel=1e-4)
    t = torch.linspace(0, 1, 51, dtype=torch.float64)
    exact = 4 * (t * (1 - t)).square() / 3  # of a cubic spline through both ends, at each time itself
    torch.testing.assert_close(prior.covariance.diagonal(), exact, atol=1e-6, rtol=1e-4)


def test_without_a_cost_the_plan_is_the_straight_line():
    planner = Planner(PathPrior(9), iterations=400, wide=0.3, narrow=0.3, samples=64, temperature=1.0)
    rng = torch.Generator().manual_seed(0)
    found = planner.plan(ONE.start, ONE.goal, lambda paths: torch.zeros(paths.shape[:2]).double(), rng)
    line = planner.prior.mean(ONE.start, ONE.goal)
    # what is left is the noise of the last samples
    assert (found - line).abs().max() < 0.25
    assert (found[0, -1] - ONE.goal[0]).norm() < 0.01


def test_from_a_second_start_it_finds_the_other_side():
    planner = Planner(PathPrior(20), iterations=40, samples=24)
    paths = plan_paths(ONE, 8, seed=0, planner=planner)
    assert not ONE.collides(paths).any()
    assert (paths[0, :, -1] - ONE.goal).norm(dim=-1).max() < 0.05
    sides = ONE.turning(paths)[0, :, 0].sign()
    assert {-1.0, 1.0} == set(sides.tolist())
    # it goes around the disc, and not around the world
    assert (paths.abs() < 1.2).all()


def test_the_margin_keeps_paths_off_the_disc():
    planner = Planner(PathPrior(20), iterations=40, samples=24)
    nearest = plan_paths(ONE, 4, planner=planner).norm(dim=-1).amin(-1)
    assert (nearest > 0.5 + MARGIN / 2).all()


def test_refined_snippets_keep_their_ends_and_leave_the_disc():
    snippet = path((-0.9, 0.2), (-0.7, 0.35), (-0.45, 0.2), (-0.2, 0.55), (0, 0.6))[0]
    assert ONE.collides(snippet[:, None]).item()
    found = refine_snippets(ONE, snippet)
    assert (found[:, [0, -1]] - snippet[:, [0, -1]]).abs().max() < 0.01
    assert ONE.obstacle_cost(found[:, None]) < ONE.obstacle_cost(snippet[:, None])


@pytest.fixture(scope="module")
def few():
    return path_demonstrations(2, 2, every=20)


def test_demonstrations_are_one_window_each(few):
    windows = few.windows(3, 10, padded=False)
    assert len(windows) == len(few)
    chunk, seen = windows.chunks(), windows.contexts()
    assert chunk.shape[1:] == (10, 2)
    # the action is the next point: a context leads on to its chunk
    steps = torch.cat([seen["place"], chunk], 1).diff(dim=1).norm(dim=-1)
    assert steps.max() < 0.3
    resting = (seen["place"][:, 0] == seen["place"][:, 2]).all(-1)
    assert resting.any(), "rollouts begin with their start three times"
    assert few.noisy == ("place",)


def test_demonstrations_are_not_far_from_the_cheapest_of_their_world():
    worlds, paths, each = 2, 4, 4  # three snippets of a path, and its start
    made = PathWorlds.draw(worlds, derive(0, "train worlds"))
    planned = plan_paths(made, paths, 0)
    free = ~made.collides(planned)
    cost = made.objective(planned).masked_fill(~free, torch.inf)
    over = cost / cost.amin(1, keepdim=True)
    for within in (1.0, float(over[free].median()), 1e9):
        shown = path_demonstrations(worlds, paths, every=20, refine=False, within=within)
        kept = planned[free & (over <= within)]
        assert len(shown) == each * len(kept)
        starts = shown.windows(3, 10, padded=False).contexts()["place"][: len(kept)]
        torch.testing.assert_close(starts, kept[:, :1].expand(-1, 3, -1).float())
    with pytest.raises(ConfigError, match=r"within: must be 1 or more, got 0\.5"):
        path_demonstrations(1, 1, within=0.5)


def test_a_policy_walks_fifty_points(few):
    config = PolicyConfig(3, 10, 10, candidates=2)
    policy = fit_policy(
        few, {"name": "flow", "layers": 1, "hidden": (8,)}, "density", config, padded=False, steps=2
    )
    worlds = PathWorlds.test().some(slice(0, 2))
    paths = rollout_paths(policy, worlds, 3)
    assert paths.shape == (2, 3, 50, 2)
    assert torch.equal(paths, rollout_paths(policy, worlds, 3))
    assert worlds.collides(paths).shape == worlds.objective(paths).shape == (2, 3)


@pytest.mark.slow
def test_demonstrations_of_the_test_worlds():
    worlds = PathWorlds.test()
    paths = plan_paths(worlds, 8)
    free = ~worlds.collides(paths)
    assert free.double().mean() >= 0.95
    assert (paths[:, :, -1] - worlds.goal[:, None]).norm(dim=-1).max() < 0.05
    side, way = worlds.turning(paths).sign(), worlds.in_the_way()
    both = [set(side[w, free[w], k].tolist()) == {-1.0, 1.0} for w, k in way.nonzero().tolist()]
    assert sum(both) >= 0.9 * len(both) > 20


@pytest.mark.parametrize("every", [0, -1, 2.5])
def test_points_between_snippets_are_counted(every):
    """0 was an error of range(), and −1 left all snippets but the last out."""
    with pytest.raises(ConfigError, match="every: must be an integer"):
        path_demonstrations(1, 1, every=every)


def test_no_worlds_are_refused():
    with pytest.raises(InputError, match="n: must be an integer of at least 1"):
        PathWorlds.draw(0)


def test_a_rate_of_collisions_stays_a_rate():
    hits = torch.zeros(5, 2)
    hits[0, 0] = 1
    for judged, end in ((hits, "low"), (1 - hits, "high")):
        found = path_intervals({"collisions": judged.double(), "cost": judged.double()})
        assert getattr(found["collisions"], end) == (end == "high")
        assert not 0 <= getattr(found["cost"], end) <= 1, "a cost may be anything"


def test_intervals_of_few_collisions_are_no_narrower_than_those_of_none():
    ends = []
    for n in (0, 1, 2, 4):
        hits = torch.zeros(25, 8)
        hits.view(-1)[: 8 * n : 8] = 1  # in n worlds
        ends.append(path_intervals({"collisions": hits})["collisions"])
    assert ends[0] == clopper_pearson(0, 25), "worlds in which all collide may be missing among 25"
    assert [x.high for x in ends] == sorted(x.high for x in ends)
    half = torch.tensor([0.0, 1.0]).repeat(25, 4)
    assert path_intervals({"collisions": half})["collisions"] == clopper_pearson(100, 200), "no point"
    whole = torch.zeros(25, 8)
    whole[:5] = 1  # worlds in which all collide: paths say no more than their worlds do
    assert path_intervals({"collisions": whole})["collisions"].high > clopper_pearson(40, 200).high + 0.05


def test_the_rate_of_independent_paths_is_covered():
    rng, covered = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        hits = (torch.rand(25, 8, generator=rng) < 0.016).double()
        found = path_intervals({"collisions": hits})["collisions"]
        covered += found.low <= 0.016 <= found.high
    assert covered >= 0.93 * 400


def test_a_policy_of_other_actions_is_named():
    class Wide:
        def reset(self, seed=None):
            pass

        def select_action(self, observation):
            return torch.zeros(len(observation["goal"]), 3)

    with pytest.raises(
        InputError, match="path-planning: actions of the policy have 3 numbers, those of the env"
    ):
        rollout_paths(Wide(), ONE)


@pytest.mark.parametrize("every", [5, 20])
def test_every_snippet_is_seen_in_the_world_that_it_was_planned_in(every):
    made = PathWorlds.draw(3, derive(0, "train worlds"))
    planned = plan_paths(made, 2, 0).float()
    shown = path_demonstrations(3, 2, every=every, refine=False, within=1e9)
    windows = shown.windows(3, 10, padded=False)
    seen, chunks = windows.contexts(), windows.chunks()
    for i, goal in enumerate(seen["goal"][:, 0]):
        (world,) = (made.goal.float() == goal).all(1).nonzero()[0].tolist()
        known = torch.cat([made.centres[world], made.radii[world][:, None]], 1).flatten().float()
        assert torch.equal(seen["discs"][i], known.expand(3, -1))
        points = torch.cat([seen["place"][i], chunks[i]])
        assert (points[:, None] == planned[world].flatten(0, 1)).all(2).any(1).all()


def test_a_collision_begins_at_the_edge_of_a_disc():
    for off, hit in ((0.4999, True), (0.5001, False)):
        assert ONE.collides(path((-1, off), (1, off))).item() is hit
        assert ONE.collides(path((-1, -1), (0, -off))).item() is hit, "the end of a segment"


def test_the_prior_of_a_snippet_is_that_of_its_share_of_a_path(monkeypatch):
    """How far the middle of thirteen points is off the chord of their ends: the same, whatever came before."""
    asked = []
    monkeypatch.setattr(path_world, "Planner", lambda prior, **_: asked.append(prior) or Planner(prior, 2, 1))
    refine_snippets(ONE, PathPrior(13).mean(ONE.start, ONE.goal))
    bend = torch.zeros(13, dtype=torch.float64)
    bend[[0, 6, 12]] = torch.tensor([-0.5, 1.0, -0.5], dtype=torch.float64)
    whole = PathPrior(start=1.0, goal=1e3).covariance[20:33, 20:33]
    assert (bend @ asked[0].covariance @ bend).item() == pytest.approx((bend @ whole @ bend).item(), rel=1e-3)


def test_what_collides_is_planned_again_and_nothing_else():
    asked = []

    class Learning:
        prior = PathPrior(3)

        def plan(self, start, goal, cost, rng):
            asked.append(len(start))
            around = torch.zeros(len(start), 2, dtype=torch.float64)
            around[len(asked) % 2 :, 1] = 2.0  # the first time one goes through the disc
            return torch.stack([start, around, goal], 1)

    found = plan_paths(ONE, 3, planner=Learning())  # pyright: ignore
    assert asked == [3, 1]
    assert not ONE.collides(found).any()
    asked.clear()
    once = plan_paths(ONE, 3, planner=Learning(), attempts=1)  # pyright: ignore
    assert ONE.collides(once).tolist() == [[True, False, False]]


def test_discs_are_larger_for_the_planner_than_for_the_collision_test():
    told = []

    class Asking:
        prior = PathPrior(3)

        def plan(self, start, goal, cost, rng):
            told.append([cost(path((-1, 0.5 + off), (1, 0.5 + off))).item() > 0 for off in (0.049, 0.051)])
            return torch.stack([start, start, goal], 1)

    plan_paths(ONE, 1, planner=Asking(), attempts=1)  # pyright: ignore
    assert told == [[True, False]]
