"""Diffusion-φ: a diffusion whose field is the gradient of a potential, which is an energy too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from metastable.core.errors import InputError, require
from metastable.core.plain import plain_layers
from metastable.core.types import transforms_are_active, values_and_grad

from .diffusion import Diffusion, coefficients
from .encoders import Encoder
from .fields import PlainField, ResidualField, VectorField, _silu_and_slope, require_no_encoder
from .named_fields import FieldChoice, named_field
from .transformer import TransformerField


class Potential(VectorField):
    """A field that is the gradient of a scalar: f(y) = ∇_y φ(y, x, t)."""

    def potential(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """φ, `(…)`."""
        raise NotImplementedError

    def velocity(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """∇φ, `(…, d)`."""
        if torch.is_inference_mode_enabled():  # in which nothing has a gradient
            with torch.inference_mode(False), torch.no_grad():
                return self.velocity(x.clone(), None if code is None else code.clone(), clock.clone())
        again = torch.is_grad_enabled() or transforms_are_active()  # it may be differentiated once more
        if not (again or torch.compiler.is_compiling()):
            _, grad = values_and_grad(lambda y: self.potential(y, code, clock), x)
            return grad  # by fused layers and kernels
        with plain_layers():  # what is trained is a derivative: fused ones have no second one
            return torch.func.grad(lambda y: self.potential(y, code, clock).sum())(x)


class PlainPotential(Potential, PlainField):
    """Any callable `φ(y, given, t)` to `(…)`: y `(…, d)`, t broadcasts against `(…)`, given against `(…, c)`.

    With an encoder as of `PlainField`.
    """

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


class TransformerPotential(Potential, TransformerField):
    """φ by the transformer of `TransformerField`, with one output: the network of `energies.TransformerEnergy`."""

    outputs = 1

    def potential(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """φ, `(…)`."""
        return self.body(x, code, clock)[..., 0]


POTENTIALS: dict[str, type[VectorField]] = {
    "residual": ResidualPotential,
    "transformer": TransformerPotential,
}


class DiffusionEnergy(Diffusion):
    """Diffusion-φ: the denoiser's network is the gradient of a scalar φ, so its score is that of an energy.

    Trained, sampled and normalised as `Diffusion`. Beside that it is an energy, of one network pass: −r at noise
    level σ_rel, with the relative log-likelihood (B.1)

        r(y) = (c_skip − 1) ‖y‖² / (2σ²) + c_out / (σ² c_in) · φ(c_in y; c_noise),

    which is log p(y; σ) up to a constant that depends on the context alone. Called with events and contexts it
    returns −r, which chains, estimators of log Z and `bind` take as any conditional energy.

    Args:
        potential: φ: `residual`, `transformer`, a table of such a name and its settings, a `Potential`, or any
            callable `φ(y, given, c_noise)`.
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
        potential: FieldChoice = "residual",
        sigma_rel: float = 0.02,
        **settings: Any,
    ):
        if "network" in settings:
            raise InputError("network: a Diffusion-φ has a scalar network, potential=…")
        super().__init__(event_shape, context_shape, network=potential, **settings)
        low, high = self.sigma_min, self.sigma_max
        require(low <= sigma_rel <= high, "diffusion.sigma_rel", f"within [{low}, {high}]", sigma_rel)
        self.sigma_rel = sigma_rel

    def _network(self, choice: FieldChoice, own: Encoder | None, settings: dict[str, Any]) -> VectorField:
        if isinstance(choice, (str, Mapping)):
            return named_field(choice, POTENTIALS, "diffusion.potential", len(self.mean), settings)
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
