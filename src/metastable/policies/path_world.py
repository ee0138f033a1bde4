"""Path planning: a plane with ten discs, a start and a goal.

S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies*, TMLR 2024, Section 7.3. The paper says
neither the size of the world nor the radii nor its weights. Here they are:

| | |
|---|---|
| world | the square [−1, 1]² |
| discs | 10, centres uniform in [−0.8, 0.8]², radii uniform in [0.1, 0.2] |
| start, goal | uniform in [−0.95, 0.95]², 1.2 or more apart, 0.1 or more from every disc |
| weights of (7.2) | 1/σ̄_g² = 10, 1/σ̄_o² = 1, 1/σ̄_v² = 5 |
| planner | plans around discs that are 0.05 larger; σ_s = σ_g = 10⁻³, σ_v = 1.8 (first paths: 5), λσ_o² = 0.01 |

So ratios between models can be compared with the paper's, costs themselves cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from metastable.core.errors import InputError, require, require_count
from metastable.core.random import derive, generator
from metastable.data.demonstrations import Demonstrations

from .environments import vectors_of
from .intervals import Interval, mean_over_starts, rate_over_starts
from .planner import PathPrior, Planner
from .rollouts import Acting

DISCS, SPREAD, RADII = 10, 0.8, (0.1, 0.2)
EDGE, APART, CLEAR = 0.95, 1.2, 0.1
MARGIN = 0.05
"""By which discs are larger for the planner than for the collision test."""
WEIGHTS = (10.0, 1.0, 5.0)
"""Of goal, obstacles and smoothness in (7.2)."""
WITHIN = 1.3
"""Demonstrations cost at most so much more than the cheapest in their world: the paper's are optimal."""
POINTS, CONTEXT, PREDICTION = 50, 3, 10
"""N, N_ctx and N_pred."""
TEST_WORLDS, TEST_SEED = 25, 2024
BLOCK = 32
"""Paths that are planned together: more would leave the processor's cache."""
GPU_BLOCK = 4096
"""The same on a GPU, whose memory is the limit: about 0.5 GB for each array of all segments and discs."""


@dataclass(frozen=True, eq=False)
class PathWorlds:
    """W worlds, float64.

    Attributes:
        centres: of the discs, `(W, 10, 2)`.
        radii: `(W, 10)`.
        start: `(W, 2)`.
        goal: `(W, 2)`.
    """

    centres: Tensor
    radii: Tensor
    start: Tensor
    goal: Tensor

    @classmethod
    def draw(cls, n: int, seed: int = 0) -> PathWorlds:
        """`n` worlds: world i is the same, however many are drawn."""
        require_count("n", n)
        drawn = [_world(generator(derive(seed, "world", i))) for i in range(n)]
        return cls(*(torch.stack(part) for part in zip(*drawn, strict=True)))

    @classmethod
    def test(cls) -> PathWorlds:
        """The 25 worlds that models are compared in."""
        return cls.draw(TEST_WORLDS, TEST_SEED)

    def __len__(self) -> int:
        return len(self.start)

    def some(self, worlds: Tensor | slice) -> PathWorlds:
        """Some of them, or one several times."""
        return PathWorlds(self.centres[worlds], self.radii[worlds], self.start[worlds], self.goal[worlds])

    def to(self, device: str | torch.device) -> PathWorlds:
        """The same on a device."""
        return PathWorlds(*(part.to(device) for part in (self.centres, self.radii, self.start, self.goal)))

    def obstacle_cost(self, paths: Tensor) -> Tensor:
        """c_obs of paths `(W, …, N, 2)`, `(W, …)`: half of the chord that a segment's line cuts out of a disc.

        Σ √(r² − d²) over segments and discs with d ≤ r, d the distance of the segment to the centre.
        """
        return self._depth_squared(paths).clamp_(min=0).sqrt_().sum((-1, -2))

    def collides(self, paths: Tensor) -> Tensor:
        """Whether a segment of the path enters a disc, `(W, …)`."""
        return (self._depth_squared(paths) > 0).any(-1).any(-1)

    def objective(self, paths: Tensor) -> Tensor:
        """(7.2) of whole paths `(W, …, N, 2)`, `(W, …)`."""
        goal, obstacle, smooth = WEIGHTS
        at = self.goal.view(len(self), *[1] * (paths.dim() - 3), 2)
        missed = (paths[..., -1, :] - at).square().sum(-1)
        moved = paths.diff(dim=-2).square().sum((-1, -2))
        return goal * missed + obstacle * self.obstacle_cost(paths) + smooth * moved

    def turning(self, paths: Tensor) -> Tensor:
        """The angle by which a path goes around each centre, `(W, …, 10)`: its sign is the side it passes on."""
        arm = paths[..., None, :] - self.centres.view(
            len(self), *[1] * (paths.dim() - 2), *self.centres.shape[1:]
        )
        a, b = arm[..., :-1, :, :], arm[..., 1:, :, :]
        cross = a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
        return torch.atan2(cross, (a * b).sum(-1)).sum(-2)

    def in_the_way(self) -> Tensor:
        """Which discs the straight line from start to goal crosses, `(W, 10)`."""
        line = torch.stack([self.start, self.goal], 1)
        return (self._depth_squared(line) > 0)[:, 0]

    def _depth_squared(self, paths: Tensor) -> Tensor:
        """r² − d² of every segment and disc, `(W, …, N − 1, 10)`.

        With a and b the ends of a segment, d² = |c − a|² + t(t|b − a|² − 2(c − a)·(b − a)), where t, from 0 to 1,
        is how far along it is nearest: a matrix product and a few operations on numbers, not on points.
        """
        flat = paths.flatten(1, -2)  # (W, M, 2), a product for each world
        reach = (self.radii.square() - self.centres.square().sum(-1))[:, None]
        by = (flat @ self.centres.mT).view(*paths.shape[:-1], self.radii.shape[1])
        a, along = paths[..., :-1, :], paths.diff(dim=-2)
        length = along.square().sum(-1, keepdim=True)
        ahead = by.diff(dim=-2).sub_((a * along).sum(-1, keepdim=True))  # (c − a)·(b − a)
        t = (ahead / length.clamp(min=1e-300)).clamp_(0, 1)
        inside = reach.view(len(self), *[1] * (paths.dim() - 2), self.radii.shape[1]) - a.square().sum(
            -1, keepdim=True
        )
        return t.mul_(ahead.mul_(2).addcmul_(t, length, value=-1)).add_(inside).add_(by[..., :-1, :], alpha=2)


def _world(rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Discs, then a start and a goal that are apart and clear of them, by rejection."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    while True:
        centres, radii = (
            SPREAD * (2 * uniform(DISCS, 2) - 1),
            RADII[0] + (RADII[1] - RADII[0]) * uniform(DISCS),
        )
        ends = EDGE * (2 * uniform(64, 2, 2) - 1)
        clear = ((ends[:, :, None] - centres).norm(dim=-1) > radii + CLEAR).all(-1).all(-1)
        good = clear & ((ends[:, 0] - ends[:, 1]).norm(dim=-1) > APART)
        if bool(good.any()):
            start, goal = ends[int(good.nonzero()[0])]
            return centres, radii, start, goal


def plan_paths(
    worlds: PathWorlds, paths: int = 8, seed: int = 0, planner: Planner | None = None, attempts: int = 3
) -> Tensor:
    """`paths` ways from start to goal in each world, each from a start of its own, `(W, paths, N, 2)`, float64.

    A path that ends in a collision is planned again from another start, up to `attempts` times in all. Worlds on
    another device are planned there, by other random numbers.
    """
    require_count("paths", paths)
    require_count("attempts", attempts)
    place = worlds.start.device
    planner, rng = planner or Planner(), generator(derive(seed, "plan"), place)
    each = worlds.some(torch.arange(len(worlds), device=place).repeat_interleave(paths))
    found = torch.empty(len(each), planner.prior.points, 2, dtype=torch.float64, device=place)
    left = torch.arange(len(each), device=place)
    for _ in range(attempts):
        for rows in left.split(BLOCK if place.type == "cpu" else GPU_BLOCK):
            at = each.some(rows)
            wider = replace(at, radii=at.radii + MARGIN)
            found[rows] = planner.plan(at.start, at.goal, wider.obstacle_cost, rng)
        left = left[each.some(left).collides(found[left])]
        if not len(left):
            break
    return found.unflatten(0, (len(worlds), paths))


def refine_snippets(worlds: PathWorlds, snippets: Tensor, seed: int = 0) -> Tensor:
    """Snippets `(P, n, 2)` of paths, one for each world, planned again between their ends.

    The time of a whole path is the prior's unit, so the acceleration of a snippet is scaled to its share of it.
    """
    share = (snippets.shape[1] - 1) / (POINTS - 1)
    prior = PathPrior(snippets.shape[1], acceleration=PathPrior().acceleration * share**1.5)
    planner = Planner(prior, iterations=30, wide=0.1, narrow=0.03)
    wider, place = replace(worlds, radii=worlds.radii + MARGIN), worlds.start.device
    rng, found = generator(derive(seed, "refine"), place), torch.empty_like(snippets)
    for rows in torch.arange(len(snippets), device=place).split(GPU_BLOCK):
        first, cost = snippets[rows], wider.some(rows).obstacle_cost
        found[rows] = planner.plan(first[:, 0], first[:, -1], cost, rng, first=first)
    return found


def path_demonstrations(
    worlds: int = 200,
    paths: int = 4,
    seed: int = 0,
    *,
    every: int = 5,
    refine: bool = True,
    within: float = WITHIN,
    device: str = "cpu",
) -> Demonstrations:
    """Snippets of planned paths, of N_ctx + N_pred points: `windows(3, 10, padded=False)` is one for each.

    The first snippet of a path has its start three times, as a rollout has. Paths that collide are left out, and
    those that cost far more than another in their world: they go around what nothing forces them around, and a
    policy that has learned so runs out of time.

    Args:
        worlds: how many, none of them a test world.
        paths: planned in each.
        seed: of worlds and planner.
        every: points from one snippet of a path to the next.
        refine: plan each snippet again between its ends.
        within: what a path may cost, (7.2), as a multiple of the cheapest that was found in its world.
        device: where they are planned; another one has other random numbers.
    """
    require_count("every", every)
    require(within >= 1, "within", "1 or more", within)
    made = PathWorlds.draw(worlds, derive(seed, "train worlds")).to(device)
    planned = plan_paths(made, paths, seed)
    free = ~made.collides(planned)
    cost = made.objective(planned).masked_fill(~free, torch.inf)
    world, path = (free & (cost <= within * cost.amin(1, keepdim=True))).nonzero().T
    whole, length = planned[world, path], CONTEXT + PREDICTION
    if not len(whole):
        raise InputError(f"worlds: no path of {worlds} worlds is free of collisions; draw more")
    last = whole.shape[1] - length  # the one that ends at the goal is always among them
    begin = torch.tensor(sorted({*range(0, last + 1, every), last}))
    snippets = whole[:, (begin[:, None] + torch.arange(length)).to(device)]  # (P, S, n, 2)
    at, rows = world.repeat_interleave(snippets.shape[1]), snippets.flatten(0, 1)
    if refine:
        rows = refine_snippets(made.some(at), rows, seed)
    first = torch.cat([whole[:, :1].expand(-1, CONTEXT - 1, -1), whole[:, : length - CONTEXT + 1]], 1)
    return _episodes(made.some(torch.cat([world, at])).to("cpu"), torch.cat([first, rows]).cpu())


def _episodes(worlds: PathWorlds, snippets: Tensor) -> Demonstrations:
    """Snippets `(P, n, 2)` with the world of each as demonstrations: the action is the next point."""
    steps = snippets.shape[1] - 1
    seen = {key: value.repeat_interleave(steps, 0) for key, value in scene(worlds).items()}
    seen = {"place": snippets[:, :-1].flatten(0, 1)} | seen
    ends = steps * (1 + torch.arange(len(snippets)))
    return Demonstrations.of(seen, snippets[:, 1:].flatten(0, 1), ends, "path planning", noisy=("place",))


def scene(worlds: PathWorlds) -> dict[str, Tensor]:
    """What a policy knows of each world: `goal`, `(W, 2)`, and `discs`, x, y and radius, `(W, 30)`."""
    discs = torch.cat([worlds.centres, worlds.radii[..., None]], -1).flatten(1)
    return {"goal": worlds.goal.float(), "discs": discs.float()}


def rollout_paths(policy: Acting, worlds: PathWorlds, paths: int = 1, seed: int = 0) -> Tensor:
    """Paths of a policy, chunk after chunk, `(W, paths, N, 2)`: the start and N − 1 actions, as the planner's are.

    Args:
        policy: trained on `path_demonstrations`, whose action is the next point.
        worlds: where.
        paths: in each.
        seed: of the policy.
    """
    require_count("paths", paths)
    each = worlds.some(torch.arange(len(worlds)).repeat_interleave(paths))
    known, place = scene(each), each.start.float()
    taken = [place]
    policy.reset(seed)
    for _ in range(POINTS - 1):
        answer = policy.select_action({"place": place, **known})
        place = vectors_of(answer, place.shape, "path-planning").to(place)
        taken.append(place)
    return torch.stack(taken, 1).double().unflatten(0, (len(worlds), paths))


class Straight:
    """Walks straight to the goal, in the steps that are left."""

    def reset(self, seed: int | None = None) -> None:
        """All steps are left."""
        self.left = POINTS - 1

    def select_action(self, observation: Any) -> Tensor:
        """The next point, `(B, 2)`."""
        place, goal = observation["place"], observation["goal"]
        self.left -= 1
        return place + (goal - place) / (self.left + 1)


class Wandering:
    """Takes steps of the length of a straight walk, each in a direction of its own."""

    def reset(self, seed: int | None = None) -> None:
        """From the first random number."""
        self.rng = generator(derive(seed or 0, "wandering"))
        self.length: Tensor | None = None

    def select_action(self, observation: Any) -> Tensor:
        """The next point, `(B, 2)`."""
        place, goal = observation["place"], observation["goal"]
        length = self.length
        if length is None:
            length = (goal - place).norm(dim=1, keepdim=True) / (POINTS - 1)
        step, self.length = torch.randn(place.shape, generator=self.rng), length
        return place + length * step / step.norm(dim=1, keepdim=True)


def judge_paths(worlds: PathWorlds, taken: Tensor) -> dict[str, Tensor]:
    """What paths `(W, P, N, 2)` are worth, `(W, P)` each: collisions (0 or 1), cost (7.2), distance to the goal."""
    return {
        "collisions": worlds.collides(taken).double(),
        "cost": worlds.objective(taken),
        "goal missed by": (taken[:, :, -1] - worlds.goal[:, None]).norm(dim=-1),
    }


def path_intervals(judged: Mapping[str, Tensor]) -> dict[str, Interval]:
    """Means of what `judge_paths` says, with 95 % intervals.

    Paths of a world are not independent of one another: intervals are over worlds.
    """
    said = {name: mean_over_starts(values) for name, values in judged.items()}
    return {**said, "collisions": rate_over_starts(judged["collisions"])}
