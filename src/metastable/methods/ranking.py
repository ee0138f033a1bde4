"""Ranking noise contrast: which of K + 1 points is the datum? No chain, and no partition function.

S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies: ranking noise contrastive estimation and
interpolating energy models*, TMLR 2024 (equation numbers of this file); N. Xu, MSc thesis, 2022, (2.14)–(2.16);
P. Florence and others, *Implicit behavioral cloning*, CoRL 2021.

| symbol | here |
|---|---|
| x | the context, `batch.given`, where events have one |
| y, **y** | a row of the batch, its K negatives |
| K | `negatives_per_datum` |
| p_ξ | `proposal` |
| 𝓔 | −E |
| q(k) | the share of point k in the softmax |
| T_samp, T_rnce | `proposal_steps`, `energy_steps` |
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from metastable.core.batch import Rows, as_batch
from metastable.core.errors import UnsupportedError, require, require_count
from metastable.core.protocols import Reparametrised, is_biased, provides
from metastable.core.types import Proposal
from metastable.proposals.given import log_prob_of

from .base import Context, Metrics, Nothing
from .draw_pool import Drawn, OnDensity, drawn_rows, empty_pool, keep_draws, kept_pool
from .ranked import Ranked as Ranked
from .ranked import learns, proposal_of
from .ranked import ranking_loss as ranking_loss
from .ranked import ranking_metrics as ranking_metrics


@dataclass(frozen=True)
class RankingNCE(Ranked):
    """R-NCE, Algorithm 1: points are ranked by log p_θ/p_ξ = −E − log p_ξ, up to the constant log Z.

    Maximises E log q₀ with q = softmax(−E − log p_ξ) over a datum and its K negatives, (3.3) and (3.7). Where the
    family of energies holds the truth, the optimum is the truth for **any** proposal and any K (Theorem 4.4);
    what the proposal decides is the variance. The logged `objective` is −log(K + 1) where energy and proposal
    agree, and goes to 0 where every datum is told from its negatives: then no gradient is left, and the proposal
    should be nearer to the data. The energy is learned up to a constant, or up to any function of the context.

    Attributes:
        adversarial: the proposal minimises the same objective that the energy maximises (Section 4.3.2) instead of
            its own loss, with gradients through its draws and through log p_ξ: `flow`, `interpolant` (which then
            differentiates through its ODE), or a module with parameters and `rsample`. The updates of `pretrain`
            are by its own loss all the same: there is no energy yet to play against.
        reuse: updates of the energy for each batch whose negatives are drawn. Draws and densities of a continuous
            flow cost hundreds of energies each; with 50 an update hardly costs more than the energy itself. Data,
            draws and densities of the last `pool` rows are kept, and an update takes rows of them at random. They
            are those of the proposal as it was, up to `reuse`·`pool`/batch updates ago: another proposal, for which
            the objective is as right.
        pool: rows that are kept where `reuse` is above 1.

    An energy that stands on its proposal (`energies.OnProposal`) is ranked by its network alone: it starts at
    chance, −log(K + 1), and no density is computed in training. With `reuse` the proposal must stay as it is, after
    `pretrain`.

    Deviations: where T_samp = T_rnce = 1 both steps are taken on the same batch, the energy's first: the sequence
    of steps is the paper's, shifted by half an update. Sums over the batch are means. `shared` is not in the paper.

    >>> RankingNCE(negatives_per_datum=0)
    Traceback (most recent call last):
    ...
    metastable.core.errors.ConfigError: ranking-nce.negatives_per_datum: must be an integer of at least 1, got 0
    """

    adversarial: bool = False
    reuse: int = 1
    pool: int = 4096

    name: ClassVar[str] = "ranking-nce"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("ranking-nce.reuse", self.reuse)
        require_count("ranking-nce.pool", self.pool)
        alone = self.reuse == 1 or not (self.adversarial or self.shared)
        require(
            alone,
            "ranking-nce.reuse",
            "1 with adversarial or shared: their draws are of one update",
            self.reuse,
        )
        rule = "False with train_proposal=False: an adversary that does not learn is none"
        require(self.train_proposal or not self.adversarial, "ranking-nce.adversarial", rule, True)

    def start(self, context: Context) -> Any:
        """As of all ranking; a density that is itself an estimate is no correction."""
        proposal = proposal_of(context)
        if is_biased(proposal):
            raise UnsupportedError(
                "ranking-nce.proposal: its log_prob is a biased estimate, which the ranking would take for the "
                "density; use one with a density of its own, such as 'flow', or AdversarialContrastive"
            )
        if self.adversarial:
            able = provides(proposal, Reparametrised) and learns(proposal)
            rule = "False for a proposal without parameters or without rsample; 'flow' and 'interpolant' have both"
            require(able, "ranking-nce.adversarial", rule, True)
        if provides(context.energy, OnDensity) and not self.adversarial:
            moves = self.reuse > 1 and self.train_proposal and learns(proposal)
            rule = (
                "1 for an energy on its proposal that goes on learning; set train_proposal=False and pretrain"
            )
            require(not moves, "ranking-nce.reuse", rule, self.reuse)
        super().start(context)
        K = self.negatives_per_datum
        if self.reuse == 1:
            return Nothing()
        return empty_pool(context, self.pool, K, self.ranked(context)[1])

    def phase(self, context: Context) -> Hashable:
        """As of all ranking; with a pool, whether the update draws, and each by itself until the pool is full."""
        if self.reuse == 1 or "energy" not in self.turns(context):
            return super().phase(context)
        k = self.energy_updates(context)
        if k < self.filling(context.batch):
            return context.step
        return super().phase(context), "draws" if k % self.reuse == 0 else "takes"

    def filling(self, batch: int) -> int:
        """Updates of the energy in which a pool is filled; all of them where nobody says how many rows one has."""
        return -(-self.pool // batch) if batch else 2**62

    def negatives(self, context: Context, state: Any, batch: Rows) -> tuple[Any, Any, Metrics]:
        """Draws for this batch, or for one in `reuse`, from all of which rows are then taken."""
        if self.reuse == 1 or "energy" not in self.turns(context):
            return super().negatives(context, state, batch)
        rows, k = as_batch(batch), self.energy_updates(context)
        if k < self.filling(len(rows)) or k % self.reuse == 0:
            drawn, _, _ = super().negatives(context, state, rows)
            weighs = self.ranked(context)[1]
            with torch.no_grad():
                log_prob = log_prob_of(proposal_of(context), rows) if weighs else None
            state = keep_draws(state, rows, drawn, log_prob)
        filled = min(self.pool, (k + 1) * len(rows))
        return drawn_rows(state, len(rows), filled, context.rng), state, {}

    def energy_updates(self, context: Context) -> int:
        """Updates of the energy before this one."""
        if not learns(proposal_of(context)):
            return context.step
        step, turns = context.step - self.pretrain, self.proposal_steps + self.energy_steps
        if not self.train_proposal or turns == 2:
            return step
        cycles, place = divmod(step, turns)
        return cycles * self.energy_steps + max(0, place - self.proposal_steps)

    def loss(
        self, context: Context, state: Any, player: str, batch: Rows, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """As of all ranking; on rows of the pool where those are ranked."""
        if player != "energy" or not isinstance(negatives, Drawn):
            return super().loss(context, state, player, batch, negatives)
        return self.ranking(self.ranked(context)[0], negatives.batch, negatives.negatives, negatives.log_prob)

    def load(self, tree: dict[str, Any]) -> Any:
        """The pool, where there is one."""
        return kept_pool(tree) if tree else Nothing()

    def scores(self, E: Tensor, log_prob: Tensor | None) -> Tensor:
        """−E − log p_ξ; −E where that has p_ξ in it."""
        return -E if log_prob is None else -E - log_prob

    def plays_against(self, step: int) -> bool:
        """An adversary does, but not before the energy has learned anything."""
        return self.adversarial and step >= self.pretrain


@dataclass(frozen=True)
class ImplicitBC(Ranked):
    """IBC, (4.3): points are ranked by −E alone, whatever the proposal.

    **Biased unless the proposal is uniform.** It learns the ratio p_data/p_ξ instead of p_data (Proposition 4.7):
    with data N(1, 1), negatives from N(0, 1) and an energy that can hold N(1, 1) exactly it finds N(1.95, 1) at
    K = 10 and N(2, 1) at K → ∞ (`metastable reproduce nce-bias`). The default is therefore a uniform box around
    the data. In many dimensions a box is a poor proposal; use `RankingNCE` there.
    """

    proposal: str | Mapping[str, Any] | Proposal = "uniform"

    name: ClassVar[str] = "ibc"
    weighs: ClassVar[bool] = False

    def scores(self, E: Tensor, log_prob: Tensor | None) -> Tensor:
        """−E."""
        return -E
