"""Training that does not believe its negatives blindly: the β objective.

*Energy-based model training objective robust to inaccurate SGLD samples*, submission to ICLR 2025. Chains sample
p^(1−β), and p^β decides what each of their samples counts for: a negative that the model itself finds unlikely is
set aside, and where all of them are, the update nearly vanishes.

| symbol | here |
|---|---|
| f | −E |
| β, 1 − β | `weighting`, `sampling` (b and a of Appendix G) |
| x⁺, N | rows of the data batch |
| x⁻, M | `source`'s negatives |
| w̃(x) = e^{βf(x)} | `log_w` (with the source's own weights) |
| w(x⁻) | `Weights.negatives`, which sum to 1 |
| ẇ(x⁺) | w̃(x⁺)/(w̃(x⁺) + Σ w̃(x⁻)); 1 − ẇ is in `Weights.data` |
| GradScale (30) | the metric `grad_scale` |
| α, u (SGLD) | h = α/2 of the source's kernel, and its noise |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from metastable.core.errors import ConfigError, InputError, require, require_choice, require_count
from metastable.core.parts import in_parts
from metastable.core.types import (
    Energy,
    EnergyGrad,
    LogPartition,
    Walkers,
    energy_and_grad,
    is_discrete,
    precise,
)
from metastable.core.weights import ess_fraction, log_mean_exp

from .base import ChainMethod, Context, Metrics, Negatives, Objective, gap_metrics, without_log_z
from .contrastive import ExactDraws, ShortRun
from .mixed import Mixed, States, least, load_each, mean_metrics, save_each

VARIANTS = ("default", "no-positive", "batch-corrected", "true-objective")
IGNORED = 0.01
"""A negative that counts for less than this share of what it would count for without β is ignored."""
PART = 1 << 18
"""Numbers that go through the energy at once when a whole buffer is weighed: 85 images of CIFAR-10."""


class Weights(NamedTuple):
    """What data and negatives count for in an update; all detached.

    Attributes:
        data: 1 for each datum in plain training, `(*K, N)`.
        negatives: their shares, `(*K, M)`, which sum to 1; together they count for the mean of `data`.
    """

    data: Tensor
    negatives: Tensor


def robust_loss(
    fp: Tensor, fn: Tensor, beta: float | Tensor, log_weight: Tensor | None = None, variant: str = "default"
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

    >>> fp, fn = torch.tensor([0.0, 1.0]), torch.tensor([0.5, -400.0])
    >>> loss, weights = robust_loss(fp, fn, beta=0.5)
    >>> weights.negatives
    tensor([1., 0.])
    """
    with torch.no_grad():
        weights = weigh(fp, fn, beta, log_weight, variant)
    if _is_zero(beta):  # line 2
        mean = fn.mean(-1) if log_weight is None else (weights.negatives * fn).sum(-1)
        return mean - fp.mean(-1), weights
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
    _check_counts(fp.shape[-1], fn.shape[-1], variant)
    if _is_zero(beta):
        even = torch.full_like(fn, 1 / fn.shape[-1])
        return Weights(torch.ones_like(fp), even if log_weight is None else log_weight.softmax(-1).to(fn))
    b = _per_row(beta)
    log_w = _log_w(b * fn, log_weight)
    share = log_w.softmax(-1)  # w(x⁻)
    # log Σ w̃(x⁻) by its largest term, whose share is 1/M at least; a sum by itself would exponentiate again
    log_sum = log_w.amax(-1, keepdim=True) - share.amax(-1, keepdim=True).log()
    odds = log_sum - b * fp  # log Σ w̃(x⁻)/w̃(x⁺), of which σ is 1 − ẇ(x⁺)
    return Weights(_data_weights(odds.sigmoid(), variant), share)


def pull(weights: Weights, E_data: Tensor, E_model: Tensor) -> Tensor:
    """(1/N)Σ(1 − ẇ(x⁺))E(x⁺) − mean(1 − ẇ)·Σ w(x⁻)E(x⁻): a number whose gradient is (8), and nothing else.

    The same gradient as `robust_loss`'s, without a second way through exponentials and back.
    """
    data, share = weights
    # `dot`, as autocast would round what `@` is given
    return torch.dot(data, E_data) / len(data) - data.mean() * torch.dot(share, E_model)


def _is_zero(beta: float | Tensor) -> bool:
    return not isinstance(beta, Tensor) and beta == 0


def _per_row(beta: float | Tensor) -> float | Tensor:
    return beta[..., None] if isinstance(beta, Tensor) else beta


def _log_w(tilt: Tensor, log_weight: Tensor | None) -> Tensor:
    """log w̃(x⁻): βf, and the source's weights around their mean."""
    return tilt if log_weight is None else tilt + _around_one(log_weight).to(tilt)


def _check_counts(N: int, M: int, variant: str) -> None:
    require_choice("robust.variant", variant, VARIANTS)
    if N == 0:
        raise InputError("batch: no data (N = 0), and there is nothing to weigh negatives against")
    if M == 0:
        raise InputError("negatives: none were drawn (M = 0), and there is nothing to weigh data against")
    if variant == "true-objective" and N < 2:
        raise InputError(f"batch: true-objective halves the data, (34), and needs two rows, got {N}")


def _around_one(log_weight: Tensor) -> Tensor:
    return log_weight - log_mean_exp(log_weight)[..., None]


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


class Tempered:
    """a·E as an energy.

    Attributes:
        energy: E.
        scale: a, a tensor, so that compiled chains go on when it changes.
    """

    def __init__(self, energy: Energy, scale: Tensor):
        self.energy, self.scale = energy, scale
        self.discrete = is_discrete(energy)

    def __call__(self, x: Tensor) -> Tensor:
        """a·E(x), `(B,)`."""
        return self.scale * self.energy(x)


class TemperedClosed(Tempered):
    """a·E of an energy that brings its own gradient."""

    def value_and_grad(self, x: Tensor) -> EnergyGrad:
        """Both times a."""
        value, grad = energy_and_grad(self.energy, x)
        return EnergyGrad(self.scale * value, self.scale * grad)


def tempered(context: Context, scale: float) -> Context:
    """The context of chains that sample exp(−`scale`·E); the same one at 1."""
    if scale == 1:
        return context
    kind = TemperedClosed if hasattr(context.energy, "value_and_grad") else Tempered
    return context.seeing(kind(context.energy, context.data.new_full((), scale)))


class Powers(NamedTuple):
    """Chains sample exp(−`sampling`·E/T), and negatives are weighed by exp(−`weighting`·E)."""

    sampling: float
    weighting: float

    @property
    def plain(self) -> bool:
        """Whether chains follow E itself, and nothing is weighed."""
        return self == (1, 0)


class Views(NamedTuple):
    """The contexts of all β, what they were made from, and for which powers; None is the context itself."""

    energy: Energy
    powers: tuple[Powers, ...]
    contexts: list[Context | None]


@dataclass(frozen=True)
class Robust(Objective[States]):
    """Equation 8 on the negatives of any chain method.

    A datum stands as one more negative beside the M shared ones, which multiplies its pull by 1 − ẇ(x⁺): near 1
    where negatives are as likely as data, near 0 where none of them is. The objective is a lower bound of the
    likelihood's (Appendix D).

    Attributes:
        source: where the negatives come from: `ShortRun`, `PersistentCD`, `Jarzynski` (whose weights multiply
            those of β), several of them (`Mixed`), …; its chains run on (1 − β)E.
        beta: β, at most 1; 0 is plain training, and negative values sharpen the sampler instead. Several values are
            averaged in one loss, each on negatives of its own from a copy of the source. β is meant at the
            temperature T that the chains really have: weights are exp(−βE/T), see `ULA.temperature`.
        beta_start: β of the first update, from which it moves to `beta` in a straight line; None keeps it constant.
        anneal: updates that this takes.
        sampling: a of Appendix G, in the place of 1 − β.
        weighting: b of Appendix G, in the place of β. What is learned is exp(−(a + b)E/T).
        variant: `default` (8), `no-positive` (7), `batch-corrected` (33), `true-objective` (34).

    Metrics: `grad_scale`, the mean weight of data, and of negatives (1 in plain training); `weight_data_max` and
    `weight_negatives_max`, the largest of each, where 1 is that in plain training; `negatives_effective`, 1/Σw²;
    `negatives_ignored`, the share of negatives with weights below 0.01; `beta` where it moves, or the mean of
    several. `energy_gap` is between data and negatives under the source's weights only, and does not vanish:
    negatives are to be flatter than the model.

    Deviations: weighted negatives, several values of β and β over time are not in the paper's algorithm (the last
    is in its Appendix I.1). (30), (33) and (34) have lost a factor 1/N before their sums over data; here it is.

    >>> Robust(beta=0.3).powers(0), Robust(beta=0.1, beta_start=0.5, anneal=100).beta_at(50)
    ((Powers(sampling=0.7, weighting=0.3),), (0.3,))
    """

    source: ChainMethod = field(default_factory=lambda: ShortRun(steps=20))
    beta: float | tuple[float, ...] = 0.1
    beta_start: float | None = None
    anneal: int = 1000
    sampling: float | None = None
    weighting: float | None = None
    variant: str = "default"

    name: ClassVar[str] = "robust"
    gap_vanishes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(isinstance(self.source, ChainMethod), "robust.source", "a method with chains", self.source)
        for name in ("beta", "beta_start", "sampling", "weighting"):
            object.__setattr__(self, name, _plain_numbers(getattr(self, name)))
        require(len(self.betas) > 0, "robust.beta", "one number or several", self.beta)
        for beta in self.betas:
            _check_beta(beta, "robust.beta")
        if self.beta_start is not None:
            _check_beta(self.beta_start, "robust.beta_start")
        require_count("robust.anneal", self.anneal)
        require_choice("robust.variant", self.variant, VARIANTS)
        self._check_powers()
        self._check_source()

    @property
    def betas(self) -> tuple[float, ...]:
        """Where every β ends."""
        return self.beta if isinstance(self.beta, tuple) else (self.beta,)

    def source_states(self, state: States) -> tuple[Any, ...]:
        """Those of the first β, whose chains are like the others'."""
        return state[:1]

    def moving(self, batch: int, rows: int) -> int:
        """The source's, for each β."""
        return len(self.betas) * self.source.moving(batch, rows)

    def stored(self, batch: int, rows: int) -> int:
        """The source's, for each β."""
        return len(self.betas) * self.source.stored(batch, rows)

    def _check_powers(self) -> None:
        for name in ("sampling", "weighting"):
            value = getattr(self, name)
            if value is None:
                continue
            require(_finite(value), f"robust.{name}", "a finite number", value)
            require(len(self.betas) == 1, f"robust.{name}", "left out where beta has several values", value)
        if self.sampling is not None and self.sampling < 0:
            raise ConfigError("robust.sampling", f"must be at least 0, got {self.sampling}: {UPSIDE_DOWN}")
        if min(self.power(0), self.power(self.anneal)) <= 0:
            field = "beta" if self.weighting is None else "weighting"
            raise ConfigError(
                f"robust.{field}",
                f"must leave sampling + weighting above 0, got {getattr(self, field)}: what is learned is "
                "exp(−(a + b)E/T), of which data would be the least likely of all events",
            )

    def _check_source(self) -> None:
        powers = [p.sampling for step in (0, self.anneal) for p in self.powers(step)]
        if 0 in powers and not self.source.bounded:
            field = "sampling" if self.sampling == 0 else "beta" if 1 in self.betas else "beta_start"
            raise ConfigError(
                f"robust.{field}",
                f"chains would sample 0·E, the uniform density, which exists on a bounded set only, and "
                f"{self.source.name!r} with kernel {self.source.moves.name!r} is not confined to one; use {field} "
                f"{'above 0' if field == 'sampling' else 'below 1'}, or a source that is `bounded`",
            )
        parts = self.source.sources if isinstance(self.source, Mixed) else (self.source,)
        if any(isinstance(part, ExactDraws) for part in parts) and any(a != 1 for a in powers):
            raise ConfigError(
                "robust.source",
                "exact draws are of E itself, not of (1 − β)E; give sampling=1, or use a source with chains",
            )

    def beta_at(self, step: int) -> tuple[float, ...]:
        """Every β at update `step`."""
        if self.beta_start is None or step >= self.anneal:
            return self.betas
        t = step / self.anneal
        return tuple(self.beta_start + t * (beta - self.beta_start) for beta in self.betas)

    def powers(self, step: int) -> tuple[Powers, ...]:
        """a and b of each β at update `step`; b with the temperature of the chains in it."""
        moving = self.beta_start is not None and step < self.anneal
        return self._powers_of(self.beta_at(step)) if moving else self._last_powers

    @cached_property
    def _last_powers(self) -> tuple[Powers, ...]:
        return self._powers_of(self.betas)

    def _powers_of(self, betas: Sequence[float]) -> tuple[Powers, ...]:
        made = []
        for beta in betas:
            a = 1 - beta if self.sampling is None else self.sampling
            b = beta if self.weighting is None else self.weighting
            made.append(Powers(a, b / self.source.temperature))
        return tuple(made)

    def power(self, step: int) -> float:
        """(a + b)/T, which is the same for every β."""
        a, b = self.powers(step)[0]
        return a * self.source.power(step) + b

    def _sampled(self, context: Context, step: int) -> list[Context]:
        """What the chains of each β see; as long as β rests, the same ones."""
        powers = self.powers(step)
        made = context.views
        if not (isinstance(made, Views) and made.energy is context.energy and made.powers == powers):
            seen = [tempered(context, p.sampling) for p in powers]
            made = Views(context.energy, powers, [None if c is context else c for c in seen])
            context.views = made
        for view in made.contexts:
            if view is not None:
                view.step = context.step
        return [context if view is None else view for view in made.contexts]

    def sampled(self, context: Context) -> Context:
        """What the chains of the first β see."""
        return self._sampled(context, context.step)[0]

    def rate_factor(self, state: States) -> Tensor | None:
        """The least of those of all β."""
        return least([self.source.rate_factor(own) for own in state])

    def start(self, context: Context) -> States:
        """One state of the source for each β."""
        return tuple(self.source.start(seen) for seen in self._sampled(context, context.step))

    def negatives(self, context: Context, state: States, batch: Tensor) -> tuple[Any, States, Metrics]:
        """Samples of (1 − β)E, `Negatives` for each β."""
        seen = self._sampled(context, context.step)
        made = [self.source.negatives(c, own, batch) for c, own in zip(seen, state, strict=True)]
        drawn = tuple(negatives for negatives, _, _ in made)
        return drawn, tuple(own for _, own, _ in made), mean_metrics([metrics for _, _, metrics in made])

    def drawn(self, negatives: Any) -> tuple[Negatives, ...]:
        """One set for each β."""
        return tuple(part for own in negatives for part in self.source.drawn(own))

    def loss(
        self, context: Context, state: States, player: str, batch: Tensor, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """Algorithm 1, averaged over β."""
        drawn: Sequence[Negatives] = negatives
        x = drawn[0].x if len(drawn) == 1 else torch.cat([n.x for n in drawn])
        E_data, E_model = precise(context.energy(batch)), precise(context.energy(x))
        parts = E_model.split([len(n.x) for n in drawn])
        losses, watched = [], []
        for (_, b), n, E in zip(self.powers(context.step), drawn, parts, strict=True):
            with torch.no_grad():
                weights = weigh(E_data, E, -b, n.log_weight, self.variant)  # βf = −βE
                watched.append(gap_metrics(E_data.mean(), n.mean(E)) | watch(weights))
            # without β bit for bit the source's
            losses.append(pull(weights, E_data, E) if b else E_data.mean() - n.mean(E))
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        if self.source.energy_l2:
            loss = loss + self.source.energy_l2 * (E_data.square().mean() + E_model.square().mean())
        return loss, mean_metrics(watched) | self._beta_metric(context.step, E_data)

    def _beta_metric(self, step: int, like: Tensor) -> Metrics:
        if len(self.betas) == 1 and self.beta_start is None:  # the settings say it
            return {}
        betas = self.beta_at(step)
        return {"beta": like.new_full((), sum(betas) / len(betas)).detach()}

    def advance(self, context: Context, state: States) -> tuple[States, Metrics]:
        """The source follows (1 − β)E at the β of the next update, so that weighted walkers cross with it."""
        seen = self._sampled(context, context.step + 1)
        made = [self.source.advance(c, own) for c, own in zip(seen, state, strict=True)]
        metrics = mean_metrics([m for _, m in made])
        if not all(p.plain for p in self.powers(context.step + 1)):  # of aE, which nobody asked for
            metrics = without_log_z(metrics)
        return tuple(own for own, _ in made), metrics

    def evaluations(self, context: Context, batch: int) -> int | None:
        """The source's for each β; the data are evaluated once."""
        made = [self.source.evaluations(c, batch) for c in self._sampled(context, context.step)]
        return None if None in made else sum(m - batch for m in made if m is not None) + batch

    def current_walkers(self, context: Context, state: States) -> Walkers | None:
        """The source's, of exp(−aE/T), weighed by exp(−bE/T) on top, so that they stand for what is learned.

        Of several β the one nearest to 0, whose weights change the least.
        """
        powers = self.powers(context.step)
        k = min(range(len(powers)), key=lambda i: abs(powers[i].weighting))
        a, b = powers[k]
        walkers = self.source.current_walkers(tempered(context, a), state[k])
        if walkers is None or b == 0:
            return walkers
        E = in_parts(context.energy, walkers.x, PART).to(walkers.log_weight)
        log_weight = walkers.log_weight - b * E
        info = walkers.info | {"ess_fraction": float(ess_fraction(log_weight))}
        return replace(walkers, log_weight=log_weight, info=info)

    def log_partition(self, context: Context, state: States) -> LogPartition | None:
        """None, unless some of the chains follow E itself, and that is what is learned."""
        pairs = zip(self.powers(context.step), state, strict=True)
        own = next((s for p, s in pairs if p.plain), None)
        return None if own is None else self.source.log_partition(context, own)

    def save(self, state: States) -> dict[str, Any]:
        """The source's, for each β."""
        return save_each([self.source] * len(state), state)

    def load(self, tree: dict[str, Any]) -> States:
        """From a checkpoint."""
        return load_each([self.source] * len(tree), tree)


UPSIDE_DOWN = (
    "chains would sample an inverted energy, under which data are the least likely of all, and which has no "
    "normaliser"
)


def _check_beta(beta: float, field: str) -> None:
    require(_finite(beta), field, "a finite number", beta)
    if beta > 1:
        raise ConfigError(field, f"must be at most 1, got {beta}: with 1 − β below 0 {UPSIDE_DOWN}")


def _finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _plain_numbers(value: Any) -> Any:
    """Numbers of numpy as Python's own, which a settings file can hold, and its lists as tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain_numbers(v) for v in value)
    return value.item() if isinstance(value, Real) and hasattr(value, "item") else value  # pyright: ignore


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
