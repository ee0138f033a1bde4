"""Modes and their weights: which modes the data have, and how much mass a sampler gives to each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import InputError, require_count
from ..core.parts import in_parts
from ..core.random import generator
from ..core.types import Walkers
from ..core.weights import ess_fraction, require_weight

LINEAR_DIMENSION = 10  # principal components kept before the metric is adapted
DENSITY_DIMENSION = 7  # eight modes span at most seven
NEIGHBOURS = 0.7  # k of the density estimate is this times √rows
SIGNIFICANT = 4.0  # standard errors by which a valley must lie under both of its peaks
SIGNIFICANT_ON_A_LINE = 5.0  # on a line no path leads around a chance gap
SEPARATED_BELOW = 0.08  # valley over peak, as estimated; the estimate fills narrow valleys a little
FEWEST_POPULATIONS = 4  # whose spread says how independent walkers are
AGREEMENT = 0.9  # share of rows whose nearest centre must be that of their own mode


class ModeWeightErrors(NamedTuple):
    """Mode weights against a target, with the standard error that a correct sampler would have.

    Attributes:
        weights: weight of each mode in the sample, `(M,)`.
        error: `weights − target`, `(M,)`.
        std_error: standard error of `error` if the target is true, `(M,)`.
        ess: effective sample size behind it.
    """

    weights: Tensor
    error: Tensor
    std_error: Tensor
    ess: float

    @property
    def worst(self) -> float:
        """Largest absolute error over the modes."""
        return float(self.error.abs().max())

    @property
    def z_score(self) -> Tensor:
        """Errors in standard errors, `(M,)`; 0 where both vanish."""
        return torch.where(self.error == 0, torch.zeros_like(self.error), self.error / self.std_error)


class ModeWeights(NamedTuple):
    """Mode weights of samples, with a standard error that needs no target.

    Attributes:
        weights: weight of each mode, `(M,)`.
        std_error: of `weights`, `(M,)`.
        ess: independent samples that they are worth.
    """

    weights: Tensor
    std_error: Tensor
    ess: float


@dataclass(frozen=True)
class Modes:
    """What `find_modes` saw in the data.

    Attributes:
        centers: `(M, *event)`, one row for each mode, heaviest first.
        weights: share of the data nearest to each centre, `(M,)`; the same rule as `mode_weights`.
        separated: some part of the data is cut off from the rest by a gap of low density. Methods that
            only look at the score inside the modes cannot see the weights of such parts. It can be true
            with one centre: rings and moons are apart, but no set of centres tells them apart.
        evidence: the numbers behind the answer.
    """

    centers: Tensor
    weights: Tensor
    separated: bool
    evidence: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.centers.shape[0]


def nearest_center(x: Tensor, centers: Tensor) -> Tensor:
    """Row of the nearest centre in Euclidean distance: `(N, *event)` and `(M, *event)` to `(N,)`."""
    if x.shape[1:] != centers.shape[1:]:
        raise InputError(
            f"centers: events must have the shape of x, {tuple(x.shape[1:])}, got {tuple(centers.shape[1:])}"
        )
    centers = centers.flatten(1).to(x.device).double()
    # |x − c|² up to |x|², which is the same for every centre; centred so that digits are not lost
    origin = centers.mean(0)
    centers = centers - origin
    size = centers.square().sum(1)
    return in_parts(lambda part: (size - 2 * (part.flatten(1).double() - origin) @ centers.T).argmin(1), x)


def _log_weight(x: Tensor, log_weight: Tensor | None) -> Tensor:
    if log_weight is None:
        return torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
    if log_weight.shape != x.shape[:1]:
        raise InputError(
            f"log_weight: must hold one number for each of the {x.shape[0]} rows, "
            f"got shape {tuple(log_weight.shape)}"
        )
    return require_weight(log_weight.to(x.device).double())


def mode_weights(x: Tensor, centers: Tensor, log_weight: Tensor | None = None) -> Tensor:
    """Weight of each mode: Σᵢ pᵢ·1[centre m is nearest to xᵢ], with p = softmax(log_weight).

    Args:
        x: samples, `(N, *event)`.
        centers: one row for each mode, `(M, *event)`.
        log_weight: raw log-weights, `(N,)`; equal weights by default.

    Returns:
        `(M,)` in float64, summing to 1.

    >>> x = torch.tensor([[-1.0], [0.9], [1.1], [1.2]])
    >>> mode_weights(x, torch.tensor([[-1.0], [1.0]])).tolist()
    [0.25, 0.75]
    """
    p = torch.softmax(_log_weight(x, log_weight), 0)
    empty = torch.zeros(centers.shape[0], dtype=p.dtype, device=p.device)
    weights = empty.index_add(0, nearest_center(x, centers), p)
    return weights / weights.sum()


def mode_weight_errors(
    x: Tensor,
    centers: Tensor,
    target: Tensor,
    log_weight: Tensor | None = None,
    *,
    target_std_error: Tensor | None = None,
    effective_size: float | None = None,
) -> ModeWeightErrors:
    """Mode weights minus their target, with √(t(1−t)/ESS) as the standard error.

    The standard error is taken at the target t, not at the estimate: a mode that was lost altogether would
    otherwise look known without error.

    Args:
        x: samples, `(N, *event)`.
        centers: `(M, *event)`.
        target: the true weights, `(M,)`, summing to 1.
        log_weight: raw log-weights, `(N,)`; equal weights by default.
        target_std_error: standard error of the target where it was estimated, `(M,)`.
        effective_size: independent samples behind `x`, where correlation makes them fewer than the weights
            alone say (chains that share ancestors, draws along one chain).
    """
    log_weight = _log_weight(x, log_weight)
    weights = mode_weights(x, centers, log_weight)
    target = torch.as_tensor(target, dtype=torch.float64, device=weights.device)
    if target.shape != weights.shape or abs(float(target.sum()) - 1) > 1e-6 or bool((target < 0).any()):
        raise InputError(f"target: must be {len(weights)} weights that sum to 1, got {target.tolist()}")
    ess = float(ess_fraction(log_weight)) * x.shape[0]
    ess = ess if effective_size is None else min(ess, effective_size)
    variance = target * (1 - target) / ess
    if target_std_error is not None:
        variance = variance + torch.as_tensor(target_std_error).to(variance).square()
    return ModeWeightErrors(weights, weights - target, variance.sqrt(), ess)


def sampled_mode_weights(walkers: Walkers, centers: Tensor) -> ModeWeights:
    """Mode weights of walkers, with √(w(1−w)/ESS) as the standard error.

    ESS is the walkers' own, which is never more than the walkers were worth that they are copies of, and no more
    than the spread between independent populations leaves (`independent_size`). Half a sample is
    added to each mode, so that a mode without any does not look known without error.

    Args:
        walkers: weighted samples, `(N, *event)`.
        centers: one row for each mode, `(M, *event)`.

    >>> x = torch.tensor([[-1.0]]).repeat(100, 1).index_fill(0, torch.arange(80), 1.0)
    >>> found = sampled_mode_weights(Walkers.equal(x), torch.tensor([[1.0], [-1.0]]))
    >>> [round(w, 2) for w in found.weights.tolist()], [round(e, 2) for e in found.std_error.tolist()]
    ([0.8, 0.2], [0.04, 0.04])
    """
    weights = mode_weights(walkers.x, centers, walkers.log_weight)
    ess = min(walkers.ess, independent_size(walkers, centers))
    shrunk = (weights * ess + 0.5) / (ess + 0.5 * len(weights))
    return ModeWeights(weights, (shrunk * (1 - shrunk) / ess).sqrt(), ess)


def independent_size(walkers: Walkers, centers: Tensor) -> float:
    """Independent samples that walkers are worth for mode weights, from the spread between their populations.

    Walkers that share ancestors agree with each other more than their weights say; populations share none. They are
    the walkers' own (`info["populations"]`), or those that the walkers were drawn from (`info["drawn_from"]`); only
    those of the smallest size are compared with each other. inf where there are too few to compare.
    """
    origin, sizes = walkers.info.get("drawn_from"), walkers.info.get("start_populations", [])
    if origin is None:
        sizes = walkers.info.get("populations", [])
        origin = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.long))
    alike = [g for g, size in enumerate(sizes) if size == min(sizes)]
    groups = [(origin == g).nonzero()[:, 0] for g in alike]
    if len(groups) < FEWEST_POPULATIONS or min(len(rows) for rows in groups) == 0:
        return math.inf
    each = [mode_weights(walkers.x[rows], centers, walkers.log_weight[rows]) for rows in groups]
    mean, variance = torch.stack(each).mean(0), torch.stack(each).var(0)
    one = float((mean * (1 - mean) / variance.clamp(min=1e-12)).min())
    return max(one * sum(sizes) / min(sizes), 1.0)


def find_modes(data: Tensor, max_modes: int = 8, seed: int = 0, *, rows: int = 2000) -> Modes:
    """Modes of a data set: peaks of its density with a significant valley around them.

    A density estimate on the graph of nearest neighbours is cut into the basins of its peaks, and a basin
    is kept only if the way from its peak to a higher one leads through a valley that lies
    `SIGNIFICANT·√(2/k)` lower in log-density, √(2/k) being the standard error of a difference of two
    k-nearest-neighbour log-densities. A long or bent single mode has no such valley, whatever its shape.

    Distances are measured after the shape of local neighbourhoods was made round, so that units and
    correlations of up to ten columns do not matter; beyond that the ten leading principal components are
    looked at, and modes that differ only in weaker directions are not seen.

    Args:
        data: `(N, *event)`, at least 20 rows.
        max_modes: keep at most this many, those with the deepest valleys.
        seed: chooses the rows that are looked at, where there are more than `rows`.
        rows: how many rows to look at.

    >>> x = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    >>> len(find_modes(x)), len(find_modes(torch.cat([x, x + 8.0])))
    (1, 2)
    """
    require_count("max_modes", max_modes)
    data = torch.as_tensor(data)
    if data.dim() == 1:
        data = data[:, None]
    if data.shape[0] < 20 or not bool(in_parts(lambda rows: rows.isfinite().flatten(1).all(1), data).all()):
        raise InputError(f"data: must be at least 20 finite rows, got shape {tuple(data.shape)}")
    rng = generator(seed)
    chosen = torch.randperm(data.shape[0], generator=rng)[:rows]
    sample = data[chosen.to(data.device)].flatten(1).double().cpu()
    labels, evidence = _basins(_coordinates(_dithered(sample, rng)), max_modes)
    centers = torch.stack([sample[labels == m].mean(0) for m in range(int(labels.max()) + 1)])
    agreement = float((nearest_center(sample, centers) == labels).double().mean())
    evidence["nearest_center_agreement"] = agreement
    if agreement < AGREEMENT:
        evidence["note"] = f"{len(centers)} parts that nearest centres cannot tell apart: counted as one mode"
        centers = sample.mean(0, keepdim=True)
    centers = centers.view(-1, *data.shape[1:]).to(data)
    weights = mode_weights(data, centers)
    order = weights.argsort(descending=True)
    separated = evidence["valley_ratio"] < SEPARATED_BELOW
    return Modes(centers[order], weights[order], separated, evidence)


def _dithered(sample: Tensor, rng: torch.Generator) -> Tensor:
    """Rounded columns spread over their rounding: otherwise each value would be a mode of its own."""
    sample = sample.clone()
    for column in sample.T:
        values = column.unique()
        if 1 < len(values) < len(column) / 2:
            spacing = values.diff().median()
            column += spacing * (torch.rand(len(column), generator=rng, dtype=column.dtype) - 0.5)
    return sample


def _principal(x: Tensor, most: int) -> Tensor:
    """Leading principal components, `(N, at most most)`, without constant ones; `x` is centred in place."""
    x -= x.mean(0)
    if min(x.shape) > 256:  # an exact decomposition of images would take seconds: subspace iteration
        start = torch.randn(x.shape[1], 4 * most, generator=generator(0), dtype=x.dtype)
        q = torch.linalg.qr(start).Q
        for _ in range(10):
            q = torch.linalg.qr(x.T @ (x @ q)).Q
        x = x @ q
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    components = min(most, max(1, int((s > 1e-6 * s[0]).sum())))
    return u[:, :components] * s[:components]


def _coordinates(sample: Tensor) -> Tensor:
    """Few coordinates in which neighbourhoods are round, so that a gap shows against the local scatter."""
    x = _principal(sample, LINEAR_DIMENSION)
    if x.shape[1] == 1:
        return x
    x = x / x.std(0).clamp(min=1e-300)
    for _ in range(3):
        x = _locally_round(x)
    return _principal(x, DENSITY_DIMENSION)


def _locally_round(x: Tensor, k: int = 15) -> Tensor:
    """Map x so that directions to nearest neighbours have equal second moments."""
    k = min(k, len(x) - 1)
    neighbours = torch.cdist(x, x).topk(k + 1, largest=False).indices[:, 1:]
    step = (x[neighbours] - x[:, None]).flatten(0, 1)
    length = step.norm(dim=1, keepdim=True)
    step = step[length[:, 0] > 0] / length[length[:, 0] > 0]
    values, vectors = torch.linalg.eigh(step.T @ step / max(len(step), 1))
    scale = values.clamp(min=1e-6 * float(values.max())).rsqrt()
    return x @ (vectors * scale)


def _basins(x: Tensor, max_modes: int) -> tuple[Tensor, dict[str, Any]]:
    """Labels of the significant basins of attraction of the density of x, and the evidence."""
    n = len(x)
    k = min(max(10, round(NEIGHBOURS * math.sqrt(n))), n // 3)
    near = torch.cdist(x, x).topk(k + 1, largest=False)
    dimension, log_density = _log_density(near.values[:, 1:])
    edges: list[set[int]] = [set() for _ in range(n)]  # to neighbours, in both directions
    for row, others in enumerate(near.indices[:, 1:].tolist()):
        edges[row].update(others)
        for other in others:
            edges[other].add(row)
    drop = (SIGNIFICANT_ON_A_LINE if dimension < 1.5 else SIGNIFICANT) * math.sqrt(2 / k)
    labels = torch.tensor(_flood(log_density.tolist(), edges, drop))
    labels = _absorb(x, labels, least=max(8, k // 2), most=max_modes)
    ratio = _valley_ratio(log_density, edges, labels)
    parts = int(labels.max()) + 1
    evidence = {"rows": n, "neighbours": k, "dimension": dimension, "valley_ratio": ratio, "parts": parts}
    return labels, evidence


def _log_density(distance: Tensor) -> tuple[float, Tensor]:
    """(d, −d·log r_k), the log-density up to a constant, with d the dimension neighbourhoods really have.

    For a law on a thin curve or sheet, the dimension of the space would exaggerate every fluctuation. The
    maximum-likelihood dimension is 1/mean(log(r_k/r_j)).
    """
    positive = distance[distance > 0]
    log_r = distance.clamp(min=float(positive.min()) if len(positive) else 1.0).log()
    dimension = 1 / max(float((log_r[:, -1:] - log_r[:, :-1]).mean()), 1e-3)
    return dimension, -dimension * log_r[:, -1]


def _flood(height: list[float], edges: list[set[int]], drop: float) -> list[int]:
    """Peak that each row belongs to: rows join their highest neighbour, from the top down.

    Where two basins meet, the one whose peak is less than `drop` above the pass joins the other.
    """
    parent = list(range(len(height)))

    def peak(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    flooded: set[int] = set()
    for i in sorted(parent, key=height.__getitem__, reverse=True):
        above = edges[i] & flooded
        flooded.add(i)
        if above:
            parent[i] = peak(max(above, key=height.__getitem__))
            first, *lower = sorted({peak(j) for j in above}, key=height.__getitem__, reverse=True)
            for other in lower:
                if height[other] - height[i] < drop:
                    parent[other] = first
    return [peak(i) for i in range(len(height))]


def _absorb(x: Tensor, labels: Tensor, least: int, most: int) -> Tensor:
    """Basins of fewer than `least` rows, and the smallest beyond `most`, join the basin that is nearest."""
    labels = torch.unique(labels, return_inverse=True)[1]
    counts = torch.bincount(labels)
    smallest = int(counts.argmin())
    if len(counts) == 1 or (int(counts[smallest]) >= least and len(counts) <= most):
        return labels
    inside = labels == smallest
    distance = torch.cdist(x[inside], x[~inside])
    nearest = int(distance.min(0).values.argmin())
    joined = torch.where(inside, labels[~inside][nearest], labels)
    return _absorb(x, joined, least, most)


def _valley_ratio(height: Tensor, edges: list[set[int]], labels: Tensor) -> float:
    """Density at the highest pass out of a basin over that at its peak: the lowest over the basins.

    It is 1 where there is one basin and 0 where no edge leads out.
    """
    basins = int(labels.max()) + 1
    if basins == 1:
        return 1.0
    level, label = height.tolist(), labels.tolist()
    passes = [-math.inf] * basins
    for i, others in enumerate(edges):
        for j in others:
            if label[i] != label[j]:
                passes[label[i]] = max(passes[label[i]], min(level[i], level[j]))
    peaks = [float(height[labels == m].max()) for m in range(basins)]
    return min(1.0, min(math.exp(low - high) for low, high in zip(passes, peaks)))
