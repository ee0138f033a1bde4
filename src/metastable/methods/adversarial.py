"""Noise that learns to be hard: flow contrastive and adversarial contrastive estimation.

R. Gao, E. Nijkamp, D. P. Kingma, N. Xu, A. M. Dai, Y. N. Wu, *Flow contrastive estimation of energy-based models*,
CVPR 2020 (FCE); A. J. Bose, H. Ling, Y. Cao, *Adversarial contrastive estimation*, ACL 2018 (ACE). Equation
numbers are those of N. Xu, *Self-adapting noise-contrastive estimation for energy-based models*, MSc thesis, 2022,
Section 3.1.

| symbol | here |
|---|---|
| p_φ | the part of `noise` that learns: a flow, a generator, any proposal with `rsample` |
| p_n0, λ | `base`, `base_share` |
| J(θ, φ) | `nce_loss` times ρ₁, see `metastable.methods.nce` |
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from metastable.core.errors import require, require_choice, require_count, require_positive
from metastable.core.protocols import Reparametrised, provides
from metastable.core.types import Proposal
from metastable.proposals import Flow, Generator, Mixture, proposal_for
from metastable.proposals.choose import NAMED

from .base import Context, Metrics, Negatives, Nothing
from .nce import NCE, nce_loss

CHECKED_ROWS = 64
"""Data rows at which the error of an estimated density is looked at."""


@dataclass(frozen=True)
class FlowContrastive(NCE):
    """FCE: min over E and c, max over the flow, of the NCE objective, (3.4).

    In an update the energy and c take one step of NCE against the flow as it is; then the flow takes `noise_steps`
    steps up the same objective, with gradients through its draws and through log p_φ at draws and data.

    Attributes:
        noise: p_φ: `flow`, or any trainable proposal with `rsample`. A run trains a copy of it,
            `run.players["noise"]`.
        noise_steps: steps of the flow for each step of the energy, on fresh draws.
        noise_rate: what the learning rate is multiplied with for the flow.
        likelihood: adds `likelihood`·(−E_data log p_φ) to the flow's loss, which pulls it to the data whatever the
            energy says; off by default.

    Deviations: `likelihood` is in neither paper. `pretrain` fits a flow given by name to the data first, as Gao and
    others do; 0 begins with a flow near a Gaussian.
    """

    noise: str | Proposal = "flow"
    noise_steps: int = 1
    noise_rate: float = 1.0
    likelihood: float = 0.0

    name: ClassVar[str] = "flow-contrastive"
    named: ClassVar[tuple[str, ...]] = ("flow",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(f"{self.name}.noise_steps", self.noise_steps)
        require_positive(f"{self.name}.noise_rate", self.noise_rate)
        require(self.likelihood >= 0, f"{self.name}.likelihood", "at least 0", self.likelihood)
        require(
            self.logistic, f"{self.name}.psi", "nce: the noise learns against the logistic loss", self.psi
        )

    def noise_model(self, data: Tensor, seed: int) -> nn.Module:
        """A copy of p_φ."""
        return _require_trainable(self._named_noise(data, seed), f"{self.name}.noise")

    def rate(self, player: str) -> float:
        """`noise_rate` for the noise."""
        return self.noise_rate if player == "noise" else super().rate(player)

    def turns(self, context: Context) -> tuple[str | tuple[str, ...], ...]:
        """The energy with c, then the noise."""
        return (("energy", "log_partition"), *["noise"] * self.noise_steps)

    def loss(
        self, context: Context, state: Nothing, player: str, batch: Tensor, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """J/ρ₁ for the energy and c, −J/ρ₁ for the noise."""
        if player != "noise":
            return super().loss(context, state, player, batch, negatives)
        noise: Any = context.players["noise"]
        x = noise.rsample(self.count(len(batch)), context.rng)
        log_prob, log_prob_x = noise.log_prob(torch.cat([batch, x])).split([len(batch), len(x)])
        logits = self.logits(context, batch, x, log_prob, log_prob_x)
        loss = -nce_loss(logits.G_data, logits.G_noise, self.noise_ratio)  # max over φ of (3.4)
        nll = -log_prob.mean()
        return loss + self.likelihood * nll, {"noise_nll": nll.detach()}

    def evaluations(self, context: Context, batch: int) -> int:
        """One energy for each datum and each noise sample, in every turn."""
        return (1 + self.noise_steps) * super().evaluations(context, batch)


@dataclass(frozen=True)
class AdversarialContrastive(FlowContrastive):
    """ACE: the game of FCE with noise p_n = λ·p_n0 + (1 − λ)·p_φ, (3.3).

    The base keeps some noise everywhere, so that a p_φ that collapses onto a part of the data does not take all
    negatives with it. (3.3) prints 1 − h for the log-posterior of data; log(1 − eʰ) is meant.

    Attributes:
        noise: p_φ: `generator` (x = μ_φ(z) + σ_φ(z)ε), `flow`, or any trainable proposal with `rsample`. A
            generator's log-density is a **Monte-Carlo estimate that is biased low**, and so is the objective; the
            run logs by how much (`density_bias`) and its diagnosis says so.
        base: p_n0: `gaussian`, `uniform`, `flow` or a proposal; nothing trains it.
        base_share: λ.
    """

    noise: str | Proposal = "generator"
    base: str | Proposal = "gaussian"
    base_share: float = 0.5

    name: ClassVar[str] = "adversarial-contrastive"
    named: ClassVar[tuple[str, ...]] = ("flow", "generator")

    def __post_init__(self) -> None:
        super().__post_init__()
        share = self.base_share
        require(0 < share < 1, f"{self.name}.base_share", "above 0 and below 1", share)
        if isinstance(self.base, str):
            require_choice(f"{self.name}.base", self.base, NAMED)

    def noise_model(self, data: Tensor, seed: int) -> nn.Module:
        """The mixture of a frozen base and a copy of p_φ."""
        base = copy.deepcopy(proposal_for(self.base, data, f"{self.name}.base", seed)).requires_grad_(False)
        return Mixture([base, super().noise_model(data, seed)], (self.base_share, 1 - self.base_share))

    def _named_noise(self, data: Tensor, seed: int) -> nn.Module:
        if self.noise == "generator":
            return Generator(tuple(data.shape[1:]), data=data, seed=seed)
        return super()._named_noise(data, seed)

    def unfitted(self, noise: Any) -> list[Flow]:
        """The flows that were given by name, as base or beside it."""
        return [flow for flow, choice in zip(noise.components, (self.base, self.noise)) if choice == "flow"]

    def negatives(
        self, context: Context, state: Nothing, batch: Tensor
    ) -> tuple[Negatives, Nothing, Metrics]:
        """Fresh noise; where its density is an estimate, from latents drawn anew, and with the estimate's error."""
        noise: Any = context.players["noise"]
        metrics: Metrics = {}
        if noise.biased:
            noise.redraw(context.rng)
            metrics["density_bias"] = noise.density_error(batch[:CHECKED_ROWS]).mean()
            metrics["density_draws"] = batch.new_full((), noise.draws)
        negatives, state, more = super().negatives(context, state, batch)
        return negatives, state, metrics | more


def _require_trainable(noise: nn.Module, field: str) -> nn.Module:
    learns = any(p.requires_grad for p in noise.parameters()) and provides(noise, Reparametrised)
    require(learns, field, "a proposal with trainable parameters and rsample", type(noise).__name__)
    return noise
