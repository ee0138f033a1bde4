"""log Z of a conditional energy, one for each context, by importance sampling; likelihoods normalised with it.

With y ~ q(· | c) and w = exp(−E(y | c))/q(y | c), E[w] = Z(c). Methods that train a proposal beside the energy
have such a q at hand, so that log p(y | c) = −E(y | c) − log Z(c) comes with an error bar.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import InputError, UnsupportedError, require_count, require_positive
from metastable.core.protocols import Sampled, Scored, is_biased, provides
from metastable.core.random import derive, generator
from metastable.core.types import bind, student_t_quantile
from metastable.core.weights import ess_fraction, log_mean_exp, spread_of_log_mean
from metastable.proposals.given import sample_and_log_prob_given
from metastable.walkers.importance import OdeShift, ode_draws, ode_shift, ode_words

GROUPS = 32
"""Independent groups of draws for each context, whose spread is the standard error."""
AT_ONCE = 2**17
"""Draws, of all contexts together, that are in memory at once."""
MOST = 2**17
"""Draws for one context at which an estimate with a target gives up."""
LEAST_ESS, LEAST_SHARE = 50.0, 0.01
"""Effective draws, and their share of all, below which a value rests on a few lucky draws."""


@dataclass(frozen=True)
class LogPartitions:
    """log Z of each of B contexts, and how far each can be trusted.

    Attributes:
        value: log Z, `(B,)`, float64.
        std_error: its standard error, by the jackknife over independent groups of draws, `(B,)`, and what an ODE
            behind the draws adds to it.
        ess: effective draws, `(B,)`.
        draws: draws made, `(B,)`.
        warnings: in words, what speaks against values; empty when nothing does.
        degrees: degrees of freedom of the standard errors.
        ode_shift: what `value` would change by, about, if the proposal's ODE were solved exactly, `(B,)`; it is in
            `std_error`, since no number of draws makes it smaller. None where there is no ODE.
        coarse: where that shift is clearly more than the draws' own error, `(B,)`.
    """

    value: Tensor
    std_error: Tensor
    ess: Tensor
    draws: Tensor
    warnings: tuple[str, ...] = ()
    degrees: int = GROUPS - 1
    ode_shift: Tensor | None = None
    coarse: Tensor | None = None

    def __len__(self) -> int:
        return len(self.value)

    @property
    def trusted(self) -> Tensor:
        """Which of them nothing speaks against, `(B,)`."""
        sure = self.std_error.isfinite() & ~doubtful(self.ess, self.draws)
        return sure if self.coarse is None else sure & ~self.coarse

    @property
    def spread(self) -> Tensor:
        """The part of `std_error` that is of the draws, `(B,)`."""
        if self.ode_shift is None:
            return self.std_error
        left = (self.std_error.square() - self.ode_shift.square()).clamp(min=0).sqrt()
        return torch.where(self.std_error.isinf(), self.std_error, left)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Two-sided intervals at `level`, from Student's t."""
        half = student_t_quantile(0.5 + level / 2, self.degrees) * self.std_error
        return self.value - half, self.value + half


def doubtful(ess: Tensor, draws: Tensor) -> Tensor:
    """Whether so few draws carry the weight that neither value nor error means anything."""
    return ~((ess >= LEAST_ESS) & (ess >= LEAST_SHARE * draws))  # so that NaN is doubtful too


def log_partition_given(
    energy: Any,
    proposal: Any,
    given: Tensor,
    draws: int = 4096,
    rng: torch.Generator | None = None,
    *,
    std_error: float | None = None,
    most: int = MOST,
    t: float | None = None,
) -> LogPartitions:
    """log Z(c) = log ∫ exp(−E(y | c)) dy for each context, by importance sampling from `proposal`.

    The estimate of Z is unbiased; that of log Z lies low by about half its squared standard error. Mass of the
    model that the proposal never draws is in neither the value nor the error: the proposal must be at least as
    wide. Where a draw is the solution of an ODE, its error is estimated from a few draws with twice the steps
    (`walkers.importance.ode_shift`), and is in the standard error.

    Args:
        energy: E(y | given), or E(y | given, t).
        proposal: q, with `sample` and an exact `log_prob`, for contexts or without them. Z is the integral over its
            support: of a box, the integral over the box.
        given: contexts, `(B, *context)`.
        draws: for each context, rounded up to a multiple of the groups.
        rng: a generator where the proposal draws; by default one of seed 0, so that the same call gives the same
            number.
        std_error: where given, contexts whose standard error is above it get twice the draws until it is not.
        most: draws for one context at which that ends.
        t: the time of an energy that has one.

    >>> from metastable.proposals import Gaussian
    >>> narrow = lambda y, given: (given * y.square().sum(-1))  # log Z = log(π/c) in two dimensions
    >>> z = log_partition_given(narrow, Gaussian(torch.zeros(2)), torch.tensor([[1.0], [2.0]]))
    >>> (z.value - (math.pi / torch.tensor([1.0, 2.0])).log()).abs().max().item() < 0.05
    True
    """
    require_count("draws", draws, 2)
    if std_error is not None:
        require_positive("std_error", std_error)
    if not provides(proposal, Sampled, Scored):
        raise InputError(f"proposal: must have sample and log_prob, got {type(proposal).__name__}")
    if is_biased(proposal):
        raise UnsupportedError(
            "proposal: its log_prob is a biased estimate, so that the weights would not average to Z; use one with "
            "a density of its own, such as a flow"
        )
    rng = torch.Generator(given.device).manual_seed(0) if rng is None else rng
    job = _Job(energy, proposal, given, rng, t)
    first = GROUPS * math.ceil(draws / GROUPS)
    parts = [_estimate(job, rows, first, std_error, most) for rows in _chunks(len(given), first)]
    columns = (torch.cat(column) for column in zip(*parts, strict=True))
    value, error, ess, counts = columns
    words, shift = _words(error, ess, counts, std_error), _ode_shift(job, first)
    if shift is None:
        return LogPartitions(value, error, ess, counts, words)
    coarse = shift.too_coarse(error)
    words += (ode_words(shift.value),) if bool(coarse.any()) else ()
    total = torch.hypot(error, shift.value)
    return LogPartitions(value, total, ess, counts, words, ode_shift=shift.value, coarse=coarse)


class ConditionalLogProb(NamedTuple):
    """log p(x | given) of N pairs.

    Attributes:
        value: `(N,)`, float64.
        std_error: that of the log Z in it, `(N,)`; pairs of one context share their error.
        context: which of the distinct contexts a pair has, `(N,)`.
        log_partition: log Z of the distinct contexts.
    """

    value: Tensor
    std_error: Tensor
    context: Tensor
    log_partition: LogPartitions

    def mean_and_error(self) -> tuple[float, float]:
        """The mean over pairs, and its standard error: from the pairs' spread and from the errors of log Z."""
        N = len(self.value)
        share = torch.bincount(self.context, minlength=len(self.log_partition)) / N
        z = self.log_partition
        from_z = (share * z.spread).square().sum()
        if z.ode_shift is not None:  # one solver, one sign: it does not average out
            from_z += (share * z.ode_shift).sum().square()
        return float(self.value.mean()), math.sqrt(float(self.value.var() / N + from_z))


@torch.no_grad()
def conditional_log_prob(
    energy: Any,
    proposal: Any,
    x: Tensor,
    given: Tensor,
    draws: int = 4096,
    rng: torch.Generator | None = None,
    *,
    std_error: float | None = None,
    most: int = MOST,
    t: float | None = None,
) -> ConditionalLogProb:
    """Normalised log-densities −E(x | given) − log Z(given); log Z is estimated once for each distinct context.

    Args:
        energy: E(x | given), or E(x | given, t).
        proposal: q; this and the rest as of `log_partition_given`.
        x: events, `(N, *event)`.
        given: the context of each, `(N, *context)`.
        draws: for each distinct context.
        rng: of the draws.
        std_error: of log Z, which more draws reach.
        most: draws for one context.
        t: the time of an energy that has one.
    """
    if len(x) != len(given):
        raise InputError(f"given: must be one for each of the {len(x)} events, got {len(given)}")
    distinct, context = torch.unique(given, dim=0, return_inverse=True)
    z = log_partition_given(energy, proposal, distinct, draws, rng, std_error=std_error, most=most, t=t)
    empty = z.value.isneginf()
    if bool(empty.any()):
        i = int(empty.nonzero()[0])
        raise InputError(
            f"energy: exp(−E) is 0 at all {int(z.draws[i])} draws of the proposal for the context "
            f"{distinct[i].tolist()}: there is nothing to normalise with; use a nearer or wider proposal"
        )
    parts = zip(x.split(AT_ONCE), given.split(AT_ONCE), strict=True)
    E = torch.cat([bind(energy, c, t)(rows) for rows, c in parts]).double()
    return ConditionalLogProb(-E - z.value[context], z.std_error[context], context, z)


# ---- one chunk of contexts


class _Job(NamedTuple):
    energy: Any
    proposal: Any
    given: Tensor
    rng: torch.Generator
    t: float | None

    @torch.no_grad()
    def log_weights(self, rows: Tensor, draws: int) -> Tensor:
        """−E − log q of fresh draws, `(len(rows), draws)`."""
        given = self.given[rows]
        y, log_q = sample_and_log_prob_given(self.proposal, draws, self.rng, given)
        E = bind(self.energy, given, self.t)(y.flatten(0, 1)).view(log_q.shape)
        log_weight = -E.double() - log_q.double()
        wrong = log_weight.isnan() | log_weight.isposinf()
        if bool(wrong.any()):
            i, k = wrong.nonzero()[0].tolist()
            raise InputError(
                f"energy: the weight exp(−E)/q of a draw for context {int(rows[i])} (counting from 0) is not "
                f"finite: E = {float(E[i, k])}, log q = {float(log_q[i, k])}"
            )
        return log_weight


def _ode_shift(job: _Job, draws: int) -> OdeShift | None:
    """`ode_shift` of each context, from a few draws of each."""
    n = ode_draws(draws, len(job.given))

    def log_weights(proposal: Any) -> Tensor:
        rng = generator(derive(0, "ode"), job.given.device)
        same = job._replace(proposal=proposal, rng=rng)
        return torch.cat([same.log_weights(rows, n) for rows in _chunks(len(job.given), n)])

    return ode_shift(job.proposal, log_weights)


def _estimate(
    job: _Job, rows: Tensor, draws: int, target: float | None, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Value, error, effective draws and draws of some contexts; draws are doubled until the target is met."""
    log_weight = job.log_weights(rows, draws)
    columns = value, error, ess, counts = _statistics(log_weight)
    late = torch.arange(len(rows))  # on the host, as `rows` are
    while target is not None and 2 * draws <= most:
        # two estimates of the error, or whoever looks precise by luck would stop
        by_ess = (1 / ess[late] - 1 / counts[late]).clamp(min=0).sqrt()
        open_ = ~(torch.maximum(error[late], by_ess) <= target).cpu()
        if not bool(open_.any()):
            break
        late, log_weight = late[open_], log_weight[open_]
        more = [job.log_weights(rows[late[part]], draws) for part in _chunks(len(late), draws)]
        log_weight, draws = torch.cat([log_weight, torch.cat(more)], 1), 2 * draws
        for column, new in zip(columns, _statistics(log_weight), strict=True):
            column[late] = new
    return value, error, ess, counts


def _statistics(log_weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of `(B, draws)`, one of each for every row."""
    B, draws = log_weight.shape
    per_group = log_mean_exp(log_weight.view(B, GROUPS, -1), 2).T  # `(GROUPS, B)`
    # where all weights of a row are zero, nothing is known
    empty = log_weight.isneginf().all(1)
    error = spread_of_log_mean(per_group).masked_fill(empty, math.inf)
    ess = (ess_fraction(log_weight) * draws).masked_fill(empty, 0.0)
    return log_mean_exp(log_weight, 1), error, ess, torch.full_like(ess, draws)


def _chunks(contexts: int, draws: int) -> list[Tensor]:
    """Rows of contexts whose draws fit into memory together."""
    return list(torch.arange(contexts).split(max(1, AT_ONCE // draws)))


def _words(error: Tensor, ess: Tensor, draws: Tensor, target: float | None) -> tuple[str, ...]:
    words, few = [], doubtful(ess, draws)
    if bool(few.any()):
        worst = int(ess.nan_to_num(0).argmin())
        words.append(
            f"for {int(few.sum())} of {len(ess)} contexts few draws carry the weight (context {worst}: "
            f"{float(ess[worst]):.1f} of {int(draws[worst])}); use a nearer or wider proposal"
        )
    above = 0 if target is None else int((error > target).sum())
    if above:
        words.append(
            f"for {above} of {len(error)} contexts the standard error is above {target:g}, up to "
            f"{float(error.max()):.2g}; allow more draws (most=…)"
        )
    return tuple(words)
