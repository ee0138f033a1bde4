"""Demonstrations: episodes of observations and actions, cut into windows that a policy learns from.

At step i of an episode a policy has seen the last N_ctx observations and says the next N_pred actions:

| | |
|---|---|
| context | o[i − N_ctx + 1], …, o[i] |
| chunk | a[i], …, a[i + N_pred − 1], of which a[i] answers o[i] |

Where an action is the next position, a[i] = y[i + 1], this is p(y[i + 1], …, y[i + N_pred] | y[i], …,
y[i − N_ctx + 1]) of S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies*, TMLR 2024,
Sections 7.3 and 7.4.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import InputError, require, require_choice, require_count
from ..core.labels import integers
from ..core.random import derive, generator
from .arrays import Dataset
from .checks import check_data

STATE = "state"
"""Name of observations that are one array."""
ACTION = "action"
"""Name of the actions among the numbers that are scaled."""
STILL = 1e-6
"""Of an action that never changes, what stands for half its range."""
NOTHING = 1e-30
"""An action below this is as good as zero."""
BLUR = 1e-4
"""Of the range of a number, far below the noise that trainings put on it."""
CHANNELS = (1, 3, 4)
"""Of pictures: grey, colour, and colour with a fourth, such as depth."""


@dataclass(frozen=True, eq=False)
class Demonstrations:
    """Episodes, one after the other.

    Attributes:
        observations: by name, `(T, …)` each: finite floating numbers, or pictures as uint8, `(T, C, H, W)`.
        actions: `(T, A)`, finite.
        ends: one past the last step of each episode, int64 `(E,)`; the last is T.
        name: where they came from, for people.
        noisy: names of the observations that σ_pert may perturb: by default all that are no pictures.

    >>> two = Demonstrations.of(np.arange(5.0), np.arange(5.0), [2, 5])
    >>> len(two), two.lengths.tolist(), two.some([1]).actions.flatten().tolist()
    (2, [2, 3], [2.0, 3.0, 4.0])
    """

    observations: dict[str, Tensor]
    actions: Tensor
    ends: Tensor
    name: str = "demonstrations"
    noisy: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        observations: Any,
        actions: Any,
        ends: Any = None,
        name: str = "demonstrations",
        noisy: Sequence[str] | None = None,
    ) -> Demonstrations:
        """Demonstrations that are checked: one observation for each action, finite numbers, ends in order.

        `observations` that are no mapping are one array, by the name `state`. Without `ends` all is one episode.
        """
        actions = _numbers(actions, f"{name}: actions").flatten(1)
        named = observations if isinstance(observations, Mapping) else {STATE: observations}
        seen = {
            key: _observed(value, len(actions), f"{name}: observations.{key}") for key, value in named.items()
        }
        require(bool(seen), f"{name}: observations", "at least one array", named)
        rule = f"named anything but {ACTION!r}, as the actions are; call what was done before by another name"
        require(ACTION not in seen, f"{name}: observations", rule, list(seen))
        numbers = tuple(key for key, value in seen.items() if value.dtype != torch.uint8)
        for key in noisy or ():
            require_choice(f"{name}: noisy", key, numbers)
        stops = _ends([len(actions)] if ends is None else ends, len(actions), name)
        return cls(seen, actions, stops, name, numbers if noisy is None else tuple(noisy))

    @classmethod
    def joined(cls, parts: Sequence[Demonstrations], name: str = "demonstrations") -> Demonstrations:
        """Episodes of several, one after the other: all have observations and actions of the same shapes.

        >>> one = Demonstrations.of(np.arange(3.0), np.arange(3.0))
        >>> Demonstrations.joined([one, one]).ends.tolist()
        [3, 6]
        """
        require(bool(parts), f"{name}: parts", "at least one", parts)
        first = parts[0]
        for part in parts[1:]:
            rule = f"of the shapes of {first.name}, {first.shapes}"
            same = part.shapes == first.shapes and part.noisy == first.noisy  # which pictures are not
            require(same, part.name, rule, part.shapes)
        seen = {key: torch.cat([part.observations[key] for part in parts]) for key in first.observations}
        ends = torch.cat([part.lengths for part in parts]).cumsum(0)
        return cls(seen, torch.cat([part.actions for part in parts]), ends, name, first.noisy)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one observation by name, and of one `action`."""
        return {key: tuple(x.shape[1:]) for key, x in {**self.observations, ACTION: self.actions}.items()}

    def __repr__(self) -> str:
        steps = f"{len(self)} episodes, {len(self.actions)} steps"
        return (
            f"Demonstrations({self.name}: {steps}, {', '.join(f'{k} {v}' for k, v in self.shapes.items())})"
        )

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def starts(self) -> Tensor:
        """The first step of each episode, `(E,)`."""
        return torch.cat([self.ends.new_zeros(1), self.ends[:-1]])

    @property
    def lengths(self) -> Tensor:
        """Steps of each episode, `(E,)`."""
        return self.ends - self.starts

    def digest(self) -> str:
        """Sixteen hexadecimal digits of the sha256 of all arrays, by which one tells others."""
        sha, parts = hashlib.sha256(), {**self.observations, "actions": self.actions, "ends": self.ends}
        for name in sorted(parts):
            sha.update(f"{name} {tuple(parts[name].shape)} {parts[name].dtype}".encode())
            sha.update(parts[name].cpu().contiguous().numpy().tobytes())
        return sha.hexdigest()[:16]

    def some(self, episodes: Sequence[int] | Tensor) -> Demonstrations:
        """Some of the episodes, in this order."""
        starts, ends = self.starts.tolist(), self.ends.tolist()
        steps = torch.cat([torch.arange(starts[e], ends[e]) for e in map(int, episodes)])
        lengths = self.lengths[torch.as_tensor(episodes)]
        seen = {key: value[steps] for key, value in self.observations.items()}
        return Demonstrations(seen, self.actions[steps], lengths.cumsum(0), self.name, self.noisy)

    def split(self, fraction: float = 0.1, seed: int = 0) -> tuple[Demonstrations, Demonstrations]:
        """(train, held_out): whole episodes, so that no window of one part has steps of the other."""
        require(0 < fraction < 1, "fraction", "a number between 0 and 1 (the share held out)", fraction)
        require(len(self) > 1, f"{self.name}: episodes", "at least 2 to hold some out", len(self))
        held = min(max(round(fraction * len(self)), 1), len(self) - 1)
        order = torch.randperm(len(self), generator=generator(derive(seed, "episodes")))
        return self.some(order[held:].sort().values), self.some(order[:held].sort().values)

    def windows(self, context: int = 2, prediction: int = 16, *, padded: bool = True) -> Windows:
        """Every step of every episode with the observations before it and the actions from it on.

        Args:
            context: N_ctx.
            prediction: N_pred.
            padded: repeat an episode's first observation before it and its last action after it, so that every step
                has a window, T of them. Without, only the windows that lie inside their episode are taken, as the
                paper does, and an episode that has none is refused.
        """
        require_count("context", context)
        require_count("prediction", prediction)
        starts, ends = self.starts.tolist(), self.ends.tolist()
        before, after = (0, 0) if padded else (context - 1, prediction - 1)
        for episode, length in enumerate(self.lengths.tolist()):
            if length <= before + after:
                raise InputError(
                    f"{self.name}: episode {episode} has {length} steps, and a window of {context} observations "
                    f"and {prediction} actions needs {before + after + 1}; leave the episode out, or pad"
                )
        places = [torch.arange(s + before, e - after) for s, e in zip(starts, ends, strict=True)]
        episodes = torch.repeat_interleave(torch.arange(len(places)), torch.tensor([len(p) for p in places]))
        return Windows(self, context, prediction, torch.cat(places), episodes)


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows over episodes; nothing is copied before it is asked for.

    Attributes:
        demonstrations: the episodes.
        context: N_ctx.
        prediction: N_pred.
        step: i of each window, int64 `(n,)`, counted over all episodes.
        episode: which one it belongs to, int64 `(n,)`.
    """

    demonstrations: Demonstrations
    context: int
    prediction: int
    step: Tensor
    episode: Tensor

    def __len__(self) -> int:
        return len(self.step)

    def contexts(self, rows: Any = slice(None)) -> dict[str, Tensor]:
        """o[i − N_ctx + 1], …, o[i] by name, `(n, N_ctx, …)`; pictures stay bytes."""
        steps = self._steps(rows, torch.arange(1 - self.context, 1))
        return {key: value[steps] for key, value in self.demonstrations.observations.items()}

    def chunks(self, rows: Any = slice(None)) -> Tensor:
        """a[i], …, a[i + N_pred − 1], `(n, N_pred, A)`."""
        return self.demonstrations.actions[self._steps(rows, torch.arange(self.prediction))]

    def dataset(self, scaling: Scaling | None = None) -> Dataset:
        """Rows for `fit`: chunks `(n, N_pred·A)` given contexts `(n, c)`, both scaled, grouped by episode."""
        scaling = Scaling.fit(self.demonstrations) if scaling is None else scaling
        x, given = scaling.scale_actions(self.chunks()).flatten(1), scaling.pack(self.contexts())
        return Dataset.of(x, self.demonstrations.name, given=given, groups=self.episode)

    def _steps(self, rows: Any, offsets: Tensor) -> Tensor:
        """Steps beside those of some windows, none of them outside of the window's own episode."""
        first = self.demonstrations.starts[self.episode[rows]][:, None]
        last = self.demonstrations.ends[self.episode[rows]][:, None] - 1
        return (self.step[rows][:, None] + offsets).clamp(first, last)


@dataclass(frozen=True, eq=False)
class Scaling:
    """Numbers as a policy's model sees them: every one from −1 to 1 over the demonstrations, pictures too.

    A number is x = middle + half·u, and σ_pert is in units of u. An observation that never changes has half = 1. An
    action that never changes has a millionth of itself, so that what is drawn of it comes back as it was shown.

    Attributes:
        middle: by name of an observation, and `action`, of the shape of one of them: float32, or float64 where
            float32 would blur what the demonstrations hold (`wide` in a file).
        half: likewise.
        pictures: names of observations that are bytes, with their shapes.
        noisy: names of the observations that σ_pert may perturb.
    """

    middle: dict[str, Tensor]
    half: dict[str, Tensor]
    pictures: dict[str, tuple[int, ...]]
    noisy: tuple[str, ...]

    @classmethod
    def fit(cls, demonstrations: Demonstrations) -> Scaling:
        """The ranges of these demonstrations."""
        seen = demonstrations.observations
        numbers = {key: value for key, value in seen.items() if value.dtype != torch.uint8}
        numbers[ACTION] = demonstrations.actions
        low, high = ({k: end(v, 0) for k, v in numbers.items()} for end in (torch.amin, torch.amax))
        half = {key: (high[key] - low[key]) / 2 for key in numbers}
        middle = {key: (high[key] + low[key]) / 2 for key in numbers}
        still = {key: torch.ones_like(value) for key, value in middle.items()}
        size = middle[
            ACTION
        ].abs()  # what is as small as nothing counts as zero, and its millionth is a number
        still[ACTION] = STILL * torch.where(size < NOTHING, still[ACTION], size)
        half = {key: torch.where(value > 0, value, still[key]) for key, value in half.items()}
        pictures = {key: tuple(value.shape[1:]) for key, value in seen.items() if key not in numbers}
        return cls(middle, half, pictures, demonstrations.noisy)

    @property
    def names(self) -> tuple[str, ...]:
        """Observations in the order in which they are packed: numbers, then pictures."""
        return (*(key for key in self.middle if key != ACTION), *self.pictures)

    def pack(self, contexts: Mapping[str, Any]) -> Tensor:
        """Contexts by name, `(B, N_ctx, …)` each, as one vector each, `(B, c)`."""
        values = self.fitting(contexts, 2)
        parts = {key: values[key].float() / 127.5 - 1 for key in self.pictures}
        parts |= {key: self._in(key, values[key]) for key in self.names if key not in parts}
        return torch.cat([parts[key].flatten(1) for key in self.names], 1)

    def fitting(self, observations: Mapping[str, Any], ahead: int = 1) -> dict[str, Tensor]:
        """Observations as tensors, `ahead` dimensions before those of each: finite, and of the shapes shown."""
        values = self.known(observations)
        for key, value in values.items():
            shape, got = self.shape(key), tuple(value.shape[ahead:])
            if value.dim() != ahead + len(shape) or got != shape:
                raise InputError(
                    f"observation.{key}: must have shape {shape}, as in the demonstrations, got {got}"
                )
            bad = int((~value.isfinite()).sum())
            if bad:
                raise InputError(
                    f"observation.{key}: must be finite, got {bad} NaN or infinite of {value.numel()} values"
                )
            if key in self.pictures and value.is_floating_point() and value.numel():
                low, high = value.aminmax()
                if low < 0 or high > 255 or 0 < high <= 1:  # from 0 to 1 all would be black
                    rule = "be bytes, or numbers from 0 to 255, as in the demonstrations"
                    raise InputError(f"observation.{key}: must {rule}, got {low:.4g} to {high:.4g}")
        return values

    def known(self, observations: Mapping[str, Any]) -> dict[str, Tensor]:
        """Those of the observations that the demonstrations had, as tensors of several; others are left alone."""
        if any(key not in observations for key in self.names):
            raise InputError(
                f"observation: must have {', '.join(self.names)}, as the demonstrations had; got "
                f"{', '.join(map(str, observations)) or 'nothing'}"
            )
        try:
            values = {key: torch.as_tensor(observations[key]) for key in self.names}
        except (TypeError, ValueError) as error:
            raise InputError(f"observation: must hold numbers: {error}") from error
        for key, value in values.items():
            shape = self.shape(key)
            if tuple(value.shape) == shape:
                rule = f"be of B environments, (B, {str(shape)[1:]}; one is observation[None]"
                raise InputError(f"observation.{key}: must {rule}, got {shape}")
        return values

    def shape(self, key: str) -> tuple[int, ...]:
        """Of one observation of this name."""
        return self.pictures[key] if key in self.pictures else tuple(self.middle[key].shape)

    def noise_mask(self, context: int) -> tuple[float, ...]:
        """1 for every number of a packed context that σ_pert may perturb, else 0."""
        shapes = {key: tuple(value.shape) for key, value in self.middle.items()} | self.pictures
        numbers = {key: context * math.prod(shapes[key]) for key in self.names}
        return tuple(float(key in self.noisy) for key in self.names for _ in range(numbers[key]))

    def scale_actions(self, actions: Tensor) -> Tensor:
        """Actions `(…, A)` from −1 to 1."""
        return self._in(ACTION, actions)

    def to_actions(self, u: Tensor) -> Tensor:
        """The inverse of `scale_actions`."""
        u = u.to(torch.promote_types(u.dtype, self.middle[ACTION].dtype))
        return u * self.half[ACTION].to(u) + self.middle[ACTION].to(u)

    def _in(self, key: str, values: Tensor) -> Tensor:
        values = values.to(self.middle[key].dtype)
        return ((values - self.middle[key].to(values)) / self.half[key].to(values)).float()

    def as_json(self) -> dict[str, Any]:
        """The numbers, as a policy's file keeps them."""
        parts = {name: {k: v.tolist() for k, v in vars(self)[name].items()} for name in ("middle", "half")}
        pictures = {k: list(v) for k, v in self.pictures.items()}
        wide = [k for k, v in self.middle.items() if v.dtype == torch.float64]
        said = {**parts, "pictures": pictures, "noisy": list(self.noisy)}
        return {**said, "wide": wide} if wide else said

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Scaling:
        """The inverse of `as_json`."""
        wide = {k: torch.float64 for k in kept.get("wide", ())}
        middle, half = (
            {k: torch.tensor(v, dtype=wide.get(k, torch.float32)) for k, v in kept[name].items()}
            for name in ("middle", "half")
        )
        shapes = [{k: tuple(v.shape) for k, v in part.items()} for part in (middle, half)]
        alike = shapes[0] == shapes[1] and ACTION in middle
        require(alike, "scaling.half", f"of the shapes of middle, {ACTION} among them", shapes[1])
        return cls(middle, half, {k: tuple(v) for k, v in kept["pictures"].items()}, tuple(kept["noisy"]))


def _observed(value: Any, steps: int, name: str) -> Tensor:
    """Numbers, finite and floating, or pictures as bytes: one for each step."""
    array = value if isinstance(value, Tensor) else np.asarray(value)
    if array.ndim == 0 or len(array) != steps:
        got = len(array) if array.ndim else repr(value)
        last = "; leave out the last of an episode, which no action answers" if got == steps + 1 else ""
        raise InputError(f"{name}: must be one for each of the {steps} actions, got {got}{last}")
    if array.ndim != 4 or str(array.dtype).removeprefix("torch.") != "uint8":
        return _numbers(array, name)
    if array.shape[1] not in CHANNELS and array.shape[3] in CHANNELS:
        raise InputError(
            f"{name}: pictures must be (T, C, H, W), got {tuple(array.shape)}, whose channels are last; give "
            "numpy.moveaxis(pictures, 3, 1)"
        )
    return torch.as_tensor(array)


def _numbers(value: Any, name: str) -> Tensor:
    """Finite and floating: float32, unless that would blur a number by more than `BLUR` of its range."""
    values = check_data(value, name, dtype=None, least=1)
    blur = torch.finfo(torch.float32).eps * values.abs().amax(0)
    extent = values.amax(0) - values.amin(0)
    blurred = bool(((blur > BLUR * extent) & (extent > 0)).any())
    return values if blurred else check_data(values, name, least=1)  # which refuses what float32 cannot hold


def _ends(ends: Any, steps: int, name: str) -> Tensor:
    values = integers(ends, f"{name}: ends")
    right = values.dim() == 1 and len(values) > 0 and int(values[0]) > 0 and bool((values.diff() > 0).all())
    if not right or int(values[-1]) != steps:
        raise InputError(
            f"{name}: ends: must be one past the last step of each episode, rising to the {steps} steps there are, "
            f"got {values.flatten()[:5].tolist()}{' …' if values.numel() > 5 else ''}"
        )
    return values
