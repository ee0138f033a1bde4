"""Self-adapting noise-contrastive estimation: an earlier copy of the model is the noise.

Nathaniel Xu, *Self-adapting noise-contrastive estimation for energy-based models*, MSc thesis, Tsinghua University,
2022. Algorithm 3.1 in the form of Section 4.3 (AdaBRM), of which Ψ = u log u − (1+u) log(1+u) is AdaNCE.

| symbol | here |
|---|---|
| p_m | `players["frozen"]`, exp(−P·E_frozen) up to its constant |
| 𝒦 | `interval` |
| Ψ, S₀, S₁ | `psi`, `Bregman.S0`, `Bregman.S1` |
| g | exp(`log_g`), log g = P·(E_frozen − E); P is 1 in the thesis, see `tempered` |
| ℛ | `source.rejuvenation` |
| K (Langevin steps) | `source.steps` |
| v | the metric `gradient_magnitude` |
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from metastable.core.errors import require, require_count
from metastable.core.types import LogPartition, Proposal, Walkers

from .base import (
    ChainMethod,
    Context,
    Metrics,
    Negatives,
    Objective,
    State,
    energies_at,
    energies_of_walkers,
    gap_metrics,
    without_log_z,
)
from .bregman import Bregman, as_bregman
from .contrastive import PersistentCD


def default_source() -> PersistentCD:
    """Chains from a buffer, of which a tenth begins afresh at each update (Section 3.2.1: 10 to 25 %)."""
    return PersistentCD(batch=512, steps=10, rejuvenation=0.1)


@dataclass(frozen=True)
class AdaptiveNCE(Objective[State]):
    """Algorithm 3.1: tell data from chains of a frozen copy of the model, and renew the copy every 𝒦 updates.

    With g = exp(P·(E_frozen − E)) the loss is E_frozen-chains[S₀(g)] − E_data[S₁(g)], (4.10), over P. Negatives
    pull with weight S₀′(g)g and data with S₁′(g)g; at 𝒦 = 1 both are S₀′(1) for every row, and the update is that
    of maximum likelihood times S₀′(1), whatever Ψ and P.

    P is 1/T where the source's chains have a temperature T: they follow exp(−E_frozen/T), the model is exp(−E/T),
    and g is the ratio of these two. Energies are subtracted in float32 at least, whatever they were computed in.

    Attributes:
        source: where the negatives come from; its chains run on the frozen copy. Weighted negatives (a
            `Jarzynski` source) are averaged with their weights.
        psi: `nce`, `kl`, `squared`, any strictly convex function Ψ on (0, ∞) in torch operations, or a `Bregman`.
        interval: 𝒦, updates between two renewals of the frozen copy.
        tempered: whether g knows the chains' temperature. False is the thesis's P = 1 also where its chains have
            less noise than samples of exp(−E) need; it makes no difference at T = 1, or at 𝒦 = 1.

    Metrics: `var_log_g` and `var_log_g_data`, the variance of log g over negatives and over data, which the
    thesis blames for what a long interval costs (Section 5.3); `log_g_max`, the largest |log g| of an update;
    `weight_negatives` and `weight_data`, the mean weights; `gradient_magnitude`, v of Section 3.2.2: the mean of
    ‖∇E_frozen‖ over x₀ … x_{K−1} of the chains, from the gradients that they make anyway (not with a `Jarzynski`
    source).

    Walkers are those of the model: the source's, which follow the copy, with weights g at the chains' own P,
    whatever `tempered`. Between two renewals such weights of cold chains leave few walkers.

    Deviations: `tempered`; the normaliser is not learned and log Z not given, since chains follow the frozen copy.
    """

    source: ChainMethod = field(default_factory=default_source)
    psi: str | Callable[[Tensor], Tensor] | Bregman = "nce"
    interval: int = 10
    tempered: bool = True

    name: ClassVar[str] = "adance"

    def __post_init__(self) -> None:
        require_count("adance.interval", self.interval)
        chains = isinstance(self.source, ChainMethod)
        require(chains, "adance.source", "a method with chains (pcd, short-run, jarzynski, …)", self.source)
        penalty = self.source.energy_l2
        require(penalty == 0, "adance.source.energy_l2", "0, as (4.10) has no such penalty", penalty)
        object.__setattr__(self, "_bregman", as_bregman(self.psi, "adance.psi"))

    @property
    def bregman(self) -> Bregman:
        """Ψ as the two halves of its loss."""
        return self._bregman  # pyright: ignore

    def companions(self, energy: nn.Module, data: Tensor, noise: Proposal, seed: int) -> dict[str, nn.Module]:
        """p_m ← Freeze(p_θ₀)."""
        return {"frozen": copy.deepcopy(energy).requires_grad_(False).eval()}

    def phase(self, context: Context) -> Hashable:
        """Whether the copy is renewed, P, and the source's."""
        return (context.step + 1) % self.interval == 0, self.power(context.step), self.source.phase(context)

    def sampled(self, context: Context) -> Context:
        """Line 3: chains see the frozen copy, and report v."""
        return replace(context.seeing(context.players["frozen"]), slopes=True)

    def loss(
        self, context: Context, state: State, player: str, batch: Any, negatives: Negatives
    ) -> tuple[Tensor, Metrics]:
        """Line 4, as (4.10)."""
        E_data, E_model = (energies_at(context.energy, rows) for rows in (batch, negatives))
        with torch.no_grad():
            frozen = context.players["frozen"]
            frozen_data, frozen_model = (energies_at(frozen, rows) for rows in (batch, negatives))
        P = self.power(context.step) if self.tempered else 1.0
        log_g_data, log_g_model = P * (frozen_data - E_data), P * (frozen_model - E_model)
        S0, S1 = self.bregman.S0, self.bregman.S1
        loss = (negatives.mean(S0(log_g_model)) - S1(log_g_data).mean()) / P
        metrics = gap_metrics(E_data.mean(), negatives.mean(E_model))
        return loss, metrics | self._watch(log_g_data.detach(), log_g_model.detach(), negatives)

    def _watch(self, log_g_data: Tensor, log_g_model: Tensor, negatives: Negatives) -> Metrics:
        of_negatives, of_data = self.bregman.weights(log_g_model, log_g_data)
        off_mean = log_g_model - negatives.mean(log_g_model)
        return {
            "var_log_g": negatives.mean(off_mean.square()),
            "var_log_g_data": (log_g_data - log_g_data.mean()).square().mean(),
            "log_g_max": torch.maximum(log_g_data.abs().max(), log_g_model.abs().max()),
            "weight_negatives": negatives.mean(of_negatives),
            "weight_data": of_data.mean(),
        }

    def advance(self, context: Context, state: State) -> tuple[State, Metrics]:
        """Lines 6 and 7; then the source follows the copy, so that weighted walkers cross with it.

        A log Z among the source's metrics is the copy's, and is not passed on.
        """
        if (context.step + 1) % self.interval == 0:
            renew(context.players["frozen"], context.players["energy"])
        state, metrics = super().advance(context, state)
        return state, without_log_z(metrics)

    def evaluations(self, context: Context, batch: int) -> int | None:
        """The source's, and the frozen energies of data and negatives."""
        made, negatives = super().evaluations(context, batch), self.source.negatives_count(context, batch)
        return None if made is None or negatives is None else made + negatives + batch

    def current_walkers(self, context: Context, state: State) -> Walkers | None:
        """The source's walkers of the frozen copy, with weights g = exp(P·(E_frozen − E)): walkers of E."""
        walkers = super().current_walkers(context, state)
        if walkers is None:
            return None
        frozen, energy = (
            energies_of_walkers(E, walkers) for E in (context.players["frozen"], context.energy)
        )
        log_g = self.power(context.step) * (frozen - energy)
        return replace(walkers, log_weight=walkers.log_weight + log_g.to(walkers.log_weight))

    def log_partition(self, context: Context, state: State) -> LogPartition | None:
        """None: the chains follow the frozen copy, not E."""
        return None


@torch.no_grad()
def renew(frozen: nn.Module, energy: nn.Module) -> None:
    """p_m ← Freeze(p_θ): parameters and buffers, in place, so that compiled chains go on."""
    kept = itertools.chain(frozen.parameters(), frozen.buffers())
    now = itertools.chain(energy.parameters(), energy.buffers())
    for old, new in zip(kept, now, strict=True):
        old.copy_(new)
