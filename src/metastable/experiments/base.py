"""A paper as data: settings by scale, published numbers and tolerances, and one function that runs it."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from metastable._version import __version__
from metastable.core import processes
from metastable.core.configure import describe
from metastable.core.ending import ending_all
from metastable.core.errors import InputError, nearest, require, require_choice, require_options
from metastable.runs.folder import write_json

from .finished import Finished
from .hands import Hands

RELATIONS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}
SCALES = ("smoke", "cpu", "gpu")


@dataclass(frozen=True)
class Row:
    """One number of an experiment, with what it should be, what the paper has, and the exact answer if any.

    A row without a relation is reported and cannot fail.
    """

    metric: str
    value: float
    relation: str | None = None
    target: float | None = None
    paper: float | str | None = None
    oracle: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the number is where it should be; not a number never is."""
        if self.relation is None or self.target is None:
            return True
        return bool(RELATIONS[self.relation](self.value, self.target))

    def as_json(self) -> dict[str, Any]:
        """As `result.json` holds it, where not a number is null: JSON has no other word for it. Words stay."""
        worded = isinstance(self.value, str)  # benchmarks say which engine ran, and on what
        return {
            "metric": self.metric,
            "value": self.value if worded or math.isfinite(self.value) else None,
            "relation": self.relation,
            "target": self.target,
            "paper": self.paper,
            "ok": self.ok,
            **({} if self.oracle is None else {"oracle": self.oracle}),
        }


class WithSettings:
    """The settings of a scale, each read as an attribute."""

    settings: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["settings"][name]
        except KeyError:
            raise AttributeError(f"the settings of this scale have no {name!r}") from None


@dataclass
class Bench(WithSettings):
    """What an experiment's body is given: settings, seed, device, a folder for pictures, a voice, trials done.

    `changes` are those of the settings that were given in the place of the scale's.
    """

    settings: Mapping[str, Any]
    scale: str
    seed: int
    device: str
    folder: Path
    say: Callable[[str], None] = field(default=lambda text: None)
    finished: Finished = field(default_factory=Finished)
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A name, where it comes from, settings for each scale, and the body that turns them into rows.

    What compares rows with each other, and pictures of that, is made by `compared`: of all rows of a command, or
    of those that several commands made (`joined.join`).
    """

    name: str
    title: str
    paper: str
    scales: Mapping[str, Mapping[str, Any]]
    body: Callable[[Bench], list[Row]]
    compared: Callable[[Bench, list[Row]], list[Row]] = lambda bench, rows: rows


@dataclass(frozen=True)
class Result:
    """Rows of one run of an experiment, settings that were changed for it, and the results that it joins."""

    experiment: str
    scale: str
    seed: int
    device: str
    seconds: float
    rows: list[Row]
    changes: Mapping[str, Any] = field(default_factory=dict)
    parts: Sequence[Mapping[str, Any]] = ()

    @property
    def ok(self) -> bool:
        """Whether every row is."""
        return all(row.ok for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """As `result.json` holds it."""
        return {
            "experiment": self.experiment,
            "scale": self.scale,
            "seed": self.seed,
            "version": __version__,
            "device": self.device,
            "seconds": round(self.seconds, 2),
            **({"changes": describe(self.changes)} if self.changes else {}),
            **({"parts": list(self.parts)} if self.parts else {}),
            "rows": [row.as_json() for row in self.rows],
        }


def find(experiments: Mapping[str, Experiment], name: str) -> Experiment:
    """The experiment of that name; a near miss is named."""
    if name not in experiments:
        raise InputError(f"experiment: unknown name {name!r}{nearest(name, experiments)}")
    return experiments[name]


def changed(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a scale with others in their place; where a setting is several values, one alone will do.

    Of a setting that has fields, such as a network, or is a table, those that are named are changed:
    `energy.filters=16`.

    >>> changed({"noises": (0.3, 0.1), "steps": 10}, {"noises": 0.1})
    {'noises': (0.1,), 'steps': 10}
    """
    require_options(changes, settings)
    made = dict(settings)
    for name, value in changes.items():
        before = settings[name]
        if isinstance(before, (tuple, list)):
            made[name] = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        elif is_dataclass(before) and not isinstance(before, type) and not is_dataclass(value):
            own = [f"{name}.{each.name}" for each in fields(before)]
            require(isinstance(value, Mapping), name, f"given by its fields, as in {own[0]}=VALUE", value)
            require_options((f"{name}.{key}" for key in value), own)
            made[name] = replace(before, **value)
        elif isinstance(before, Mapping) and isinstance(value, Mapping):
            made[name] = {**before, **value}
        else:
            made[name] = value
    return made


def reproduce(
    experiment: Experiment,
    scale: str,
    seed: int,
    out: Path,
    *,
    device: str = "auto",
    say: Callable[[str], None] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Result:
    """Run one experiment, and write `result.json`, its pictures and a report into `out`.

    `changes` are settings in the place of those of the scale. Trials that are done are kept in `out/trials`, and a
    command that was stopped takes them from there; their seconds count as if they were made now. Processes of a
    group share the trials (`hands`); the first writes, and all return the same.
    """
    from metastable.training.engine import Engine

    require_choice("scale", scale, experiment.scales)
    place = str(Engine(device).device)
    settings = changed(experiment.scales[scale], changes or {})
    say = say or (lambda text: None)
    made_with = {"experiment": experiment.name, "scale": scale, "seed": seed}
    made_with |= {f"settings.{key}": value for key, value in describe(settings).items()}
    processes.require_same("reproduce", made_with | {"out": str(out)})
    with processes.together(), ending_all():
        out.mkdir(parents=True, exist_ok=True)
        made_with["device"] = processes.by_first(lambda: place)  # of several GPUs that trials were made on
        hands = Hands(say) if processes.is_many() else None
        say = hands.say if hands else say
        finished = Finished(out / "trials", made_with, say, hands=hands)
        bench = Bench(settings, scale, seed, place, out, say, finished, changes or {})
        began = time.perf_counter()
        rows = hands.work(experiment.body, bench) if hands else experiment.body(bench)
        rows = processes.by_first(lambda: experiment.compared(bench, rows))
        taken = str(finished.seconds)
        before = sum(map(float, processes.exchanged("seconds before", taken) if hands else [taken]))
        seconds = time.perf_counter() - began + before
        result = Result(experiment.name, scale, seed, place, seconds, rows, changes or {})
        return processes.by_first(lambda: written(result, out))


def written(result: Result, out: Path) -> Result:
    """The result, in its folder with its report."""
    from metastable.report import write_report

    write_json(out / "result.json", result.as_json())
    write_report(out)
    return result
