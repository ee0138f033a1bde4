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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from metastable.core.errors import UnsupportedError, require
from metastable.core.protocols import Reparametrised, is_biased, provides
from metastable.core.types import Proposal

from .base import Context
from .ranked import Ranked as Ranked
from .ranked import learns, proposal_of
from .ranking_terms import ranking_loss as ranking_loss
from .ranking_terms import ranking_metrics as ranking_metrics


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

    name: ClassVar[str] = "ranking-nce"

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "1 with adversarial: its draws are of one update"
        require(self.reuse == 1 or not self.adversarial, "ranking-nce.reuse", rule, self.reuse)
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
        return super().start(context)

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
