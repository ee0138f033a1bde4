"""Sampling that goes on from weighted walkers, without losing what their weights say.

Walkers are drawn in proportion to their weights, side by side along the direction in which they differ most, so
that modes keep their masses. Then they move by a kernel with an accept step, which leaves exp(−E) invariant:
weights stay equal, and a step that is too long for one region is refused there instead of carrying mass out of it.

One step size does not serve a narrow mode beside a wide one. Each walker draws a new one for each step,
log-uniformly over a range that holds what every region needs, and without looking at where it is, so that the
mixture of kernels is as invariant as each of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import InputError, require_count
from metastable.core.random import uniform_rows
from metastable.core.resampling import require_weights, resample_indices
from metastable.core.telling import counted
from metastable.core.types import Energy, Walkers, per_row
from metastable.kernels import MALA, StepKernel, run_chain
from metastable.kernels.base import ChainState

from .population import principal_scores

WARM_UP_WALKERS = 1024
WARM_UP_STEPS = 120
FIRST_STEP = 0.05
"""Where the warm-up begins; 60 steps of its first half take it fifty nats up or down."""
EDGE = 0.005
"""Share of the warm-up's walkers at either end whose own step size does not widen the range."""


class StepRange(NamedTuple):
    """The step sizes that walkers draw from, log-uniformly."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The geometric mean."""
        return math.sqrt(self.low * self.high)

    def draw(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """One step size for each row of `x`, `(B, 1, …, 1)`; drawn without looking at the row."""
        span = math.log(self.high / self.low)
        return per_row(self.low * torch.exp(span * uniform_rows(x, rng)), x)


def drawn_side_by_side(walkers: Walkers, n: int, rng: torch.Generator) -> Tensor:
    """`n` rows drawn in proportion to the weights, from walkers sorted so that modes keep their masses."""
    require_weights(walkers.log_weight, "walkers.log_weight")
    p = torch.softmax(walkers.log_weight.double(), 0)
    order = principal_scores(walkers.x.flatten(1)[None], p[None])[0].argsort()
    return resample_indices(walkers.log_weight, n, rng=rng, order=order)


def find_step_range(
    kernel: StepKernel, energy: Energy, x: Tensor, rng: torch.Generator, steps: int = WARM_UP_STEPS
) -> StepRange:
    """What step size each walker's own acceptance asks for, from the shortest to the longest.

    Every row of `x` runs a chain whose log step size follows its own acceptance towards the kernel's target
    (Robbins and Monro): first fast, to find its scale, then slowly, and the mean of the second half is kept. The
    chains are thrown away.
    """
    require_count("steps", steps, 2)
    state = kernel.init(energy, x)
    log_step = torch.full_like(x.flatten(1)[:, 0], math.log(kernel.step_size))
    total = torch.zeros_like(log_step)
    for k in counted("finding step sizes", steps):
        gain = 2.0 if k < steps // 2 else 0.5
        state, info = run_chain(kernel, energy, state, 1, rng, step_size=per_row(log_step.exp(), x))[:2]
        log_step = log_step + gain * (info.acceptance - kernel.target_acceptance)
        total = total + log_step if k >= steps // 2 else total
    own = (total / (steps - steps // 2)).double()
    low, high = own.quantile(EDGE), own.quantile(1 - EDGE)
    return StepRange(float(low.exp()), float(high.exp()))


def wander(
    energy: Energy, state: ChainState, sizes: StepRange, steps: int, rng: torch.Generator
) -> tuple[ChainState, float]:
    """`steps` moves by MALA from a range of step sizes, of each walker its own, and the share that was accepted."""
    kernel, accepted = MALA(sizes.middle), state.x.new_zeros(())
    for _ in counted("moving walkers", steps):
        h = sizes.draw(state.x, rng)
        state, info = run_chain(kernel, energy, state, 1, rng, step_size=h)[:2]
        accepted = accepted + info.acceptance.mean()
    return state, float(accepted) / max(steps, 1)


def continue_walkers(
    energy: Energy, walkers: Walkers, n: int, steps: int, step_size: float | None, rng: torch.Generator
) -> Walkers:
    """`n` walkers drawn in proportion to the weights, after `steps` moves by MALA: see `api.continue_sampling`."""
    require_count("steps", steps, 0)
    rows, sizes_before = drawn_side_by_side(walkers, n, rng), walkers.info.get("populations")
    x = walkers.x[rows]
    state = MALA().init(energy, x)
    bad = int((~state.energy.isfinite()).sum())
    if bad:  # from where there is no density nothing can move
        raise InputError(
            f"walkers: {bad} of {len(x)} walkers of positive weight stand where the energy is infinite or not a "
            "number; they are no samples of this energy"
        )
    if step_size is None:
        some = torch.linspace(0, n - 1, min(n, WARM_UP_WALKERS), device=x.device).round().long()
        sizes = find_step_range(MALA(FIRST_STEP), energy, x[some], rng)
    else:
        sizes = StepRange(step_size, step_size)
    state, acceptance = wander(energy, state, sizes, steps, rng)
    said: dict[str, object] = {
        "kernel": MALA(sizes.middle),
        "step_sizes": tuple(sizes),
        "acceptance": acceptance,
        "start_ess": walkers.ess,
    }
    if sizes_before is not None:  # which independent population each row came from, and how large those were
        ends = torch.tensor(sizes_before, device=rows.device).cumsum(0)
        said["drawn_from"] = torch.searchsorted(ends, rows, right=True)
        said["start_populations"] = list(sizes_before)
    return Walkers.equal(state.x, info=said)
