"""Annealed importance sampling and sequential Monte Carlo from a normalised reference q to exp(−E).

Everything here walks the path of `walkers.path` by one loop, `walkers.anneal`. Its estimate of Z is unbiased only
while temperatures and step sizes were not chosen by looking at the walkers, so a pilot learns them and is then
thrown away (`walkers.pilot`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from metastable.core.errors import require, require_count
from metastable.core.types import Energy, Proposal
from metastable.kernels import Kernel

from .anneal import RESAMPLE_BELOW, STEP_JITTER, Annealed, anneal
from .path import Schedule
from .pilot import CONDITIONAL_ESS, find_schedule, own_step_size
from .space import space_of


def ais(
    energy: Energy,
    reference: Proposal,
    n: int,
    betas: Tensor | int,
    kernel: Kernel,
    steps_per_beta: int,
    rng: torch.Generator,
) -> Annealed:
    """Annealed importance sampling (Neal 2001): n independent walkers, mean of exp(log_weight) unbiased for Z.

    Args:
        energy: E, `(B, *event)` to `(B,)`.
        reference: q, normalised; walkers start as its draws.
        n: walkers.
        betas: increasing from 0 to 1, `(K + 1,)`, or the number K of equal gaps.
        kernel: leaves its target invariant; its own step size is used at every temperature.
        steps_per_beta: moves at each temperature.
        rng: source of randomness.

    >>> from metastable.kernels import MALA
    >>> from metastable.proposals import Gaussian
    >>> rng = torch.Generator().manual_seed(0)
    >>> w = ais(lambda x: 2 * x.square().sum(1), Gaussian(torch.zeros(1)), 2000, 20, MALA(0.2), 2, rng)
    >>> round(w.log_partitions.item(), 1)  # ½ log(π/2) = 0.226
    0.2
    """
    require_count("n", n)
    grid = Schedule.equal(betas).betas if isinstance(betas, int) else betas.double()
    _require_path(grid)
    schedule = Schedule(grid, torch.full_like(grid, own_step_size(kernel)))
    with torch.no_grad():
        x = reference.sample(n, rng)
    return anneal(
        energy, reference, x, schedule, kernel, rng, steps=steps_per_beta, resample_below=0, jitter=0
    )


def reverse_ais(
    energy: Energy,
    reference: Proposal,
    samples: Tensor,
    betas: Tensor,
    step_sizes: Tensor | float,
    kernel: Kernel,
    rng: torch.Generator,
    *,
    steps: int = 1,
    populations: int = 1,
    resample_below: float = 0.0,
    jitter: float = STEP_JITTER,
) -> Annealed:
    """The path walked backwards, from draws of the model to the reference.

    The mean weight is unbiased for 1/Z, so −log of it lies above log Z in expectation, as the forward estimate
    lies below it: together they bracket log Z (Grosse, Ghahramani and Adams 2015). Read `−log_partitions`.

    Args:
        energy: E, `(B, *event)` to `(B,)`.
        reference: q, normalised.
        samples: draws of exp(−E)/Z, `(G·n, *event)`.
        betas: increasing from 0 to 1, `(K + 1,)`, as in the forward run.
        step_sizes: one for each of `betas`, or one for all.
        kernel: leaves its target invariant.
        rng: source of randomness.
        steps: moves at each temperature.
        populations: G, groups whose estimates are kept apart.
        resample_below: 0 never resamples.
        jitter: standard deviation of each walker's log step size.
    """
    _require_path(betas)
    sizes = torch.as_tensor(step_sizes, dtype=torch.float64, device=betas.device).expand(betas.shape)
    backwards = Schedule(betas.double(), sizes).reversed()
    options = {"steps": steps, "populations": populations, "resample_below": resample_below, "jitter": jitter}
    return anneal(energy, reference, samples.detach(), backwards, kernel, rng, **options)


def _require_path(betas: Tensor) -> None:
    ends = len(betas) > 1 and float(betas[0]) == 0 and float(betas[-1]) == 1
    require(ends and bool((betas.diff() > 0).all()), "betas", "increasing from 0 to 1", betas.tolist())


def smc(
    energy: Energy,
    reference: Proposal,
    populations: int,
    walkers: int,
    rng: torch.Generator,
    *,
    kernel: Kernel | None = None,
    schedule: Schedule | None = None,
    steps: int = 4,
    pilot_walkers: int | None = None,
    conditional_ess: float = CONDITIONAL_ESS,
    resample_below: float = RESAMPLE_BELOW,
    jitter: float = STEP_JITTER,
) -> Annealed:
    """Sequential Monte Carlo on a path that a pilot found: G independent unbiased estimates of Z in one batch.

    Args:
        energy: E, `(B, *event)` to `(B,)`.
        reference: q, normalised.
        populations: G, independent groups; they share the schedule, which the pilot fixed beforehand.
        walkers: n in each population.
        rng: source of randomness.
        kernel: leaves its target invariant; by default HMC, or Gibbs for a discrete energy. Its step size, where
            it has one, is where the pilot starts.
        schedule: skip the pilot and use this path.
        steps: moves at each temperature.
        pilot_walkers: of the pilot, by default as many as one population has, at least 256.
        conditional_ess: share of effective walkers that one change of temperature leaves.
        resample_below: populations with a smaller effective share are resampled.
        jitter: standard deviation of each walker's log step size around the schedule's.
    """
    require_count("populations", populations)
    require_count("walkers", walkers, 2)
    require(0 < conditional_ess < 1, "conditional_ess", "between 0 and 1", conditional_ess)
    kernel = space_of(energy).annealer if kernel is None else kernel
    complete = True
    if schedule is None:
        size = max(walkers, 256) if pilot_walkers is None else pilot_walkers
        options = {"steps": 2 * steps, "conditional_ess": conditional_ess}
        pilot = find_schedule(energy, reference, size, kernel, rng, **options)
        schedule, complete = pilot.schedule, pilot.complete
    with torch.no_grad():
        x = reference.sample(populations * walkers, rng)
    options = {"steps": steps, "populations": populations, "resample_below": resample_below, "jitter": jitter}
    return replace(anneal(energy, reference, x, schedule, kernel, rng, **options), complete=complete)
