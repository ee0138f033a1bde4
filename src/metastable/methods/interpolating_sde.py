"""The SDE of Algorithm 4, (5.7), by Euler's rule: step by step, or some steps at once as a recorded CUDA graph.

S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies: ranking noise contrastive estimation and
interpolating energy models*, TMLR 2024. A step is a gradient of the energy and a velocity of the flow, hundreds of
small kernels. A recording has contexts, codes and times as inputs, so that one serves all calls of the same shapes,
and makes the steps that are made without it bit for bit.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.capture import Replays, aside, is_recording
from metastable.core.errors import InputError, require
from metastable.core.protocols import Flowing, provides
from metastable.core.random import normal_like
from metastable.core.types import Bound, energy_and_grad
from metastable.kernels import ULA, engine
from metastable.kernels.captured import NO_ROOM, REFUSALS, prove, prove_call, watched, worth
from metastable.kernels.compiled import CompiledGradient, Walk, compiler_gave_up
from metastable.kernels.watch import UnwatchedError, key_of
from metastable.proposals.cnf import InterpolantFlow

STRIDES = range(24, 15, -1)
"""Steps that one launch may have: what the flow makes of contexts and times is computed once for all of them."""
KEPT = 8
"""Recordings kept for one energy."""


class Recorded:
    """Recordings of one energy's steps, and the generator that they draw from on each device."""

    def __init__(self):
        self.replays = Replays(KEPT)
        self.rngs: dict[torch.device, torch.Generator] = {}

    def rng(self, device: torch.device) -> torch.Generator:
        """The one on a device, made when it is first asked for."""
        if device not in self.rngs:
            self.rngs[device] = torch.Generator(device)
        return self.rngs[device]

    def holds(self, key: Any) -> bool:
        """Whether there is a recording of what `_key` says."""
        return any(known[0][0] == key for known in self.replays.recordings)


_RECORDED: weakref.WeakKeyDictionary[nn.Module, Recorded] = weakref.WeakKeyDictionary()


def follow_sde(
    target: Bound,
    flow: Any,
    y: Tensor,
    rng: torch.Generator,
    *,
    t_low: float,
    steps: int,
    eta: float | Tensor,
    engine: str = "auto",
    stands: bool = False,
) -> Tensor:
    """(5.7): dy = [v̂_t(y) − η∇E(y | given, t)] dt + √(2η) dW from t̲ to 1, by Euler's rule; `(B, n, *event)`.

    With the exact field and energy the law at t is p^t for every η: what the noise spreads, the drift brings back.
    η is a number, or one for each context, `(B,)`. `engine` is as `run_chain` takes it: all but `eager` record on
    a GPU, and `compile` compiles gradients. With `stands` the target is the network of an energy on the flow:
    ∇ log p_ξ^t follows from the flow's velocity, and `eta` is η dt as a share of the variance that noise still has.
    """
    if not isinstance(eta, Tensor):
        require_eta(eta)
    dt = (1 - t_low) / max(steps, 1)
    each = eta.to(y).view(-1, *[1] * (y.dim() - 1)) if isinstance(eta, Tensor) else y.new_full((), eta)
    times = [t_low + k * dt for k in range(steps)]
    y, finite_for, done = _launched(target, flow, y.contiguous(), rng, times, dt, each, engine, stands)
    below = flow if stands else None
    table, velocities = torch.tensor(times, dtype=torch.float64).to(y), _velocities(flow, target.given)
    for k in range(done, steps, stride := stride_of(steps)):
        some = slice(k, k + stride)
        y, finite = euler(target, velocities(table[some]), y, rng, times[some], dt, each, False, below)
        finite_for = finite_for + finite
    _require_finite(finite_for, t_low, dt, steps, each)
    return y


def stride_of(steps: int) -> int:
    """Steps in one launch: a number that leaves none over, or else the largest; those left are one more launch.

    >>> [stride_of(steps) for steps in (549, 300, 101, 5)]
    [24, 20, 24, 24]
    """
    return next((n for n in STRIDES if steps % n == 0), STRIDES[0])


def euler(
    target: Bound,
    velocities: Iterable[Callable[[Tensor], Tensor]],
    y: Tensor,
    rng: torch.Generator,
    times: Sequence[float | Tensor],
    dt: float,
    eta: Tensor,
    compiled: bool = False,
    below: Any = None,
) -> tuple[Tensor, Tensor]:
    """A step at each of these times: where walkers are then, and in how many steps each was finite, `(B, n)`."""
    rate, noise, each, passed = eta, (2 * eta * dt).sqrt(), iter(velocities), []
    for t in times:
        energy = CompiledGradient(target.at(t)) if compiled else target.at(t)
        with aside(y.device) as join, torch.no_grad():  # neither asks for the other
            v = next(each)(y)
        grad = energy_and_grad(energy, y.flatten(0, 1)).grad.view(y.shape)
        join()
        with torch.no_grad():
            if below is not None:  # the flow that the energy stands on
                grad, h = grad - below.score(y, v, t), eta * below.noise_variance(t)
                rate, noise = h / dt, (2 * h).sqrt()
            drift = torch.addcmul(v, rate, grad, value=-1)
            y = torch.addcmul(y.add(drift, alpha=dt), noise, normal_like(y, rng))
            passed.append(y)
    return y, torch.stack(passed).isfinite().flatten(3).all(3).sum(0)


def _velocities(flow: Any, given: Tensor) -> Callable[[Tensor], Iterator[Callable[[Tensor], Tensor]]]:
    """From some times to the flow's velocity at each, with contexts encoded once where it can."""
    if isinstance(flow, InterpolantFlow) and type(flow).velocity_given is InterpolantFlow.velocity_given:
        return flow.velocities_given(given)
    one = flow.velocity_given(given) if provides(flow, Flowing) else lambda y, t: flow.velocity(y, t, given)
    return lambda times: (functools.partial(lambda y, t: one(y, t), t=t) for t in times.unbind())


def _launched(
    target: Bound,
    flow: Any,
    y: Tensor,
    rng: torch.Generator,
    times: Sequence[float],
    dt: float,
    eta: Tensor,
    asked: str,
    stands: bool,
) -> tuple[Tensor, Tensor, int]:
    """`euler` in launches of `stride_of` steps, and how many steps were made so: none where that cannot be."""
    at, finite_for = y, y.new_zeros(y.shape[:2], dtype=torch.long)
    key, compiled = _key(target, flow, y, len(times), asked), asked == "compile" and _compiles(target)
    if key is None:
        return y, finite_for, 0
    own = _RECORDED[target.energy]
    mine = own.rng(y.device)
    stretch = _stretch(target, flow, mine, dt, compiled, stands)
    table, held = torch.tensor(times, dtype=torch.float64).to(y), [x for x in target.parts() if x is not None]
    mine.set_state(rng.get_state())
    try:
        for k in range(0, len(times), stride := stride_of(len(times))):
            inputs = (at, eta, table[k : k + stride], *held)
            at, finite = own.replays(stretch, (key, dt, compiled, stands), *inputs, generators=(mine,))
            finite_for = finite_for + finite
    except Exception as error:
        why = _why(error, compiled)
        if why is None:
            raise
        lasting = not isinstance(error, NO_ROOM)
        engine.refuse(target, "compile" if compiled else "captured", why, remembered=lasting)
        if lasting and compiled:
            return _launched(target, flow, y, rng, times, dt, eta, asked, stands)
        return y, y.new_zeros(y.shape[:2], dtype=torch.long), 0
    rng.set_state(mine.get_state())
    return at, finite_for, len(times)


def _stretch(
    target: Bound, flow: Any, rng: torch.Generator, dt: float, compiled: bool, stands: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`euler` as a function of tensors alone, which keeps neither energy nor flow alive."""
    energy, field, there = (
        weakref.ref(target.energy),
        weakref.ref(flow),
        [x is not None for x in target.parts()],
    )

    def run(y: Tensor, eta: Tensor, times: Tensor, *held: Tensor) -> tuple[Tensor, Tensor]:
        left = iter(held)
        parts: list[Any] = [next(left) if known else None for known in there]
        bound = Bound(energy(), *parts)
        with torch.no_grad():
            velocities, below = _velocities(field(), bound.given)(times), field() if stands else None
            return euler(bound, velocities, y, rng, times.unbind(), dt, eta, compiled, below)

    return run


def _compiles(target: Bound) -> bool:
    return engine.refused(target, "compile") is None


def _why(error: Exception, compiled: bool) -> str | None:
    """Why steps could not be recorded or compiled; None for any other error."""
    if isinstance(error, REFUSALS):
        return str(error).splitlines()[0]
    return compiler_gave_up(error) if compiled else None


def _key(target: Bound, flow: Any, y: Tensor, steps: int, asked: str) -> Any:
    """What a recording depends on beside its inputs; None where there can be none, or it is not worth it."""
    able = (y.is_cuda or engine.STAND_IN) and asked != "eager"
    own = isinstance(flow, InterpolantFlow) and flow.replay and isinstance(target.energy, nn.Module)
    plain = all(part is None or isinstance(part, Tensor) for part in target.parts())
    if not able or not own or not plain or is_recording() or any(map(_refused, (target, flow))):
        return None
    if not worth(target, lambda: ("sde", y.shape, steps), steps, engine.LEAST):
        return None
    made, kernel, asking = _RECORDED.setdefault(target.energy, Recorded()), ULA(), target
    try:
        key = watched(target, y.device)
        asking = flow
        key = key, key_of(flow, y.device, "flow")
        if not made.holds(key):
            once = y.new_ones(1)
            prove_call(lambda: next(_velocities(flow, target.given)(once))(y), flow, y.device, "flow")
            asking = target
            walk = Walk.start(kernel.init(target, y.flatten(0, 1)), False)
            prove(kernel, target, walk, y.new_zeros(()))
            # a first call may have kept what it made
            key = watched(target, y.device, True), key_of(flow, y.device, "flow", True)
    except UnwatchedError as error:
        engine.refuse(asking, "captured", str(error))
        return None
    return key


def _refused(part: Any) -> bool:
    return engine.refused(part, "captured") is not None


def _require_finite(finite_for: Tensor, t_low: float, dt: float, steps: int, eta: Tensor) -> None:
    """Name the first context, and its time, that left every finite region."""
    if not bool((finite_for < steps).any()):
        return
    context, _ = (finite_for < steps).nonzero()[0].tolist()
    t = t_low + (1 + int(finite_for[context].min())) * dt
    used = float(eta.flatten()[context if eta.numel() > 1 else 0])
    raise InputError(
        f"eta: the SDE left every finite region at t = {t:.3g} for context {context} (counting from 0); try "
        f"more evaluations or a smaller eta than {used:g}"
    )


def require_eta(eta: float) -> None:
    """η is a finite number of at least 0."""
    number = isinstance(eta, (int, float)) and not isinstance(eta, bool)
    require(number and 0 <= eta < math.inf, "eta", "a finite number of at least 0", eta)
