"""A reference chosen from the data: how many components, how much alike, how heavy their tails.

Everything is chosen by the likelihood of rows that were left out, never by the likelihood of those fitted: of the
latter a mixture with a component for each row has the best, and is worth nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from metastable.core.random import derive

from .scale_mixture import ScaleMixture

MOST_COMPONENTS = 8
ROWS_PER_COMPONENT = 10
"""Fewer rows than this say too little of a mean and a covariance of their own."""
WIDTHS = (0.7, 1.0, 1.6, 3.0)
"""Each component is a mixture of Gaussians of these relative widths: light or heavy tails, as the rows have it."""
RIDGES = (0.003, 0.1)
"""Shares of independent columns in the covariance of a single Gaussian that are tried."""
RIDGES_OF_FEW = (0.4, 1.0)
"""Also tried where there are fewer than `FEW` rows to a column."""
FEW = 5
FIRST = (0.01, 2 / 3)
"""Ridge and pull while the number of components is looked for; a pull is in units of the number of columns."""
OTHERS = ((0.003, 1 / 3), (0.003, 2.0), (0.1, 1.0))
"""Ridges and pulls that are tried once it is found."""
GROWTH = (1.0, 1.05, 1.15, 1.4, 2.0)
"""Factors that are tried on all widths: what was fitted to some rows is too narrow for others."""
PATIENCE = 2
"""The search for more components ends when so many more have brought nothing."""
CAREFUL = 0.5
"""Something less simple must be better by so many standard errors."""
FOLDS = 5
STARTS = 3
"""Fits from different first clusters, which end apart: their average predicts better than each of them."""
RESTARTS = 4
LEAST_SCALE = 1e-3
"""Spread given to a column that never changes, beside that of an average one."""


class Choice(NamedTuple):
    """What cross-validation decides.

    Attributes:
        components: K.
        ridge: share of independent columns in each covariance.
        pull: rows that the pooled covariance counts for in each component's own.
        widths: of the Gaussians that each component consists of.
        growth: factor on all widths.
    """

    components: int
    ridge: float
    pull: float = 0.0
    widths: tuple[float, ...] = (1.0,)
    growth: float = 1.0


class Parts(NamedTuple):
    """A batch of F mixtures: log w `(F, K, S)`, m `(F, K, d)`, P `(F, K, d, d)`."""

    log_weight: Tensor
    mean: Tensor
    factor: Tensor


def fit_reference(x: Tensor, seed: int = 0) -> ScaleMixture:
    """The mixture of Gaussians, with tails where the data have them, that predicts left-out rows of `x` best.

    Rows of one Gaussian get one Gaussian. Where there are several components, fits from `STARTS` first clusters are
    averaged, so that the mixture has `STARTS` times as many.

    Args:
        x: vectors `(n, d)`.
        seed: of folds and first clusters; the same rows and seed give the same mixture.

    >>> x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    >>> x[200:] += 10
    >>> fit_reference(x[:200]).mean.shape, fit_reference(x).mean.shape
    (torch.Size([1, 2]), torch.Size([6, 2]))
    """
    rows = x.detach().double().cpu()
    centre, scale = _units(rows)
    white = (rows - centre) / scale
    choice = choose(white, seed) if len(white) > 1 else Choice(1, 1.0)  # of one row none can be left out
    everything = torch.ones(1, len(white), dtype=torch.float64)
    starts = STARTS if choice.components > 1 else 1
    fits = [_fitted(white, everything, [choice], derive(seed, "fit", i)) for i in range(starts)]
    log_weight, mean, factor = (torch.cat(parts, 1)[0] for parts in zip(*fits, strict=True))
    width = choice.growth * torch.tensor(choice.widths, dtype=torch.float64)
    return ScaleMixture(log_weight, centre + scale * mean, factor / scale, width).to(x)


def _units(x: Tensor) -> tuple[Tensor, Tensor]:
    """Means and spreads of columns; those that never change are given one beside the others'."""
    scale = x.std(0, correction=0)
    typical = scale.square().mean().sqrt()
    floor = LEAST_SCALE * torch.where(typical > 0, typical, torch.ones_like(typical))
    varies = scale > 1e-12 * x.abs().amax(0).clamp(min=1e-300)
    return x.mean(0), torch.where(varies, scale, floor)


# --- the choice --------------------------------------------------------------------------------------------


def choose(x: Tensor, seed: int) -> Choice:
    """The settings with the best likelihood of left-out rows.

    First a single Gaussian, then one with tails, then more and more components, last how much these
    have in common, and whether they need tails.

    Args:
        x: `(n, d)`, float64, columns of spread about one.
        seed: of folds and first clusters.
    """
    n, d = x.shape
    kept = _folds(n, seed)
    ridges = RIDGES if n >= FEW * d else (*RIDGES, *RIDGES_OF_FEW)
    best, score = _best(x, kept, [Choice(1, ridge) for ridge in ridges], seed)
    since = 0
    for K in range(1, min(MOST_COMPONENTS, max(1, n // ROWS_PER_COMPONENT)) + 1):
        found, value = _best(x, kept, [Choice(K, FIRST[0], FIRST[1] * d, WIDTHS)], seed)
        since += 1
        if _better(value, score):
            best, score, since = found, value, 0
        if since == PATIENCE:
            break
    if len(best.widths) > 1:
        others = [best._replace(ridge=ridge, pull=pull * d) for ridge, pull in OTHERS]
        found, value = _best(x, kept, others, seed)
        best, score = (found, value) if value.sum() > score.sum() else (best, score)
        found, value = _best(x, kept, [best._replace(widths=(1.0,))], seed)
        best = found if value.sum() > score.sum() else best
    return best


def _better(new: Tensor, old: Tensor) -> bool:
    """Whether left-out rows gain, by more than chance would often give."""
    gain = new - old
    return float(gain.sum()) > CAREFUL * float(gain.std()) * math.sqrt(len(gain))


def _folds(n: int, seed: int) -> Tensor:
    """Which rows are kept in each fold, `(F, n)` of zeros and ones."""
    folds = min(FOLDS, n)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(derive(seed, "folds")))
    return (order % folds != torch.arange(folds)[:, None]).double()


def _best(x: Tensor, kept: Tensor, choices: list[Choice], seed: int) -> tuple[Choice, Tensor]:
    """The best of choices that differ in ridge and pull only, with its growth, and its scores of left-out rows."""
    masks = kept.repeat(len(choices), 1)
    each = [choice for choice in choices for _ in kept]
    parts = _fitted(x, masks, each, derive(seed, "choose", choices[0].components), enough=3e-3)
    square = _squares(x, parts)
    left_out = [(1 - masks) * _log_density(square, parts, g, choices[0].widths) for g in GROWTH]
    scores = torch.stack(left_out).view(len(GROWTH), len(choices), len(kept), -1).sum(2)
    at = int(scores.sum(2).argmax())
    growth, choice = GROWTH[at // len(choices)], choices[at % len(choices)]
    return choice._replace(growth=growth), scores.flatten(0, 1)[at]


# --- expectation and maximisation, for a batch of masks ----------------------------------------------------


def _fitted(
    x: Tensor, kept: Tensor, choices: list[Choice], seed: int, most: int = 40, enough: float = 1e-3
) -> Parts:
    """Mixtures of the same size fitted to the rows that each mask keeps, `(F, n)`."""
    first = choices[0]
    K, S = first.components, len(first.widths)
    ridge = torch.tensor([c.ridge for c in choices], dtype=x.dtype)
    pull = torch.tensor([c.pull for c in choices], dtype=x.dtype)
    first_weight = torch.tensor([5.0 if c == 1 else 1.0 for c in first.widths], dtype=x.dtype)
    member = _clusters(x, kept, K, seed) * kept[..., None]
    share = member[..., None] * first_weight / first_weight.sum()
    before = -math.inf
    for _ in range(most if K * S > 1 else 1):
        parts = _maximise(x, share, ridge, pull, first.widths)
        log_joint = _log_joint(_squares(x, parts), parts, 1.0, first.widths)
        total = torch.logsumexp(log_joint.flatten(2), 2)
        share = (log_joint - total[..., None, None]).exp() * kept[:, :, None, None]
        now = float((total * kept).sum() / kept.sum())
        if now - before < enough:
            break
        before = now
    return parts  # pyright: ignore


def _maximise(x: Tensor, share: Tensor, ridge: Tensor, pull: Tensor, widths: tuple[float, ...]) -> Parts:
    """Weights, means and covariances from the share `(F, n, K, S)` of each Gaussian in each row.

    A row that a wide Gaussian explains says less of mean and covariance, by the width squared. Covariances are
    pulled towards what all components have in common, and that towards independent columns.
    """
    d, (K, S) = x.shape[1], share.shape[2:]
    count = share.sum(1)  # (F, K, S)
    weight = count + 1 / (K * S)
    log_weight = (weight / weight.sum((1, 2), keepdim=True)).log()
    precise = (share / torch.tensor(widths, dtype=x.dtype) ** 2).sum(3)  # (F, n, K)
    mean = (precise.transpose(1, 2) @ x) / precise.sum(1).clamp(min=1e-9)[..., None]
    centred = (x - mean[:, :, None]) * precise.sqrt().transpose(1, 2)[..., None]  # (F, K, n, d)
    scatter = centred.transpose(2, 3) @ centred
    size = count.sum(2)  # (F, K)
    pooled = scatter.sum(1) / size.sum(1)[:, None, None]
    level = pooled.diagonal(dim1=1, dim2=2).mean(1).clamp(min=LEAST_SCALE**2)
    independent = (ridge * level)[:, None, None] * torch.eye(d, dtype=x.dtype)
    rest = (1 - ridge)[:, None, None]
    own = (scatter + (pull[:, None, None] * pooled)[:, None]) / (size + pull[:, None])[..., None, None]
    covariance = rest[:, None] * own + independent[:, None]
    factor = torch.linalg.cholesky(covariance)
    eye = torch.eye(d, dtype=x.dtype).expand_as(factor)
    return Parts(log_weight, mean, torch.linalg.solve_triangular(factor, eye, upper=False))


def _squares(x: Tensor, parts: Parts) -> Tensor:
    """|P(x − m)|², `(F, n, K)`."""
    F, K, d = parts.mean.shape
    offset = (parts.factor @ parts.mean[..., None]).view(F, 1, K, d)
    white = (x @ parts.factor.reshape(F, K * d, d).transpose(1, 2)).view(F, len(x), K, d) - offset
    return white.square().sum(-1)


def _log_joint(square: Tensor, parts: Parts, growth: float, widths: tuple[float, ...]) -> Tensor:
    """log of w_ks times the density of its Gaussian, `(F, n, K, S)`."""
    d = parts.mean.shape[-1]
    width = growth * torch.tensor(widths, dtype=square.dtype)
    log_det = parts.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    peak = parts.log_weight + log_det[..., None] - d * width.log() - 0.5 * d * math.log(2 * math.pi)
    return peak[:, None] - 0.5 * square[..., None] / width**2


def _log_density(square: Tensor, parts: Parts, growth: float, widths: tuple[float, ...]) -> Tensor:
    """`(F, n)`."""
    return torch.logsumexp(_log_joint(square, parts, growth, widths).flatten(2), 2)


# --- first clusters ----------------------------------------------------------------------------------------


def _clusters(x: Tensor, kept: Tensor, K: int, seed: int) -> Tensor:
    """k-means of the rows that each mask keeps: memberships `(F, n, K)` of zeros and ones, the best of some starts.

    Masks that are equal get equal clusters, so that settings are compared on the same ones.
    """
    if K == 1:
        return torch.ones(len(kept), len(x), 1, dtype=x.dtype)
    different, back = torch.unique(kept, dim=0, return_inverse=True)
    masks = different.repeat_interleave(RESTARTS, 0)
    rng = torch.Generator().manual_seed(derive(seed, "clusters"))
    centres = _spread_out(x, masks, K, rng)
    for _ in range(10):
        member = _nearest(x, centres)[0] * masks[..., None]
        size = member.sum(1)[..., None]
        centres = torch.where(size > 0, member.transpose(1, 2) @ x / size.clamp(min=1), centres)
    member, distance = _nearest(x, centres)
    best = (distance * masks).sum(1).view(-1, RESTARTS).argmin(1)
    member = member.view(-1, RESTARTS, len(x), K)[torch.arange(len(different)), best]
    return member[back]


def _spread_out(x: Tensor, masks: Tensor, K: int, rng: torch.Generator) -> Tensor:
    """k-means++: each centre a row, drawn in proportion to its squared distance from those before, `(R, K, d)`."""
    chance, centres = masks, []
    for _ in range(K):
        centres.append(x[torch.multinomial(chance, 1, generator=rng)])
        distance = _nearest(x, torch.cat(centres, 1))[1]
        chance = masks * (distance + 1e-12)
    return torch.cat(centres, 1)


def _nearest(x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Membership of the nearest centre `(R, n, K)`, and the squared distance from it `(R, n)`."""
    square = torch.cdist(x.expand(len(centres), -1, -1), centres).square()
    distance, at = square.min(2)
    return torch.nn.functional.one_hot(at, centres.shape[1]).to(x), distance
