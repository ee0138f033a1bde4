"""Distances between two samples, each possibly weighted, in float64 and in bounded memory.

MMD² and the energy distance are U-statistics: pairs of a row with itself are left out, so that their mean
is zero when both samples have the same law, and they can come out negative. With weights pᵢ the mean over
pairs is Σ_{i≠j} pᵢpⱼ k(xᵢ, xⱼ) / Σ_{i≠j} pᵢpⱼ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.errors import InputError, require_choice, require_count, require_positive
from ..core.random import Seed, generator
from ..core.resampling import resample_indices
from ..core.types import Walkers, row_sum
from ..core.weights import require_weight

BLOCK = 1 << 22  # distances held at once: 32 MiB in float64
MEDIAN_ROWS = 500  # rows of each sample behind the median distance
BANDWIDTH_FACTORS = (0.5, 1.0, 2.0)

Kernel = Callable[[Tensor, float], Tensor]


KERNELS: dict[str, Kernel] = {
    "gaussian": lambda squared, bandwidth: torch.exp(squared / (-2 * bandwidth**2)),
    "rational": lambda squared, bandwidth: 1 / (1 + squared / (2 * bandwidth**2)),
}


def _rows(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both samples as float64 rows `(N, D)`, about a common centre so that no digits are lost."""
    if x.dim() == 0 or y.dim() == 0 or x.shape[1:] != y.shape[1:] or min(len(x), len(y)) < 2:
        raise InputError(
            "x, y: must be two samples (N, *event) and (M, *event) of at least two rows, "
            f"got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    x, y = (z.detach().reshape(len(z), -1) for z in (x, y.to(x.device)))
    centre = x.double().mean(0)
    return x - centre, y - centre  # each in float64, without a copy beside it


def _probability(x: Tensor, log_weight: Tensor | None, name: str) -> Tensor:
    """Normalised weights, `(N,)`; equal ones where none are given."""
    if log_weight is None:
        return torch.full((len(x),), 1 / len(x), dtype=torch.float64, device=x.device)
    if log_weight.shape != x.shape[:1]:
        raise InputError(f"{name}: must be {len(x)} log-weights, got shape {tuple(log_weight.shape)}")
    return torch.softmax(require_weight(log_weight.detach().to(x.device).double(), name), 0)


def _pair_mean(
    function: Callable[[Tensor], Tensor], x: Tensor, y: Tensor | None, p: Tensor, q: Tensor
) -> Tensor:
    """Weighted mean of function(|xᵢ − yⱼ|²); over i ≠ j where `y` is None, which means x itself."""
    other = x if y is None else y
    size = max(1, BLOCK // len(other))
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        values = function(torch.cdist(x[rows], other).square())
        if y is None:
            values.diagonal(offset=start).zero_()
        total = total + p[rows] @ values @ q
    return total if y is not None else total / (1 - p.square().sum())


def _two_sample(function: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """E f(X, X′) + E f(Y, Y′) − 2 E f(X, Y)."""
    within = _pair_mean(function, x, None, p, p) + _pair_mean(function, y, None, q, q)
    return within - 2 * _pair_mean(function, x, y, p, q)


def without_copies(walkers: Walkers, most: int, seed: Seed = 0) -> Walkers:
    """At most `most` weighted walkers that stand for all of them, none of them twice.

    A distance is of walkers with their weights, never of resampled ones: two copies of a walker are a pair at
    distance zero, which two draws of a density are not, and the fewer walkers carry the weight the wider apart two
    equal laws would seem. Where there are more than `most`, whose cost grows with the square, they are drawn in
    proportion to their weights, and one that is drawn several times is one walker of as many times the weight.

    >>> walkers = Walkers(torch.arange(4.0)[:, None], torch.tensor([0.4, 0.1, 0.1, 0.4]).log())
    >>> few = without_copies(walkers, 3)
    >>> few.x[:, 0].tolist(), few.log_weight.exp().tolist()
    ([0.0, 3.0], [2.0, 1.0])
    """
    if len(walkers) <= most:
        return walkers
    rows = resample_indices(walkers.log_weight, most, rng=generator(seed, walkers.x.device))
    rows, times = rows.unique(return_counts=True)
    return Walkers(walkers.x[rows], times.double().log())


def median_distance(x: Tensor, y: Tensor) -> float:
    """Median distance between rows of the pooled sample, from evenly spaced rows of each."""
    pooled = torch.cat([z[:: max(1, -(-len(z) // MEDIAN_ROWS))] for z in _rows(x, y)])
    others = ~torch.eye(len(pooled), dtype=torch.bool, device=pooled.device)
    distance = torch.cdist(pooled, pooled)[others].median()
    return float(distance) if distance > 0 else 1.0


def mmd2(
    x: Tensor,
    y: Tensor,
    bandwidth: float | Sequence[float] | None = None,
    *,
    kernel: str = "gaussian",
    log_weight_x: Tensor | None = None,
    log_weight_y: Tensor | None = None,
) -> Tensor:
    """Squared maximum mean discrepancy, E k(X, X′) + E k(Y, Y′) − 2 E k(X, Y), unbiased.

    Args:
        x: `(N, *event)`.
        y: `(M, *event)`.
        bandwidth: σ of the kernel, or several, over which the kernel is averaged; by default ½, 1 and 2
            times the median distance. Give numbers when values are to be compared with each other.
        kernel: `gaussian`, exp(−r²/2σ²), or `rational`, 1/(1 + r²/2σ²), which sees further.
        log_weight_x: raw log-weights of `x`, `(N,)`.
        log_weight_y: raw log-weights of `y`, `(M,)`.

    Returns:
        A float64 scalar, negative at times when the laws are the same.

    >>> x = torch.tensor([[0.0], [1.0]])
    >>> round(float(mmd2(x, x + 3.0, bandwidth=1.0)), 4)
    1.1341
    """
    require_choice("kernel", kernel, KERNELS)
    p, q = _probability(x, log_weight_x, "log_weight_x"), _probability(y, log_weight_y, "log_weight_y")
    if bandwidth is None:
        bandwidth = [factor * median_distance(x, y) for factor in BANDWIDTH_FACTORS]
    widths = [bandwidth] if isinstance(bandwidth, (int, float)) else list(bandwidth)
    for width in widths:
        require_positive("bandwidth", width)
    k = KERNELS[kernel]

    def average(squared: Tensor) -> Tensor:
        return sum((k(squared, width) for width in widths[1:]), k(squared, widths[0])) / len(widths)

    return _two_sample(average, *_rows(x, y), p, q.to(p.device))


def energy_distance(
    x: Tensor, y: Tensor, log_weight_x: Tensor | None = None, log_weight_y: Tensor | None = None
) -> Tensor:
    """Squared energy distance, 2 E|X − Y| − E|X − X′| − E|Y − Y′|, unbiased; zero for equal laws only.

    Args:
        x: `(N, *event)`.
        y: `(M, *event)`.
        log_weight_x: raw log-weights of `x`, `(N,)`.
        log_weight_y: raw log-weights of `y`, `(M,)`.

    >>> float(energy_distance(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])))
    2.0
    """
    p, q = _probability(x, log_weight_x, "log_weight_x"), _probability(y, log_weight_y, "log_weight_y")
    return -_two_sample(torch.sqrt, *_rows(x, y), p, q.to(p.device))


def _transport(x: Tensor, y: Tensor, p: Tensor, q: Tensor, order: float) -> Tensor:
    """∫|F_x⁻¹(u) − F_y⁻¹(u)|^order du for each of S lines: `(S, N)` and `(S, M)` to `(S,)`.

    Both quantile functions are steps, so the integral is a sum over the union of their jumps.
    """
    x, rank_x = x.sort(-1)
    y, rank_y = y.sort(-1)
    jumps_x, jumps_y = p[rank_x].cumsum(-1), q[rank_y].cumsum(-1)
    jumps = torch.cat([jumps_x, jumps_y], -1).clamp(max=1).sort(-1).values
    mass = jumps.diff(dim=-1, prepend=torch.zeros_like(jumps[..., :1]))
    # the step that covers a piece is looked up at its middle: at its end, rounding could take the next one
    middle = jumps - mass / 2
    at_x = torch.searchsorted(jumps_x, middle).clamp(max=x.shape[-1] - 1)
    at_y = torch.searchsorted(jumps_y, middle).clamp(max=y.shape[-1] - 1)
    return (mass * (x.gather(-1, at_x) - y.gather(-1, at_y)).abs().pow(order)).sum(-1)


def wasserstein_1d(
    x: Tensor,
    y: Tensor,
    *,
    order: float = 1.0,
    log_weight_x: Tensor | None = None,
    log_weight_y: Tensor | None = None,
) -> Tensor:
    """Wasserstein distance of two samples on the line, exact for the (weighted) empirical laws.

    W_r = (∫₀¹ |F_x⁻¹(u) − F_y⁻¹(u)|^r du)^{1/r}. It is never negative: two samples of one law are a
    distance of about 1/√N apart.

    Args:
        x: `(N,)` or `(N, 1)`.
        y: `(M,)` or `(M, 1)`.
        order: r, at least 1.
        log_weight_x: raw log-weights of `x`, `(N,)`.
        log_weight_y: raw log-weights of `y`, `(M,)`.

    >>> float(wasserstein_1d(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 6.0])))
    5.0
    """
    _check_order(order)
    p, q = _probability(x, log_weight_x, "log_weight_x"), _probability(y, log_weight_y, "log_weight_y")
    x, y = _rows(x, y)
    if x.shape[1] != 1:
        raise InputError(f"x: must be on the line, got {x.shape[1]} columns; try sliced_wasserstein")
    return _transport(x.T, y.T, p, q.to(p.device), order)[0].pow(1 / order)


def sliced_wasserstein(
    x: Tensor,
    y: Tensor,
    *,
    projections: int = 128,
    order: float = 1.0,
    seed: Seed = 0,
    log_weight_x: Tensor | None = None,
    log_weight_y: Tensor | None = None,
) -> Tensor:
    """Sliced Wasserstein distance, (mean over directions of W_r^r of the projections)^{1/r}.

    Args:
        x: `(N, *event)`.
        y: `(M, *event)`.
        projections: how many directions are drawn, uniformly on the unit sphere.
        order: r, at least 1.
        seed: seed or generator of the directions; use the same for values that are compared.
        log_weight_x: raw log-weights of `x`, `(N,)`.
        log_weight_y: raw log-weights of `y`, `(M,)`.
    """
    require_count("projections", projections)
    _check_order(order)
    p, q = _probability(x, log_weight_x, "log_weight_x"), _probability(y, log_weight_y, "log_weight_y")
    x, y = _rows(x, y)
    rng = generator(seed)
    normal = torch.randn(projections, x.shape[1], generator=rng, dtype=torch.float64, device=rng.device)
    directions = (normal / row_sum(normal.square()).sqrt()[:, None]).to(x.device)
    size = max(1, BLOCK // (len(x) + len(y)))
    costs = [_transport(d @ x.T, d @ y.T, p, q.to(p.device), order) for d in directions.split(size)]
    return torch.cat(costs).mean().pow(1 / order)


def _check_order(order: float) -> None:
    if not 1 <= order < float("inf"):
        raise InputError(f"order: must be a finite number of at least 1, got {order!r}")
