"""What several commands need of a run on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from metastable.api import load_run, sample
from metastable.core import processes
from metastable.core.errors import InputError
from metastable.core.parts import home_of
from metastable.core.random import derive, generator
from metastable.core.types import Proposal, Walkers
from metastable.data import Dataset, load_array
from metastable.data.files import READABLE
from metastable.evaluation.classifier import given_label
from metastable.methods.base import Objective
from metastable.methods.contrastive import FreshChains
from metastable.proposals import Gaussian, fit_gaussian
from metastable.runs.folder import read_config, require_run_folder
from metastable.runs.run import Run
from metastable.summary import why_costly
from metastable.summary.classifier import moves_of
from metastable.training.engine import Engine

from .own import own_energy
from .settings import data_of

STARTS = 1000
"""Draws of noise among which those that chains of one class begin at are chosen."""


def open_run(folder: Path, device: str = "cpu", energy: str | None = None) -> Run:
    """A run whose energy and walkers are on the same device; one of a module of one's own is told its name."""
    settings = read_config(require_run_folder(folder))["energy"]
    if energy is None and settings["name"] == "custom":
        raise InputError(
            f"energy: the run in {folder} trained your own {settings['class']}; name a function that makes it, "
            "--energy module:factory"
        )
    if energy is not None and settings["name"] != "custom":
        raise InputError(
            f"energy: the run in {folder} has the built-in {settings['name']!r}; leave --energy out"
        )
    own = None if energy is None else own_energy(energy)
    run = load_run(folder, own, device=str(Engine(device).device))
    if run.walkers is not None and run.coordinates is None:
        home, walkers = home_of(run.energy), run.walkers
        run.walkers = replace(walkers, x=walkers.x.to(home), log_weight=walkers.log_weight.to(home.device))
    return run


def chains_from_noise(
    run: Run, n: int, steps: int | None, label: int | None, seed: int
) -> tuple[Walkers, str]:
    """`n` chains of the run's own kernel from noise, and where they came from in words.

    For a run that kept no samples and has too many dimensions for sequential Monte Carlo. Chains of a method that
    begins them afresh at every update (`short-run`) are as long as in its training, others 100 steps.
    """
    noise, like = _noise(run)
    drawn = noise.sample(n if label is None else max(n, STARTS), generator(derive(seed, "noise")))
    start = Walkers.equal(drawn.to(home_of(run.energy)))
    energy: Any = run.learned_energy
    if label is not None:
        energy, start = given_label(energy, start, label)
    kernel = moves_of(run, start.x, seed)
    steps = (own_steps(run.trained_with) or 100) if steps is None else steps
    x = start.resampled(n, seed=derive(seed, "resample")).x
    options = {"kernel": kernel, "steps": steps}
    chains = drawn_together(
        n, seed, lambda own, seed: sample(energy, len(x[own]), init=x[own], seed=seed, **options)
    )
    origin = (
        f"{n} chains of {steps} steps by {kernel} from {like}, since the run kept no samples and "
        f"{why_costly(run.learned_energy, x)}; how near they are to the model is not known"
    )
    return replace(chains, info=chains.info | {"from_noise": True, "start_ess": start.ess}), origin


def drawn_together(n: int, seed: int, draws: Callable[[slice, int], Walkers]) -> Walkers:
    """`n` walkers, of which each process draws its own part from a seed of its own; then all have all of them."""
    if n < processes.count():  # not one for each
        return processes.by_first(lambda: draws(slice(0, n), seed))
    own, who = processes.own_rows(n), processes.rank()
    with processes.alone():
        part = draws(own, derive(seed, "process", who) if who else seed)
    joined, labels = processes.joined, part.labels
    info = {name: joined(said) if name == "drawn_from" else said for name, said in part.info.items()}
    labels = None if labels is None else joined(labels)
    return replace(part, x=joined(part.x), log_weight=joined(part.log_weight), labels=labels, info=info)


def _noise(run: Run) -> tuple[Proposal, str]:
    """The noise that chains begin from in training, fitted to the run's data; standard where those are gone."""
    try:
        dataset, _ = data_of(run.config)
        _check_shape(dataset, run, "data")
    except InputError:
        return Gaussian(torch.zeros(run.event_shape)), "standard normal noise (its data cannot be read)"
    return fit_gaussian(dataset.x), "noise with the mean and covariance of the data"


def own_steps(method: Any) -> int | None:
    """Steps of chains that begin afresh at every update; None where a method has no such chains."""
    if isinstance(method, Objective):
        return own_steps(method.source)
    return method.steps if isinstance(method, FreshChains) else None


def rows_for(run: Run, source: str | None, option: str = "data") -> tuple[Dataset, str]:
    """Rows to score a run on: those given by an option, else the rows that its training held out.

    Labels of `data` are numbered by the names that the run keeps of its classes; outliers have none of them.
    """
    if source is not None:
        dataset, _ = data_of({}, source)
        _check_shape(dataset, run, option)
        names = run.config.get("class_names", ()) if option == "data" else ()
        return dataset.numbered(names, option), source
    dataset, notes = data_of(run.config)
    if notes:
        raise InputError(f"{notes[0]}; give --data")
    share = run.config.get("held_out", 0.0)
    if not share:
        return dataset, f"{dataset.name}, the rows it was trained on"
    return dataset.split(share, run.config["seed"])[1], f"{dataset.name}, held-out rows"


def rows_to_score(run: Run, source: str) -> Dataset:
    """Rows of a file in its own order and with all their digits, one or more of them."""
    is_file = Path(source).suffix.lower() in READABLE
    dataset = load_array(source, dtype=torch.float64 if is_file else None, least=1)
    _check_shape(dataset, run, "data")
    if run.conditional and dataset.given is None:
        raise InputError("data: this is a conditional run; give an .npz file with the arrays x and given")
    return dataset


def own_rows(run: Run, least: float) -> tuple[Dataset, str]:
    """A run's held-out rows where there are `least` of them, else all its rows, and which in words."""
    dataset, notes = data_of(run.config)
    if notes:
        raise InputError(notes[0])
    share = run.config.get("held_out", 0.0)
    held = dataset.split(share, run.config["seed"])[1] if share else None
    if held is not None and len(held) >= least:
        return held, "held-out rows of the run"
    return dataset, "rows of the run (held out or not)" if share else "training rows of the run"


def training_set(run: Run, source: str | None = None) -> Dataset:
    """The rows that a run was trained on, without those that it held out.

    Args:
        run: the run.
        source: where they may be found too, and are taken from if they are the same.
    """
    if "data" not in run.config:
        raise InputError("data: the settings of this run do not say which rows it was trained on")
    dataset, notes = data_of(run.config, source)
    if notes and source is not None:
        dataset, notes = data_of(run.config)
    if notes:
        raise InputError(notes[0])
    share = run.config.get("held_out", 0.0)
    return dataset.split(share, run.config["seed"])[0] if share else dataset


def trained_classes(run: Run) -> list[int]:
    """The classes that training had rows of, as its settings or, of an older run, its rows say; else none."""
    if (counts := run.config.get("class_rows")) is not None:
        return [label for label, rows in enumerate(counts) if rows]
    try:
        labels = training_set(run).labels
    except InputError:  # rows of an array in memory, or of a file that is gone
        return []
    return [] if labels is None else labels.unique().tolist()


def _check_shape(dataset: Dataset, run: Run, option: str) -> None:
    if dataset.event_shape != run.event_shape:
        raise InputError(
            f"{option}: rows must have the run's shape {run.event_shape}, got {dataset.event_shape}"
        )
    names = [column["name"] for column in run.config.get("columns", [])]
    if list(dataset.columns) != names and sorted(dataset.columns) == sorted(names):
        raise InputError(
            f"{option}: columns must come as in training, {', '.join(names)}, got {', '.join(dataset.columns)}"
        )
