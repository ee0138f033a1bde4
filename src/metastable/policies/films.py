"""Episodes to look at: frames of an environment, GIFs, and where the agent went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from metastable.core.errors import InputError, require, require_count
from metastable.core.protocols import provides
from metastable.core.random import derive

from .environments import Environments, PushT
from .rollouts import Acting, boxed_actions

FRAME_MS, LEAST_MS = 100, 20
"""Push-T is controlled ten times a second; GIFs of more than fifty frames a second are shown slowly."""


class Filmed(Protocol):
    """An environment that says how many frames make a second."""

    metadata: Mapping[str, Any]
    """`render_fps`, as Gymnasium has it."""


class Film(NamedTuple):
    """One episode.

    Attributes:
        frames: uint8 `(H, W, 3)` each, the first before any action.
        actions: that were carried out, `(T, A)`.
        progress: before the first step and after each, `(T + 1,)`.
        frame_ms: how long a step lasts, in milliseconds.
    """

    frames: list[np.ndarray]
    actions: np.ndarray
    progress: np.ndarray
    frame_ms: float = FRAME_MS

    def write(self, path: str | Path, every: int = 1) -> Path:
        """A GIF of each of so many frames, or of fewer where these are many, and the last one.

        It is shown at the speed of the episode.
        """
        require_count("every", every)
        every *= math.ceil(LEAST_MS / (self.frame_ms * every))
        path = Path(path).expanduser()
        require(path.suffix.lower() == ".gif", "path", "a file that ends with .gif", str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        frames = self.frames[:-1:every] + self.frames[-1:]
        first, *others = [Image.fromarray(frame) for frame in frames]
        first.save(path, save_all=True, append_images=others, duration=round(self.frame_ms * every), loop=0)
        return path


def film(policy: Acting, worlds: Environments, steps: int = 300, seed: int = 0) -> Film:
    """One episode of a policy in the one environment of `worlds`, with a picture of every step."""
    if len(worlds) != 1:
        raise InputError(f"worlds: a film is of one environment, got {len(worlds)}")
    return films(policy, worlds, steps, seed)[0]


def films(policy: Acting, worlds: Environments, steps: int = 300, seed: int = 0) -> list[Film]:
    """An episode in each of the environments, in step with one another; each film ends with its episode."""
    require_count("steps", steps)
    low, high = worlds.box
    policy.reset(derive(seed, "rollout"))
    seen, each = worlds.reset(), range(len(worlds))
    frames = [[picture_of(worlds, i)] for i in each]
    progress, actions = [[float(worlds.progress[i])] for i in each], [[] for _ in each]
    for _ in range(steps):
        going = np.flatnonzero(~worlds.done).tolist()
        action, _ = boxed_actions(policy.select_action(seen), low, high, worlds)
        seen = worlds.step(action)
        for i in going:
            actions[i].append(action[i].numpy())
            frames[i].append(picture_of(worlds, i))
            progress[i].append(float(worlds.progress[i]))
        if worlds.done.all():
            break
    ms = frame_ms_of(worlds)
    return [Film(frames[i], np.stack(actions[i]), np.array(progress[i]), ms) for i in each]


def frame_ms_of(worlds: Any) -> float:
    """How long a step lasts, where environments say it."""
    one: Any = None if isinstance(worlds, PushT) else worlds.each[0]
    fps = (one.metadata or {}).get("render_fps") if provides(one, Filmed) else None
    return 1e3 / fps if isinstance(fps, (int, float)) and fps > 0 else FRAME_MS


def film_pusht(
    policy: Acting,
    start: Sequence[float],
    steps: int = 300,
    seed: int = 0,
    size: int = 192,
    pictures: bool = False,
) -> Film:
    """`film` of Push-T from a state; `pictures` as of `PushT`."""
    return films_pusht(policy, [start], steps, seed, size, pictures)[0]


def films_pusht(
    policy: Acting, starts: Any, steps: int = 300, seed: int = 0, size: int = 192, pictures: bool = False
) -> list[Film]:
    """An episode of Push-T from each of the states `(n, 5)`, all at once; `pictures` as of `PushT`."""
    return films(policy, PushT(starts, size, pictures), steps, seed)


def picture_of(worlds: Any, i: int = 0) -> np.ndarray:
    """One of the environments as it looks now, `(H, W, 3)`."""
    if isinstance(worlds, PushT):
        return worlds.picture(i)
    drawn = worlds.each[i].render()
    if not isinstance(drawn, np.ndarray) or drawn.ndim != 3:
        raise InputError(f"{worlds.name}: draws no pictures; make it with render_mode='rgb_array'")
    return drawn.copy()  # it may draw the next one into the same array
