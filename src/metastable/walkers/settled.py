"""What follows an update of θ by a handful of kernels, where chains are fused: moves, weights, resampling, metrics.

The same as `jarzynski.reweigh_then_move`, `Population.resample` and the numbers that Jarzynski's method logs, which
are a few hundred small operations that a GPU starts one by one. Everything is added up in float64 and in another
order, so that numbers differ in their last digits.
"""

from __future__ import annotations

import functools
import importlib
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.capture import aside
from metastable.core.types import Energy
from metastable.kernels import MALA, ChainResult, Kernel, fused
from metastable.kernels.engine import OneKernel, refuse, weighing_energy

from .jarzynski import launched
from .population import Population

WIDEST, MOST = 8, 8192
"""Numbers in an event, and walkers in a population, up to which it is done."""
BLOCK, CHUNK = 16, 512
TOLD = 7
"""Numbers that a population tells: log Z, ESS, whether it was due, noise, v, acceptance, squared distance."""
ALWAYS = (
    *(
        "displacement",
        "ess",
        "resampled",
        "resamplings",
        "ancestors",
        "log_z",
        "log_z_steering",
        "log_z_noise",
    ),
    *("acceptance", "pace"),
)
HELD_OUT = ("log_z_se", "log_z_gap", "ess_held_out")


class Rules(NamedTuple):
    """What an update goes by.

    Attributes:
        kernel: MALA.
        steps: kernel steps.
        threshold: c_k, of the ESS.
        accepted: share of proposals that the step aims at.
        gain: with which it does.
        longest: log of the longest step.
        pace: v that the learning rate aims at; None leaves it.
        scale: of the data.
    """

    kernel: Kernel
    steps: int
    threshold: float
    accepted: float
    gain: float
    longest: float
    pace: float | None
    scale: float


class Following(NamedTuple):
    """Both populations after an update, log h and the log of the factor for the next one, and metrics."""

    steering: Population
    following: Population | None
    log_step: Tensor | None
    log_factor: Tensor | None
    metrics: dict[str, Tensor]


class Settled(NamedTuple):
    """A population after an update, what it tells, `(G, TOLD)`, and which first walkers have descendants."""

    walkers: Population
    told: Tensor
    living: Tensor


def settled(
    rules: Rules,
    energy: Energy,
    steering: Population,
    following: Population | None,
    rows: Tensor | None,
    following_rows: Tensor | None,
    log_step: Tensor | None,
    log_factor: Tensor | None,
    rng: torch.Generator,
) -> Following | None:
    """An update's end; None where it has to be made of smaller steps."""
    populations = [one for one in (steering, following) if one is not None]
    made = [weighing_energy(rules.kernel, energy, one.x, rng, "fused") for one in populations]
    own = [one for one in made if isinstance(one, OneKernel)]
    fit = isinstance(rules.kernel, MALA) and all(_fits(one) for one in populations)
    if not fit or len(own) < len(made):
        return None
    h = None if log_step is None else log_step.exp().to(steering.x)
    groups, alone = [one.groups for one in populations], following is None
    uniform = torch.rand(sum(groups), generator=rng, dtype=torch.float64, device=rng.device).split(groups)
    try:
        with aside(steering.x.device) as join:  # neither asks for the other
            first: Any = _settled(own[0], rules, steering, rows, h, uniform[0], alone)
        read = first
        if following is not None:
            read: Any = _settled(own[1], rules, following, following_rows, h, uniform[1], True)
        join()
        if first is None or read is None:
            return None
        upcoming, metrics = told_of(rules, first, read, following is not None, log_step, log_factor)
    except Exception as error:
        if not type(error).__module__.startswith("triton"):
            raise
        refuse(energy, "fused", f"{type(error).__name__}, {str(error).splitlines()[0]}")
        return None
    return Following(
        first.walkers,
        None if following is None else read.walkers,
        None if log_step is None else upcoming[0],
        None if log_factor is None else upcoming[1],
        metrics,
    )


def _fits(walkers: Population) -> bool:
    """Whether the kernels take it."""
    x = walkers.x
    shaped = x.dim() == 2 and x.shape[1] <= WIDEST and len(x) // walkers.groups <= MOST
    return shaped and walkers.given is None and fused.why_not_here(x) is None


def _settled(
    own: OneKernel,
    rules: Rules,
    walkers: Population,
    rows: Tensor | None,
    step_size: Tensor | None,
    uniform: Tensor,
    read: bool,
) -> Settled | None:
    """One population: moved, weighed and resampled."""
    made = launched(own, rules.kernel, walkers, rows, rules.steps, step_size)
    if made is None:
        return None
    return resampled(walkers, *made, rules.threshold, uniform, read)


def resampled(
    walkers: Population, U: Tensor, made: ChainResult, threshold: float, uniform: Tensor, read: bool = True
) -> Settled:
    """A += U_k − U_{k+1}, and systematic resampling along the principal axis where the ESS is below `threshold`.

    Args:
        walkers: before the update.
        U: U_{k+1} where `walkers` stand.
        made: all walkers after the update, and what those that moved did.
        threshold: a fraction.
        uniform: on [0, 1), one for each population.
        read: whether to say which first walkers have descendants.
    """
    triton = importlib.import_module("metastable.walkers.settled_triton")
    (x, after, _), info, *_ = made
    G, (total, D) = walkers.groups, x.shape
    n, place, shape = total // G, x.device, {"D": D, "COLUMNS": _padded(D)}
    new = walkers._replace(
        x=torch.empty_like(x),
        log_weight=torch.empty_like(walkers.log_weight),
        energy=torch.empty_like(after),
        grad=walkers.grad[:0],
        log_z=torch.empty_like(walkers.log_z),
        resamplings=torch.empty_like(walkers.resamplings),
        ancestor=torch.empty_like(walkers.ancestor),
        past_noise=torch.empty_like(walkers.past_noise),
    )
    told = torch.empty((G, TOLD), dtype=torch.float64, device=place)
    totals, whole = (torch.empty(k, dtype=torch.int64, device=place) for k in (G, total))
    scratch = (
        torch.empty_like(walkers.log_weight),
        torch.empty(total, dtype=torch.float32, device=place),
        whole,
    )
    living = torch.empty(total if read else 0, dtype=torch.int8, device=place)
    P, blocks = _padded(n), -(-n // BLOCK)
    with torch.cuda.device_of(x):
        triton.weigh_kernel[(G,)](
            (walkers.log_weight, walkers.energy), (new.log_z, new.resamplings, new.past_noise), walkers.log_z,
            walkers.resamplings, walkers.past_noise, U, x, (info.acceptance, info.moved), scratch, told, totals,
            living, n, len(info.moved), threshold, **shape, P=P, PROBE=G == 1, READ=read,
            num_warps=16 if P > 512 else 4,
        )  # fmt: skip
        triton.draw_kernel[(G * blocks,)](
            (x, after, walkers.ancestor), (new.x, new.log_weight, new.energy, new.ancestor), living, scratch,
            told, totals, uniform, n, blocks, **shape, BLOCK=BLOCK, CHUNK=min(CHUNK, P), READ=read,
            num_warps=4,
        )  # fmt: skip
    return Settled(new, told, living)


def told_of(
    rules: Rules,
    steering: Settled,
    read: Settled,
    held_out: bool,
    log_step: Tensor | None,
    log_factor: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """log h and the log of the factor for the next update, `(2,)`, and the metrics of this one."""
    triton = importlib.import_module("metastable.walkers.settled_triton")
    like, groups = steering.told, read.walkers.groups
    out, upcoming = like.new_empty(15), like.new_empty(2)
    n = len(read.walkers.x) // groups
    pace = None if log_factor is None else rules.pace
    wanted = 2 * NormalDist().inv_cdf(1 - rules.accepted / 2)
    numbers = _numbers(
        like.device, *(rules.steps / rules.scale**2, wanted, 2 * rules.gain / 3, rules.longest, pace or 1.0)
    )
    with torch.cuda.device_of(like):
        triton.tell_kernel[(3,)](
            steering.told, read.told, read.walkers.past_noise, steering.walkers.resamplings, read.living,
            upcoming, like if log_step is None else log_step, like if log_factor is None else log_factor,
            numbers, out, n, groups, P=_padded(n), G=_padded(groups), TUNED=log_step is not None,
            PACED=pace is not None, num_warps=4,
        )  # fmt: skip
    values = out.unbind()
    metrics = dict(zip(ALWAYS, values, strict=False))
    metrics |= dict(zip(HELD_OUT, values[10:], strict=False)) if held_out else {}
    metrics |= {} if log_factor is None else {"rate_factor": values[14]}
    return upcoming, metrics | ({} if log_step is None else {"step_size": values[13]})


def _padded(n: int) -> int:
    """The next power of two, at least 2."""
    return max(2, 1 << (n - 1).bit_length())


@functools.cache
def _numbers(device: torch.device, *values: float) -> Tensor:
    """Numbers on a device, copied there once."""
    return torch.tensor(values, dtype=torch.float64, device=device)
