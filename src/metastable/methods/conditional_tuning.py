"""A step size for each context, found by a few pilot chains and remembered beside the energy.

A step that suits a wide context throws the walkers of a narrow one away, and one that suits the narrow context
leaves those of the wide one where they are. So each context has its own, by dual averaging of the acceptance of its
own chains.

Pilots have random numbers of their own and are forgotten: what they find does not depend on the seed of a call, and
a call that finds its steps in memory returns what it returned when it first looked for them. Steps are kept beside
an energy that is a module, as long as its parameters and buffers stay what they are, for `REMEMBERED` contexts. A
context that was not seen before begins at the median of what the last call found, and warms up for `SHORT` steps
only: its step, and with it the samples of a seed, then depends a little on the calls before, though the law that is
sampled does not. `forget_tuning` starts anew.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from metastable.core.random import derive, generator
from metastable.core.types import Bound
from metastable.kernels import HMC, MALA, ULA, StepKernel
from metastable.kernels.adaptation import warm_up_each

from .conditional_starts import Starts, least_variance

PILOTS, FEWEST, TOGETHER = 16, 4, 2**11
"""Chains for each context; fewer where there would be more than so many of all contexts together."""
FULL, SHORT = 60, 20
"""Steps of warm-up for a first guess, and from steps that are remembered."""
MANY = 64
"""Of more than twice so many new contexts the first are looked at in full, the others from their median."""
AWAY = 0.3
"""Distance from the wanted acceptance at which a short warm-up was too short."""
REMEMBERED = 2**16
"""Contexts of which the step is kept."""

COPIES = 1e-3
"""A first guess is no less than this share of the variance of the draws behind the starts, which may be copies."""

Starter = Callable[[Bound, int, torch.Generator], Starts]
"""Starts for some contexts."""


class Tuned(NamedTuple):
    """Step sizes, `(B,)`, and the energies that were evaluated for them, of all contexts together."""

    step_size: Tensor
    rows: int


class _Memory:
    """What is known of one energy: its steps by settings and context, and the median of those last found."""

    def __init__(self, print_: tuple[float, ...]):
        self.print = print_
        self.steps: OrderedDict[Hashable, float] = OrderedDict()
        self.median: dict[Hashable, float] = {}

    def recall(self, settings: Hashable, contexts: list[bytes]) -> dict[bytes, float]:
        """Steps of those contexts that are known, which are then the last to be dropped."""
        for context in contexts:
            if (settings, context) in self.steps:
                self.steps.move_to_end((settings, context))
        keys = {context: (settings, context) for context in contexts}
        return {context: self.steps[key] for context, key in keys.items() if key in self.steps}

    def keep(self, settings: Hashable, contexts: list[bytes], steps: list[float]) -> dict[bytes, float]:
        """Remember new ones; a context that is there twice has one step."""
        new = dict(zip(contexts, steps, strict=True))
        self.steps.update({(settings, context): step for context, step in new.items()})
        self.median[settings] = sorted(steps)[len(steps) // 2]
        while len(self.steps) > REMEMBERED:
            self.steps.popitem(last=False)
        return new


_MEMORIES: WeakKeyDictionary[nn.Module, _Memory] = WeakKeyDictionary()


def forget_tuning(energy: Any) -> None:
    """Drop the step sizes that are remembered for an energy."""
    if isinstance(energy, nn.Module):
        _MEMORIES.pop(energy, None)


def steps_for(target: Bound, kernel: StepKernel, start: Starter, acceptance: float | None = None) -> Tuned:
    """A step size for each context, from memory where it is there, else from pilot chains.

    Args:
        target: E(· | given) of B contexts.
        kernel: whose moves are made.
        start: where pilots start.
        acceptance: the share of moves that shall be accepted; the kernel's own target by default.
    """
    acceptance = kernel.target_acceptance if acceptance is None else acceptance
    memory = _memory(target.energy)
    if memory is None:
        return Tuned(*_by_pilots(target, kernel, start, acceptance, None))
    settings, contexts = (kernel, acceptance), _digests(target)
    known = memory.recall(settings, contexts)
    new = [i for i, context in enumerate(contexts) if context not in known]
    rows = 0
    if new:
        rest = target.some(torch.tensor(new, device=target.given.device))
        steps, rows = _by_pilots(rest, kernel, start, acceptance, memory.median.get(settings))
        known |= memory.keep(settings, [contexts[i] for i in new], steps.tolist())
    steps = [known[context] for context in contexts]
    return Tuned(torch.tensor(steps, dtype=torch.float64, device=target.given.device), rows)


def _by_pilots(
    target: Bound, kernel: StepKernel, start: Starter, acceptance: float, last: float | None
) -> tuple[Tensor, int]:
    """Steps by pilot chains, `(b,)` in float64, and what they cost: short ones from `last`, where that is known."""
    if last is None and len(target.given) > 2 * MANY:
        first, rows = _by_pilots(target.some(slice(0, MANY)), kernel, start, acceptance, None)
        rest, more = _by_pilots(
            target.some(slice(MANY, None)), kernel, start, acceptance, float(first.median())
        )
        return torch.cat([first, rest]), rows + more
    rng = generator(derive(0, "tuning"), target.given.device)
    starts = start(target, min(PILOTS, max(FEWEST, TOGETHER // len(target.given))), rng)
    y, guess = starts.y.flatten(0, 1), first_guess(kernel, starts)
    if last is None:
        each = warm_up_each(kernel, target, y, FULL, rng, guess, acceptance)
        return each.step_size.double(), starts.rows + _cost(kernel, FULL, len(y))
    each = warm_up_each(kernel, target, y, SHORT, rng, torch.full_like(guess, last), acceptance)
    steps, rows = each.step_size.double(), starts.rows + _cost(kernel, SHORT, len(y))
    off = ((each.acceptance - acceptance).abs() > AWAY).nonzero()[:, 0]
    if len(off):
        far = starts.y[off].flatten(0, 1)
        again = warm_up_each(kernel, target.some(off), far, FULL, rng, guess[off], acceptance)
        steps, rows = steps.index_copy(0, off, again.step_size.double()), rows + _cost(kernel, FULL, len(far))
    return steps, rows


def _cost(kernel: StepKernel, steps: int, chains: int) -> int:
    """Energies of a warm-up; the first ones of ULA, which is warmed up as MALA, are counted too."""
    return chains * (steps * kernel.gradients_per_step + 1)


def first_guess(kernel: StepKernel, starts: Starts) -> Tensor:
    """A step for each context, `(B,)`, from the spread of its starts: half the least variance of a number."""
    variance = torch.maximum(least_variance(starts.y), COPIES * starts.spread)
    h = 0.5 * variance.clamp(min=1e-30)
    if isinstance(kernel, (MALA, ULA)):
        return h
    if isinstance(kernel, HMC):
        return (2 * h).sqrt() * kernel.masses[0] ** 0.5
    return torch.full_like(h, kernel.step_size)


# ---- memory


def _memory(energy: Any) -> _Memory | None:
    """Of an energy that is a module; another one may be a different function at every call."""
    if not isinstance(energy, nn.Module):
        return None
    print_ = _print(energy)
    memory = _MEMORIES.get(energy)
    if memory is None or memory.print != print_:
        memory = _MEMORIES[energy] = _Memory(print_)
    return memory


def _print(energy: nn.Module) -> tuple[float, ...]:
    """Sums of all parameters and buffers: they differ after any step of training, by whatever way it was made."""
    tensors = [*energy.parameters(), *energy.buffers()]
    sums = [t.detach().double().sum() for t in tensors if t.numel() and not t.is_complex()]
    return tuple(torch.stack(sums).tolist()) if sums else ()


def _digests(target: Bound) -> list[bytes]:
    """A short name for each context with its time: equal ones have the same."""
    given = (target.given.detach().cpu() + 0).contiguous()  # −0 is 0
    given = given.float() if given.dtype in (torch.bfloat16, torch.float16) else given
    times = [None] * len(given) if target.t is None else target.t.tolist()
    named = (row.numpy().tobytes() + repr(t).encode() for row, t in zip(given, times, strict=True))
    return [hashlib.blake2b(name, digest_size=16).digest() for name in named]
