"""Path planning seen from where one stands: the present point is 0, the goal lies ahead, the nearest disc is first.

A world that is moved or turned is the same world, and its discs have no order. A network that is told so has less
to learn. The paper's models see a fixed frame instead.

Networks of plain dense layers still have to find out what a disc is, which takes tens of thousands of worlds. They
can be shown how far one sees in some directions in the place of the discs: then a few hundred worlds are enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import require
from metastable.data.demonstrations import Demonstrations

from .intervals import Interval
from .path_world import CONTEXT, PathWorlds, judge_paths, path_intervals, rollout_paths
from .policy import Policy
from .rollouts import Acting

PLACE, GOAL, DISCS, SIGHT = "place ahead", "goal ahead", "discs ahead", "sight"
"""Observations in a frame."""
SEEN = ("place", "goal", "discs")
"""Observations as they are."""
FAR = 0.7
"""As far as one sees: twice the way of a chunk."""
AT_ONCE = 4096
"""Snippets that are turned together: in each, every point sees every disc in every direction."""
SETS = {"goal": 2, GOAL: 2, "discs": 3, DISCS: 3}
"""Those that stay the same while a chunk is walked (either frame), with the numbers of one thing (`layout_of`)."""


class Frame(NamedTuple):
    """Where P walkers stand and look.

    Attributes:
        at: the present point, `(P, 2)`.
        turn: columns are ahead (to the goal) and left, `(P, 2, 2)`.
    """

    at: Tensor
    turn: Tensor

    @classmethod
    def of(cls, observations: Mapping[str, Tensor]) -> Frame:
        """At the last point of context of windows `(P, T, …)`."""
        at, goal = (observations[key][:, CONTEXT - 1] for key in ("place", "goal"))
        ahead = torch.nn.functional.normalize(goal - at, dim=1, eps=1e-9)
        left = torch.stack([-ahead[:, 1], ahead[:, 0]], 1)
        return cls(at, torch.stack([ahead, left], 2))

    def inside(self, points: Tensor) -> Tensor:
        """Points `(P, …, 2)` in the frame."""
        flat = points.flatten(1, -2) - self.at[:, None]
        return (flat @ self.turn).view(points.shape)

    def outside(self, points: Tensor) -> Tensor:
        """The inverse of `inside`, for `(P, n, 2)`."""
        return points @ self.turn.mT + self.at[:, None]

    def seen(
        self, observations: Mapping[str, Tensor], sight: int = 0, discs: bool | None = None
    ) -> dict[str, Tensor]:
        """Windows `(P, T, …)` in the frame: how far one sees `sight` ways, and discs by how near their edge is.

        Discs are left out where sight is in their place, unless they are asked for.
        """
        known = observations["discs"].unflatten(2, (-1, 3))
        centres, radii = self.inside(known[..., :2]), known[..., 2]
        ends = {key: self.inside(observations[name]) for key, name in ((PLACE, "place"), (GOAL, "goal"))}
        # straight ahead: what rounding leaves aside would be scaled up
        ends[GOAL] = ends[GOAL].round(decimals=5)
        if sight:
            ends[SIGHT] = seen_distances(centres, radii, sight)
        if discs is False or (discs is None and sight):
            return ends
        order = (centres.norm(dim=-1) - radii).argsort(-1)[..., None]
        nearest = torch.cat([centres, radii[..., None]], -1).take_along_dim(order, 2).flatten(2)
        return {**ends, DISCS: nearest}


def seen_distances(centres: Tensor, radii: Tensor, ways: int) -> Tensor:
    """How far from 0 the first disc is in each of some directions, at most `FAR`: `(…, n, 2)` to `(…, ways)`.

    It is 0 everywhere inside a disc. Directions go around from straight back, ahead in the middle.

    >>> seen_distances(torch.tensor([[0.5, 0.0]]), torch.tensor([0.1]), 4)
    tensor([0.7000, 0.7000, 0.4000, 0.7000])
    >>> seen_distances(torch.tensor([[0.05, 0.0]]), torch.tensor([0.1]), 4)
    tensor([0., 0., 0., 0.])
    """
    angle = torch.linspace(-torch.pi, torch.pi, ways + 1, dtype=centres.dtype, device=centres.device)[:-1]
    along = centres @ torch.stack([angle.cos(), angle.sin()])
    depth = radii.square()[..., None] - centres.square().sum(-1, keepdim=True)  # above 0 where 0 is inside
    inside = depth + along.square()
    hit = (along - inside.clamp(min=0).sqrt()).clamp(0, FAR)
    return torch.where((inside > 0) & ((along > 0) | (depth > 0)), hit, FAR).amin(-2)


def space_of(names: Collection[str]) -> tuple[str, ...]:
    """Observations in a frame that are scaled as the points are: all of them, where discs are among them."""
    return tuple(names) if DISCS in names else ()


def centred(shown: Demonstrations, sight: int = 0, discs: bool | None = None) -> Demonstrations:
    """Snippets of `path_demonstrations`, each in the frame of its last point of context; the rest as of `seen`."""
    known, steps = list(shown.observations), int(shown.lengths[0])
    rule = f"{', '.join(SEEN)}, those of path_demonstrations as they are"
    require(set(SEEN) <= set(known), f"{shown.name}: observations", rule, known)
    seen = {key: value.float().unflatten(0, (-1, steps)) for key, value in shown.observations.items()}
    moves, parts = shown.actions.float().unflatten(0, (-1, steps)), []
    for rows in torch.arange(len(moves)).split(AT_ONCE):
        own = {key: value[rows] for key, value in seen.items()}
        frame = Frame.of(own)
        parts.append((frame.seen(own, sight, discs), frame.inside(moves[rows])))
    observations = {key: torch.cat([part[key] for part, _ in parts]).flatten(0, 1) for key in parts[0][0]}
    rows, space = torch.cat([walked for _, walked in parts]).flatten(0, 1), space_of(observations)
    return Demonstrations.of(observations, rows, shown.ends, shown.name, noisy=(PLACE,), space=space)


def with_mirrored(shown: Demonstrations) -> Demonstrations:
    """Demonstrations, and their mirror images, which are as likely: worlds know no up and down."""
    flip = torch.tensor([1.0, -1.0])
    discs = torch.cat([flip, torch.ones(1)]).repeat(shown.observations["discs"].shape[1] // 3)
    signs = {"place": flip, "goal": flip, "discs": discs}
    seen = {key: torch.cat([x, x * signs[key].to(x)]) for key, x in shown.observations.items()}
    actions = torch.cat([shown.actions, shown.actions * flip.to(shown.actions)])
    ends = torch.cat([shown.ends, shown.ends + len(shown.actions)])
    return Demonstrations.of(seen, actions, ends, shown.name, noisy=shown.noisy)


class CentredPolicy:
    """A policy that was trained on `centred` demonstrations, acting on observations as they are.

    Args:
        policy: of chunks in the frame; it neither goes on from its last chunk nor freezes a part of it, since each
            has a frame of its own.
    """

    def __init__(self, policy: Policy):
        carried = policy.config.warmed + policy.config.freeze
        require(carried == 0, "policy.warm", "0, as freeze, in frames that move", carried)
        self.policy = policy
        known = policy.scaling.middle
        self.seeing = known[SIGHT].numel() if SIGHT in known else 0, DISCS in known
        self.reset()

    def reset(self, seed: int | None = None) -> None:
        """A new path in every world."""
        self.policy.reset(seed)
        self.seen: deque[dict[str, Tensor]] = deque(maxlen=CONTEXT)
        self.planned: deque[Tensor] = deque()

    def select_action(self, observation: Any) -> Tensor:
        """The next point of each path, `(B, 2)`."""
        known, rule = set(SEEN) <= set(observation), f"by name, with {', '.join(SEEN)}"
        require(known, "observation", rule, list(observation))
        own = {key: torch.as_tensor(observation[key]).clone() for key in SEEN}
        steps = [*self.seen, own][-CONTEXT:]
        worlds = {len(value) for step in steps for value in step.values()}
        require(len(worlds) == 1, "observation", "of the same worlds, in all of it and since reset", worlds)
        if not self.planned:
            window = [steps[0]] * (CONTEXT - len(steps)) + steps
            stacked = {key: torch.stack([step[key] for step in window], 1) for key in SEEN}
            frame = Frame.of(stacked)
            chunk = frame.outside(self.policy.predict_action_chunk(frame.seen(stacked, *self.seeing)))
            self.planned.extend(chunk[:, : self.policy.config.execute].unbind(1))
        self.seen.append(own)
        return self.planned.popleft()


def walking(policy: Policy) -> Acting:
    """The policy as it walks, in the frame that its demonstrations were seen in."""
    return CentredPolicy(policy) if PLACE in policy.scaling.names else policy


def walk_test_worlds(policy: Policy, paths: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """What `paths` paths of a policy in each of the test worlds are worth, see `judge_paths`."""
    worlds = PathWorlds.test()
    return judge_paths(worlds, rollout_paths(walking(policy), worlds, paths, seed))


def roll_paths(policy: Policy, paths: int = 16, seed: int = 0) -> dict[str, Interval]:
    """Collision rate and cost (7.2) of a policy in the test worlds, `paths` in each, with 95 % intervals."""
    return path_intervals(walk_test_worlds(policy, paths, seed))
