"""Conditional energies E(y | x), and E(y | x, t) where events are on their way from noise to data.

S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies: ranking noise contrastive estimation and
interpolating energy models*, TMLR 2024, Sections 3.1 and 5.2, Appendices B.2 and B.4.

| paper | here |
|---|---|
| y, an event | `x`, `(B, *event)`, or `(B, K, *event)`: K of them for each context |
| x, its context | `given`, `(B, *context)` |
| t | `t` |
| 𝓔(x, y), 𝓔(x, y, t) | −E |
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import silu

from metastable.core.batch import Batch, Rows, as_batch
from metastable.core.errors import InputError, require_count, require_positive
from metastable.core.random import seeded
from metastable.core.times import checked_times
from metastable.core.types import as_shape
from metastable.proposals.encoders import Encoder, Standardise, moments, require_contexts, width_of
from metastable.proposals.interpolants import log_time

EMBEDDING = 10
"""Width of the two layers that embed a time."""


class ConditionalEnergy(nn.Module):
    """What energies E(y | x, t) of standardised events share; subclasses write `_value`, `encode` and `clock`."""

    mean: Tensor
    scale: Tensor
    encoder: Encoder | None

    def _set_up(
        self,
        event_shape: int | Sequence[int],
        context_shape: int | Sequence[int] | None,
        time: bool,
        data: Rows | None,
        inflate: float | None,
    ) -> Batch | None:
        """Shapes, and buffers from the data, which are returned as a batch."""
        if inflate is not None:
            require_positive("energy.inflate", inflate)
        self.event_shape = as_shape(event_shape)
        self.context_shape = None if context_shape is None else as_shape(context_shape)
        self.time, self.inflate = time, inflate
        rows = None if data is None else as_batch(data)
        mean, scale = moments(self.event_shape, None if rows is None else rows.x)
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        return rows

    def encode(self, given: Tensor) -> Tensor:
        """What `score` needs of the contexts, `(B, *context)` to `(B, c)`."""
        raise NotImplementedError

    def clock(self, t: Tensor) -> Tensor:
        """What it needs of times, any shape to `(…, w)`."""
        raise NotImplementedError

    def _value(self, white: Tensor, code: Tensor | None, clock: Tensor | None) -> Tensor:
        """E of standardised events, `(…, d)` to `(…)`; codes of contexts and times broadcast to them."""
        raise NotImplementedError

    def score(self, x: Tensor, code: Tensor | None, t: Tensor | None = None) -> Tensor:
        """E for encoded contexts.

        Args:
            x: events, `(B, K, *event)`, or `(B, *event)` without contexts.
            code: what `encode` made of the contexts, `(B, c)`; None without.
            t: times, one for each context, `(B,)`, or for each event, `(B, K)`.

        Returns:
            `(B, K)`, or `(B,)` without contexts.
        """
        lead = x.shape[: x.dim() - len(self.event_shape)]
        white = (x.reshape(*lead, -1) - self.mean) / self.scale
        clock = self._time_share(t, x, len(lead)) if self.time else None
        E = self._value(white, None if code is None else code[:, None], clock)
        return E if self.inflate is None else E + 0.5 * (white / self.inflate).square().sum(-1)

    def _time_share(self, t: Tensor | None, x: Tensor, dims: int) -> Tensor:
        """Broadcasts against `(*lead, width)`; a time is left out for that of the data.

        A time that all events of a context share (one number in memory) is embedded once for them.
        """
        if t is not None and t.dim() == 2 and t.stride(1) == 0:
            t = t[:, 0]
        share = self.clock(x.new_ones(1) if t is None else t.to(x.dtype))
        missing = max(0, dims + 1 - share.dim()) if t is not None and t.dim() else 0
        return share.view(*share.shape[:-1], *[1] * missing, share.shape[-1])

    def forward(self, x: Tensor, given: Tensor | None = None, t: Tensor | float | None = None) -> Tensor:
        """E(x | given) or E(x | given, t): x `(B, *event)` to `(B,)`, or `(B, K, *event)` to `(B, K)`.

        Args:
            x: events.
            given: contexts, `(B, *context)`; None where the energy has none.
            t: a number in [0, 1], one for each context, `(B,)`, or one for each event, `(B, K)`.
        """
        lead = tuple(x.shape[: x.dim() - len(self.event_shape)])
        self._check(x, lead, given)
        t = self._times(t, x, lead)
        if given is None:
            return self.score(x, None, t)
        single = len(lead) == 1
        E = self.score(x[:, None] if single else x, self.encode(given), t)
        return E[:, 0] if single else E

    def _check(self, x: Tensor, lead: tuple[int, ...], given: Tensor | None) -> None:
        if (
            len(lead) not in ((1, 2) if given is not None else (1,))
            or x.shape[len(lead) :] != self.event_shape
        ):
            K = " or (B, K, *event)" if given is not None else ""
            raise InputError(f"x: must be (B, *event){K} with event {self.event_shape}, got {tuple(x.shape)}")
        require_contexts(given, self.context_shape, lead[0], "this energy")

    def _times(self, t: Tensor | float | None, x: Tensor, lead: tuple[int, ...]) -> Tensor | None:
        if t is None:
            return None
        if not self.time:
            raise InputError("t: this energy has no time; build it with time=True")
        t = checked_times("t", t, x)
        if tuple(t.shape) not in {(), lead[:1], lead}:
            raise InputError(f"t: must be a number, or one for each of {lead}, got shape {tuple(t.shape)}")
        return t


class ConditionalNet(ConditionalEnergy):
    """E(y | x) or E(y | x, t): event, context and time joined, then dense layers with residual connections.

    Joining them before a dense layer is a sum of three dense layers, of which the context's is computed once for
    each context, whatever the number K of its events:

        h₁ = silu(W_y y + b + W_x encoder(x) + W_t embed(−log(1.1 − t))),    h_{i+1} = h_i + silu(W_i h_i + b_i),

    and E is linear in the last h. Events are standardised by `data` where there are any, and so are contexts that
    no encoder takes. Without contexts it is a plain energy `(B, *event) → (B,)`.

    Args:
        event_shape: shape of one event, or its dimension.
        context_shape: shape of one context, or its dimension; None for an energy without contexts.
        width: of the dense layers.
        depth: dense layers, the first and the last included.
        time: whether the energy has a time; without one given it is then that at t = 1, of the data.
        encoder: from contexts `(B, *context)`, images or sets as they are, to vectors `(B, c)`. A module is part of
            the energy and learns with it.
        data: events, or events with contexts, whose means and standard deviations standardise; kept in buffers.
        inflate: adds −log of the Gaussian with these means and `inflate` times these standard deviations, so that
            exp(−E) can be normalised whatever the network says; None for the network alone, as in the paper.
        seed: of the initial weights; nothing global is touched.

    >>> import torch
    >>> energy = ConditionalNet(2, 3, width=8, depth=3)
    >>> x, given = torch.zeros(5, 4, 2), torch.zeros(5, 3)
    >>> energy(x, given).shape, energy(x[:, 0], given).shape
    (torch.Size([5, 4]), torch.Size([5]))
    """

    def __init__(
        self,
        event_shape: int | Sequence[int],
        context_shape: int | Sequence[int] | None = None,
        width: int = 64,
        depth: int = 8,
        time: bool = False,
        encoder: Encoder | None = None,
        *,
        data: Rows | None = None,
        inflate: float | None = None,
        seed: int = 0,
    ):
        super().__init__()
        require_count("energy.width", width)
        require_count("energy.depth", depth, 2)
        rows = self._set_up(event_shape, context_shape, time, data, inflate)
        self.encoder = self._encoder(encoder, None if rows is None else rows.given)
        with seeded(seed):
            self._build(width, depth)
        self.to(self.mean)

    def _encoder(self, encoder: Encoder | None, given: Tensor | None) -> Encoder | None:
        if self.context_shape is None:
            if encoder is not None:
                raise InputError("encoder: an energy without contexts has none; set context_shape")
            return None
        return Standardise(self.context_shape, given) if encoder is None else encoder

    def _build(self, width: int, depth: int) -> None:
        self.from_event = nn.Linear(len(self.mean), width)
        if self.encoder is not None:
            features = width_of(self.encoder, self.context_shape or (), self.mean)
            self.from_context = nn.Linear(features, width, bias=False)
        if self.time:
            layers = [nn.Linear(1, EMBEDDING), nn.SiLU(), nn.Linear(EMBEDDING, EMBEDDING), nn.SiLU()]
            self.embed = nn.Sequential(*layers)
            self.from_time = nn.Linear(EMBEDDING, width, bias=False)
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(depth - 2))
        self.head = nn.Linear(width, 1)

    def encode(self, given: Tensor) -> Tensor:
        """The context's share of the first layer, `(B, *context)` to `(B, width)`."""
        require_contexts(given, self.context_shape, len(given), "this energy")
        assert self.encoder is not None
        return self.from_context(self.encoder(given))

    def clock(self, t: Tensor) -> Tensor:
        """The time's share of the first layer, any shape to `(…, width)`."""
        return self.from_time(self.embed(log_time(t)[..., None]))

    def _value(self, white: Tensor, code: Tensor | None, clock: Tensor | None) -> Tensor:
        h = self.from_event(white)
        for share in (code, clock):
            h = h if share is None else h + share
        h = silu(h)
        for layer in self.inner:
            h = h + silu(layer(h))
        return self.head(h).squeeze(-1)
