"""Noise-contrastive estimation: learn a density by telling data from noise, log Z included. No chain.

M. Gutmann, A. Hyvärinen, *Noise-contrastive estimation: a new estimation principle for unnormalized statistical
models*, AISTATS 2010; equation numbers are those of
N. Xu, *Self-adapting noise-contrastive estimation for energy-based models*, MSc thesis, 2022, Chapter 2.

| symbol | here |
|---|---|
| p_n | `noise` |
| ν | 1 / `noise_ratio`: data per noise sample |
| ρ₀, ρ₁ | shares of noise and data, `noise_ratio` / (1 + `noise_ratio`) and 1 / (1 + `noise_ratio`) |
| π | the label: 1 for data, 0 for noise |
| log Z_θ | c, the parameter of the player `log_partition` |
| G | logit of the label: log p_θ − log p_n + log ν; log g of Chapter 4 |
| Ψ, S₀, S₁ (Chapter 4) | `psi`, `Bregman.S0`, `Bregman.S1` |
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from metastable.core.batch import Batch
from metastable.core.errors import (
    InputError,
    require_choice,
    require_count,
    require_moderate,
    require_positive,
)
from metastable.core.protocols import JointlyScored, provides
from metastable.core.types import Proposal
from metastable.core.weights import ess_fraction, log_mean_exp, weighted_mean
from metastable.proposals import Flow, proposal_for, require_support
from metastable.proposals.choose import NAMED

from .base import Context, Metrics, Negatives, Nothing, gap_metrics
from .bregman import BREGMANS, Bregman, as_bregman
from .importance import ImportanceSampled

START_DRAWS = 4096
"""Noise samples behind the first value of c."""
MOST_RATIO = 1e6
"""Noise samples for each row of the batch, at most."""


def nce_loss(G_data: Tensor, G_noise: Tensor, noise_ratio: float) -> Tensor:
    """The objective (2.13) of binary NCE, divided by ρ₁: nats for each datum.

    With log p(π=1|x) = −softplus(−G) and log p(π=0|x) = −softplus(G), (2.11), and ρ₀/ρ₁ = `noise_ratio`. It is
    (1 + k)·log(1 + k) − k·log k where noise and data cannot be told apart (2 log 2 at k = 1) and 0 where nothing
    is easier. As k → ∞ its gradient becomes that of maximum likelihood, E_data[∇E] − E_θ[∇E].

    Args:
        G_data: logits at data, `(B,)`.
        G_noise: logits at noise, `(N,)`; N need not be `noise_ratio`·B, since both sides are averaged.
        noise_ratio: k = 1/ν.

    >>> nce_loss(torch.zeros(3), torch.zeros(3), 1.0)
    tensor(1.3863)
    """
    return softplus(-G_data).mean() + noise_ratio * softplus(G_noise).mean()


class LearnedLogZ(nn.Module):
    """The scalar c that stands for log Z_θ, a parameter where it is learned; calling it gives c."""

    def __init__(self, learned: bool = True):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(()), requires_grad=learned)

    def forward(self) -> Tensor:
        return self.value


class Logits(NamedTuple):
    """Energies and logits of data and noise."""

    E_data: Tensor
    E_noise: Tensor
    G_data: Tensor
    G_noise: Tensor


@dataclass(frozen=True)
class NCE(ImportanceSampled):
    """Binary NCE: minimises (2.13) over the energy and c ≈ log Z together, in one backward pass.

    The gradient in the energy is a weighted contrast, on both sides: with k = `noise_ratio`,

        E_data[w⁺ ∇E] − k·E_n[w⁻ ∇E],   w⁺ = p(noise|x),  w⁻ = p(data|x).

    What is told apart already has no weight. Where the family holds the truth the optimum is the truth for any
    noise that is positive where data are, and c is its log Z; what the noise decides is the variance.

    Attributes:
        noise: p_n: `gaussian` or `uniform`, fitted to the data, `flow`, or any module with `sample`, `log_prob`
            and `event_shape`. A run works on a frozen copy of it, `run.players["noise"]`.
        noise_ratio: k, noise samples for each datum: the inverse of the thesis's ν.
        learn_log_z: whether c is learned. If not, c = 0: the energy itself must become normalised.
        log_z_rate: what the learning rate is multiplied with for c.
        pretrain: steps of maximum likelihood that fit a noise called `flow` before training. An object is used
            as it is.
        walkers: noise samples behind samples and log Z after training.
        psi: Ψ of Bregman ratio matching, (4.8): `nce` is the logistic loss above, `kl` and `squared` are others,
            and so is any strictly convex function on (0, ∞) in torch operations, or a `Bregman`. With g = e^G the
            loss is k·E_n[S₀(g)] − E_data[S₁(g)], and the weights above are S₁′(g)g and S₀′(g)g.

    Deviations: c starts at an importance-sampling estimate of log Z. Sums over labels are replaced by means over
    each label, the second form of (2.13).

    >>> NCE(noise_ratio=0)
    Traceback (most recent call last):
    ...
    metastable.core.errors.ConfigError: nce.noise_ratio: must be a finite number above 0, got 0
    """

    noise: str | Proposal = "gaussian"
    noise_ratio: float = 1.0
    learn_log_z: bool = True
    log_z_rate: float = 1.0
    pretrain: int = 200
    walkers: int = 16_384
    psi: str | Callable[[Tensor], Tensor] | Bregman = field(default="nce", kw_only=True)

    name: ClassVar[str] = "nce"
    sampler: ClassVar[str] = "noise"
    named: ClassVar[tuple[str, ...]] = NAMED

    def __post_init__(self) -> None:
        require_positive(f"{self.name}.noise_ratio", self.noise_ratio)
        require_moderate(f"{self.name}.noise_ratio", self.noise_ratio, MOST_RATIO)
        require_positive(f"{self.name}.log_z_rate", self.log_z_rate)
        require_count(f"{self.name}.pretrain", self.pretrain, 0)
        require_count(f"{self.name}.walkers", self.walkers)
        if isinstance(self.noise, str):
            require_choice(f"{self.name}.noise", self.noise, self.named)
        made = as_bregman(self.psi, f"{self.name}.psi")
        if not isinstance(self.psi, str):  # checked once; a method with a name alone can be pickled
            object.__setattr__(self, "_bregman", made)

    @property
    def bregman(self) -> Bregman:
        """Ψ as the two halves of its loss."""
        return BREGMANS[self.psi] if isinstance(self.psi, str) else self._bregman  # pyright: ignore

    @property
    def logistic(self) -> bool:
        """Whether the loss is NCE's own."""
        return self.bregman is BREGMANS["nce"]

    # ---- players

    def companions(self, energy: nn.Module, data: Tensor, noise: Proposal, seed: int) -> dict[str, nn.Module]:
        """The noise, and c."""
        return {"noise": self.noise_model(data, seed), "log_partition": LearnedLogZ(self.learn_log_z)}

    def noise_model(self, data: Tensor, seed: int) -> nn.Module:
        """A copy of p_n that nothing trains."""
        return self._named_noise(data, seed).requires_grad_(False)

    def _named_noise(self, data: Tensor, seed: int) -> nn.Module:
        return copy.deepcopy(proposal_for(self.noise, data, f"{self.name}.noise", seed))

    def rate(self, player: str) -> float:
        """`log_z_rate` for c."""
        return self.log_z_rate if player == "log_partition" else 1.0

    def turns(self, context: Context) -> tuple[str | tuple[str, ...], ...]:
        """The energy and c, together."""
        return (("energy", "log_partition"),)

    # ---- one update

    def start(self, context: Context) -> Nothing:
        """Fit a named flow, refuse noise that cannot have made the data, and begin c at an estimate of log Z."""
        noise: Any = context.players["noise"]
        for flow in self.unfitted(noise) if self.pretrain else ():
            # a flow by name learns as a whole, or not
            learns = any(p.requires_grad for p in flow.parameters())
            flow.requires_grad_(True).fit(context.data, self.pretrain, seed=context.rng).requires_grad_(
                learns
            )
        require_support(noise, Batch(context.data), f"{self.name}.noise")
        if self.learn_log_z:
            self._start_log_z(context)
        if self.bregman.psi is not None:
            with torch.no_grad():
                x, y = context.data[:START_DRAWS], self.draw(context, START_DRAWS)
                logits = self.logits(context, x, y.x, noise.log_prob(x), y.log_prob)  # pyright: ignore
            self.bregman.require_convex_at(torch.cat([logits.G_data, logits.G_noise]), f"{self.name}.psi")
        return Nothing()

    def unfitted(self, noise: Any) -> list[Flow]:
        """The flows that were given by name."""
        return [noise] if self.noise == "flow" else []

    @torch.no_grad()
    def _start_log_z(self, context: Context) -> None:
        x, _, log_prob, *_ = self.draw(context, START_DRAWS)
        estimate = log_mean_exp((-context.energy(x) - log_prob).double())  # pyright: ignore
        if not bool(torch.isfinite(estimate)):
            raise InputError(
                f"energy: log Z over {START_DRAWS} noise samples is {float(estimate)}; energies must be finite "
                "where the noise is"
            )
        context.players["log_partition"].value.copy_(estimate)  # pyright: ignore

    @torch.no_grad()
    def draw(self, context: Context, n: int) -> Negatives:
        """`n` noise samples with their log-density."""
        noise: Any = context.players["noise"]
        if provides(noise, JointlyScored):  # cheaper than one after the other
            x, log_prob = noise.sample_and_log_prob(n, context.rng)
            return Negatives(x, log_prob=log_prob)
        x = noise.sample(n, context.rng)
        return Negatives(x, log_prob=noise.log_prob(x))

    def count(self, batch: int) -> int:
        """Noise samples for a batch of this size."""
        return max(1, round(self.noise_ratio * batch))

    def negatives(
        self, context: Context, state: Nothing, batch: Tensor
    ) -> tuple[Negatives, Nothing, Metrics]:
        """Fresh noise."""
        return self.draw(context, self.count(len(batch))), state, {}

    def loss(
        self, context: Context, state: Nothing, player: str, batch: Tensor, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """(2.13) over ρ₁, or (4.8), for the energy and c."""
        noise: Any = context.players["noise"]
        with torch.no_grad():
            log_prob = noise.log_prob(batch)
        logits = self.logits(context, batch, negatives.x, log_prob, negatives.log_prob)
        if self.logistic:
            loss = nce_loss(logits.G_data, logits.G_noise, self.noise_ratio)
        else:
            loss = self.bregman.loss(logits.G_noise, logits.G_data, self.noise_ratio)
        return loss, self.metrics(context, loss, logits)

    def logits(
        self, context: Context, x: Tensor, y: Tensor, log_prob_x: Tensor, log_prob_y: Tensor
    ) -> Logits:
        """G = log p_θ − log p_n + log ν of data x and noise y, with log p_θ = −E − c; one pass for both."""
        E = context.energy(torch.cat([x, y]))
        c = context.players["log_partition"]()
        E_x, E_y = E.split([len(x), len(y)])
        shift = c + math.log(self.noise_ratio)
        return Logits(E_x, E_y, -E_x - log_prob_x - shift, -E_y - log_prob_y - shift)

    @torch.no_grad()
    def metrics(self, context: Context, loss: Tensor, logits: Logits) -> Metrics:
        """How well labels are told, what weight each side has, and c; negatives weigh as samples of the model."""
        E_data, E_noise, G_data, G_noise = logits
        rho_1 = 1 / (1 + self.noise_ratio)
        weights = torch.sigmoid(G_noise), torch.sigmoid(-G_data)
        of_noise, of_data = weights if self.logistic else self.bregman.weights(G_noise, G_data)
        hits, misses = (G_data > 0).float().mean(), (G_noise > 0).float().mean()
        return {
            "objective": -rho_1 * loss.detach(),
            "accuracy": rho_1 * hits + (1 - rho_1) * (1 - misses),
            "positive_weight": of_data.mean(),
            "negative_weight": of_noise.mean(),
            "ess_negatives": ess_fraction(G_noise),
            "log_z": context.players["log_partition"]().detach().clone(),
            **gap_metrics(E_data.mean(), weighted_mean(E_noise, G_noise)),
        }

    def evaluations(self, context: Context, batch: int) -> int:
        """One energy for each datum and each noise sample."""
        return batch + self.count(batch)
