"""The transformer energy of chunks given contexts, Figures 6 and 7 of the ranking paper; see `proposals.tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from metastable.core.batch import Rows
from metastable.core.errors import require, require_count
from metastable.core.random import seeded
from metastable.proposals.encoders import Standardise, require_contexts
from metastable.proposals.interpolants import log_time
from metastable.proposals.nearness import require_near
from metastable.proposals.tokens import Tokenizer, lifted, tokenizer_of
from metastable.proposals.transformer import TokenBody, TransformerField

from .conditional import ConditionalEnergy


class TransformerEnergy(ConditionalEnergy):
    """E(y | x) or E(y | x, t) by a transformer over tokens of context, time and event.

    Called, bound and encoded as `ConditionalNet`. Its `encoder` is a `Tokenizer`, which a proposal may share.

    Args:
        event_shape: shape of one event, or its dimension.
        context_shape: shape of one context, or its dimension; None for an energy without contexts.
        step: numbers of a token of the event, such as those of one action.
        width: d_emb.
        layers: N_b.
        heads: of each block.
        time: whether the energy has a time.
        past: how contexts are cut into tokens, see `Tokenizer`.
        tokens: likewise.
        pictures: likewise.
        reads: see `TokenBody`.
        prior: likewise.
        near: likewise.
        data: as of `ConditionalNet`.
        inflate: likewise.
        seed: of the initial weights; nothing global is touched.

    >>> import torch
    >>> energy = TransformerEnergy(8, 5, step=2, width=16, layers=1)
    >>> energy(torch.zeros(3, 4, 8), torch.zeros(3, 5)).shape
    torch.Size([3, 4])
    """

    def __init__(
        self,
        event_shape: int | Sequence[int],
        context_shape: int | Sequence[int] | None = None,
        step: int = 1,
        width: int = 64,
        layers: int = 3,
        heads: int = 4,
        time: bool = False,
        *,
        past: Sequence[Sequence[int]] = (),
        tokens: Sequence[Sequence[int]] = (),
        pictures: Sequence[int] | None = None,
        reads: str = "future",
        prior: bool = True,
        near: Sequence[int] | None = None,
        data: Rows | None = None,
        inflate: float | None = None,
        seed: int = 0,
    ):
        super().__init__()
        require_count("energy.width", width)
        rows = self._set_up(event_shape, context_shape, time, data, inflate)
        require_near(near, self.context_shape)
        self.encoder, before = None, (0, 0)
        with seeded(seed):
            if self.context_shape is not None:
                inner = Standardise(self.context_shape, None if rows is None else rows.given)
                self.encoder = Tokenizer(self.context_shape, width, past, tokens, pictures, inner)
                before = (self.encoder.past, self.encoder.steps)
            self.from_time = lifted(1, width) if time else None
            sizes = (len(self.mean), step, 1, width, layers, heads)
            self.body = TokenBody(*sizes, *before, reads, prior, near)
        self.to(self.mean)
        if self.body.near is not None:
            self.body.near.stand(self.mean, self.scale)

    def encode(self, given: Tensor) -> Tensor:
        """Tokens of the contexts, `(B, S·width)`, as `TokenBody` takes them."""
        require_contexts(given, self.context_shape, len(given), "this energy")
        assert self.encoder is not None
        return self.body.encoded(self.encoder, given)

    def clock(self, t: Tensor) -> Tensor:
        """The token of the time, `(…, width)`."""
        assert self.from_time is not None
        return self.from_time(log_time(t)[..., None])

    def _value(self, white: Tensor, code: Tensor | None, clock: Tensor | None) -> Tensor:
        return self.body(white, code, clock).squeeze(-1)

    def begin_as(self, field: Any) -> None:
        """Take tokens and blocks of a `TransformerField` of the same tokens, width and heads; the end is zero."""
        own = tokenizer_of(self.encoder)
        theirs = tokenizer_of(field.encoder) if isinstance(field, TransformerField) else None
        alike = own is not None and theirs is not None and own.layout == theirs.layout
        alike = alike and self.body.layout == field.body.layout
        rule = "false beside a proposal whose field is no transformer of the same tokens, width and heads"
        require(alike, "energy.inherits", rule, True)
        own.load_state_dict(theirs.state_dict())  # pyright: ignore
        self.body.embed.load_state_dict(field.body.embed.state_dict())
        for block, learned in zip(self.body.blocks, field.body.blocks, strict=False):
            block.load_state_dict(learned.state_dict())
        self.start_at_zero()

    def start_at_zero(self) -> None:
        """E = 0 everywhere, a Gaussian below it aside."""
        self.body.start_at_zero()
