"""Importance sampling: draws of a proposal, weighted, are walkers of a model, and their mean weight is Z.

With x ~ q and w = exp(−E(x))/q(x), averages with weights w are averages over the model, and E[w] = Z. It needs no
chain, and is worth what the proposal is worth: where few draws carry the weight, nothing is said at all.
"""

from __future__ import annotations

from typing import Any

import torch

from metastable.core.random import derive, generator
from metastable.core.types import Energy, LogPartition, Proposal, Walkers
from metastable.core.weights import ess_fraction, log_mean_exp, spread_of_log_mean

POPULATIONS = 64
"""Independent groups of draws, whose spread is the standard error."""
LEAST_ESS, LEAST_SHARE = 50.0, 0.01
"""Effective draws, and their share of all, below which the weights are those of a few lucky draws."""
DOUBTFUL_SHARE = 0.05
AT_ONCE = 4096
"""Draws that go through the energy together."""


def importance_walkers(energy: Energy, proposal: Proposal, n: int) -> Walkers | None:
    """About `n` draws of `proposal` with log-weights −E − log q; None where these say nothing about E.

    The random numbers are always the same ones, so that a run that is read back gives the same number.

    >>> from metastable.proposals import Gaussian
    >>> walkers = importance_walkers(lambda x: 0.5 * x.square().sum(1), Gaussian(torch.zeros(2), 1.5), 4096)
    >>> round(importance_log_partition(walkers).value, 1)  # log 2π = 1.84
    1.8
    """
    size = max(1, n // POPULATIONS)
    with torch.no_grad():
        x = proposal.sample(size * POPULATIONS, generator(derive(0, "importance"), _device(proposal)))
        parts = [-energy(part) - proposal.log_prob(part) for part in x.split(AT_ONCE)]
    log_weight = torch.cat(parts).double()
    share = float(ess_fraction(log_weight))
    if not (share >= LEAST_SHARE and share * len(x) >= LEAST_ESS):  # so that NaN is refused too
        return None
    return Walkers(x, log_weight, {"ess_fraction": share, "populations": [size] * POPULATIONS})


def importance_log_partition(walkers: Walkers) -> LogPartition:
    """log Z from the walkers of `importance_walkers`, with the spread of its groups as standard error."""
    groups = len(walkers.info["populations"])
    per_group = log_mean_exp(walkers.log_weight.view(groups, -1), 1)
    share = float(walkers.info["ess_fraction"])
    few = f"only {100 * share:.1f} % of the proposal's draws carry the weight; use a nearer proposal"
    return LogPartition(
        float(log_mean_exp(per_group)),
        float(spread_of_log_mean(per_group)),
        share * len(walkers),
        groups - 1,
        (few,) if share < DOUBTFUL_SHARE else (),
    )


def _device(proposal: Any) -> torch.device:
    """Where a proposal draws: where its tensors are."""
    tensors = [t for name in ("buffers", "parameters") for t in getattr(proposal, name, list)()]
    return tensors[0].device if tensors else torch.device("cpu")
