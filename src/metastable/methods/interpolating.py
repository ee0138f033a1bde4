"""Interpolating energies: ranking noise contrast at every time between noise and data.

S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies: ranking noise contrastive estimation and
interpolating energy models*, TMLR 2024, Section 5 and Algorithm 3 (equation numbers of this file).

| symbol | here |
|---|---|
| x, y | a row's context, where it has one, and its event |
| m, t_ij ~ Λ | `times`, the law t = u^{1/α} with `alpha` |
| I_t(z, y) | the flow's `interpolate` |
| y_ij, **y**_ij | `Positioned.positives`, `(B, m, *event)`, and `Positioned.negatives`, `(B, m, K, *event)` |
| K | `negatives_per_datum` |
| p_ξ^t | `proposal`, a flow that can be cut at any t |
| 𝓔_θ(x, y, t) | −E(y given x, t) |
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from metastable.core.batch import Batch, Rows
from metastable.core.errors import (
    ConfigError,
    UnsupportedError,
    options_of,
    require,
    require_choice,
    require_count,
    require_options,
    require_positive,
)
from metastable.core.protocols import has_time, provides
from metastable.core.types import Proposal, Walkers
from metastable.proposals.choose import named_settings, require_density

from .base import Context, Metrics
from .conditional_sampling import sample_interpolating
from .draw_pool import DrawPool, OnDensity, as_kept, empty_pool, given_of, keep_rows
from .ranked import Ranked
from .ranking_terms import ranking_loss, ranking_metrics

NAMED = ("interpolant",)
ABILITIES = ("draw_times", "interpolate", "trajectories")
"""What a flow must have beside a density: `InterpolantFlow` is such a one."""
STOOD_ON = ("score", "noise_variance")
"""And what an energy on it needs when it is sampled; its `trajectories` take `scored=False`."""


class Positioned(NamedTuple):
    """Points of Algorithm 3, line 13, at m times for each datum.

    Attributes:
        t: `(B, m)`.
        positives: I_t(z, y), `(B, m, *event)`.
        negatives: K points of the flow's trajectories, `(B, m, K, *event)`.
        log_prob: log p_ξ^t of the positives, then of their negatives, `(B, m, 1 + K)`; None for an energy on its
            proposal, which has them in it.
        given: contexts, `(B, *context)`, where there are any.
    """

    t: Tensor
    positives: Tensor
    negatives: Tensor
    log_prob: Tensor | None
    given: Tensor | None


def _takes_three(energy: Any) -> bool:
    """Whether it can be called with an event, a context and a time."""
    try:
        called = energy.forward if isinstance(energy, nn.Module) else energy
        inspect.signature(called).bind(None, None, None)
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class InterpolatingNCE(Ranked):
    """I-R-NCE, Algorithm 3: one energy E(y | x, t) for all times, ranked at each against the flow cut there.

    At m times t ~ Λ of each datum y the point I_t(z, y) between noise and data is hidden among K points of the
    flow's trajectories at t, and told from them by

        log softmax(−E(·, t) − log p_ξ^t)    at I_t(z, y),                                                (5.4)

    averaged over the times. One set of K trajectories serves all m times of a datum (Remark 5.1). The flow learns
    beside the energy by its own regression (5.3), with m times for each datum as well. At t = 1 the energy is that
    of the data; the others lead there when it is sampled. The logged `objective` is −log(K + 1) where energy and
    flow are the same density at every t, and 0 is posterior collapse.

    Energies without contexts are learned as well; the times of an update are then shared by all of its data, and
    samples are weighted draws of the flow and chains on E(·, 1) from them, not Algorithm 4.

    Attributes:
        proposal: `interpolant`, a table of it and its settings, or a module with `draw_times`, `interpolate` and
            `trajectories` beside `sample` and `log_prob(x, given, at=t)`. By name it takes 48 steps, with
            a divergence at 17 of their times.
        times: m, of a datum in the energy's loss and, by name, in the flow's.
        alpha: α of the law of times of a flow by name.

    Deviations: those of `RankingNCE`. The paper's networks see −log(1.1 − t) in the place of t; here the default
    energy does, and the flow where its table says `log_time=True`. The paper's flow takes 150 steps with a
    divergence at 15 times; with steps that crowd near the data, 48 and 17 are as exact.

    >>> InterpolatingNCE(times=0)
    Traceback (most recent call last):
    ...
    metastable.core.errors.ConfigError: interpolating-nce.times: must be an integer of at least 1, got 0
    """

    proposal: str | Mapping[str, Any] | Proposal = "interpolant"
    times: int = 5
    alpha: float = 2.5

    name: ClassVar[str] = "interpolating-nce"
    timed: ClassVar[bool] = True
    flow_settings: ClassVar[dict[str, Any]] = {"steps": 48, "scored": 17}

    def moving(self, batch: int, rows: int) -> int:
        """K + 1 points at each time for each datum, one of which is the datum itself."""
        return (self.times * (1 + self.negatives_per_datum) - 1) * self.rows_of(batch)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.proposal, (str, Mapping)):
            field = f"{self.name}.proposal"
            require_choice(field, named_settings(self.proposal, field)[0], NAMED)
        require_count(f"{self.name}.times", self.times)
        require_positive(f"{self.name}.alpha", self.alpha)
        require(
            not self.shared, f"{self.name}.shared", "left out: every datum has trajectories of its own", True
        )

    def new_proposal(self, data: Rows, seed: int, **settings: Any) -> nn.Module:
        """A flow by name has the method's times and law of times."""
        own = {"times": self.times, "alpha": self.alpha, **self.flow_settings}
        return super().new_proposal(data, seed, **own, **settings)

    def start(self, context: Context) -> Any:
        """As of all ranking, for an energy that has a time and a flow that can be cut."""
        needed = (*ABILITIES, *STOOD_ON) if provides(context.energy, OnDensity) else ABILITIES
        missing = [name for name in needed if not hasattr(context.players["proposal"], name)]
        if missing:
            raise UnsupportedError(
                f"{self.name}.proposal: must be a flow that can be cut at any time, such as 'interpolant'; this "
                f"one has no {', no '.join(missing)}"
            )
        if not has_time(context.energy, _takes_three(context.energy)):
            raise UnsupportedError(
                f"energy: {self.name!r} needs one with a time, E(y | x, t); build it with time=True"
            )
        return super().start(context)

    # ---- one update

    @torch.no_grad()
    def points(self, context: Context, rows: Batch) -> Positioned:
        """Algorithm 3, line 13."""
        flow: Any = context.players["proposal"]
        y, x = rows.x, rows.given
        m, K, rng, weighs = self.times, self.negatives_per_datum, context.rng, self.ranked(context)[1]
        how, log_prob = {} if weighs else {"scored": False}, None
        if x is None:  # the times are shared, and draws `(m, B·K, …)` become `(B, m, K, …)`
            t = flow.draw_times((m,), rng)
            drawn = flow.trajectories(K * len(y), t, rng, **how)
            negatives, log_prob_negatives = (v.unflatten(1, (-1, K)).transpose(0, 1) for v in drawn)
            t = t.expand(len(y), m)
            positives = flow.interpolate(y, t, rng)
            if weighs:
                log_prob = flow.log_prob(positives.flatten(0, 1), at=t.flatten()).view(t.shape)
        else:
            t = flow.draw_times((len(y), m), rng)  # t_ij ~ Λ
            negatives, log_prob_negatives = flow.trajectories(K, t, rng, x, **how)  # Remark 5.1
            positives = flow.interpolate(y, t, rng)  # y_ij = I_t(z_ij, y_i)
            log_prob = flow.log_prob(positives, x, at=t) if weighs else None
        if log_prob is None:
            return Positioned(t, positives, negatives, None, x)
        field, step = f"{self.name}.proposal", context.step
        require_density(log_prob, "points between noise and data", field, step)
        require_density(log_prob_negatives, "negatives", field, step)
        both = torch.cat([log_prob[..., None], log_prob_negatives], -1)
        return Positioned(t, positives, negatives, both, x)

    def new_pool(self, context: Context) -> DrawPool:
        """One with times."""
        return empty_pool(context, self.pool, self.negatives_per_datum, self.ranked(context)[1], self.times)

    def pooled(self, context: Context, pool: DrawPool, rows: Batch) -> DrawPool:
        """The pool with these rows and their points: those of the flow as it is now, for which they are right."""
        rows = as_kept(pool, rows)
        t, positives, negatives, log_prob, _ = self.points(context, rows)
        y = torch.cat([positives[:, :, None], negatives], 2)
        densities = {} if log_prob is None else {"log_prob": log_prob.flatten(1)}
        return keep_rows(pool, rows, negatives=y.flatten(1, 2), t=t, **densities)

    def taken(self, rows: DrawPool) -> Positioned:
        """Points of rows of the pool."""
        y = rows.negatives.unflatten(1, (self.times, -1))
        log_prob = rows.log_prob.unflatten(1, (self.times, -1)) if rows.log_prob.shape[1] else None
        return Positioned(rows.t, y[:, :, 0], y[:, :, 1:], log_prob, given_of(rows))

    def loss(
        self, context: Context, state: Any, player: str, batch: Rows, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """Line 14 for the energy, lines 2, 3 and 9 for the flow."""
        if player == "proposal":
            return self.proposal_loss(context, batch)
        E = self._energies(self.ranked(context)[0], negatives)  # (B, m, 1 + K)
        r = self.scores(E, negatives.log_prob)
        losses = ranking_loss(r[..., 0].flatten(), r[..., 1:].flatten(0, 1))  # (5.4)
        metrics = ranking_metrics(losses, E[..., 0], E[..., 1:].flatten(0, 1), r[..., 1:].flatten(0, 1))
        if negatives.log_prob is not None:
            metrics["proposal_nll"] = -negatives.log_prob[..., 0].mean()
        return losses.mean(), metrics

    def scores(self, E: Tensor, log_prob: Tensor | None) -> Tensor:
        """−E − log p_ξ^t; −E where that has p_ξ^t in it."""
        return -E if log_prob is None else -E - log_prob

    def _energies(self, energy: Any, points: Positioned) -> Tensor:
        """E of the positives, then of their negatives, `(B, m, 1 + K)`, in one call: a context is encoded once."""
        y = torch.cat([points.positives[:, :, None], points.negatives], 2)
        t = points.t[..., None].expand(y.shape[:3])
        if points.given is None:
            return energy(y.flatten(0, 2), None, t.flatten()).view(t.shape)
        return energy(y.flatten(1, 2), points.given, t.flatten(1, 2)).view(t.shape)

    def evaluations(self, context: Context, batch: int) -> int:
        """One energy for each datum and each negative at each time, where the energy has a turn."""
        return self.times * super().evaluations(context, batch)

    def refuse_options(self, options: Iterable[str]) -> None:
        """Those of `sample_interpolating` alone."""
        if "steps" in options:
            raise ConfigError(
                "steps", "an interpolating energy is sampled with evaluations=… gradients, not steps"
            )
        require_options(options, options_of(sample_interpolating))

    def sample_given(
        self, players: Mapping[str, Any], n: int, given: Tensor, rng: torch.Generator, **options: Any
    ) -> Walkers:
        """Algorithm 4; `options` are those of `sample_interpolating`."""
        self.refuse_options(options)
        return sample_interpolating(players["energy"], players["proposal"], n, given, rng, **options)
