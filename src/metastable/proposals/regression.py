"""Behaviour cloning: the mean of an event given its context, learned by least squares."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from metastable.core.batch import Rows, as_batch
from metastable.core.errors import require_positive
from metastable.core.random import normal_like
from metastable.core.types import as_shape

from .encoders import Encoder, Standardise, lead_of, moments, require_contexts
from .named_fields import FieldChoice, field_for, is_named


class Regression(nn.Module):
    """N(f(x), s²) with f learned by mean-squared error: draws are f(x), but for noise of s.

    What behaviour cloning is: where data have several modes it goes between them, which a density does not.

    Args:
        event_shape: shape of one event, or its dimension.
        context_shape: shape of one context, or its dimension.
        data: rows whose mean and standard deviation standardise events, `(n, *event)`; of a `Batch` contexts too.
        network: f, a field by name or as `InterpolantFlow` takes it, asked at x = 0 and t = 0.
        width: of a named network's layers.
        layers: of a named network.
        encoder: from contexts to codes; they are standardised by default.
        spread: s, in units of the events' standard deviation.
        seed: of the initial weights; nothing global is touched.

    >>> model = Regression(2, 3, width=8, layers=3)
    >>> model.sample(4, torch.Generator(), torch.zeros(5, 3)).shape
    torch.Size([5, 4, 2])
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        event_shape: int | Sequence[int],
        context_shape: int | Sequence[int],
        *,
        data: Rows | None = None,
        network: FieldChoice = "residual",
        width: int = 64,
        layers: int = 8,
        encoder: Encoder | None = None,
        spread: float = 0.01,
        seed: int = 0,
    ):
        super().__init__()
        require_positive("regression.spread", spread)
        self.event_shape, self.context_shape = as_shape(event_shape), as_shape(context_shape)
        self.spread, rows = spread, None if data is None else as_batch(data)
        mean, scale = moments(self.event_shape, None if rows is None else rows.x)
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        own = encoder
        if encoder is None:
            encoder = Standardise(self.context_shape, None if rows is None else rows.given)
        settings = {"context_shape": self.context_shape, "width": width, "layers": layers}
        self.field = field_for(network, len(mean), own, encoder=encoder, seed=seed, **settings)
        if is_named(network):
            self.field.to(self.mean)
        self.field.stand(self.mean, self.scale)

    def answer(self, given: Tensor) -> Tensor:
        """f of contexts `(B, *context)`, standardised and flattened, `(B, d)`."""
        require_contexts(given, self.context_shape, len(given), "this model")
        x = self.mean.new_zeros(len(given), len(self.mean))
        return self.field.velocity(x, self.field.encode(given), self.field.clock(x.new_zeros(())))

    def loss(self, x: Tensor, given: Tensor | None = None, *, rng: torch.Generator) -> Tensor:
        """The mean over a batch of ‖y − f‖², in units of the standard deviations."""
        assert given is not None
        return ((x.flatten(1) - self.mean) / self.scale - self.answer(given)).square().sum(1).mean()

    @torch.no_grad()
    def sample(self, n: int, rng: torch.Generator, given: Tensor) -> Tensor:
        """`n` draws for each context, `(B, n, *event)`."""
        white = self.answer(given)[:, None].expand(-1, n, -1)
        noisy = white + self.spread * normal_like(white, rng)
        return (self.mean + self.scale * noisy).view(len(given), n, *self.event_shape)

    def log_prob(self, x: Tensor, given: Tensor) -> Tensor:
        """Log-density: `(B, *event)` to `(B,)`, or `(B, K, *event)` to `(B, K)`."""
        lead, f = lead_of(x, self.event_shape), self.answer(given)
        white = (x.reshape(*lead, -1) - self.mean) / self.scale - (f if len(lead) == 1 else f[:, None])
        constant = math.log(self.spread) + 0.5 * math.log(2 * math.pi)
        return -0.5 * (white / self.spread).square().sum(-1) - (self.scale.log() + constant).sum()
