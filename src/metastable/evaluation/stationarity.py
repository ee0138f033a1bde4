"""Do walkers stand where the model is? Moves that leave the model invariant must not change how they lie.

Weighted walkers that represent exp(−E)/Z still do after any number of moves that leave it invariant. Where a part
of the model is hard to enter, as the neck of a funnel, walkers that are let go on drift into it, and their mean
energy changes: mass was missing that no spread between populations shows, because all of them missed it. So some
walkers of every population go on, with steps of many lengths, and what changed is compared with how much it differs
between populations. Where that is not nothing, more of them go on for longer, and their answer counts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from metastable.core.resampling import resample_indices
from metastable.core.telling import counted
from metastable.core.types import Energy, row_sum, student_t_quantile
from metastable.kernels import Kernel, StepKernel, run_chain
from metastable.walkers.anneal import Annealed
from metastable.walkers.continuing import StepRange

ROWS, MOVES = 2048, 32
"""Walkers of all populations together that go on, and how often they move."""
LOOK_AGAIN = 2.5
"""Standard errors of change beyond which twice as many walkers go on for twice as long."""
SHORTER, LONGER = 0.1, 2.0
"""The steps go from this share of the path's last one to this multiple of it."""
COORDINATES = 32
"""Dimensions up to which each coordinate is looked at."""
FALSE_ALARM = 0.005
"""Chance that walkers of the model itself are said to drift."""
DOUBTFUL_ALARM = 0.05
"""The same where others of the same model did drift."""


class Drift(NamedTuple):
    """What changed most when walkers went on.

    Attributes:
        what: the quantity, in words.
        change: its mean change, in standard deviations over the walkers.
        score: the change in standard errors between populations.
        significant: whether walkers of the model would hardly ever change so much.
    """

    what: str
    change: float
    score: float
    significant: bool


def find_drift(
    energy: Energy, main: Annealed, kernel: Kernel, rng: torch.Generator, doubtful: bool = False
) -> Drift:
    """Let some walkers of every population of `main` go on under `kernel` at β = 1, and compare.

    Args:
        energy: E, which the walkers should represent.
        main: walkers at the end of the path, in populations.
        kernel: leaves its target invariant.
        rng: source of randomness.
        doubtful: walkers of this model were seen to drift before, so that a smaller sign of it counts, and is
            looked for harder.
    """
    if doubtful:
        return _drift(energy, main, kernel, rng, 4 * ROWS, 2 * MOVES, DOUBTFUL_ALARM)
    first = _drift(energy, main, kernel, rng, ROWS, MOVES, FALSE_ALARM)
    if abs(first.score) < LOOK_AGAIN:
        return first._replace(significant=False)
    return _drift(energy, main, kernel, rng, 2 * ROWS, 2 * MOVES, FALSE_ALARM)


def _drift(
    energy: Energy,
    main: Annealed,
    kernel: Kernel,
    rng: torch.Generator,
    rows: int,
    moves: int,
    false_alarm: float,
) -> Drift:
    G = main.populations
    log_weight = main.log_weight.view(G, -1)
    n = log_weight.shape[1]
    each = min(max(rows // G, 2), n)
    # a population that has lost every walker has no weights to draw from, and says nothing
    drawn = resample_indices(log_weight.nan_to_num(neginf=-1e300), each, rng=rng, check=False)
    x = main.x[(drawn + n * torch.arange(G, device=drawn.device)[:, None]).flatten()]
    state = kernel.init(energy, x)
    before = _looks(x, state.energy)
    last = float(main.schedule.step_sizes[-1])
    sizes = StepRange(SHORTER * last, LONGER * last)
    for _ in counted("log Z: whether walkers drift", moves):
        h = sizes.draw(x, rng) if isinstance(kernel, StepKernel) else None
        state = run_chain(kernel, energy, state, 1, rng, step_size=h).state
    after = _looks(state.x, state.energy)
    return _largest(before.view(G, each, -1), after.view(G, each, -1), x[0].numel(), false_alarm)


def _looks(x: Tensor, energy: Tensor) -> Tensor:
    """What is compared: energy, squared length, and coordinates with their squares where they are few."""
    z = x.flatten(1).double()
    few = [z, z.square()] if z.shape[1] <= COORDINATES else []
    return torch.cat([energy.double()[:, None], row_sum(z.square())[:, None], *few], 1)


def _largest(before: Tensor, after: Tensor, dim: int, false_alarm: float) -> Drift:
    """The most significant change; `(G, n, K)` each."""
    change = (after - before).mean(1)
    score = change.mean(0) / (change.std(0) / math.sqrt(len(change))).clamp(min=1e-300)
    score = torch.where(score.isfinite(), score, 0.0)
    k = int(score.abs().argmax())
    spread = float(before[..., k].std().clamp(min=1e-300))
    limit = student_t_quantile(1 - false_alarm / (2 * len(score)), len(change) - 1)
    if k < 2:
        name = ("mean energy", "mean squared length")[k]
    else:
        name = f"mean of coordinate {k - 1}" if k < 2 + dim else f"mean square of coordinate {k - 1 - dim}"
    return Drift(name, float(change.mean(0)[k]) / spread, float(score[k]), abs(float(score[k])) > limit)
