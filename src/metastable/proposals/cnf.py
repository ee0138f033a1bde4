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

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from metastable.core.batch import Rows, as_batch
from metastable.core.errors import InputError, require_count, require_positive
from metastable.core.random import Seed, derive, generator, normal_like
from metastable.core.times import checked_times

from .continuous import ContinuousFlow
from .encoders import Encoder, Standardise, learned_parameters, moments
from .interpolants import Interpolant, draw_times, interpolant_loss, interpolant_named
from .named_fields import FieldChoice, field_for, is_named
from .ode import coarse_nodes, heun_step, solve
from .tiles import Solution


class InterpolantFlow(ContinuousFlow):
    """The law at t = 1, or at any t before, of dx/dt = v_t(x, given) from x ~ N(0, I) at t = 0.

    The field is learned by `loss`, a regression (5.3) that solves no ODE. Draws solve the ODE with `steps`
    Heun steps. Their log-density is log N(z; 0, I) − ∫ div v dt (6.2), with the exact divergence at `scored`
    of the steps only and the trapezoidal rule between them: two time scales, Section 6. A new flow is the
    Gaussian with the moments of `data`.

    Args:
        event_shape: shape of one event, or its dimension.
        context_shape: shape of one context, or its dimension; None for a density without contexts.
        data: rows whose mean and standard deviation standardise events, `(n, *event)`, or a `Batch`, whose contexts
            are standardised, too, unless there is an encoder; kept in buffers.
        field: `concatsquash`, `residual`, `transformer`, `film`, a table of such a name and its settings, a
            `VectorField`, or any callable `v(x, given, t)` on standardised, flattened events (x `(…, d)`, t
            broadcasts against `(…)`, given against `(…, c)`).
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
        chunk: rows times dimensions that are in memory at once; by default what suits the device and the field.
        replay: whether training and policies on a GPU record the ODE, and the steps of an SDE with its velocity, as
            CUDA graphs, several times as fast for small flows, whose kernels run faster than they are launched; by
            default where the field is named. A field of your own must then look at no number and draw none.
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
        data: Rows | None = None,
        field: FieldChoice = "concatsquash",
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
        rows = None if data is None else as_batch(data)
        x, contexts = (None, None) if rows is None else (rows.x, rows.given)
        super().__init__(event_shape, context_shape, x, steps, scored, chunk)
        require_positive("flow.alpha", alpha)
        require_count("flow.times", times)
        require_positive("flow.crowding", crowding)
        self.interpolant, self.alpha, self.times = interpolant_named(interpolant), alpha, times
        self.crowding, self.replay = crowding, is_named(field) if replay is None else replay
        own = encoder
        self.standardises = own is None and self.context_shape is not None and is_named(field)
        if self.standardises:
            encoder = Standardise(self.context_shape or (), contexts)
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
        if is_named(field):
            self.field.to(self.mean)
        self.field.stand(self.mean, self.scale)

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
        data: Rows,
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
            data: `(n, *event)`, or a `Batch`, which brings its contexts.
            given: `(n, *context)`.
            steps: updates.
            batch: rows an update, drawn with replacement.
            learning_rate: at the start.
            seed: of the choice of rows, times and latents, or a generator.
        """
        require_count("steps", steps)
        require_count("batch", batch)
        require_positive("learning_rate", learning_rate)
        rows = as_batch(data)
        data, given = rows.x, given if rows.given is None else rows.given
        for buffer, value in zip((self.mean, self.scale), moments(self.event_shape, data), strict=True):
            buffer.copy_(value)
        self.field.stand(self.mean, self.scale)
        if self.standardises and given is not None:
            self.field.encoder.refit(given)  # pyright: ignore
        parameters = learned_parameters(self)
        optimiser = torch.optim.Adam(parameters, learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        rng = generator(derive(seed, "fit") if isinstance(seed, int) else seed, data.device)
        for _ in range(steps):
            some = torch.randint(len(data), (min(batch, len(data)),), generator=rng, device=data.device)
            optimiser.zero_grad(set_to_none=True)
            self.loss(data[some], None if given is None else given[some], rng=rng).backward()
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
        """`velocity` at one time of events `(B, K, *event)`, with the contexts encoded once."""
        code = self._code(given)

        def velocity(x: Tensor, t: float) -> Tensor:
            clock = self.field.clock(checked_times("t", t, self.mean))
            return (self.scale * self.field.velocity(self._white(x), code, clock)).view(x.shape)

        return velocity

    def velocities_given(self, given: Tensor) -> Callable[[Tensor], Iterator[Callable[[Tensor], Tensor]]]:
        """From times `(N,)` to the velocity at each, of events `(B, K, *event)`: for an SDE's steps.

        Contexts are encoded once, and what of contexts and times no event changes is computed at once.
        """
        code = self._code(given)

        def velocities(times: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
            for v in self.field.velocities(code, checked_times("times", times, self.mean)):
                yield lambda x, v=v: (self.scale * v(self._white(x))).view(x.shape)

        return velocities

    def score(self, x: Tensor, velocity: Tensor, t: float | Tensor) -> Tensor:
        """∇ log p_t of events, from their velocity at one time t in [0, 1): exact where the field is.

        With w = a z + b w₁ in standardised units the field is v = a′ 𝔼[z | w] + b′ 𝔼[w₁ | w], which is solved for
        𝔼[z | w]; and ∇ log p_t = −𝔼[z | w]/a.
        """
        t = torch.as_tensor(t, dtype=x.dtype, device=x.device)
        (a, b), (da, db) = self.interpolant.coefficients(t), self.interpolant.derivatives(t)
        w, v = self._white(x), velocity.view(*x.shape[: x.dim() - len(self.event_shape)], -1) / self.scale
        z = (b * v - db * w) / (b * da - a * db)
        return (-z / (a * self.scale)).view(x.shape)

    def noise_variance(self, t: float | Tensor) -> Tensor:
        """a(t)² in the events' own units: how much of the latents' variance is left at t, `(*event,)`."""
        t = torch.as_tensor(t, dtype=self.mean.dtype, device=self.mean.device)
        a, _ = self.interpolant.coefficients(t)
        return (a * self.scale).square().view(self.event_shape)

    @torch.no_grad()
    def trajectories(
        self, k: int, times: Tensor, rng: torch.Generator, given: Tensor | None = None, *, scored: bool = True
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
            scored: whether log-densities are wanted, which cost more than the draws; they are 0 otherwise.

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
        solver = self._along if scored else self._points_along
        x, log_prob = self._tiled(solver, z, code, rows[:, None], states=self.steps + 1)
        lead = (*times.shape, k)
        return self._event(x.reshape(*lead, len(self.mean))), log_prob.reshape(lead)

    def _grid(self, until: Tensor) -> Tensor:
        """t = until · (1 − (1 − i/N)^ρ), `(N + 1, *until)`."""
        left = torch.linspace(1, 0, self.steps + 1, dtype=self.mean.dtype, device=self.mean.device)
        share = 1 - left.pow(self.crowding)
        return share.view(-1, *[1] * until.dim()) * until

    def _points_along(self, z: Tensor, code: Tensor | None, times: Tensor, first: int) -> Solution:
        """`_along` without densities."""
        x = self._read_along(z, code, times[:, 0], first)[0]
        return x, x.new_zeros(x.shape[:-1])

    def _along(self, z: Tensor, code: Tensor | None, times: Tensor, first: int) -> Solution:
        """`_forwards` to every one of `times`, `(B, 1, m)`: `(B, m, K, d)` and `(B, m, K)`."""
        x, states, grid, place = self._read_along(z, code, times[:, 0], first)
        t, row = times[:, 0, :, None], torch.arange(len(times), device=z.device)[:, None]
        nodes = coarse_nodes(self.steps, self.scored, z.device)
        values, integral = self._integral(states[nodes], code, grid[nodes], first)
        last = torch.searchsorted(nodes.to(place), place, right=True) - 1
        end_value = self._divergences(x.transpose(0, 1), code, t.transpose(0, 1)).transpose(0, 1)
        rest = 0.5 * (t - grid[nodes[last], row]) * (values[last, row] + end_value)
        return x, self._base(z)[:, None] - integral[last, row] - rest  # (6.2)

    def _read_along(
        self, z: Tensor, code: Tensor | None, times: Tensor, first: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Trajectories at `times`, `(B, m)`; their states at the grid, that grid, and the place of times in it."""
        end, row = times.amax(1, keepdim=True), torch.arange(len(times), device=z.device)[:, None]
        grid = self._grid(end)
        states = solve(self.field, z, code, grid, None, first)
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
        return x, states, grid, place
