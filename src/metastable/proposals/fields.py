"""Vector fields v(x, given, t) of continuous normalising flows, with their exact divergence.

A field is asked 2N times along one trajectory. What does not change on the way is therefore computed once:
the context's part by `encode`, the time's part by `clock`. `velocity` takes both; `field(x, given, t)` is all
three.

| paper | here |
|---|---|
| y_t, the event on its way | `x`, flattened: `(…, d)` |
| x, the context | `given`, `(B, *context)`; `code` once encoded, which broadcasts against `(…, c)` |
| t | `t`, which broadcasts against `(…)`; `clock` once embedded |
| v_t(x, y) | `velocity(x, code, clock)`, `(…, d)` |
| div_y v_t(x, y) | `divergence(x, code, clock)`, `(…)` |
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap
from torch.nn.functional import linear, silu

from metastable.core.errors import InputError, require_count
from metastable.core.plain import plain_layers
from metastable.core.random import seeded

from .encoders import Encoder, width_of
from .interpolants import log_time

Velocity = Callable[[Tensor], Tensor]
"""A field at one time, of one context each: `(B, K, d)` to `(B, K, d)`."""
FOLDED = 2**24
"""Weights, of all times together, that are held at once."""


class VectorField(nn.Module):
    """A field whose context and time are prepared once; subclasses write `velocity`, and what they do better."""

    def encode(self, given: Tensor) -> Tensor:
        """What `velocity` needs of the contexts, `(B, *context)` to `(B, c)`."""
        return given.flatten(1)

    def clock(self, t: Tensor) -> Tensor:
        """What `velocity` needs of the times, any shape; further dimensions may follow that of `t`."""
        return t

    def stand(self, mean: Tensor, scale: Tensor) -> None:
        """Be told that x is (event − mean)/scale: for fields that hold events against contexts."""

    def velocity(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """v, of the shape of `x`, `(…, d)`."""
        raise NotImplementedError

    def velocities(self, code: Tensor | None, times: Tensor) -> Iterator[Velocity]:
        """v(·) at each of `times`, `(N,)`, or `(N, …)` where rows have times of their own: what a solver needs."""
        clocks = self.clock(times) if times.dim() == 1 else map(self.clock, times)
        return (functools.partial(self.velocity, code=code, clock=clock) for clock in clocks)

    def divergence(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """Σ_i ∂v_i/∂x_i exactly, `(…)`: d Jacobian-vector products in one batch."""
        basis = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)

        def along(direction: Tensor) -> Tensor:
            change = jvp(lambda y: self.velocity(y, code, clock), (x,), (direction.expand_as(x),))[1]
            return (change * direction).sum(-1)

        with plain_layers():  # fused ones have no derivative forwards
            return vmap(along)(basis).sum(0)

    def forward(self, x: Tensor, given: Tensor | None, t: Tensor | float) -> Tensor:
        """v(x, given, t): x `(B, d)` or `(B, K, d)`, given `(B, *context)` or None, t a number or like x's rows."""
        t = torch.as_tensor(t, dtype=x.dtype, device=x.device)
        code = None if given is None else self.encode(given)
        code = code[:, None] if code is not None and x.dim() == 3 else code
        return self.velocity(x, code, self.clock(t))


class PlainField(VectorField):
    """Any callable `v(x, given, t)` as a field: x `(…, d)`, t broadcasts against `(…)`, given against `(…, c)`.

    With an encoder, `given` is what that makes of a context, once for all its rows; a module is part of the field,
    and learns and is saved with it. Without one contexts are flattened.
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

    def velocity(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        return self.function(x, code, clock)


class _Network(VectorField):
    """What both networks share: where the context enters, and an encoder for it.

    Args:
        dim: d, of a flattened event.
        context_shape: of one context; None without.
        width: of the dense layers.
        layers: dense layers, the first and the last included; `usual_layers` by default.
        encoder: from `(B, *context)` to `(B, c)`, run once for each context; without one they are flattened.
            A module is part of the field and learns with it; any other callable is not.
        log_time: whether the layers see −log(1.1 − t) in the place of t.
        seed: of the initial weights; nothing global is touched.
    """

    usual_layers = 3

    def __init__(
        self,
        dim: int,
        context_shape: Sequence[int] | None = None,
        *,
        width: int = 64,
        layers: int | None = None,
        encoder: Encoder | None = None,
        log_time: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        require_count("field.dim", dim)
        require_count("field.width", width)
        layers = self.usual_layers if layers is None else layers
        require_count("field.layers", layers, 2)
        self.encoder, self.log_time = encoder, log_time
        self.context_shape = None if context_shape is None else tuple(context_shape)
        with seeded(seed):
            self._build(dim, width, layers)
            features = self._features()
            self.from_context = nn.Linear(features, width, bias=False) if features else None

    def _build(self, dim: int, width: int, layers: int) -> None:
        raise NotImplementedError

    def _time(self, t: Tensor) -> Tensor:
        """What the layers see of a time, `(…, 1)`."""
        return (log_time(t) if self.log_time else t)[..., None]

    def _features(self) -> int:
        """Length of an encoded context."""
        if self.context_shape is None:
            return 0
        if self.encoder is None:
            return math.prod(self.context_shape)
        return width_of(self.encoder, self.context_shape, torch.empty(0))

    def encode(self, given: Tensor) -> Tensor:
        """The context's share of the first layer, `(B, width)`."""
        if self.from_context is None:
            raise InputError("given: this field was built without contexts; set context_shape")
        return self.from_context(given.flatten(1) if self.encoder is None else self.encoder(given))


class ConcatSquash(_Network):
    """Dense layers gated and shifted by time: h ← silu((W h + w) · sigmoid(g t + c) + b t + e), no silu at the end.

    The layer of FFJORD, which the paper takes for proposals; the context joins the event before the first
    layer. The last layer starts at zero, so the flow as the identity.

    References:
        W. Grathwohl, R. T. Q. Chen, J. Bettencourt, I. Sutskever, D. Duvenaud, *FFJORD: free-form continuous
        dynamics for scalable reversible generative models*, ICLR 2019.

    >>> field = ConcatSquash(2, (3,), width=8)
    >>> field(torch.zeros(5, 4, 2), torch.zeros(5, 3), 0.5).shape
    torch.Size([5, 4, 2])
    """

    def _build(self, dim: int, width: int, layers: int) -> None:
        sizes = [dim, *[width] * (layers - 1), dim]
        self.widths = sizes[1:]
        self.dense = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(sizes))
        self.gate = nn.Linear(1, sum(self.widths))
        self.shift = nn.Linear(1, sum(self.widths))
        with torch.no_grad():
            for start in (*self.dense[-1].parameters(), self.shift.weight[-dim:], self.shift.bias[-dim:]):
                start.zero_()

    def clock(self, t: Tensor) -> Tensor:
        """Gates, then shifts, of all layers, `(…, 2 Σ widths)`."""
        t = self._time(t)
        return torch.cat([self.gate(t).sigmoid(), self.shift(t)], -1)

    def _layers(self, clock: Tensor) -> Iterator[tuple[nn.Linear, Tensor, Tensor]]:
        gates, shifts = (half.split(self.widths, -1) for half in clock.chunk(2, -1))
        return zip(self.dense, gates, shifts, strict=True)  # pyright: ignore

    def velocity(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """v, `(…, d)`."""
        *inner, (last, gate_out, shift_out) = self._layers(clock)
        for layer, gate, shift in inner:
            x = layer(x) if code is None else layer(x) + code
            x, code = silu(torch.addcmul(shift, x, gate)), None
        return torch.addcmul(shift_out, last(x), gate_out)

    def velocities(self, code: Tensor | None, times: Tensor) -> Iterator[Velocity]:
        """As of all fields; a time that all rows share is folded into the layers.

        Since (W h + w) g + s = (g W) h + (g w + s), a layer is one product, not a product, a gate and a shift.
        """
        if times.dim() != 1 or len(times) * sum(layer.weight.numel() for layer in self._dense) > FOLDED:
            return super().velocities(code, times)
        layers = list(self._layers(self.clock(times)))
        weights = [gate[..., None] * layer.weight for layer, gate, _ in layers]
        biases = [torch.addcmul(shift, gate, layer.bias) for layer, gate, shift in layers]
        entry_gate = None if code is None else layers[0][1]
        return (
            functools.partial(
                _folded,
                weights=[w[i] for w in weights],
                biases=[b[i] for b in biases],
                gate=None if entry_gate is None else entry_gate[i],
                code=code,
            )
            for i in range(len(times))
        )

    @property
    def _dense(self) -> list[nn.Linear]:
        return list(self.dense)  # pyright: ignore

    def divergence(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """Σ_i ∂v_i/∂x_i, `(…)`.

        With two or three layers, and a time that many rows share, the trace tr(W₃ D₂ W₂ D₁ W₁) is a form in
        the slopes D whose cost does not grow with the dimension. Otherwise the d directions of the Jacobian
        are carried through the layers, `(…, d, width)`.
        """
        *inner, (last, gate_out, _) = self._layers(clock)
        slopes = []
        for layer, gate, shift in inner:
            x = layer(x) if code is None else layer(x) + code
            x, slope = _silu_and_slope(torch.addcmul(shift, x, gate))
            slopes.append(slope * gate)
            code = None
        weights = [layer.weight for layer, _, _ in inner]
        if len(slopes) == 1:
            return ((slopes[0] @ (weights[0] * last.weight.T)) * gate_out).sum(-1)
        if len(slopes) == 2 and _shared_by(gate_out, x) >= max(2, x.shape[-1] // len(last.weight)):
            return _trace_of_three(weights[0], slopes[0], weights[1], slopes[1], last.weight, gate_out)
        change = None
        for weight, slope in zip(weights, slopes, strict=True):
            change = _carried(change, weight, slope)
        return _trace(change, last.weight, gate_out)  # pyright: ignore


class ResidualField(_Network):
    """Dense layers with residual connections, h ← h + silu(W h + w), after the paper's normalising flow (App. B.2).

    Time is embedded by two dense layers of width 10 and joins event and context before the first layer. The
    last layer starts at zero, so the flow as the identity.

    >>> field = ResidualField(2, (3,), width=8, layers=8)
    >>> field(torch.zeros(5, 2), torch.zeros(5, 3), 0.5).shape
    torch.Size([5, 2])
    """

    usual_layers = 8

    def _build(self, dim: int, width: int, layers: int) -> None:
        self.embed = nn.Sequential(
            nn.Linear(1, EMBEDDING), nn.SiLU(), nn.Linear(EMBEDDING, EMBEDDING), nn.SiLU()
        )
        self.from_time = nn.Linear(EMBEDDING, width, bias=False)
        self.first = nn.Linear(dim, width)
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(layers - 2))
        self.last = nn.Linear(width, dim)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def clock(self, t: Tensor) -> Tensor:
        """The time's share of the first layer, `(…, width)`."""
        return self.from_time(self.embed(self._time(t)))

    def _entry(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        return self.first(x) + (clock if code is None else clock + code)

    def velocity(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """v, `(…, d)`."""
        h = silu(self._entry(x, code, clock))
        for layer in self.inner:
            h = h + silu(layer(h))
        return self.last(h)

    def divergence(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """Σ_i ∂v_i/∂x_i, `(…)`: the d directions of the Jacobian are carried through the layers."""
        h, slope = _silu_and_slope(self._entry(x, code, clock))
        change = _carried(None, self.first.weight, slope)
        for layer in self.inner:
            grown, slope = _silu_and_slope(layer(h))
            h, change = h + grown, _grown(change, layer.weight, slope)  # pyright: ignore
        return _trace(change, self.last.weight)


EMBEDDING = 10
"""Width of the layers that embed a time."""


def _folded(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], gate: Tensor | None, code: Tensor | None
) -> Tensor:
    """Dense layers with silu between them; `gate` · `code` is added in the first."""
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = linear(x if i == 0 else silu(x), weight, bias)
        if i == 0 and code is not None:
            x = torch.addcmul(x, gate, code)  # pyright: ignore
    return x


def _silu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    share = x.sigmoid()
    return x * share, share * (1 + x * (1 - share))


def _carried(change: Tensor | None, weight: Tensor, slope: Tensor) -> Tensor:
    """∂h/∂x after one more layer, `(…, d, width)`; `change` is that before it, None at the first layer."""
    return slope[..., None, :] * (weight.T if change is None else linear(change, weight))


def _grown(change: Tensor, weight: Tensor, slope: Tensor) -> Tensor:
    """∂h/∂x after one more residual layer."""
    return torch.addcmul(change, slope[..., None, :], linear(change, weight))


def _trace(change: Tensor, weight: Tensor, gate: Tensor | None = None) -> Tensor:
    """Σ_i gate_i Σ_k W_ik ∂h_k/∂x_i: of the last layer only the diagonal is needed."""
    diagonal = torch.linalg.vecdot(change, weight)
    return (diagonal if gate is None else diagonal * gate).sum(-1)


def _shared_by(gate: Tensor, x: Tensor) -> int:
    """How many consecutive rows of `x`, `(…, k)`, have one and the same `gate`, `(…, d)`."""
    lead = (*[1] * (x.dim() - gate.dim()), *gate.shape[:-1])
    own = max((i + 1 for i, size in enumerate(lead) if size > 1), default=0)
    return math.prod(x.shape[own:-1]) if lead[:own] == tuple(x.shape[:own]) else 1


def _trace_of_three(
    first: Tensor, slope1: Tensor, second: Tensor, slope2: Tensor, third: Tensor, gate: Tensor
) -> Tensor:
    """Σ_jk D₂_j M_jk D₁_k with M_jk = W₂_jk Σ_i W₁_ki g_i W₃_ij: a matrix for each gate, a product for each row."""
    shared = _shared_by(gate, slope1)
    form = ((first * gate.reshape(-1, 1, gate.shape[-1])) @ third) * second.T  # (gates, k, j)
    rows = slope1.reshape(-1, shared, slope1.shape[-1])
    return torch.linalg.vecdot((rows @ form).view_as(slope2), slope2)


def require_no_encoder(field: VectorField, encoder: Encoder | None) -> None:
    """A `VectorField` encodes contexts by itself: an encoder beside it would never be called."""
    if encoder is not None:
        raise InputError(
            f"encoder: {type(field).__name__} is a VectorField, which encodes contexts by its own `encode`; call "
            "the encoder there, or give the field as a plain callable v(x, given, t)"
        )


def require_encodable(encoder: Encoder, context_shape: Sequence[int] | None) -> None:
    """Refuse an encoder where there are no contexts, and one that does not turn them into vectors."""
    if context_shape is None:
        raise InputError("encoder: a density without contexts has none; set context_shape")
    width_of(encoder, context_shape, torch.empty(0))
