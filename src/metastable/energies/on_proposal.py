"""Energies that start as their proposal: E(y | x) = network(y | x) − log p_ξ(y | x), the network zero at first.

exp(−E) is p_ξ·exp(−network): what is learned is by how much data are likelier than draws of the proposal. Among
draws of p_ξ and a datum, ranking by −E − log p_ξ is ranking by −network alone: no density is needed to train.

What tells data from draws needs much of what drew them: a network may begin with the layers of the proposal's own
field where they fit (`inherits`), such as eyes that have learned to see, and its end still is zero.

With a time, E(y | x, t) = network(y | x, t) − log p_ξ^t(y | x) stands on a flow cut at t. No ODE is solved for its
gradient: that of log p_ξ^t follows from the flow's velocity (`InterpolantFlow.score`).
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

from torch import Tensor, nn

from metastable.core.errors import require
from metastable.core.protocols import StepwiseSolved, event_shape_of, has_time, provides
from metastable.proposals.given import log_prob_given

from .networks import zero_last_layer


class Sharing(Protocol):
    """A network that may begin with layers of a field."""

    def begin_as(self, field: Any) -> None:
        """Take them."""
        ...


class Fielded(Protocol):
    """A flow by a field of velocities."""

    field: nn.Module


class OnProposal(nn.Module):
    """network − log p_ξ, for events with contexts or without; the network alone until a method attaches p_ξ.

    The proposal is no part of it: the method trains and keeps that.

    Args:
        network: `(B, *event) → (B,)`, or with contexts as `ConditionalNet`.
        zero_start: set its last layer to zero, so that exp(−E) is the proposal.
        inherits: whether a training calls `begin_as` before its first update.
    """

    def __init__(self, network: nn.Module, zero_start: bool = True, inherits: bool = False):
        super().__init__()
        self.inherits = inherits
        self.network = network
        self.event_shape = event_shape_of(network)
        self.time, self.costly = has_time(network, False), False
        self.beneath: tuple[Any, ...] = ()  # in a tuple, so that weights are saved once, where they belong
        if zero_start:
            zero_last_layer(network)

    def attach(self, proposal: nn.Module) -> None:
        """Stand on this proposal."""
        self.beneath = (proposal,)
        self.costly = provides(proposal, StepwiseSolved)  # its density is an ODE solved

    def begin_as(self, proposal: Any) -> None:
        """Take what the network shares with the field of a proposal that has learned; the end stays zero."""
        rule = "false for a network that is no transformer, and beside a proposal without a field"
        ok = provides(self.network, Sharing) and provides(proposal, Fielded)
        require(ok, "energy.inherits", rule, self.inherits)
        self.network.begin_as(proposal.field)  # pyright: ignore

    def forward(self, x: Tensor, given: Tensor | None = None, t: Tensor | float | None = None) -> Tensor:
        """E: `(B, *event)` to `(B,)`, or `(B, K, *event)` to `(B, K)` with contexts; t as the network takes it."""
        if self.time:
            E = self.network(x, given, t)
            return E - self.beneath[0].log_prob(x, given, at=1.0 if t is None else t) if self.beneath else E
        E = self.network(x) if given is None else self.network(x, given)
        if not self.beneath:
            return E
        (proposal,) = self.beneath
        if given is None:
            return E - proposal.log_prob(x)
        if E.dim() == 1:
            return E - log_prob_given(proposal, x[:, None], given)[:, 0]
        return E - log_prob_given(proposal, x, given)

    def __deepcopy__(self, memo: dict[int, Any]) -> OnProposal:
        """A network of its own on the same proposal: an average of the energy stands where the energy does."""
        made = OnProposal(copy.deepcopy(self.network, memo), zero_start=False, inherits=self.inherits)
        made.train(self.training)
        if self.beneath:
            made.attach(self.beneath[0])
        return made
