"""What stands between a context and a density that is given one: standardisation, and encoders that are shared.

Conditional proposals and energies take an `encoder`, any callable from contexts `(B, *context)` to vectors
`(B, c)`. A module becomes part of the density and learns with it. Two densities may share one: it is a part of the
one that trains it, and `Borrowed` by the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.errors import InputError, require
from metastable.core.pixels import Frames
from metastable.core.protocols import Encoded, provides

Encoder = Callable[[Tensor], Tensor]
"""From contexts `(B, *context)` to vectors `(B, c)`."""

SAME = 1e-5
"""Means that differ by less than this share of themselves are the same number, rounded."""


class Standardise(nn.Module):
    """Flattened contexts with the mean 0 and the standard deviation 1 of `rows` in each coordinate.

    A coordinate that never changes in `rows` has `scale` 0 and is 0 whatever it is later: what follows from it
    was never shown.

    Args:
        shape: of one context.
        rows: contexts, `(n, *context)`; their moments are kept in buffers. None only flattens.

    >>> Standardise((2,), torch.tensor([[400.0, 7.0], [800.0, 7.0]]))(torch.tensor([[600.0, 7.1]]))
    tensor([[0., 0.]])
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, shape: Sequence[int], rows: Tensor | None = None):
        super().__init__()
        self.shape, self.alike = tuple(shape), ()
        mean, scale = self._moments(rows)
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def refit(self, rows: Tensor) -> None:
        """Take the moments of other contexts, in place."""
        for buffer, value in zip((self.mean, self.scale), self._moments(rows), strict=True):
            buffer.copy_(value)
        self.share(self.alike)

    @torch.no_grad()
    def share(self, groups: Sequence[Sequence[int]]) -> None:
        """One mean and deviation for numbers that mean the same: `(start, count, size)`, `count` things of `size`.

        A network that takes things alike could not tell else how large each is: the first of things that are in
        order of their distance is near in all rows, and would be made as large as the last.
        """
        self.alike = tuple(groups)
        for start, count, size in groups:
            mean, scale = (x[start : start + count * size].view(count, size) for x in (self.mean, self.scale))
            m, s = mean.double(), scale.double()
            apart = m.amax(0) - m.amin(0) > SAME * m.abs().amax(0)  # by more than rounding
            spread = (s.square().mean(0) + m.var(0, unbiased=False) * apart).sqrt()
            mean.copy_(m.mean(0).expand_as(m))
            scale.copy_(spread.expand_as(s))

    def _moments(self, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        mean, scale = moments(self.shape, rows, "given")
        if rows is None:
            return mean, scale
        if isinstance(rows, Frames):
            return mean, scale.where(rows.varies(), 0.0)
        low, high = rows.detach().flatten(1).aminmax(dim=0)
        return mean, scale.where(high > low, 0.0)

    def forward(self, given: Tensor) -> Tensor:
        """`(B, *context)` to `(B, c)`."""
        still = self.scale == 0
        return ((given.flatten(1) - self.mean) / self.scale.where(~still, 1.0)).masked_fill(still, 0.0)


class Borrowed:
    """An encoder that another module owns: called without gradients, and neither registered, copied nor saved.

    So its parameters belong to one player of a training only, whose loss alone moves them, and a checkpoint holds
    them once.

    Attributes:
        module: the encoder.
    """

    def __init__(self, module: Encoder):
        self.module = module

    @torch.no_grad()
    def __call__(self, given: Tensor) -> Tensor:
        return self.module(given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Borrowed:
        # a copy of the borrower borrows from the same owner, unless that was copied with it
        return Borrowed(memo[id(self.module)]) if id(self.module) in memo else self


def shared_encoder(energy: Any, owner: str, field: str) -> Encoder:
    """The energy's encoder for a proposal beside it: a part of the one that owns it, borrowed by the other.

    Args:
        energy: with an `encoder`, a module or borrowed; it is left with its share of it.
        owner: `energy` or `proposal`.
        field: the setting's name, for the message.
    """
    encoder = energy.encoder if provides(energy, Encoded) else None
    whole: Any = encoder.module if isinstance(encoder, Borrowed) else encoder
    require(isinstance(whole, nn.Module), field, "for an energy with an `encoder`, a module", whole)
    del energy.encoder
    energy.encoder = whole if owner == "energy" else Borrowed(whole)
    return Borrowed(whole) if owner == "energy" else whole


def moments(shape: tuple[int, ...], rows: Tensor | None, field: str = "data") -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each coordinate of `rows`, flattened; 0 and 1 without rows.

    A coordinate that hardly varies is divided by a thousandth of the mean deviation instead of its own.
    """
    if rows is None:
        mean = torch.zeros(shape).flatten()
        return mean, torch.ones_like(mean)
    if tuple(rows.shape[1:]) != shape or len(rows) < 2:
        raise InputError(f"{field}: must have shape (n ≥ 2, {shape}), got {tuple(rows.shape)}")
    flat = rows.detach()
    mean, spread = (
        flat.moments() if isinstance(flat, Frames) else (flat.flatten(1).mean(0), flat.flatten(1).std(0))
    )
    return mean, spread.clamp(min=max(1e-3 * float(spread.mean()), 1e-6))


def width_of(encoder: Encoder, shape: Sequence[int], default: Tensor) -> int:
    """How long its vectors are, found by encoding a context of zeros, of the encoder's dtype and device.

    These are those of its first parameter or buffer, and of `default` where it has none.
    """
    whole = encoder.module if isinstance(encoder, Borrowed) else encoder
    tensors = [*whole.parameters(), *whole.buffers()] if isinstance(whole, nn.Module) else []
    like = next((t for t in tensors if t.is_floating_point()), default)
    with torch.no_grad():
        code = encoder(like.new_zeros(1, *shape))
    if code.dim() != 2 or len(code) != 1:
        raise InputError(
            f"encoder: must map contexts (B, *context) to vectors (B, c), got {tuple(code.shape)} for one context"
        )
    return code.shape[1]


def lead_of(x: Tensor, event_shape: tuple[int, ...]) -> torch.Size:
    """What comes before the shape of an event, `(B,)` or `(B, K)`, or an `InputError` where `x` has no events."""
    lead = x.shape[: x.dim() - len(event_shape)]
    if tuple(x.shape[len(lead) :]) != event_shape or not lead:
        raise InputError(f"x: events must have shape {event_shape}, got {tuple(x.shape)}")
    return lead


def require_contexts(given: Any, context_shape: tuple[int, ...] | None, rows: int, what: str) -> None:
    """One context of the right shape for each of `rows` rows of events, or none where there are no contexts."""
    if context_shape is None or given is None:
        if (given is None) != (context_shape is None):
            rule = "has no contexts, but some were given" if context_shape is None else "needs contexts"
            raise InputError(f"given: {what} {rule} (its context_shape is {context_shape})")
        return
    if tuple(given.shape[1:]) != context_shape:
        raise InputError(f"given: contexts must have shape {context_shape}, got {tuple(given.shape[1:])}")
    if len(given) != rows:
        raise InputError(
            f"given: must be one for each of the {rows} rows of events, got {len(given)} contexts"
        )


def learned_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model that `fit` moves: those that are not frozen, of which there must be some."""
    learned = [p for p in model.parameters() if p.requires_grad]
    if not learned:
        raise InputError(
            f"fit: every parameter of this {type(model).__name__} is frozen, so that nothing can be fitted; call "
            "requires_grad_(True) on what shall learn"
        )
    return learned
