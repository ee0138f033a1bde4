"""Where chains for contexts start: draws of a proposal q, taken in proportion to exp(−E)/q.

Chains move within a branch, hardly from one to the other, so that a branch keeps the share it had at the start. Of
M draws for a context, n are therefore taken in proportion to w = exp(−E(y | c))/q(y | c) (sampling-importance-
resampling; D. B. Rubin, 1987), and have the model's own shares, as far as q reaches its branches and
ESS = (Σw)²/Σw² draws tell them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import InputError
from metastable.core.protocols import Refinable, Scored, event_shape_of, is_biased, provides
from metastable.core.resampling import resample_indices
from metastable.core.types import Bound
from metastable.core.weights import ess_fraction
from metastable.proposals.given import sample_and_log_prob_given, sample_given
from metastable.walkers.population import principal_scores

CANDIDATES, LEAST = 32, 1024
"""Draws for each start, and at least for each context, where a draw costs about as much as an energy."""
CANDIDATES_ODE, LEAST_ODE = 4, 256
"""The same of a flow that solves an ODE: its draws cost a hundred energies, and it is nearer to the model."""
TOGETHER = 2**17
"""Draws of all contexts together above which a context need not have the least, only those for its starts."""
ROWS, NUMBERS = 2**17, 2**23
"""Draws in memory at once, and numbers that they consist of; also the most for one context beyond its n."""
FEWEST, ENOUGH = 10, 50
"""Effective draws that a context needs, whatever n is, and that are enough for any n."""


class Starts(NamedTuple):
    """Starts of each of B contexts.

    Attributes:
        y: `(B, n, *event)`.
        spread: variances of the draws behind them, the least of any number, `(B,)`: starts may be copies of a few.
        ess: effective draws behind them, `(B,)`, float64; None for the proposal's own draws.
        draws: M, made for each context.
        rows: energies evaluated, of all contexts together.
    """

    y: Tensor
    spread: Tensor
    ess: Tensor | None
    draws: int
    rows: int


@torch.no_grad()
def draw_starts(
    target: Bound, proposal: Any, n: int, rng: torch.Generator, candidates: int | None = None
) -> Starts:
    """n starts for each context, in proportion to exp(−E)/q among `candidates` times as many draws of q.

    Args:
        target: E(· | given) of B contexts.
        proposal: q; one whose `log_prob` is an estimate, or is missing, gives its own draws.
        n: starts for each context.
        rng: of the draws and of the choice among them.
        candidates: draws for each start; 1 gives the proposal's own draws, and weighs nothing. By default
            `CANDIDATES`, or `CANDIDATES_ODE` where a draw solves an ODE.
    """
    if candidates == 1 or not can_weigh(proposal):
        return own_draws(sample_given(proposal, n, rng, target.given))
    B = len(target.given)
    M = _draws(proposal, n, candidates, B)
    at_once = max(1, _rows_at_once(proposal) // M)
    parts = [
        _weighed(target.some(slice(i, i + at_once)), proposal, n, M, rng, i) for i in range(0, B, at_once)
    ]
    y, spread, ess = (torch.cat(column) for column in zip(*parts, strict=True))
    return Starts(y, spread, ess, M, B * M)


def own_draws(y: Tensor) -> Starts:
    """Draws `(B, n, *event)` as they are."""
    return Starts(y, least_variance(y), None, y.shape[1], 0)


def least_variance(y: Tensor) -> Tensor:
    """Of `(B, K, *event)`, the least variance of a number of the event, for each context, `(B,)`."""
    return y.flatten(2).var(1, correction=0).amin(1)


def can_weigh(proposal: Any) -> bool:
    """Whether its draws can be weighed: it has a density, and that is no estimate."""
    return provides(proposal, Scored) and not is_biased(proposal)


def too_few(starts: Starts) -> Tensor:
    """Contexts whose starts rest on a few draws, `(B,)`: fewer effective ones than n, where n is small itself."""
    assert starts.ess is not None
    return starts.ess < min(max(starts.y.shape[1], FEWEST), ENOUGH)


def pilot_candidates(proposal: Any, starts: int) -> int:
    """Draws for each of so many starts that only find a step size: fewer where there are many, and of an ODE."""
    return CANDIDATES_ODE if provides(proposal, Refinable) else min(64, max(8, TOGETHER // (4 * starts)))


def _draws(proposal: Any, n: int, candidates: int | None, contexts: int) -> int:
    """M: what is wanted, as far as it fits into memory at once, and at least n."""
    ode = provides(proposal, Refinable)
    if candidates is None:
        least = min(LEAST_ODE if ode else LEAST, TOGETHER // contexts)
        wanted = max(n * (CANDIDATES_ODE if ode else CANDIDATES), least)
    else:
        wanted = n * candidates
    return max(n, min(wanted, _rows_at_once(proposal)))


def _rows_at_once(proposal: Any) -> int:
    size = math.prod(event_shape_of(proposal) or ())
    return max(1, min(ROWS, NUMBERS // max(size, 1)))


def _weighed(
    target: Bound, proposal: Any, n: int, draws: int, rng: torch.Generator, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Starts of a few contexts, `(b, n, *event)`, the spread of all draws, and how many are effective, `(b,)`."""
    y, log_q = sample_and_log_prob_given(proposal, draws, rng, target.given)
    E = target(y.flatten(0, 1)).view(log_q.shape)
    log_weight = -E.double() - log_q.double()
    _require_weights(log_weight, first)
    # neighbours side by side: a systematic choice then keeps the mass of every branch to within a walker or two
    order = principal_scores(y.flatten(2), log_weight.softmax(1)).argsort(1)
    rows = resample_indices(log_weight, n, scheme="systematic", rng=rng, order=order)
    chosen = y[torch.arange(len(y), device=y.device)[:, None], rows]
    return chosen, least_variance(y), ess_fraction(log_weight) * draws


def _require_weights(log_weight: Tensor, first: int) -> None:
    """Refuse weights that choose nothing, with the context that has them."""
    wrong = log_weight.isnan() | log_weight.isposinf()
    if bool(wrong.any()):
        context = first + int(wrong.any(1).nonzero()[0])
        raise InputError(
            f"energy: the weight exp(−E)/q of {int(wrong.sum())} draws of the proposal is not finite, first for "
            f"context {context} (counting from 0)"
        )
    none = log_weight.isneginf().all(1)
    if bool(none.any()):
        raise InputError(
            f"proposal: none of {log_weight.shape[1]} draws for context {first + int(none.nonzero()[0])} (counting "
            "from 0) has a finite energy; use a proposal that reaches where the energy is"
        )
