"""Ranking noise contrast: which of K + 1 points is the datum? No chain, and no partition function.

S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies: ranking noise contrastive estimation and
interpolating energy models*, TMLR 2024 (equation numbers of this file); N. Xu, MSc thesis, 2022, (2.14)–(2.16);
P. Florence and others, *Implicit behavioral cloning*, CoRL 2021.

| symbol | here |
|---|---|
| y, **y** | a row of the batch, its K negatives |
| K | `negatives_per_datum` |
| p_ξ | `proposal` |
| 𝓔 | −E |
| q(k) | the share of point k in the softmax |
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from metastable.core.errors import UnsupportedError, require_choice, require_count, require_positive
from metastable.core.types import Proposal
from metastable.core.weights import ess_fraction, weighted_mean
from metastable.proposals import proposal_for, require_support
from metastable.proposals.choose import NAMED

from .base import Context, Metrics, Negatives, Nothing, gap_metrics
from .importance import ImportanceSampled


def ranking_loss(positive: Tensor, negatives: Tensor) -> Tensor:
    """−log q of the datum among its K negatives, (3.7), one for each datum.

    −log softmax at the datum is log(1 + Σₖ exp(rₖ − r₀)), which stays exact when one point has all the weight.

    Args:
        positive: log-ratio r₀ of each datum, `(B,)`, up to a constant that all points share.
        negatives: log-ratios of the negatives, `(B, K)`, or `(1, K)` where all data share them.

    Returns:
        `(B,)`; log(K + 1) where nothing tells the points apart, and 0 where everything does.

    >>> ranking_loss(torch.zeros(1), torch.zeros(1, 3))  # log 4
    tensor([1.3863])
    """
    return -logsigmoid(positive - torch.logsumexp(negatives, 1))


@dataclass(frozen=True)
class Ranked(ImportanceSampled):
    """What ranking methods share; they differ in the score by which a point is ranked.

    An update of the energy follows, with r the scores and q = softmax(r) over a datum and its negatives,

        (1 − q₀) ∇E(x₀) − Σₖ qₖ ∇E(xₖ),

    averaged over the batch: a datum that is told from its negatives already has no weight.

    Attributes:
        negatives_per_datum: K.
        proposal: where negatives come from: `gaussian` or `uniform`, fitted to the data, `flow`, which learns
            beside the energy, or any module with `sample`, `log_prob` and `event_shape`. A run works on a copy of
            the module, `run.players["proposal"]`.
        shared: draw one set of K negatives for the whole batch of B, so that an update costs B + K energies
            instead of B·(K + 1). Then use a large K: the negatives' noise is the same for every datum.
        train_proposal: where the proposal has parameters, fit them to the data by maximum likelihood beside
            the energy. The two do not play against each other: the energy's loss leaves the proposal alone.
        proposal_rate: what the learning rate is multiplied with for the proposal.
        walkers: draws behind samples and log Z after training.
    """

    negatives_per_datum: int = 8
    proposal: str | Proposal = "gaussian"
    shared: bool = False
    train_proposal: bool = True
    proposal_rate: float = 1.0
    walkers: int = 8192

    def __post_init__(self) -> None:
        require_count(f"{self.name}.negatives_per_datum", self.negatives_per_datum)
        require_count(f"{self.name}.walkers", self.walkers)
        require_positive(f"{self.name}.proposal_rate", self.proposal_rate)
        if isinstance(self.proposal, str):
            require_choice(f"{self.name}.proposal", self.proposal, NAMED)

    def log_density(self, proposal: Any, x: Tensor) -> Tensor | None:
        """What is subtracted from −E before points are ranked, `(B,)`; None for nothing."""
        return None

    # ---- players

    def companions(self, energy: nn.Module, data: Tensor, noise: Proposal, seed: int) -> dict[str, nn.Module]:
        """The proposal; a module that was given is copied, so that the next run finds it as it was."""
        made = proposal_for(self.proposal, data, f"{self.name}.proposal", seed)
        return {"proposal": made if isinstance(self.proposal, str) else copy.deepcopy(made)}

    def rate(self, player: str) -> float:
        """`proposal_rate` for the proposal."""
        return self.proposal_rate if player == "proposal" else 1.0

    def turns(self, context: Context) -> tuple[str, ...]:
        """The energy, whose negatives were drawn from p_ξ as it is; then p_ξ, where it learns."""
        learns = any(p.requires_grad for p in context.players["proposal"].parameters())
        return ("energy", "proposal") if self.train_proposal and learns else ("energy",)

    # ---- one update

    def start(self, context: Context) -> Nothing:
        """Nothing is carried; data that the proposal cannot have made are refused."""
        require_support(_proposal(context), context.data, f"{self.name}.proposal")
        return Nothing()

    def negatives(
        self, context: Context, state: Nothing, batch: Tensor
    ) -> tuple[Negatives, Nothing, Metrics]:
        """Algorithm 1, line 11: K draws for each datum, row by row, or K for all of them."""
        proposal = _proposal(context)
        with torch.no_grad():
            x = proposal.sample(self._draws(len(batch)), context.rng)
            return Negatives(x, log_prob=self.log_density(proposal, x)), state, {}

    def _draws(self, batch: int) -> int:
        return self.negatives_per_datum * (1 if self.shared else batch)

    def loss(
        self, context: Context, state: Nothing, player: str, batch: Tensor, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """Lines 12 and 7: the ranking loss for the energy, −log p_ξ of the data for the proposal."""
        proposal = _proposal(context)
        if player == "proposal":
            nll = -proposal.log_prob(batch).mean()
            return nll, {"proposal_nll": nll.detach()}
        E_data, E_negatives = context.energy(torch.cat([batch, negatives.x])).split(
            [len(batch), len(negatives.x)]
        )
        with torch.no_grad():
            log_prob = self.log_density(proposal, batch)
        r_data, r_negatives = _scores(E_data, log_prob), _scores(E_negatives, negatives.log_prob)
        losses = ranking_loss(r_data, r_negatives.view(-1, self.negatives_per_datum))
        return losses.mean(), _metrics(losses, E_data, E_negatives, r_negatives)

    def evaluations(self, context: Context, batch: int) -> int:
        """One energy for each datum and each negative."""
        return batch + self._draws(batch)


@dataclass(frozen=True)
class RankingNCE(Ranked):
    """R-NCE, Algorithm 1: points are ranked by log p_θ/p_ξ = −E − log p_ξ, up to the constant log Z.

    Maximises E log q₀ with q = softmax(−E − log p_ξ) over a datum and its K negatives, (3.3) and (3.7). Where the
    family of energies holds the truth, the optimum is the truth for **any** proposal and any K (Theorem 4.4);
    what the proposal decides is the variance. The logged `objective` is −log(K + 1) where energy and proposal
    agree, and goes to 0 where every datum is told from its negatives: then no gradient is left, and the proposal
    should be nearer to the data. The energy is learned up to a constant.

    Deviations: one step of the proposal for each step of the energy, both on the same batch (T_samp = T_rnce = 1),
    the energy first: the sequence of steps is the paper's, shifted by half an update. Sums over the batch are
    means. `shared` is not in the paper.

    >>> RankingNCE(negatives_per_datum=0)
    Traceback (most recent call last):
    ...
    metastable.core.errors.ConfigError: ranking-nce.negatives_per_datum: must be an integer of at least 1, got 0
    """

    name: ClassVar[str] = "ranking-nce"

    def start(self, context: Context) -> Nothing:
        """As of all ranking; a density that is itself an estimate is no correction."""
        if getattr(_proposal(context), "biased", False):
            raise UnsupportedError(
                "ranking-nce.proposal: its log_prob is a biased estimate, which the ranking would take for the "
                "density; use one with a density of its own, such as 'flow', or AdversarialContrastive"
            )
        return super().start(context)

    def log_density(self, proposal: Any, x: Tensor) -> Tensor:
        """log p_ξ."""
        return proposal.log_prob(x)


@dataclass(frozen=True)
class ImplicitBC(Ranked):
    """IBC, (4.3): points are ranked by −E alone, whatever the proposal.

    **Biased unless the proposal is uniform.** It learns the ratio p_data/p_ξ instead of p_data (Proposition 4.7):
    with data N(1, 1), negatives from N(0, 1) and an energy that can hold N(1, 1) exactly it finds N(1.95, 1) at
    K = 10 and N(2, 1) at K → ∞ (`metastable reproduce nce-bias`). The default is therefore a uniform box around
    the data. In many dimensions a box is a poor proposal; use `RankingNCE` there.
    """

    proposal: str | Proposal = "uniform"

    name: ClassVar[str] = "ibc"


def _proposal(context: Context) -> Any:
    return context.players["proposal"]


def _scores(E: Tensor, log_prob: Tensor | None) -> Tensor:
    return -E if log_prob is None else -E - log_prob


def _metrics(losses: Tensor, E_data: Tensor, E_negatives: Tensor, r_negatives: Tensor) -> Metrics:
    """The objective, the mean weight 1 − q₀ of a datum, and the negatives as weighted samples of the model."""
    losses, r_negatives = losses.detach(), r_negatives.detach()
    model = weighted_mean(E_negatives.detach(), r_negatives)
    return {
        "objective": -losses.mean(),
        "positive_weight": -torch.expm1(-losses).mean(),
        "ess_negatives": ess_fraction(r_negatives),
        **gap_metrics(E_data.mean(), model),
    }
