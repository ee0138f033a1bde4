"""Diffusion models as densities: a denoiser learned at all noise levels, and the flow that undoes the noise.

T. Karras, M. Aittala, T. Aila, S. Laine, *Elucidating the design space of diffusion-based generative models*,
NeurIPS 2022 (EDM); as policies and densities in S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as
policies*, TMLR 2024, Sections 6 and 7.1, Appendix B.1.

| paper | here |
|---|---|
| y, the event (EDM: x) | `y`, flattened: `(…, d)`, in units in which its standard deviation is σ_data |
| x, the context | `given`, `(B, *context)`; `code` once encoded |
| σ, the noise level, which is the ODE's time | `sigma`; `clock` once embedded |
| F, the raw network; f in (B.1) | `network`, a `VectorField` with time c_noise(σ) |
| D(y; σ), the denoiser; d in (B.1) | `EDMField.denoise` |
| c_skip, c_out, c_in, c_noise | `Coefficients` |
| φ, with f = ∇_y φ | `Potential.potential` |
| r, the relative log-likelihood | minus the energy of `DiffusionEnergy` |

Deviations: sampling stops at σ_min. EDM takes one more step, to σ = 0, which is a projection and has no density;
draws and their log-densities would not belong together. Draws start at N(0, (σ_max² + σ_data²) I) in the place of
N(0, σ_max² I). The divergence is integrated in u = σ^{1/ρ}, in which EDM's noise levels are evenly spaced; in σ the
trapezoidal rule with 64 times would be off by 0.01 a dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from metastable.core.batch import Rows, as_batch
from metastable.core.errors import require, require_positive
from metastable.core.random import normal_like

from .continuous import ContinuousFlow
from .encoders import Encoder, Standardise
from .fields import VectorField
from .named_fields import FieldChoice, field_for, is_named

# ---- EDM


class Coefficients(NamedTuple):
    """EDM's Table 1: D(y; σ) = c_skip y + c_out F(c_in y; c_noise)."""

    skip: Tensor
    out: Tensor
    inside: Tensor
    noise: Tensor


def coefficients(sigma: Tensor, sigma_data: float) -> Coefficients:
    """The coefficients at noise levels of any shape.

    >>> c = coefficients(torch.tensor(1.0), sigma_data=1.0)
    >>> [round(float(value), 4) for value in c]
    [0.5, 0.7071, 0.7071, 0.0]
    """
    total = sigma.square() + sigma_data**2
    return Coefficients(
        skip=sigma_data**2 / total,
        out=sigma * sigma_data / total.sqrt(),
        inside=1 / total.sqrt(),
        noise=sigma.log() / 4,
    )


def noise_levels(
    share: Tensor, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0
) -> Tensor:
    """EDM's (5): σ = (σ_max^{1/ρ} + s (σ_min^{1/ρ} − σ_max^{1/ρ}))^ρ for s from 0, all noise, to 1, none.

    >>> [round(float(sigma), 3) for sigma in noise_levels(torch.tensor([0.0, 0.5, 1.0]))]
    [80.0, 2.515, 0.002]
    """
    low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    return (high + share * (low - high)) ** rho


class EDMField(VectorField):
    """The probability-flow ODE dy/dσ = (y − D(y; σ))/σ of a denoiser, as a field whose time is σ.

    Args:
        network: F, a field whose time is c_noise = ¼ log σ.
        sigma_data: standard deviation of the events without noise.
    """

    def __init__(self, network: VectorField, sigma_data: float = 0.5):
        super().__init__()
        require_positive("diffusion.sigma_data", sigma_data)
        self.network, self.sigma_data = network, sigma_data

    def encode(self, given: Tensor) -> Tensor:
        """The network's."""
        return self.network.encode(given)

    def stand(self, mean: Tensor, scale: Tensor) -> None:
        """The network's, whose events have the deviation 1 where there is little noise."""
        self.network.stand(mean, self.sigma_data * scale)

    def clock(self, t: Tensor) -> Tensor:
        """σ, and beside it what the network needs of c_noise where that is a vector: `(…, 1)` or `(…, 1 + w)`."""
        inner = self.network.clock(coefficients(t, self.sigma_data).noise)
        return t[..., None] if inner.dim() == t.dim() else torch.cat([t[..., None], inner], -1)

    def _split(self, clock: Tensor) -> tuple[Tensor, Tensor]:
        """σ, `(…, 1)`, and the network's clock."""
        sigma, inner = clock[..., :1], clock[..., 1:]
        if inner.shape[-1]:
            return sigma, inner
        return sigma, self.network.clock(coefficients(sigma[..., 0], self.sigma_data).noise)

    def denoise(self, y: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """D(y; σ), the mean of the event given y, `(…, d)`; EDM's (7)."""
        sigma, inner = self._split(clock)
        c = coefficients(sigma, self.sigma_data)
        return c.skip * y + c.out * self.network.velocity(c.inside * y, code, inner)

    def velocity(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """(y − D)/σ, `(…, d)`, with the difference taken before it can cancel: 1 − c_skip = σ² c_in²."""
        sigma, inner = self._split(clock)
        c = coefficients(sigma, self.sigma_data)
        raw = self.network.velocity(c.inside * x, code, inner)
        return sigma * c.inside.square() * x - c.out / sigma * raw

    def divergence(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """The same, differentiated: the network's own divergence is used, `(…)`."""
        sigma, inner = self._split(clock)
        c = coefficients(sigma, self.sigma_data)
        raw = self.network.divergence(c.inside * x, code, inner)
        plain = x.shape[-1] * sigma * c.inside.square()
        return plain[..., 0] - (c.out * c.inside / sigma)[..., 0] * raw


# ---- Diffusion-EDM


class Diffusion(ContinuousFlow):
    """Diffusion-EDM: a denoiser D(y; x, σ) learned by regression, and the density of the ODE that it defines.

    Draws start as noise of level σ_max and solve dy/dσ = (y − D)/σ down to σ_min by Heun's rule on EDM's noise
    levels. `log_prob` solves it the other way and adds up divergences (6.2) at `scored` of the levels. It is the
    density of the events with noise of σ_min on them. With t = 0 … 1 the share of the noise levels that is passed,
    `until=t` and `at=t` stop on the way. A new model is the Gaussian with the moments of `data`.

    Args:
        event_shape: shape of one event, or its dimension.
        context_shape: shape of one context, or its dimension; None for a density without contexts.
        data: rows whose mean and standard deviation standardise events, `(n, *event)`, so that EDM's settings fit
            any data; kept in buffers. Of a `Batch` contexts too, unless there is an encoder. Without it events are
            taken as they are.
        network: F: `residual`, `concatsquash`, `transformer`, `film`, a table of such a name and its settings, a
            `VectorField`, or any callable `F(y, given, c_noise)` (y `(…, d)`, c_noise broadcasts against `(…)`,
            given against `(…, c)`).
        width: of a named network's layers.
        layers: of a named network, the first and the last included.
        encoder: from contexts `(B, *context)` to codes `(B, c)`; run once for each context, for a named network or
            a callable. A `VectorField` has its own `encode`.
        sigma_data: standard deviation that events have (or are given, with `data`).
        sigma_min: the least noise level.
        sigma_max: the largest.
        rho: how much the levels gather at the small end.
        log_sigma: P_mean and P_std: in the loss, log σ ~ N(P_mean, P_std²).
        steps: Heun steps; 512 are the paper's.
        scored: of the `steps` + 1 noise levels, how many have a divergence.
        chunk: rows times dimensions that are in memory at once; by default what suits the device and the field.
        replay: as of `InterpolantFlow`.
        seed: of the initial weights; nothing global is touched.

    >>> model = Diffusion(2, 3, width=8, layers=3, steps=16)
    >>> rng, given = torch.Generator().manual_seed(0), torch.zeros(5, 3)
    >>> x, log_prob = model.sample_and_log_prob(4, rng, given)
    >>> x.shape, log_prob.shape, model.log_prob(x[:, 0], given).shape
    (torch.Size([5, 4, 2]), torch.Size([5, 4]), torch.Size([5]))
    """

    field: EDMField  # pyright: ignore
    fine: ClassVar[tuple[int, int]] = (192, 33)
    most: ClassVar[tuple[int, int]] = (2**18, 2**18)

    def __init__(
        self,
        event_shape: int | Sequence[int],
        context_shape: int | Sequence[int] | None = None,
        *,
        data: Rows | None = None,
        network: FieldChoice = "residual",
        width: int = 64,
        layers: int = 8,
        encoder: Encoder | None = None,
        sigma_data: float = 0.5,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        rho: float = 7.0,
        log_sigma: tuple[float, float] = (-1.2, 1.2),
        steps: int = 512,
        scored: int = 64,
        chunk: int | None = None,
        replay: bool | None = None,
        seed: int = 0,
    ):
        rows = None if data is None else as_batch(data)
        x, contexts = (None, None) if rows is None else (rows.x, rows.given)
        super().__init__(event_shape, context_shape, x, steps, scored, chunk)
        require_positive("diffusion.sigma_data", sigma_data)
        require_positive("diffusion.sigma_min", sigma_min)
        require(sigma_max > sigma_min, "diffusion.sigma_max", f"above sigma_min = {sigma_min}", sigma_max)
        require_positive("diffusion.rho", rho)
        require_positive("diffusion.log_sigma.1", log_sigma[1])
        if data is not None:
            self.scale.div_(sigma_data)
        self.sigma_data, self.sigma_min, self.sigma_max, self.rho = sigma_data, sigma_min, sigma_max, rho
        self.log_sigma, self.replay = log_sigma, is_named(network) if replay is None else replay
        own = encoder
        if own is None and self.context_shape is not None:
            encoder = Standardise(self.context_shape, contexts)
        settings = {"context_shape": self.context_shape, "width": width, "layers": layers}
        named = self._network(network, own, {**settings, "encoder": encoder, "seed": seed})
        self.field = EDMField(named, sigma_data)  # pyright: ignore
        if is_named(network):
            self.field.to(self.mean)
        self.field.stand(self.mean, self.scale)

    def _network(self, choice: FieldChoice, own: Encoder | None, settings: dict[str, Any]) -> VectorField:
        return field_for(choice, len(self.mean), own, **settings)

    # ---- learning

    def loss(self, x: Tensor, given: Tensor | None = None, *, rng: torch.Generator) -> Tensor:
        """𝔼 λ(σ) ‖D(y + σn; σ) − y‖² with λ = 1/c_out², EDM's (2) and (8): the mean over `(B, *event)`.

        It is least where D(y; σ) is the mean of the event given the event with noise y.
        """
        code, y = self._code(given, len(x)), self._white(x)[:, None]
        P_mean, P_std = self.log_sigma
        sigma = (P_mean + P_std * normal_like(y[..., 0], rng)).exp()
        noisy = y + sigma[..., None] * normal_like(y, rng)
        c_out = coefficients(sigma, self.sigma_data).out[..., None]
        error = (self.field.denoise(noisy, code, self.field.clock(sigma)) - y) / c_out
        return error.square().sum(-1).mean()

    def denoise(self, x: Tensor, sigma: float | Tensor, given: Tensor | None = None) -> Tensor:
        """D in the events' own units: x is `(B, *event)`, or `(B, K, *event)` for B contexts.

        Args:
            x: events with noise.
            sigma: its level, in units of the standardised events; one for all, or one for each row, `(B,)`.
            given: `(B, *context)`.
        """
        rows, _, code = self._rows(x, given, 0.0, "t")
        sigma = torch.as_tensor(sigma, dtype=rows.dtype, device=rows.device)
        require(bool((sigma > 0).all()), "sigma", "above 0", sigma.min().item())
        sigma = sigma[None] if given is None and sigma.dim() else sigma[:, None] if sigma.dim() else sigma
        return self._event(self.field.denoise(rows, code, self.field.clock(sigma))).view(x.shape)

    # ---- the ODE's time is σ

    def _grid(self, until: Tensor) -> Tensor:
        return noise_levels(super()._grid(until), self.sigma_min, self.sigma_max, self.rho)

    def _variable(self, times: Tensor) -> tuple[Tensor, Tensor]:
        u = times.pow(1 / self.rho)
        rate = self.rho * times / u
        return u, rate.view(-1, 1, 1) if rate.dim() == 1 else rate

    @property
    def _width(self) -> float:
        """Standard deviation of standardised events at the largest noise level."""
        return math.hypot(self.sigma_max, self.sigma_data)

    def _latent(self, count: int, n: int, rng: torch.Generator) -> Tensor:
        return self._width * super()._latent(count, n, rng)

    def _base(self, z: Tensor) -> Tensor:
        return super()._base(z / self._width) - len(self.mean) * math.log(self._width)


# ---- Diffusion-φ
