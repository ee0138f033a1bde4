"""Samples of the model against rows: distances, spread, outliers, and whether mass has run away."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from metastable.core.errors import InputError
from metastable.core.parts import energies_of, in_parts
from metastable.core.random import derive, generator
from metastable.core.types import LogPartition, Walkers
from metastable.evaluation.distances import (
    BANDWIDTH_FACTORS,
    energy_distance,
    median_distance,
    mmd2,
    without_copies,
)
from metastable.evaluation.log_partition import log_partition
from metastable.evaluation.rays import far_share, radii
from metastable.runs.model import in_units
from metastable.runs.run import Run
from metastable.walkers.space import space_of
from metastable.walkers.starts import some_rows

from .section import COSTLY_ROWS, Judged, Measured

SHOWN = 2000
"""Rows of data and samples behind distances, whose cost grows with the square, and in pictures."""
OUTLIER_LEVEL = 0.01
"""A row is an outlier where the density is lower than at all but this share of the model's own samples."""
FROM_ENERGY = "sequential Monte Carlo on the energy, since the run kept no samples"
SCORES_OF_ROWS = ("outlier_share", "mmd2", "energy_distance")
"""What an evaluation says about rows beside their likelihood."""


class Samples:
    """The model's samples: how far from the rows they are, and how wide."""

    name = "samples"

    def applies(self, judged: Judged) -> bool:
        """There must be some, and rows without contexts."""
        return judged.run.walkers is not None and not judged.run.conditional

    def measure(self, judged: Judged) -> Measured:
        """Distances, and what the diagnosis is told."""
        run, walkers = judged.run, judged.run.walkers
        assert walkers is not None
        if not judged.after_training:
            rows = some_rows(judged.x, SHOWN, seed := derive(judged.seed, "evaluate"))
            apart = distances(walkers, judged.noisy(rows), seed)
            return Measured({"outlier_share": _outlier_share(run, judged.x, walkers, judged.seed), **apart})
        rows = some_rows(judged.x, COSTLY_ROWS if judged.costly else SHOWN)
        apart = distances(walkers, judged.noisy(rows))
        numbers = {}
        if apart["mmd2"] is not None:
            numbers["energy_distance"] = apart["energy_distance"]
            numbers["mmd"] = math.sqrt(max(apart["mmd2"], 0.0))
        return Measured(numbers, facts=_sample_facts(run, walkers, judged.trained_on))


def distances(walkers: Walkers, data: Tensor, seed: int = 0) -> dict[str, float | None]:
    """MMD² and energy distance between samples and data; both are zero on average where the laws agree.

    The kernel's widths are ½, 1 and 2 times the median distance within the data, the same for every model of
    them, so that models can be compared. None where one walker has all the weight, or there is one row: no pair.
    """
    data = some_rows(data, SHOWN, seed)
    few = without_copies(walkers, SHOWN)
    if few.ess < 1.001 or len(data) < 2:
        return {"mmd2": None, "energy_distance": None}
    widths = [factor * median_distance(data, data) for factor in BANDWIDTH_FACTORS]
    return {
        "mmd2": float(mmd2(few.x, data, widths, log_weight_x=few.log_weight)),
        "energy_distance": float(energy_distance(few.x, data, few.log_weight)),
    }


def _outlier_share(run: Run, x: Tensor, walkers: Walkers, seed: int) -> float:
    """Share of rows whose energy is above that of all but `OUTLIER_LEVEL` of the model's own samples."""
    own = energies_of(run.energy, walkers.resampled(seed=seed).x)
    return float((energies_of(run.energy, x) > own.quantile(1 - OUTLIER_LEVEL)).double().mean())


def _sample_facts(run: Run, walkers: Walkers, train: Tensor) -> dict[str, float]:
    """Spread of the samples against the data's, and the share of walkers that stand where another one does."""
    x = walkers.resampled(min(4000, len(walkers))).x.flatten(1)
    ratio = x.var(0).sum().sqrt() / train.flatten(1).var(0).sum().sqrt().clamp(min=1e-12)
    held = walkers.x.flatten(1)
    if not space_of(run.energy).has_volume:  # few states: that walkers share one says nothing
        return {"sample_std_ratio": float(ratio)}
    shaped = x.view(-1, *train.shape[1:])
    away = {"far_share": far_share(shaped, train), "sample_radius": float(radii(shaped, train).median())}
    direction = torch.randn(held.shape[1], generator=generator(0), dtype=torch.float64).to(held.device)
    distinct = len(torch.unique(in_parts(lambda part: (part * direction).sum(1), held)))
    return {"sample_std_ratio": float(ratio), "duplicates": 1 - distinct / len(held), **away}


def model_walkers(run: Run, data: Tensor | None = None, seed: int = 0) -> tuple[Walkers, str]:
    """Weighted samples of the model, and where they came from in words.

    Chains that carry no weights (`cd`, `pcd`, `short-run`) may sit in the wrong proportions, so for those
    methods the samples are the ones that were drawn from the finished energy when training ended.
    """
    kept, origin = kept_walkers(run)
    if kept is not None:
        return kept, origin
    z = normalised(run, data, seed)
    if z.walkers is None:
        raise InputError(
            f"run: {run.folder} kept no samples; go on with: metastable train --resume --out {run.folder}"
        )
    return z.walkers, FROM_ENERGY


def kept_walkers(run: Run) -> tuple[Walkers | None, str]:
    """Samples that the run holds already, and where they came from; None where it holds none."""
    if run.walkers is not None and bool((run.walkers.log_weight != 0).any()):
        if run.samples_source == "independent":
            return run.walkers, "weighted samples drawn from the finished energy when training ended"
        return run.walkers, "the run's own weighted walkers"
    kept = run.folder / "samples.npy" if run.folder is not None else None
    if kept is None or not kept.is_file() or run.walkers is None:
        return None, "none were kept"
    x = run.walkers  # which were read from that file
    if any(finding.name == "log-z-not-estimated" for finding in run.diagnosis):
        return x, "the method's own chains when training ended"
    return x, "samples drawn from the finished energy when training ended"


def normalised(run: Run, data: Tensor | None = None, seed: int = 0) -> LogPartition:
    """log Z of what was learned, by sequential Monte Carlo from a Gaussian fitted to `data` or the energy's own."""
    inner = run.within()
    if run.coordinates is not None and data is not None:
        data = run.coordinates.events.forward(data)
    z = log_partition(inner.learned_energy, event_shape=run.event_shape, data=data, seed=seed)
    if run.coordinates is None or z.walkers is None:
        return z
    return replace(z, walkers=in_units(z.walkers, run.coordinates.events))
