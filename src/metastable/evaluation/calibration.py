"""Whether a classifier's probabilities are frequencies: accuracy, calibration error, reliability, proper scores.

A classifier is calibrated where, among the events to which it gives confidence c, a share c is classified
correctly. The expected calibration error is the mean gap |accuracy − confidence| over bins of confidence (Guo,
Pleiss, Sun and Weinberger, *On Calibration of Modern Neural Networks*, ICML 2017).

| symbol | here |
|---|---|
| p̂, confidence | the largest of the classifier's probabilities |
| B_m | a bin of confidences |
| acc(B_m), conf(B_m) | `Reliability.accuracy`, `Reliability.confidence` |
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from ..core.errors import InputError, require_choice, require_count
from ..core.labels import within

BINS = 15
WIDTHS = ("equal-width", "equal-mass")


class Reliability(NamedTuple):
    """The reliability curve: one entry for each bin that holds an event.

    Attributes:
        low: lower end of each bin, `(M,)`.
        high: upper end.
        confidence: mean confidence of the events in it.
        accuracy: share of them that is classified correctly.
        events: how many there are, int64.
        std_error: of `accuracy`, binomial with one success and one failure added, so that a bin without a mistake
            has an error too.
    """

    low: Tensor
    high: Tensor
    confidence: Tensor
    accuracy: Tensor
    events: Tensor
    std_error: Tensor


class CalibrationError(NamedTuple):
    """An expected calibration error beside what chance alone would give.

    Attributes:
        value: Σ_m |B_m|/n · |acc(B_m) − conf(B_m)|. It cannot be negative, so chance pushes it up.
        by_chance: what a classifier with the same confidences has on average if it is calibrated perfectly, by the
            normal limit of each bin.
        by_chance_std: standard deviation of that over data sets of this size.
    """

    value: float
    by_chance: float
    by_chance_std: float


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of rows whose largest logit is that of their label.

    Args:
        logits: `(N, C)`.
        labels: classes 0 … C−1, integers `(N,)`.
    """
    labels = check_classified(logits, labels)
    return float((logits.argmax(1) == labels).double().mean())


def negative_log_likelihood(logits: Tensor, labels: Tensor) -> float:
    """Mean of −log p(y | x), in nats; `logits` is `(N, C)`, `labels` `(N,)`."""
    labels = check_classified(logits, labels)
    return float(cross_entropy(logits.detach().double(), labels))


def brier_score(logits: Tensor, labels: Tensor) -> float:
    """Mean of Σ_c (p(c | x) − 1[c = y])², between 0 and 2; `logits` is `(N, C)`, `labels` `(N,)`."""
    labels = check_classified(logits, labels)
    p = torch.softmax(logits.detach().double(), 1)
    return float((p - one_hot(labels, p.shape[1])).square().sum(1).mean())


def reliability(logits: Tensor, labels: Tensor, bins: int = BINS, kind: str = "equal-width") -> Reliability:
    """Accuracy against confidence, in bins of confidence.

    Args:
        logits: `(N, C)`.
        labels: classes 0 … C−1, integers `(N,)`.
        bins: how many; bins without an event are left out.
        kind: `equal-width`, intervals (m/M, (m + 1)/M] of [0, 1], or `equal-mass`, as many events in each as the
            number allows, ties staying together.

    >>> logits = torch.tensor([[0.8, 0.2], [0.7, 0.3], [0.4, 0.6], [0.1, 0.9]]).log()
    >>> curve = reliability(logits, torch.tensor([0, 1, 1, 1]), bins=2)
    >>> curve.confidence, curve.accuracy, curve.events
    (tensor([0.7500], dtype=torch.float64), tensor([0.7500], dtype=torch.float64), tensor([4]))
    """
    labels = check_classified(logits, labels)
    require_count("bins", bins)
    require_choice("kind", kind, WIDTHS)
    confidence, guess = torch.softmax(logits.detach().double(), 1).max(1)
    correct = (guess == labels).double()
    edges = _edges(confidence, bins, kind)
    # (low, high]; the first bin is closed below
    index = (torch.bucketize(confidence, edges) - 1).clamp(0, len(edges) - 2)
    count = torch.bincount(index, minlength=len(edges) - 1)
    filled = count > 0
    n = count[filled]
    hits = torch.bincount(index, correct, minlength=len(count))[filled]
    total = torch.bincount(index, confidence, minlength=len(count))[filled]
    near = (hits + 1) / (n + 2)
    error = (near * (1 - near) / (n + 2)).sqrt()
    return Reliability(edges[:-1][filled], edges[1:][filled], total / n, hits / n, n, error)


def expected_calibration_error(
    logits: Tensor, labels: Tensor, bins: int = BINS, kind: str = "equal-width"
) -> CalibrationError:
    """The mean gap between accuracy and confidence over bins, with what chance alone would make of it.

    Args:
        logits: `(N, C)`.
        labels: classes 0 … C−1, integers `(N,)`.
        bins: how many.
        kind: `equal-width` or `equal-mass`, see `reliability`.

    >>> p = torch.tensor([[0.9, 0.1]]).repeat(10, 1)  # sure of nine in ten, right in six
    >>> error = expected_calibration_error(p.log(), torch.tensor([0] * 6 + [1] * 4))
    >>> round(error.value, 6)
    0.3
    """
    curve = reliability(logits, labels, bins, kind)
    share = curve.events / curve.events.sum()
    value = (share * (curve.accuracy - curve.confidence).abs()).sum()
    # accuracy − confidence of a calibrated bin is nearly normal, with variance c(1 − c)/n, and its size half-normal
    sigma = share * (curve.confidence * (1 - curve.confidence) / curve.events).sqrt()
    by_chance = math.sqrt(2 / math.pi) * sigma.sum()
    spread = math.sqrt(1 - 2 / math.pi) * sigma.square().sum().sqrt()
    return CalibrationError(float(value), float(by_chance), float(spread))


def _edges(confidence: Tensor, bins: int, kind: str) -> Tensor:
    if kind == "equal-width":
        return torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence.device)
    # upper ends are confidences that occur, so that none falls between two bins
    ordered = confidence.sort().values
    places = torch.linspace(0, len(ordered), min(bins, len(ordered)) + 1).round().long()[1:] - 1
    upper = torch.unique(ordered[places.to(ordered.device)])
    return torch.cat([ordered[:1], upper])


def check_classified(logits: Tensor, labels: Tensor) -> Tensor:
    """The labels as int64 beside the logits; both must fit each other.

    Raises:
        InputError: no rows, other shapes than `(N, C)` and `(N,)`, logits that are not finite, labels that are no
            integers or are outside 0 … C−1.

    """
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise InputError(f"logits: must be (N, C) with two classes or more, got shape {tuple(logits.shape)}")
    if len(logits) == 0:
        raise InputError("logits: there are no rows to judge a classifier by (N = 0)")
    if labels.shape != logits.shape[:1]:
        raise InputError(f"labels: must be ({len(logits)},), one for each row, got {tuple(labels.shape)}")
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise InputError(f"labels: must be integers, got {labels.dtype}")
    broken = int((~logits.isfinite()).any(1).sum())
    if broken:
        raise InputError(f"logits: must be finite, but {broken} of {len(logits)} rows hold NaN or infinity")
    return within(labels, logits.shape[1], "labels").to(logits.device)
