"""Rollouts: a policy in many environments at once, an episode table, and what the scores say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from metastable.core.errors import InputError, require, require_count
from metastable.core.random import derive, whole_seed
from metastable.runs.folder import write_arrays, write_json

from .environments import FULL, Environments, PushT, vectors_of
from .intervals import (
    Interval,
    are_rates,
    difference_of,
    mean_over_starts,
    rate_over_starts,
    score_difference,
    score_over_starts,
)
from .policy import Policy
from .workers import Workers, spread

HORIZONS = (200, 300)
"""Steps at which scores are read: the paper's, and the simulator's own."""


class Acting(Protocol):
    """What is rolled out: a `Policy`, or anything with its two methods."""

    def reset(self, seed: int | None = None) -> None:
        """A new episode in every environment."""

    def select_action(self, observation: Any) -> Tensor:
        """The next action of each environment, `(B, A)`."""
        ...


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Episodes of one policy.

    Attributes:
        progress: after each step, float64 `(starts, rollouts, steps)`: coverage in Push-T, else rewards so far.
            After its end an episode keeps its last value.
        lengths: steps that each episode took, int64 `(starts, rollouts)`.
        measure: what progress is.
        name: of the environment.
        clipped: share of actions that lay outside of the environment's box, and were brought to its edge.
        seconds: of all of it.
        acting: seconds spent in the policy.
        starts: where episodes began, so that others are not taken for the same; None where it is not known.
        success: the most that a step's `info` said in `is_success`, or else `success`, `(starts, rollouts)`,
            0 where it said nothing; None where it never did, and of Push-T, whose successes are full scores.
    """

    progress: Tensor
    lengths: Tensor
    measure: str
    name: str
    clipped: float = 0.0
    seconds: float = 0.0
    acting: float = 0.0
    starts: np.ndarray | None = None
    success: Tensor | None = None

    def best(self, steps: int) -> Tensor:
        """The score within `steps`, `(starts, rollouts)`: the most of min(coverage/0.95, 1), or all rewards."""
        if self.measure != "coverage":
            return self.final(steps)
        require_count("steps", steps)
        return (self.progress[..., :steps].amax(-1) / FULL).clamp(max=1)

    def final(self, steps: int) -> Tensor:
        """Progress after `steps`, `(starts, rollouts)`."""
        require_count("steps", steps)
        return self.progress[..., min(steps, self.progress.shape[-1]) - 1]

    @property
    def readings(self) -> dict[str, Callable[[int], Tensor]]:
        """What is read at a step, by name; the first is what `ahead_of` compares."""
        last = {"final": self.final}
        return {"maximum": self.best} | last if self.measure == "coverage" else last

    @property
    def horizons(self) -> list[int]:
        """Steps at which it is read: 200 and 300 as far as it goes; of Push-T all, else the longest episode."""
        longest = self.progress.shape[-1] if self.measure == "coverage" else int(self.lengths.max())
        return [h for h in HORIZONS if h < longest] + [longest]

    def scores(self, level: float = 0.95) -> dict[str, Interval]:
        """Means over starts with their intervals, and the rate of full scores in Push-T, by name.

        Scores that all are 0 or 1 are a rate, see `rate_over_starts`, those of Push-T lie between, see
        `score_over_starts`, and returns have Student's interval, a point where all are the same. Rollouts that are
        copies, as of a policy that draws nothing, count once.
        """
        interval = score_over_starts if self.measure == "coverage" else _of_returns
        return {name: interval(values, level) for name, values in self.scored.items()}

    def means(self) -> dict[str, float]:
        """What `scores` has with intervals, which need two starts."""
        return {name: float(values.double().mean()) for name, values in self.scored.items()}

    @property
    def scored(self) -> dict[str, Tensor]:
        """What `scores` has the means of, `(starts, rollouts)` by name, of rollouts that are copies one."""
        found = {f"{name} at {h}": read(h) for h in self.horizons for name, read in self.readings.items()}
        if self.measure == "coverage":
            found["full score"] = self.best(max(self.horizons)) >= 1
        found |= {} if self.success is None else {"success": self.success}
        return {name: self._apart(values) for name, values in found.items()}

    def _apart(self, values: Tensor) -> Tensor:
        """`values`, or one of each start where all rollouts took the same course: copies say nothing more."""
        courses = (self.progress, self.lengths, *([] if self.success is None else [self.success]))
        copies = all(bool((x == x[:, :1]).all()) for x in courses)
        return values[:, :1] if copies else values

    def table(self) -> list[dict[str, Any]]:
        """One row for each episode."""
        columns = {"steps": self.lengths} | ({} if self.success is None else {"success": self.success})
        for h in self.horizons:
            columns |= {f"{name}_{h}": read(h) for name, read in self.readings.items()}
        starts, rollouts = self.lengths.shape
        rows = [(s, r) for s in range(starts) for r in range(rollouts)]
        return [{"start": s, "rollout": r} | {k: v[s, r].item() for k, v in columns.items()} for s, r in rows]

    def ahead_of(self, other: Rollouts, steps: int | None = None, level: float = 0.95) -> Interval:
        """By how much its mean best score is above that of another policy from the same starts.

        Where few starts tell them apart the spread is not known: of Push-T's scores it is `score_difference`, but
        for episodes that took the same course.
        """
        if (self.name, len(self.progress)) != (other.name, len(other.progress)):
            theirs = f"{len(other.progress)} of {other.name}"
            raise InputError(f"other: must be {len(self.progress)} starts of {self.name}, got {theirs}")
        known = self.starts is not None and other.starts is not None
        if known and not np.array_equal(self.starts, other.starts):  # pyright: ignore
            raise InputError("other: must begin at the same starts, got others")
        longest = max(self.horizons[-1], min(other.horizons[-1], self.progress.shape[-1]))
        steps = longest if steps is None else steps
        made = min(self.progress.shape[-1], other.progress.shape[-1])
        require(steps <= made, "steps", f"at most what both have, {made}", steps)
        ours, theirs = self._apart(self.best(steps)), other._apart(other.best(steps))
        alike = torch.equal(self.progress[..., :steps], other.progress[..., :steps])
        hits = self.measure != "coverage" or bool(ours.any() or theirs.any())  # no coverage at all is no rate
        if self.measure == "coverage" and not alike and not (hits and are_rates(ours, theirs)):
            return score_difference(ours, theirs, level)
        return difference_of(ours, theirs, level, hits)

    def write(self, folder: str | Path, other: str = "", apart: Mapping[str, Interval] | None = None) -> Path:
        """`rollouts.json` with scores and the episode table, and `rollouts.npz` with progress; the first's path.

        `apart` is by how much it is ahead of the `other` policy, which is written, too.
        """
        folder = Path(folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        write_arrays(folder / "rollouts.npz", progress=self.progress.numpy(), lengths=self.lengths.numpy())
        said = {key: {"value": value, "low": None, "high": None} for key, value in self.means().items()}
        found = self.scores() if len(self.progress) > 1 else {}
        said |= {key: value._asdict() for key, value in found.items()}
        facts = {key: vars(self)[key] for key in ("name", "measure", "clipped", "seconds", "acting")}
        more = differences(other, apart or {})
        write_json(folder / "rollouts.json", {**facts, "scores": said, "episodes": self.table(), **more})
        return folder / "rollouts.json"


def _of_returns(values: Tensor, level: float) -> Interval:
    """That of a rate where all are 0 or 1, else Student's over starts."""
    return (rate_over_starts if len(values) > 1 and are_rates(values) else mean_over_starts)(values, level)


def differences(other: str, apart: Mapping[str, Interval]) -> dict[str, Any]:
    """Differences from another policy, as `rollouts.json` has them; nothing of none."""
    said = {name: value._asdict() for name, value in apart.items()}
    return {"against": {"run": other, "differences": said}} if said else {}


def rollout(
    policy: Acting,
    make: Callable[[Sequence[Any]], Environments],
    starts: Sequence[Any],
    *,
    rollouts: int = 1,
    steps: int = 300,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
    workers: int = 1,
) -> Rollouts:
    """Roll a policy out from each start, all episodes in step with one another.

    Args:
        policy: to act.
        make: environments from starts, such as `PushT`, which are closed in the end.
        starts: states of Push-T, or seeds.
        rollouts: episodes from each start, which differ in what the policy draws.
        steps: at most.
        seed: of the policy.
        on_step: told of every step.
        workers: processes that step the environments; with more than 1, `make` must be a function or class of a
            module, or a `functools.partial` of one. The numbers are the same.
    """
    require_count("rollouts", rollouts)
    require_count("steps", steps)
    rule = "several: states of Push-T, or seeds, such as range(32)"
    require(np.ndim(starts) > 0, "starts", rule, starts)
    rule = "all different; several episodes of one are rollouts=…, and intervals know of them"
    require(len({np.asarray(start).tobytes() for start in starts}) == len(starts), "starts", rule, starts)
    begun, thinking, clipped = perf_counter(), 0.0, 0
    rule = "a function from starts to Environments, such as partial(gym_environments, NAME)"
    require(callable(make), "make", rule, make)
    with spread(make, [start for start in starts for _ in range(rollouts)], workers) as worlds:
        require(isinstance(worlds, (Environments, Workers)), "make", rule, worlds)
        low, high = worlds.box
        policy.reset(derive(whole_seed(seed), "rollout"))
        seen, taken = worlds.reset(), np.zeros(len(worlds), dtype=np.int64)
        progress = worlds.progress[:, None].repeat(1, steps)
        for k in range(steps):
            going, asked = ~worlds.done, perf_counter()
            actions = policy.select_action(seen)
            thinking += perf_counter() - asked
            inside, outside = boxed_actions(actions, low, high, worlds)
            clipped += int(outside[torch.from_numpy(going)].sum())
            worlds.looked = type(policy) is not Policy or policy.looks  # others may look at what it does not
            seen, taken = worlds.step(inside), taken + going
            progress[:, k:] = worlds.progress[:, None]
            if on_step is not None:
                on_step(k + 1)
            if worlds.done.all():
                break
    shape, share = (len(starts), rollouts), clipped / max(int(taken.sum()), 1)
    times = {"seconds": perf_counter() - begun, "acting": thinking}
    lengths = torch.from_numpy(taken).view(shape)
    known = (progress.view(*shape, steps), lengths, worlds.measure, worlds.name, share)
    won = torch.from_numpy(worlds.success).view(shape)
    said = None if worlds.measure == "coverage" or won.isnan().all() else won.nan_to_num(0.0)
    return Rollouts(*known, **times, starts=np.asarray(starts), success=said)


def rollout_pusht(policy: Acting, starts: Any, *, pictures: bool = False, **options: Any) -> Rollouts:
    """`rollout` in Push-T from states `(n, 5)`, such as `pusht_starts(32)`; `pictures` as of `PushT`."""
    return rollout(policy, partial(PushT, pictures=pictures), list(np.atleast_1d(starts)), **options)


def boxed_actions(
    actions: Any, low: Tensor, high: Tensor, worlds: Environments | Workers
) -> tuple[Tensor, Tensor]:
    """Actions brought into the environments' box, in its kind of number, and which of them lay outside, `(B,)`."""
    asked = vectors_of(actions, (len(worlds), len(low)), worlds.name).double()
    asked = asked if low.is_floating_point() else asked.round()
    least, most = low.double(), high.double()
    # what lies outside may be beyond the box's kind of number
    inside = torch.where((asked > least) & (asked < most), asked, 0.0).to(low.dtype)
    inside = torch.where(asked <= least, low, torch.where(asked >= most, high, inside))
    return inside, ((asked < least) | (asked > most)).any(1)
