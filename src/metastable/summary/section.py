"""What a section of a judgement is given and what it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from metastable.core.batch import Batch
from metastable.core.errors import require, require_choice
from metastable.core.protocols import is_costly
from metastable.core.random import derive
from metastable.core.units import Coordinates
from metastable.data import ToySet
from metastable.evaluation.diagnosis import Facts, Finding
from metastable.evaluation.image_measures import ImageQuestion
from metastable.runs.rows import as_seen
from metastable.runs.run import Run

COSTLY_ROWS = 1000
"""Rows behind scores where each energy is an ODE solved."""


@dataclass
class Judged:
    """A run with the rows it is judged by, all in the units of its training, where no column outweighs another.

    Attributes:
        run: what is judged. Sections may improve its log Z and its walkers; everything else they give back.
        rows: those for scores, `(n, *event)`, or pairs of a conditional run.
        seed: of every random number.
        train: the rows it was trained on, where they are known; else `rows` again.
        after_training: whether training has just ended, rather than somebody asking later about other rows.
        toy: where the rows were drawn from, if that is known.
        chains: the method as training left it, for a look at its negatives.
        coordinates: the units of training; None where they are the data's own.
        labels: the class of each row, `(n,)`, where there are any.
        classes: names of the classes.
        outsiders: rows of another kind for a classifier to tell apart, by name, in the data's units.
        images: what is asked about samples as pictures, in the data's units.
        log_z_asked: whether log Z is wanted where it takes minutes too.
        before: the run and its rows in the data's units, where they came so.
        samples_from: in words, where the walkers came from.
        found: what sections have measured so far, by name.
        stopped_at: the section at which judging was stopped, where it was.
        stopped_by: what stopped it, in words.
    """

    run: Run
    rows: Batch
    seed: int
    train: Batch | None = None
    after_training: bool = False
    toy: ToySet | None = None
    chains: Any = None
    coordinates: Coordinates | None = None
    labels: Tensor | None = None
    classes: Sequence[str] = ()
    outsiders: Mapping[str, Tensor] = field(default_factory=dict)
    images: ImageQuestion | None = None
    log_z_asked: bool = False
    before: tuple[Run, Tensor] | None = None
    samples_from: str = ""
    found: dict[str, Measured] = field(default_factory=dict)
    stopped_at: str = ""
    stopped_by: str = ""

    @property
    def x(self) -> Tensor:
        """Events of the rows for scores."""
        return self.rows.x

    @cached_property
    def trained_on(self) -> Tensor:
        """Events that the run was trained on, or those for scores where nobody knows.

        They have the noise of training where its units rest on it: without, some directions would have no spread.
        """
        x = (self.rows if self.train is None else self.train).x
        return self.noisy(x) if self.noise_in_units else x

    @property
    def noise_in_units(self) -> bool:
        """Whether the noise of training is what gives directions of its units their spread."""
        return self.coordinates is not None and self.coordinates.events.noise > 0

    def noisy(self, x: Tensor) -> Tensor:
        """Events with the noise that training ended with, since its model is of those."""
        return as_seen(Batch(x), self.run.data_noise, self.coordinates, self.seed).x

    @property
    def costly(self) -> bool:
        """Whether one energy is an ODE solved: scores do with fewer rows then, and pictures with fewer points."""
        return is_costly(self.run.energy)

    def in_data_units(self) -> tuple[Run, Tensor]:
        """The run and the events it was trained on in the data's units."""
        if self.before is not None:
            return self.before
        units = None if self.coordinates is None else self.coordinates.events
        x = self.trained_on
        return self.run.outward(self.coordinates), x if units is None else units.inverse(x)

    def stream(self, name: str) -> int:
        """A seed for one use; of an evaluation that somebody asks for, the seed itself."""
        return derive(self.seed, name) if self.after_training else self.seed


@dataclass(frozen=True)
class Measured:
    """What a section found.

    Attributes:
        numbers: scores by name, log-densities in the units of training.
        arrays: for pictures, by name, in the data's units.
        facts: fields of `evaluation.diagnosis.Facts`, for its checks.
        findings: of the section's own.
    """

    numbers: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    findings: Sequence[Finding] = ()

    def __post_init__(self) -> None:
        known = [f.name for f in fields(Facts)]
        for name in self.facts:
            require_choice("section.facts", name, known)
        for finding in self.findings:
            require(isinstance(finding, Finding), "section.findings", "Findings", finding)


class Section(Protocol):
    """One thing that is looked at in a run, with a `name` of its own."""

    @property
    def name(self) -> str:
        """Under which the report draws it, and in front of the numbers of a section that was registered."""
        ...

    def applies(self, judged: Judged) -> bool:
        """Whether there is something to measure."""
        ...

    def measure(self, judged: Judged) -> Measured:
        """Measure it."""
        ...
