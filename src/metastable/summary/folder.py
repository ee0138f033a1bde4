"""What a judgement leaves in a run's folder, and how it is read back."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.core.array_files import open_arrays
from metastable.core.errors import InputError, require, short
from metastable.core.random import derive
from metastable.core.seals import check_seal
from metastable.core.types import LogPartition, Walkers
from metastable.core.units import Coordinates
from metastable.evaluation.diagnosis import Finding
from metastable.evaluation.rays import radii
from metastable.report import write_report
from metastable.report.plots import image_side
from metastable.runs.folder import (
    read_summary,
    reading,
    rewriting,
    seal_files,
    write_array,
    write_arrays,
    write_json,
)
from metastable.runs.run import Run
from metastable.walkers.space import space_of
from metastable.walkers.starts import some_rows

from .negatives import HISTOGRAMS, StepCheck, histograms
from .samples import SHOWN

SEALED = ("config.json", "metrics.jsonl", "summary.json", "samples.npy", "walkers.npz", "figures.npz")
"""Files of a finished run that are vouched for."""
SHOWN_NUMBERS = 1 << 20
"""Numbers in the rows that a report shows at most, so that arrays of images weigh no more than their checkpoint."""
SHOWN_PICTURES = 64
"""Samples that are also shown without the noise of training."""


def write_training(run: Run, train: Tensor, arrays: dict[str, Any], seed: int) -> None:
    """Samples, arrays for pictures, `summary.json` and the page of a run whose training has ended.

    Args:
        run: in the data's units.
        train: the events it was trained on, likewise.
        arrays: of the sections.
        seed: of the samples.
    """
    assert run.folder is not None
    figures = arrays if run.conditional else _clouds(run, train, seed) | arrays
    write_arrays(run.folder / "figures.npz", **figures)
    if not run.conditional:
        _keep_walkers(run)
    write_json(run.folder / "summary.json", run.summary())
    seal_files(run.folder, run.config, *SEALED)
    write_report(run.folder)


def _clouds(run: Run, train: Tensor, seed: int) -> dict[str, Any]:
    """Data and samples for pictures; all samples, of equal weight, go to `samples.npy`."""
    assert run.folder is not None
    shown = min(SHOWN, max(64, SHOWN_NUMBERS // train[0].numel()))
    figures: dict[str, Any] = {"data": some_rows(train, shown).cpu().numpy()}
    if run.walkers is not None:
        n = max(SHOWN, min(len(run.walkers), 10_000))
        x = run.walkers.resampled(n, seed=derive(seed, "samples")).x.cpu().numpy()
        write_array(run.folder / "samples.npy", x)
        order = np.random.default_rng(seed if seed >= 0 else derive(seed, "shown"))
        figures["samples"] = x[order.permutation(len(x))[:shown]]
        figures |= runaway(run, figures["samples"], train)
        volume = space_of(run.energy).has_volume
        if run.data_noise and volume and image_side(run.event_shape) is not None:
            figures["without_noise"] = run.denoised(figures["samples"][:SHOWN_PICTURES]).cpu().numpy()
    return figures


def runaway(run: Run, samples: np.ndarray, train: Tensor) -> dict[str, Any]:
    """Distances of data and samples from the data's centre, for the picture of mass that has run away."""
    if not any(finding.name == "mass-ran-away" for finding in run.diagnosis):
        return {}
    train = train.cpu()
    return {
        "radius_data": radii(some_rows(train, SHOWN), train).numpy(),
        "radius_samples": radii(torch.from_numpy(samples), train).numpy(),
    }


def _keep_walkers(run: Run) -> None:
    """Weighted walkers that no checkpoint holds, since they come from sequential Monte Carlo."""
    assert run.folder is not None
    path = run.folder / "walkers.npz"
    path.unlink(missing_ok=True)
    if run.walkers is None or run.samples_source == "training":
        return
    sizes = np.array(run.walkers.info.get("populations", [len(run.walkers)]))
    x, log_weight = run.walkers.x.cpu().numpy(), run.walkers.log_weight.cpu().numpy()
    write_arrays(path, x=x, log_weight=log_weight, populations=sizes)


def _kept_walkers(folder: Path, event_shape: tuple[int, ...]) -> Walkers | None:
    """The inverse of `_keep_walkers`; equally weighted samples where a folder has only those."""
    path, samples = folder / "walkers.npz", folder / "samples.npy"
    check_seal(folder, path.name if path.exists() else samples.name)
    if path.exists():
        with reading(path), open_arrays(path) as kept:
            names = ("x", "log_weight", "populations")
            x, log_weight, sizes = (torch.from_numpy(kept[name]) for name in names)
            counts = sizes.dtype == torch.int64 and sizes.dim() == 1 and bool((sizes >= 0).all())
            require(counts and int(sizes.sum()) <= len(x), "populations", "how many walkers each has", sizes)
            return _require_walkers(Walkers(x, log_weight, {"populations": sizes.tolist()}), event_shape)
    if not samples.exists():
        return None
    with reading(samples):
        return _require_walkers(Walkers.equal(torch.from_numpy(open_arrays(samples))), event_shape)


def _require_walkers(walkers: Walkers, event_shape: tuple[int, ...]) -> Walkers:
    """The walkers, if they are events of a run, each with a weight."""
    x, weights = walkers.x, walkers.log_weight
    fits = not x.is_complex() and len(x) > 0 and tuple(x.shape[1:]) == event_shape
    shape = ", ".join(map(str, ("n", *event_shape)))
    require(fits, "x", f"numbers of shape ({shape})", f"{x.dtype}, {tuple(x.shape)}")
    fits = not weights.is_complex() and tuple(weights.shape) == (len(x),)
    require(fits, "log_weight", f"{len(x)} numbers", f"{weights.dtype}, {tuple(weights.shape)}")
    return walkers


def keep_histograms(
    folder: Path,
    check: StepCheck | None,
    step: int,
    coordinates: Coordinates | None = None,
    power: float = 1.0,
) -> None:
    """Put the histograms of update `step` into a run's `figures.npz`, in the place of those from before.

    For a run that ended without an evaluation: `write_training` writes those of one that did.
    """
    path, before = folder / "figures.npz", {}
    if path.is_file():
        with reading(path), open_arrays(path) as stored:
            before = {name: stored[name] for name in stored.files if name not in HISTOGRAMS}
    made = histograms(check, coordinates, power)
    if made:
        made["negatives_step"] = np.array([step])
    if made or before:
        with rewriting(folder, path.name):
            write_arrays(path, **before, **made)


def judged_step(run: Run) -> int:
    """The update whose weights a run holds: the last one, unless an earlier one was kept or training stopped."""
    return run.steps if run.kept is None else run.kept


def judged_words(run: Run) -> str:
    """Which weights a run that did not come to its end is judged by; empty for any other."""
    if run.status not in ("diverged", "unfinished") or judged_step(run) == run.steps:
        return ""
    how = "diverged" if run.status == "diverged" else "stopped"
    words = (
        f"the weights are those of update {judged_step(run)}, the last good checkpoint: training {how} "
        f"by update {run.steps}"
    )
    return words if judged_step(run) else f"{words}, and nothing was learned"


def load_summary(run: Run) -> Run:
    """What a run's `summary.json` knows, put back into the run.

    Args:
        run: with the weights of its newest good checkpoint, and as `kept` the update that these are of. A summary
            from before it, when training had stopped and then went on, says nothing about these weights.
    """
    assert run.folder is not None
    step = judged_step(run)
    kept = read_summary(run.folder)
    if kept.get("steps", step) < step:
        kept = {}
    own = run.log_partition is not None
    weighted = own and kept.get("samples_source") != "independent"
    if kept.get("log_partition") and (not own or kept.get("log_z_source") == "independent"):
        with reading(run.folder / "summary.json"):
            run.log_partition = LogPartition.from_json(kept["log_partition"])
    run.status = kept.get("status", "unfinished")
    run.scores = kept.get("scores", {})
    run.modes, run.contexts = kept.get("modes"), kept.get("contexts")
    width, centers = math.prod(run.event_shape), (run.modes or {}).get("centers") or []
    if any(len(center) != width for center in centers):
        path, rule = run.folder / "summary.json", f"places of {width} numbers"
        raise InputError(f"{path}: modes.centers: must be {rule}, got {short(centers)}: the file is damaged")
    run.kept = kept.get("kept")
    if run.kept is None and step < run.steps:  # the log goes on beyond the newest good checkpoint
        run.kept = step
    run.ended = kept.get("ended", "")
    run.log_z_source = kept.get("log_z_source", "training")
    run.samples_source = kept.get("samples_source", "training")
    run.engine = kept.get("engine", {})
    run.seconds = kept.get("seconds", run.seconds)
    if kept:  # numbers of a run from before there was a power are those of exp(−E)
        run.power = kept.get("power", 1.0)
    names = {f.name for f in dataclasses.fields(Finding)}
    with reading(run.folder / "summary.json"):
        found = kept.get("diagnosis", [])
        run.diagnosis = [Finding(**{k: v for k, v in f.items() if k in names}) for f in found]
    if kept and not weighted:  # a buffer of chains has the data's mode weights, not the model's
        walkers = _kept_walkers(run.folder, run.event_shape)
        if walkers is not None:
            device = run._home.device
            x, log_weight = walkers.x.to(device), walkers.log_weight.to(device)
            run.walkers = dataclasses.replace(walkers, x=x, log_weight=log_weight)
    return run
