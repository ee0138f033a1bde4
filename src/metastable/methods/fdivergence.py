"""f-EBM: minimise any f-divergence between data and model, and learn their density ratio on the way.

L. Yu, Y. Song, J. Song, S. Ermon, *Training deep energy-based models with f-divergence minimization*, ICML 2020.
For a model q(x) = e^{−E(x)}/Z the paper's variational form of the divergence is (14),

    D_f(p‖q) = max_H  E_p[f′(e^{H+E})] − E_q[f*(f′(e^{H+E}))],

attained at H = log(p·Z), where e^{H+E} = p/q (16). H climbs it and E descends, one step each (Algorithm 1).

| symbol | here |
|---|---|
| p, q_θ | data, model |
| E_θ | the energy, player `energy` |
| H_ω | `ratio`, player `ratio` |
| H + E = log p/q | the exponent; `Run.log_ratio` after training |
| f′(e^{H+E}) | `Divergence.slope` of the exponent |
| F = f*(f′(e^{H+E})) | `Divergence.conjugate` of the exponent |
| T_ω (Theorem 1) | f′(e^{R(x)}) with a network R of x alone |
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from metastable.core.batch import Batch, Rows, as_batch
from metastable.core.by_class import of_labels
from metastable.core.convex import require_convex_at
from metastable.core.errors import (
    InputError,
    require,
    require_choice,
    require_count,
    require_length,
    require_moderate,
    require_positive,
)
from metastable.core.random import uniform_rows
from metastable.core.types import Proposal, precise

from .base import (
    ChainMethod,
    Context,
    Metrics,
    Negatives,
    Objective,
    State,
    gap_metrics,
    together,
    weighed_apart,
)
from .contrastive import PersistentCD
from .divergences import HIGH, LOW, Divergence, divergence_of

ESTIMATORS = ("theorem3", "theorem1")
CHECKED = 4096
"""Data rows at whose first ratios a function f must be strictly convex."""
WeightedMean = Callable[[Tensor], Tensor]


def variational_bound(
    divergence: Divergence, x_data: Tensor, x_model: Tensor, model_mean: WeightedMean
) -> Tensor:
    """(14): E_p[f′(e^x)] − E_q[f*(f′(e^x))], at most D_f(p‖q), from exponents x = H + E at data and model."""
    return divergence.slope(x_data).mean() - model_mean(divergence.conjugate(x_model))


def theorem1(F: Tensor, E_model: Tensor, model_mean: WeightedMean) -> Tensor:
    """A surrogate with the gradient of Theorem 1, E_q[F∇E] − E_q[F]·E_q[∇E], with F = f*(T) fixed."""
    F = F.detach()
    return model_mean((F - model_mean(F)) * E_model)


def theorem3(
    divergence: Divergence, x_data: Tensor, x_model: Tensor, E_model: Tensor, model_mean: WeightedMean
) -> Tensor:
    """A surrogate whose gradient is that of Theorem 3, (18).

    ∇L = E_p[∇f′(e^{H+E})] + E_q[F∇E] − E_q[F]·E_q[∇E] − E_q[∇F],   F = f*(f′(e^{H+E})).

    The first and last terms are the gradient of the bound (14) with its samples fixed, the two in the middle come
    from the samples, which follow E.

    Args:
        divergence: f.
        x_data: exponents H + E at data `(B,)`, differentiable in E only.
        x_model: the same at the model's samples `(N,)`.
        E_model: energies of the model's samples `(N,)`.
        model_mean: their weighted mean.
    """
    moving_samples = theorem1(divergence.conjugate(x_model), E_model, model_mean)
    return variational_bound(divergence, x_data, x_model, model_mean) + moving_samples


class Scored(NamedTuple):
    """An update's data and negatives in one batch, with their energies, evaluated once for all players."""

    drawn: Negatives
    x: Tensor
    E: Tensor
    labels: Tensor | None = None

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """One value per row as those of data and those of negatives."""
        data = len(self.x) - len(self.drawn.x)
        return values[:data], values[data:]


def own_class(scored: Scored) -> Tensor:
    """Log-weights of negatives as each row sees them, `(B, N)`: those of its class, if any; else `(1, N)`."""
    drawn, labels = scored.drawn, scored.labels
    E = scored.split(scored.E)[1]
    log_weight = (torch.zeros_like(E) if drawn.log_weight is None else drawn.log_weight.to(E))[None]
    if labels is not None:
        same = labels[:, None] == scored.split(labels)[1]
        same = same | ~same.any(1, keepdim=True)  # a class without a negative: all of them
        log_weight = log_weight.masked_fill(~same, -torch.inf)
    return torch.log_softmax(log_weight, 1)


def own_mean(scored: Scored, E: Tensor) -> Tensor:
    """E_q[E] over the negatives of each row's class, `(B,)`, or of all, `(1,)`."""
    return (own_class(scored).exp() * scored.split(E)[1]).sum(1)


def normalised(scored: Scored, exponent: Tensor, E: Tensor, energy_moves: bool) -> tuple[Tensor, Tensor]:
    """Exponents less log E_q[e^{H+E}], and energies less E_q[E]; q are negatives of the row's class, if it has any.

    H + E becomes log p_H/q for the density p_H ∝ e^H, whatever constants H and E have: one for each class, since
    chains keep their labels. log E_q[e^{H+E}] = log ∫e^H − log Z, so that in E its gradient is E_q[∇E]. That is
    what it is given where E moves: differentiated at fixed samples it would be another. In H samples are fixed.
    """
    mean = own_mean(scored, E)
    log_mean = torch.logsumexp(scored.split(exponent)[1] + own_class(scored), 1)
    if energy_moves:
        log_mean = log_mean.detach() + mean - mean.detach()
    return exponent - log_mean, E - mean


class Opposite(nn.Module):
    """−E(x) of a module of its own, or −E(x, y) where rows have labels."""

    def __init__(self, energy: nn.Module):
        super().__init__()
        self.energy = energy

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return -of_labels(self.energy, labels)(x)


class LogRatio(nn.Module):
    """The exponent log p/q: H(x) + E(x), or R(x) alone for Theorem 1.

    Attributes:
        network: H or R, `(B, *event)` to `(B,)`; where rows have labels, a function of x and those.
        first: where R starts from zero, the energy that it is measured against, which is not trained.
        with_energy: whether the energy in training is added.
    """

    def __init__(self, network: nn.Module, with_energy: bool, first: nn.Module | None = None):
        super().__init__()
        self.network, self.with_energy, self.first = network, with_energy, first

    def forward(self, x: Tensor, E: Tensor, labels: Tensor | None = None) -> Tensor:
        """The exponent at `x`, whose energies are `E`, under `labels` where rows have those."""
        H = self.network(x) if labels is None else self.network(x, labels)
        if self.first is not None:
            H = H + of_labels(self.first, labels)(x)
        return precise(H + E if self.with_energy else H)


@dataclass(frozen=True)
class FDivergence(Objective[State]):
    """Algorithm 1, single-step f-EBM: negatives, a step of H up (14), a step of E down (18).

    Attributes:
        source: where the model's samples come from (line 5); persistent chains by default, with weights where
            the source gives them. With `labels=True` there, everything is of events and their labels, H too, and
            the divergence is that of p(x, y): of p(x | y), averaged over classes. Its `energy_l2` is added to the
            loss of E.
        f: a name (`kl`, `reverse-kl`, `js`, `hellinger`, `pearson`, `neyman`, `alpha`), any strictly convex
            function of a tensor with f(1) = 0, or a `Divergence`.
        alpha: of the α-divergence, with `f="alpha"`.
        ratio: the network H, `(B, *event)` to `(B,)`, of labels `(B,)` too where there are any; a copy of it is
            trained. By default minus a copy of the energy as it is at the start, so that the ratio e^{H+E} begins
            at exactly 1.
        ratio_steps: steps of H for one of E; the paper makes one.
        energy_rate: r, what the learning rate is multiplied with for E, while H has all of it. The constants of E
            and H have the same gradient with opposite signs: their sum, which belongs to log p/q, settles at the
            rate (1 − r)f″(1) near the optimum (Theorem 4), at r = 1 never, and then E drifts without end. 1 is the
            paper's, and will do for an energy without a free constant.
        estimator: `theorem3`, or the paper's baseline `theorem1`, in which the energy never sees the data: there
            T = f′(e^R) with a network R of x alone (`ratio`; by default the difference of two copies of the
            energy, one of them fixed, so that R begins at 0).
        clip_exponent: cut H + E at ± this value. Off by default: it hides an overflow, and beyond it no gradient
            flows, which can freeze training.
        normalise: put H + E − log E_q[e^{H+E}] in the place of H + E, with the update's negatives for q; with
            labels, those of the same class. The largest bound and its H are the same, up to a constant of H; but
            constants of H and E are no longer in it, and cannot run away. KL is contrastive divergence then,
            whatever H is. `Run.log_ratio` is log p/q up to a constant, or one for each class.
        exponent_l2: adds this times the mean squares of exponents at data and at negatives to the loss of H.
            It keeps H from telling data from chains beyond doubt, where no gradient is left for E, and makes
            ratios nearer to 1 than they are; at 1 every divergence is contrastive divergence. It also pulls
            back exponents that were cut. The paper's public code has such a penalty on H.

    The gradient's middle terms are a covariance over the N negatives of an update, low by a factor 1 − 1/N.
    Metrics: `divergence` is the bound (14) on the update's own samples; `exponent_min` and `exponent_max` are the
    extremes of H + E, which the guard names when training overflows.

    Deviations: `energy_rate`, which is not 1 by default, `ratio_steps` above one, `clip_exponent`, `normalise`,
    `exponent_l2` and weighted negatives are not in the paper's algorithm.

    >>> FDivergence(f="js").divergence.name, FDivergence(f="alpha", alpha=0.9).divergence.name
    ('js', 'alpha=0.9')
    """

    source: ChainMethod = field(default_factory=PersistentCD)
    f: str | Callable[[Tensor], Tensor] | Divergence = "kl"
    alpha: float | None = None
    ratio: nn.Module | None = None
    ratio_steps: int = 1
    energy_rate: float = 0.2
    estimator: str = "theorem3"
    clip_exponent: float | None = None
    normalise: bool = False
    exponent_l2: float = 0.0

    name: ClassVar[str] = "f-ebm"
    gap_vanishes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(isinstance(self.source, ChainMethod), "f-ebm.source", "a method with chains", self.source)
        require_choice("f-ebm.estimator", self.estimator, ESTIMATORS)
        require_count("f-ebm.ratio_steps", self.ratio_steps)
        require_positive("f-ebm.energy_rate", self.energy_rate)
        if self.clip_exponent is not None:
            require_length("f-ebm.clip_exponent", self.clip_exponent)
        require(self.exponent_l2 >= 0, "f-ebm.exponent_l2", "at least 0", self.exponent_l2)
        require_moderate("f-ebm.exponent_l2", self.exponent_l2)
        plain = self.estimator == "theorem3" or not self.normalise
        require(plain, "f-ebm.normalise", "false with estimator = 'theorem1', whose R has no E in it", True)
        _ = self.divergence

    @cached_property
    def divergence(self) -> Divergence:
        """f as training uses it."""
        return divergence_of(self.f, self.alpha)

    def companions(self, energy: nn.Module, data: Rows, noise: Proposal, seed: int) -> dict[str, nn.Module]:
        """The source's own, and H."""
        own = self.source.companions(energy, data, noise, seed)
        return own | {"ratio": self._log_ratio(energy, as_batch(data))}

    def _log_ratio(self, energy: nn.Module, data: Batch) -> LogRatio:
        with_energy = self.estimator == "theorem3"
        if self.ratio is not None:
            network = copy.deepcopy(self.ratio).to(data.x)
            _check_network(network, data)
            return LogRatio(network, with_energy)
        first = None if with_energy else copy.deepcopy(energy).requires_grad_(False)
        return LogRatio(Opposite(copy.deepcopy(energy)), with_energy, first)

    def start(self, context: Context) -> State:
        """The source's; a function f that is not strictly convex at the ratios that data have is refused."""
        if not isinstance(self.f, (str, Divergence)) and callable(self.f):
            rows = Batch(context.data, context.given)[:CHECKED]
            with torch.no_grad():
                E = of_labels(context.energy, rows.given)(rows.x)
                labels = () if rows.given is None else (rows.given,)
                exponent = self._clipped(context.players["ratio"](rows.x, E, *labels))
            require_convex_at(self.f, "f-ebm.f", exponent, (LOW, HIGH))
        return super().start(context)

    def rate(self, player: str) -> float:
        """E is slower by `energy_rate`."""
        return self.energy_rate if player == "energy" else 1.0

    def why_not_shared(self) -> str:
        """Sources that are weighed across processes: the gradient of E has products of their means."""
        return super().why_not_shared() or weighed_apart(self)

    def turns(self, context: Context) -> Sequence[str]:
        """Lines 7 and 9."""
        return ("ratio",) * self.ratio_steps + ("energy",)

    def negatives(self, context: Context, state: State, batch: Rows) -> tuple[Any, State, Metrics]:
        """Line 5; the energy, which stays as it is until its own turn, is evaluated here for both players."""
        drawn, state, metrics = super().negatives(context, state, batch)
        rows = together(as_batch(batch), drawn)
        E = of_labels(context.energy, rows.given)(rows.x)
        return Scored(drawn, rows.x, E, rows.given), state, metrics

    def drawn(self, negatives: Scored) -> tuple[Negatives, ...]:
        """Those that were scored."""
        return super().drawn(negatives.drawn)

    def loss(
        self, context: Context, state: State, player: str, batch: Rows, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """Minus the bound for H (line 6), Theorem 3's surrogate for E (line 8)."""
        scored: Scored = negatives
        E = scored.E if player == "energy" else scored.E.detach()
        labels = () if scored.labels is None else (scored.labels,)  # a ratio of one's own may take none
        exponent = context.players["ratio"](scored.x, E, *labels)
        # chains keep their labels, so that samples follow E within their class
        centred = E if scored.labels is None else E - own_mean(scored, E)
        if self.normalise:
            exponent, centred = normalised(scored, exponent, E, player == "energy")
        whole, exponent = exponent, self._clipped(exponent)
        x_data, x_model = scored.split(exponent)
        f, mean = self.divergence, scored.drawn.mean
        if player == "ratio":
            bound = variational_bound(f, x_data, x_model, mean)
            return self._held(bound, *scored.split(whole)), _ratio_metrics(bound, exponent)
        E_data, E_model = scored.split(E)
        metrics = gap_metrics(E_data.mean(), mean(E_model))
        if self.estimator == "theorem1":
            loss = theorem1(f.conjugate(x_model), scored.split(centred)[1], mean)
        else:
            loss = theorem3(f, x_data, x_model, scored.split(centred)[1], mean)
        if self.source.energy_l2:
            loss = loss + self.source.energy_l2 * (E_data.square().mean() + E_model.square().mean())
        return loss, metrics

    def _held(self, bound: Tensor, x_data: Tensor, x_model: Tensor) -> Tensor:
        """Minus the bound, with the penalty on exponents, which also pulls back what was cut."""
        if not self.exponent_l2:
            return -bound
        return self.exponent_l2 * (x_data.square().mean() + x_model.square().mean()) - bound

    def _clipped(self, exponent: Tensor) -> Tensor:
        c = self.clip_exponent
        return exponent if c is None else exponent.clamp(-c, c)


def _ratio_metrics(bound: Tensor, exponent: Tensor) -> Metrics:
    low, high = exponent.detach().aminmax()
    return {"divergence": bound.detach(), "exponent_min": low, "exponent_max": high}


def _check_network(network: nn.Module, data: Batch) -> None:
    some = data[:3]
    try:
        with torch.no_grad():
            shape = tuple(network(some.x, *(() if some.given is None else (some.given,))).shape)
    except RuntimeError as error:
        raise InputError(f"f-ebm.ratio: fails on rows of shape {data.event_shape}: {error}") from error
    if shape != (len(some),):
        raise InputError(f"f-ebm.ratio: must map (B, *event) to (B,), got {shape} for {len(some)} rows")


class Accepted(NamedTuple):
    """What rejection sampling kept.

    Attributes:
        x: the accepted rows.
        acceptance: their share.
        log_bound: log M, the largest ratio that can be honoured.
        beyond: share of proposals whose ratio lies above the bound, which are accepted with probability 1 and so
            come out too rarely.
    """

    x: Tensor
    acceptance: float
    log_bound: float
    beyond: float


def rejection_sample(
    x: Tensor, log_ratio: Tensor, rng: torch.Generator, *, log_bound: float | None = None
) -> Accepted:
    """Rows of `x` accepted with probability e^{log_ratio}/M: samples of p from samples of q, where e^r = p/q.

    Args:
        x: samples of q of equal weight, `(N, *event)`.
        log_ratio: log p/q at each, up to a constant, `(N,)`.
        rng: random numbers.
        log_bound: log M; by default the largest `log_ratio` among these rows. A smaller one accepts more and cuts
            the ratio off, a larger one is needed to treat several batches alike.

    >>> rng = torch.Generator().manual_seed(0)
    >>> x = torch.rand(10_000, 1, generator=rng)  # uniform; p(x) = 2x
    >>> kept = rejection_sample(x, x[:, 0].log(), rng)
    >>> round(kept.acceptance, 1), round(kept.x.mean().item(), 2)
    (0.5, 0.67)
    """
    if log_ratio.shape != x.shape[:1] or not bool(torch.isfinite(log_ratio).all()):
        raise InputError(
            f"log_ratio: must be {len(x)} finite numbers, one for each row, got shape {tuple(log_ratio.shape)}"
        )
    bound = float(log_ratio.max()) if log_bound is None else log_bound
    keep = uniform_rows(log_ratio, rng) < (log_ratio - bound).exp()
    beyond = float((log_ratio > bound).double().mean())
    return Accepted(x[keep], float(keep.double().mean()), bound, beyond)
