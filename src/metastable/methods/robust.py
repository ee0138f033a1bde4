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
| w(x⁻) | `Weights.negatives` of `robust_loss`, which sum to 1 |
| ẇ(x⁺) | w̃(x⁺)/(w̃(x⁺) + Σ w̃(x⁻)); 1 − ẇ is in `Weights.data` |
| GradScale (30) | the metric `grad_scale` |
| α, u (SGLD) | h = α/2 of the source's kernel, and its noise |
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import ConfigError, require, require_choice, require_count, require_moderate
from metastable.core.types import Energy, LogPartition, Walkers
from metastable.core.weights import ess_fraction

from .base import (
    ChainMethod,
    Context,
    Metrics,
    Negatives,
    Objective,
    energies_at,
    energies_of_walkers,
    gap_metrics,
    weighed_apart,
    without_log_z,
)
from .beta_objective import VARIANTS, robust_loss, watch
from .contrastive import ExactDraws, ShortRun
from .mixed import Mixed, States, least, load_each, mean_metrics, save_each
from .tempered import tempered

PART = 1 << 18
"""Numbers that go through the energy at once when a whole buffer is weighed: 85 images of CIFAR-10."""


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
            object.__setattr__(self, name, _plain_numbers(vars(self)[name]))
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
            value = vars(self)[name]
            if value is None:
                continue
            require(_finite(value), f"robust.{name}", "a finite number", value)
            require_moderate(f"robust.{name}", value)
            require(len(self.betas) == 1, f"robust.{name}", "left out where beta has several values", value)
        if self.sampling is not None and self.sampling < 0:
            raise ConfigError("robust.sampling", f"must be at least 0, got {self.sampling}: {UPSIDE_DOWN}")
        if min(self.power(0), self.power(self.anneal)) <= 0:
            field = "beta" if self.weighting is None else "weighting"
            raise ConfigError(
                f"robust.{field}",
                f"must leave sampling + weighting above 0, got {vars(self)[field]}: what is learned is "
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
        a, b, T = self.sampling, self.weighting, self.source.temperature
        return tuple(
            Powers(1 - beta if a is None else a, (beta if b is None else b) / T)
            for beta in self.beta_at(step)
        )

    def phase(self, context: Context) -> Hashable:
        """The powers of this update and of the next, and the source's."""
        return self.powers(context.step), self.powers(context.step + 1), self.source.phase(context)

    def power(self, step: int) -> float:
        """(a + b)/T, which is the same for every β."""
        a, b = self.powers(step)[0]
        return a * self.source.power(step) + b

    def _sampled(self, context: Context, step: int) -> list[Context]:
        """What the chains of each β see; as long as β rests, the same ones."""
        powers, views = self.powers(step), context.views
        if not (isinstance(views, Views) and views.energy is context.energy and views.powers == powers):
            scaled = [tempered(context, p.sampling) for p in powers]
            views = Views(context.energy, powers, [None if c is context else c for c in scaled])
            context.views = views
        for view in views.contexts:
            if view is not None:
                view.step = context.step
        return [context if view is None else view for view in views.contexts]

    def sampled(self, context: Context) -> Context:
        """What the chains of the first β see."""
        return self._sampled(context, context.step)[0]

    def rate_factor(self, state: States) -> Tensor | None:
        """The least of those of all β."""
        return least([self.source.rate_factor(own) for own in state])

    def start(self, context: Context) -> States:
        """One state of the source for each β."""
        return tuple(self.source.start(seen) for seen in self._sampled(context, context.step))

    def negatives(self, context: Context, state: States, batch: Any) -> tuple[Any, States, Metrics]:
        """Samples of (1 − β)E, `Negatives` for each β."""
        each = zip(self._sampled(context, context.step), state, strict=True)
        drawn, states, metrics = zip(*(self.source.negatives(c, own, batch) for c, own in each), strict=True)
        return drawn, states, mean_metrics(metrics)

    def drawn(self, negatives: Any) -> tuple[Negatives, ...]:
        """One set for each β."""
        return tuple(part for own in negatives for part in self.source.drawn(own))

    def loss(
        self, context: Context, state: States, player: str, batch: Any, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """Algorithm 1, averaged over β."""
        drawn: Sequence[Negatives] = negatives
        E_data = energies_at(context.energy, batch)
        E_model = energies_at(context.energy, _together(drawn))
        parts = E_model.split([len(n.x) for n in drawn])
        losses, watched = [], []
        for (_, b), n, E in zip(self.powers(context.step), drawn, parts, strict=True):
            loss, weights = robust_loss(-E_data, -E, b, n.log_weight, self.variant, objective=False)  # f = −E
            losses.append(loss)
            with torch.no_grad():
                watched.append(gap_metrics(E_data.mean(), n.mean(E)) | watch(weights))
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        if self.source.energy_l2:
            loss = loss + self.source.energy_l2 * (E_data.square().mean() + E_model.square().mean())
        metrics = mean_metrics(watched)
        if len(self.betas) > 1 or self.beta_start is not None:  # else the settings say it
            betas = self.beta_at(context.step)
            metrics["beta"] = E_data.new_full((), sum(betas) / len(betas)).detach()
        return loss, metrics

    def advance(self, context: Context, state: States) -> tuple[States, Metrics]:
        """The source follows (1 − β)E at the β of the next update, so that weighted walkers go along with it."""
        each = zip(self._sampled(context, context.step + 1), state, strict=True)
        states, metrics = zip(*(self.source.advance(c, own) for c, own in each), strict=True)
        metrics = mean_metrics(metrics)
        if not all(p.plain for p in self.powers(context.step + 1)):  # of aE, which nobody asked for
            metrics = without_log_z(metrics)
        return states, metrics

    def evaluations(self, context: Context, batch: int) -> int | None:
        """The source's for each β; the data are evaluated once."""
        each = [self.source.evaluations(c, batch) for c in self._sampled(context, context.step)]
        return None if None in each else sum(n - batch for n in each if n is not None) + batch

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
        E = energies_of_walkers(context.energy, walkers, PART)
        log_weight = walkers.log_weight - b * E
        info = walkers.info | {"ess_fraction": float(ess_fraction(log_weight))}
        return replace(walkers, log_weight=log_weight, info=info)

    def log_partition(self, context: Context, state: States) -> LogPartition | None:
        """None, unless some of the chains follow E itself, and that is what is learned."""
        pairs = zip(self.powers(context.step), state, strict=True)
        own = next((s for p, s in pairs if p.plain), None)
        return None if own is None else self.source.log_partition(context, own)

    def why_not_shared(self) -> str:
        """Sources that are weighed across processes."""
        return super().why_not_shared() or weighed_apart(self)

    def gathered(self, state: States) -> States:
        """The source's, for each β."""
        return tuple(
            source.gathered(own) for source, own in zip([self.source] * len(state), state, strict=True)
        )

    def own_part(self, state: States) -> States:
        """The source's, for each β."""
        return tuple(
            source.own_part(own) for source, own in zip([self.source] * len(state), state, strict=True)
        )

    def save(self, state: States) -> dict[str, Any]:
        """The source's, for each β."""
        return save_each([self.source] * len(state), state)

    def load(self, tree: dict[str, Any]) -> States:
        """From a checkpoint."""
        return load_each([self.source] * len(tree), tree)


def _together(drawn: Sequence[Negatives]) -> Negatives:
    """Several sets of negatives as one, without their weights."""
    labels = [n.given for n in drawn if n.given is not None]
    x = drawn[0].x if len(drawn) == 1 else torch.cat([n.x for n in drawn])
    return Negatives(x, given=torch.cat(labels) if labels else None)


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
