"""Runs chains: eagerly, or compiled as one function of tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import require_choice, require_count
from metastable.core.types import Energy

from .base import ChainState, Info, Kernel, Noise
from .fusion import fused

ENGINES = ("eager", "compile")
UNROLL = 8
"""Gradients in one compiled call: enough to hide the call, few enough to compile in seconds."""
VARIANTS = 256
"""Kernels × energies × batch shapes that one process may compile; torch's own limit of 8 is an error here."""

Advance = Callable[[ChainState, list[Noise], Tensor], tuple[ChainState, Info]]


class ChainResult(NamedTuple):
    """The final state, mean diagnostics over the run, and positions `(draws, B, *event)` if recorded."""

    state: ChainState
    info: Info
    trace: Tensor | None


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
        step_size: overrides the kernel's, e.g. a tensor during warm-up.
        record: keep every `record`-th position; 0 keeps none, so that memory does not grow with `steps`.
    """
    require_count("steps", steps, 0)
    require_choice("engine", engine, ENGINES)
    x = state.x
    h = torch.as_tensor(kernel.step_size if step_size is None else step_size, dtype=x.dtype, device=x.device)
    unroll = max(1, UNROLL // kernel.gradients_per_step) if engine == "compile" and not record else 1
    advance = compiled(kernel, energy) if engine == "compile" else _eager(kernel, energy)
    total, trace, done = _no_info(x), [], 0
    with torch.no_grad():
        while done < steps:
            count = unroll if steps - done >= unroll else 1
            noises = [kernel.draw(x, rng) for _ in range(count)]
            state, info = advance(state, noises, h)
            total = Info(total.acceptance + info.acceptance, total.moved + info.moved)
            done += count
            if record and done % record == 0:
                trace.append(state.x.clone())
    mean = Info(*(value / max(steps, 1) for value in total))
    return ChainResult(state, mean, torch.stack(trace) if trace else None)


def _no_info(x: Tensor) -> Info:
    zero = x.new_zeros(x.shape[0])
    return Info(zero, zero)


def _advance(
    kernel: Kernel, energy: Energy, state: ChainState, noises: list[Noise], h: Tensor
) -> tuple[ChainState, Info]:
    total = _no_info(state.x)
    for noise in noises:
        state, info = kernel.step(energy, state, noise, h)
        total = Info(total.acceptance + info.acceptance, total.moved + info.moved)
    return state, total


def _eager(kernel: Kernel, energy: Energy) -> Advance:
    return functools.partial(_advance, kernel, energy)


def compiled(kernel: Kernel, energy: Energy) -> Advance:
    """The compiled chain of this kernel on this energy; parameters may change, the code is kept."""
    return functools.partial(_compiled_advance(), kernel, energy)


@functools.cache
def _compiled_advance() -> Callable[..., tuple[ChainState, Info]]:
    """One compiled function for all chains: the compiler keeps its own code per kind of kernel and energy.

    Energies are arguments, so that two networks of one architecture share code and nothing here keeps a
    network alive.
    """
    known = inspect.signature(torch.compile).parameters
    limit: dict[str, Any] = {"recompile_limit": VARIANTS} if "recompile_limit" in known else {}
    return fused(torch.compile(_advance, fullgraph=True, dynamic=False, **limit))
