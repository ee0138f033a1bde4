"""What ranking methods share: which of K + 1 points is the datum? No chain, and no partition function.

See `ranking` for the papers and their symbols.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from metastable.core.batch import Batch, Rows, as_batch
from metastable.core.errors import ConfigError, require, require_choice, require_count, require_positive
from metastable.core.processes import even_share
from metastable.core.protocols import Fitted, has_time, provides
from metastable.core.types import Proposal
from metastable.proposals import proposal_for, require_support
from metastable.proposals.choose import LEARNED, named_settings, require_density
from metastable.proposals.encoders import shared_encoder
from metastable.proposals.given import (
    is_conditional,
    log_prob_given,
    log_prob_of,
    sample_and_log_prob_given,
    sample_given,
)

from .base import Context, Metrics, Negatives, Nothing
from .draw_pool import (
    Drawn,
    DrawPool,
    Inheriting,
    OnDensity,
    Refills,
    as_kept,
    drawn_rows,
    empty_pool,
    keep_draws,
    kept_pool,
)
from .importance import ImportanceSampled
from .ranking_terms import energies, ranking_loss, ranking_metrics

OWNERS = ("energy", "proposal")


@dataclass(frozen=True)
class Ranked(ImportanceSampled):
    """What ranking methods share; they differ in the score by which a point is ranked.

    An update of the energy follows, with r the scores and q = softmax(r) over a datum and its negatives,

        (1 − q₀) ∇E(y₀) − Σₖ qₖ ∇E(yₖ),

    averaged over the batch: a datum that is told from its negatives already has no weight. Where events are given
    contexts, everything is given that of the datum: its negatives, their energies E(y | x) and their density.

    Attributes:
        negatives_per_datum: K.
        proposal: where negatives come from: `gaussian` or `uniform`, fitted to the data, `flow` or `interpolant`,
            which learn beside the energy, a table of such a name and its settings, or any module with `sample`,
            `log_prob` and `event_shape`. One without contexts serves all contexts alike. A run works on a copy of
            the module, `run.players["proposal"]`.
        shared: draw one set of K negatives for the whole batch of B, so that an update costs B + K energies
            instead of B·(K + 1). Then use a large K: the negatives' noise is the same for every datum. Not for
            events with contexts, whose energies differ.
        train_proposal: where the proposal has parameters, fit them to the data beside the energy, by its own `loss`
            where it has one (Remark 3.1), by maximum likelihood otherwise. The two do not play against each other:
            the energy's loss leaves the proposal alone.
        proposal_rate: what the learning rate is multiplied with for the proposal.
        walkers: draws behind samples and log Z after training.
        proposal_steps: T_samp, steps of the proposal in an outer iteration.
        energy_steps: T_rnce, steps of the energy that follow them. Where both numbers are 1, the two share an
            update and its batch; otherwise an update is a step of one of them, on a batch of its own.
        pretrain: updates in which the proposal learns alone, before the first one of the energy; with
            `train_proposal=False` it is left as it is after them.
        encoder_owner: `energy` or `proposal` for one encoder of contexts in both, the energy's `encoder`, which
            only the loss of its owner moves; empty for one in each, or none.
        energy_rows: rows of a batch that the energy learns from, where its negatives make it dearer than the
            proposal, which learns from all of them; None for all.
        reuse: updates of the energy for each batch whose negatives are drawn. Draws and densities of a continuous
            flow cost hundreds of energies each; with 50 an update hardly costs more than the energy itself. Data,
            draws and densities of the last `pool` rows are kept, and an update takes rows of them at random. They
            are those of the proposal as it was, up to `reuse`·`pool`/batch updates ago: another proposal, for which
            the objective is as right. But a row is seen about `reuse` times: a large network learns a small pool by
            heart, and then `objective_new`, of rows just drawn, stays behind the logged `objective`.
        pool: rows that are kept where `reuse` is above 1.
        draw_rows: rows of a batch that are drawn for at once, with `reuse` above 1; None for those of an update. A
            GPU solves an ODE for many rows in the time of few: so solves are as rare with a smaller `reuse`.
    """

    negatives_per_datum: int = 8
    proposal: str | Mapping[str, Any] | Proposal = "gaussian"
    shared: bool = False
    train_proposal: bool = True
    proposal_rate: float = 1.0
    walkers: int = 8192
    proposal_steps: int = 1
    energy_steps: int = 1
    pretrain: int = 0
    encoder_owner: str = ""
    energy_rows: int | None = None
    reuse: int = 1
    pool: int = 4096
    draw_rows: int | None = None

    needs: ClassVar[str] = "given?"
    timed: ClassVar[bool] = False
    weighs: ClassVar[bool] = True
    """Whether points are ranked with their density under the proposal."""

    def moving(self, batch: int, rows: int) -> int:
        """K for each datum."""
        return self.negatives_per_datum * self.rows_of(batch)

    def rows_of(self, batch: int) -> int:
        """How many of so many rows the energy learns from."""
        return batch if self.energy_rows is None else min(batch, self.energy_rows)

    def refills(self, batch: int) -> Refills:
        """When a pool is drawn for, with batches of so many rows."""
        learned = self.rows_of(batch)
        return Refills(self.pool, self.reuse, min(batch, self.draw_rows or learned), learned)

    def stored(self, batch: int, rows: int) -> int:
        """Nothing is carried."""
        return 0

    def __post_init__(self) -> None:
        for name in ("negatives_per_datum", "walkers", "proposal_steps", "energy_steps", "reuse", "pool"):
            require_count(f"{self.name}.{name}", vars(self)[name])
        for name in ("energy_rows", "draw_rows"):
            require_count(f"{self.name}.{name}", 1 if vars(self)[name] is None else vars(self)[name])
        require_count(f"{self.name}.pretrain", self.pretrain, 0)
        require_positive(f"{self.name}.proposal_rate", self.proposal_rate)
        if isinstance(self.proposal, (str, Mapping)):
            named_settings(self.proposal, f"{self.name}.proposal")
        rule = "left out with reuse=1, for which every update draws for its own rows"
        require(self.reuse > 1 or self.draw_rows is None, f"{self.name}.draw_rows", rule, self.draw_rows)
        if self.encoder_owner:
            require_choice(f"{self.name}.encoder_owner", self.encoder_owner, OWNERS)
        rule = "1 with shared: their draws are of one update"
        require(self.reuse == 1 or not self.shared, f"{self.name}.reuse", rule, self.reuse)

    def scores(self, E: Tensor, log_prob: Tensor | None) -> Tensor:
        """r, by which points are ranked, of the shape of `E`."""
        raise NotImplementedError

    # ---- players

    def companions(self, energy: nn.Module, data: Rows, noise: Proposal, seed: int) -> dict[str, nn.Module]:
        """The proposal; a module that was given is copied, so that the next run finds it as it was."""
        field, named, settings = f"{self.name}.encoder_owner", isinstance(self.proposal, (str, Mapping)), {}
        if self.encoder_owner:
            if not named or named_settings(self.proposal, field)[0] not in LEARNED:  # pyright: ignore
                raise ConfigError(
                    field, f"needs a proposal by name, {' or '.join(LEARNED)}, got {self.proposal!r}"
                )
            settings["encoder"] = shared_encoder(energy, self.encoder_owner, field)
        made = self.new_proposal(data, seed, **settings)
        proposal = made if named else copy.deepcopy(made)
        if provides(energy, OnDensity):
            energy.attach(proposal)  # pyright: ignore
        return {"proposal": proposal}

    def new_proposal(self, data: Rows, seed: int, **settings: Any) -> nn.Module:
        """The proposal that the settings name, or the module that was given."""
        return proposal_for(self.proposal, data, f"{self.name}.proposal", seed, **settings)

    def rate(self, player: str) -> float:
        """`proposal_rate` for the proposal."""
        return self.proposal_rate if player == "proposal" else 1.0

    def turns(self, context: Context) -> tuple[str, ...]:
        """Algorithm 1, lines 4–13: which of the two is stepped in this update.

        Where they share an update the energy goes first, since its negatives were drawn from p_ξ as it is.
        """
        return self.turns_at(context.step) if learns(proposal_of(context)) else ("energy",)

    def turns_at(self, step: int) -> tuple[str, ...]:
        """Those of update `step`, where the proposal can learn."""
        step -= self.pretrain
        if step < 0:
            return ("proposal",)
        if not self.train_proposal:
            return ("energy",)
        if self.proposal_steps == self.energy_steps == 1:
            return ("energy", "proposal")
        place = step % (self.proposal_steps + self.energy_steps)
        return ("proposal",) if place < self.proposal_steps else ("energy",)

    def phase(self, context: Context) -> Hashable:
        """Whether the proposal is an adversary, and whether a pool is drawn for, each by itself until full."""
        against = self.plays_against(context.step)
        if self.reuse == 1 or "energy" not in self.turns(context):
            return against
        k, refills = self.energy_updates(context), self.refills(context.batch)
        if k < refills.filling:
            return context.step
        return against, "draws" if refills.at(k) else "takes"

    def energy_updates(self, context: Context) -> int:
        """Updates of the energy before this one."""
        if not learns(proposal_of(context)):
            return context.step
        step, turns = context.step - self.pretrain, self.proposal_steps + self.energy_steps
        if not self.train_proposal or turns == 2:
            return step
        cycles, place = divmod(step, turns)
        return cycles * self.energy_steps + max(0, place - self.proposal_steps)

    def why_not_shared(self) -> str:
        """A pool of draws is filled in the order of updates, by one process."""
        return "" if self.reuse == 1 else f"{self.name} fills its pool of draws in one process; use reuse=1"

    def updates(self, context: Context, player: str, steps: int) -> int:
        """In how many of the first `steps` updates this player has a turn."""
        if not learns(proposal_of(context)):
            return steps
        return sum(player in self.turns_at(step) for step in range(steps))

    # ---- one update

    def start(self, context: Context) -> Any:
        """Nothing is carried but a pool; data that the proposal cannot have made are refused."""
        if self.shared and context.given is not None:
            raise ConfigError(
                f"{self.name}.shared", "events with contexts cannot share negatives; leave it out"
            )
        require_support(proposal_of(context), Batch(context.data, context.given), f"{self.name}.proposal")
        if provides(context.energy, Inheriting) and context.energy.inherits:  # pyright: ignore
            learned = not (self.train_proposal or self.pretrain)
            require(learned, "energy.inherits", "false beside a proposal that has yet to learn", True)
        if provides(context.energy, OnDensity) and not self.timed:
            rule = f"False for {self.name!r}, whose proposal is not cut at a time"
            require(not has_time(context.energy), "energy.time", rule, True)
        if provides(context.energy, OnDensity) and not self.plays_against(self.pretrain):
            moves = self.reuse > 1 and self.train_proposal and learns(proposal_of(context))
            rule = "1 for an energy on its proposal that learns on; set train_proposal=False and pretrain"
            require(not moves, f"{self.name}.reuse", rule, self.reuse)
        return Nothing() if self.reuse == 1 else self.new_pool(context)

    def load(self, tree: dict[str, Any]) -> Any:
        """The pool, where there is one."""
        return kept_pool(tree) if tree else Nothing()

    def negatives(self, context: Context, state: Any, batch: Rows) -> tuple[Any, Any, Metrics]:
        """Algorithm 1, line 11: draws for this batch, or for one in `reuse`, from all of which rows are taken."""
        if "energy" not in self.turns(context):
            return None, state, {}
        if self.reuse == 1:
            return self.points(context, self.seen(batch)), state, {}
        k, refills, said = self.energy_updates(context), self.refills(len(batch)), {}
        if refills.at(k):
            state = self.pooled(context, state, as_batch(batch)[: refills.drawn])
            new = self.taken(state.newest(min(refills.drawn, refills.learned, self.pool)))
            with torch.no_grad():  # what the energy says of rows that it has not learned from
                said = {"objective_new": self.loss(context, state, "energy", batch, new)[1]["objective"]}
        return self.taken(state.some(refills.learned, refills.filled(k), context.rng)), state, said

    @torch.no_grad()
    def points(self, context: Context, rows: Batch) -> Any:
        """K draws for each datum, row by row, or K for all of them."""
        drawn = self.draw(proposal_of(context), rows, context.rng, weighs=self.ranked(context)[1])
        require_density(drawn.log_prob, "negatives", f"{self.name}.proposal", context.step)
        return drawn

    def new_pool(self, context: Context) -> DrawPool:
        """An empty one."""
        return empty_pool(context, self.pool, self.negatives_per_datum, self.ranked(context)[1])

    @torch.no_grad()
    def pooled(self, context: Context, pool: DrawPool, rows: Batch) -> DrawPool:
        """The pool with these rows and their draws."""
        rows = as_kept(pool, rows)
        drawn = self.points(context, rows)
        log_prob = log_prob_of(proposal_of(context), rows) if self.ranked(context)[1] else None
        require_density(log_prob, "data rows", f"{self.name}.proposal", context.step)
        return keep_draws(pool, rows, drawn, log_prob)

    def taken(self, rows: DrawPool) -> Any:
        """What `loss` takes of rows of the pool."""
        return drawn_rows(rows)

    def seen(self, batch: Rows) -> Batch:
        """The rows of a batch that the energy learns from."""
        rows = as_batch(batch)
        if self.energy_rows is None:
            return rows
        return rows[: even_share(f"{self.name}.energy_rows", self.energy_rows)]

    def ranked(self, context: Context) -> tuple[Any, bool]:
        """What ranks points, and whether with their density, which an energy on its proposal has in it already."""
        if self.weighs and provides(context.energy, OnDensity):
            return context.energy.network, False  # pyright: ignore
        return context.energy, self.weighs

    def draw(
        self,
        proposal: Any,
        batch: Batch,
        rng: torch.Generator,
        gradients: bool = False,
        weighs: bool | None = None,
    ) -> Negatives:
        """Negatives of p_ξ as rows in order, with their log-density where points are ranked with it."""
        given, K, log_prob = batch.given, self.negatives_per_datum, None
        n = K if given is not None or self.shared else K * len(batch)
        if gradients:
            y = sample_given(proposal, n, rng, given, gradients=True)
            log_prob = log_prob_given(proposal, y, given)
        elif self.weighs if weighs is None else weighs:
            y, log_prob = sample_and_log_prob_given(proposal, n, rng, given)
        else:
            y = sample_given(proposal, n, rng, given)
        if given is None:
            return Negatives(y, log_prob=log_prob)
        return Negatives(y.flatten(0, 1), log_prob=None if log_prob is None else log_prob.flatten())

    def loss(
        self, context: Context, state: Nothing, player: str, batch: Rows, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """Algorithm 1: line 12 for the energy, line 7 for the proposal, or (4.9) where it is an adversary."""
        adversary = player == "proposal" and self.plays_against(context.step)
        if player == "proposal" and not adversary:
            return self.proposal_loss(context, batch)
        taken: Any = negatives
        if isinstance(taken, Drawn) and not adversary:  # rows of the pool
            return self.ranking(self.ranked(context)[0], taken.batch, taken.negatives, taken.log_prob)
        batch, p_ξ = self.seen(batch), proposal_of(context)
        if adversary:
            negatives = self.draw(p_ξ, batch, context.rng, gradients=True)
        energy, weighs = self.ranked(context)
        if adversary and not weighs:  # the energy has the density within it, for data and draws alike
            negatives = negatives._replace(log_prob=None)
        with torch.set_grad_enabled(adversary):
            log_prob = log_prob_of(p_ξ, batch) if weighs else None
        require_density(log_prob, "data rows", f"{self.name}.proposal", context.step)
        return self.ranking(energy, batch, negatives, log_prob, adversary)

    def ranking(
        self,
        energy: Any,
        batch: Batch,
        negatives: Negatives,
        log_prob: Tensor | None,
        adversary: bool = False,
    ) -> tuple[Tensor, Metrics]:
        """(3.7) of a batch, of which `log_prob` is the density, and its negatives; minus that for an adversary."""
        E_data, E_negatives = energies(energy, batch, negatives.x)
        r_data, r_negatives = self.scores(E_data, log_prob), self.scores(E_negatives, negatives.log_prob)
        losses = ranking_loss(r_data, r_negatives.view(-1, self.negatives_per_datum))  # (3.7)
        if adversary:
            return -losses.mean(), {"proposal_loss": -losses.detach().mean()}
        sets = 1 if batch.given is None else len(batch)  # one Z for all data, or one for each context
        metrics = ranking_metrics(losses, E_data, E_negatives.view(sets, -1), r_negatives.view(sets, -1))
        if log_prob is not None:
            metrics["proposal_nll"] = -log_prob.mean()
        return losses.mean(), metrics

    def plays_against(self, step: int) -> bool:
        """Whether the proposal minimises in update `step` what the energy maximises."""
        return False

    def proposal_loss(self, context: Context, batch: Rows) -> tuple[Tensor, Metrics]:
        """Line 7, or the proposal's own loss in its place (Remark 3.1)."""
        proposal, batch = proposal_of(context), as_batch(batch)
        if provides(proposal, Fitted):
            given = (batch.given,) if batch.given is not None and is_conditional(proposal) else ()
            loss = proposal.loss(batch.x, *given, rng=context.rng)
        else:
            loss = -log_prob_of(proposal, batch).mean()
        return loss, {"proposal_loss": loss.detach()}

    def evaluations(self, context: Context, batch: int) -> int:
        """One energy for each datum and each negative, where the energy has a turn, or its adversary."""
        rows = self.rows_of(batch)
        points = rows + self.negatives_per_datum * (1 if self.shared else rows)
        again = self.turns(context).count("proposal") if self.plays_against(context.step) else 0
        energy = self.turns(context).count("energy")
        if energy and self.reuse > 1:  # rows just drawn are judged, too
            again += self.refills(batch).at(self.energy_updates(context))
        return points * (energy + again)


def proposal_of(context: Context) -> Any:
    """p_ξ, whatever it can do."""
    return context.players["proposal"]


def learns(proposal: nn.Module) -> bool:
    """Whether it has parameters that training may move."""
    return any(p.requires_grad for p in proposal.parameters())
