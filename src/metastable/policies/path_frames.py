"""Path planning seen from where one stands: points relative to the present one, the nearest disc first.

A world that is moved is the same world, and its discs have no order. A dense network that is told so has less to
learn; the paper's models see a fixed frame instead.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from metastable.data.demonstrations import Demonstrations

from .path_world import CONTEXT
from .policy import Policy

POINTWISE = ("place", "goal")


def seen_from(observations: dict[str, Tensor], at: Tensor) -> dict[str, Tensor]:
    """Observations `(P, T, …)` relative to points `(P, 2)`; discs by how near their edge is."""
    moved = {key: observations[key] - at[:, None] for key in POINTWISE}
    discs = observations["discs"].unflatten(2, (-1, 3)).clone()
    discs[..., :2] -= at[:, None, None]
    order = (discs[..., :2].norm(dim=-1) - discs[..., 2]).argsort(-1)
    nearest = discs.take_along_dim(order[..., None], 2)
    return {**moved, "discs": nearest.flatten(2)}


def centred(shown: Demonstrations) -> Demonstrations:
    """Snippets of `path_demonstrations`, each relative to its last point of context."""
    steps = int(shown.lengths[0])
    seen = {key: value.unflatten(0, (-1, steps)) for key, value in shown.observations.items()}
    at = seen["place"][:, CONTEXT - 1].clone()
    moved = {key: value.flatten(0, 1) for key, value in seen_from(seen, at).items()}
    actions = (shown.actions.unflatten(0, (-1, steps)) - at[:, None].to(shown.actions)).flatten(0, 1)
    return Demonstrations.of(moved, actions, shown.ends, shown.name, noisy=shown.noisy)


class CentredPolicy:
    """A policy that was trained on `centred` demonstrations, acting on observations as they are.

    Args:
        policy: of chunks relative to the present point.
    """

    def __init__(self, policy: Policy):
        self.policy = policy

    def reset(self, seed: int | None = None) -> None:
        """A new path in every world."""
        self.policy.reset(seed)
        self.seen: deque[dict[str, Tensor]] = deque(maxlen=CONTEXT)
        self.planned: deque[Tensor] = deque()

    def select_action(self, observation: Any) -> Tensor:
        """The next point of each path, `(B, 2)`."""
        self.seen.append(dict(observation))
        if not self.planned:
            window = [self.seen[0]] * (CONTEXT - len(self.seen)) + list(self.seen)
            stacked = {key: torch.stack([step[key] for step in window], 1) for key in observation}
            at = stacked["place"][:, -1]
            chunk = self.policy.predict_action_chunk(seen_from(stacked, at)) + at[:, None].cpu()
            self.planned.extend(chunk[:, : self.policy.config.execute].unbind(1))
        return self.planned.popleft()
