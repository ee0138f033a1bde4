"""How chains run: eagerly, compiled, recorded as a CUDA graph, or as one fused kernel; and which it is to be.

`auto` takes the fastest that needs no compiler. On a GPU that is one fused kernel for chains of perceptrons, which
draws noise of its own, else steps recorded as they are, which make the eager chain's moves bit for bit. On the CPU
it is the eager steps themselves: a seed gives the numbers that it always gave. Compiled steps, recorded on a GPU,
too, round differently, take seconds to make, and are for those who ask for them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.utils._triton import has_triton

from metastable.core.capture import is_recording
from metastable.core.errors import require_choice
from metastable.core.precision import cast_once, products_are_tf32
from metastable.core.protocols import perceptron_of
from metastable.core.types import Energy, EnergyGrad, energy_and_grad

from . import fused
from .base import ChainResult, ChainState, Kernel
from .captured import (
    NO_ROOM,
    REFUSALS,
    UnwatchedError,
    known_of,
    loop_of,
    modes_of,
    stride_of,
    watched,
    worth,
)
from .compiled import CompiledGradient, Walk, compiled_for, compiler_gave_up, several, steps_per_call
from .ula import ULA
from .watch import reads

ENGINES = ("auto", "eager", "compile", "captured", "fused")
LEAST = 32
"""Gradients from which on `auto` records a chain: recording costs as much as some tens of eager steps."""
STAND_IN = False
"""Whether chains on the CPU may be `captured`, by calling the same function on the same memory: for tests."""

ON_THE_CPU = "compile: on the CPU a seed keeps its numbers; engine='compile' is faster where chains are long"

Advance = Callable[[Walk, int], Walk]
"""Moves chains by that many steps."""


class Choice(NamedTuple):
    """The engine that chains run with, and why it is not a faster one; `recorded` is for compiled steps.

    >>> print(Choice("eager", ("captured: the chains are on the CPU",)))
    eager (not captured: the chains are on the CPU)
    """

    engine: str
    reasons: tuple[str, ...] = ()
    recorded: bool = False

    def __str__(self) -> str:
        return self.engine + (f" (not {'; not '.join(self.reasons)})" if self.reasons else "")


def choose(kernel: Kernel, energy: Energy, x: Tensor, steps: int, asked: str = "auto") -> Choice:
    """The fastest engine for chains of `steps` steps from positions like `x`, where `asked` leaves a choice.

    An engine that cannot run falls back to the one before it. Whether a recording can be made is known for certain
    when the first one has been tried.
    """
    require_choice("engine", asked, ENGINES)
    if asked == "auto" and x.device.type == "cpu" and not STAND_IN:
        return Choice("eager", (ON_THE_CPU,))
    reasons: list[str] = []
    for engine in STAGES[asked]:
        why = WHY_NOT[engine](kernel, energy, x, steps, asked)
        if why is None and engine == "compile":
            why = why_not_captured(kernel, energy, x, steps, asked)
            return Choice(engine, () if why is None else (f"captured: {why}",), why is None)
        if why is None:
            return Choice(engine, tuple(reasons))
        reasons.append(f"{engine}: {why}")
    return Choice("eager", tuple(reasons))


def why_not_fused(kernel: Kernel, energy: Energy, x: Tensor, steps: int, asked: str) -> str | None:
    """Why one kernel cannot run whole chains, or need not."""
    if asked == "auto" and steps < LEAST:
        return f"a chain of {steps} steps is short; from {LEAST} steps on"
    if torch.is_autocast_enabled(x.device.type):
        return "products are rounded as autocast says, which one kernel does not"
    return fused.why_not(kernel, energy, x, precision=fused_precision()) or refused(energy, "fused")


def fused_precision() -> str:
    """As torch's own products have it."""
    return "tf32" if products_are_tf32() else "float32"


def why_not_captured(kernel: Kernel, energy: Energy, x: Tensor, steps: int, asked: str) -> str | None:
    """Why steps cannot be recorded, or need not be."""
    if x.device.type != "cuda" and not STAND_IN:
        here = "" if torch.cuda.is_available() else ", and this torch sees no CUDA device"
        return f"the chains are on {x.device}{here}"
    if is_recording() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return "the chain is recorded already, as a part of something larger"
    gradients = steps * max(1, kernel.gradients_per_step)
    kind = lambda: (reads(kernel, x.device, "kernel").key, x.shape, steps)  # noqa: E731
    if asked == "auto" and not worth(energy, kind, gradients, LEAST):
        return f"a chain of {steps} steps is done before it is recorded; from {LEAST} gradients on"
    try:
        known_of(energy), watched(energy, x.device), reads(kernel, x.device, "kernel")
    except UnwatchedError as error:
        return str(error)
    return refused(energy, "captured")


def why_not_compile(kernel: Kernel, energy: Energy, x: Tensor, steps: int, asked: str) -> str | None:
    """Why steps cannot be compiled."""
    if x.is_cuda and not has_triton():
        return "this torch has no Triton, which compiled functions need on a GPU"
    return refused(energy, "compile")


WHY_NOT = {"fused": why_not_fused, "captured": why_not_captured, "compile": why_not_compile}
STAGES = {
    "auto": ("fused", "captured"),
    "eager": (),
    "compile": ("compile", "captured"),
    "captured": ("captured",),
    "fused": ("fused", "captured"),
}
"""For each engine that can be asked for, those that are tried, before `eager`, which always runs."""


def _eager(
    kernel: Kernel, energy: Energy, h: Tensor, rng: torch.Generator, slopes: bool, walk: Walk, steps: int
) -> Walk:
    # a parametrised weight (spectral norm) is made once for the chain, and a rounded one; compilers see to it
    itself = isinstance(energy, CompiledEnergy)
    with nullcontext() if itself else parametrize.cached(), cast_once(walk.state.x.device):
        for _ in range(steps):
            walk = several(kernel, energy, walk, [kernel.draw(walk.state.x, rng, energy)], h, slopes)
    return walk


def _compiled(
    kernel: Kernel, energy: Energy, h: Tensor, rng: torch.Generator, slopes: bool, walk: Walk, steps: int
) -> Walk:
    """Several steps a call, then one by one; eagerly where the compiler gives up."""
    run, left, together = compiled_for(kernel), steps, steps_per_call(kernel)
    while left:
        noises = [kernel.draw(walk.state.x, rng, energy) for _ in range(together if left >= together else 1)]
        left -= len(noises)
        try:
            walk = run(kernel, energy, walk, noises, h, slopes)
        except Exception as error:
            if (why := compiler_gave_up(error)) is None:
                raise
            refuse(energy, "compile", why)
            walk = several(kernel, energy, walk, noises, h, slopes)
            return _eager(kernel, energy, h, rng, slopes, walk, left)
    return walk


def _recorded(
    stretch: int,
    compiled: bool,
    kernel: Kernel,
    energy: Energy,
    h: Tensor,
    rng: torch.Generator,
    slopes: bool,
    walk: Walk,
    steps: int,
) -> Walk:
    """Launches of some steps each, then what is left of them one by one; without recording where that cannot be."""
    count = stride_of(kernel, stretch, compiled)
    if steps < count:
        return _eager(kernel, energy, h, rng, slopes, walk, steps)
    try:
        loop = loop_of(kernel, energy, walk, h, slopes, count, compiled)
    except REFUSALS as error:
        why = str(error).splitlines()[0].removeprefix("could not be recorded as a CUDA graph: ")
        refuse(energy, "captured", why, remembered=not isinstance(error, NO_ROOM))
        return (_compiled if compiled else _eager)(kernel, energy, h, rng, slopes, walk, steps)
    except Exception as error:
        if not compiled or (why := compiler_gave_up(error)) is None:
            raise
        refuse(energy, "compile", why)
        return _recorded(stretch, False, kernel, energy, h, rng, slopes, walk, steps)
    walk = loop.run(energy, walk, h, rng, steps // count)
    return _eager(kernel, energy, h, rng, slopes, walk, steps % count)


def in_one_launch(
    kernel: Kernel, energy: Energy, x: Tensor, steps: int, rng: torch.Generator, **options: Any
) -> ChainResult | None:
    """`fused_chain` from `x`; None where Triton fails, which is said and remembered."""
    state = ChainState(x, x.new_empty(0), x.new_empty(0))
    try:
        return fused.fused_chain(kernel, energy, state, steps, rng, **options)
    except Exception as error:
        if not type(error).__module__.startswith("triton"):
            raise
        refuse(energy, "fused", f"{type(error).__name__}, {str(error).splitlines()[0]}")
        return None


class OneKernel:
    """An energy as the fused kernel computes it, in float32, always laid out alike: for weights."""

    def __init__(self, energy: Energy, x: Tensor, rng: torch.Generator):
        self.energy, self.rng = energy, rng
        self.plan = fused.plan_for(perceptron_of(energy), len(x), "float32", x.device)

    def value_and_grad(self, x: Tensor) -> EnergyGrad:
        """E and ∇E by a chain of no steps."""
        options = {"step_size": x.new_empty(()), "energies": True, "precision": "float32", "plan": self.plan}
        made = in_one_launch(ULA(), self.energy, x, 0, self.rng, **options)
        return energy_and_grad(self.energy, x) if made is None else EnergyGrad(*made.state[1:])

    def __call__(self, x: Tensor) -> Tensor:
        """E, `(B,)`."""
        return self.value_and_grad(x).energy

    def adjusted(
        self, kernel: Kernel, x: Tensor, steps: int, step_size: Tensor | None, **some: Any
    ) -> tuple[Tensor, ChainResult] | None:
        """E at `x`, and steps of MALA from there, or of `rows` `into` others; None where Triton fails."""
        first = x.new_empty(len(x))
        options = {"step_size": step_size, "precision": "float32", "plan": self.plan, "first": first, **some}
        made = in_one_launch(kernel, self.energy, x, steps, self.rng, **options)
        return None if made is None else (first, made)


class CompiledEnergy(CompiledGradient):
    """An energy whose values and gradients are one compiled function wherever they are asked for: for weights.

    Compiled code rounds as its neighbours let it, and weights are exact for a function that is computed in one way.
    """

    def value_and_grad(self, x: Tensor) -> EnergyGrad:
        """E and ∇E; eagerly where the compiler gave up."""
        if refused(self.energy, "compile") is None:
            try:
                return super().value_and_grad(x)
            except Exception as error:
                if (why := compiler_gave_up(error)) is None:
                    raise
                refuse(self.energy, "compile", why)
        return energy_and_grad(self.energy, x)


def weighing_energy(
    kernel: Kernel, energy: Energy, x: Tensor, rng: torch.Generator, engine: str
) -> Energy | OneKernel:
    """The energy that weights of walkers at `x` are made of: compiled, or by one kernel, where chains are so."""
    if engine == "compile" and kernel.gradients_per_step:
        return CompiledEnergy(energy) if why_not_compile(kernel, energy, x, 0, engine) is None else energy
    able = engine == "fused" and fused.why_not(kernel, energy, x, precision="float32") is None
    return OneKernel(energy, x, rng) if able and refused(energy, "fused") is None else energy


def _fused(
    kernel: Kernel, energy: Energy, h: Tensor, rng: torch.Generator, slopes: bool, walk: Walk, steps: int
) -> Walk:
    """All steps in one launch."""
    options = {"step_size": h, "slopes": slopes, "precision": fused_precision()}
    made = in_one_launch(kernel, energy, walk.state.x, steps, rng, **options)
    if made is None:
        return _recorded(steps, False, kernel, energy, h, rng, slopes, walk, steps)
    acceptance, moved = (total + steps * mean for total, mean in zip(walk[1:3], made.info[:2], strict=True))
    return Walk(
        made.state, acceptance, moved, walk.slope if made.slope is None else walk.slope + steps * made.slope
    )


def advance_by(
    choice: Choice,
    stretch: int,
    kernel: Kernel,
    energy: Energy,
    h: Tensor,
    rng: torch.Generator,
    slopes: bool,
) -> Advance:
    """The chosen engine as a function that moves chains, mostly by `stretch` steps at once."""
    own = {"eager": _eager, "compile": _compiled, "fused": _fused}.get(choice.engine)
    if choice.engine == "captured" or choice.recorded:
        own = functools.partial(_recorded, stretch, choice.recorded)
    assert own is not None
    return functools.partial(own, kernel, energy, h, rng, slopes)


DONE = {"compile": "compiled", "captured": "recorded as a CUDA graph", "fused": "run by one kernel"}
_said: set[str] = set()


def refuse(energy: Energy, engine: str, why: str, remembered: bool = True) -> None:
    """Remember that this energy cannot run so while its modules are in the modes of now, and say it."""
    with suppress(UnwatchedError):
        known_of(energy).refused.update({(engine, modes_of(energy)): why} if remembered else {})
    _said.add(f"{engine}: {why}")
    name = type(energy).__name__
    warnings.warn(f"engine: {name} cannot be {DONE[engine]}: {why}", RuntimeWarning, stacklevel=2)


def refused(energy: Energy, engine: str) -> str | None:
    """Why this energy could not run so before, if it was tried."""
    with suppress(UnwatchedError):
        return known_of(energy).refused.get((engine, modes_of(energy)))


def say_once(asked: str, choice: Choice) -> None:
    """Warn where an engine that was asked for by its name is not the one that runs."""
    new = [reason for reason in choice.reasons if reason not in _said]
    if new and asked not in ("auto", choice.engine) and not is_recording():
        _said.update(new)
        warnings.warn(f"engine: {asked!r} was asked for, and it is {choice}", RuntimeWarning, stacklevel=3)
