"""The one judge of runs: it runs the sections that apply, and says what they found in words, numbers and files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from metastable.core.batch import Batch
from metastable.core.errors import InputError, MetastableError, require
from metastable.core.memory import rows_in_words, within_memory
from metastable.core.protocols import provides
from metastable.core.telling import counted
from metastable.core.units import Coordinates, require_near
from metastable.data import Dataset, ToySet
from metastable.evaluation.diagnosis import SEVERITIES, Facts, Finding, diagnose
from metastable.evaluation.image_measures import ImageQuestion
from metastable.runs.run import Run, outward_scores

from .classifier import Classifier
from .contexts import Contexts
from .density import Density, Exact
from .folder import write_training
from .images import Images
from .likelihood import Likelihood
from .modes import Modes
from .negatives import Histograms
from .samples import SCORES_OF_ROWS, Samples
from .section import Judged, Measured, Section
from .units import toy_within

SECTIONS: list[Section] = [
    Likelihood(),
    Modes(),
    Samples(),
    Density(),
    Histograms(),
    Contexts(),
    Classifier(),
    Images(),
]
"""In the order in which they are measured: each may read what those before it found."""
_OWN = frozenset(section.name for section in (*SECTIONS, Exact()))


def register(section: Section) -> Section:
    """Add a section of your own to every judgement, or put it in the place of the registered one of its name.

    Its numbers stand in `run.scores` and in the report under `name/number`, in a table of its own.
    """
    if isinstance(section, type) or not provides(section, Section):
        raise InputError(f"section: must be an object with name, applies and measure, got {section!r}")
    if not section.name or section.name in _OWN or "/" in section.name:
        raise InputError(
            f"section.name: must be a name without / other than {', '.join(sorted(_OWN))}, got {section.name!r}"
        )
    SECTIONS[:] = [known for known in SECTIONS if known.name != section.name] + [section]
    return section


def _measured(judged: Judged, section: Section) -> Any:
    """What the section finds; memory that is not enough for it is told by its name."""
    walkers = None if judged.run.walkers is None else len(judged.run.walkers)
    held = {"data": f"{len(judged.rows)} rows", "walkers": walkers}
    with within_memory(f"evaluation, {section.name}", lambda: rows_in_words(judged.x, "rows of data"), held):
        return section.measure(judged)


def judge(judged: Judged, sections: Sequence[Section] | None = None) -> dict[str, Any]:
    """Measure every section that applies, into `judged.found`; returns all their numbers.

    Ctrl-C keeps what was found: the section in work is named in `judged.stopped_at`, and nothing comes after it. So
    does a section that cannot be measured where a training has just ended, which must not be lost to it.
    """
    sections = SECTIONS if sections is None else sections
    for i in counted("sections judged", len(sections)):
        section = sections[i]
        try:
            measured = _measured(judged, section) if section.applies(judged) else None
        except (KeyboardInterrupt, MetastableError) as error:
            by_hand = isinstance(error, KeyboardInterrupt)
            if not by_hand and not judged.after_training:
                raise
            judged.stopped_at, judged.stopped_by = section.name, "Ctrl-C" if by_hand else str(error)
            break
        if measured is not None:
            rule = f"section {section.name!r}.measure"
            require(isinstance(measured, Measured), rule, "Measured(…)", measured)
            judged.found[section.name] = measured
    return _all(judged, "numbers")


def _all(judged: Judged, what: str) -> dict[str, Any]:
    """Numbers or arrays of all sections; those of registered ones with the section's name in front."""
    merged: dict[str, Any] = {}
    for name, measured in judged.found.items():
        front = "" if name in _OWN else f"{name}/"
        merged |= {front + key: value for key, value in vars(measured)[what].items()}
    return merged


def _diagnosis(judged: Judged) -> list[Finding]:
    """What the log and everything measured say, the worst first."""
    run, facts = judged.run, {}
    for measured in judged.found.values():
        facts |= measured.facts
    log = run.kept_history
    known = Facts(
        method=run.trained_with or run.method,
        negatives_per_datum=run.config.get("method", {}).get("negatives_per_datum"),
        steps=int(log[-1]["step"]) if log else None,
        **facts,
    )
    own = [finding for measured in judged.found.values() for finding in measured.findings]
    return sorted([*diagnose(log, known), *own], key=lambda finding: SEVERITIES.index(finding.severity))


def judge_training(
    run: Run,
    train: Batch,
    rows: Batch,
    toy: ToySet | None,
    *,
    seed: int,
    chains: Any = None,
    coordinates: Coordinates | None = None,
    hurried: bool = False,
) -> Run:
    """What a run is worth when training has ended, in the data's units, written to its folder where it has one.

    Everything is found in the units of training, where no column counts for more than another, and then told in the
    data's own.

    Args:
        run: what training gave, in its own units.
        train: the rows it was trained on, likewise.
        rows: those for scores, likewise.
        toy: where the rows were drawn from, if that is known, in the data's units.
        seed: of every random number.
        chains: the method as training left it, for a look at its negatives.
        coordinates: the units of training; None where they are the data's own.
        hurried: nothing is measured: somebody who asked training to stop ends the process soon.
    """
    judged = Judged(
        run,
        rows,
        seed,
        train,
        after_training=True,
        toy=toy_within(toy, coordinates),
        chains=chains,
        coordinates=coordinates,
    )
    run.scores = judge(judged, () if hurried else None)
    run.diagnosis = _diagnosis(judged)
    if hurried:
        run.ended = f"{run.ended} Stopped by SIGTERM, and not judged: `metastable evaluate` does that".strip()
    if judged.stopped_at:
        run.status = "interrupted" if judged.stopped_by == "Ctrl-C" else run.status
        words = f"Judging was stopped at its section {judged.stopped_at!r}, by {judged.stopped_by}"
        run.ended = f"{run.ended} {words}".strip()
    run = run.outward(coordinates)
    if run.folder is not None:
        units = None if coordinates is None else coordinates.events
        x = train.x
        write_training(run, x if units is None else units.inverse(x), _all(judged, "arrays"), seed)
    return run


def judge_again(
    run: Run,
    dataset: Dataset,
    *,
    seed: int = 0,
    log_z: bool = False,
    outsiders: Mapping[str, Tensor] | None = None,
    images: ImageQuestion | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scores of a run on some rows, as `evaluation.json` holds them, and the arrays behind their pictures.

    Scores that need samples or log Z that there are not are None.

    Args:
        run: as `load_run` gives it.
        dataset: the rows, in the data's units.
        seed: of every random number.
        log_z: estimate log Z where that takes minutes too (events of many dimensions).
        outsiders: rows of another kind by name, for a classifier to tell apart.
        images: what is asked about samples as pictures.
    """
    judged = _asked(run, dataset, seed)
    judged.log_z_asked, judged.outsiders, judged.images = log_z, outsiders or {}, images
    numbers = judge(judged)
    stopped = {"stopped_at": judged.stopped_at} if judged.stopped_at else {}
    if run.coordinates is not None:
        numbers = outward_scores(numbers, run.coordinates.events.log_det)
    if run.conditional:
        return {"rows": len(dataset), **numbers, **stopped}, _all(judged, "arrays")
    z, modes = judged.run.log_partition, judged.run.modes
    columns = {"data": "data", "model": "samples", "std_error": "std_error"}
    result = {
        "rows": len(dataset),
        "samples": judged.samples_from,
        "power": run.power,
        "log_partition": None if z is None else z.as_json(),
        **dict.fromkeys(("log_likelihood", "log_likelihood_se", *SCORES_OF_ROWS)),
        **{name: value for name, value in numbers.items() if name in SCORES_OF_ROWS or "/" in name},
        "mode_weights": None if modes is None else {k: modes[name] for k, name in columns.items()},
    }
    names = ("log_likelihood", "log_likelihood_se", "classifier", "images")
    return result | stopped | {name: numbers[name] for name in names if name in numbers}, _all(
        judged, "arrays"
    )


def _asked(run: Run, dataset: Dataset, seed: int) -> Judged:
    """A run on other rows, in the units of its training."""
    inner, coordinates, home = run.within(), run.coordinates, run._home
    x, given = dataset.x, dataset.given
    if coordinates is not None:
        x = coordinates.events.forward(x)
        given = given if coordinates.given is None or given is None else coordinates.given.forward(given)
    require_near("data", x)
    if run.conditional and given is not None:
        require_near("given", given)
    x = x.to(home)
    if run.conditional and given is None:
        raise InputError("data: this is a conditional run; give an .npz file with the arrays x and given")
    return Judged(
        # what is found on these rows is not the run's own
        dataclasses.replace(inner, modes=None),
        Batch(x, given.to(home) if run.conditional and given is not None else None),
        seed,
        toy=toy_within(dataset.toy, coordinates),
        coordinates=coordinates,
        labels=None if dataset.labels is None else dataset.labels.to(home.device),
        classes=dataset.classes,
        before=(run, dataset.x.to(home)),
    )
