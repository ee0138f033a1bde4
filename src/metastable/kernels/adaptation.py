"""A step size that fits: warm-up by dual averaging, and feedback for chains that never stop.

Warm-up is that of Nesterov (2009) and Hoffman and Gelman (2014, Section 3.2); it ends, and the step is fixed from
there on. The energy of a training moves on, so there the step follows it: after each update, by what was accepted
in it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from metastable.core.errors import LEAST, MOST, UnsupportedError
from metastable.core.types import Energy, per_row

from .base import ChainState, Kernel, StepKernel, require_events
from .mala import MALA
from .ula import ULA

K = TypeVar("K", bound=Kernel)


class DualAverage(NamedTuple):
    """log step size, its running average, the mean error and the number of updates: all on the device."""

    log_step: Tensor
    log_average: Tensor
    error: Tensor
    updates: Tensor


def dual_average_init(step_size: Tensor) -> DualAverage:
    """Start at `step_size`, shape `()`."""
    log_step = torch.log(step_size)
    return DualAverage(log_step, log_step, torch.zeros_like(log_step), torch.zeros_like(log_step))


def dual_average_update(
    s: DualAverage, acceptance: Tensor, target: float, anchor: Tensor, gamma: float = 0.05, t0: float = 10.0
) -> DualAverage:
    """One update: x = anchor − √t/γ · H̄, with Robbins–Monro weights t^{−0.75} in the average."""
    t = s.updates + 1
    error = (1 - 1 / (t + t0)) * s.error + (target - acceptance) / (t + t0)
    log_step = anchor - torch.sqrt(t) / gamma * error
    weight = t**-0.75
    return DualAverage(log_step, weight * log_step + (1 - weight) * s.log_average, error, t)


def follow_acceptance(log_step: Tensor, acceptance: Tensor, target: float, gain: float) -> Tensor:
    """log h, moved towards the step at which `target` of the Langevin proposals are accepted.

    The log ratio of such a proposal is about N(−s²/2, s²) with s² ∝ h³, so that 2Φ(−s/2) are accepted and log h is
    off by ⅔·log(s*/s); `gain` of that is made good, at most 4/3·`gain` at a time. Nothing waits for the host.

    Args:
        log_step: log h of the moves that were made, shape `()`.
        acceptance: the mean probability with which they were accepted, shape `()`.
        target: the acceptance wanted.
        gain: 1 would go all the way at once.

    >>> h = follow_acceptance(torch.tensor(0.0), torch.tensor(0.65), target=0.65, gain=1.0)
    >>> bool(h.abs() < 1e-5)
    True
    """
    wanted = 2 * NormalDist().inv_cdf(1 - target / 2)
    s = 2 * torch.special.ndtri(1 - acceptance / 2)
    off = (math.log(wanted) - torch.log(s)).clamp(-2, 2)
    return log_step + (2 * gain / 3) * off.to(log_step)


def unadjusted_target(dim: int, ratio: float = 0.1) -> float:
    """The acceptance MALA would have at the step at which ULA's variances are `ratio`/2 too wide, 0.8 at least.

    For width σ in every direction h = `ratio`·σ² makes s² = dim·`ratio`³/2.

    >>> round(unadjusted_target(1), 3), round(unadjusted_target(100), 3)
    (0.991, 0.911)
    """
    s = math.sqrt(dim * ratio**3 / 2)
    return max(math.erfc(s / (2 * math.sqrt(2))), 0.8)


def warm_up(
    kernel: K, energy: Energy, x: Tensor, steps: int, rng: torch.Generator, target: float | None = None
) -> tuple[K, ChainState]:
    """Run `steps` steps while adapting the step size; returns the kernel with it, and where the chains are.

    The acceptance is averaged over chains, so one step size serves all of them. ULA has no acceptance: it is
    warmed up as MALA, and takes the step at which MALA would accept `target` of its moves, 0.9 by default.
    """
    require_adaptable(kernel, energy)
    assert isinstance(kernel, StepKernel)
    target = kernel.target_acceptance if target is None else target
    moving: StepKernel = MALA(kernel.step_size) if isinstance(kernel, ULA) else kernel
    step = torch.as_tensor(kernel.step_size, dtype=x.dtype, device=x.device)
    anchor = torch.log(10 * step)
    average = dual_average_init(step)
    state = moving.init(energy, x)
    with torch.no_grad():
        for _ in range(steps):
            noise = moving.draw(x, rng, energy)
            state, info = moving.step(energy, state, noise, torch.exp(average.log_step))
            average = dual_average_update(average, info.acceptance.mean(), target, anchor)
    # bounds are for a flat energy
    tuned = replace(kernel, step_size=min(max(float(torch.exp(average.log_average)), LEAST), MOST))
    return tuned, tuned.init(energy, state.x)


class EachStep(NamedTuple):
    """A step size for each of G groups of chains, what it accepts, and where the chains are.

    Attributes:
        step_size: `(G,)`.
        acceptance: mean over a group's chains and the second half of the steps, `(G,)`.
        x: positions after the last step, `(G·K, *event)`.
    """

    step_size: Tensor
    acceptance: Tensor
    x: Tensor


def warm_up_each(
    kernel: StepKernel,
    energy: Energy,
    x: Tensor,
    steps: int,
    rng: torch.Generator,
    first: Tensor,
    target: float | None = None,
) -> EachStep:
    """`warm_up` with a step size for each group: the acceptance is averaged over the chains of a group only.

    Dual averaging starts anew halfway, from what it has found, so that a first guess that is far off is forgotten.

    Args:
        kernel: whose moves are made; its own step size is not looked at. ULA is warmed up as MALA.
        energy: of all rows.
        x: starts, `(G·K, *event)`, K for each group, in the groups' order.
        steps: in all.
        rng: of the moves.
        first: first guesses, `(G,)`.
        target: acceptance that is aimed at; the kernel's own by default.
    """
    require_adaptable(kernel, energy)
    target = kernel.target_acceptance if target is None else target
    moving: StepKernel = MALA(kernel.step_size) if isinstance(kernel, ULA) else kernel
    state, average = moving.init(energy, x), dual_average_init(first.to(x))
    accepted, halves = torch.zeros_like(average.log_step), (steps // 2, steps - steps // 2)
    with torch.no_grad():
        for part in halves:
            average = dual_average_init(average.log_average.exp())
            anchor, accepted = average.log_step, torch.zeros_like(accepted)
            for _ in range(part):
                h = step_of_rows(average.log_step.exp(), x)
                state, info = moving.step(energy, state, moving.draw(x, rng, energy), h)
                by_group = info.acceptance.view(len(first), -1).mean(1)
                average = dual_average_update(average, by_group, target, anchor)
                accepted = accepted + by_group
    return EachStep(average.log_average.exp(), accepted / max(halves[1], 1), state.x)


def step_of_rows(step_size: Tensor, x: Tensor) -> Tensor:
    """Step sizes of G groups, `(G,)`, as kernels take them: one for each row of `x`, `(G·K, 1, …, 1)`."""
    return per_row(step_size.to(x).repeat_interleave(len(x) // len(step_size)), x)


def require_adaptable(kernel: Kernel, energy: Energy) -> None:
    """Refuse kernels without a step size, or without an acceptance that it could be adapted to."""
    if not isinstance(kernel, StepKernel):
        raise UnsupportedError(f"warmup: {kernel.name!r} has no step size to adapt; leave warmup out")
    require_events(kernel, energy)
    if not kernel.invariant and not isinstance(kernel, ULA):
        raise UnsupportedError(
            f"warmup: {kernel.name!r} never rejects (invariant = False): there is no acceptance to adapt to; "
            "give its step_size and leave warmup out"
        )
    if isinstance(kernel, ULA) and (kernel.noise is not None or kernel.drift_clip is not None):
        raise UnsupportedError(
            "warmup: a ULA kernel with its own noise or a clipped drift has no acceptance to adapt to; "
            "give its step_size"
        )
