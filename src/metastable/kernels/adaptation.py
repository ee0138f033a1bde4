"""Step-size warm-up by dual averaging (Nesterov 2009; Hoffman and Gelman 2014, Section 3.2)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from metastable.core.errors import UnsupportedError
from metastable.core.types import Energy

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
    if not isinstance(kernel, StepKernel):
        raise UnsupportedError(f"warmup: {kernel.name!r} has no step size to adapt; leave warmup out")
    require_events(kernel, energy)
    if isinstance(kernel, ULA) and (kernel.noise is not None or kernel.drift_clip is not None):
        raise UnsupportedError(
            "warmup: a ULA kernel with its own noise or a clipped drift has no acceptance to adapt to; "
            "give its step_size"
        )
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
