"""Normalising flows as proposals: exact density, exact draws, both differentiable and trainable.

The transformations come from zuko; base noise, standardisation and random numbers are ours, so that draws come
from an explicit generator and importing the library has no side effects.

| symbol | here |
|---|---|
| z ~ p₀ | standard normal base noise |
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

from metastable.core.errors import InputError, need, require_choice, require_count, require_positive
from metastable.core.random import Seed, derive, generator, normal_like, seeded

KINDS = {"spline": "NSF", "affine": "MAF"}
"""Flows of zuko by the shape of their one-dimensional transformations."""
LOG_2PI = math.log(2 * math.pi)


class Flow(nn.Module):
    """p_φ(x) = p₀(f_φ⁻¹(x)) |det ∂f_φ⁻¹/∂x| with a standard normal p₀, over events of any shape.

    Coupling layers of a zuko flow act on standardised, flattened events; both directions cost `passes` network
    passes a layer. It begins as the Gaussian with the data's mean and standard deviations. The support is all of
    space: beyond five standard deviations a spline is the identity.

    Args:
        event_shape: shape of one event, or its dimension.
        data: rows whose mean and standard deviation standardise events, `(n, *event)`; kept in buffers.
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
        *,
        data: Tensor | None = None,
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
        self.event_shape = (event_shape,) if isinstance(event_shape, int) else tuple(event_shape)
        mean, scale = _standardisation(self.event_shape, data)
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        settings: dict[str, Any] = {"transforms": layers, "passes": passes, "hidden_features": tuple(hidden)}
        settings |= {"bins": bins} if kind == "spline" else {}
        with seeded(seed):
            self.transform = getattr(_zuko().flows, KINDS[kind])(len(mean), **settings).transform
        _start_at_identity(self.transform)
        self.to(mean)

    def log_prob(self, x: Tensor) -> Tensor:
        """Normalised log-density, `(B, *event)` to `(B,)`; differentiable in x and in the weights."""
        white = (x.flatten(1) - self.mean) / self.scale
        z, log_det = self.transform().call_and_ladj(white)
        return _standard_log_prob(z) + log_det - self.scale.log().sum()

    def rsample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` draws x = f_φ(z), `(n, *event)`, through which gradients flow to the weights."""
        z = normal_like(self.mean.expand(n, -1), rng)
        white = self.transform().inv(z)
        return (self.mean + self.scale * white).view(n, *self.event_shape)

    @torch.no_grad()
    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` draws, `(n, *event)`."""
        return self.rsample(n, rng)

    @torch.no_grad()
    def sample_and_log_prob(self, n: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """The draws of `sample` with their log-densities, in one pass instead of two."""
        z = normal_like(self.mean.expand(n, -1), rng)
        white, log_det = self.transform().inv.call_and_ladj(z)
        x = (self.mean + self.scale * white).view(n, *self.event_shape)
        return x, _standard_log_prob(z) - log_det - self.scale.log().sum()

    def fit(
        self, data: Tensor, steps: int = 500, *, batch: int = 512, learning_rate: float = 2e-3, seed: Seed = 0
    ) -> Flow:
        """Maximum likelihood on `data`, in place, by Adam with a cosine schedule; standardises anew.

        Args:
            data: `(n, *event)`.
            steps: updates.
            batch: rows an update, drawn with replacement.
            learning_rate: at the start.
            seed: of the choice of rows, or a generator.
        """
        require_count("steps", steps)
        require_count("batch", batch)
        require_positive("learning_rate", learning_rate)
        mean, scale = _standardisation(self.event_shape, data)
        self.mean.copy_(mean)
        self.scale.copy_(scale)
        parameters = list(self.parameters())
        learned = [p.requires_grad for p in parameters]
        optimiser = torch.optim.Adam([p.requires_grad_(True) for p in parameters], learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        rng = generator(derive(seed, "fit") if isinstance(seed, int) else seed, data.device)
        for _ in range(steps):
            rows = torch.randint(len(data), (min(batch, len(data)),), generator=rng, device=data.device)
            loss = -self.log_prob(data[rows]).mean()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
        for parameter, learns in zip(parameters, learned, strict=True):
            parameter.requires_grad_(learns).grad = None
        return self


def _standardisation(event_shape: tuple[int, ...], data: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each coordinate, flattened; 0 and 1 without data."""
    if data is None:
        zeros = torch.zeros(math.prod(event_shape))
        return zeros, torch.ones_like(zeros)
    if tuple(data.shape[1:]) != event_shape or len(data) < 2:
        raise InputError(f"data: must have shape (n ≥ 2, {event_shape}), got {tuple(data.shape)}")
    flat = data.detach().flatten(1)
    spread = flat.std(0)
    return flat.mean(0), spread.clamp(min=max(1e-3 * float(spread.mean()), 1e-6))


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
