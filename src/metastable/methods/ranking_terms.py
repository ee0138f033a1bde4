"""The loss of a ranking, energies of the points that are ranked, and what is logged of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from metastable.core.batch import Batch
from metastable.core.weights import ess_fraction

from .base import Metrics, gap_metrics


def ranking_loss(positive: Tensor, negatives: Tensor) -> Tensor:
    """−log q of the datum among its K negatives, (3.7), one for each datum.

    −log softmax at the datum is log(1 + Σₖ exp(rₖ − r₀)), which stays exact when one point has all the weight.

    Args:
        positive: log-ratio r₀ of each datum, `(B,)`, up to a constant that all points share.
        negatives: log-ratios of the negatives, `(B, K)`, or `(1, K)` where all data share them.

    Returns:
        `(B,)`; log(K + 1) where nothing tells the points apart, and 0 where everything does.

    >>> ranking_loss(torch.zeros(1), torch.zeros(1, 3))  # log 4
    tensor([1.3863])
    """
    return -logsigmoid(positive - torch.logsumexp(negatives, 1))


def energies(energy: Any, batch: Batch, negatives: Tensor) -> tuple[Tensor, Tensor]:
    """Energies of the data, `(B,)`, and of N negatives, `(N,)`, in one call.

    Where there are contexts, the negatives are K for each of them, in order, and a context is encoded once for its
    datum and all its negatives.
    """
    if batch.given is not None:
        y = negatives.unflatten(0, (len(batch), -1))
        E = energy(torch.cat([batch.x[:, None], y], 1), batch.given)
        return E[:, 0], E[:, 1:].reshape(-1)
    E_data, E_negatives = energy(torch.cat([batch.x, negatives])).split([len(batch), len(negatives)])
    return E_data, E_negatives


def ranking_metrics(losses: Tensor, E_data: Tensor, E_negatives: Tensor, r_negatives: Tensor) -> Metrics:
    """The objective, the mean weight 1 − q₀ of a datum, and the negatives as weighted samples of the model.

    Negatives come in sets that share a normalisation, `(sets, N)`; what is said of them is averaged over sets.
    """
    losses, r_negatives = losses.detach(), r_negatives.detach()
    model = (torch.softmax(r_negatives, 1).to(E_negatives.dtype) * E_negatives.detach()).sum(1)
    return {
        "objective": -losses.mean(),
        "positive_weight": -torch.expm1(-losses).mean(),
        "ess_negatives": ess_fraction(r_negatives).mean(),
        **gap_metrics(E_data.mean(), model.mean()),
    }
