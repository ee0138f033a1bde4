"""A density trained by its own loss: flows, diffusions and their like behind the same `fit` as energies.

S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies*, TMLR 2024, Section 7.1 calls them NF,
Diffusion and Diffusion-φ. They are the models that an energy must beat, or can be started from.

| paper | here |
|---|---|
| y, the event; x, the context | rows of the batch; what they are given |
| NF: the interpolant loss (5.3) | `InterpolantFlow.loss` |
| Diffusion, Diffusion-φ: the denoising loss | `Diffusion.loss`, `DiffusionEnergy.loss` |
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from metastable.core.batch import Rows, as_batch
from metastable.core.errors import UnsupportedError
from metastable.core.protocols import Fitted, LossCounted, is_normalised, provides
from metastable.core.types import LogPartition, Walkers

from .base import Context, Method, Metrics, Nothing


@dataclass(frozen=True)
class Density(Method[Nothing]):
    """Minimises the `loss(x, given, rng=…)` that a model brings: −log p, or a regression that has it as minimum.

    There are no negatives. `ms.fit(model, data, "density")` takes a proposal (`Flow`, `InterpolantFlow`,
    `Diffusion`) as it is: the run's energy is then −log p with log Z = 0. A `DiffusionEnergy` is an energy by
    itself, −r.

    >>> import torch, metastable as ms
    >>> x = torch.randn(500, 2, generator=torch.Generator().manual_seed(0)) + 3
    >>> model = ms.proposals.Flow(2, layers=1, hidden=(8,))
    >>> run = ms.fit(model, x, "density", steps=5, evaluate=False)
    >>> run.log_partition.value, run.log_partition.std_error
    (0.0, 0.0)
    """

    name: ClassVar[str] = "density"
    gap_vanishes: ClassVar[bool] = False
    needs: ClassVar[str] = "given?"

    def phase(self, context: Context) -> Hashable:
        """None: the loss is the same in every update."""
        return None

    def start(self, context: Context) -> Nothing:
        """Nothing to carry; the model must bring its loss."""
        if not provides(context.energy, Fitted):
            kind = type(context.energy).__name__
            raise UnsupportedError(
                "method: 'density' trains a model with loss(x, given, rng=…), such as a flow or a diffusion; "
                f"{kind} has none: give one of ms.proposals, a name (energy='diffusion'), or another method"
            )
        return Nothing()

    def loss(
        self, context: Context, state: Nothing, player: str, batch: Rows, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """The model's own."""
        model, rows = cast(Any, context.energy), as_batch(batch)
        beside = () if rows.given is None else (rows.given,)
        loss = model.loss(rows.x, *beside, rng=context.rng)
        return loss, {"density_loss": loss.detach()}

    def evaluations(self, context: Context, batch: int) -> int:
        """One row of the network for each datum, or as many as the model's loss looks at."""
        return batch * (context.energy.loss_rows if provides(context.energy, LossCounted) else 1)  # pyright: ignore

    def log_partition(self, context: Context, state: Nothing) -> LogPartition | None:
        """log Z = 0 of a normalised model; none of one that is known up to a constant."""
        return LogPartition(0.0, 0.0) if is_normalised(context.energy) else None

    def sample(self, players: Mapping[str, Any], n: int, rng: torch.Generator) -> Walkers:  # pyright: ignore
        """Draws of the model itself: no chain is needed."""
        with torch.no_grad():
            return Walkers.equal(players["energy"].sample(n, rng))

    def load(self, tree: dict[str, Any]) -> Nothing:
        """Nothing."""
        return Nothing()
