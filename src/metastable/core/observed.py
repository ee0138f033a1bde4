"""An energy of which part of each event was seen: those numbers are held, or pulled towards what was seen."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .protocols import carry


class Observed(nn.Module):
    """E(x) given what was seen of each row, as an energy of z with x = seen + scale·z where numbers move.

    Numbers that are held have a z of their own, standard normal and without effect, so that rows of which different
    numbers are held make one batch for every kernel. Rows belong to their places: row b of z is of row b of `seen`.

    Attributes:
        energy: E.
        seen: what was seen, `(B, *event)`; where a number is hidden, any finite value.
        hidden: which numbers were not seen, bool `(B, *event)`.
        scale: units of z, `(*event)`.
        variance: v of the likelihood that pulls a seen number, −log p(seen | x) = (x − seen)²/(2v); 0 holds it.
    """

    seen: Tensor
    hidden: Tensor
    scale: Tensor

    def __init__(self, energy: Any, seen: Tensor, hidden: Tensor, scale: Tensor, variance: float = 0.0):
        super().__init__()
        self.energy, self.variance = energy, variance
        self.register_buffer("seen", seen)
        self.register_buffer("hidden", hidden)
        self.register_buffer("scale", scale)
        carry(energy, self, ("event_shape",))

    def events(self, z: Tensor) -> Tensor:
        """x of z."""
        moves = self.scale * z
        return self.seen + (moves if self.variance else moves * self.hidden)

    def forward(self, z: Tensor) -> Tensor:
        """E(x), with the likelihood of what was seen or with the z that have no effect."""
        known = ~self.hidden
        aside = (self.scale * z).square() / self.variance if self.variance else z.square()
        return self.energy(self.events(z)) + 0.5 * (aside * known).flatten(1).sum(1).to(z.dtype)
