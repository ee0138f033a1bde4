"""Normalising flows as proposals: exact density, exact draws, both differentiable and trainable.

The transformations come from zuko; base noise, standardisation and random numbers are ours, so that draws come
from an explicit generator and importing the library has no side effects.

| symbol | here |
|---|---|
| z ~ p₀ | standard normal base noise |
| c | the context, `given`, once encoded |
| f_φ | the inverse of `Flow.transform`, then the standardisation's inverse |
| p_φ | `Flow.log_prob` |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from metastable.core.batch import Rows, as_batch
from metastable.core.errors import InputError, need, require_choice, require_count, require_positive
from metastable.core.random import Seed, derive, generator, normal_like, seeded
from metastable.core.types import as_shape

from .encoders import Encoder, Standardise, lead_of, learned_parameters, moments, require_contexts, width_of

KINDS = {"spline": "NSF", "affine": "MAF"}
"""Flows of zuko by the shape of their one-dimensional transformations."""
LOG_2PI = math.log(2 * math.pi)


class Flow(nn.Module):
    """p_φ(x) = p₀(f_φ⁻¹(x)) |det ∂f_φ⁻¹/∂x| with a standard normal p₀, over events of any shape.

    With contexts it is p_φ(x | given): the layers' networks also see the encoded context. Coupling layers of
    a zuko flow act on standardised, flattened events; both directions cost `passes` network passes a layer.
    It begins as the Gaussian with the data's mean and standard deviations. The support is all of space:
    beyond five standard deviations a spline is the identity.

    Args:
        event_shape: shape of one event, or its dimension.
        context_shape: shape of one context, or its dimension; None for a density without contexts.
        data: rows whose mean and standard deviation standardise events, `(n, *event)`, or a `Batch`, whose contexts
            are standardised as well unless they have an encoder; kept in buffers.
        encoder: from contexts `(B, *context)` to vectors `(B, c)`; a module learns with the flow. By default they
            are standardised, by `data` and by those of `fit`.
        kind: `spline` (rational-quadratic, neural spline flow) or `affine`.
        layers: transformations.
        hidden: widths of each layer's network.
        bins: of a spline.
        passes: passes of the slower direction; 2 is coupling, None fully autoregressive.
        seed: of the initial weights; nothing global is touched.

    References:
        C. Durkan, A. Bekasov, I. Murray, G. Papamakarios, *Neural spline flows*, NeurIPS 2019.

    >>> flow = Flow(2, hidden=(8,), layers=2)
    >>> x = flow.sample(5, torch.Generator().manual_seed(0))
    >>> x.shape, flow.log_prob(x).shape
    (torch.Size([5, 2]), torch.Size([5]))
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        event_shape: int | Sequence[int],
        context_shape: int | Sequence[int] | None = None,
        *,
        data: Rows | None = None,
        encoder: Encoder | None = None,
        kind: str = "spline",
        layers: int = 3,
        hidden: Sequence[int] = (64, 64),
        bins: int = 8,
        passes: int | None = 2,
        seed: int = 0,
    ):
        super().__init__()
        require_choice("flow.kind", kind, KINDS)
        require_count("flow.layers", layers)
        require_count("flow.bins", bins, 2)
        self.event_shape = as_shape(event_shape)
        self.context_shape = None if context_shape is None else as_shape(context_shape)
        rows = None if data is None else as_batch(data)
        mean, scale = moments(self.event_shape, None if rows is None else rows.x)
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        settings: dict[str, Any] = {"transforms": layers, "passes": passes, "hidden_features": tuple(hidden)}
        settings |= {"bins": bins} if kind == "spline" else {}
        self.standardises = encoder is None and self.context_shape is not None
        self.encoder = self._encoder(encoder, None if rows is None else rows.given)
        if self.encoder is not None:
            settings["context"] = width_of(self.encoder, self.context_shape or (), mean)
        with seeded(seed):
            self.transform = getattr(_zuko().flows, KINDS[kind])(len(mean), **settings).transform
        _start_at_identity(self.transform)
        self.to(mean)

    def _encoder(self, encoder: Encoder | None, given: Tensor | None) -> Encoder | None:
        if self.context_shape is None:
            if encoder is not None:
                raise InputError("encoder: a flow without contexts has none; set context_shape")
            return None
        return encoder or Standardise(self.context_shape, given)

    def log_prob(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        """Normalised log-density; differentiable in x and in the weights.

        Args:
            x: `(B, *event)`, or `(B, K, *event)` where there are contexts.
            given: `(B, *context)`.

        Returns:
            `(B,)`, or `(B, K)`.
        """
        lead = lead_of(x, self.event_shape)
        require_contexts(given, self.context_shape, lead[0], "this flow")
        white = (x.reshape(*lead, -1) - self.mean) / self.scale
        z, log_det = self._given(given, len(lead)).call_and_ladj(white)
        return _standard_log_prob(z) + log_det - self.scale.log().sum()

    def loss(self, x: Tensor, given: Tensor | None = None, *, rng: torch.Generator | None = None) -> Tensor:
        """−log p_φ, averaged: what a flow is trained with."""
        return -self.log_prob(x, given).mean()

    def rsample(self, n: int, rng: torch.Generator, given: Tensor | None = None) -> Tensor:
        """The draws x = f_φ(z) of `sample`, through which gradients flow to the weights."""
        white = self._given(given, 2).inv(self._noise(n, rng, given))
        return self._event(white)

    @torch.no_grad()
    def sample(self, n: int, rng: torch.Generator, given: Tensor | None = None) -> Tensor:
        """`n` draws, `(n, *event)`, or `(B, n, *event)`: n for each of B contexts."""
        return self.rsample(n, rng, given)

    @torch.no_grad()
    def sample_and_log_prob(
        self, n: int, rng: torch.Generator, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The draws of `sample` with their log-densities, in one pass instead of two."""
        z = self._noise(n, rng, given)
        white, log_det = self._given(given, 2).inv.call_and_ladj(z)
        return self._event(white), _standard_log_prob(z) - log_det - self.scale.log().sum()

    def _noise(self, n: int, rng: torch.Generator, given: Tensor | None) -> Tensor:
        require_contexts(given, self.context_shape, 0 if given is None else len(given), "this flow")
        lead = (n,) if given is None else (len(given), n)
        return normal_like(self.mean.expand(*lead, -1), rng)

    def _given(self, given: Tensor | None, dims: int) -> Any:
        """The transformation for these contexts, which are encoded once, whatever the number of events of each."""
        if given is None:
            return self.transform()
        assert self.encoder is not None
        code = self.encoder(given)
        return self.transform(code[:, None] if dims == 2 else code)

    def _event(self, white: Tensor) -> Tensor:
        return (self.mean + self.scale * white).view(*white.shape[:-1], *self.event_shape)

    def fit(
        self, data: Rows, steps: int = 500, *, batch: int = 512, learning_rate: float = 2e-3, seed: Seed = 0
    ) -> Flow:
        """Maximum likelihood on `data`, in place, by Adam with a cosine schedule; standardises anew.

        Events are standardised by `data`, and contexts that no encoder takes by theirs. Parameters that are frozen
        (`requires_grad_(False)`), such as those of an encoder learned elsewhere, stay as they are.

        Args:
            data: `(n, *event)`, or a `Batch` for a flow with contexts.
            steps: updates.
            batch: rows an update, drawn with replacement.
            learning_rate: at the start.
            seed: of the choice of rows, or a generator.
        """
        require_count("steps", steps)
        require_count("batch", batch)
        require_positive("learning_rate", learning_rate)
        rows = as_batch(data)
        mean, scale = moments(self.event_shape, rows.x)
        self.mean.copy_(mean)
        self.scale.copy_(scale)
        if self.standardises and rows.given is not None:
            self.encoder.refit(rows.given)  # pyright: ignore
        parameters = learned_parameters(self)
        optimiser = torch.optim.Adam(parameters, learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        device = self.mean.device
        rng = generator(derive(seed, "fit") if isinstance(seed, int) else seed, device)
        for _ in range(steps):
            some = rows[torch.randint(len(rows), (min(batch, len(rows)),), generator=rng, device=device)]
            loss = self.loss(some.x, some.given)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
        for parameter in parameters:
            parameter.grad = None
        return self


def _start_at_identity(transform: nn.Module) -> None:
    """Zero what the layers' networks end in: parameters of zero make every transformation the identity."""
    for layer in transform.transforms:  # pyright: ignore
        last = layer.hyper[-1] if hasattr(layer, "hyper") else layer
        for parameter in last.parameters():
            nn.init.zeros_(parameter)


def _standard_log_prob(z: Tensor) -> Tensor:
    return -0.5 * (z.square() + LOG_2PI).sum(-1)


def _zuko() -> Any:
    """Zuko, without what its import does to everybody else: it switches off validation in torch.distributions."""
    before = Distribution._validate_args
    try:
        return need("zuko", "flows", "a flow proposal")
    finally:
        Distribution.set_default_validate_args(before)
