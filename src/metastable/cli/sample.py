"""`metastable sample`."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Device, OwnEnergy, RunFolder, Seed

if TYPE_CHECKING:
    from metastable.core.types import Walkers
    from metastable.runs.run import Run

COPIES = 24
"""Bytes for each number of a sample while it is drawn."""
FEW = 0.1
"""Share of the samples below which the walkers they began as are few."""


def sample(
    run: RunFolder,
    n: Annotated[int, typer.Option("--n", "-n", help="How many.")] = 1000,
    out: Annotated[Path, typer.Option(help="The .npy file to write.")] = Path("samples.npy"),
    steps: Annotated[
        int | None, typer.Option(help="Steps of each walker at the final parameters; 100 by default.")
    ] = None,
    weighted: Annotated[
        bool, typer.Option("--weighted", help="Keep the weights: also write NAME.log_weight.npy.")
    ] = False,
    corrected: Annotated[
        bool,
        typer.Option(
            "--corrected", help="Weigh by the learned density ratio: samples of the data's law (f-ebm)."
        ),
    ] = False,
    denoise: Annotated[
        bool,
        typer.Option(
            "--denoise", help="Without the noise that training put on the data (Tweedie's formula)."
        ),
    ] = False,
    given: Annotated[
        str | None,
        typer.Option(
            help="Contexts of a conditional run: FILE.npy, an .npz with an array given, or 0.5,1.2."
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Draw from p(x | label), by a class's number or name.")
    ] = None,
    energy: OwnEnergy = None,
    seed: Seed = 0,
    device: Device = "cpu",
) -> None:
    """Draw samples from a trained model: its walkers go on at its final parameters, and keep their weights."""
    import numpy as np

    from metastable.core import processes
    from metastable.core.errors import require, require_count
    from metastable.core.room import require_room

    from .bars import work_bar
    from .console import say
    from .runs import open_run

    require_count("n", n)
    require_count("steps", 100 if steps is None else steps)
    require(out.suffix == ".npy", "out", "a file that ends in .npy", str(out))
    found = open_run(run, device, energy)
    require_room("n", f"{n} samples", COPIES * n * math.prod(found.event_shape), device)
    if found.conditional or given is not None:
        from .conditional import sample_contexts

        asked = {"label": label is not None, "weighted": weighted, "corrected": corrected, "denoise": denoise}
        refuse_on_contexts(**asked)
        sample_contexts(found, n, given, out, steps, seed)
        return
    number = checked_class(found, class_of(found, label), corrected)
    with work_bar("sampling"):
        with processes.together():
            walkers, origin = draw(found, n, steps, number, seed)
        if not processes.is_first():
            return
        if corrected:
            walkers, origin = found.corrected(walkers), f"{origin}, weighted by the learned density ratio"
        written = walkers if weighted else walkers.resampled(n, seed=seed)
        if denoise:
            written, origin = replace(written, x=found.denoised(written.x)), f"{origin}, without their noise"
    out.parent.mkdir(parents=True, exist_ok=True)
    np.save(out, written.x.cpu().numpy())
    say(f"{n} samples of shape {found.event_shape} from {origin}{worth(walkers)}")
    if (warning := few_starts(walkers, number)) is not None:
        say(warning)
    if number is None and (weights := mode_line(found, walkers)) is not None:
        say(weights)
    say(f"wrote {out}")
    if weighted:
        weights_file = out.with_suffix(".log_weight.npy")
        np.save(weights_file, written.log_weight.cpu().numpy())
        say(f"wrote {weights_file}")


def class_of(run: Run, label: str | None) -> int | None:
    """The number of a class that is asked for by its number or by its name."""
    from metastable.core.errors import require

    if label is None or label.strip().isdecimal():
        return None if label is None else int(label)
    names = run.config.get("class_names", [])
    rule = (
        f"the number of a class, or one of {', '.join(names)}"
        if names
        else "the number of a class, from 0 on"
    )
    require(label in names, "label", rule, label)
    return names.index(label)


def checked_class(run: Run, label: int | None, corrected: bool) -> int | None:
    """The class, unless training had no row of it; a ratio of classes is refused without one."""
    from metastable.core.errors import InputError

    from .runs import trained_classes

    method = run.trained_with
    if label is None:
        if corrected and "ratio" in run.players and method is not None and method.needs == "labels":
            raise InputError("corrected: the ratio of this run is that of a class; say which, with --label")
        return None
    there = trained_classes(run)
    if there and label not in there and 0 <= label < run.config.get("classes", max(there) + 1):
        raise InputError(f"label: must be a class that training had rows of, {there}, got {label}")
    return label


def refuse_on_contexts(**asked: bool) -> None:
    """Refuse what samples of contexts do not have."""
    from metastable.core.errors import InputError

    why = {
        "label": "samples of contexts have no classes; --label is for a run of jem, without --given",
        "weighted": "samples of contexts are written with equal weights",
        "corrected": "samples of contexts are of the model itself; no density ratio was learned for them",
        "denoise": "samples of contexts are written as the model has them",
    }
    for option in asked:
        if asked[option]:
            raise InputError(f"{option}: {why[option]}; leave it out")


def draw(run: Run, n: int, steps: int | None, label: int | None, seed: int) -> tuple[Walkers, str]:
    """`n` walkers, and in words where they came from."""
    import torch

    from metastable.core.errors import InputError
    from metastable.summary import affordable
    from metastable.summary.samples import kept_walkers, model_walkers

    from .runs import chains_from_noise, drawn_together

    draws_itself = run.trained_with is not None and run.trained_with.sample is not None
    if draws_itself and label is None:
        if steps is not None:
            raise InputError("steps: this run is of a density, which draws for itself; leave it out")
        made = drawn_together(n, seed, lambda own, seed: run.sample(own.stop - own.start, seed=seed))
        return made, "the density's own draws"
    kept, origin = kept_walkers(run)
    if kept is None and not affordable(run.learned_energy, torch.empty(1, *run.event_shape)):
        return chains_from_noise(run, n, steps, label, seed)
    run.walkers, origin = (kept, origin) if kept is not None else model_walkers(run, seed=seed)
    if label is not None:
        known = run.walkers is not None and run.walkers.labels is not None
        origin += f", those of class {label}" if known else f", weighed by p(y = {label} | x)"

    def draws(own: slice, seed: int) -> Walkers:
        return run.sample(own.stop - own.start, steps=steps, label=label, seed=seed)

    return drawn_together(n, seed, draws), origin


def worth(walkers: Walkers) -> str:
    """The effective sample size: no more than the weights leave, nor than there were walkers to begin with."""
    if "from_noise" in walkers.info:  # chains that have forgotten nothing yet, of unknown worth
        return ""
    return f", effective sample size {walkers.ess:.0f}"


def mode_line(run: Run, walkers: Walkers) -> str | None:
    """Weights of the modes that the run found in its data, in the samples; None where it knows of none."""
    import torch

    from metastable.evaluation.modes import sampled_mode_weights

    centers = (run.modes or {}).get("centers")
    if centers is None or "from_noise" in walkers.info:
        return None
    places = torch.tensor(centers, dtype=walkers.x.dtype).view(-1, *walkers.x.shape[1:])
    found = sampled_mode_weights(walkers, places)
    pairs = zip(found.weights.tolist(), found.std_error.tolist(), strict=True)
    return "mode weights: " + ", ".join(f"{w:.3f} ± {e:.3f}" for w, e in pairs)


def few_starts(walkers: Walkers, label: int | None) -> str | None:
    """A warning where far fewer walkers were there to begin with than samples were asked for."""
    begun = walkers.info.get("start_ess", float("inf"))
    if begun >= FEW * len(walkers):
        return None
    what = "walkers" if label is None else f"walkers of class {label}"
    return (
        f"warning: to begin with there were {begun:.1f} effective {what}, so that many of the {len(walkers)} "
        "samples are copies that moved apart: give more --steps, or train with more walkers"
    )
