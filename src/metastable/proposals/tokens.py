"""Contexts and chunks as tokens, and what transformers and their like are made of.

S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies: ranking noise contrastive estimation and
interpolating energy models*, TMLR 2024, Appendices B.3 and B.4, Figures 6 to 9.

| paper | here |
|---|---|
| τ₋, past positions | `past`, tokens with a place in time |
| o, g: discs, a goal, the pose of a block | `tokens`, a set: their order does not matter |
| o as images | `pictures`, encoded by `PictureEncoder`, with a place in time |
| τ₊, the prediction | the event, `step` numbers a token, whose places follow those of the past |
| d_emb, N_b | `width`, `layers` |

Layers take any dimensions before those of the tokens, `(…, S, width)`, and are made of operations that can be
differentiated forwards and more than once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm, pad, scaled_dot_product_attention, silu

from metastable.core.errors import require, require_count

from .encoders import Borrowed, Encoder, Standardise, width_of
from .pictures import PictureEncoder

Group = tuple[int, int, int]
"""Where numbers of a context begin, how many tokens they make, and how many numbers a token has."""
GROUPS = 8
"""Groups of the prior's normalisation."""


def places(first: int, count: int, width: int) -> Tensor:
    """Sinusoidal embeddings of the places from `first` on, `(count, width)`.

    >>> places(0, 1, 4)
    tensor([[0., 1., 0., 1.]])
    """
    at = torch.arange(first, first + count)[:, None]
    angle = at * torch.exp(-math.log(1e4) * torch.arange(0, width, 2) / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width]


def lifted(numbers: int, width: int) -> nn.Sequential:
    """Two dense layers from the numbers of a token to its embedding."""
    return nn.Sequential(nn.Linear(numbers, width), nn.SiLU(), nn.Linear(width, width))


class Tokenizer(nn.Module):
    """From contexts `(B, *context)` to tokens of one width, flattened: `(B, S·width)`; the past comes first.

    Of its `count` tokens the first `past` have places in time, over at most `steps` steps. An energy and its
    proposal may share one, which the owner trains (`encoder_owner` of ranking methods).

    Args:
        context_shape: shape of one context.
        width: of a token.
        past: `(start, count, size)` each: numbers of the flattened context that are steps in time.
        tokens: the same of sets; with neither past nor pictures the whole context is one token by default.
        pictures: `(start, count, channels, height, width)`, images in time.
        inner: what contexts go through first, pictures aside: by default they are taken as they are.
    """

    place: Tensor
    picture_place: Tensor

    def __init__(
        self,
        context_shape: Sequence[int],
        width: int,
        past: Sequence[Sequence[int]] = (),
        tokens: Sequence[Sequence[int]] = (),
        pictures: Sequence[int] | None = None,
        inner: Encoder | None = None,
    ):
        super().__init__()
        self.inner, self.width = inner, width
        numbers = (
            math.prod(context_shape) if inner is None else width_of(inner, context_shape, torch.empty(0))
        )
        groups = [tuple(group) for group in (*past, *tokens)] or ([] if pictures else [(0, 1, numbers)])
        for group in groups:
            require(len(group) == 3 and min(group[1:]) > 0, "tokens", "start, count and size each", group)
            start, count, size = group
            require(0 <= start <= numbers - count * size, "tokens", f"within the {numbers} numbers", group)
        self.groups: list[Group] = groups  # pyright: ignore
        if isinstance(inner, Standardise):
            inner.share(groups)
        self.embed = nn.ModuleList(lifted(size, width) for _, _, size in self.groups)
        in_time = [places(0, count, width) for _, count, _ in self.groups[: len(past)]]
        place = torch.cat(in_time) if in_time else torch.zeros(0, width)
        self.register_buffer("place", place, persistent=False)
        self.past, self.steps = len(place), max((len(at) for at in in_time), default=0)
        self.count = sum(count for _, count, _ in self.groups)
        self.seen = None if pictures is None else tuple(pictures)
        if self.seen is not None:
            self._see(math.prod(context_shape))

    def _see(self, numbers: int) -> None:
        """Add what encodes pictures."""
        rule = f"start, count, channels, height and width within the {numbers} numbers of a context"
        ok = len(self.seen) == 5 and self.seen[0] + math.prod(self.seen[1:]) <= numbers  # pyright: ignore
        require(ok, "pictures", rule, self.seen)
        _, count, *shape = self.seen  # pyright: ignore
        self.eyes = PictureEncoder(shape)
        self.embed.append(lifted(self.eyes.features, self.width))
        self.register_buffer("picture_place", places(0, count, self.width), persistent=False)
        self.count, self.steps = self.count + count, max(self.steps, count)

    @property
    def layout(self) -> tuple[Any, ...]:
        """How contexts are cut, and into what: the same for tokenizers whose weights fit each other."""
        return self.groups, self.past, self.seen, self.width, type(self.inner)

    def refit(self, rows: Tensor) -> None:
        """Standardise by other contexts, where they are standardised first."""
        if isinstance(self.inner, Standardise):
            self.inner.refit(rows)

    def forward(self, given: Tensor) -> Tensor:
        """`(B, *context)` to `(B, S·width)`."""
        flat = given.flatten(1) if self.inner is None else self.inner(given)
        made = [
            embed(flat[:, start : start + count * size].unflatten(1, (count, size)))
            for (start, count, size), embed in zip(self.groups, self.embed, strict=False)
        ]
        if self.seen is not None:
            start, count, *shape = self.seen
            images = given.flatten(1)[:, start : start + count * math.prod(shape)].reshape(-1, *shape)
            features = self.eyes(images).unflatten(0, (len(given), count))
            made.append(self.embed[-1](features) + self.picture_place)
        tokens = torch.cat(made, 1)
        in_time = tokens[:, : self.past] + self.place
        return torch.cat([in_time, tokens[:, self.past :]], 1).flatten(1)


def tokenizer_of(encoder: Any) -> Tokenizer | None:
    """The tokenizer that an encoder is, its own or borrowed; None for any other."""
    whole = encoder.module if isinstance(encoder, Borrowed) else encoder
    return whole if isinstance(whole, Tokenizer) else None


def with_tokens(
    encoder: Encoder | None, context_shape: Sequence[int] | None, width: int, **layout: Any
) -> tuple[Encoder | None, Tokenizer | None]:
    """An encoder that makes tokens, and the tokenizer it is: a new one behind `encoder`, where that is none."""
    if context_shape is None:
        return None, None
    known = tokenizer_of(encoder)
    if known is None:
        encoder = known = Tokenizer(context_shape, width, inner=encoder, **layout)
    return encoder, known


class Attention(nn.Module):
    """Attention of `heads` heads, of tokens to each other or of queries to tokens, `(…, S, width)`."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        require_count("heads", heads)
        require(width % heads == 0, "width", f"a multiple of heads = {heads}", width)
        self.heads = heads
        self.ask, self.offer = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, queries: Tensor, tokens: Tensor) -> Tensor:
        """`(…, Q, width)`: what each query takes from the tokens."""
        q = self.ask(queries).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
        k, v = (x.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for x in self.offer(tokens).chunk(2, -1))
        return self.out(scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2))


class Block(nn.Module):
    """A transformer's block, normalised before each part: h ← h + attention(h), h ← h + dense(dense(h))."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, h: Tensor) -> Tensor:
        """`(…, S, width)`."""
        white = self.first(h)
        h = h + self.attention(white, white)
        return h + self.dense(self.second(h))


class Conv(nn.Module):
    """A convolution over three neighbouring tokens, zero beyond the ends, `(…, S, width)` to `(…, S, outputs)`."""

    def __init__(self, width: int, outputs: int):
        super().__init__()
        self.dense = nn.Linear(3 * width, outputs)

    def forward(self, h: Tensor) -> Tensor:
        """As one product: a token with its neighbours is a row."""
        wide = pad(h, (0, 0, 1, 1))
        return self.dense(torch.cat([wide[..., :-2, :], h, wide[..., 2:, :]], -1))


class ConvPrior(nn.Module):
    """(B.2): two rounds of convolution, group norm, silu, dense and silu over tokens, summed over time.

    `(N, S, width)` to `(N, outputs)`.
    """

    def __init__(self, width: int, outputs: int):
        super().__init__()
        require(width % GROUPS == 0, "width", f"a multiple of {GROUPS} for the convolutional prior", width)
        self.convs = nn.ModuleList(Conv(width, width) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(GROUPS, width) for _ in range(2))
        self.dense = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, outputs)])

    def forward(self, h: Tensor) -> Tensor:
        """Σ over time of the second round, (B.2b)."""
        for conv, norm, dense in zip(self.convs, self.norms, self.dense, strict=True):
            white = group_norm(conv(h).transpose(1, 2), GROUPS, norm.weight, norm.bias)  # pyright: ignore
            h = silu(dense(silu(white).transpose(1, 2)))
        return h.sum(1)

    def start_at_zero(self) -> None:
        """Zero for every input, since silu(0) = 0."""
        for parameter in self.dense[1].parameters():
            nn.init.zeros_(parameter)
