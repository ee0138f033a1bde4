"""Step-size warm-up by dual averaging (Nesterov 2009; Hoffman and Gelman 2014, Section 3.2)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from metastable.core.errors import UnsupportedError
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
    tuned = replace(kernel, step_size=float(torch.exp(average.log_average)))
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
    if isinstance(kernel, ULA) and (kernel.noise is not None or kernel.drift_clip is not None):
        raise UnsupportedError(
            "warmup: a ULA kernel with its own noise or a clipped drift has no acceptance to adapt to; "
            "give its step_size"
        )
