"""Runs chains of any kernel on any energy."""

from __future__ import annotations

import torch
from torch import Tensor

from metastable.core.errors import UnsupportedError, require_count
from metastable.core.precision import laid_out
from metastable.core.types import Energy

from .base import ChainResult, ChainState, Info, Kernel, StepKernel, require_events
from .compiled import Walk
from .engine import advance_by, choose, fused_precision, in_one_launch, say_once


def run_chain(
    kernel: Kernel,
    energy: Energy,
    state: ChainState | Tensor,
    steps: int,
    rng: torch.Generator,
    *,
    engine: str = "auto",
    step_size: Tensor | float | None = None,
    record: int = 0,
    slopes: bool = False,
) -> ChainResult:
    """Advance every chain by `steps` steps.

    Args:
        kernel: the Markov step.
        energy: the target, exp(−energy).
        state: from `kernel.init`, or positions, which saves what an engine does not need of it.
        steps: how many steps.
        rng: source of the noise; the only randomness there is.
        engine: `auto`, the fastest that needs no compiler; `eager`, operation by operation; `compile`, the same
            function through `torch.compile` without a graph break, several steps a call, on a GPU recorded, too;
            `captured`, the steps as they are, recorded as a CUDA graph; `fused`, one kernel with the chains in
            registers. One that cannot run falls back and says why, which `engine.choose` says beforehand.
        step_size: overrides the kernel's, e.g. a tensor during warm-up; one for each row is `(B, 1, …, 1)`.
        record: keep every `record`-th position; 0 keeps none, so that memory does not grow with `steps`.
        slopes: also average ‖∇E‖ along each chain, from the gradients that the steps make anyway.
    """
    require_count("steps", steps, 0)
    require_events(kernel, energy)
    if isinstance(state, Tensor):
        state = laid_out(state, energy)
    x = state if isinstance(state, Tensor) else state.x
    h = _step_size(kernel, step_size, x)
    choice = choose(kernel, energy, x, steps, engine)
    say_once(engine, choice)
    if choice.engine == "fused" and not record:
        options = {"step_size": h, "slopes": slopes, "precision": fused_precision()}
        made = in_one_launch(kernel, energy, x, steps, rng, **options)
        if made is not None:
            return made
        choice = choose(kernel, energy, x, steps, engine)
    state = kernel.init(energy, x) if isinstance(state, Tensor) else state
    walk, trace, stretch = Walk.start(state, slopes), [], min(record or steps, steps)
    advance = advance_by(choice, stretch, kernel, energy, h, rng, slopes)
    try:
        with torch.no_grad():
            for begin in range(0, steps, max(stretch, 1)):
                walk = advance(walk, min(stretch, steps - begin))
                if record and steps - begin >= record:
                    trace.append(walk.state.x.clone())
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(out_of_memory(x, len(trace), error)) from error
    count = max(steps, 1)
    mean = Info(walk.acceptance / count, walk.moved / count)
    return ChainResult(
        walk.state, mean, torch.stack(trace) if trace else None, walk.slope / count if slopes else None
    )


def _step_size(kernel: Kernel, given: Tensor | float | None, x: Tensor) -> Tensor:
    """The step size as a tensor beside `x`; an empty one for a kernel that has none."""
    if not isinstance(kernel, StepKernel):
        if given is not None:
            raise UnsupportedError(f"step_size: {kernel.name!r} has none, got {given}")
        return x.new_empty(0)
    h = kernel.step_size if given is None else given
    return h.to(x) if isinstance(h, Tensor) else x.new_full((), h)  # nothing is copied from the host


def out_of_memory(x: Tensor, draws: int, error: Exception) -> str:
    """Which chains did not fit, and what to lower."""
    kept = f" with {draws} positions of each kept (a larger `record` keeps fewer)" if draws else ""
    return (
        f"chains: {len(x)} chains of shape {tuple(x.shape[1:])} in {str(x.dtype)[6:]} at once did not fit into the "
        f"memory of {x.device}{kept}; run fewer chains at once. {str(error).splitlines()[0]}"
    )
