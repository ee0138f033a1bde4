"""Where an estimate of log Z begins: a reference that holds the model, given, fitted or searched for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import require
from metastable.core.protocols import reference_of
from metastable.core.random import derive, generator
from metastable.core.types import Energy, Proposal
from metastable.core.weights import ess_fraction
from metastable.kernels import Kernel
from metastable.proposals import Gaussian, fit_gaussian
from metastable.walkers.anneal import Annealed
from metastable.walkers.pilot import find_schedule

from .log_z_words import lost_words, pilot_words
from .whitened import Place, Whitened

SPREAD = 10.0
"""Standard deviation of the Gaussian that a search without data begins from."""
NARROWER, ENOUGH_INSIDE = 8, 0.05
"""A search whose draws are nearly all outside the model's walls begins three times narrower, at most so often."""
INFLATE = 1.3
"""The reference is this much wider than the model, so that it reaches into the model's tails."""
WIDER = 3.0
"""The second look of a search is this much wider than what the first one found."""
WIDE_LOOKS = 2
"""Looks of a search that are too wide on purpose."""
LOOKS = 6
"""Looks after which a search that has not settled goes on with what it has, and says so."""
ROUGH_ESS = 0.8
"""Conditional ESS of the wide looks, which only have to find the model."""
PILOT_WALKERS = 512


@dataclass(frozen=True)
class Job:
    """What every stage needs to know."""

    energy: Energy
    shape: tuple[int, ...]
    place: Place
    kernel: Kernel
    steps: int
    conditional_ess: float
    seed: int

    def rng(self, *names: object) -> torch.Generator:
        return generator(derive(self.seed, "log_partition", *names), self.place.device)


class Start(NamedTuple):
    """Coordinates with their reference, the pilot that walked from it, what the last wide look saw, words."""

    white: Whitened
    pilot: Annealed
    wide: float | None = None
    words: tuple[str, ...] = ()


def begin(job: Job, reference: Proposal | None, rows: Tensor | None, spread: float) -> Start:
    """Where to walk from: what was given, a fit to rows, the energy's own reference, or a search."""
    if reference is None and rows is None:
        own = reference_of(job.energy)
        reference = own if isinstance(own, Proposal) else None
    if reference is not None:
        white, pilot = _look(job, reference, 0)
        return Start(white, pilot, words=pilot_words(pilot))
    if rows is not None:
        return _settle(job, fit_reference(rows, None, INFLATE), rows)
    centre = torch.zeros(job.shape, dtype=job.place.dtype, device=job.place.device)
    return _settle(job, Gaussian(centre, _visible(job, centre, spread)), None)


def _visible(job: Job, centre: Tensor, spread: float) -> float:
    """The spread to search from: as asked, or less where hardly a draw falls inside the walls of a small region."""
    shares = {}
    for scale in (spread / 3**k for k in range(NARROWER)):
        x = Gaussian(centre, scale).sample(PILOT_WALKERS, job.rng("walls", scale))
        with torch.no_grad():
            shares[scale] = float((job.energy(x) != torch.inf).double().mean())
        if shares[scale] >= ENOUGH_INSIDE:
            return scale
    return max(shares, key=lambda scale: shares[scale])


def _look(job: Job, reference: Proposal, number: int, rough: bool = False) -> tuple[Whitened, Annealed]:
    """A pilot from `reference`, in its coordinates; a rough one takes larger changes of temperature."""
    white = Whitened(job.energy, reference, job.place, job.rng("scales"))
    pilot = find_schedule(
        white.energy,
        white.reference,
        PILOT_WALKERS,
        job.kernel,
        job.rng("look", number),
        steps=2 * job.steps,
        conditional_ess=min(job.conditional_ess, ROUGH_ESS) if rough else job.conditional_ess,
    )
    return white, pilot


def _settle(job: Job, reference: Gaussian, rows: Tensor | None) -> Start:
    """Walk from `reference`, fit the walkers, walk from the fit, until the reference holds the model.

    Without `rows` this is a search, and its first looks are too wide on purpose, so that a mode far out can be
    met before the fit narrows. Rows that are given must stay covered: they are fitted together with the walkers.
    """
    wide_looks = WIDE_LOOKS if rows is None else 0
    white, pilot = _look(job, reference, 0, rough=wide_looks > 0)
    wide = None
    for number in range(1, LOOKS):
        if not pilot.complete or (number > wide_looks and _holds(pilot)):
            break
        x, log_weight = white.to_model(pilot.x), pilot.log_weight
        if rows is not None:  # of the same total weight as the walkers
            ours = log_weight - torch.logsumexp(log_weight, 0)
            theirs = ours.new_full((len(rows),), -math.log(len(rows)))
            x, log_weight = torch.cat([x, rows]), torch.cat([ours, theirs])
        fit = fit_reference(x, log_weight, WIDER if number < wide_looks else INFLATE)
        white, pilot = _look(job, fit, number, rough=number < wide_looks)
        wide = float(pilot.log_partitions) if number < wide_looks else wide
    lost = pilot.complete and not _holds(pilot)
    words = (lost_words(rows is not None),) if lost else ()
    return Start(white, pilot, wide, (*words, *pilot_words(pilot, rows is not None)))


def _holds(pilot: Annealed) -> bool:
    """Whether the model lies inside the reference: in its coordinates, near 0 and no wider than 1."""
    z = pilot.x.flatten(1).double()
    p = torch.softmax(pilot.log_weight, 0)
    mean = p @ z
    std = (p @ (z - mean).square()).sqrt()
    return bool((mean.abs() < 0.5).all() and (std < 1.1).all() and (std > 0.4).all())


def in_groups(samples: Tensor, groups: int, rng: torch.Generator) -> Tensor:
    """Samples in a random order, without those that would make one group larger than another."""
    require(len(samples) >= 2 * groups, "samples", f"at least {2 * groups} rows", len(samples))
    rows = torch.randperm(len(samples), generator=rng, device=samples.device)
    return samples[rows[: len(rows) - len(rows) % groups]]


def fit_reference(x: Tensor, log_weight: Tensor | None, inflate: float) -> Gaussian:
    """A Gaussian fit that stays well conditioned when the effective rows are few for the dimension.

    The covariance is shrunk towards its diagonal by d/(d + n), and variances without one, as of images, whose
    coordinates share a unit, are kept above a hundredth of their mean.
    """
    log_weight = x.new_zeros(len(x), dtype=torch.float64) if log_weight is None else log_weight
    fit = fit_gaussian(x.double(), log_weight, inflate)
    if fit.full:
        n, d = float(ess_fraction(log_weight)) * len(x), x[0].numel()
        covariance = fit.scale @ fit.scale.T
        shrunk = torch.lerp(covariance, torch.diag(covariance.diagonal()), d / (d + n))
        scale = torch.linalg.cholesky(shrunk)
    else:
        scale = fit.scale.clamp(min=0.1 * float(fit.scale.square().mean().sqrt()))
    return Gaussian(fit.mean.to(x.dtype), scale.to(x.dtype))
