"""A classifier and a density in one network: the joint energy-based model.

W. Grathwohl and others, *Your classifier is secretly an energy based model and you should treat it like one*, ICLR
2020, with the objective and the settings of Appendix M of *Energy-based model training objective robust to
inaccurate SGLD samples*, submission to ICLR 2025.

| symbol | here |
|---|---|
| h(x)[y] | `energy.logits(x)` |
| o | `energy.output_scale` |
| f(x) = o·log Σ_y e^{h(x)[y]} | −E(x) |
| 1/o in front of log p(x) | `generative` |
| β | `source.beta`; β·o is the metric `beta_o` (β* of Table 2) |
| α (SGLD) | h = α/2 of the source's kernel |
| x⁻, M | the source's negatives; `source.source.batch` |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from metastable.core.batch import Batch
from metastable.core.errors import InputError, require
from metastable.core.types import Energy, LogPartition, Proposal, Walkers

from .base import ChainMethod, Context, Metrics, Negatives, Objective
from .contrastive import PersistentCD
from .fdivergence import FDivergence
from .robust import Robust

ALPHA = 1e-4
"""SGLD's step size of scenario 1: drift α/2 = h on ∇E, noise √α."""


def replay() -> PersistentCD:
    """The chains of scenario 1: 64 of 10,000 for 20 steps, one in twenty afresh from uniform noise."""
    return PersistentCD(
        walkers=10_000,
        batch=64,
        steps=20,
        step_size=ALPHA / 2,
        start_at="noise",
        noise="uniform",
        rejuvenation=0.05,
    )


class Known:
    """E, with its values at one batch known already."""

    def __init__(self, energy: Energy, x: Tensor, value: Tensor):
        self.energy, self.x, self.value = energy, x, value

    def __call__(self, x: Tensor) -> Tensor:
        """E(x), `(B,)`; the batch itself is not evaluated again."""
        return self.value if x is self.x else self.energy(x)


@dataclass(frozen=True)
class JEM(Objective[Any]):
    """Maximises (1/o)·log p(x) + log p(y | x) of a joint energy: a density for x, cross-entropy for y.

    The gradient of log p(x) is that of `source`, any chain method (`PersistentCD`, `Jarzynski`, …) or a loss on top
    of one (`Robust`, `AdaptiveNCE`). The energy is a `JointEnergy`, or has its `logits`, `marginal`, `encode` and
    `output_scale`. Logits of the data are computed once, for both terms.

    Attributes:
        source: where the gradient of log p(x) comes from; by default the β objective on a replay buffer, scenario 1
            of the paper with β·o = 1. Chains sample E itself, at temperature 1: α = 10⁻⁴ is `step_size=5e-5`, which
            at o = 20,000 moves by the gradient of log Σ e^h and by noise of standard deviation 0.01.
        generative: what log p(x) is multiplied with; 1/o where it is left out, and 0 for a classifier
            alone, for which no chain moves.

    Metrics: the source's; `label_cross_entropy` and `accuracy` of the batch; `beta_o`, which is what counts when
    settings of different output scales are compared (Appendix M.2).

    Deviations: the paper's data come with Gaussian noise of standard deviation 0.03, which is the trainer's
    `data_noise`.

    >>> method = JEM(source=Robust(source=replay(), beta=2e-4))
    >>> round(method.beta_o(step=0, output_scale=20_000.0), 6)
    4.0
    """

    source: ChainMethod | Objective = field(default_factory=lambda: Robust(source=replay(), beta=5e-5))  # pyright: ignore
    generative: float | None = None

    name: ClassVar[str] = "jem"
    needs: ClassVar[str] = "labels"  # pyright: ignore
    classifies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        kind = type(self.source)
        ok = issubclass(kind, (ChainMethod, Objective)) and not issubclass(kind, (JEM, FDivergence))
        require(ok, "jem.source", "a method with chains, robust or adance", self.source)
        rule = "one whose chains have no labels: they sample p(x), of all classes together"
        require(not self.source.needs, "jem.source", rule, self.source)
        if self.generative is not None:
            require(
                0 <= self.generative < math.inf,
                "jem.generative",
                "a finite number of at least 0",
                self.generative,
            )

    def companions(self, energy: nn.Module, data: Batch, noise: Proposal, seed: int) -> dict[str, nn.Module]:
        """The source's."""
        return self.source.companions(energy, data.x, noise, seed)

    def rate(self, player: str) -> float:
        """The source's."""
        return self.source.rate(player)

    def turns(self, context: Context) -> Sequence[str | tuple[str, ...]]:
        """The source's."""
        return self.source.turns(context)

    def start(self, context: Context) -> Any:
        """The source's, once the energy has logits and every label a class."""
        check_joint(context.energy, context.given)
        return super().start(context)

    def negatives(self, context: Context, state: Any, batch: Batch) -> tuple[Any, Any, Metrics]:
        """The source's: they have no labels."""
        if self.generative == 0:
            return None, state, {}
        return self.source.negatives(context, state, batch.x)

    def drawn(self, negatives: Any) -> tuple[Negatives, ...]:
        """The source's; a classifier alone has none."""
        return () if negatives is None else self.source.drawn(negatives)

    def loss(
        self, context: Context, state: Any, player: str, batch: Batch, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """−(1/o)·log p(x) − log p(y | x), by (41)."""
        if player != "energy":
            return self.source.loss(context, state, player, batch.x, negatives)
        energy: Any = context.energy
        h, o = energy.logits(batch.x), energy.output_scale
        minus_log_p_y = cross_entropy(h, batch.conditions)
        watched = self._watch(context.step, o, h, batch.conditions, minus_log_p_y)
        if self.generative == 0:
            return minus_log_p_y, watched
        seen = context.seeing(Known(context.energy, batch.x, energy.marginal(h)))
        minus_log_p, metrics = self.source.loss(seen, state, player, batch.x, negatives)
        weight = 1 / o if self.generative is None else self.generative
        return weight * minus_log_p + minus_log_p_y, metrics | watched

    def rate_factor(self, state: Any) -> Tensor | None:
        """The source's; a classifier alone has no chains to wait for."""
        return None if self.generative == 0 else super().rate_factor(state)

    def advance(self, context: Context, state: Any) -> tuple[Any, Metrics]:
        """The source's."""
        return (state, {}) if self.generative == 0 else super().advance(context, state)

    def evaluations(self, context: Context, batch: int) -> int | None:
        """The source's; a classifier alone looks at its data only."""
        return batch if self.generative == 0 else super().evaluations(context, batch)

    def power(self, step: int) -> float:
        """The source's, of p(x): p(y | x) is softmax(h) at every temperature. 1 for a classifier alone."""
        return 1.0 if self.generative == 0 else super().power(step)

    def current_walkers(self, context: Context, state: Any) -> Walkers | None:
        """The source's; a classifier alone has none, as its chains never moved."""
        return None if self.generative == 0 else super().current_walkers(context, state)

    def log_partition(self, context: Context, state: Any) -> LogPartition | None:
        """The source's; none of a classifier alone."""
        return None if self.generative == 0 else super().log_partition(context, state)

    def _watch(self, step: int, output_scale: float, h: Tensor, labels: Tensor, entropy: Tensor) -> Metrics:
        h = h.detach()
        metrics = {"label_cross_entropy": entropy.detach(), "accuracy": accuracy(h, labels)}
        beta_o = self.beta_o(step, output_scale)
        return metrics if beta_o is None else metrics | {"beta_o": h.new_full((), beta_o)}

    def beta_o(self, step: int, output_scale: float) -> float | None:
        """β·o at update `step`, the mean where the source has several β: negatives are weighed by (Σ_y e^h)^βo."""
        if not isinstance(self.source, Robust):
            return None
        powers = self.source.powers(step)
        return sum(p.weighting for p in powers) / len(powers) * output_scale


def check_joint(energy: Any, labels: Any) -> None:
    """Refuse an energy that is no classifier, and a label that is none of its classes."""
    for need in ("logits", "marginal", "encode", "output_scale"):
        if not hasattr(energy, need):
            raise InputError(
                f"energy: {type(energy).__name__} has no {need!r}, which JEM needs; make a classifier one with "
                "ms.energies.JointEnergy(classifier), or name one of joint-mlp, joint-conv, joint-wrn"
            )
    energy.encode(labels)  # which names a label that is no class


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of rows whose largest logit is that of their label."""
    return (logits.argmax(-1) == labels).to(logits.dtype).mean()
