"""A density that samples and scores, in the place of an energy: E = −log p, with log Z = 0 known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.batch import Batch
from metastable.core.errors import InputError
from metastable.core.protocols import Fitted, context_shape_of, provides
from metastable.core.types import Proposal
from metastable.proposals.cnf import InterpolantFlow
from metastable.proposals.continuous import ContinuousFlow
from metastable.proposals.encoders import require_contexts
from metastable.proposals.given import sample_and_log_prob_given


class AsEnergy(nn.Module):
    """E(x | given) = −log p(x | given) of a proposal: a flow or a diffusion where an energy is asked for.

    So it goes through `fit` (`method="density"`), chains, evaluation and reports as any energy does, and is
    compared with energies on equal terms. `fit` wraps a proposal by itself.

    Attributes:
        proposal: the density, a module.
        normalised: log Z is 0 and known.

    >>> from metastable.proposals import Gaussian
    >>> energy = AsEnergy(Gaussian(torch.zeros(1)))
    >>> round(energy(torch.zeros(1, 1)).item(), 4), energy.log_partition()  # ½ log 2π
    (0.9189, tensor(0.))
    """

    normalised = True
    time = False

    def __init__(self, proposal: nn.Module):
        super().__init__()
        if not isinstance(proposal, nn.Module) or not isinstance(proposal, Proposal):
            kind = type(proposal).__name__
            raise InputError(f"proposal: must be a module with sample, log_prob and event_shape, got {kind}")
        self.proposal: Any = proposal
        self.event_shape = tuple(proposal.event_shape)
        self.context_shape = context_shape_of(proposal)

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        """−log p: `(B, *event)` to `(B,)`, or `(B, K, *event)` for B contexts to `(B, K)`."""
        return -self.log_prob(x, given)

    def check(self, rows: Batch) -> None:
        """Refuse events or contexts of other shapes, without a log-density, which may cost an ODE."""
        if rows.event_shape != self.event_shape:
            shape = rows.event_shape
            raise InputError(f"x: the density is one of events {self.event_shape}, the data are {shape}")
        require_contexts(rows.given, self.context_shape, len(rows), "the density")

    def log_prob(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        """The proposal's."""
        return self.proposal.log_prob(x, *_if_given(given))

    def sample(self, n: int, rng: torch.Generator, given: Tensor | None = None) -> Tensor:
        """The proposal's."""
        return self.proposal.sample(n, rng, *_if_given(given))

    def sample_and_log_prob(
        self, n: int, rng: torch.Generator, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The proposal's; of a flow both are from one solution of its ODE."""
        return sample_and_log_prob_given(self.proposal, n, rng, given)

    def loss(self, x: Tensor, given: Tensor | None = None, *, rng: torch.Generator) -> Tensor:
        """What the proposal is trained with: its own `loss`, or −log p averaged where it has none."""
        if provides(self.proposal, Fitted):
            return self.proposal.loss(x, *_if_given(given), rng=rng)
        return -self.log_prob(x, given).mean()

    @property
    def loss_rows(self) -> int:
        """Rows that go through the network for each row in `loss`: an interpolant may look at several times."""
        return self.proposal.times if isinstance(self.proposal, InterpolantFlow) else 1

    @property
    def costly(self) -> bool:
        """Whether one energy is an ODE solved."""
        return isinstance(self.proposal, ContinuousFlow)

    def log_partition(self) -> Tensor:
        """0, exactly."""
        return torch.zeros(())


def _if_given(given: Tensor | None) -> tuple[Tensor, ...]:
    """A proposal without contexts need not know the word."""
    return () if given is None else (given,)


def as_energy(model: Any) -> Any:
    """A proposal that cannot be called, wrapped; anything else as it is."""
    plain = isinstance(model, nn.Module) and type(model).forward is nn.Module.forward
    return AsEnergy(model) if plain and isinstance(model, Proposal) else model  # pyright: ignore
