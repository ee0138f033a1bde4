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
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from metastable.core.errors import InputError, require, require_positive
from metastable.core.plain import plain_layers
from metastable.core.random import normal_like
from metastable.core.types import Pairs, events

from .continuous import ContinuousFlow
from .encoders import Encoder, Standardise
from .fields import (
    ResidualField,
    VectorField,
    _silu_and_slope,
    field_for,
    require_encodable,
    require_no_encoder,
)

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
            any data; kept in buffers. With `Pairs`, contexts too, unless there is an encoder. Without it events are
            taken as they are.
        network: F: `residual`, `concatsquash`, a `VectorField`, or any callable `F(y, given, c_noise)` (y `(…, d)`,
            c_noise broadcasts against `(…)`, given against `(…, c)`).
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
        chunk: rows times dimensions that are in memory at once.
        seed: of the initial weights; nothing global is touched.

    >>> model = Diffusion(2, 3, width=8, layers=3, steps=16)
    >>> rng, given = torch.Generator().manual_seed(0), torch.zeros(5, 3)
    >>> x, log_prob = model.sample_and_log_prob(4, rng, given)
    >>> x.shape, log_prob.shape, model.log_prob(x[:, 0], given).shape
    (torch.Size([5, 4, 2]), torch.Size([5, 4]), torch.Size([5]))
    """

    field: EDMField  # pyright: ignore
    fine: ClassVar[tuple[int, int]] = (192, 33)

    def __init__(
        self,
        event_shape: int | Sequence[int],
        context_shape: int | Sequence[int] | None = None,
        *,
        data: Tensor | Pairs | None = None,
        network: str | VectorField | Callable[..., Tensor] = "residual",
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
        chunk: int = 2**18,
        seed: int = 0,
    ):
        rows = None if data is None else events(data)
        super().__init__(event_shape, context_shape, rows, steps, scored, chunk)
        require_positive("diffusion.sigma_data", sigma_data)
        require_positive("diffusion.sigma_min", sigma_min)
        require(sigma_max > sigma_min, "diffusion.sigma_max", f"above sigma_min = {sigma_min}", sigma_max)
        require_positive("diffusion.rho", rho)
        require_positive("diffusion.log_sigma.1", log_sigma[1])
        if data is not None:
            self.scale.div_(sigma_data)
        self.sigma_data, self.sigma_min, self.sigma_max, self.rho = sigma_data, sigma_min, sigma_max, rho
        self.log_sigma = log_sigma
        own = encoder
        if own is None and self.context_shape is not None:
            encoder = Standardise(self.context_shape, data.given if isinstance(data, Pairs) else None)
        settings = {"context_shape": self.context_shape, "width": width, "layers": layers}
        named = self._network(network, own, {**settings, "encoder": encoder, "seed": seed})
        self.field = EDMField(named, sigma_data)  # pyright: ignore
        if isinstance(network, str):
            self.field.to(self.mean)

    def _network(
        self,
        choice: str | VectorField | Callable[..., Tensor],
        own: Encoder | None,
        settings: dict[str, Any],
    ) -> VectorField:
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


class Potential(VectorField):
    """A field that is the gradient of a scalar: f(y) = ∇_y φ(y, x, t)."""

    def potential(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """φ, `(…)`."""
        raise NotImplementedError

    def velocity(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """∇φ, `(…, d)`."""
        with plain_layers():  # what is trained is a derivative: fused ones have no second one
            return torch.func.grad(lambda y: self.potential(y, code, clock).sum())(x)


class PlainPotential(Potential):
    """Any callable `φ(y, given, t)` to `(…)`: y `(…, d)`, t broadcasts against `(…)`, given against `(…, c)`.

    With an encoder as of `PlainField`.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        encoder: Encoder | None = None,
        context_shape: Sequence[int] | None = None,
    ):
        super().__init__()
        self.function, self.encoder = function, encoder
        if encoder is not None:
            require_encodable(encoder, context_shape)

    def encode(self, given: Tensor) -> Tensor:
        """`(B, *context)` to `(B, c)`."""
        return super().encode(given) if self.encoder is None else self.encoder(given)

    def potential(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """φ, `(…)`."""
        return self.function(x, code, clock)


class ResidualPotential(Potential, ResidualField):
    """φ by the dense layers of `ResidualField`, with one output; its gradient is written out, layer by layer."""

    def _build(self, dim: int, width: int, layers: int) -> None:
        super()._build(dim, width, layers)
        self.last = nn.Linear(width, 1, bias=False)  # φ + const has the same gradient
        nn.init.zeros_(self.last.weight)

    def potential(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """φ, `(…)`."""
        h = silu(self._entry(x, code, clock))
        for layer in self.inner:
            h = h + silu(layer(h))
        return self.last(h)[..., 0]

    def velocity(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """∇φ, `(…, d)`: one pass forwards and one back, with operations that can be differentiated once more."""
        h, entry_slope = _silu_and_slope(self._entry(x, code, clock))
        slopes = []
        for layer in self.inner:
            grown, slope = _silu_and_slope(layer(h))
            h = h + grown
            slopes.append(slope)
        back = self.last.weight[0].expand_as(h)
        for layer, slope in zip(reversed(self.inner), reversed(slopes), strict=True):
            back = back + linear(slope * back, layer.weight.T)  # pyright: ignore
        return linear(entry_slope * back, self.first.weight.T)

    def divergence(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """The Laplacian Δφ, `(…)`, by d Jacobian-vector products in one batch."""
        return VectorField.divergence(self, x, code, clock)


class DiffusionEnergy(Diffusion):
    """Diffusion-φ: the denoiser's network is the gradient of a scalar φ, so its score is that of an energy.

    Trained, sampled and normalised as `Diffusion`. Beside that it is an energy, of one network pass: −r at noise
    level σ_rel, with the relative log-likelihood (B.1)

        r(y) = (c_skip − 1) ‖y‖² / (2σ²) + c_out / (σ² c_in) · φ(c_in y; c_noise),

    which is log p(y; σ) up to a constant that depends on the context alone. Called with events and contexts it
    returns −r, which chains, estimators of log Z and `bind` take as any conditional energy.

    Args:
        potential: φ: `residual`, a `Potential`, or any callable `φ(y, given, c_noise)`.
        sigma_rel: σ of the energy, in units of the standardised events; the paper takes 0.01 to 0.03.
        settings: those of `Diffusion`, `network` aside.

    References:
        T. Salimans, J. Ho, *Should EBMs model the energy or the score?*, EBM workshop at ICLR 2021.

    >>> model = DiffusionEnergy(2, 3, width=8, layers=3)
    >>> model(torch.zeros(5, 48, 2), torch.zeros(5, 3)).shape  # 48 candidates for each of 5 contexts
    torch.Size([5, 48])
    """

    time: ClassVar[bool] = False
    """Its energy is that at σ_rel alone."""

    def __init__(
        self,
        event_shape: int | Sequence[int],
        context_shape: int | Sequence[int] | None = None,
        *,
        potential: str | Potential | Callable[..., Tensor] = "residual",
        sigma_rel: float = 0.02,
        **settings: Any,
    ):
        if "network" in settings:
            raise InputError("network: a Diffusion-φ has a scalar network, potential=…")
        super().__init__(event_shape, context_shape, network=potential, **settings)
        low, high = self.sigma_min, self.sigma_max
        require(low <= sigma_rel <= high, "diffusion.sigma_rel", f"within [{low}, {high}]", sigma_rel)
        self.sigma_rel = sigma_rel

    def _network(
        self,
        choice: str | VectorField | Callable[..., Tensor],
        own: Encoder | None,
        settings: dict[str, Any],
    ) -> VectorField:
        if isinstance(choice, str):
            require(choice == "residual", "diffusion.potential", "'residual', or a Potential", choice)
            return ResidualPotential(len(self.mean), **settings)
        if isinstance(choice, Potential):
            require_no_encoder(choice, own)
            return choice
        return PlainPotential(choice, own, self.context_shape)

    def encode(self, given: Tensor) -> Tensor:
        """What `score` needs of the contexts, `(B, 1, c)`."""
        code = self._code(given)
        assert code is not None
        return code

    def score(self, x: Tensor, code: Tensor | None, t: Tensor | None = None) -> Tensor:
        """−r for events `(B, K, *event)` of encoded contexts, `(B, K)`."""
        if t is not None:
            raise InputError("t: a Diffusion-φ has no time; its energy is that at sigma_rel")
        return -self._relative(self._white(x), code)

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        """−r: `(B, *event)` to `(B,)`, or `(B, K, *event)` for B contexts to `(B, K)`."""
        rows, _, code = self._rows(x, given, 0.0, "t")
        lead = x.shape[: x.dim() - len(self.event_shape)]
        return -self._relative(rows, code).view(lead)

    def _relative(self, y: Tensor, code: Tensor | None) -> Tensor:
        """(B.1) at σ_rel for standardised rows, `(B, K, d)` to `(B, K)`."""
        sigma = y.new_full((), self.sigma_rel)  # a copy from the host would wait for the device
        c = coefficients(sigma, self.sigma_data)
        network = self.field.network
        assert isinstance(network, Potential)
        phi = network.potential(c.inside * y, code, network.clock(c.noise))
        noise = (c.skip - 1) / (2 * sigma.square()) * y.square().sum(-1)
        return noise + c.out / (sigma.square() * c.inside) * phi
