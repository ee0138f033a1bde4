"""Episodes to look at: frames of an environment, GIFs, and where the agent went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from metastable.core.errors import InputError, require_count
from metastable.core.random import derive

from .environments import Environments, PushT
from .rollouts import Acting, fitting_actions

FRAME_MS = 100
"""Push-T is controlled ten times a second."""


class Film(NamedTuple):
    """One episode.

    Attributes:
        frames: uint8 `(H, W, 3)` each, the first before any action.
        actions: that were carried out, `(T, A)`.
        progress: before the first step and after each, `(T + 1,)`.
    """

    frames: list[np.ndarray]
    actions: np.ndarray
    progress: np.ndarray

    def write(self, path: str | Path, every: int = 1) -> Path:
        """A GIF of each of so many frames and the last one, at the speed of the episode."""
        require_count("every", every)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        frames = self.frames[:-1:every] + self.frames[-1:]
        first, *others = [Image.fromarray(frame) for frame in frames]
        first.save(path, save_all=True, append_images=others, duration=FRAME_MS * every, loop=0)
        return path


def film(policy: Acting, worlds: Environments, steps: int = 300, seed: int = 0) -> Film:
    """One episode of a policy in the one environment of `worlds`, with a picture of every step."""
    if len(worlds) != 1:
        raise InputError(f"worlds: a film is of one environment, got {len(worlds)}")
    require_count("steps", steps)
    low, high = worlds.box
    policy.reset(derive(seed, "rollout"))
    seen, frames, actions = worlds.reset(), [picture_of(worlds)], []
    progress = [float(worlds.progress[0])]
    for _ in range(steps):
        action = fitting_actions(policy.select_action(seen), low, worlds).clamp(low, high)
        seen = worlds.step(action)
        actions.append(action[0].numpy())
        frames.append(picture_of(worlds))
        progress.append(float(worlds.progress[0]))
        if worlds.done.all():
            break
    return Film(frames, np.stack(actions), np.array(progress))


def film_pusht(
    policy: Acting, start: Sequence[float], steps: int = 300, seed: int = 0, size: int = 192
) -> Film:
    """`film` of Push-T from a state."""
    return film(policy, PushT([start], size), steps, seed)


def picture_of(worlds: Any) -> np.ndarray:
    """The first environment as it looks now, `(H, W, 3)`."""
    if isinstance(worlds, PushT):
        return worlds.picture(0)
    drawn = worlds.each[0].render()
    if not isinstance(drawn, np.ndarray) or drawn.ndim != 3:
        raise InputError(f"{worlds.name}: draws no pictures; make it with render_mode='rgb_array'")
    return drawn
