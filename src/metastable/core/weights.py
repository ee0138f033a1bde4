"""Arithmetic of raw log-weights. Weights are stored raw and normalised only where they are used."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .errors import InputError


def log_mean_exp(log_weight: Tensor, dim: int = -1) -> Tensor:
    """log of the mean of exp(`log_weight`) along `dim`.

    >>> bool(torch.isclose(log_mean_exp(torch.tensor([0.0, math.log(3.0)])), torch.tensor(math.log(2.0))))
    True
    """
    return torch.logsumexp(log_weight, dim) - math.log(log_weight.shape[dim])


def require_weight(log_weight: Tensor, name: str = "log_weight") -> Tensor:
    """The log-weights as they are; an error where they cannot be normalised, as when all of them are −inf.

    For where weights are put to use once, by people: it waits for the device, which training does not. There the
    NaN that such weights leave is found by the guard.

    Args:
        log_weight: `(…, N)`, N for each population.
        name: what an error calls them.
    """
    largest = log_weight.amax(-1)
    bad = ~torch.isfinite(largest)
    if bool(bad.any()):
        found = float(largest[bad].flatten()[0])
        of = "" if largest.dim() == 0 else f" of {int(bad.sum())} of {largest.numel()} populations"
        what = "all are −inf: exp(−E) is 0 at every row" if found == -math.inf else f"the largest is {found}"
        raise InputError(f"{name}: must have a finite largest value to be normalised{of}; {what}")
    return log_weight


def ess_fraction(log_weight: Tensor, dim: int = -1) -> Tensor:
    """Effective sample size over N, (Σw)²/(NΣw²) in (0, 1]: equation (13) of the Jarzynski paper."""
    w = torch.exp(log_weight - log_weight.amax(dim, keepdim=True))
    return w.sum(dim).square() / (log_weight.shape[dim] * w.square().sum(dim))


def log_mean_exp_and_ess(log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """`log_mean_exp` and `ess_fraction` along the last dimension, bit for bit, of exponentials made once."""
    n, largest = log_weight.shape[-1], log_weight.amax(-1, keepdim=True)
    w = torch.exp(log_weight - largest)
    total = w.sum(-1)
    return (total.log() + largest[..., 0]) - math.log(n), total.square() / (n * w.square().sum(-1))


def entropy_fraction(log_weight: Tensor, dim: int = -1) -> Tensor:
    """exp(entropy of the normalised weights) over N, in (0, 1]: 1 for equal weights."""
    log_p = torch.log_softmax(log_weight, dim)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e30)).sum(dim)
    return torch.exp(entropy) / log_weight.shape[dim]


def weighted_mean(values: Tensor, log_weight: Tensor) -> Tensor:
    """Σ softmax(log_weight)·values over the first dimension; `values` is `(N, ...)`."""
    p = torch.softmax(log_weight, 0).to(values.dtype)
    return torch.tensordot(p, values, dims=1)


def spread_of_log_mean(log_estimates: Tensor) -> Tensor:
    """Standard error of log-mean-exp over independent estimates, by the jackknife.

    The jackknife follows the log of the mean where the estimates are far from each other, which the delta
    method does not.
    """
    G = log_estimates.shape[0]
    if G < 2:
        return torch.full_like(log_estimates.sum(0), math.inf)
    keep = ~torch.eye(G, dtype=torch.bool, device=log_estimates.device)
    left_out = torch.stack([log_mean_exp(log_estimates[row], 0) for row in keep])
    return torch.sqrt((G - 1) / G * (left_out - left_out.mean(0)).square().sum(0))
