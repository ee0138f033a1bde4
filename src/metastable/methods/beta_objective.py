"""The β objective of robust training: what data and negatives count for in an update.

*Energy-based model training objective robust to inaccurate SGLD samples*, submission to ICLR 2025, Algorithm 1; its
symbols are those of `methods.robust`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from metastable.core.errors import InputError, require_choice
from metastable.core.weights import log_mean_exp

from .base import Metrics

VARIANTS = ("default", "no-positive", "batch-corrected", "true-objective")
IGNORED = 0.01
"""A negative that counts for less than this share of what it would count for without β is ignored."""


class Weights(NamedTuple):
    """What data and negatives count for in an update; all detached.

    Attributes:
        data: 1 for each datum in plain training, `(*K, N)`.
        negatives: their shares, `(*K, M)`, which sum to 1; together they count for the mean of `data`.
    """

    data: Tensor
    negatives: Tensor


def robust_loss(
    fp: Tensor,
    fn: Tensor,
    beta: float | Tensor,
    log_weight: Tensor | None = None,
    variant: str = "default",
    *,
    objective: bool = True,
) -> tuple[Tensor, Weights]:
    """Algorithm 1: the loss of an update, and the weights in its gradient.

    The gradient is minus (8), −(1/N)Σᵢ(1 − ẇ(x⁺ᵢ))·(∇f(x⁺ᵢ) − Σⱼ w(x⁻ⱼ)∇f(x⁻ⱼ)), or that of the variant. Adding a
    constant to f changes nothing, and nothing overflows however large f is.

    Dimensions before the last, `*K`, are models that are trained side by side: each has its own loss, `(*K,)`.

    Args:
        fp: f at the data, `(*K, N)`.
        fn: f at the negatives, `(*K, M)`.
        beta: β, or one for each model, `(*K,)`, of which none is 0; the number 0 is plain training.
        log_weight: raw log-weights of the negatives, `(*K, M)`. They are scaled to a mean of 1, so that a datum
            counts as one more negative of average weight.
        variant: `default` (8), `no-positive` (7), `batch-corrected` (33) or `true-objective` (34).
        objective: whether the loss has the value of the objective. Without it only its gradient is that, and costs
            no second way through exponentials and back: what training asks for.

    >>> fp, fn = torch.tensor([0.0, 1.0]), torch.tensor([0.5, -400.0])
    >>> loss, weights = robust_loss(fp, fn, beta=0.5)
    >>> weights.negatives
    tensor([1., 0.])
    """
    with torch.no_grad():
        weights = weigh(fp, fn, beta, log_weight, variant)
    if _is_zero(beta):  # line 2
        mean = fn.mean(-1) if log_weight is None else _dot(weights.negatives, fn)
        return mean - fp.mean(-1), weights
    if not objective:  # −(1/N)Σ(1 − ẇ(x⁺))f(x⁺) + mean(1 − ẇ)·Σ w(x⁻)f(x⁻), whose gradient is minus (8)
        data, share = weights
        return data.mean(-1) * _dot(share, fn) - _dot(data, fp) / fp.shape[-1], weights
    b = _per_row(beta)
    odds = torch.logsumexp(_log_w(b * fn, log_weight), -1, keepdim=True) - b * fp
    if variant == "default":
        # line 4: LSE(β·fp, LSE(β·fn))/β − fp = −log σ(β·fp − LSE(β·fn))/β, in which nothing cancels
        return -logsigmoid(-odds).mean(-1) / beta, weights
    # s/β − fp, whose gradient is Σ w(x⁻)∇f(x⁻) − ∇f(x⁺) by (19), with a factor in front that is not differentiated
    return (weights.data * odds).mean(-1) / beta, weights


def weigh(
    fp: Tensor, fn: Tensor, beta: float | Tensor, log_weight: Tensor | None = None, variant: str = "default"
) -> Weights:
    """What (8) multiplies gradients by, from the arguments of `robust_loss`: for use without gradients."""
    require_choice("robust.variant", variant, VARIANTS)
    N, M = fp.shape[-1], fn.shape[-1]
    if N == 0:
        raise InputError("batch: no data (N = 0), and there is nothing to weigh negatives against")
    if M == 0:
        raise InputError("negatives: none were drawn (M = 0), and there is nothing to weigh data against")
    if variant == "true-objective" and N < 2:
        raise InputError(f"batch: true-objective halves the data, (34), and needs two rows, got {N}")
    if _is_zero(beta):
        even = torch.full_like(fn, 1 / M)
        return Weights(torch.ones_like(fp), even if log_weight is None else log_weight.softmax(-1).to(fn))
    b = _per_row(beta)
    log_w = _log_w(b * fn, log_weight)
    share = log_w.softmax(-1)  # w(x⁻)
    # log Σ w̃(x⁻) by its largest term, whose share is 1/M at least; a sum by itself would exponentiate again
    log_sum = log_w.amax(-1, keepdim=True) - share.amax(-1, keepdim=True).log()
    odds = log_sum - b * fp  # log Σ w̃(x⁻)/w̃(x⁺), of which σ is 1 − ẇ(x⁺)
    return Weights(_data_weights(odds.sigmoid(), variant), share)


def _data_weights(scale: Tensor, variant: str) -> Tensor:
    """What each datum counts for, `(*K, N)`, from 1 − ẇ(x⁺) of each."""
    if variant == "default":
        return scale
    if variant == "no-positive":
        return torch.ones_like(scale)
    if variant == "batch-corrected":
        return scale.mean(-1, keepdim=True).expand_as(scale)
    # (34): each half of the data is scaled by the other; every second row, as rows may come sorted
    data = torch.empty_like(scale)
    for own, other in ((0, 1), (1, 0)):
        half = scale[..., own::2]
        mean = scale[..., other::2].mean(-1, keepdim=True)
        data[..., own::2] = mean * scale.shape[-1] / (2 * half.shape[-1])
    return data


def _is_zero(beta: float | Tensor) -> bool:
    return not isinstance(beta, Tensor) and beta == 0


def _per_row(beta: float | Tensor) -> float | Tensor:
    return beta[..., None] if isinstance(beta, Tensor) else beta


def _log_w(tilt: Tensor, log_weight: Tensor | None) -> Tensor:
    """log w̃(x⁻): βf, and the source's weights scaled to a mean of 1."""
    return tilt if log_weight is None else tilt + (log_weight - log_mean_exp(log_weight)[..., None]).to(tilt)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ ab over the last dimension; `dot` where there is no other, as autocast would round what `@` is given."""
    return torch.dot(a, b) if a.dim() == 1 else (a * b).sum(-1)


def watch(weights: Weights) -> Metrics:
    """The numbers that say what is believed, and what is ignored."""
    data, share = weights
    scale = data.mean()
    even = len(share) * scale  # times a share is what a negative counts for: 1 in plain training
    return {
        "grad_scale": scale,
        "weight_data_max": data.max(),
        "weight_negatives_max": even * share.max(),
        "negatives_effective": torch.dot(share, share).reciprocal(),
        "negatives_ignored": (share < IGNORED / even).mean(dtype=data.dtype),
    }
