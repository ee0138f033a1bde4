"""Importance sampling: draws of a proposal, weighted, are walkers of a model, and their mean weight is Z.

With x ~ q and w = exp(−E(x))/q(x), averages with weights w are averages over the model, and E[w] = Z. It needs no
chain, and is worth what the proposal is worth: where few draws carry the weight, nothing is said at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.memory import rows_at_once
from metastable.core.parts import home_of
from metastable.core.precision import unrounded
from metastable.core.protocols import StepwiseSolved, provides
from metastable.core.random import derive, generator
from metastable.core.types import Energy, LogPartition, Proposal, Walkers
from metastable.core.weights import ess_fraction, log_mean_exp, require_weight, spread_of_log_mean

POPULATIONS = 64
"""Independent groups of draws, whose spread is the standard error."""
LEAST_ESS, LEAST_SHARE = 50.0, 0.01
"""Effective draws, and their share of all, below which the weights are those of a few lucky draws."""
DOUBTFUL_SHARE = 0.05
AT_ONCE = 4096
"""Draws that go through the energy together."""
ODE_DRAWS, LEAST_ODE_DRAWS = 512, 16
"""Draws, in all and of each context, that are made once more with twice the steps where an ODE makes them."""
ODE_TOLERATED = 0.01
"""Error of log Z from the ODE up to which it is in the error bar only; beyond it is said in words."""


def importance_walkers(energy: Energy, proposal: Proposal, n: int, seed: int = 0) -> Walkers | None:
    """About `n` draws of `proposal` with log-weights −E − log q; None where these say nothing about E.

    The random numbers are those of `seed`, whenever they are drawn, so that a run that is read back gives the same
    number, and another run another one. Where a draw is the solution of an ODE, what that leaves in log Z is in
    `info["ode_shift"]`.

    >>> from metastable.proposals import Gaussian
    >>> walkers = importance_walkers(lambda x: 0.5 * x.square().sum(1), Gaussian(torch.zeros(2), 1.5), 4096)
    >>> round(importance_log_partition(walkers).value, 1)  # log 2π = 1.84
    1.8
    """
    size = max(1, n // POPULATIONS)
    x, log_weight = _weighted(energy, proposal, size * POPULATIONS, seed)
    share = float(ess_fraction(log_weight))
    if not (share >= LEAST_SHARE and share * len(x) >= LEAST_ESS):  # so that NaN is refused too
        return None
    info: dict[str, Any] = {"ess_fraction": share, "populations": [size] * POPULATIONS}
    shift = ode_shift(proposal, lambda q: _weighted(energy, q, ode_draws(len(x)), seed)[1])
    return Walkers(x, log_weight, info if shift is None else {**info, "ode_shift": shift})


@torch.no_grad()
def _weighted(energy: Energy, proposal: Any, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draws, always the same ones for a seed, and their log-weights, in float64."""
    rng = generator(derive(seed, "importance"), home_of(proposal).device)
    with unrounded(home_of(proposal)):
        if provides(proposal, StepwiseSolved):  # one ODE instead of two
            x, log_q = proposal.sample_and_log_prob(n, rng)
        else:
            x = proposal.sample(n, rng)
            log_q = torch.cat([proposal.log_prob(part) for part in x.split(AT_ONCE)])
    parts = x.split(rows_at_once(energy, x, AT_ONCE))
    return x, torch.cat([-energy(part) for part in parts]).double() - log_q.double()


class OdeShift(NamedTuple):
    """What log Z would change by, `(…)`, if the ODE behind the draws were solved exactly, and how sure that is."""

    value: Tensor
    std_error: Tensor

    def too_coarse(self, spread: Tensor) -> Tensor:
        """Whether that is surely more than the draws' own spread, and more than a trifle."""
        return self.value.abs() - 3 * self.std_error > spread.clamp(min=ODE_TOLERATED)


def ode_shift(proposal: Any, log_weights: Callable[[Any], Tensor]) -> OdeShift | None:
    """What the ODE of a continuous flow leaves in log Z: 4/3 of what changes as its steps are doubled.

    Draws and densities are those of the ODE's solution only up to the error of Heun's and the trapezoidal rule,
    which falls by four as steps and divergences are doubled. No spread of the weights shows it: the same draws are
    made once more, from the same latents, so that few of them do.

    Args:
        proposal: a density; a continuous flow has `with_steps`, `steps` and `scored`.
        log_weights: from a proposal to log-weights `(…, draws)` of draws that are always the same ones.

    Returns:
        Numbers for each of `(…)`; None where no ODE is solved.
    """
    if not provides(proposal, StepwiseSolved):
        return None
    finer = proposal.with_steps(2 * proposal.steps, 2 * proposal.scored)
    here, there = (log_weights(q) for q in (proposal, finer))
    change = log_mean_exp(there) - log_mean_exp(here)
    moved = torch.softmax(there, -1) - torch.softmax(here, -1)  # by the delta method, each draw's part in it
    noise = math.sqrt(here.shape[-1]) * moved.std(-1)
    lost = change.isnan() | noise.isnan()  # where all weights are 0, which is said elsewhere
    return OdeShift(*(4 / 3 * numbers.masked_fill(lost, 0.0) for numbers in (change, noise)))


def ode_draws(draws: int, contexts: int = 1) -> int:
    """Draws for each context that `ode_shift` needs, and that cost less than half of what `draws` do.

    >>> ode_draws(8192), ode_draws(8192, contexts=64), ode_draws(512)
    (512, 16, 64)
    """
    return min(draws, max(LEAST_ODE_DRAWS, min(ODE_DRAWS // contexts, draws // 8)))


def ode_words(shift: Tensor) -> str:
    """That an ODE is solved too coarsely, and what to do."""
    most = float(shift.abs().max())
    return (
        f"the proposal's ODE is solved too coarsely, which leaves up to {most:.2g} in log Z; use "
        "proposal.with_steps(steps, scored) with more of both"
    )


def importance_log_partition(walkers: Walkers) -> LogPartition:
    """log Z from the walkers of `importance_walkers`; its error: the spread of its groups, and what an ODE adds."""
    require_weight(walkers.log_weight)
    groups = len(walkers.info["populations"])
    per_group = log_mean_exp(walkers.log_weight.view(groups, -1), 1)
    share = float(walkers.info["ess_fraction"])
    few = f"only {100 * share:.1f} % of the proposal's draws carry the weight; use a nearer proposal"
    warnings = [few] if share < DOUBTFUL_SHARE else []
    spread, shift = spread_of_log_mean(per_group), walkers.info.get("ode_shift")
    if shift is not None and bool(shift.too_coarse(spread)):
        warnings.append(ode_words(shift.value))
    error = float(spread if shift is None else torch.hypot(spread, shift.value))
    return LogPartition(
        float(log_mean_exp(per_group)), error, share * len(walkers), groups - 1, tuple(warnings)
    )
