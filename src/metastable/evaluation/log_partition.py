"""log Z of any energy, with an interval that covers it and a word when it should not be trusted.

A Gaussian reference is fitted to the model, coordinates are whitened by it, a pilot finds temperatures and step
sizes, and G independent populations walk that fixed path. Each gives an unbiased estimate of Z, so their mean
is one too, and their spread says how far it can be off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from metastable.core import processes
from metastable.core.check import check_energy, inside_walls
from metastable.core.errors import EnergyError, InputError, require, require_count, require_positive
from metastable.core.memory import in_rows_that_fit, within_memory
from metastable.core.protocols import event_shape_of
from metastable.core.random import derive, generator
from metastable.core.types import Energy, LogPartition, Proposal, Walkers, as_shape
from metastable.core.weights import log_mean_exp, spread_of_log_mean
from metastable.kernels import Kernel
from metastable.walkers.anneal import STEP_JITTER, Annealed, of_all
from metastable.walkers.path import Schedule
from metastable.walkers.smc import reverse_ais, smc
from metastable.walkers.space import space_of

from .discrete import UNEASY, Settings, discrete_log_partition
from .log_z_search import SPREAD, Job, Start, begin, in_groups
from .log_z_words import Walked, contradictions, drift_words, outside_words, run_words
from .stationarity import find_drift
from .whitened import Place

RUNAWAY_WALKERS = 32
FINER_STEP, FINER_JITTER = 0.5, 0.8
"""Steps of that path: half as long, and spread wider, for regions narrower than those that the pilot saw."""


def log_partition(
    energy: Energy,
    dim: int | None = None,
    *,
    event_shape: int | Sequence[int] | None = None,
    reference: Proposal | None = None,
    data: Tensor | None = None,
    samples: Tensor | None = None,
    walkers: int = 512,
    populations: int = 16,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    kernel: Kernel | None = None,
    steps: int = 2,
    conditional_ess: float = 0.95,
    spread: float = SPREAD,
    refinements: int = 1,
) -> LogPartition:
    """log Z = log ∫ exp(−E(x)) dx by sequential Monte Carlo, with a standard error from independent populations.

    The interval knows what the walkers met. A mode that no walker reached from the reference is in neither the
    value nor the error, and only `data` or `samples` can reveal it. Regions far narrower than the rest, as the neck
    of a funnel in ten dimensions, are entered so rarely that the value comes out too low: walkers that go on moving
    then drift (`evaluation.stationarity`), walk again on a finer path, and what that changes is part of the error.

    E may be +inf outside a region; Z is then the integral over it.

    For an energy over units coded −1 and +1 (`discrete`), Z is a sum over states: exact where they can be listed,
    else annealed from independent units with Gibbs sweeps (`evaluation.discrete`).

    Args:
        energy: E, `(B, *event)` to `(B,)`; low is likely.
        dim: dimension of an event that is a vector; not needed where the energy has an `event_shape`.
        event_shape: shape of an event, or its dimension.
        reference: a normalised density to begin from; Z is then the integral over its support. Without one, a
            Gaussian is fitted to `data` or `samples`; else the energy's own `reference` is taken where it has
            one (`energies.Tilted`); else a search from N(0, `spread`²) finds where the model is.
        data: rows that the model should find likely, `(N, *event)`: the surest way to reach every mode.
        samples: independent draws of the model, `(N, *event)`. They also give the reverse estimate, which tends
            to lie above log Z as the forward one tends to lie below.
        walkers: in each population.
        populations: independent estimates of Z.
        seed: of everything random.
        dtype: of the walkers; by default that of the energy's parameters, else of the rows or the reference.
        device: likewise.
        kernel: leaves its target invariant; by default short HMC trajectories, or Gibbs for a discrete energy.
        steps: moves at each temperature.
        conditional_ess: share of effective walkers that one change of temperature leaves.
        spread: standard deviation that a search begins from, in the model's units.
        refinements: how often the path may be made finer, at four times the cost, while populations disagree.

    Returns:
        The estimate, with `degrees` = populations − 1; its `warnings` say in words what speaks against it.

    >>> z = log_partition(lambda x: x.square().sum(1), dim=2, walkers=64)  # ∫ exp(−|x|²) dx = π
    >>> z.trusted, abs(z.value - math.log(math.pi)) < 4 * z.std_error
    (True, True)
    """
    require_count("populations", populations, 2)
    require_count("walkers", walkers, 2)
    require_count("steps", steps)
    require_count("refinements", refinements, 0)
    require_positive("spread", spread)
    require(0 < conditional_ess < 1, "conditional_ess", "between 0 and 1", conditional_ess)
    place = _placement([energy, data, samples, reference], dtype, device)
    data, samples = (
        None if rows is None else rows.detach().to(**place._asdict()) for rows in (data, samples)
    )
    shape = _event_shape(energy, dim, event_shape, reference, data, samples)
    space = space_of(energy)
    known = next((rows[:3] for rows in (data, samples) if rows is not None and len(rows)), None)
    if known is None:
        draws = space.starts(3, shape, generator(derive(_checked_seed(seed), "check")))
        near = _inside(energy, draws.to(**place._asdict()))
    else:
        near = known[inside_walls(energy, known)]
    if len(near):  # else the search, or the reference, says where it is finite
        check_energy(energy, near, walls=True)
    kernel = space.annealer if kernel is None else kernel
    if not space.has_volume:
        settings = Settings(
            kernel, walkers, populations, steps, conditional_ess, refinements, _checked_seed(seed)
        )
        like = torch.empty(0, **place._asdict())
        return discrete_log_partition(energy, shape, like, settings, reference, data, samples)
    job = Job(energy, shape, place, kernel, steps, conditional_ess, _checked_seed(seed))
    every = torch.zeros((1, *shape), **place._asdict()).expand(populations * walkers, *shape)
    held = lambda: f"{populations} populations of {walkers} walkers of shape {shape} on {place.device}"  # noqa: E731
    sizes = {"walkers": walkers, "populations": populations}
    with within_memory("log Z", held, sizes), in_rows_that_fit(energy, every):
        start = begin(job, reference, data if data is not None else samples, spread)
        walked = _walk(job, start, populations, walkers, refinements)
        main, white, back = walked.main, start.white, None
        if samples is not None:  # walked to the reference on the same path
            rng = job.rng("back")
            x = white.to_white(in_groups(samples, populations, rng))
            options = {"steps": steps, "populations": populations, "resample_below": 0.5}
            back = reverse_ais(white.energy, white.reference, x, *main.schedule, kernel, rng, **options)
    words = [*start.words, *_reach_words(job, start, main, data, samples), *drift_words(walked)]
    return _summary(job, start, walked, back, words)


def _inside(energy: Energy, draws: Tensor) -> Tensor:
    """Those that have an energy, for what is +inf, or not a number on some, is where walkers do not go."""
    near = draws[inside_walls(energy, draws)]
    with torch.no_grad():
        number = ~energy(near).isnan() if len(near) else torch.zeros(0, dtype=torch.bool)
    return near[number] if bool(number.any()) else near


def _walk(job: Job, start: Start, populations: int, walkers: int, refinements: int) -> Walked:
    """G populations on the pilot's path; again on a finer one while they disagree, or drift when they go on."""
    path, steps, jitter = start.pilot.schedule, job.steps, STEP_JITTER
    if not start.pilot.complete:  # nothing to be precise about
        return Walked(_run(job, start, path, steps, populations, min(walkers, RUNAWAY_WALKERS), 0))
    walked = None
    for attempt in range(refinements + 1):
        main = _run(job, start, path, steps, populations, walkers, attempt, jitter)
        doubtful = walked is not None and walked.drift is not None and walked.drift.significant
        drift = find_drift(start.white.energy, main, job.kernel, job.rng("drift", attempt), doubtful)
        before, walked = walked, Walked(main, drift)
        if before is not None and doubtful:  # what a finer path changed counts where populations drifted
            (old, old_error), (new, new_error) = (_mean_of(w.log_partitions) for w in (before.main, main))
            walked = Walked(main, drift, new - old, math.hypot(old_error, new_error))
        if float(main.log_partitions.std()) < UNEASY and not drift.significant:
            break
        path, steps, jitter = path.refined().scaled(FINER_STEP), 2 * steps, FINER_JITTER
    assert walked is not None
    return walked


def _mean_of(each: Tensor) -> tuple[float, float]:
    """log of the mean of the populations' Z, and its standard error."""
    return float(log_mean_exp(each)), float(spread_of_log_mean(each))


def _run(
    job: Job,
    start: Start,
    path: Schedule,
    steps: int,
    populations: int,
    walkers: int,
    attempt: int,
    jitter: float = STEP_JITTER,
) -> Annealed:
    white, rng = start.white, job.rng("walk", attempt)
    options = {"schedule": path, "kernel": job.kernel, "steps": steps, "jitter": jitter}
    if populations < processes.count():
        return smc(white.energy, white.reference, populations, walkers, rng, **options)
    if (rank := processes.rank()) > 0:  # each process walks some populations, all the same path
        rng = job.rng("walk", attempt, "process", rank)
    own = processes.share(populations)
    return of_all(smc(white.energy, white.reference, own, walkers, rng, **options))


def _summary(job: Job, start: Start, walked: Walked, back: Annealed | None, words: list[str]) -> LogPartition:
    main = walked.main
    each = main.log_partitions
    value, error = _mean_of(each)
    error = math.hypot(error, min(_path_noise(job, start, main), error))
    if not math.isfinite(value):
        raise EnergyError(
            f"energy: log Z came out as {value}: the energy is infinite or not a number wherever walkers went; "
            "check it near the data, or give a reference"
        )
    # agreement to the last digit is an exact reference, not a proof that arithmetic has no rounding
    error = math.hypot(error, torch.finfo(job.place.dtype).eps * (1 + abs(value)))
    # what a finer path found, or may have found for all that can be told, a still finer one may find again
    error = math.hypot(error, abs(walked.rise) + walked.rise_error)
    reverse, reverse_error = (None, None) if back is None else _mean_of(back.log_partitions)
    reverse = None if reverse is None else -reverse
    words = [
        *words,
        *run_words(main, error),
        *contradictions(value, error, reverse, reverse_error, start.wide),
    ]
    sizes = [len(main) // main.populations] * main.populations
    walkers = Walkers(start.white.to_model(main.x), main.log_weight, {"populations": sizes})
    return LogPartition(value, error, main.ess, len(each) - 1, tuple(words), reverse, reverse_error, walkers)


def _path_noise(job: Job, start: Start, main: Annealed) -> float:
    """Standard error of log Z that the changes of temperature alone make, from the ESS that each of them leaves.

    A change that leaves the share c of its walkers has log-mean weights of variance (1/c − 1)/n, and one half as
    long a quarter of it. Where rare walkers decide, the spread between populations is small just when they were
    missed and the value is too low; what the path costs at least does not depend on who was met.
    """
    first, now = (len(schedule.betas) - 1 for schedule in (start.pilot.schedule, main.schedule))
    each = (1 / job.conditional_ess - 1) * (first / now) ** 2
    return math.sqrt(now * each / len(main))


def _reach_words(
    job: Job, start: Start, main: Annealed, data: Tensor | None, samples: Tensor | None
) -> list[str]:
    """Whether the walkers' ends, and the rows that were given, lie where the reference has draws."""
    white = start.white
    with torch.no_grad():
        own = white.reference.log_prob(white.reference.sample(4096, job.rng("reach"))).double()
        ends = white.reference.log_prob(main.x).double()
        words = outside_words("of the walkers ended", own, ends, torch.softmax(main.log_weight, 0))
        for name, rows in (("data", data), ("samples", samples)):
            if rows is not None:
                at = white.reference.log_prob(white.to_white(rows)).double()
                words += outside_words(f"of the {name} lie", own, at, torch.full_like(at, 1 / len(at)))
    return words


def _placement(sources: list, dtype: torch.dtype | None, device: torch.device | str | None) -> Place:
    """dtype and device of the first thing that has them."""
    things = (
        t for s in sources for t in ([*s.parameters(), *s.buffers()] if isinstance(s, nn.Module) else [s])
    )
    found = next((t for t in things if isinstance(t, Tensor) and t.is_floating_point()), torch.empty(0))
    place = Place(
        found.dtype if dtype is None else dtype, torch.device(found.device if device is None else device)
    )
    require(
        place.dtype in (torch.float32, torch.float64), "dtype", "torch.float32 or torch.float64", place.dtype
    )
    return place


def _event_shape(
    energy: Energy,
    dim: int | None,
    event_shape: int | Sequence[int] | None,
    reference: Proposal | None,
    data: Tensor | None,
    samples: Tensor | None,
) -> tuple[int, ...]:
    """The one event shape that everything given agrees on."""
    if dim is not None:
        require_count("dim", dim)
    known = {
        "dim": None if dim is None else (dim,),
        "event_shape": None if event_shape is None else as_shape(event_shape),
        "energy.event_shape": event_shape_of(energy),
        "reference.event_shape": None if reference is None else reference.event_shape,
        "data": None if data is None else data.shape[1:],
        "samples": None if samples is None else samples.shape[1:],
    }
    shapes = {name: tuple(shape) for name, shape in known.items() if shape is not None}
    if not shapes:
        raise InputError("dim: the energy does not say its event_shape; give dim=… or event_shape=…")
    if len(set(shapes.values())) > 1:
        raise InputError(
            "event_shape: " + ", ".join(f"{name} says {shape}" for name, shape in shapes.items())
        )
    return next(iter(shapes.values()))


def _checked_seed(seed: int) -> int:
    require(isinstance(seed, int) and not isinstance(seed, bool), "seed", "an integer", seed)
    return seed
