"""Walkers that are carried along a path: reweight, resample where the weights have become uneven, move.

The raw log-weights carry the partition function: the mean of exp(log_weight) over a population is an unbiased
estimate of Z, whatever the number of walkers, temperatures or moves (Neal 2001; Del Moral, Doucet and Jasra 2006).
This holds only while temperatures and step sizes were not chosen by looking at those walkers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core import processes
from metastable.core.capture import CaptureError, is_recording, record
from metastable.core.errors import OutOfMemoryError, UnsupportedError, require, require_count
from metastable.core.random import normal_like
from metastable.core.resampling import resample_indices
from metastable.core.telling import counted
from metastable.core.types import Energy, Proposal, Walkers, per_row
from metastable.core.weights import ess_fraction, log_mean_exp
from metastable.kernels import Kernel, StepKernel, fused, run_chain
from metastable.kernels.watch import UnwatchedError, reads

from .path import Schedule, path_for

RESAMPLE_BELOW = 0.5
"""A population whose effective sample size falls under this share of its walkers is resampled."""
STEP_JITTER = 0.4
"""Standard deviation of each walker's log step size, so that no chain is locked to one scale."""
LEAST = 32
"""Temperatures from which on a GPU records a change of temperature and launches it as a whole."""
FUSED = 2000
"""Temperatures from which on the moves at each are one kernel, where they can be: it takes seconds to compile."""
WORK = "log Z"
"""What a listener is told of, temperature by temperature."""
STAND_IN = False
"""Whether the CPU does so, too, by calling the same function on the same memory: for tests."""


@dataclass(frozen=True)
class Annealed(Walkers):
    """Walkers at the end of a path, in `populations` independent groups of equal size.

    `log_weight` is raw and stays so through resampling, so that `log_partitions` can be read off it.
    `info` holds `acceptance` (mean probability of each temperature's moves, `(K,)`), `ess` (effective share of
    each population after each change of temperature, `(K, G)`) and `undefined` (how many energies were met that
    are not a number, and were taken as probability zero).

    Attributes:
        populations: G, how many independent groups the rows form.
        schedule: the path that was walked.
        complete: whether the schedule reached its end with even weights (false for a pilot that gave up).
    """

    populations: int = 1
    schedule: Schedule = field(default_factory=lambda: Schedule.equal(1))
    complete: bool = True

    @property
    def log_partitions(self) -> Tensor:
        """log of the mean weight of each population, `(G,)`: exp of it is unbiased for Z."""
        return log_mean_exp(self.log_weight.view(self.populations, -1), 1)


def of_all(own: Annealed) -> Annealed:
    """The populations of all processes, which walked the same path."""
    if not processes.is_many():
        return own
    info = {
        "acceptance": processes.average(own.info["acceptance"]),
        "ess": processes.joined(own.info["ess"].T).T,
        "undefined": processes.stacked(own.info["undefined"]).sum(),
    }
    x, log_weight = processes.joined(own.x), processes.joined(own.log_weight)
    populations = int(processes.stacked(torch.tensor(own.populations, device=x.device)).sum())
    return replace(own, x=x, log_weight=log_weight, info=info, populations=populations)


def anneal(
    energy: Energy,
    reference: Proposal,
    x: Tensor,
    schedule: Schedule,
    kernel: Kernel,
    rng: torch.Generator,
    *,
    steps: int = 1,
    populations: int = 1,
    resample_below: float = RESAMPLE_BELOW,
    jitter: float = STEP_JITTER,
) -> Annealed:
    """Carry walkers along `schedule`, from whichever end of the path it begins at.

    For k = 1…K: log w += −(β_k − β_{k−1})·(E(x) + log q(x)); populations whose ESS is under `resample_below` of
    their size are resampled and each walker gets the population's mean weight; `steps` moves at β_k.
    Nothing in the loop waits for the host.

    Args:
        energy: E, `(B, *event)` to `(B,)`.
        reference: q, normalised.
        x: draws from exp(−E_{β₀})/Z_{β₀}, `(G·n, *event)`, population after population.
        schedule: inverse temperatures and step sizes.
        kernel: leaves its target exactly invariant.
        rng: source of randomness.
        steps: moves at each temperature.
        populations: G.
        resample_below: 0 never resamples, which is annealed importance sampling.
        jitter: standard deviation of each walker's log step size around the schedule's.
    """
    require_invariant(kernel)
    require_count("populations", populations)
    require(x.shape[0] % populations == 0, "x", f"a multiple of {populations} rows", x.shape[0])
    betas, sizes = schedule.betas.to(x.device), schedule.step_sizes.to(x.device, x.dtype)
    log_weight = torch.zeros(populations, x.shape[0] // populations, dtype=torch.float64, device=x.device)
    bad = torch.zeros((), dtype=torch.int64, device=x.device)
    path: Any = path_for(energy, reference)
    fits = len(betas) > FUSED and x.is_cuda and fused.why_not(kernel, path.at(betas[0]), x) is None
    engine = "fused" if fits else "auto"

    def change(x: Tensor, log_weight: Tensor, bad: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        """From β_k to β_{k+1}: positions, log-weights, energies that are no numbers, ESS and acceptance."""
        before, after, size = (_at(values, k + by) for values, by in ((betas, 0), (betas, 1), (sizes, 1)))
        here = path.look(x)
        log_weight = log_weight + path.log_change(here, before, after).view_as(log_weight)
        ess, bad = ess_fraction(log_weight), bad + here.undefined()
        if resample_below > 0:
            rows, log_weight = resample_uneven(log_weight, ess < resample_below, rng)
            x, here = x[rows], here.rows(rows)
        tempered = path.at(after)
        state = path.state(kernel, tempered, x, here)
        h = jittered(size, x, jitter, rng) if isinstance(kernel, StepKernel) else None
        state, moves = run_chain(kernel, tempered, state, steps, rng, step_size=h, engine=engine)[:2]
        return state.x, log_weight, bad, ess, moves.acceptance.mean()

    parts = (energy, reference, kernel)
    (x, log_weight, bad), made = _changes(change, (x, log_weight, bad), len(betas) - 1, rng, parts)
    ess, acceptance = (torch.stack(values) for values in zip(*made, strict=True))
    info = {"acceptance": acceptance, "ess": ess, "undefined": bad}
    return Annealed(x, log_weight.flatten(), info, populations=populations, schedule=schedule)


def _at(values: Tensor, k: Tensor) -> Tensor:
    """`values[k]` for an index on the device, `(1,)`, which the host does not look at."""
    return values.index_select(0, k).squeeze(0)


def _changes(
    change: Callable[..., tuple[Tensor, ...]],
    state: tuple[Tensor, ...],
    count: int,
    rng: torch.Generator,
    parts: Any,
) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, ...]]]:
    """`change` for k = 0 … count − 1, and what each gave beside the state; on a GPU recorded once and launched.

    `parts` is all that it reads: what cannot be watched is not recorded.
    """
    device, made = state[0].device, []
    if (device.type == "cuda" or STAND_IN) and count >= LEAST and not is_recording():
        own = [*(t.clone() for t in state), torch.zeros(1, dtype=torch.int64, device=device)]

        def launch() -> tuple[Tensor, ...]:
            new = change(*own)
            for tensor, value in zip(own, (*new[: len(state)], own[-1] + 1), strict=True):
                tensor.copy_(value)
            return new[len(state) :]

        try:
            kept = [t for t in reads(parts, device).tensors.values() if not isinstance(t, nn.Parameter)]
            recording = record(launch, device, changes=[*own, *kept], generators=(rng,))
        except (CaptureError, UnwatchedError, torch.OutOfMemoryError, OutOfMemoryError) as error:
            warnings.warn(
                f"log Z: temperature by temperature, as a step {error}", RuntimeWarning, stacklevel=4
            )
        else:
            made = [tuple(value.clone() for value in recording.replay()) for _ in counted(WORK, count)]
            return tuple(own[:-1]), made
    for k in counted(WORK, count):
        new = change(*state, torch.full((1,), k, dtype=torch.int64, device=device))
        state = new[: len(state)]
        made.append(new[len(state) :])
    return state, made


def resample_uneven(log_weight: Tensor, uneven: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows that each walker continues from, `(G·n,)`, and the new raw log-weights, `(G, n)`."""
    G, n = log_weight.shape
    same = torch.arange(n, device=log_weight.device)
    # a population that has lost every walker has no weights to draw from: it stays, and its Z is 0
    drawn = resample_indices(log_weight.nan_to_num(neginf=-1e300), rng=rng, check=False)
    rows = torch.where(uneven[:, None], drawn, same) + n * torch.arange(G, device=same.device)[:, None]
    mean = log_mean_exp(log_weight)[:, None]
    return rows.flatten(), torch.where(uneven[:, None], mean, log_weight)


def jittered(step_size: Tensor, x: Tensor, jitter: float, rng: torch.Generator) -> Tensor:
    """One step size per walker, drawn without looking at the walker, so that the kernel stays invariant."""
    if jitter == 0:
        return step_size
    rows = normal_like(x.flatten(1)[:, 0], rng)
    return per_row(step_size * torch.exp(jitter * rows), x)


def require_invariant(kernel: Kernel) -> None:
    """Refuse a kernel that would bias the estimate."""
    if not kernel.invariant:
        raise UnsupportedError(
            f"kernel: {kernel.name!r} does not leave its target invariant, so the estimate of Z would be biased; "
            "use MALA or HMC"
        )
