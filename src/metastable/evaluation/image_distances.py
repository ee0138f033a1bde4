"""KID, precision and recall, and Inception Score, on features of images, each with its standard error.

All take walkers with their weights, and are estimated from rows without copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import InputError, require_count
from ..core.random import derive, generator
from ..core.types import Walkers, student_t_quantile
from ..core.weights import require_weight
from .distances import without_copies
from .frechet import Statistics, frechet_distance, require_images, statistics_of

BLOCK = 1 << 24
"""Kernel values or distances held at once: 128 MiB in float64."""
RESAMPLES = 20
"""Bootstrap resamples: each of FID is an eigenvalue problem. Intervals are Student's with one degree fewer."""


PARTS = 6
"""Disjoint parts of a set whose balls are compared, where they have images enough."""


class Measure(NamedTuple):
    """A number with its bootstrap standard error and 95 % interval.

    `images` is the effective number of samples behind it, `most` what the number can be at most.
    """

    value: float
    std_error: float
    images: float
    most: float = math.inf

    @property
    def interval(self) -> tuple[float, float]:
        """value ± t·s.e.; percentiles would lie too high, as resamples have fewer images and so more bias."""
        half = student_t_quantile(0.975, RESAMPLES - 1) * self.std_error
        least = 0.0 if self.most == 1 else -math.inf  # of a share
        return max(self.value - half, least), min(self.value + half, self.most)

    def as_json(self) -> dict[str, Any]:
        """The numbers, with the interval."""
        numbers = {"value": self.value, "std_error": self.std_error, "images": self.images}
        return numbers | {"interval": list(self.interval)}


def bootstrap_weights(log_weight: Tensor, seed: int, resamples: int = RESAMPLES) -> Tensor:
    """Normalised weights, `(N, 1 + resamples)`: as they are, and times how often each row is drawn in a resample.

    A row drawn twice is one row of twice the weight, so that no pair of copies enters a U-statistic.
    """
    log_weight = require_weight(log_weight.double())
    N = len(log_weight)
    rng = generator(derive(seed, "bootstrap"))
    drawn = torch.randint(N, (resamples, N), generator=rng)
    counts = torch.stack([torch.bincount(rows, minlength=N) for rows in drawn], 1).to(log_weight)
    w = torch.exp(log_weight - log_weight.amax())[:, None] * torch.cat(
        [torch.ones_like(counts[:, :1]), counts], 1
    )
    return w / w.sum(0)


def measured(values: Tensor, p: Tensor, worth: float = math.inf) -> Measure:
    """From the values of an estimator under the columns of `bootstrap_weights`.

    Args:
        values: `(1 + resamples,)`, the first with the weights as they are.
        p: the weights, `(N, 1 + resamples)`.
        worth: independent images that the rows are worth where they are copies that moved (`Walkers.ess`): the
            bootstrap sees each as one of its own.
    """
    own = float(1 / p[:, 0].square().sum())
    images = min(own, worth)
    return Measure(float(values[0]), float(values[1:].std()) * math.sqrt(own / images), images)


def frechet(
    x: Tensor, log_weight: Tensor, reference: Statistics, *, seed: int = 0, worth: float = math.inf
) -> Measure:
    """Fréchet distance of features, `(N, D)`, to the reference's; the reference is taken as known.

    The interval is for the distance at this number of images. Its bias, which falls as one over their number,
    is not in
    it: the floor shows that.
    """
    p = bootstrap_weights(log_weight.cpu(), seed).to(x.device)
    require_images(min(worth, float(1 / p[:, 0].square().sum())), x.shape[1])
    reference = reference.to(x.device)
    if x.shape[1] != reference.width:
        raise InputError(
            f"fid_statistics: must be of {x.shape[1]} features, as the network gives, got {reference.width}"
        )
    root = reference.root()
    values = [frechet_distance(statistics_of(x, q.log()), reference, root) for q in p.T]
    return measured(torch.tensor(values), p, worth)


def kid(
    x: Tensor, y: Tensor, log_weight: Tensor | None = None, *, seed: int = 0, worth: float = math.inf
) -> Measure:
    """Kernel inception distance, E k(X, X′) + E k(Y, Y′) − 2 E k(X, Y) with k(x, y) = (x·y/D + 1)³, unbiased.

    Its mean is 0 where both laws are the same, whatever the number of images, and single values may be negative.
    Both sets are resampled for the standard error.

    Args:
        x: features `(N, D)`.
        y: features `(M, D)`.
        log_weight: raw log-weights of `x`, `(N,)`.
        seed: of the resamples.
        worth: independent images that `x` is worth at most.
    """
    if x.shape[1:] != y.shape[1:] or min(len(x), len(y)) < 2:
        raise InputError(
            f"x, y: must be features (N, D) and (M, D) of two images or more, got {tuple(x.shape)}, "
            f"{tuple(y.shape)}"
        )
    raw = torch.zeros(len(x)) if log_weight is None else log_weight.cpu()
    p, q = (
        bootstrap_weights(raw, seed).to(x.device),
        bootstrap_weights(torch.zeros(len(y)), derive(seed, "data")),
    )
    q = q.to(x.device)
    within = _pair_means(x, x, p, p) / (1 - p.square().sum(0))
    within += _pair_means(y, y, q, q) / (1 - q.square().sum(0))
    return measured(within - 2 * _pair_means(x, y, p, q), p, worth)


def _pair_means(x: Tensor, y: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Σ pᵢqⱼ k(xᵢ, yⱼ) for each column of weights; without i = j where `y` is `x`."""
    total, size, D = torch.zeros_like(p[0]), max(1, BLOCK // len(y)), x.shape[1]
    columns = y.double().T / D
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        values = (x[rows].double() @ columns + 1).pow(3)
        if y is x:
            values.diagonal(offset=start).zero_()
        total += (p[rows] * (values @ q)).sum(0)
    return total


class PrecisionRecall(NamedTuple):
    """Share of samples that lie where data do, and share of data that lie where samples do."""

    precision: Measure
    recall: Measure


def precision_recall(
    samples: Tensor,
    data: Tensor,
    log_weight: Tensor | None = None,
    *,
    neighbours: int = 3,
    seed: int = 0,
    worth: float = math.inf,
) -> PrecisionRecall:
    """Improved precision and recall (Kynkäänniemi et al. 2019).

    A set lies where balls around its rows are, each as wide as the distance to its k-th neighbour within the set.
    Weighted samples count by their weight in precision; the balls of recall are around as many of them as they are
    worth, drawn in proportion to their weights, none twice. Recall falls with the number of images: compare at the
    same number. Errors are of rows that are drawn anew, and of where balls happen to be.

    Args:
        samples: features `(N, D)`.
        data: features `(M, D)`.
        log_weight: raw log-weights of the samples, `(N,)`.
        neighbours: k.
        seed: of the resamples, and of the parts of a set whose balls are compared.
        worth: independent images that the samples are worth at most.
    """
    require_count("neighbours", neighbours)
    if min(len(samples), len(data)) <= neighbours:
        raise InputError(
            f"images: precision and recall need {neighbours + 1} images or more, got {len(samples)} and {len(data)}"
        )
    p = bootstrap_weights(torch.zeros(len(samples)) if log_weight is None else log_weight.cpu(), seed)
    q = bootstrap_weights(torch.zeros(len(data)), derive(seed, "data"))
    drawn = Walkers(
        samples, torch.zeros(len(samples)) if log_weight is None else log_weight.to(samples.device)
    )
    drawn = without_copies(drawn, max(round(drawn.ess), 2 * neighbours), derive(seed, "balls")).x
    if len(drawn) < 2:
        raise InputError("log_weight: precision and recall need two samples with weight or more, got 1")
    inside = within_balls(samples, data, radii(data, neighbours)).cpu().double()
    found = within_balls(data, drawn, radii(drawn, neighbours)).cpu().double()
    precision, recall = measured(inside @ p, p, worth), measured(found @ q, q)
    by_balls = (
        error_by_balls(samples, p[:, 0], data, neighbours, seed),
        error_by_balls(data, q[:, 0], drawn, neighbours, seed),
    )
    return PrecisionRecall(
        *(
            share._replace(std_error=math.hypot(share.std_error, error), images=precision.images, most=1.0)
            for share, error in zip((precision, recall), by_balls, strict=True)
        )
    )


def error_by_balls(x: Tensor, p: Tensor, centers: Tensor, k: int, seed: int = 0) -> float:
    """Standard error of the share of `x`, weighted by `p`, within balls, by where the centers happen to be.

    Shares within balls of disjoint parts of the centers differ by chance alone; their spread over the root of their
    number is taken for that of balls around all centers. Of few centers there are no parts, and it is 0.
    """
    parts = min(PARTS, len(centers) // (4 * (k + 1)))
    if parts < 2:
        return 0.0
    order = torch.randperm(len(centers), generator=generator(derive(seed, "parts of the balls")))
    some = [centers[rows.to(centers.device)] for rows in order.chunk(parts)]
    shares = [within_balls(x, part, radii(part, k)).cpu().double() @ p.cpu() for part in some]
    return float(torch.stack(shares).std()) / math.sqrt(parts)


def within_balls(x: Tensor, centers: Tensor, widths: Tensor) -> Tensor:
    """Whether each row of `x` lies in a ball around one of the centers."""
    return _by_blocks(lambda rows, distance: (distance <= widths).any(1), x, centers)


def radii(x: Tensor, k: int) -> Tensor:
    """The distance from each row to its k-th neighbour, `(N,)`.

    >>> radii(torch.tensor([[0.0], [1.0], [3.0], [7.0]]), 1).tolist()
    [1.0, 1.0, 2.0, 4.0]
    """

    def width(rows: slice, distance: Tensor) -> Tensor:
        distance.diagonal(offset=rows.start).fill_(torch.inf)  # a row is no neighbour of itself
        return distance.topk(min(k, len(x) - 1), 1, largest=False).values[:, -1]

    return _by_blocks(width, x, x)


def _by_blocks(function: Callable[[slice, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """`function` of some rows and their distances to `y`, over all rows of `x`."""
    size = max(1, BLOCK // len(y))
    blocks, y = [slice(start, start + size) for start in range(0, len(x), size)], y.double()
    return torch.cat([function(rows, torch.cdist(x[rows].double(), y)) for rows in blocks])


def inception_score(
    log_p: Tensor, log_weight: Tensor | None = None, *, seed: int = 0, worth: float = math.inf
) -> Measure:
    """exp of the mean KL(p(y | x) ‖ p(y)), from a network's own classes.

    Args:
        log_p: log p(y | x), `(N, K)`.
        log_weight: raw log-weights, `(N,)`.
        seed: of the resamples.
        worth: independent images that the rows are worth at most.
    """
    log_p = log_p.double().cpu()
    p = bootstrap_weights(torch.zeros(len(log_p)) if log_weight is None else log_weight.cpu(), seed)
    mean = (p.T @ log_p.exp()).clamp(min=1e-300)  # (1 + resamples, K)
    own = torch.special.entr(log_p.exp()).sum(1)
    return measured((torch.special.entr(mean).sum(1) - own @ p).exp(), p, worth)
