"""Experiments as data: arms, trained on the same problem again and again, and what was seen on the way.

An experiment says which methods it compares (`Arm`), what they start from (`Problem`), what it watches in an update
and what it keeps of a training (`Trials`). What comes back has the numbers that were watched as arrays (`Curves`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metastable.api import fit
from metastable.core.errors import DivergenceError
from metastable.core.random import derive
from metastable.methods import Method
from metastable.runs.run import Run
from metastable.training.config import Adam, Schedule

from .base import SCALES, Bench

Line = Mapping[str, Any]
"""The metrics of one logged update."""


def by_scale(shared: Mapping[str, Any] | None = None, **each: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """A table of settings: what all scales share, then for each setting its values from smoke to gpu.

    >>> by_scale({"rate": 0.1}, steps=(10, 100))
    {'smoke': {'rate': 0.1, 'steps': 10}, 'cpu': {'rate': 0.1, 'steps': 100}}
    """
    columns = zip(*each.values(), strict=True)
    return {
        scale: {**(shared or {}), **dict(zip(each, column, strict=True))}
        for scale, column in zip(SCALES, columns, strict=False)
    }


def by_adam(bench: Bench, batch: int | None, **others: Any) -> dict[str, Any]:
    """Settings of `fit`: Adam with the steps and the rate of the scale, which falls along a cosine, and others."""
    own = {"steps": bench.steps, "batch_size": batch, "optimiser": Adam(bench.rate)}
    return {**own, "schedule": Schedule("cosine"), **others}


@dataclass(frozen=True)
class Arm:
    """One of the methods that are compared.

    Attributes:
        name: in rows and figures.
        method: with its settings.
        settings: of `fit`, in the place of those that all arms share.
        about: what sets it apart, for its problem and its rows.
    """

    name: str
    method: Method[Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    about: Any = None


class Problem(NamedTuple):
    """What a training starts from: a fresh model (or its settings), data, and what is known of their law."""

    model: Any
    data: Any
    truth: Any = None


class Curves:
    """What was logged and watched in a training: by name, an array with one number for each line of its log.

    >>> curves = Curves()
    >>> curves.note({"step": 1, "mass": 0.5})
    >>> curves.note({"step": 2, "mass": 0.25, "ess": 0.75})
    >>> curves["mass"], curves["ess"]
    (array([0.5 , 0.25]), array([ nan, 0.75]))
    """

    def __init__(self, lines: Iterable[Line] = ()):
        self.lines = list(lines)

    def note(self, line: Line) -> None:
        """One line more."""
        self.lines.append(line)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        return np.array([line.get(name, math.nan) for line in self.lines], dtype=float)


@dataclass
class Trial:
    """One training.

    Attributes:
        arm: what was trained.
        seed: of its random numbers.
        curves: what was logged and watched.
        kept: what the experiment keeps of it; None of a training that the guard stopped.
        stopped: the update at which the guard stopped it.
    """

    arm: Arm
    seed: int
    curves: Curves = field(default_factory=Curves)
    kept: Any = None
    stopped: int | None = None


def seed_of_repeat(bench: Bench, arm: Arm, repeat: int) -> int:
    """One seed for all arms of a repeat, which then see the same data."""
    return derive(bench.seed, "repeat", repeat) % 2**31


@dataclass(frozen=True)
class Trials:
    """Every arm on every repeat.

    Attributes:
        arms: what is compared.
        problem: from an arm and a seed, what it starts from.
        settings: of `fit`, for all arms.
        repeats: trainings of each arm.
        seed: of a repeat of an arm.
        watch: from the problem and the metrics of an update, more numbers for the curves.
        from_start: whether it also watches before the first update, as update 0.
        keep: of a trial, its problem and its finished run, what is kept when these are let go.
        may_stop: whether a training that the guard stops is an outcome, and no error.
        words: of a finished trial, for whoever waits.
        records: classes that what is kept is made of, beside plain values, arrays and tensors.
    """

    arms: Sequence[Arm]
    problem: Callable[[Arm, int], Problem]
    settings: Mapping[str, Any]
    repeats: int = 1
    seed: Callable[[Bench, Arm, int], int] = seed_of_repeat
    watch: Callable[[Problem, Line], Line] = lambda problem, line: {}
    from_start: bool = False
    keep: Callable[[Trial, Problem, Run], Any] = lambda trial, problem, run: None
    may_stop: bool = False
    words: Callable[[Trial], str] = lambda trial: "done"
    records: Sequence[type] = ()

    def run(self, bench: Bench) -> dict[str, list[Trial]]:
        """The trials of each arm by its name, in the order of repeats."""
        todo = [(arm, repeat) for repeat in range(self.repeats) for arm in self.arms]
        made = bench.finished.each([partial(self.trial, bench, arm, repeat) for arm, repeat in todo])
        return {arm.name: [trial for trial in made if trial.arm.name == arm.name] for arm in self.arms}

    def trial(self, bench: Bench, arm: Arm, repeat: int) -> Trial:
        """One training, or what was kept of it before the command was stopped."""
        seed, name = self.seed(bench, arm, repeat), f"{arm.name}, repeat {repeat}"

        def make() -> tuple[list[Line], Any, int | None]:
            made = self.train(bench, arm, seed)
            return made.curves.lines, made.kept, made.stopped

        about = {"trial_seed": seed, "method": arm.method, "fit": {**self.settings, **arm.settings}}
        (lines, kept, stopped), before = bench.finished.once(name, make, self.records, **about)
        trial = Trial(arm, seed, Curves(lines), kept, stopped)
        bench.say(f"{name}: {self.words(trial)}{' (made before)' if before else ''}")
        return trial

    def train(self, bench: Bench, arm: Arm, seed: int) -> Trial:
        """One training, to its end or to where the guard stops it."""
        problem, trial = self.problem(arm, seed), Trial(arm, seed)

        def note(line: Line) -> None:
            trial.curves.note({**line, **self.watch(problem, line)})

        if self.from_start:
            note({"step": 0})
        settings = {
            "units": "none",
            "device": bench.device,
            "evaluate": False,
            **self.settings,
            **arm.settings,
        }
        try:
            run = fit(problem.model, problem.data, arm.method, seed=seed, progress=note, **settings)
        except DivergenceError as error:
            if not self.may_stop:
                raise
            trial.stopped = error.step
        else:
            trial.kept = self.keep(trial, problem, run)
        return trial


def last(trials: Iterable[Trial], name: str) -> NDArray[np.float64]:
    """What each trial ended with, `(trials,)`."""
    return np.array([trial.curves[name][-1] for trial in trials])


def mean(values: Iterable[float]) -> float:
    """Of numbers, one for each trial."""
    return float(np.mean(list(values)))


def draw_curves(
    axes: Any, trials: Iterable[Trial], name: str, colour: str, label: str | None = None, **look: Any
) -> None:
    """One line for each trial, of which the first carries the label; a cross where the guard stopped it."""
    look = {"color": colour, "lw": 1.2, "alpha": 0.8, **look}
    for i, trial in enumerate(trials):
        steps, values = trial.curves["step"], trial.curves[name]
        axes.plot(steps, values, label=None if i else label, **look)
        if trial.stopped is not None and len(steps):
            axes.plot(steps[-1], values[-1], "x", color=colour, ms=5, mew=1.5)
