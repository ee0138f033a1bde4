"""One population whose walkers lie on several processes: weighed and resampled as a whole, moved where they are.

Resampling is that of the whole population, in an order that takes one process after the other. Each needs to know
no more than how much weight the others hold, which says how many points of a common grid fall to its own walkers.
Those that go on stay where they are, and only what a process then has too many of goes to those with too few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metastable.core import processes
from metastable.core.random import generator

from .population import Population

ROWS = ("x", "log_weight", "energy", "grad", "ancestor", "given")
"""Fields of a population that have one row for each walker."""
SENT = ("x", "energy", "grad", "ancestor", "given")
"""Those that go with a walker to another process: after resampling all weights are one."""


class Totals(NamedTuple):
    """What all processes have said of their parts of one population, in one message.

    Attributes:
        log_z: of the whole, `(1,)`.
        ess: of the whole as a fraction, `(1,)`.
        log_sums: log Σw of each, `(R,)`.
        counts: walkers of each, `(R,)`.
        uniform: the next random number of each, `(R,)`; the first one's places the grid of a resampling.
        means: of whatever else they said, `(k,)`.
    """

    log_z: Tensor
    ess: Tensor
    log_sums: Tensor
    counts: Tensor
    uniform: Tensor
    means: Tensor

    @classmethod
    def of(
        cls,
        log_z: Tensor,
        log_sums: Tensor,
        log_squares: Tensor,
        counts: Tensor,
        uniform: Tensor,
        means: Tensor,
    ) -> Totals:
        """From log Z as of the last resampling, and what every process said."""
        log_total, log_n = log_sums.logsumexp(0), counts.sum().log()
        ess = (2 * log_total - log_squares.logsumexp(0) - log_n).exp()
        return cls(log_z + (log_total - log_n), ess[None], log_sums, counts, uniform, means)

    @property
    def resampled(self) -> Totals:
        """The same after a resampling, which leaves all weights one."""
        log_n = self.counts.log()
        return Totals.of(self.log_z, log_n, log_n, self.counts, self.uniform, self.means)

    @property
    def share(self) -> Tensor:
        """What the walkers of this process count for in the whole, as a multiple of an equal share, `()`."""
        return torch.softmax(self.log_sums, 0)[processes.rank()] * processes.count()


class Spread(Population):
    """The walkers of this process, of one population that all have a part of.

    `log_z`, `resamplings` and `past_noise`, `(1,)`, are of the whole and the same everywhere; ancestors are counted
    through all processes. In a process that is alone it is a population like any other.
    """

    __slots__ = ()

    def asking(self, rng: torch.Generator | None = None, *own: Tensor) -> Callable[[], Totals]:
        """Tell all processes of the walkers here, with whatever else there is to say, `()`; nobody waits for it.

        With `rng` also a number for the next resampling, of which the first process's is everybody's. What is
        returned waits for what the others say, and gives it.
        """
        A = self.log_weight
        uniform = A.new_zeros(()) if rng is None else _uniform(rng, A.device)
        told = [A.logsumexp(0), (2 * A).logsumexp(0), A.new_tensor(len(A)), uniform, *own]
        answers, log_z = processes.asked(torch.stack([one.to(A) for one in told])), self.log_z

        def heard() -> Totals:
            every = answers()
            log_sums, log_squares, counts, uniform = every[:, :4].unbind(1)
            return Totals.of(log_z, log_sums, log_squares, counts, uniform, every[:, 4:].mean(0))

        return heard

    def totals(self, rng: torch.Generator | None = None) -> Totals:
        """What all processes say of it at once."""
        return self.asking(rng)()

    def log_partition_and_ess(self) -> tuple[Tensor, Tensor]:
        """Both of the whole population."""
        return self.totals()[:2] if processes.is_many() else super().log_partition_and_ess()

    def log_partition(self) -> Tensor:
        """Of the whole population."""
        return self.totals().log_z if processes.is_many() else super().log_partition()

    def ess(self) -> Tensor:
        """Of the whole population."""
        return self.totals().ess if processes.is_many() else super().ess()

    def entropy(self) -> Tensor:
        """Of the whole population: log Σw minus the mean of log w, where w is weighed by itself."""
        if not processes.is_many():
            return super().entropy()
        A = self.log_weight
        mean = torch.dot(torch.softmax(A, 0), A.clamp(min=-1e30))
        log_sums, means, counts = processes.stacked(
            torch.stack([A.logsumexp(0), mean, A.new_tensor(len(A))])
        ).unbind(1)
        entropy = log_sums.logsumexp(0) - torch.dot(torch.softmax(log_sums, 0), means)
        return (entropy.exp() / counts.sum())[None]

    def ancestors(self, known: Totals | None = None) -> Tensor:
        """Of the whole population."""
        if not processes.is_many():
            return super().ancestors()
        first = processes.joined(self.ancestor, None if known is None else int(known.counts.sum()))
        return Population(*self)._replace(x=first, ancestor=first).ancestors()

    def noise(self, ess: Tensor | None = None, known: Totals | None = None) -> Tensor:
        """Of the whole population."""
        if not processes.is_many():
            return super().noise(ess)
        known = self.totals() if known is None else known
        return self.past_noise + (1 / (known.ess if ess is None else ess) - 1) / known.counts.sum()

    def resample(
        self,
        need: Tensor,
        scheme: str,
        order: str,
        rng: torch.Generator,
        known: tuple[Tensor, ...] | None = None,
    ) -> Population:
        """Resample the whole population where `need`, `(1,)`, says so; walkers move as little as that allows.

        Nothing is asked of other processes where `known` is their `totals`, in which there is a number for it.
        """
        if not processes.is_many():
            return super().resample(need, scheme, order, rng, known)
        if not bool(need.any()):
            return self
        totals = known if isinstance(known, Totals) else self.totals(rng)
        p = torch.softmax(self.log_weight, 0)
        places = self._order(order, p[None], None)
        drawn, have, want = draw_own(p, totals, scheme, None if places is None else places[0])
        kept = {name: value for name in SENT if (value := self._asdict()[name]) is not None and len(value)}
        rows = balanced([value.index_select(0, drawn) for value in kept.values()], have, want)
        new = self._replace(**dict(zip(kept, rows, strict=True)))
        return new._replace(
            log_weight=torch.zeros_like(new.log_weight),
            log_z=totals.log_z,
            resamplings=self.resamplings + 1,
            past_noise=self.noise(None, totals),
        )


def _uniform(rng: torch.Generator, device: torch.device) -> Tensor:
    """A number on [0, 1), `()`."""
    return torch.rand((), generator=rng, dtype=torch.float64, device=device)


def draw_own(
    share: Tensor, totals: Totals, scheme: str, order: Tensor | None
) -> tuple[Tensor, list[int], list[int]]:
    """Which walkers of this process go on, and how many go on in each process, and how many it had.

    `share` is what each weighs among those of this process. Every scheme is that of the whole population, see
    `core.resampling`; what is random is the first process's.
    """
    N, u, want = int(totals.counts.sum()), totals.uniform[0], totals.counts.long().tolist()
    weight, me = torch.softmax(totals.log_sums, 0), processes.rank()
    p = weight[me] * (share if order is None else share[order])
    if scheme == "systematic":
        rows, have = _of_grid(p, weight, N, u)
    elif scheme == "residual":
        certain = torch.floor(N * p)
        rest = p - certain / N
        copies, sums = processes.stacked(torch.stack([certain.sum(), rest.sum()])).unbind(1)
        rows, have = _of_grid(rest, sums, N - int(copies.sum()), u)
        sure = torch.repeat_interleave(torch.arange(len(p), device=p.device), certain.long())
        rows, have = torch.cat([sure, rows]), have + copies.long()
    else:
        common = generator(int(u * 2**53), p.device)
        v = 1 - torch.rand(N, generator=common, dtype=torch.float64, device=p.device)
        grid = (torch.arange(N, device=p.device) + v) / N if scheme == "stratified" else v
        ends = weight.cumsum(0)
        whose = torch.searchsorted(ends / ends[-1], grid).clamp(max=len(ends) - 1)
        own = (grid[whose == me] - (ends[me] - weight[me])) / weight[me]
        rows = _inverted(p, own)
        have = torch.bincount(whose, minlength=len(ends))
    return rows if order is None else order[rows], have.tolist(), want


def _of_grid(p: Tensor, sums: Tensor, n: int, u: Tensor) -> tuple[Tensor, Tensor]:
    """Own rows at those of n points, at equal distances from a common `u` on, that fall to this process.

    `p` are its own shares, and `sums` those of all processes, of which n points are an equal part each.
    """
    ends = sums.cumsum(0) / sums.sum()
    upto = torch.floor(n * ends + u).clamp(0, n).long()
    upto[-1] = n
    first = torch.cat([upto.new_zeros(1), upto[:-1]])
    me = processes.rank()
    points = (torch.arange(int(first[me]), int(upto[me]), device=p.device) + 1 - u) / max(n, 1)
    before = ends[me] - sums[me] / sums.sum()
    return _inverted(p, (points - before) * sums.sum() / sums[me]), upto - first


def _inverted(p: Tensor, u: Tensor) -> Tensor:
    """Rows m with P_{m−1} < u ≤ P_m, of numbers u on (0, 1]."""
    cumulative = p.cumsum(0)
    return torch.searchsorted(cumulative / cumulative[-1], u.contiguous()).clamp(max=len(p) - 1)


def balanced(parts: Sequence[Tensor], have: Sequence[int], want: Sequence[int]) -> list[Tensor]:
    """The same rows of several tensors, after each process has as many as it wants; what stays is not sent.

    Args:
        parts: `(have, …)` each.
        have: rows of every process.
        want: rows that it is to have, as many in all.
    """
    me = processes.rank()
    moves, own = transfers(have, want), have[me]
    spare = max(0, own - want[me])
    # evenly spaced, so that neither those that go nor those that stay are of one region only
    going = torch.arange(spare, device=parts[0].device) * own // max(spare, 1)
    staying = torch.ones(own, dtype=torch.bool, device=parts[0].device).index_fill(0, going, False)
    packed = [_bytes(part[going]) for part in parts]
    arrived = processes.moved(torch.cat(packed, 1), moves).split([one.shape[1] for one in packed], 1)
    made = []
    for part, one in zip(parts, arrived, strict=True):
        new = (
            one.clone(memory_format=torch.contiguous_format).view(part.dtype).view(len(one), *part.shape[1:])
        )
        made.append(torch.cat([part[staying], new]))
    return made


def _bytes(rows: Tensor) -> Tensor:
    """Rows as bytes, `(k, width)`."""
    return (rows.flatten(1) if rows.dim() > 1 else rows[:, None]).contiguous().view(torch.uint8)


def transfers(have: Sequence[int], want: Sequence[int]) -> list[tuple[int, int, int]]:
    """Who sends how many to whom, (from, to, rows): no more than must move.

    >>> transfers([5, 1, 3], [3, 3, 3])
    [(0, 1, 2)]
    """
    spare = [[i, h - w] for i, (h, w) in enumerate(zip(have, want, strict=True)) if h > w]
    short = [[i, w - h] for i, (h, w) in enumerate(zip(have, want, strict=True)) if w > h]
    moves = []
    while spare and short:
        k = min(spare[0][1], short[0][1])
        moves.append((spare[0][0], short[0][0], k))
        for side in (spare, short):
            side[0][1] -= k
            if not side[0][1]:
                side.pop(0)
    return moves


def share_of(log_weight: Tensor) -> Tensor | None:
    """What walkers of these weights count for in the whole, as a multiple of an equal share; None when alone."""
    if not processes.is_many():
        return None
    return torch.softmax(processes.stacked(log_weight.logsumexp(0)), 0)[processes.rank()] * processes.count()


def spread(walkers: Population) -> Population:
    """Of one whole population, the part of this process."""
    n = len(walkers.x)
    return Spread(**_of_rows(walkers, processes.own_rows(n))) if processes.is_many() else walkers


def begun(walkers: Population, n: int) -> Population:
    """The first walkers of this process as its part of one population of `n`."""
    if not processes.is_many():
        return walkers
    return Spread(**walkers.save())._replace(ancestor=walkers.ancestor + processes.own_rows(n).start)


def some_of(walkers: Population) -> Population:
    """Of several whole populations, those of this process."""
    own, n = processes.own_rows(walkers.groups), len(walkers.x) // walkers.groups
    kept = _of_rows(walkers, slice(own.start * n, own.stop * n))
    for name in ("log_z", "resamplings", "past_noise"):
        kept[name] = kept[name][own]
    offset = own.start * n
    return Population(**kept)._replace(ancestor=kept["ancestor"] - offset)


def _of_rows(walkers: Population, rows: slice) -> dict[str, Tensor]:
    tree = walkers.save()
    return {name: value[rows] if name in ROWS else value for name, value in tree.items()}


def whole_of(walkers: Population) -> Population:
    """The walkers of all processes: of one population, or of all populations, one after the other."""
    if not processes.is_many():
        return walkers
    one = isinstance(walkers, Spread)
    sizes = processes.stacked(torch.tensor(len(walkers.x), device=walkers.x.device))
    first = 0 if one else int(sizes[: processes.rank()].sum())
    tree = walkers._replace(ancestor=walkers.ancestor + first).save()
    return Population(
        **{
            name: value if one and name not in ROWS else processes.joined(value)
            for name, value in tree.items()
        }
    )
