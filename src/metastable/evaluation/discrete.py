"""log Z of energies over units coded −1 and +1: by listing all states, or by annealing with Gibbs sweeps.

Where the states can be listed the answer is exact and its standard error is 0. Where they cannot, walkers start as
independent units and follow inverse temperatures to the model (annealed importance sampling, Neal 2001; for
restricted Boltzmann machines Salakhutdinov and Murray 2008), in populations that share nothing but the path, which
a pilot chose: the same machinery as for continuous energies, `walkers.smc`.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metastable.core.check import require_signs
from metastable.core.errors import EnergyError
from metastable.core.parts import home_of
from metastable.core.protocols import Listed, provides
from metastable.core.random import derive, generator
from metastable.core.types import Energy, LogPartition, Proposal, Walkers
from metastable.core.weights import log_mean_exp, spread_of_log_mean
from metastable.kernels import Kernel
from metastable.proposals.signs import Signs, fit_signs, state_chunks, states
from metastable.walkers.anneal import Annealed
from metastable.walkers.path import Schedule
from metastable.walkers.pilot import find_schedule
from metastable.walkers.smc import reverse_ais, smc

from .log_z_search import PILOT_WALKERS, in_groups
from .log_z_words import contradictions, pilot_words, run_words

MOST_WORK = 1 << 26
"""States times units up to which listing them takes about a second, and is what `log_partition` does."""
DRAWN = 4096
"""Exact draws that an exact log Z comes with."""
UNEASY = 0.2
"""Populations whose log Z have a larger standard deviation than this walk again, on a finer path."""


def enumerated_log_weights(energy: Energy, event_shape: tuple[int, ...], like: Tensor) -> Tensor:
    """−E of all 2^d states, float64, in the order of `proposals.signs.states`; for any energy over signs."""
    units = math.prod(event_shape)
    chunks = state_chunks(units, like.dtype, like.device)
    with torch.no_grad():
        return torch.cat([-energy(part.view(-1, *event_shape)).double() for part in chunks])


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """½ Σ |p − q| over the last dimension."""
    return 0.5 * (p - q).abs().sum(-1)


def counting_noise(p: Tensor, samples: int) -> float:
    """Expected total variation between `p`, `(M,)`, and the frequencies of independent draws of it.

    E|X/n − p| of a binomial X is about √(2p(1 − p)/(πn)) where n·p is large, and never more than 2p(1 − p)
    elsewhere.
    """
    spread = p * (1 - p)
    return float(0.5 * torch.minimum(torch.sqrt(2 * spread / (math.pi * samples)), 2 * spread).sum())


class Settings(NamedTuple):
    """What an annealed estimate needs to know; as in `evaluation.log_partition`."""

    kernel: Kernel
    walkers: int
    populations: int
    steps: int
    conditional_ess: float
    refinements: int
    seed: int


def discrete_log_partition(
    energy: Any,
    event_shape: tuple[int, ...],
    like: Tensor,
    settings: Settings,
    reference: Proposal | None = None,
    data: Tensor | None = None,
    samples: Tensor | None = None,
) -> LogPartition:
    """log Z = log Σ_s exp(−E(s)): listed where that is a second's work, annealed beyond.

    Args:
        energy: E over −1 and +1, `(B, *event)` to `(B,)`.
        event_shape: shape of an event.
        like: a tensor with the dtype and device of the walkers.
        settings: kernel, walkers and so on.
        reference: independent units to start from (`proposals.Signs`); asks for the annealed estimate. Without
            one they have the means of `data` where it is given (the base-rate model), else are uniform.
        data: rows of −1 and +1, `(N, *event)`.
        samples: independent draws of the model, for the reverse estimate.
    """
    for name, rows in (("data", data), ("samples", samples)):
        if rows is not None:
            require_signs(rows, name)
    units = math.prod(event_shape)
    listed = energy.listed_units if provides(energy, Listed) else units
    work = 2.0**listed * units
    if reference is None and samples is None and work <= MOST_WORK:
        return exact_log_partition(energy, event_shape, like, settings.seed)
    if reference is None:
        reference = Signs.uniform(event_shape, like) if data is None else fit_signs(data)
    own: Any = reference
    if isinstance(own, nn.Module):  # the one that was given stays as it is
        own = deepcopy(own).to(like)
    return annealed_log_partition(energy, own, settings, samples)


def exact_log_partition(energy: Any, event_shape: tuple[int, ...], like: Tensor, seed: int) -> LogPartition:
    """By enumeration, with exact draws of the model as walkers."""
    rng = generator(derive(seed, "exact"), like.device)
    if provides(energy, Listed):
        value, x = energy.log_partition(), energy.sample(DRAWN, rng).to(like.dtype)
    else:
        log_weight = enumerated_log_weights(energy, event_shape, like)
        value = torch.logsumexp(log_weight, 0)
        rows = torch.multinomial(torch.softmax(log_weight, 0), DRAWN, replacement=True, generator=rng)
        x = states(math.prod(event_shape), like.dtype, like.device)[rows].view(-1, *event_shape)
    if not math.isfinite(float(value)):
        raise EnergyError(f"energy: log Z came out as {float(value)}; it must be finite on some state")
    return LogPartition(float(value), 0.0, float(DRAWN), walkers=Walkers.equal(x))


def annealed_log_partition(
    energy: Energy, reference: Proposal, settings: Settings, samples: Tensor | None = None
) -> LogPartition:
    """By sequential Monte Carlo on the path that a pilot found, in independent populations."""
    rng = generator(derive(settings.seed, "annealed"), home_of(reference).device)
    options = {"steps": 2 * settings.steps, "conditional_ess": settings.conditional_ess}
    pilot = find_schedule(energy, reference, PILOT_WALKERS, settings.kernel, rng, **options)
    main, steps = _walk(energy, reference, pilot.schedule, settings, rng)
    back = None
    if samples is not None:  # walked to the reference on the same path
        x, G = in_groups(samples, settings.populations, rng), settings.populations
        options = {"steps": steps, "populations": G, "resample_below": 0.5}
        back = reverse_ais(energy, reference, x, *main.schedule, settings.kernel, rng, **options)
    each = main.log_partitions
    value, error = float(log_mean_exp(each)), float(spread_of_log_mean(each))
    if not math.isfinite(value):
        raise EnergyError(f"energy: log Z came out as {value}; check the energy on states of −1 and +1")
    error = math.hypot(error, torch.finfo(main.x.dtype).eps * (1 + abs(value)))
    reverse = None if back is None else -float(log_mean_exp(back.log_partitions))
    reverse_error = None if back is None else float(spread_of_log_mean(back.log_partitions))
    words = [
        *pilot_words(pilot),
        *run_words(main, error),
        *contradictions(value, error, reverse, reverse_error, None),
    ]
    sizes = [len(main) // main.populations] * main.populations
    walkers = Walkers(main.x, main.log_weight, {"populations": sizes})
    return LogPartition(value, error, main.ess, len(each) - 1, tuple(words), reverse, reverse_error, walkers)


def _walk(
    energy: Energy, reference: Proposal, path: Schedule, settings: Settings, rng: torch.Generator
) -> tuple[Annealed, int]:
    """G populations on the pilot's path; again on a finer one while they disagree."""
    steps, sizes = settings.steps, (settings.populations, settings.walkers)
    main = smc(energy, reference, *sizes, rng, kernel=settings.kernel, schedule=path, steps=steps)
    for _ in range(settings.refinements):
        if float(main.log_partitions.std()) < UNEASY:
            break
        path, steps = path.refined(), 2 * steps
        main = smc(energy, reference, *sizes, rng, kernel=settings.kernel, schedule=path, steps=steps)
    return main, steps
