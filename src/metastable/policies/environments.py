"""Environments in step with one another: any of Gymnasium, and Push-T from states that are set exactly.

Push-T is `gym-pusht`, where a seed means other starts in one release than in another, and where `reset_to_state`
turns the block about a point that is not the one its position names. So starts are states here, set by angle
first and position then, without a step of the physics: demonstrations replay to what float32 rounded of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from metastable.core.errors import (
    InputError,
    MetastableError,
    MissingDependencyError,
    need,
    require,
    require_count,
    short,
)
from metastable.core.pixels import CHANNELS
from metastable.core.random import derive
from metastable.data.demonstration_files import pusht_observation, pusht_states
from metastable.data.demonstrations import flattened

PUSHT, LEAST = "gym_pusht/PushT-v0", (0, 1, 8)
FULL = 0.95
"""Coverage that counts as all of it."""
DIGITS = 9
"""Of coverage: the last ones depend on where in memory the block's shapes lie."""
EXTRA = "policies"
PICTURE, SIDE = "picture", 96
"""What a policy that sees Push-T calls its pictures, and their side in pixels."""
SEVERAL = "of several shapes"


@contextmanager
def foreign(what: str) -> Iterator[None]:
    """Errors of code that others wrote, as one line of ours that says `what` raised them."""
    try:
        yield
    except (MetastableError, MemoryError):
        raise
    except Exception as error:
        raise InputError(f"{what} raised {type(error).__name__}: {' '.join(str(error).split())}") from error


class Seen(dict[str, Tensor]):
    """What is seen, by name; `left_out` says of what else is shown why it is none of it."""

    def __init__(self, shown: Mapping[str, Tensor | str]):
        super().__init__({key: value for key, value in shown.items() if isinstance(value, Tensor)})
        self.left_out = {key: why for key, why in shown.items() if isinstance(why, str)}


class Environments:
    """Environments of one kind, stepped together until each of them ends.

    Args:
        make: makes one, with Gymnasium's `reset` and `step`.
        starts: the seed of each.
        name: for people.
    """

    measure: ClassVar[str] = "return"
    """What `progress` says: here the rewards of an episode so far, summed."""
    first: int = 0
    """Number of the first of them, where others are in other processes."""
    looked: bool = True
    """Whether somebody looks at what is seen next: where nobody does, pictures may be old ones."""

    def __init__(self, make: Callable[[], Any], starts: Sequence[Any], name: str = "environment"):
        require_count("starts", len(starts))
        self.name, self.starts = name, list(starts)
        self.each = [make() for _ in starts]
        several = len({id(env) for env in self.each}) == len(starts)
        rule = "a function that makes a new environment every time"
        require(several, f"{name}: make", rule, "the same one")
        self.raw: list[Any] = [None] * len(starts)
        self.done, self.success = np.zeros(len(starts), dtype=bool), np.full(len(starts), np.nan)
        self.progress = torch.zeros(len(starts), dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.each)

    @property
    def box(self) -> tuple[Tensor, Tensor]:
        """The least and the greatest action, `(A,)` each."""
        space: Any = None
        try:
            space = self.each[0].action_space
            low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
            own = [(env.action_space.low, env.action_space.high) for env in self.each]
        except AttributeError:
            low, high, own = torch.empty(0, 0), torch.empty(0, 0), []
        if low.dim() != 1:
            rule = "actions must be a vector of numbers, a Box of shape (A,)"
            raise InputError(f"{self.name}: {rule}, got {short(space)}")
        rule = "from low to high, the same in every environment"
        right = all(np.less_equal(*own[0])) and all(np.array_equal(own[0], box) for box in own)
        require(right, f"{self.name}: actions", rule, space)
        return low, high

    def reset(self) -> dict[str, Tensor]:
        """Every environment at its start; what is seen there, by name, `(B, …)`."""
        for i, (env, start) in enumerate(zip(self.each, self.starts, strict=True)):
            with foreign(f"{self.name}: reset of environment {self.first + i}"):
                self.raw[i] = _kept(self.begin(env, start))
        self.done[:], self.success[:], self.looked = False, np.nan, True
        self.progress = self.first_progress()
        return self.observations()

    def step(self, actions: Tensor) -> dict[str, Tensor]:
        """One step of those that have not ended; the others stay as they are."""
        for i in np.flatnonzero(~self.done):
            action = self.given(actions[i], self.each[i])
            with foreign(f"{self.name}: step of environment {self.first + i}"):
                seen, reward, ended, cut, info = self.each[i].step(action)
            earned = _number(reward)
            require(np.isfinite(earned), f"{self.name}: reward", "finite", reward)
            for what, flag in (("terminated", ended), ("truncated", cut)):
                require(_number(flag) in (0, 1), f"{self.name}: {what}", "true or false", flag)
            self.progress[i] = self.progress_of(float(self.progress[i]), earned, info)
            self.success[i] = np.fmax(self.success[i], self.success_of(info))
            self.done[i] = bool(_number(ended) or _number(cut))
            if not self.done[i]:  # what is seen after the end is for nobody, and may be anything
                self.raw[i] = _kept(seen)
        return self.observations()

    def close(self) -> None:
        """Let go of what each holds, such as a window, or a video that is not written yet; some hold nothing."""
        for i, env in enumerate(self.each):
            with foreign(f"{self.name}: close of environment {self.first + i}"), suppress(AttributeError):
                env.close()

    def observations(self) -> dict[str, Tensor]:
        """What is seen, by name, dotted within mappings, `(B, …)`; pictures are brought to `(B, C, H, W)`."""
        what = f"{self.name}: observation of environment"
        shown = [flattened(raw, f"{what} {self.first + i}") for i, raw in enumerate(self.raw)]
        for i, each in enumerate(shown):
            rule = f"by the names of all, {', '.join(map(str, shown[0]))}"
            require(each.keys() == shown[0].keys(), f"{what} {self.first + i}", rule, self.raw[i])
        found = Seen({key: _stacked([each[key] for each in shown]) for key in shown[0]})
        if not found and not isinstance(self.raw[0], Mapping):
            got = short(self.raw[0])
            raise InputError(f"{self.name}: observations must be numbers, or numbers by name, got {got}")
        return found

    def given(self, action: Tensor, env: Any) -> np.ndarray:
        """An action as an environment takes it, in the kind of number of its box."""
        return action.numpy().astype(np.asarray(env.action_space.low).dtype)

    def begin(self, env: Any, start: Any) -> Any:
        """One environment at its start: the first observation."""
        require(int(start) == start, "starts", "whole numbers, the seed of each", start)
        seen = env.reset(seed=int(start))
        pair = isinstance(seen, tuple) and len(seen) == 2
        require(pair, f"{self.name}: reset", "a pair, what is seen and a table", seen)
        return seen[0]

    def first_progress(self) -> Tensor:
        """Progress before the first step, `(B,)`."""
        return torch.zeros(len(self), dtype=torch.float64)

    def progress_of(self, before: float, reward: float, info: dict[str, Any]) -> float:
        """Progress after a step."""
        return before + reward

    def success_of(self, info: Any) -> float:
        """What a step says of success: `is_success`, else `success`, where that is one number, else NaN."""
        table = info if isinstance(info, Mapping) else {}
        found = (_number(table.get(key)) for key in ("is_success", "success"))
        return next((value for value in found if np.isfinite(value)), float("nan"))


class PushT(Environments):
    """Push-T, whose progress is the coverage of the goal by the block: an episode ends where it is above 0.95.

    Args:
        starts: states, `(B, 5)`: agent x and y, block x, y and angle, in pixels and radians.
        size: side of pictures that `picture` draws.
        pictures: whether the block is seen on pictures of 96 × 96 pixels instead of by its corners.
    """

    measure: ClassVar[str] = "coverage"

    def __init__(self, starts: Any, size: int = SIDE, pictures: bool = False):
        states = np.asarray(starts, dtype=np.float64)
        if states.ndim != 2 or states.shape[1] != 5 or not np.isfinite(states).all():
            raise InputError(f"starts: must be finite states of Push-T, (B, 5), got shape {states.shape}")
        make = _pusht_maker(observation_width=size, observation_height=size)
        super().__init__(make, list(states), "Push-T")
        self.easel = PushTEasel() if pictures else None
        self.seen = np.zeros((len(states), 3, SIDE, SIDE) if pictures else 0, dtype=np.uint8)

    def given(self, action: Tensor, env: Any) -> np.ndarray:
        """In float64, as the simulator reckons."""
        return action.double().numpy()

    def begin(self, env: Any, start: Any) -> Any:
        """The state itself: nothing moves before the first action."""
        env.reset(seed=0)
        set_pusht_state(env, start)
        return env.get_obs()

    def first_progress(self) -> Tensor:
        """Coverage at the start."""
        return torch.tensor([round(env._get_coverage(), DIGITS) for env in self.each], dtype=torch.float64)

    def progress_of(self, before: float, reward: float, info: dict[str, Any]) -> float:
        """Coverage after the step."""
        return round(float(info["coverage"]), DIGITS)

    def observations(self) -> dict[str, Tensor]:
        """The agent's position, and the corners of the block or a picture, `(B, 3, 96, 96)` in bytes."""
        found = pusht_observation(np.stack(self.raw))
        if self.easel is None:
            return found
        for i in np.flatnonzero(~self.done & self.looked):  # what has ended looks the same
            self.seen[i] = self.easel.draw(self.raw[i])
        return {"agent": found["agent"], PICTURE: torch.from_numpy(self.seen.copy())}

    def picture(self, i: int) -> np.ndarray:
        """Environment `i` as it is, uint8 `(H, W, 3)`, drawn without a screen."""
        return self.each[i]._render(visualize=False)


class PushTEasel:
    """Draws states of Push-T, those of demonstrations as those of episodes.

    The simulator it draws by never moves: one that does also draws the points where agent and block touch, which no
    state holds and no picture of a demonstration would have.
    """

    def __init__(self) -> None:
        self.env = _pusht_maker()()
        self.env.reset(seed=0)
        self.pygame, self.cv2 = (need(name, EXTRA, "pictures of Push-T") for name in ("pygame", "cv2"))

    def draw(self, state: Any) -> np.ndarray:
        """A state `(5,)` as bytes, `(3, 96, 96)`: what the simulator itself makes of it, in less time."""
        set_pusht_state(self.env, state)
        screen = self.env._draw()
        shape = (screen.get_height(), screen.get_width(), 3)
        pixels = np.frombuffer(self.pygame.image.tobytes(screen, "RGB"), dtype=np.uint8).reshape(shape)
        return np.moveaxis(self.cv2.resize(pixels, (SIDE, SIDE)), -1, 0)


def pusht_pictures(states: Any) -> np.ndarray:
    """States of Push-T, `(T, 5)`, as a policy sees them in an episode: uint8 `(T, 3, 96, 96)`."""
    states, easel = pusht_states(states).numpy(force=True), PushTEasel()
    return np.stack([easel.draw(state) for state in states])


def set_pusht_state(env: Any, state: Any) -> None:
    """Agent and block at rest where the state says, to the last bit."""
    agent, block = env.agent, env.block
    agent.position = tuple(map(float, state[:2]))
    block.angle = float(state[4])
    block.position = tuple(map(float, state[2:4]))
    for body in (agent, block):
        body.velocity, body.angular_velocity = (0.0, 0.0), 0.0
        env.space.reindex_shapes_for_body(body)


def pusht_starts(n: int = 32, seed: int = 0) -> np.ndarray:
    """`n` states of Push-T, `(n, 5)`, from the law of the simulator's own: start i of a seed is the same for good.

    Agent within [50, 450)², block within [100, 400)², whole pixels each, and any angle.

    >>> pusht_starts(1).round(3).tolist()
    [[170.0, 66.0, 319.0, 382.0, -2.158]]
    """
    require_count("starts", n)
    unit = np.array([[derive(seed, "pusht start", i, k) / 2**56 for k in range(5)] for i in range(n)])
    low, width = np.array([50, 50, 100, 100]), np.array([400, 400, 300, 300])
    return np.concatenate([low + np.floor(width * unit[:, :4]), np.pi * (2 * unit[:, 4:] - 1)], 1)


def gym_environments(name: str, starts: Sequence[int], /, **options: Any) -> Environments:
    """Environments of Gymnasium by their name, from seeds; `options` are their own arguments.

    MODULE:NAME imports a module, which may lie in the working directory, that registers the name.
    """
    gymnasium, here = need("gymnasium", EXTRA, f"the environment {name!r}"), os.getcwd()
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    sys.path.insert(0, here)
    try:
        with foreign(f"env: making {name!r}"):
            try:
                return Environments(lambda: gymnasium.make(name, **options), starts, name)
            except gymnasium.error.Error as error:
                raise InputError(f"env: {' '.join(str(error).split())}") from error
            except ModuleNotFoundError as error:  # MODULE:NAME says which package has it
                text = f"must be of an installed package, or of a module in {here}, got {name!r}: {error}"
                raise MissingDependencyError(f"env: {text}") from error
    finally:
        sys.path.remove(here)


def _pusht_maker(**options: Any) -> Callable[[], Any]:
    """What makes Push-T, which draws without a screen; a package that it needs is named where it is missing."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    gymnasium = need("gymnasium", EXTRA, "Push-T")
    need("gym_pusht", EXTRA, "Push-T")
    try:
        found = version("gym-pusht")
    except PackageNotFoundError:
        found = "0"
    if tuple(int(part) for part in found.split(".")[:3] if part.isdigit()) < LEAST:
        least = ".".join(map(str, LEAST))
        text = f"Push-T needs gym-pusht {least} or later, got {found}: pip install 'metastable[{EXTRA}]'"
        raise MissingDependencyError(text)

    def make() -> Any:
        with foreign("Push-T"):
            try:
                return gymnasium.make(PUSHT, obs_type="state", **options).unwrapped
            except ImportError as error:
                text = f"Push-T: {error}; pip install 'metastable[{EXTRA}]'"
                raise MissingDependencyError(text) from error

    return make


def vectors_of(actions: Any, shape: Sequence[int], name: str) -> Tensor:
    """What a policy answered as finite vectors of this shape, `(B, A)`; `name` is the environment's."""
    found = torch.as_tensor(actions)
    if found.dim() == len(shape) and found.shape[-1] != shape[-1]:
        numbers = f"{found.shape[-1]} numbers, those of the environment {shape[-1]}"
        raise InputError(f"{name}: actions of the policy have {numbers}")
    if tuple(found.shape) != tuple(shape):
        raise InputError(f"{name}: actions must be {tuple(shape)}, got {tuple(found.shape)} of the policy")
    if not bool(found.isfinite().all()):
        raise InputError(f"{name}: the policy gave an action that is not finite")
    return found


def _kept(seen: Any) -> Any:
    """A copy, as the next may be written into the same array; of tensors, which may have a graph, an array."""
    if isinstance(seen, Mapping):
        return {key: _kept(value) for key, value in seen.items()}
    if not isinstance(seen, Tensor):
        return deepcopy(seen)
    plain = seen.detach().to("cpu", copy=True)
    return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()


def _number(given: Any) -> float:
    """A reward or a flag, an array of one number too; NaN where it is none."""
    with suppress(TypeError, ValueError):
        return float(_kept(given).item() if isinstance(given, Tensor) else np.asarray(given).item())
    return float("nan")


def _stacked(values: list[Any]) -> Tensor | str:
    """Observations of several as one tensor, channels of pictures first; of what is no such thing, why."""
    try:
        rows = np.stack([np.asarray(value) for value in values])
    except ValueError:
        return SEVERAL
    if rows.dtype.kind not in "biuf":
        return "not an array of numbers"
    last = rows.dtype == np.uint8 and rows.ndim == 4 and rows.shape[3] in CHANNELS
    return torch.as_tensor(np.moveaxis(rows, -1, 1) if last else rows)
