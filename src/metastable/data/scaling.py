"""Numbers of demonstrations as a policy's model sees them, and back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import InputError, require
from ..core.pixels import Frames
from .checks import as_array

if TYPE_CHECKING:
    from .demonstrations import Demonstrations

ACTION = "action"
"""Name of the actions among the numbers that are scaled."""
STILL = 1e-6
"""Of an action that never changes, what stands for half its range."""
NOTHING = 1e-30
"""An action below this is as good as zero."""
ROUNDED = 8
"""Last digits by which what never changes may still differ, as what is reckoned by several additions does."""
NOISE = 0.005
"""σ_pert at the end of a training: what is spread by less is lost in it."""
RARE = 200
"""One row of so many may lie anywhere, above the others and below, before a number's spread is taken."""


@dataclass(frozen=True, eq=False)
class Scaling:
    """Numbers as a policy's model sees them: every one from −1 to 1 over the demonstrations, pictures too.

    A number is x = middle + half·u, and σ_pert is in units of u. An observation that never changes, but for the
    rounding of its last digits, has half = 0 and is u = 0 whatever is seen of it later, since nobody was shown what
    follows from it. An action that never changes has a millionth of itself, so that what is drawn of it comes back
    as it was shown. What lies in the `space` of the actions is, as they are, divided by the largest of them and not
    moved: distances stay what they are.

    Attributes:
        middle: by name of an observation, and `action`, of the shape of one of them: float32, or float64 where
            float32 would blur what the demonstrations hold (`wide` in a file).
        half: likewise.
        pictures: names of observations that are bytes, with their shapes.
        noisy: names of the observations that σ_pert may perturb.
        relative: name of the observation whose last value actions are counted from; empty for none.
    """

    middle: dict[str, Tensor]
    half: dict[str, Tensor]
    pictures: dict[str, tuple[int, ...]]
    noisy: tuple[str, ...]
    relative: str = ""

    @classmethod
    def fit(cls, demonstrations: Demonstrations, prediction: int = 1) -> Scaling:
        """The ranges of these demonstrations; of `relative` actions over chunks of `prediction` of them."""
        seen = demonstrations.observations
        numbers = {key: value for key, value in seen.items() if value.dtype != torch.uint8}
        numbers[ACTION] = demonstrations.actions
        rounding = {key: _rounding(value) for key, value in numbers.items()}
        if demonstrations.relative:
            rounding[ACTION] = _rounding(numbers[ACTION], seen[demonstrations.relative])
            windows = demonstrations.windows(1, prediction)
            origin = seen[demonstrations.relative][windows.step, None]
            numbers[ACTION] = (windows.chunks() - origin).flatten(0, 1)
        low, high = ({k: end(v, 0) for k, v in numbers.items()} for end in (torch.amin, torch.amax))
        middle = {key: (high[key] + low[key]) / 2 for key in numbers}
        half = {key: (high[key] - low[key]) / 2 for key in numbers}
        half = {key: torch.where(x > rounding[key], x, 0.0) for key, x in half.items()}
        _warn_of_glitches(demonstrations, numbers, half, prediction)
        moves, known = half[ACTION] > 0, middle[ACTION].abs() > rounding[ACTION]
        middle[ACTION] = torch.where(moves | known, middle[ACTION], 0.0)
        half[ACTION] = torch.where(moves, half[ACTION], _still(middle[ACTION]))
        if demonstrations.space:
            sizes = {key: float(numbers[key].abs().max()) for key in (ACTION, *demonstrations.space)}
            largest = sizes[ACTION] or max(sizes.values()) or 1.0
            spread = float(numbers[ACTION].std(0, correction=0).max()) / largest
            if 0 < spread < NOISE:
                warnings.warn(
                    f"{demonstrations.name}: space: actions have a spread of {spread:.2g} in units of the largest, "
                    f"and σ_pert of {NOISE} leaves nothing of it to learn; subtract a common origin from them and "
                    f"from {', '.join(demonstrations.space)}",
                    stacklevel=3,
                )
            half |= {key: torch.full_like(half[key], largest) for key in sizes}
            middle |= {key: torch.zeros_like(middle[key]) for key in sizes}
        pictures = {key: tuple(value.shape[1:]) for key, value in seen.items() if key not in numbers}
        return cls(middle, half, pictures, demonstrations.noisy, demonstrations.relative)

    @property
    def names(self) -> tuple[str, ...]:
        """Observations in the order in which they are packed: numbers, then pictures."""
        return (*(key for key in self.middle if key != ACTION), *self.pictures)

    def pack(self, contexts: Mapping[str, Any]) -> Tensor:
        """Contexts by name, `(B, N_ctx, …)` each, as one vector each, `(B, c)`."""
        values = self.fitting(contexts, 2)
        pictures = [(values[key].float() / 127.5 - 1).flatten(1) for key in self.pictures]
        return torch.cat([*self.pack_numbers(values), *pictures], 1)

    def pack_numbers(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """What `pack` makes of each observation in contexts but for pictures, which come behind."""
        return [self._in(key, values[key]).flatten(1) for key in self.names if key not in self.pictures]

    def fitting(self, observations: Mapping[str, Any], ahead: int = 1) -> dict[str, Tensor]:
        """Observations as tensors, `ahead` dimensions before those of each: finite, and of the shapes shown."""
        values = self.known(observations, ahead)
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
            if key in self.pictures and value.dtype != torch.uint8 and value.numel():
                low, high = value.float().aminmax()
                if low < 0 or high > 255 or 0 < high <= 1:  # from 0 to 1 all would be black
                    rule = "be bytes, or numbers from 0 to 255, as in the demonstrations"
                    raise InputError(f"observation.{key}: must {rule}, got {low:.4g} to {high:.4g}")
        return values

    def known(
        self, observations: Mapping[str, Any], ahead: int = 1, left_out: Mapping[str, str] | None = None
    ) -> dict[str, Tensor]:
        """Those of the observations that the demonstrations had, as tensors of several; others are left alone.

        Of one number each, `(B,)` will do for `(B, 1)`, and LeRobot's `observation.NAME` for a missing NAME. What
        was shown and `left_out`, with the reason, is told where something is missing.
        """
        full = {key: f"observation.{key}" for key in self.names}
        own = {key: key if key in observations or full[key] in full else full[key] for key in full}
        if any(place not in observations for place in own.values()):
            got, why = ", ".join(map(str, observations)) or "nothing", (left_out or {}).items()
            left = f"; left out: {', '.join(f'{key} ({reason})' for key, reason in why)}" if why else ""
            names = ", ".join(self.names)
            raise InputError(f"observation: must have {names}, as the demonstrations had; got {got}{left}")
        values: dict[str, Tensor] = {}
        for key in self.names:
            name, given = full[key], observations[own[key]]
            given = given if isinstance(given, Tensor) else as_array(given, name)  # which refuses masks
            try:
                values[key] = tensor_of(given)
            except (TypeError, ValueError, RuntimeError) as error:
                raise InputError(f"{name}: must hold numbers: {error}") from error
        for key, value in values.items():
            shape = self.shape(key)
            require(not value.is_complex(), f"observation.{key}", "real numbers", value.dtype)
            if shape == (1,) and value.dim() == ahead:
                values[key] = value[..., None]
            elif tuple(value.shape) == shape:
                rule = f"be of B environments, (B, {', '.join(map(str, shape))}); one is observation[None]"
                raise InputError(f"observation.{key}: must {rule}, got {shape}")
        return values

    def shape(self, key: str) -> tuple[int, ...]:
        """Of one observation of this name."""
        return self.pictures[key] if key in self.pictures else tuple(self.middle[key].shape)

    def pictures_at(self, context: int) -> tuple[int, ...]:
        """Where the pictures of one kind lie in packed contexts: start, count, channels, height and width.

        Empty where there are none.
        """
        rule = "of one name; of several cameras make one by their channels, numpy.concatenate((a, b), 1)"
        require(len(self.pictures) <= 1, "pictures", rule, tuple(self.pictures))
        start = context * sum(self.middle[key].numel() for key in self.names if key not in self.pictures)
        return tuple(n for shape in self.pictures.values() for n in (start, context, *shape))

    def noise_mask(self, context: int) -> tuple[float, ...]:
        """1 for every number of a packed context that changes and that σ_pert may perturb, else 0."""
        each = {key: (half > 0).flatten().tolist() for key, half in self.half.items()}
        each |= {key: [False] * math.prod(shape) for key, shape in self.pictures.items()}
        return tuple(float(k in self.noisy and moves) for k in self.names for moves in context * each[k])

    def noised(self, context: int, rows: Tensor | None) -> tuple[float, ...]:
        """What σ_pert is multiplied with on every number of packed contexts like `rows`, `(n, c)`.

        0 for one that never changes, which has no spread that the noise could be a share of.
        """
        assert rows is not None
        changes = (rows.varies() if isinstance(rows, Frames) else rows.amax(0) > rows.amin(0)).tolist()
        return tuple(m * varies for m, varies in zip(self.noise_mask(context), changes, strict=True))

    def scale_actions(self, actions: Tensor, contexts: Mapping[str, Any] | None = None) -> Tensor:
        """Actions `(…, A)` from −1 to 1; of B contexts `(B, N_ctx, …)`, `(B, …, A)`, where they are `relative`.

        What no action ever moved from where it is counted is 0: its rounding has no unit.
        """
        u = self._in(ACTION, actions - self.origin(actions, contexts))
        return torch.where(self._moves, u, 0.0) if self.relative else u

    def to_actions(self, u: Tensor, contexts: Mapping[str, Any] | None = None) -> Tensor:
        """The inverse of `scale_actions`."""
        u = u.to(torch.promote_types(u.dtype, self.middle[ACTION].dtype))
        return u * self.half[ACTION].to(u) + self.middle[ACTION].to(u) + self.origin(u, contexts)

    def recounted(self, u: Tensor, before: Tensor, contexts: Mapping[str, Any]) -> Tensor:
        """Actions `(B, …, A)` that were scaled for contexts with the `last_seen` `before`, as these have them.

        A number that no action ever moved stays as it is: in units of its own any step is far.
        """
        half = self.half[ACTION].where(self._moves, torch.inf)
        shift = (before - self.last_seen(contexts)) / half
        return u + shift.view(len(u), *[1] * (u.dim() - 2), u.shape[-1]).to(u)

    def last_seen(self, contexts: Mapping[str, Any] | None) -> Tensor:
        """A copy of what actions are relative to, `(B, A)` in double precision."""
        require(contexts is not None, "contexts", f"given, as actions are relative to {self.relative}", None)
        return tensor_of(contexts[self.relative])[:, -1].double().cpu().clone()  # pyright: ignore

    def origin(self, like: Tensor, contexts: Mapping[str, Any] | None) -> Tensor | float:
        """What actions `(B, …, A)` are counted from, 0 where they are not `relative`."""
        if not self.relative:
            return 0.0
        return self.last_seen(contexts).view(len(like), *[1] * (like.dim() - 2), like.shape[-1]).to(like)

    @property
    def _moves(self) -> Tensor:
        """Which numbers of an action some action moved."""
        return self.half[ACTION] != _still(self.middle[ACTION])

    def _in(self, key: str, values: Tensor) -> Tensor:
        values = values.to(self.middle[key].dtype)
        half = self.half[key].to(values)
        return torch.where(half > 0, (values - self.middle[key].to(values)) / half, 0.0).float()

    def as_json(self) -> dict[str, Any]:
        """The numbers, as a policy's file keeps them."""
        parts = {name: {k: v.tolist() for k, v in vars(self)[name].items()} for name in ("middle", "half")}
        pictures = {k: list(v) for k, v in self.pictures.items()}
        wide = [k for k, v in self.middle.items() if v.dtype == torch.float64]
        said = {**parts, "pictures": pictures, "noisy": list(self.noisy)}
        own = {"wide": wide, "relative": self.relative}
        return said | {key: value for key, value in own.items() if value}

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Scaling:
        """The inverse of `as_json`."""
        wide = {k: torch.float64 for k in kept.get("wide", ())}
        middle, half = (
            {k: torch.tensor(v, dtype=wide.get(k, torch.float32)) for k, v in kept[name].items()}
            for name in ("middle", "half")
        )
        shapes = [{k: tuple(v.shape) for k, v in part.items()} for part in (middle, half)]
        finite = all(bool(x.isfinite().all()) for part in (middle, half) for x in part.values())
        require(finite, "scaling", "finite numbers", "NaN or infinite ones")
        alike = shapes[0] == shapes[1] and ACTION in middle
        require(alike, "scaling.half", f"of the shapes of middle, {ACTION} among them", shapes[1])
        pictures, relative = {k: tuple(v) for k, v in kept["pictures"].items()}, kept.get("relative", "")
        rule = "an observation of as many numbers as an action"
        fits = not relative or (relative in middle and middle[relative].shape == middle[ACTION].shape)
        require(fits, "scaling.relative", rule, relative)
        return cls(middle, half, pictures, tuple(kept["noisy"]), relative)


def _rounding(*values: Tensor) -> Tensor:
    """Half the range that rounding alone gives each number of `(T, …)`, or the difference of two of these."""
    return ROUNDED * torch.stack([_last_digit(x) * x.abs().amax(0).double() for x in values]).amax(0)


def _warn_of_glitches(
    demonstrations: Demonstrations, numbers: Mapping[str, Tensor], half: Mapping[str, Tensor], prediction: int
) -> None:
    """Say where a few rows lie so far off that what the others differ by is less than σ_pert."""
    for key, values in numbers.items():
        origin = demonstrations.relative if key == ACTION else ""
        rows, reach = values.flatten(1), half[key].flatten()
        low, high = _usual(rows)
        lost = (high > low) & ((high - low) / 4 < NOISE * reach)  # a quarter is about a standard deviation
        if not lost.any():
            continue
        column, many = int(lost.nonzero()[0]), int(lost.sum())
        shown = rows[:, column][:: prediction if origin else 1]  # of a chunk its first step: that row's own
        away = (shown - (low + high)[column] / 2).abs()
        row, alike = int(away.argmax()), int((away > reach[column] / 2).sum()) - 1
        field = "actions" if key == ACTION else f"observations.{key}"
        place = ", ".join(map(str, np.unravel_index(column, values.shape[1:])))
        which = f"column {place}" + f" (the first of {many} such)" * (many > 1)
        what = f"{shown[row]:.6g}" + f" from {origin}" * bool(origin)
        what += f" (and {alike} more so far off)" * (alike > 0)
        warnings.warn(
            f"{demonstrations.name}: {field}: {which}: row {row} is {what}, where nearly all lie from "
            f"{low[column]:.4g} to {high[column]:.4g}, and σ_pert of {NOISE} of half the whole range leaves "
            "nothing of it to learn; drop or mend such rows: with less noise or none the range stays theirs",
            stacklevel=4,
        )


def _usual(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Ends of each column of `(n, c)` but for one row in `RARE` at either; equal where rounding differs."""
    most = min(max(1, (len(rows) - 1) // RARE) + 1, len(rows))
    high = rows.topk(most, 0, sorted=False).values.amin(0)
    low = rows.topk(most, 0, largest=False, sorted=False).values.amax(0)
    rounding = ROUNDED * torch.finfo(rows.dtype).eps * torch.maximum(low.abs(), high.abs())
    return low, torch.where(high - low > rounding, high, low)


def _last_digit(values: Tensor) -> Tensor:
    """The last digit of each number, as a share of it, by what was written in them.

    Whole numbers are exact, and what is one number throughout adds no range to a difference.
    """
    narrow, whole = (values.float() == values).all(0), (values.round() == values).all(0)
    found = torch.where(narrow, torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps)
    return torch.where(whole | (values == values[0]).all(0), 0.0, found).double()


def _still(middle: Tensor) -> Tensor:
    """What stands for half the range of actions that never change; what is as small as nothing is zero."""
    size = middle.abs()
    return STILL * torch.where(size < NOTHING, torch.ones_like(size), size)


def tensor_of(value: Any) -> Tensor:
    """As a tensor, lists in double precision; arrays that torch cannot lend from or write to are copied."""
    if isinstance(value, Tensor):
        return value.detach().to_dense()
    array = np.asarray(value)
    own = array.flags.writeable and array.dtype.isnative and min(array.strides, default=0) >= 0
    return torch.as_tensor(array if own else array.astype(array.dtype.newbyteorder("="), order="C"))
