"""Continuous normalising flows learned by stochastic interpolants: draws and densities at any time on the way.

S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies: ranking noise contrastive
estimation and interpolating energy models*, TMLR 2024, Sections 5.1, 5.2 and 6, Appendix A.

| paper | here |
|---|---|
| y, the event; x, the context | `x`, `(B, K, d)` inside; `given`, `(B, *context)` |
| z ~ N(0, I) | `z` |
| v_{t,ξ}(x, y) | `field`, a `VectorField` |
| p_ξ^t(y | x), the flow cut at t | `log_prob(x, given, at=t)`, `sample(n, rng, given, until=t)` |
| ode_ts, lp_ts (App. A) | `steps` Heun steps, of whose times `scored` have a divergence |
| ψ | log-density |
| {t_ij}, m | `times`, `(B, m)`, of `trajectories` |

Deviations: events are standardised by the data's mean and standard deviation where `data` is given, so that
the flow cut at t = 0 is the Gaussian with these moments and not N(0, I). The paper does not say where its
steps lie; here they crowd near the data (`crowding=1` spaces them evenly), so that the trapezoidal rule's
error does not grow as the data's modes get narrower.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import ClassVar, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from metastable.core.errors import InputError, require_count, require_positive
from metastable.core.random import Seed, derive, generator, normal_like
from metastable.core.times import checked_times
from metastable.core.types import Pairs, as_shape, events
from metastable.core.waiting import may_look

from .encoders import Encoder, Standardise, lead_of, learned_parameters, moments, require_contexts
from .fields import VectorField, Velocity, field_for
from .flows import _standard_log_prob
from .interpolants import Interpolant, draw_times, interpolant_loss, interpolant_named
from .replay import Replays

Solution = tuple[Tensor, Tensor]
"""States `(B, …, K, d)` and log-densities `(B, …, K)`."""
Solver = Callable[[Tensor, Tensor | None, Tensor, int], Solution]
LIGHT = 64
"""So many kept states of a row are as much to remember as that row in one layer of a network."""
FAST_MEMORY, DEVICE_MEMORY = 2**13, 2**22
"""Rows times dimensions at once, for layers of usual width: what a CPU's caches hold; else a gigabyte."""

_REPLAYS: WeakKeyDictionary[ContinuousFlow, Replays] = WeakKeyDictionary()
"""Recordings of a flow's ODE, beside it, since graphs can be neither copied nor saved."""

# ---- the equations


def heun(
    field: VectorField, x: Tensor, code: Tensor | None, times: Tensor, keep: Sequence[int] | None = None
) -> Tensor:
    """States of dx/dt = v_t(x), (5.2) and (6.1), by Heun's rule from `times[0]` through all of `times`.

    Args:
        field: v.
        x: where it starts, `(B, K, d)`.
        code: encoded contexts, `(B, 1, c)`.
        times: `(N + 1,)`, or `(N + 1, B, 1)` or `(N + 1, B, K)` where rows have times of their own; forwards or
            backwards.
        keep: which of the N + 1 states to return; all of them by default.

    Returns:
        `(len(keep), B, K, d)`.
    """
    keep = range(len(times)) if keep is None else keep
    lengths = times.diff(dim=0)[..., None]
    wanted, kept = set(keep), {0: x}
    for i, (here, after) in enumerate(itertools.pairwise(field.velocities(code, times))):
        x = heun_step(here, after, x, lengths[i])
        if i + 1 in wanted:
            kept[i + 1] = x
    return torch.stack([kept[i] for i in keep])


def heun_step(here: Velocity, after: Velocity, x: Tensor, length: Tensor) -> Tensor:
    """x + h/2 (v_t(x) + v_{t+h}(x + h v_t(x))), with v_t = `here` and v_{t+h} = `after`."""
    v = here(x)
    ahead = after(torch.addcmul(x, length, v))
    return torch.addcmul(x, length, v + ahead, value=0.5)


def coarse_subset(steps: int, count: int) -> list[int]:
    """`count` of the nodes 0 … `steps`, evenly spread, both ends among them; all of them if there are no more.

    >>> coarse_subset(10, 3)
    [0, 5, 10]
    """
    return list(range(steps + 1)) if count > steps else [round(i * steps / (count - 1)) for i in range(count)]


@cache
def coarse_nodes(steps: int, count: int, device: torch.device) -> Tensor:
    """`coarse_subset` on a device, copied there once and never dropped: recorded graphs read it where it lies."""
    return torch.tensor(coarse_subset(steps, count), device=device)


def divergences(field: VectorField, states: Tensor, code: Tensor | None, times: Tensor, chunk: int) -> Tensor:
    """div v at kept states, `(L, B, K, d)` to `(L, B, K)`, as many nodes at once as `chunk` directions allow."""
    aligned = times.view(*times.shape, 1, 1) if times.dim() == 1 else times
    at_once = max(1, chunk // max(1, states[0].numel()))
    parts = zip(states.split(at_once), aligned.split(at_once), strict=True)
    return torch.cat([field.divergence(x, code, field.clock(t)) for x, t in parts])


def trapezoid(values: Tensor, times: Tensor) -> Tensor:
    """∫ values dt up to each of the times, by the trapezoidal rule: `(L, B, K)`, zero at the first."""
    lengths = times.diff(dim=0)
    lengths = lengths.view(*lengths.shape, 1, 1) if times.dim() == 1 else lengths
    pieces = 0.5 * lengths * (values[1:] + values[:-1])
    return torch.cat([torch.zeros_like(values[:1]), pieces.cumsum(0)])


# ---- draws and densities


class ContinuousFlow(nn.Module):
    """The law at t = 1, or at any t before, of dx/dt = v_t(x, given) from Gaussian x at t = 0: draws and densities.

    What a flow learned by interpolants and a diffusion share. Subclasses bring the `field` and its loss, and
    override `_grid` where the ODE's time is not t, `_latent` and `_base` where it does not start from N(0, I),
    `_variable` where the divergence is smoother in another variable.

    Args:
        event_shape: shape of one event, or its dimension.
        context_shape: shape of one context, or its dimension; None for a density without contexts.
        data: rows whose mean and standard deviation standardise events, `(n, *event)`; kept in buffers.
        steps: N, Heun steps from 0 to the time asked for.
        scored: of the N + 1 times, how many have a divergence.
        chunk: rows times dimensions that are in memory at once; by default what suits the device.
    """

    mean: Tensor
    scale: Tensor
    field: VectorField
    replay: bool = False
    fine: ClassVar[tuple[int, int]] = (128, 64)
    """Steps, and times with a divergence, from which on log-densities hardly depend on their number."""

    def __init__(
        self,
        event_shape: int | Sequence[int],
        context_shape: int | Sequence[int] | None,
        data: Tensor | None,
        steps: int,
        scored: int,
        chunk: int | None,
    ):
        super().__init__()
        for name, value, least in (("steps", steps, 1), ("scored", scored, 2), ("chunk", chunk or 1, 1)):
            require_count(f"flow.{name}", value, least)
        self.event_shape = as_shape(event_shape)
        self.context_shape = None if context_shape is None else as_shape(context_shape)
        self.steps, self.scored, self.chunk = steps, scored, chunk
        mean, scale = moments(self.event_shape, data)
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def with_steps(self, steps: int, scored: int | None = None) -> Self:
        """The same flow, its weights shared, with another number of Heun steps (and of divergences)."""
        require_count("flow.steps", steps)
        require_count("flow.scored", self.scored if scored is None else scored, 2)
        other = copy.copy(self)
        other.steps, other.scored = steps, self.scored if scored is None else scored
        return other

    def finely(self) -> Self:
        """The same flow with at least `fine` steps and divergences, for numbers that rest on its log-densities.

        In training a coarse ODE will do. Importance weights average to Z only as far as `log_prob` is the density
        of the draws: with 16 steps and 9 divergences log Z of a mixture with standard deviations of 0.05 is off
        by 0.09, with `fine` ones by 0.002.
        """
        steps, scored = self.fine
        return self.with_steps(max(self.steps, steps), max(self.scored, scored))

    # ---- draws

    def rsample(
        self, n: int, rng: torch.Generator, given: Tensor | None = None, *, until: float | Tensor = 1.0
    ) -> Tensor:
        """The draws of `sample`, with gradients."""
        return self._draw(n, rng, given, until, scored=False)[0]

    @torch.no_grad()
    def sample(
        self, n: int, rng: torch.Generator, given: Tensor | None = None, *, until: float | Tensor = 1.0
    ) -> Tensor:
        """Draws of the flow cut at `until`: `(n, *event)`, or `(B, n, *event)` for B contexts.

        Args:
            n: draws, for each context.
            rng: of the latents.
            given: `(B, *context)`.
            until: t in [0, 1], or one for each context, `(B,)`.
        """
        return self._draw(n, rng, given, until, scored=False)[0]

    @torch.no_grad()
    def sample_and_log_prob(
        self, n: int, rng: torch.Generator, given: Tensor | None = None, *, until: float | Tensor = 1.0
    ) -> tuple[Tensor, Tensor]:
        """The draws of `sample` with their log-densities, `(n,)` or `(B, n)`, from one solution of the ODE."""
        return self._draw(n, rng, given, until, scored=True)

    def _draw(
        self, n: int, rng: torch.Generator, given: Tensor | None, until: float | Tensor, *, scored: bool
    ) -> tuple[Tensor, Tensor]:
        code, count = self._code(given), 1 if given is None else len(given)
        until = checked_times("until", until, self.mean)
        if until.dim() and tuple(until.shape) != (count,):
            raise InputError(
                f"until: must be a number or one for each context, got shape {tuple(until.shape)}"
            )
        until = until[:, None] if until.dim() else until
        z = self._latent(count, n, rng)
        x, log_prob = self._tiled(self._forwards if scored else self._end, z, code, until)
        lead = (n,) if given is None else (count, n)
        return self._event(x.view(*lead, len(self.mean))), log_prob.view(lead)

    # ---- densities

    def log_prob(self, x: Tensor, given: Tensor | None = None, *, at: float | Tensor = 1.0) -> Tensor:
        """Log-density of the flow cut at `at`, by the ODE backwards; differentiable in x and in the weights.

        Args:
            x: `(B, *event)`, or `(B, K, *event)` for B contexts.
            given: `(B, *context)`.
            at: t in [0, 1], one for each of the B rows, or one for each event, `(B, K)`.
        """
        rows, at, code = self._rows(x, given, at, "at")
        _, log_prob = self._tiled(self._backwards, rows, code, at)
        return log_prob.view(x.shape[: x.dim() - len(self.event_shape)])

    # ---- the ODE, on tiles `(B, K, d)` of standardised rows

    def _grid(self, until: Tensor) -> Tensor:
        """N + 1 times from 0 to `until`, `(N + 1, *until)`."""
        share = torch.linspace(0, 1, self.steps + 1, dtype=self.mean.dtype, device=self.mean.device)
        return share.view(-1, *[1] * until.dim()) * until

    def _end(self, z: Tensor, code: Tensor | None, until: Tensor, first: int) -> Solution:
        states = self._solve(z, code, self._grid(until), [self.steps], first)
        return states[-1], z.new_zeros(z.shape[:-1])

    def _forwards(self, z: Tensor, code: Tensor | None, until: Tensor, first: int) -> Solution:
        nodes, times = coarse_subset(self.steps, self.scored), self._grid(until)
        states = self._solve(z, code, times, nodes, first)
        integral = self._integral(states, code, self._scored(times), first)[1][-1]
        return states[-1], self._base(z) - integral  # (6.2)

    def _backwards(self, x: Tensor, code: Tensor | None, at: Tensor, first: int) -> Solution:
        nodes, times = coarse_subset(self.steps, self.scored), self._grid(at).flip(0)
        states = self._solve(x, code, times, nodes, first)
        integral = self._integral(states, code, self._scored(times), first)[1][-1]  # from t down to 0
        return states[-1], self._base(states[-1]) + integral

    def _scored(self, values: Tensor) -> Tensor:
        """Those of the N + 1 `values` at which there is a divergence."""
        return values[coarse_nodes(self.steps, self.scored, values.device)]

    def _solve(
        self, x: Tensor, code: Tensor | None, times: Tensor, keep: Sequence[int] | None, first: int
    ) -> Tensor:
        states = heun(self.field, x, code, times, keep)
        if may_look(states) and not bool(states[-1].isfinite().all()):
            with torch.no_grad():  # once more, with everything kept, to say where it began
                _require_finite(heun(self.field, x, code, times), times, "the flow", first)
        return states

    def _integral(
        self, states: Tensor, code: Tensor | None, times: Tensor, first: int
    ) -> tuple[Tensor, Tensor]:
        """div v at the nodes, and its integral up to each of them, both `(L, B, K)`."""
        values = divergences(
            self.field, states, code, times, self._chunk // 2
        )  # old and new in cache together
        _require_finite(values[..., None], times, "the divergence of its field", first)
        variable, rate = self._variable(times)
        values = values * rate
        return values, trapezoid(values, variable)

    def _variable(self, times: Tensor) -> tuple[Tensor, Tensor | float]:
        """A variable s that the divergence is integrated in, and dt/ds, which broadcasts against `(L, B, K)`."""
        return times, 1.0

    def _latent(self, count: int, n: int, rng: torch.Generator) -> Tensor:
        """Where the ODE starts, `(count, n, d)`, distributed as `_base` says."""
        return normal_like(self.mean.expand(count, n, -1), rng)

    def _base(self, z: Tensor) -> Tensor:
        return _standard_log_prob(z) - self.scale.log().sum()

    @property
    def _chunk(self) -> int:
        return self.chunk or (FAST_MEMORY if self.mean.device.type == "cpu" else DEVICE_MEMORY)

    def _tiled(self, solve: Solver, x: Tensor, code: Tensor | None, t: Tensor, kept: int = 1) -> Solution:
        """`solve` on tiles of rows, so that memory does not grow with their number; t is `()`, or begins with B."""
        limit = max(1, self._chunk * LIGHT // (max(kept, LIGHT) * x.shape[-1]))
        done = []
        for rows in _slices(x.shape[0], max(1, limit // max(1, x.shape[1]))):
            tiles = _slices(x.shape[1], limit)
            parts = [
                self._run(solve, x[rows, k], _of(code, rows), _times_of(t, rows, k), rows.start)
                for k in tiles
            ]
            done.append((torch.cat([p[0] for p in parts], -2), torch.cat([p[1] for p in parts], -1)))
        return torch.cat([p[0] for p in done]), torch.cat([p[1] for p in done])

    def _run(self, solve: Solver, x: Tensor, code: Tensor | None, t: Tensor, first: int) -> Solution:
        """`solve`; as a recorded graph where that is wanted, and no gradient and no look at numbers is."""
        plain = torch.is_grad_enabled() or torch.is_autocast_enabled() or may_look(x)
        if plain or not (self.replay and x.is_cuda):
            return solve(x, code, t, first)
        name = getattr(solve, "__name__", "")
        places = tuple(kept.data_ptr() for kept in (*self.parameters(), *self.buffers()))
        key = (name, self.steps, self.scored, getattr(self, "crowding", None), places)
        replays = _REPLAYS.setdefault(self, Replays())
        if code is None:
            return replays(lambda x, t: solve(x, None, t, 0), key, x, t)  # pyright: ignore
        return replays(lambda x, t, code: solve(x, code, t, 0), key, x, t, code)  # pyright: ignore

    # ---- shapes

    def _white(self, x: Tensor) -> Tensor:
        lead = lead_of(x, self.event_shape)
        return (x.reshape(*lead, len(self.mean)) - self.mean) / self.scale

    def _code(self, given: Tensor | None, rows: int | None = None) -> Tensor | None:
        """Contexts, encoded once: `(B, 1, c)`."""
        count = 0 if given is None else len(given)
        require_contexts(given, self.context_shape, count if rows is None else rows, "this flow")
        if given is None:
            return None
        return self.field.encode(given)[:, None]

    def _rows(
        self, x: Tensor, given: Tensor | None, t: float | Tensor, name: str
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Events as standardised `(B, K, d)`, their times as `()`, `(B, 1)` or `(B, K)`, and encoded contexts."""
        white = self._white(x)
        lead = tuple(white.shape[:-1])
        if len(lead) > 2 or (len(lead) == 2 and given is None and self.context_shape is None):
            kinds = "(B, *event)" if given is None else "(B, *event) or (B, K, *event)"
            raise InputError(f"x: must have shape {kinds}, got {tuple(x.shape)}")
        code = self._code(given, len(white))
        t = checked_times(name, t, white)
        if tuple(t.shape) not in {(), lead[:1], lead}:
            raise InputError(f"{name}: must be a number or one for each row of x, got shape {tuple(t.shape)}")
        if given is None:
            return white[None], t if t.dim() == 0 else t[None], None
        white = white[:, None] if len(lead) == 1 else white
        return white, t[:, None] if t.dim() == 1 else t, code

    def _event(self, white: Tensor) -> Tensor:
        return (self.mean + self.scale * white).view(*white.shape[:-1], *self.event_shape)


class InterpolantFlow(ContinuousFlow):
    """The law at t = 1, or at any t before, of dx/dt = v_t(x, given) from x ~ N(0, I) at t = 0.

    The field is learned by `loss`, a regression (5.3) that solves no ODE. Draws solve the ODE with `steps`
    Heun steps. Their log-density is log N(z; 0, I) − ∫ div v dt (6.2), with the exact divergence at `scored`
    of the steps only and the trapezoidal rule between them: two time scales, Section 6. A new flow is the
    Gaussian with the moments of `data`.

    Args:
        event_shape: shape of one event, or its dimension.
        context_shape: shape of one context, or its dimension; None for a density without contexts.
        data: rows whose mean and standard deviation standardise events, `(n, *event)`, or `Pairs`, whose contexts
            are standardised, too, unless there is an encoder; kept in buffers.
        field: `concatsquash`, `residual`, a `VectorField`, or any callable `v(x, given, t)` on standardised,
            flattened events (x `(…, d)`, t broadcasts against `(…)`, given against `(…, c)`).
        width: of a named field's layers.
        layers: of a named field, the first and the last included; 3 for `concatsquash`, 8 for `residual`.
        encoder: from contexts `(B, *context)` to codes `(B, c)`; run once for each context. A module is part of the
            flow. For a named field contexts are standardised by default, by `data` and by those of `fit`; a
            callable is given the codes, or flattened contexts without an encoder; a `VectorField` has its own
            `encode`.
        log_time: whether a named field sees −log(1.1 − t) in the place of t, as the paper's flows beside
            interpolating energies do.
        interpolant: `trigonometric`, `linear` or an `Interpolant`.
        alpha: of the law of the times in the loss, t = u^{1/α}.
        times: m, the times drawn for each datum in the loss.
        steps: N, Heun steps from 0 to the time asked for.
        scored: of the N + 1 times, how many have a divergence.
        crowding: ρ; times are t = 1 − (1 − i/N)^ρ, closer to each other near the data where ρ > 1.
        chunk: rows times dimensions that are in memory at once; by default what suits the device.
        replay: whether training on a GPU records the ODE as a CUDA graph, several times as fast for small flows,
            whose kernels run faster than they are launched; by default where the field is named. A field of your
            own must then look at no number and draw none.
        seed: of the initial weights; nothing global is touched.

    References:
        M. S. Albergo, E. Vanden-Eijnden, *Building normalizing flows with stochastic interpolants*, ICLR 2023.

    >>> flow = InterpolantFlow(2, 3, width=8)
    >>> rng, given = torch.Generator().manual_seed(0), torch.zeros(5, 3)
    >>> x, log_prob = flow.sample_and_log_prob(4, rng, given)
    >>> x.shape, log_prob.shape, flow.log_prob(x[:, 0], given, at=0.5).shape
    (torch.Size([5, 4, 2]), torch.Size([5, 4]), torch.Size([5]))
    """

    def __init__(
        self,
        event_shape: int | Sequence[int],
        context_shape: int | Sequence[int] | None = None,
        *,
        data: Tensor | Pairs | None = None,
        field: str | VectorField | Callable[..., Tensor] = "concatsquash",
        width: int = 64,
        layers: int | None = None,
        encoder: Encoder | None = None,
        log_time: bool = False,
        interpolant: str | Interpolant = "trigonometric",
        alpha: float = 2.0,
        times: int = 1,
        steps: int = 200,
        scored: int = 64,
        crowding: float = 2.0,
        chunk: int | None = None,
        replay: bool | None = None,
        seed: int = 0,
    ):
        super().__init__(
            event_shape, context_shape, None if data is None else events(data), steps, scored, chunk
        )
        require_positive("flow.alpha", alpha)
        require_count("flow.times", times)
        require_positive("flow.crowding", crowding)
        self.interpolant, self.alpha, self.times = interpolant_named(interpolant), alpha, times
        self.crowding, self.replay = crowding, isinstance(field, str) if replay is None else replay
        own = encoder
        self.standardises = own is None and self.context_shape is not None and isinstance(field, str)
        if self.standardises:
            encoder = Standardise(self.context_shape or (), data.given if isinstance(data, Pairs) else None)
        depth = {} if layers is None else {"layers": layers}
        settings = {
            "context_shape": self.context_shape,
            "width": width,
            "encoder": encoder,
            "log_time": log_time,
            "seed": seed,
            **depth,
        }
        self.field = field_for(field, len(self.mean), own, **settings)
        if isinstance(field, str):
            self.field.to(self.mean)

    # ---- learning

    def draw_times(self, shape: Sequence[int], rng: torch.Generator) -> Tensor:
        """Times from the flow's law Λ, t = u^{1/α}, of any shape."""
        return draw_times(shape, self.alpha, rng, self.mean)

    def interpolate(self, x: Tensor, times: Tensor, rng: torch.Generator) -> Tensor:
        """I_t(z, x) at m times for each datum, z ~ N(0, I): x `(B, *event)`, times `(B, m)` to `(B, m, *event)`.

        What the flow cut at these times has learned to draw: the positives of Algorithm 3.
        """
        times = checked_times("times", times, self.mean)
        y = self._white(x)[:, None].expand(*times.shape, -1)
        return self._event(self.interpolant.point(normal_like(y, rng), y, times))

    def loss(self, x: Tensor, given: Tensor | None = None, *, rng: torch.Generator) -> Tensor:
        """(5.3), the mean over data, `(B, *event)`, and over m times and latents for each of them."""
        code = self._code(given, len(x))
        t = self.draw_times((len(x), self.times), rng)
        y = self._white(x)[:, None].expand(*t.shape, -1)

        def velocity(point: Tensor, t: Tensor) -> Tensor:
            return self.field.velocity(point, code, self.field.clock(t))

        return interpolant_loss(velocity, self.interpolant, y, normal_like(y, rng), t).mean()

    def fit(
        self,
        data: Tensor | Pairs,
        given: Tensor | None = None,
        *,
        steps: int = 2000,
        batch: int = 512,
        learning_rate: float = 5e-3,
        seed: Seed = 0,
    ) -> InterpolantFlow:
        """Minimise `loss` on `data`, in place, by Adam with a cosine schedule; standardises anew.

        Events are standardised by `data`, and contexts that no encoder takes by theirs. Parameters that are frozen
        (`requires_grad_(False)`), such as those of an encoder learned elsewhere, stay as they are.

        Args:
            data: `(n, *event)`, or `Pairs`, which bring their contexts.
            given: `(n, *context)`.
            steps: updates.
            batch: rows an update, drawn with replacement.
            learning_rate: at the start.
            seed: of the choice of rows, times and latents, or a generator.
        """
        require_count("steps", steps)
        require_count("batch", batch)
        require_positive("learning_rate", learning_rate)
        given, data = (data.given, data.x) if isinstance(data, Pairs) else (given, data)
        for buffer, value in zip((self.mean, self.scale), moments(self.event_shape, data), strict=True):
            buffer.copy_(value)
        if self.standardises and given is not None:
            self.field.encoder.refit(given)  # pyright: ignore
        parameters = learned_parameters(self)
        optimiser = torch.optim.Adam(parameters, learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        rng = generator(derive(seed, "fit") if isinstance(seed, int) else seed, data.device)
        for _ in range(steps):
            rows = torch.randint(len(data), (min(batch, len(data)),), generator=rng, device=data.device)
            optimiser.zero_grad(set_to_none=True)
            self.loss(data[rows], None if given is None else given[rows], rng=rng).backward()
            optimiser.step()
            schedule.step()
        for parameter in parameters:
            parameter.grad = None
        return self

    def velocity(self, x: Tensor, t: float | Tensor, given: Tensor | None = None) -> Tensor:
        """dx/dt in the events' own units, `(B, *event)`, or `(B, K, *event)` for B contexts; t as in `log_prob`."""
        rows, t, code = self._rows(x, given, t, "t")
        return (self.scale * self.field.velocity(rows, code, self.field.clock(t))).view(x.shape)

    def velocity_given(self, given: Tensor) -> Callable[[Tensor, float], Tensor]:
        """`velocity` at one time of events `(B, K, *event)`, with the contexts encoded once: for an SDE's steps."""
        code = self._code(given)

        def velocity(x: Tensor, t: float) -> Tensor:
            clock = self.field.clock(checked_times("t", t, self.mean))
            return (self.scale * self.field.velocity(self._white(x), code, clock)).view(x.shape)

        return velocity

    @torch.no_grad()
    def trajectories(
        self, k: int, times: Tensor, rng: torch.Generator, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One set of k trajectories, read at m times (Remark 5.1): draws and log-densities of the flow cut at each.

        Rows at different times of one context lie on the same trajectories, so they are dependent; at one
        time they are k independent draws. The steps of a row reach to the largest of its times; a time
        between two of them is reached by one more step, of the length that is left.

        Args:
            k: trajectories, for each context.
            times: `(m,)`, or `(B, m)` for B contexts, in any order.
            rng: of the latents.
            given: `(B, *context)`.

        Returns:
            Draws `(m, k, *event)` and log-densities `(m, k)`; `(B, m, k, *event)` and `(B, m, k)` for contexts.
        """
        code, count = self._code(given), 1 if given is None else len(given)
        times = checked_times("times", times, self.mean)
        rows = times[None] if given is None else times
        if rows.dim() != 2 or len(rows) != count:
            shape = "(m,)" if given is None else f"({count}, m)"
            raise InputError(f"times: must have shape {shape}, got {tuple(times.shape)}")
        z = normal_like(self.mean.expand(count, k, -1), rng)
        x, log_prob = self._tiled(self._along, z, code, rows[:, None], kept=self.steps + 1)
        lead = (*times.shape, k)
        return self._event(x.reshape(*lead, len(self.mean))), log_prob.reshape(lead)

    def _grid(self, until: Tensor) -> Tensor:
        """t = until · (1 − (1 − i/N)^ρ), `(N + 1, *until)`."""
        left = torch.linspace(1, 0, self.steps + 1, dtype=self.mean.dtype, device=self.mean.device)
        share = 1 - left.pow(self.crowding)
        return share.view(-1, *[1] * until.dim()) * until

    def _along(self, z: Tensor, code: Tensor | None, times: Tensor, first: int) -> Solution:
        """`_forwards` to every one of `times`, `(B, 1, m)`: `(B, m, K, d)` and `(B, m, K)`."""
        times = times[:, 0]
        end, row = times.amax(1, keepdim=True), torch.arange(len(times), device=z.device)[:, None]
        grid = self._grid(end)
        states = self._solve(z, code, grid, None, first)
        left = 1 - torch.where(end > 0, times / end, 1.0)
        place = self.steps * (1 - left.pow(1 / self.crowding))  # in steps, `(B, m)`
        code_m, t = None if code is None else code[:, None], times[..., None]
        clock = self.field.clock(t)

        before = place.long().clamp(max=self.steps - 1)
        start = grid[before, row]
        here, after = (
            partial(self.field.velocity, code=code_m, clock=c) for c in (self.field.clock(start), clock)
        )
        x = heun_step(here, after, states[before, row], (t - start)[..., None])

        nodes = coarse_nodes(self.steps, self.scored, z.device)
        values, integral = self._integral(states[nodes], code, grid[nodes], first)
        last = torch.searchsorted(nodes.to(place), place, right=True) - 1
        end_value = self.field.divergence(x, code_m, clock)
        rest = 0.5 * (t - grid[nodes[last], row]) * (values[last, row] + end_value)
        return x, self._base(z)[:, None] - integral[last, row] - rest  # (6.2)


def _require_finite(values: Tensor, times: Tensor, what: str, first: int) -> None:
    """Name the time and the context where `values`, `(L, B, K, d)`, are not finite for the first time."""
    if not may_look(values):
        return
    bad = ~values.isfinite().all(-1)
    if not bool(bad.any()):
        return
    node, row, draw = (int(i) for i in bad.nonzero()[0])
    t = float(times[node].expand(bad.shape[1:])[row, draw])
    raise InputError(
        f"{what} is not finite at t = {t:.4g}, first in context {first + row}, row {draw}; look for such values "
        "in the contexts and the weights, lower the learning rate, or raise steps"
    )


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, max(1, count), size)]


def _of(code: Tensor | None, rows: slice) -> Tensor | None:
    return None if code is None else code[rows]


def _times_of(t: Tensor, rows: slice, draws: slice) -> Tensor:
    """Times of a tile: `()`, `(B, 1)` and, of trajectories, `(B, 1, m)` are a context's; `(B, K)` an event's."""
    if t.dim() == 0:
        return t
    return t[rows, draws] if t.dim() == 2 and t.shape[1] > 1 else t[rows]
