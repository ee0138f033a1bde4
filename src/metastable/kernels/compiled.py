"""Several steps of chains as one function of tensors, and the same function through `torch.compile`."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.types import Energy, EnergyGrad, energy_and_grad, row_dot

from .base import ChainState, Kernel, Noise
from .fusion import fused

UNROLL = 8
"""Gradients in one compiled call: enough to hide the call, few enough to compile in seconds."""
MOST_UNROLLED = 32
"""Gradients of one step from which on gradients are compiled alone: steps of more would take minutes."""
VARIANTS = 256
"""Kernels × energies × batch shapes that one process may compile; torch's own limit of 8 is an error here."""

LIMITS = (
    ("recompile_limit", "cache_size_limit"),
    ("accumulated_recompile_limit", "accumulated_cache_size_limit"),
)
"""The compiler's limits by the names they have had, the newer first: of one piece of code, and of its frames."""
LIMIT_ERRORS = ("FailOnRecompileLimitHit", "FailOnCacheLimitHit")
"""What passing them raises, which is no error of the compiler's own family."""


class Walk(NamedTuple):
    """Where chains are, and what their steps add up to.

    Attributes:
        state: the chains.
        acceptance: sum of the steps' acceptance probabilities, `(B,)`.
        moved: sum of the squared distances, `(B,)`.
        slope: sum of ‖∇E‖ where the steps began, `(B,)`; zero, `()`, where nobody asked.
    """

    state: ChainState
    acceptance: Tensor
    moved: Tensor
    slope: Tensor

    @classmethod
    def start(cls, state: ChainState, slopes: bool) -> Walk:
        """Before the first step."""
        zero = state.x.new_zeros(len(state.x))
        return cls(state, zero, zero, zero if slopes else state.x.new_zeros(()))

    def tensors(self) -> tuple[Tensor, ...]:
        """All of it, in one row."""
        return (*self.state, self.acceptance, self.moved, self.slope)

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...]) -> Walk:
        """The inverse of `tensors`."""
        return cls(ChainState(*tensors[:3]), *tensors[3:])


Several = Callable[[Kernel, Energy, Walk, list[Noise], Tensor, bool], Walk]


def several(kernel: Kernel, energy: Energy, walk: Walk, noises: list[Noise], h: Tensor, slopes: bool) -> Walk:
    """One step for each noise."""
    state, acceptance, moved, slope = walk
    for noise in noises:
        before = state
        state, info = kernel.step(energy, state, noise, h)
        acceptance, moved = acceptance + info.acceptance, moved + info.moved
        grad = before.grad if info.grad is None else info.grad
        if slopes and grad.numel():
            slope = slope + row_dot(grad, grad).sqrt()
    return Walk(state, acceptance, moved, slope)


def steps_per_call(kernel: Kernel) -> int:
    """Steps of this kernel in one compiled call."""
    return max(1, UNROLL // max(1, kernel.gradients_per_step))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One compiled function for all chains: the compiler keeps its own code per kind of kernel and energy.

    Energies are arguments, so that two networks of one architecture share code and nothing here keeps a
    network alive. Parameters may change, the code is kept.
    """
    known = inspect.signature(torch.compile).parameters
    own = {"recompile_limit": VARIANTS} if "recompile_limit" in known else {}
    made = torch.compile(function, fullgraph=True, dynamic=False, **own)  # pyright: ignore
    return fused(made if own else _roomy(made))


@functools.cache
def compiled_several() -> Several:
    """`several`, compiled anew for every kind of kernel and number of steps.

    Each has code of its own, so that no call is held against what was compiled for lists of another length: torch
    2.11 looks for elements that are not there when it says why it compiles again.
    """
    made: dict[tuple[type[Kernel], int], Several] = {}

    def run(kernel: Kernel, energy: Energy, walk: Walk, noises: list[Noise], h: Tensor, slopes: bool) -> Walk:
        key = type(kernel), len(noises)
        if key not in made:
            code = several.__code__.replace(co_name=f"{key[0].__name__}_{key[1]}")
            made[key] = compiled(types.FunctionType(code, several.__globals__, code.co_name))
        return made[key](kernel, energy, walk, noises, h, slopes)

    return run


@functools.cache
def compiled_gradient() -> Callable[[Energy, Tensor], EnergyGrad]:
    """`energy_and_grad`, compiled."""
    return compiled(energy_and_grad)


class CompiledGradient:
    """An energy whose values and gradients are one compiled function."""

    def __init__(self, energy: Energy):
        self.energy = energy

    def value_and_grad(self, x: Tensor) -> EnergyGrad:
        """E and ∇E."""
        with torch.no_grad():
            return compiled_gradient()(self.energy, x)

    def __call__(self, x: Tensor) -> Tensor:
        """E, `(B,)`, as it is computed beside its gradient."""
        return self.value_and_grad(x).energy


def compiled_for(kernel: Kernel) -> Several:
    """`several`, compiled as a whole; of a kernel with many gradients a step, these alone."""
    if kernel.gradients_per_step <= MOST_UNROLLED:
        return compiled_several()
    return lambda kernel, energy, *others: several(kernel, CompiledGradient(energy), *others)


def _roomy(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with room for every variant while it runs, for a `torch.compile` that takes no limit of its own.

    The limits are the whole process's, so they are put back after each call, which costs some microseconds.
    """
    config = torch._dynamo.config
    names = [name for pair in LIMITS if (name := next((n for n in pair if hasattr(config, n)), None))]
    return config.patch({name: max(VARIANTS, getattr(config, name)) for name in names})(function)


def compiler_gave_up(error: Exception) -> str | None:
    """What the compiler does not take, and the line that it stands in; None for any other error."""
    its_own = isinstance(error, torch._dynamo.exc.TorchDynamoException)  # pyright: ignore
    if not its_own and type(error).__name__ not in LIMIT_ERRORS:
        return None
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    places = [i for i, line in enumerate(lines) if line.startswith('File "')]
    where = f" ({' '.join(lines[places[-1] : places[-1] + 2])})" if places else ""
    return lines[0] + where
