"""Runs chains: eagerly, or compiled as one function of tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from metastable.core.errors import UnsupportedError, require_choice, require_count
from metastable.core.types import Energy, row_dot

from .base import ChainState, Info, Kernel, Noise, StepKernel, require_events
from .fusion import fused

ENGINES = ("eager", "compile")
UNROLL = 8
"""Gradients in one compiled call: enough to hide the call, few enough to compile in seconds."""
VARIANTS = 256
"""Kernels × energies × batch shapes that one process may compile; torch's own limit of 8 is an error here."""

LIMITS = (
    ("recompile_limit", "cache_size_limit"),
    ("accumulated_recompile_limit", "accumulated_cache_size_limit"),
)
"""The compiler's limits by the names they have had, the newer first: of one piece of code, and of its frames."""

Compiled = Callable[..., tuple[ChainState, Info, Tensor]]
Advance = Callable[[ChainState, list[Noise], Tensor, bool], tuple[ChainState, Info, Tensor]]


class ChainResult(NamedTuple):
    """The final state, mean diagnostics over the run, and positions `(draws, B, *event)` if recorded.

    `slope` is the mean of ‖∇E‖ over the positions x₀ … x_{k−1} of each chain, `(B,)`, if asked for; zero where
    the kernel has no gradients.
    """

    state: ChainState
    info: Info
    trace: Tensor | None
    slope: Tensor | None = None


def run_chain(
    kernel: Kernel,
    energy: Energy,
    state: ChainState,
    steps: int,
    rng: torch.Generator,
    *,
    engine: str = "eager",
    step_size: Tensor | float | None = None,
    record: int = 0,
    slopes: bool = False,
) -> ChainResult:
    """Advance every chain by `steps` steps.

    Args:
        kernel: the Markov step.
        energy: the target, exp(−energy).
        state: from `kernel.init`.
        steps: how many steps.
        rng: source of the noise; the only randomness there is.
        engine: `eager`, or `compile`, which runs the same function through `torch.compile` without a graph
            break, several steps a call.
        step_size: overrides the kernel's, e.g. a tensor during warm-up; one for each row is `(B, 1, …, 1)`.
        record: keep every `record`-th position; 0 keeps none, so that memory does not grow with `steps`.
        slopes: also average ‖∇E‖ along each chain, from the gradients that the steps make anyway.
    """
    require_count("steps", steps, 0)
    require_choice("engine", engine, ENGINES)
    x = state.x
    require_events(kernel, energy)
    h = _step_size(kernel, step_size, x)
    unroll = max(1, UNROLL // max(1, kernel.gradients_per_step)) if engine == "compile" and not record else 1
    advance = compiled(kernel, energy) if engine == "compile" else _eager(kernel, energy)
    total, slope, trace, done = _no_info(x), x.new_zeros(()), [], 0
    # a parametrised weight (spectral norm) is made once for the chain, not once for each step
    kept = nullcontext() if engine == "compile" else parametrize.cached()
    with torch.no_grad(), kept:
        while done < steps:
            count = unroll if steps - done >= unroll else 1
            noises = [kernel.draw(x, rng, energy) for _ in range(count)]
            state, info, met = advance(state, noises, h, slopes)
            total = Info(total.acceptance + info.acceptance, total.moved + info.moved)
            slope = slope + met
            done += count
            if record and done % record == 0:
                trace.append(state.x.clone())
    mean = Info(total.acceptance / max(steps, 1), total.moved / max(steps, 1))
    along = slope.expand(len(x)) / max(steps, 1) if slopes else None
    return ChainResult(state, mean, torch.stack(trace) if trace else None, along)


def _step_size(kernel: Kernel, given: Tensor | float | None, x: Tensor) -> Tensor:
    """The step size as a tensor beside `x`; an empty one for a kernel that has none."""
    if not isinstance(kernel, StepKernel):
        if given is not None:
            raise UnsupportedError(f"step_size: {kernel.name!r} has none, got {given}")
        return x.new_empty(0)
    h = kernel.step_size if given is None else given
    return (
        h.to(x) if isinstance(h, Tensor) else x.new_full((), h)
    )  # filled there: nothing is copied from the host


def _no_info(x: Tensor) -> Info:
    zero = x.new_zeros(x.shape[0])
    return Info(zero, zero)


def _advance(
    kernel: Kernel, energy: Energy, state: ChainState, noises: list[Noise], h: Tensor, slopes: bool
) -> tuple[ChainState, Info, Tensor]:
    total, slope = _no_info(state.x), state.x.new_zeros(())
    for noise in noises:
        before = state
        state, info = kernel.step(energy, state, noise, h)
        total = Info(total.acceptance + info.acceptance, total.moved + info.moved)
        if slopes:
            grad = before.grad if info.grad is None else info.grad
            slope = slope + row_dot(grad, grad).sqrt() if grad.numel() else slope
    return state, total, slope


def _eager(kernel: Kernel, energy: Energy) -> Advance:
    return functools.partial(_advance, kernel, energy)


def compiled(kernel: Kernel, energy: Energy) -> Advance:
    """The compiled chain of this kernel on this energy; parameters may change, the code is kept."""
    return functools.partial(_compiled_advance(), kernel, energy)


@functools.cache
def _compiled_advance() -> Compiled:
    """One compiled function for all chains: the compiler keeps its own code per kind of kernel and energy.

    Energies are arguments, so that two networks of one architecture share code and nothing here keeps a
    network alive.
    """
    known = inspect.signature(torch.compile).parameters
    own = {"recompile_limit": VARIANTS} if "recompile_limit" in known else {}
    made = torch.compile(_advance, fullgraph=True, dynamic=False, **own)  # pyright: ignore
    return fused(made if own else _roomy(made))


def _roomy(function: Compiled) -> Compiled:
    """`function`, with room for every variant while it runs, for a `torch.compile` that takes no limit of its own.

    The limits are the whole process's, so they are put back after each call, which costs some microseconds.
    """
    from torch._dynamo import config

    names = [name for pair in LIMITS if (name := next((n for n in pair if hasattr(config, n)), None))]
    return config.patch({name: max(VARIANTS, getattr(config, name)) for name in names})(function)
