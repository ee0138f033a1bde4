"""The law of an ODE's solution at any time on the way, as a density: draws, and log-densities by (6.2).

S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies: ranking noise contrastive
estimation and interpolating energy models*, TMLR 2024, Section 6 and Appendix A.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from metastable.core.errors import InputError, require_count
from metastable.core.random import normal_like
from metastable.core.times import checked_times
from metastable.core.types import as_shape
from metastable.core.waiting import may_look

from .encoders import lead_of, moments, require_contexts
from .fields import VectorField
from .flows import _standard_log_prob
from .ode import coarse_nodes, coarse_subset, divergences, require_finite, solve, trapezoid
from .replay import replayed
from .tiles import DEVICE_MEMORY, FAST_MEMORY, Solution, Solver, at_once, bytes_held, tiled


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
        chunk: rows times dimensions that are in memory at once; by default what suits the device and the field.
    """

    mean: Tensor
    scale: Tensor
    field: VectorField
    replay: bool = False
    fine: ClassVar[tuple[int, int]] = (128, 64)
    """Steps, and times with a divergence, from which on log-densities hardly depend on their number."""
    most: ClassVar[tuple[int, int]] = (FAST_MEMORY, DEVICE_MEMORY)
    """`chunk` at most by default, on a host and on a device."""

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
        self.fitting: dict[Hashable, int] = {}
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
        states = solve(self.field, z, code, self._grid(until), [self.steps], first)
        return states[-1], z.new_zeros(z.shape[:-1])

    def _forwards(self, z: Tensor, code: Tensor | None, until: Tensor, first: int) -> Solution:
        nodes, times = coarse_subset(self.steps, self.scored), self._grid(until)
        states = solve(self.field, z, code, times, nodes, first)
        integral = self._integral(states, code, self._scored(times), first)[1][-1]
        return states[-1], self._base(z) - integral  # (6.2)

    def _backwards(self, x: Tensor, code: Tensor | None, at: Tensor, first: int) -> Solution:
        nodes, times = coarse_subset(self.steps, self.scored), self._grid(at).flip(0)
        states = solve(self.field, x, code, times, nodes, first)
        integral = self._integral(states, code, self._scored(times), first)[1][-1]  # from t down to 0
        return states[-1], self._base(states[-1]) + integral

    def _scored(self, values: Tensor) -> Tensor:
        """Those of the N + 1 `values` at which there is a divergence."""
        return values[coarse_nodes(self.steps, self.scored, values.device)]

    def _integral(
        self, states: Tensor, code: Tensor | None, times: Tensor, first: int
    ) -> tuple[Tensor, Tensor]:
        """div v at the nodes, and its integral up to each of them, both `(L, B, K)`."""
        values = self._divergences(states, code, times)
        require_finite(values[..., None], times, "the divergence of its field", first)
        variable, rate = self._variable(times)
        values = values * rate
        return values, trapezoid(values, variable)

    def _divergences(self, states: Tensor, code: Tensor | None, times: Tensor) -> Tensor:
        """div v at `(L, B, K, d)`, in parts that fit into memory, `(L, B, K)`."""
        chunk = self._chunk(*_some(states[0], code, times), directions=True)
        return divergences(self.field, states, code, times, chunk)

    def _variable(self, times: Tensor) -> tuple[Tensor, Tensor | float]:
        """A variable s that the divergence is integrated in, and dt/ds, which broadcasts against `(L, B, K)`."""
        return times, 1.0

    def _latent(self, count: int, n: int, rng: torch.Generator) -> Tensor:
        """Where the ODE starts, `(count, n, d)`, distributed as `_base` says."""
        return normal_like(self.mean.expand(count, n, -1), rng)

    def _base(self, z: Tensor) -> Tensor:
        return _standard_log_prob(z) - self.scale.log().sum()

    def _chunk(self, x: Tensor, code: Tensor | None, t: Tensor, directions: bool = False) -> int:
        """Rows times dimensions at once, or as many rows in one direction each.

        By default a wide field has fewer, by what it holds for one row, which is measured once.
        """
        key = (directions, x.dtype, x.device)
        if self.chunk is not None or not x.numel():
            return self.chunk or 1
        if key not in self.fitting:
            ask = self.field.divergence if directions else self.field.velocity
            one = bytes_held(lambda: ask(x, code, self.field.clock(t))) // x.numel()
            self.fitting[key] = at_once(self.most[x.device.type != "cpu"], one, x.device)
        return self.fitting[key]

    def _tiled(self, solver: Solver, x: Tensor, code: Tensor | None, t: Tensor, states: int = 1) -> Solution:
        """`solver` on tiles; as recorded graphs where that is wanted, and no gradient and no look at numbers is."""
        chunk = self._chunk(*_some(x, code, t))
        looked_at = torch.is_grad_enabled() or torch.is_autocast_enabled() or may_look(x)
        if looked_at or not (self.replay and x.is_cuda):
            return tiled(solver, x, code, t, chunk, states)
        settings = (getattr(solver, "__name__", ""), self.steps, self.scored, getattr(self, "crowding", None))

        def recorded(x: Tensor, code: Tensor | None, t: Tensor, first: int) -> Solution:
            return replayed(self, solver, settings, x, code, t)

        return tiled(recorded, x, code, t, chunk, states)

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


def _some(x: Tensor, code: Tensor | None, t: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """One row of `(B, K, d)`, with its context and a time."""
    return x[:1, :1], None if code is None else code[:1], t.flatten()[:1].sum()
