"""Draws and densities for contexts, from proposals that know of contexts and from those that do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from metastable.core.batch import Batch
from metastable.core.protocols import JointlyScored, Refinable, context_shape_of, provides


def is_conditional(proposal: Any) -> bool:
    """Whether a proposal's density depends on a context: it says of which shape contexts are."""
    return context_shape_of(proposal) is not None


def sample_given(
    proposal: Any, n: int, rng: torch.Generator, given: Tensor | None, *, gradients: bool = False
) -> Tensor:
    """`n` draws for each of B contexts, `(B, n, *event)`; one without contexts draws alike for all of them.

    Without contexts `(n, *event)`. With `gradients` they flow through the draws, by the proposal's `rsample`.

    >>> from metastable.proposals import Gaussian
    >>> sample_given(Gaussian(torch.zeros(2)), 5, torch.Generator().manual_seed(0), torch.zeros(3, 1)).shape
    torch.Size([3, 5, 2])
    """
    sample = proposal.rsample if gradients else proposal.sample
    if given is None:
        return sample(n, rng)
    if is_conditional(proposal):
        return sample(n, rng, given)
    x = sample(len(given) * n, rng)
    return x.view(len(given), n, *x.shape[1:])


def log_prob_given(proposal: Any, x: Tensor, given: Tensor | None) -> Tensor:
    """Log-densities of `x`, `(B, n, *event)` to `(B, n)`; without contexts `(n, *event)` to `(n,)`."""
    if given is None:
        return proposal.log_prob(x)
    if is_conditional(proposal):
        return proposal.log_prob(x, given)
    return proposal.log_prob(x.flatten(0, 1)).view(x.shape[:2])


def sample_and_log_prob_given(
    proposal: Any, n: int, rng: torch.Generator, given: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The draws of `sample_given` with the log-densities of `log_prob_given`, together where the proposal can."""
    if not provides(proposal, JointlyScored):
        x = sample_given(proposal, n, rng, given)
        return x, log_prob_given(proposal, x, given)
    if given is None:
        return proposal.sample_and_log_prob(n, rng)
    if is_conditional(proposal):
        return proposal.sample_and_log_prob(n, rng, given)
    x, log_prob = proposal.sample_and_log_prob(len(given) * n, rng)
    return x.view(len(given), n, *x.shape[1:]), log_prob.view(len(given), n)


def log_prob_of(proposal: Any, batch: Batch) -> Tensor:
    """Log-densities of the rows of a batch, `(B,)`, each given its own context where rows have one."""
    if batch.given is None:
        return proposal.log_prob(batch.x)
    return log_prob_given(proposal, batch.x[:, None], batch.given)[:, 0]


def finely(proposal: Any) -> Any:
    """The proposal where numbers rest on its log-densities: a continuous flow in more steps, others as they are."""
    return proposal.finely() if provides(proposal, Refinable) else proposal
