"""Chains for many contexts at once: their kernel, their moves, and what is said of them afterwards."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from metastable.core.errors import InputError, require
from metastable.core.types import Bound, Walkers
from metastable.kernels import MALA, ULA, Kernel, StepKernel, run_chain
from metastable.kernels.adaptation import require_adaptable, step_of_rows

from .conditional_starts import Starts, too_few
from .conditional_tuning import Starter, Tuned, steps_for

LOW = 0.2
"""Share of accepted moves below which a context's chains hardly moved."""
LEVELS = 10
"""Step sizes of a chain that is annealed."""


def choose_kernel(
    kernel: Kernel | None, tune: bool | None, target: Bound, start: Starter, careful: float | None = None
) -> tuple[Kernel, Tuned | None]:
    """The kernel of the chain, and a step size for each context where those are to be found."""
    wanted = kernel is None if tune is None else tune
    usual = MALA() if kernel is None else kernel
    if not wanted:
        return usual, None
    require_adaptable(usual, target)
    assert isinstance(usual, StepKernel)
    tuned = steps_for(target, usual, start, careful)
    return replace(usual, step_size=float(tuned.step_size.median())), tuned


def run_chains(
    target: Bound,
    rows: Tensor,
    kernel: Kernel | None,
    steps: int,
    rng: torch.Generator,
    engine: str,
    tuned: Tuned | None = None,
    anneal: float = 1.0,
) -> tuple[Tensor, dict[str, Any]]:
    """`steps` moves of every row, what they accepted, and the energies that one row cost.

    The step size falls to `anneal` times what it is at first, in `LEVELS` levels.
    """
    info: dict[str, Any] = {"kernel": kernel, "evaluations": 0}
    if kernel is None or steps == 0:
        return rows, info
    B, state, accepted = len(target.given), kernel.init(target, rows), 0.0
    h = None if tuned is None else step_of_rows(tuned.step_size, rows)
    alone = isinstance(kernel, StepKernel) and not (isinstance(kernel, ULA) and kernel.noise is not None)
    rule = "1 for a kernel without a step size, or with noise of its own, which would stay and heat the chain"
    require(anneal == 1 or alone, "anneal", rule, anneal)
    for share, moves in step_levels(steps, anneal):
        now = h if anneal == 1 else share * (kernel.step_size if h is None else h)  # pyright: ignore
        result = run_chain(kernel, target, state, moves, rng, engine=engine, step_size=now)
        state, accepted = result.state, accepted + result.info.acceptance * (moves / steps)
    info |= {
        "acceptance": torch.as_tensor(accepted).view(B, -1).mean(1),
        "evaluations": kernel.evaluations(steps),
        "temperature": kernel.temperature,
    }
    if isinstance(kernel, StepKernel):
        alike = torch.full((B,), kernel.step_size, dtype=torch.float64, device=rows.device)
        info["step_size"] = alike if tuned is None else tuned.step_size
    return state.x, info


def step_levels(steps: int, anneal: float) -> list[tuple[float, int]]:
    """(share of the step size, moves with it) of `steps` moves: from 1 down to `anneal` in even ratios.

    >>> step_levels(7, 1.0), step_levels(3, 0.25)
    ([(1.0, 7)], [(1.0, 1), (0.5, 1), (0.25, 1)])
    """
    levels = 1 if anneal == 1 else min(LEVELS, steps)
    shares = [anneal ** (i / max(1, levels - 1)) for i in range(levels)]
    return [(share, (i + 1) * steps // levels - i * steps // levels) for i, share in enumerate(shares)]


def checked_walkers(rows: Tensor, like: Tensor, info: dict[str, Any], others: int) -> Walkers:
    """Walkers of equal weight, checked; `others` are energies beside those of the chains."""
    x = rows.view(like.shape)
    require_finite(x, f"the chains with {info['kernel']}; try a smaller step_size or MALA:")
    total = info.pop("evaluations", 0) * len(rows) + others
    info |= {"energy_rows": total, "evaluations": math.ceil(total / len(rows))}
    info["warnings"] = info.get("warnings", ()) + _stuck(info)
    return Walkers(x, torch.zeros(x.shape[:2], dtype=torch.float64, device=x.device), info)


def _stuck(info: dict[str, Any]) -> tuple[str, ...]:
    """Words for contexts whose chains hardly moved."""
    acceptance = info.get("acceptance")
    if acceptance is None or not bool((acceptance < LOW).any()):
        return ()
    worst = int(acceptance.argmin())
    step = f" at step size {float(info['step_size'][worst]):.3g}" if "step_size" in info else ""
    return (
        f"for {int((acceptance < LOW).sum())} of {len(acceptance)} contexts fewer than {LOW:.0%} of the moves were "
        f"accepted (context {worst}: {float(acceptance[worst]):.2g}{step}): their walkers are near their starts; "
        "leave kernel out or say tune=True, which finds a step for each context, or take more steps",
    )


def said_of_starts(starts: Starts) -> dict[str, Any]:
    """Effective draws behind the starts, and words where they are few."""
    if starts.ess is None:
        return {}
    few, n = too_few(starts), starts.y.shape[1]
    said = {"start_ess_given": starts.ess, "start_ess": float(starts.ess.clamp(max=n).sum())}
    if not bool(few.any()):
        return said
    worst = int(starts.ess.argmin())
    words = (
        f"for {int(few.sum())} of {len(few)} contexts few draws of the proposal carry the weight of the starts "
        f"(context {worst}: {float(starts.ess[worst]):.1f} of {starts.draws}), so that shares of branches are "
        "uncertain; use a nearer proposal, or more candidates"
    )
    return said | {"warnings": (words,)}


def require_finite(x: Tensor, what: str) -> None:
    """Name the first context with rows that are not finite."""
    lost = ~x.isfinite().flatten(1).all(1)
    if bool(lost.any()):
        raise InputError(
            f"{what} left every finite region for context {int(lost.nonzero()[0])} (counting from 0)"
        )
