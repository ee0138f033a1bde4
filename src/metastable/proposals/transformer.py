"""Transformers as fields and potentials of chunks given contexts, and the cheaper field that their proposals are.

S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies: ranking noise contrastive estimation and
interpolating energy models*, TMLR 2024, Appendices B.3 and B.4, Figures 6 to 9. The energy of the same body is
`energies.TransformerEnergy`.

Deviations: the figures do not say how wide dense layers are (four times the tokens here, which gives the parameters
that the paper states) nor where blocks are normalised (before each part here). Sets have no places.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from metastable.core.errors import require, require_choice, require_count
from metastable.core.precision import last_sum
from metastable.core.random import seeded
from metastable.core.triton import interpreted
from metastable.core.types import in_events_alone, transforms_are_active

from .encoders import Encoder
from .fields import FOLDED, VectorField, Velocity
from .fused_body import fused_value, why_not
from .interpolants import log_time
from .nearness import Nearness, require_near
from .tokens import Attention, Block, Conv, ConvPrior, lifted, places, with_tokens

READS = ("future", "path")
Film = tuple[Tensor, Tensor]
"""γ and β of each query, `(…, n_q, width)`."""


def steps_of(dim: int, step: int) -> int:
    """How many tokens of `step` numbers an event of `dim` numbers is."""
    require_count("step", step)
    require(dim % step == 0, "step", f"a divisor of the {dim} numbers of an event", step)
    return dim // step


class TokenBody(nn.Module):
    """Figures 6 and 7: context, time and event as tokens, N_b blocks over all of them, and dense layers at the end.

    Args:
        dim: numbers of an event.
        step: numbers of a token of it.
        outputs: 1 for an energy, `dim` for a field.
        width: d_emb.
        layers: N_b.
        heads: of each block.
        past: tokens at the front of a context that are steps in time.
        after: how many steps they are, behind which the event's come.
        reads: what the end and the prior see: `future`, the event's tokens, or `path`, the past's too.
        prior: whether to add the convolutional prior (B.2).
        near: `(start, count, size)` of things among which the event's steps are places, see `Nearness`.
    """

    def __init__(
        self,
        dim: int,
        step: int,
        outputs: int,
        width: int,
        layers: int,
        heads: int,
        past: int = 0,
        after: int = 0,
        reads: str = "future",
        prior: bool = True,
        near: Sequence[int] | None = None,
    ):
        super().__init__()
        require_count("layers", layers)
        require_choice("reads", reads, READS)
        count = steps_of(dim, step)
        self.step, self.width, self.heads = step, width, heads
        self.past = past if reads == "path" else 0
        self.near = None if near is None else Nearness(dim, step, near)
        self.embed = lifted(step + (0 if self.near is None else self.near.features), width)
        self.register_buffer("place", places(after, count, width), persistent=False)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        seen = (self.past + count) * width
        self.dense, self.head = nn.Linear(seen, width), nn.Linear(width, outputs)
        self.prior = ConvPrior(width, outputs) if prior else None

    @property
    def layout(self) -> tuple[int, ...]:
        """What blocks of bodies that fit each other have alike."""
        return self.step, self.embed[0].in_features, self.width, self.heads  # pyright: ignore

    def forward(self, x: Tensor, code: Tensor | None, clock: Tensor | None) -> Tensor:
        """`(…, outputs)` of events `(…, dim)`; what `encoded` made of contexts, and tokens of times, broadcast."""
        if not torch.compiler.is_compiling() and in_events_alone():  # no compiler asks what the context is
            made = self._fused(x, code, clock)
            if made is not None:
                return made.view(*x.shape[:-1], 1)
        return self._by_torch(x, code, clock)

    def _by_torch(self, x: Tensor, code: Tensor | None, clock: Tensor | None) -> Tensor:
        lead = x.shape[:-1]
        beside = [
            part.expand(*lead, -1).reshape(-1, part.shape[-1]) for part in (code, clock) if part is not None
        ]
        rows = x.reshape(-1, x.shape[-1])
        steps = rows.unflatten(-1, (-1, self.step))
        if self.near is not None:
            beside[0], things = beside[0].tensor_split([-self.near.numbers], -1)
            steps = torch.cat([steps, self.near(rows, things)], -1)
        event = self.embed(steps) + self.place
        tokens = [part.unflatten(-1, (-1, self.width)) for part in beside]
        h = torch.cat([*tokens, event], 1)
        path = torch.cat([h[:, : self.past], event], 1) if self.past else event
        for block in self.blocks:
            h = block(h)
        end = h[:, -event.shape[1] :]
        end = torch.cat([h[:, : self.past], end], 1) if self.past else end
        made = last_sum(self.head, silu(self.dense(self.norm(end).flatten(1))))
        made = made if self.prior is None else made + self.prior(path)
        return made.view(*lead, -1)

    def _fused(self, x: Tensor, code: Tensor | None, clock: Tensor | None) -> Tensor | None:
        """The same by a few kernels where that can be, `(N,)`, differentiable in the events alone: `fused_body`."""
        if (
            self.near is not None
            or (x.device.type != "cuda" and not interpreted())
            or transforms_are_active()
        ):
            return None
        lead, parts = x.shape[:-1], [part for part in (code, clock) if part is not None]
        shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts), (1,) * len(lead))
        shape = shape if shape in ((1,) * len(lead), (*lead[:-1], 1)) else lead
        tokens = [part.expand(*shape, -1).reshape(math.prod(shape), -1, self.width) for part in parts]
        beside = torch.cat(tokens, 1) if tokens else x.new_empty(1, 0, self.width)
        if self.past:  # whose place is before the event's
            beside = torch.cat([beside[:, self.past :], beside[:, : self.past]], 1)
        rows = x.reshape(-1, x.shape[-1])
        return None if why_not(self, rows, beside) else fused_value(self, rows, beside)

    def beside(self, rows: Tensor, beside: Tensor) -> Tensor:
        """`(N,)` of events `(N, dim)` from all tokens beside them, `(M, S, width)`, those of the path last."""
        each, others = len(rows) // len(beside), beside.shape[1] - self.past
        tokens = torch.cat([beside[:, others:], beside[:, :others]], 1).repeat_interleave(each, 0)
        return self._by_torch(rows, tokens.flatten(1) if tokens.numel() else None, None).squeeze(-1)

    def encoded(self, encoder: Encoder, given: Tensor) -> Tensor:
        """Tokens of contexts, `(B, S·width)`, and behind them the things among which events lie, if any."""
        tokens = encoder(given)
        return tokens if self.near is None else self.near.join(tokens, given)

    def start_at_zero(self) -> None:
        """Zero for every input."""
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        if self.prior is not None:
            self.prior.start_at_zero()


class TransformerField(VectorField):
    """v(x, given, t) by a transformer over tokens of context, time and event (Figures 6 and 7).

    It starts at zero, so the flow as the identity.

    Args:
        dim: d, of a flattened event.
        context_shape: of one context; None without.
        step: numbers of a token of the event, such as those of one action.
        width: d_emb.
        layers: N_b.
        heads: of each block.
        encoder: a `Tokenizer`, shared or not, or what contexts go through before they are cut into tokens.
        past: how they are cut, see `Tokenizer`.
        tokens: likewise.
        pictures: likewise.
        reads: see `TokenBody`.
        prior: likewise.
        near: likewise.
        log_time: whether the network sees −log(1.1 − t) in the place of t.
        seed: of the initial weights; nothing global is touched.

    >>> field = TransformerField(8, (5,), step=2, width=16, layers=1)
    >>> field(torch.zeros(3, 4, 8), torch.zeros(3, 5), 0.5).shape
    torch.Size([3, 4, 8])
    """

    outputs: int | None = None

    def __init__(
        self,
        dim: int,
        context_shape: Sequence[int] | None = None,
        *,
        step: int = 1,
        width: int = 64,
        layers: int = 3,
        heads: int = 4,
        encoder: Encoder | None = None,
        past: Sequence[Sequence[int]] = (),
        tokens: Sequence[Sequence[int]] = (),
        pictures: Sequence[int] | None = None,
        reads: str = "future",
        prior: bool = True,
        near: Sequence[int] | None = None,
        log_time: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        require_count("field.width", width)
        require_near(near, context_shape)
        self.log_time = log_time
        with seeded(seed):
            self.encoder, known = with_tokens(
                encoder, context_shape, width, past=past, tokens=tokens, pictures=pictures
            )
            require(known is None or known.width == width, "field.width", "that of the shared tokens", width)
            before = (0, 0) if known is None else (known.past, known.steps)
            self.time = lifted(1, width)
            sizes = (dim, step, self.outputs or dim, width, layers, heads)
            self.body = TokenBody(*sizes, *before, reads, prior, near)
        self.body.start_at_zero()

    def stand(self, mean: Tensor, scale: Tensor) -> None:
        """Which only matters where events lie among things."""
        if self.body.near is not None:
            self.body.near.stand(mean, scale)

    def encode(self, given: Tensor) -> Tensor:
        """Tokens, `(B, S·width)`, as `TokenBody` takes them."""
        assert self.encoder is not None
        return self.body.encoded(self.encoder, given)

    def clock(self, t: Tensor) -> Tensor:
        """The token of the time, `(…, width)`."""
        return self.time((log_time(t) if self.log_time else t)[..., None])

    def velocity(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """v, `(…, d)`."""
        return self.body(x, code, clock)


class FilmBlock(nn.Module):
    """Figure 9: a convolution of the event's tokens, scaled and shifted by what queries read in the context.

    The context's tokens go on by themselves, through a block of a transformer: they are the same for all events of
    a context at one time, and so is what scales and shifts.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(heads, width))
        self.read = Attention(width, heads)
        self.film = nn.Linear(width, 2 * width)
        self.conv, self.mix = Conv(width, width), nn.Linear(heads * width, width)
        self.block = Block(width, heads)

    def films(self, context: Tensor) -> Film:
        """γ and β of each query, from tokens of the context, `(…, S, width)` to `(…, n_q, width)`."""
        queries = self.queries.expand(*context.shape[:-2], -1, -1)
        gain, shift = self.film(self.read(queries, context)).chunk(2, -1)
        return 1 + gain, shift

    def forward(self, h: Tensor, film: Film) -> Tensor:
        """Tokens of events, `(…, P, width)`, to which the leading dimensions of the film's broadcast."""
        gain, shift = (part[..., None, :, :] for part in film)
        heads = torch.addcmul(shift, self.conv(h)[..., None, :], gain)  # (…, P, n_q, width)
        return h + silu(self.mix(heads.flatten(-2)))


class FilmField(VectorField):
    """v(x, given, t) by Conv1D-Multi-Head-FiLM blocks (Figures 8 and 9): the proposal of Push-T.

    Attention is over the tokens of context and time only, once for all events of a context that share a time; an
    event costs convolutions. It starts at zero, so the flow as the identity.

    Args:
        dim: d, of a flattened event.
        context_shape: of one context; None without.
        step: numbers of a token of the event, such as those of one action.
        width: d_f.
        layers: N_b.
        heads: n_q, queries and heads of each block.
        encoder: a `Tokenizer`, such as the energy's, or what contexts go through before they are cut into tokens.
        past: how they are cut, see `Tokenizer`.
        tokens: likewise.
        pictures: likewise.
        log_time: whether the network sees −log(1.1 − t) in the place of t.
        seed: of the initial weights; nothing global is touched.

    >>> field = FilmField(8, (5,), step=2, width=16, layers=1)
    >>> field(torch.zeros(3, 4, 8), torch.zeros(3, 5), 0.5).shape
    torch.Size([3, 4, 8])
    """

    def __init__(
        self,
        dim: int,
        context_shape: Sequence[int] | None = None,
        *,
        step: int = 1,
        width: int = 64,
        layers: int = 3,
        heads: int = 2,
        encoder: Encoder | None = None,
        past: Sequence[Sequence[int]] = (),
        tokens: Sequence[Sequence[int]] = (),
        pictures: Sequence[int] | None = None,
        log_time: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        require_count("field.width", width)
        require_count("field.layers", layers)
        count, self.step, self.width, self.log_time = steps_of(dim, step), step, width, log_time
        with seeded(seed):
            layout: dict[str, Any] = {"past": past, "tokens": tokens, "pictures": pictures}
            self.encoder, known = with_tokens(encoder, context_shape, width, **layout)
            self.tokens = 0 if known is None else known.count
            self.narrow = None if known is None else nn.Linear(known.width, width)
            before = 0 if known is None else known.steps
            self.time, self.embed = lifted(1, width), lifted(step, width)
            self.blocks = nn.ModuleList(FilmBlock(width, heads) for _ in range(layers))
            self.dense, self.head = nn.Linear(count * width, width), nn.Linear(width, dim)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        self.register_buffer("place", places(before, count, width), persistent=False)

    def encode(self, given: Tensor) -> Tensor:
        """Tokens, `(B, S·d_f)`."""
        assert self.encoder is not None
        assert self.narrow is not None
        return self.narrow(self.encoder(given).unflatten(1, (self.tokens, -1))).flatten(1)

    def clock(self, t: Tensor) -> Tensor:
        """The token of the time, `(…, d_f)`."""
        return self.time((log_time(t) if self.log_time else t)[..., None])

    def films(self, code: Tensor | None, clock: Tensor) -> list[Film]:
        """What all blocks read in contexts and times."""
        beside = [clock] if code is None else [code, clock]
        lead = torch.broadcast_shapes(*(part.shape[:-1] for part in beside))
        context = torch.cat([part.expand(*lead, -1).unflatten(-1, (-1, self.width)) for part in beside], -2)
        films = []
        for block in self.blocks:
            films.append(block.films(context))  # pyright: ignore
            context = block.block(context)  # pyright: ignore
        return films

    def filmed(self, x: Tensor, films: Sequence[Film]) -> Tensor:
        """v of events, `(…, d)`, for what was read."""
        h = self.embed(x.unflatten(-1, (-1, self.step))) + self.place
        for block, film in zip(self.blocks, films, strict=True):
            h = block(h, film)
        return self.head(silu(self.dense(h.flatten(-2))))

    def velocity(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """v, `(…, d)`."""
        return self.filmed(x, self.films(code, clock))

    def velocities(self, code: Tensor | None, times: Tensor) -> Iterator[Velocity]:
        """As of all fields; contexts are read at all times at once, so that a step of an ODE is convolutions."""
        lead = () if code is None else code.shape[:-1]
        if len(times) * math.prod(lead) * (self.tokens + 1) * self.width > FOLDED:
            return super().velocities(code, times)
        clock = self.clock(times)
        if times.dim() == 1:
            clock = clock.view(len(times), *[1] * len(lead), self.width)
        films = self.films(code, clock)
        return (
            functools.partial(self.filmed, films=[(gain[i], shift[i]) for gain, shift in films])
            for i in range(len(times))
        )
