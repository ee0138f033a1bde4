"""Intervals for what rollouts are worth: rates, scores, and differences on the same starts."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

from metastable.core.errors import InputError, require
from metastable.core.types import student_t_quantile
from metastable.data.checks import as_tensor

FEW = 10
"""Starts' worth of hits, or of misses, below which such starts may be too rare for Student's interval to know."""


class Interval(NamedTuple):
    """A number with the ends of its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} … {self.high:.3f})"


def clopper_pearson(hits: int, trials: int, level: float = 0.95) -> Interval:
    """The exact interval of a rate: all p for which neither tail of `hits` of `trials` is below (1 − level)/2.

    >>> print(clopper_pearson(0, 10))
    0.000 (0.000 … 0.308)
    """
    known = all(isinstance(x, (Real, Tensor)) for x in (hits, trials))
    whole = known and 0 <= hits <= trials > 0 and hits == int(hits)
    require(whole, "hits", f"a whole number from 0 to trials = {trials}, of at least 1", hits)
    require(0 < level < 1, "level", "between 0 and 1, such as 0.95", level)
    return _by_betas(hits, trials, level)


def _by_betas(hits: float, trials: int, level: float) -> Interval:
    """Clopper and Pearson's interval, also of `hits` that are a sum of means."""
    from scipy.special import betaincinv

    tail = (1 - level) / 2
    low = 0.0 if hits == 0 else float(betaincinv(hits, trials - hits + 1, tail))
    high = 1.0 if hits == trials else float(betaincinv(hits + 1, trials - hits, 1 - tail))
    return Interval(hits / trials, low, high)


def t_interval(values: Any, level: float = 0.95) -> Interval:
    """The mean of independent values with Student's interval.

    Scores of several rollouts from one start are not independent: average them over rollouts first.

    >>> print(t_interval([1.0, 2.0, 3.0]))
    2.000 (-0.484 … 4.484)
    """
    x = _doubles(values, "values").flatten()
    if len(x) < 2:
        raise InputError(f"values: an interval needs at least 2 independent values, got {len(x)}")
    require(bool(x.isfinite().all()), "values", "finite", float(x[~x.isfinite()][:1].sum()))
    require(0 < level < 1, "level", "between 0 and 1, such as 0.95", level)
    half = student_t_quantile(0.5 + level / 2, len(x) - 1) * float(x.std()) / len(x) ** 0.5
    return Interval(float(x.mean()), float(x.mean()) - half, float(x.mean()) + half)


def paired_difference(first: Any, second: Any, level: float = 0.95) -> Interval:
    """The mean of first − second over the same starts, with Student's interval of the differences.

    >>> print(paired_difference([1.0, 2.0, 3.0], [0.9, 1.9, 2.8]))
    0.133 (-0.010 … 0.277)
    """
    a, b = _doubles(first, "first"), _doubles(second, "second")
    if a.shape != b.shape:
        raise InputError(f"second: must be of the same starts, {tuple(a.shape)}, got {tuple(b.shape)}")
    return t_interval(_by_start(a - b), level)


def rate_over_starts(hits: Any, level: float = 0.95) -> Interval:
    """The mean of `(starts, rollouts)` that are 0 or 1, with an interval within [0, 1].

    Clopper and Pearson's, of one rollout from each start. Several of a start are not independent: the interval is
    Student's over starts, and reaches as far as Clopper and Pearson's of all, as if they were independent. Where
    the means of starts add up to less than `FEW` hits, or misses, it also reaches as far as of so many starts: the
    few that differ from the rest may be missing here, however often each was rolled out.

    >>> print(rate_over_starts([[1, 1], [1, 1], [1, 1]]))
    1.000 (0.292 … 1.000)
    """
    x = _doubles(hits, "hits")
    exact = clopper_pearson(int(x.sum()), x.numel(), level)
    if x.dim() < 2 or x.shape[1] == 1:
        return exact
    starts, hit = len(x), float(_by_start(x).sum())
    found = [exact, mean_over_starts(x, level)]
    found += [_by_betas(hit, starts, level)] if min(hit, starts - hit) < FEW else []
    low, high = min(one.low for one in found), max(one.high for one in found)
    return Interval(exact.value, max(low, 0.0), min(high, 1.0))


def rate_difference(first: Any, second: Any, level: float = 0.95) -> Interval:
    """`paired_difference` of what is 0 or 1, `(starts, rollouts)`, with an interval within [−1, 1].

    It reaches as far as that of the two rates of which it is the difference, each `rate_over_starts` with half of
    the error: of pairs in which only the first hits and only the second, or of all hits of either where they have
    other numbers of rollouts.

    >>> print(rate_difference([1] * 10, [1] * 10))
    0.000 (-0.355 … 0.355)
    """
    a, b = _doubles(first, "first"), _doubles(second, "second")
    apart = paired_difference(_by_start(a), _by_start(b), level)
    each = [(a > b), (b > a)] if a.shape == b.shape else [a, b]
    up, down = (rate_over_starts(x, (1 + level) / 2) for x in each)
    low, high = min(apart.low, up.low - down.high), max(apart.high, up.high - down.low)
    return Interval(apart.value, max(low, -1.0), min(high, 1.0))


def difference_of(first: Any, second: Any, level: float = 0.95, rates: bool = True) -> Interval:
    """`rate_difference` where all are 0 or 1, `(starts, rollouts)`, else `paired_difference` of means of starts.

    What is no rate whatever it holds is told by `rates`.

    >>> difference_of([[0.0], [1.0]], [[1.0], [1.0]]) == rate_difference([0, 1], [1, 1])
    True
    """
    a, b = _doubles(first, "first"), _doubles(second, "second")
    if rates and are_rates(a, b):
        return rate_difference(a, b, level)
    return paired_difference(_by_start(a), _by_start(b), level)


def are_rates(*values: Tensor) -> bool:
    """Whether all of them are 0 or 1."""
    return all(bool(((x == 0) | (x == 1)).all()) for x in values)


def _doubles(values: Any, name: str) -> Tensor:
    return as_tensor(values, name).double()


def _by_start(values: Tensor) -> Tensor:
    """Means over everything but the first dimension."""
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def mean_over_starts(values: Tensor | Sequence[Any], level: float = 0.95) -> Interval:
    """`t_interval` of `(starts, rollouts)`: rollouts of a start are averaged, starts are what is independent."""
    return t_interval(_by_start(_doubles(values, "values")), level)
