"""A pilot that learns temperatures and step sizes, and is then thrown away."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from metastable.core.errors import EnergyError, require_count
from metastable.core.types import Energy, Proposal
from metastable.core.weights import ess_fraction
from metastable.kernels import ChainState, Kernel, StepKernel, run_chain

from .anneal import RESAMPLE_BELOW, STEP_JITTER, Annealed, jittered, require_invariant, resample_uneven
from .path import Schedule, path_for

CONDITIONAL_ESS = 0.9
"""Effective share that one change of temperature leaves: sets the number of temperatures."""
MAX_TEMPERATURES = 500
"""A pilot that needs more jumps to β = 1, and says so."""
RUNAWAY = 300.0
"""A pilot whose walkers are further out than this many standard deviations of the reference jumps too."""
ENDLESS = 1e-9
"""As does one that is still not there at 1 − β below this."""


def find_schedule(
    energy: Energy,
    reference: Proposal,
    walkers: int,
    kernel: Kernel,
    rng: torch.Generator,
    *,
    steps: int = 4,
    conditional_ess: float = CONDITIONAL_ESS,
    max_temperatures: int = MAX_TEMPERATURES,
) -> Annealed:
    """A pilot run that chooses each next β so that the change leaves `conditional_ess`, and tunes step sizes.

    Its own weights are a good guess but not unbiased, because the path looked at them: use its `schedule` on
    fresh walkers. `complete` is false where the path had to end in a jump: too many temperatures, or walkers that
    run away because exp(−E) has no integral.
    """
    require_invariant(kernel)
    require_count("walkers", walkers, 2)
    with torch.no_grad():
        x = reference.sample(walkers, rng)
    log_weight = torch.zeros(1, walkers, dtype=torch.float64, device=x.device)
    path: Any = path_for(energy, reference)
    at_rest, centre, scale = path.at_rest(), x.mean(0), x.std(0)
    h, x, _ = _tuned(at_rest, kernel.init(at_rest, x), kernel, rng, own_step_size(kernel), 10)
    betas, sizes, acceptance, ess, bad, jumped = [0.0], [h], [], [], 0, False
    while betas[-1] < 1:
        here, left = path.look(x), 1 - betas[-1]
        _require_densities(path.gap(here))
        bad += int(here.undefined())
        # whether the typical walker has left every region where the reference has draws
        far = not path.discrete and ((x - centre) / scale).square().flatten(1).mean(1).median() > RUNAWAY**2
        jumped = len(betas) >= max_temperatures or left < ENDLESS or bool(far)
        changes = partial(path.log_changes, here, betas[-1])
        gain = left if jumped else _next_gap(log_weight[0], changes, left, conditional_ess)
        betas.append(1.0 if gain >= left else betas[-1] + gain)
        log_weight = log_weight + path.log_change(here, betas[-2], betas[-1])
        ess.append(ess_fraction(log_weight))
        rows, log_weight = resample_uneven(log_weight, ess[-1] < RESAMPLE_BELOW, rng)
        tempered = path.at(log_weight.new_tensor(betas[-1]))
        state = path.state(kernel, tempered, x[rows], here.rows(rows))
        h, x, accepted = _tuned(tempered, state, kernel, rng, h, steps)
        sizes.append(h)
        acceptance.append(accepted)
    info = {"acceptance": torch.tensor(acceptance), "ess": torch.stack(ess), "undefined": torch.tensor(bad)}
    schedule = Schedule(log_weight.new_tensor(betas), log_weight.new_tensor(sizes))
    return Annealed(x, log_weight.flatten(), info, schedule=schedule, complete=not jumped)


def _next_gap(log_weight: Tensor, changes: Callable[[Tensor], Tensor], left: float, target: float) -> float:
    """The largest change of β up to `left` that keeps the conditional ESS at `target`.

    (Σ W w)²/(Σ W w²) with W the weights so far and w those of the change: one number for each candidate Δβ of a
    grid over ten decades, then of a finer one between the two that enclose the answer.
    """

    def enclose(tries: Tensor) -> tuple[float, float]:
        """The last try of the good ones that come first, and the next; twice the same at either end."""
        log_w = changes(tries)
        once, twice = (torch.logsumexp(log_weight + k * log_w, 1) for k in (1, 2))
        good = torch.exp(2 * once - twice - torch.logsumexp(log_weight, 0)) >= target
        count = int(good.cumprod(0).sum())
        return float(tries[max(count - 1, 0)]), float(tries[min(count, len(tries) - 1)])

    low, high = enclose(left * torch.logspace(-10, 0, 61, dtype=torch.float64, device=log_weight.device))
    if low == high:
        return low
    return enclose(torch.linspace(low, high, 33, dtype=torch.float64, device=log_weight.device))[0]


def _tuned(
    energy: Energy, state: ChainState, kernel: Kernel, rng: torch.Generator, step_size: float, steps: int
) -> tuple[float, Tensor, float]:
    """`steps` moves while the step size follows the acceptance: step size, positions and acceptance after them."""
    if not isinstance(kernel, StepKernel):
        state, info = run_chain(kernel, energy, state, steps, rng)[:2]
        return step_size, state.x, float(info.acceptance.mean())
    log_step = state.x.new_tensor(step_size).log()
    accepted = torch.ones_like(log_step)
    for _ in range(steps):
        h = jittered(log_step.exp(), state.x, STEP_JITTER, rng)
        state, info = run_chain(kernel, energy, state, 1, rng, step_size=h)[:2]
        accepted = info.acceptance.mean()
        # the acceptance is a mean over all walkers, so the gain can be large and constant
        log_step = log_step + 1.5 * (accepted - kernel.target_acceptance)
    return float(log_step.exp()), state.x, float(accepted)


def _require_densities(gap: Tensor) -> None:
    if bool((gap == -torch.inf).any()):
        raise EnergyError(
            "energy: −inf on a walker, an infinite density; it must be bounded below where walkers go"
        )
    if not bool(torch.isfinite(gap).any()):
        raise EnergyError(
            f"energy: infinite or not a number on all {len(gap)} walkers that were drawn; give data or samples "
            "from where it is finite, or a reference with draws there"
        )


def own_step_size(kernel: Kernel) -> float:
    """That of a kernel; not a number for one that has none."""
    return kernel.step_size if isinstance(kernel, StepKernel) else math.nan
