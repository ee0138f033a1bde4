"""Runs chains of any kernel on any energy."""

from __future__ import annotations

import torch
from torch import Tensor

from metastable.core.errors import UnsupportedError, require_count
from metastable.core.memory import rows_in_words, within_memory
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
    choice, trace = choose(kernel, energy, x, steps, engine), []
    say_once(engine, choice)
    kept = lambda: f" with {len(trace)} positions of each kept" if trace else ""  # noqa: E731
    held = {"chains": len(x)} | ({"steps/record": steps // record} if record else {})
    with within_memory("chains", lambda: rows_in_words(x, "chains") + kept(), held):
        if choice.engine == "fused" and not record:
            options = {"step_size": h, "slopes": slopes, "precision": fused_precision()}
            made = in_one_launch(kernel, energy, x, steps, rng, **options)
            if made is not None:
                return made
            choice = choose(kernel, energy, x, steps, engine)
        state = kernel.init(energy, x) if isinstance(state, Tensor) else state
        walk, stretch = Walk.start(state, slopes), min(record or steps, steps)
        advance = advance_by(choice, stretch, kernel, energy, h, rng, slopes)
        with torch.no_grad():
            for begin in range(0, steps, max(stretch, 1)):
                walk = advance(walk, min(stretch, steps - begin))
                if record and steps - begin >= record:
                    trace.append(walk.state.x.clone())
        count = max(steps, 1)
        mean = Info(walk.acceptance / count, walk.moved / count)
        moves = torch.stack(trace) if trace else None
        return ChainResult(walk.state, mean, moves, walk.slope / count if slopes else None)


def _step_size(kernel: Kernel, given: Tensor | float | None, x: Tensor) -> Tensor:
    """The step size as a tensor beside `x`; an empty one for a kernel that has none."""
    if not isinstance(kernel, StepKernel):
        if given is not None:
            raise UnsupportedError(f"step_size: {kernel.name!r} has none, got {given}")
        return x.new_empty(0)
    h = kernel.step_size if given is None else given
    return h.to(x) if isinstance(h, Tensor) else x.new_full((), h)  # nothing is copied from the host
