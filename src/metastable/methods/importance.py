"""What a method with a normalised sampler knows after training: weighted draws of it, and log Z from them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from metastable.core.protocols import is_biased
from metastable.core.types import LogPartition, Walkers
from metastable.proposals import Uniform
from metastable.proposals.given import finely
from metastable.walkers.importance import importance_log_partition, importance_walkers

from .base import Context, Method, Nothing


@dataclass(frozen=True)
class ImportanceSampled(Method[Nothing]):
    """A method that carries nothing and whose negatives come from the density q of one of its players.

    Attributes:
        sampler: the player's name.
    """

    sampler: ClassVar[str] = "proposal"
    gap_vanishes: ClassVar[bool] = False
    mode_weights_advice: ClassVar[str] = (
        "Use more negatives for each datum or a proposal nearer to the data, or train longer."
    )

    def phase(self, context: Context) -> Hashable:
        """None: draws are the same in every update."""
        return None

    @property
    def draws(self) -> int:
        """Draws behind samples and log Z after training."""
        return self.walkers  # pyright: ignore

    def current_walkers(self, context: Context, state: Nothing) -> Walkers | None:
        """Draws of q with log-weights −E − log q; None where few carry the weight.

        None too for a box, beyond which the energy may have mass, where the density of q is an estimate, and for
        events with contexts, of which each has a log Z of its own.
        """
        q: Any = context.players[self.sampler]
        if context.given is not None or isinstance(q, Uniform) or is_biased(q):
            return None
        # the seed that the run's generator began with: the same after training and when the run is read back
        return importance_walkers(context.energy, finely(q), self.draws, context.rng.initial_seed())

    def log_partition(self, context: Context, state: Nothing) -> LogPartition | None:
        """log of the mean weight of those draws."""
        walkers = self.current_walkers(context, state)
        return None if walkers is None else importance_log_partition(walkers)

    def load(self, tree: dict[str, Any]) -> Nothing:
        """Nothing was saved."""
        return Nothing()
