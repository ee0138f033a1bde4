"""log Z of any energy, with an interval that covers it and a word when it should not be trusted.

A Gaussian reference is fitted to the model, coordinates are whitened by it, a pilot finds temperatures and step
sizes, and G independent populations walk that fixed path. Each gives an unbiased estimate of Z, so their mean
is one too, and their spread says how far it can be off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from metastable.core.errors import EnergyError, InputError, require, require_count, require_positive
from metastable.core.protocols import event_shape_of, reference_of
from metastable.core.random import derive, generator
from metastable.core.types import (
    Energy,
    EnergyGrad,
    LogPartition,
    Proposal,
    Walkers,
    energy_and_grad,
    is_discrete,
    row_sum,
)
from metastable.core.weights import ess_fraction, log_mean_exp, spread_of_log_mean
from metastable.kernels import Kernel
from metastable.proposals import Gaussian, fit_gaussian
from metastable.walkers.smc import (
    STEP_JITTER,
    Annealed,
    Schedule,
    default_kernel,
    find_schedule,
    reverse_ais,
    smc,
)

from .stationarity import Drift, find_drift

SPREAD = 10.0
"""Standard deviation of the Gaussian that a search without data begins from."""
NARROWER, ENOUGH_INSIDE = 8, 0.05
"""A search whose draws are nearly all outside the model's walls begins three times narrower, at most so often."""
INFLATE = 1.3
"""The reference is this much wider than the model, so that it reaches into the model's tails."""
WIDER = 3.0
"""The second look of a search is this much wider than what the first one found."""
WIDE_LOOKS = 2
"""Looks of a search that are too wide on purpose."""
LOOKS = 6
"""Looks after which a search that has not settled goes on with what it has, and says so."""
ROUGH_ESS = 0.8
"""Conditional ESS of the wide looks, which only have to find the model."""
PILOT_WALKERS = 512
RUNAWAY_WALKERS = 32
UNEASY = 0.2
"""Populations whose log Z have a larger standard deviation than this walk again, on a finer path."""
FINER_STEP, FINER_JITTER = 0.5, 0.8
"""Steps of that path: half as long, and spread wider, for regions narrower than those that the pilot saw."""


def log_partition(
    energy: Energy,
    dim: int | None = None,
    *,
    event_shape: Sequence[int] | None = None,
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
        event_shape: shape of an event, where it is not a vector.
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
    kernel = default_kernel(energy) if kernel is None else kernel
    if is_discrete(energy):
        from .discrete import Settings, discrete_log_partition

        settings = Settings(
            kernel, walkers, populations, steps, conditional_ess, refinements, _checked_seed(seed)
        )
        like = torch.empty(0, **place._asdict())
        return discrete_log_partition(energy, shape, like, settings, reference, data, samples)
    job = _Job(energy, shape, place, kernel, steps, conditional_ess, _checked_seed(seed))
    _check_values(job)
    start = _begin(job, reference, data if data is not None else samples, spread)
    walked = _walk(job, start, populations, walkers, refinements)
    main = walked.main
    back = None if samples is None else _walk_back(job, start, main, samples, populations)
    words = [*start.words, *_reach_words(job, start, main, data, samples), *_drift_words(walked)]
    return _summary(job, start, walked, back, words)


class _Place(NamedTuple):
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Job:
    """What every stage needs to know."""

    energy: Energy
    shape: tuple[int, ...]
    place: _Place
    kernel: Kernel
    steps: int
    conditional_ess: float
    seed: int

    def rng(self, *names: object) -> torch.Generator:
        return generator(derive(self.seed, "log_partition", *names), self.place.device)


class _Start(NamedTuple):
    """Coordinates with their reference, the pilot that walked from it, what the last wide look saw, words."""

    white: Whitened
    pilot: Annealed
    wide: float | None = None
    words: tuple[str, ...] = ()


# --- coordinates -------------------------------------------------------------------------------------------


class Whitened:
    """Energy and reference in coordinates z with x = m + Lz, in which the reference has unit scales.

    log Z is the same in both, since E_z(z) = E(m + Lz) − log|det L|, but one step size then serves every
    direction. A Gaussian reference brings its own m and L; any other is scaled by its draws.
    """

    def __init__(self, energy: Energy, reference: Proposal, place: _Place, rng: torch.Generator):
        gaussian = isinstance(reference, Gaussian)
        centre, scale = (reference.mean, reference.scale) if gaussian else _scales(reference, rng)
        self.full = gaussian and reference.full
        self.centre, self.scale = centre.to(**place._asdict()), scale.to(**place._asdict())
        diagonal = self.scale.diagonal() if self.full else self.scale
        self.log_det = diagonal.double().log().sum().to(place.dtype)
        self.energy = _WhiteEnergy(energy, self)
        self.reference: Proposal = (
            _Standard(torch.zeros_like(self.centre)) if gaussian else _WhiteReference(reference, self)
        )

    def to_model(self, z: Tensor) -> Tensor:
        """x = m + Lz."""
        return self.centre + ((z.flatten(1) @ self.scale.T).view(z.shape) if self.full else z * self.scale)

    def to_white(self, x: Tensor) -> Tensor:
        """z = L⁻¹(x − m)."""
        centred = x - self.centre
        if not self.full:
            return centred / self.scale
        return torch.linalg.solve_triangular(self.scale, centred.flatten(1).T, upper=False).T.reshape(x.shape)

    def pull_back(self, grad: Tensor) -> Tensor:
        """∇_z = Lᵀ∇_x."""
        return (grad.flatten(1) @ self.scale).view(grad.shape) if self.full else grad * self.scale


def _scales(reference: Proposal, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        draws = reference.sample(4096, rng)
    return draws.mean(0), draws.std(0)


class _WhiteEnergy:
    """E(m + Lz) − log|det L|."""

    def __init__(self, energy: Energy, coordinates: Whitened):
        self.energy, self.coordinates = energy, coordinates

    def __call__(self, z: Tensor) -> Tensor:
        return self.energy(self.coordinates.to_model(z)) - self.coordinates.log_det

    def value_and_grad(self, z: Tensor) -> EnergyGrad:
        """Gradients through the energy's own, where it has one."""
        values, grad = energy_and_grad(self.energy, self.coordinates.to_model(z))
        return EnergyGrad(values - self.coordinates.log_det, self.coordinates.pull_back(grad))


class _WhiteReference:
    """q(m + Lz)·|det L|."""

    def __init__(self, reference: Proposal, coordinates: Whitened):
        self.inner, self.coordinates = reference, coordinates
        self.event_shape = reference.event_shape

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        with torch.no_grad():
            return self.coordinates.to_white(self.inner.sample(n, rng).to(self.coordinates.centre))

    def log_prob(self, x: Tensor) -> Tensor:
        return self.inner.log_prob(self.coordinates.to_model(x)) + self.coordinates.log_det


class _Standard(Gaussian):
    """N(0, I), with the gradient of −log q written out."""

    def value_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """½|z|² + ½d·log 2π, and z."""
        return 0.5 * row_sum(z.square()) + 0.5 * self.mean.numel() * math.log(2 * math.pi), z


# --- the reference -----------------------------------------------------------------------------------------


def _begin(job: _Job, reference: Proposal | None, rows: Tensor | None, spread: float) -> _Start:
    """Where to walk from: what was given, a fit to rows, the energy's own reference, or a search."""
    if reference is None and rows is None:
        own = reference_of(job.energy)
        reference = own if isinstance(own, Proposal) else None
    if reference is not None:
        white, pilot = _look(job, reference, 0)
        return _Start(white, pilot, words=_pilot_words(pilot))
    if rows is not None:
        return _settle(job, _fit(rows, None, INFLATE), rows)
    centre = torch.zeros(job.shape, dtype=job.place.dtype, device=job.place.device)
    return _settle(job, Gaussian(centre, _visible(job, centre, spread)), None)


def _visible(job: _Job, centre: Tensor, spread: float) -> float:
    """The spread to search from: as asked, or less where hardly a draw falls inside the walls of a small region."""
    shares = {}
    for scale in (spread / 3**k for k in range(NARROWER)):
        x = Gaussian(centre, scale).sample(PILOT_WALKERS, job.rng("walls", scale))
        with torch.no_grad():
            shares[scale] = float((job.energy(x) != torch.inf).double().mean())
        if shares[scale] >= ENOUGH_INSIDE:
            return scale
    return max(shares, key=lambda scale: shares[scale])


def _look(job: _Job, reference: Proposal, number: int, rough: bool = False) -> tuple[Whitened, Annealed]:
    """A pilot from `reference`, in its coordinates; a rough one takes larger changes of temperature."""
    white = Whitened(job.energy, reference, job.place, job.rng("scales"))
    pilot = find_schedule(
        white.energy,
        white.reference,
        PILOT_WALKERS,
        job.kernel,
        job.rng("look", number),
        steps=2 * job.steps,
        conditional_ess=min(job.conditional_ess, ROUGH_ESS) if rough else job.conditional_ess,
    )
    return white, pilot


def _settle(job: _Job, reference: Gaussian, rows: Tensor | None) -> _Start:
    """Walk from `reference`, fit the walkers, walk from the fit, until the reference holds the model.

    Without `rows` this is a search, and its first looks are too wide on purpose, so that a mode far out can be
    met before the fit narrows. Rows that are given must stay covered: they are fitted together with the walkers.
    """
    wide_looks = WIDE_LOOKS if rows is None else 0
    white, pilot = _look(job, reference, 0, rough=wide_looks > 0)
    wide = None
    for number in range(1, LOOKS):
        if not pilot.complete or (number > wide_looks and _holds(pilot)):
            break
        x, log_weight = _with_rows(white.to_model(pilot.x), pilot.log_weight, rows)
        fit = _fit(x, log_weight, WIDER if number < wide_looks else INFLATE)
        white, pilot = _look(job, fit, number, rough=number < wide_looks)
        wide = float(pilot.log_partitions) if number < wide_looks else wide
    lost = pilot.complete and not _holds(pilot)
    words = ("no Gaussian was found that holds the model: give data or a reference",) if lost else ()
    return _Start(white, pilot, wide, (*words, *_pilot_words(pilot)))


def _holds(pilot: Annealed) -> bool:
    """Whether the model lies inside the reference: in its coordinates, near 0 and no wider than 1."""
    z = pilot.x.flatten(1).double()
    p = torch.softmax(pilot.log_weight, 0)
    mean = p @ z
    std = (p @ (z - mean).square()).sqrt()
    return bool((mean.abs() < 0.5).all() and (std < 1.1).all() and (std > 0.4).all())


def _with_rows(x: Tensor, log_weight: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Walkers, and rows of the same total weight."""
    if rows is None:
        return x, log_weight
    ours = log_weight - torch.logsumexp(log_weight, 0)
    theirs = ours.new_full((len(rows),), -math.log(len(rows)))
    return torch.cat([x, rows]), torch.cat([ours, theirs])


def _fit(x: Tensor, log_weight: Tensor | None, inflate: float) -> Gaussian:
    """A Gaussian fit that stays well conditioned when the effective rows are few for the dimension.

    The covariance is shrunk towards its diagonal by d/(d + n), and variances without one, as of images, whose
    coordinates share a unit, are kept above a hundredth of their mean.
    """
    log_weight = x.new_zeros(len(x), dtype=torch.float64) if log_weight is None else log_weight
    fit = fit_gaussian(x.double(), log_weight, inflate)
    if fit.full:
        n, d = float(ess_fraction(log_weight)) * len(x), x[0].numel()
        covariance = fit.scale @ fit.scale.T
        shrunk = torch.lerp(covariance, torch.diag(covariance.diagonal()), d / (d + n))
        scale = torch.linalg.cholesky(shrunk)
    else:
        scale = fit.scale.clamp(min=0.1 * float(fit.scale.square().mean().sqrt()))
    return Gaussian(fit.mean.to(x.dtype), scale.to(x.dtype))


# --- the run -----------------------------------------------------------------------------------------------


class _Walked(NamedTuple):
    """Populations at the end of the path; how they drifted; how far a finer path moved log Z, and its noise."""

    main: Annealed
    drift: Drift | None = None
    rise: float = 0.0
    rise_error: float = 0.0


def _walk(job: _Job, start: _Start, populations: int, walkers: int, refinements: int) -> _Walked:
    """G populations on the pilot's path; again on a finer one while they disagree, or drift when they go on."""
    path, steps, jitter = start.pilot.schedule, job.steps, STEP_JITTER
    if not start.pilot.complete:  # nothing to be precise about
        return _Walked(_run(job, start, path, steps, populations, min(walkers, RUNAWAY_WALKERS), 0))
    walked = None
    for attempt in range(refinements + 1):
        main = _run(job, start, path, steps, populations, walkers, attempt, jitter)
        doubtful = walked is not None and walked.drift is not None and walked.drift.significant
        drift = find_drift(start.white.energy, main, job.kernel, job.rng("drift", attempt), doubtful)
        walked = _Walked(main, drift) if walked is None else _finer(walked, main, drift)
        if float(main.log_partitions.std()) < UNEASY and not drift.significant:
            break
        path, steps, jitter = path.refined().scaled(FINER_STEP), 2 * steps, FINER_JITTER
    assert walked is not None
    return walked


def _finer(before: _Walked, main: Annealed, drift: Drift) -> _Walked:
    """What a finer path changed; nothing that counts where populations disagreed but did not drift."""
    if before.drift is None or not before.drift.significant:
        return _Walked(main, drift)
    (old, old_error), (new, new_error) = (_mean_of(w.log_partitions) for w in (before.main, main))
    return _Walked(main, drift, new - old, math.hypot(old_error, new_error))


def _mean_of(each: Tensor) -> tuple[float, float]:
    """log of the mean of the populations' Z, and its standard error."""
    return float(log_mean_exp(each)), float(spread_of_log_mean(each))


def _run(
    job: _Job,
    start: _Start,
    path: Schedule,
    steps: int,
    populations: int,
    walkers: int,
    attempt: int,
    jitter: float = STEP_JITTER,
) -> Annealed:
    white, rng = start.white, job.rng("walk", attempt)
    options = {"schedule": path, "kernel": job.kernel, "steps": steps, "jitter": jitter}
    return smc(white.energy, white.reference, populations, walkers, rng, **options)


def _walk_back(job: _Job, start: _Start, main: Annealed, samples: Tensor, populations: int) -> Annealed:
    """Samples in as many groups as there are populations, to the reference on the same path."""
    require(len(samples) >= 2 * populations, "samples", f"at least {2 * populations} rows", len(samples))
    rng = job.rng("back")
    rows = torch.randperm(len(samples), generator=rng, device=samples.device)
    rows = rows[: len(rows) - len(rows) % populations]
    betas, sizes = main.schedule
    return reverse_ais(
        start.white.energy,
        start.white.reference,
        start.white.to_white(samples[rows]),
        betas,
        sizes,
        job.kernel,
        rng,
        steps=job.steps,
        populations=populations,
        resample_below=0.5,
    )


def _summary(
    job: _Job, start: _Start, walked: _Walked, back: Annealed | None, words: list[str]
) -> LogPartition:
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
        *_run_words(main, error),
        *_contradictions(value, error, reverse, reverse_error, start.wide),
    ]
    sizes = [len(main) // main.populations] * main.populations
    walkers = Walkers(start.white.to_model(main.x), main.log_weight, {"populations": sizes})
    return LogPartition(value, error, main.ess, len(each) - 1, tuple(words), reverse, reverse_error, walkers)


def _path_noise(job: _Job, start: _Start, main: Annealed) -> float:
    """Standard error of log Z that the changes of temperature alone make, from the ESS that each of them leaves.

    A change that leaves the share c of its walkers has log-mean weights of variance (1/c − 1)/n, and one half as
    long a quarter of it. Where rare walkers decide, the spread between populations is small just when they were
    missed and the value is too low; what the path costs at least does not depend on who was met.
    """
    first, now = (len(schedule.betas) - 1 for schedule in (start.pilot.schedule, main.schedule))
    each = (1 / job.conditional_ess - 1) * (first / now) ** 2
    return math.sqrt(now * each / len(main))


# --- what speaks against the number ------------------------------------------------------------------------


def _pilot_words(pilot: Annealed) -> tuple[str, ...]:
    if pilot.complete:
        return ()
    return (
        "walkers ran away before they reached the model: ∫ exp(−E) may not exist; if it does, the model is far "
        "from where the search began: give data, a reference or a larger spread",
    )


def _run_words(main: Annealed, error: float) -> list[str]:
    words = []
    share, spread = main.ess / len(main), float(main.log_partitions.std())
    slowest, odd = float(main.info["acceptance"].min()), int(main.info["undefined"])
    if not share >= 0.05:
        words.append(f"{main.ess:.0f} of {len(main)} walkers carry the weight: add walkers or temperatures")
    if not spread <= 1:
        words.append(f"populations disagree: their log Z have standard deviation {spread:.2f}")
    if not error <= 0.3:
        words.append(f"the standard error is {error:.2f}")
    if not slowest >= 0.1:
        words.append(
            f"moves were accepted with probability {slowest:.2f} at one temperature: walkers stood still"
        )
    if odd:
        words.append(f"{odd} energies were not a number, and were taken as probability zero")
    return words


def _drift_words(walked: _Walked) -> list[str]:
    words, drift = [], walked.drift
    if drift is not None and drift.significant:
        words.append(
            f"walkers drifted when they went on: their {drift.what} changed by {drift.change:+.2f} standard "
            f"deviations ({abs(drift.score):.0f} standard errors): part of the model was missed; give more steps"
        )
    if abs(walked.rise) > 0.1 + 3 * walked.rise_error:
        words.append(
            f"a finer path changed log Z by {walked.rise:+.2f} ± {walked.rise_error:.2f}, and a still finer one "
            "may change it again; give more steps"
        )
    return words


def _contradictions(
    value: float, error: float, reverse: float | None, reverse_error: float | None, wide: float | None
) -> list[str]:
    words = []
    if wide is not None and value < wide - 1 - 3 * error:
        words.append(f"a wider start saw log Z near {wide:.1f}: walkers may have lost a mode; give data")
    if reverse is None or reverse_error is None:
        return words
    apart = abs(reverse - value)
    if not apart <= 0.02 + 4 * math.hypot(error, reverse_error):
        words.append(
            f"forward and reverse estimates are {apart:.2f} apart: walkers miss part of the model, "
            "or the samples are not draws of it"
        )
    if not reverse_error <= 0.3:
        words.append(f"the standard error of the reverse estimate is {reverse_error:.2f}")
    return words


def _reach_words(
    job: _Job, start: _Start, main: Annealed, data: Tensor | None, samples: Tensor | None
) -> list[str]:
    """Whether the walkers' ends, and the rows that were given, lie where the reference has draws."""
    white = start.white
    with torch.no_grad():
        own = white.reference.log_prob(white.reference.sample(4096, job.rng("reach"))).double()
        ends = white.reference.log_prob(main.x).double()
        words = _outside("of the walkers ended", own, ends, torch.softmax(main.log_weight, 0))
        for name, rows in (("data", data), ("samples", samples)):
            if rows is not None:
                at = white.reference.log_prob(white.to_white(rows)).double()
                words += _outside(f"of the {name} lie", own, at, torch.full_like(at, 1 / len(at)))
    return words


def _outside(who: str, own: Tensor, log_q: Tensor, p: Tensor) -> list[str]:
    """A quarter beyond the reference's 1 % quantile, or a hundredth ten nats beyond its last draw."""
    beyond = float(p[log_q < own.quantile(0.01)].sum())
    far = float(p[log_q < own.min() - 10].sum())
    if beyond <= 0.25 and far <= 0.01:
        return []
    return [f"{max(beyond, far):.0%} {who} outside the reference: it is too narrow or in the wrong place"]


# --- arguments ---------------------------------------------------------------------------------------------


def _placement(sources: list, dtype: torch.dtype | None, device: torch.device | str | None) -> _Place:
    """dtype and device of the first thing that has them."""
    found = next((t for source in sources for t in _tensors(source) if t.is_floating_point()), None)
    if found is None:
        found = torch.empty(0)
    place = _Place(
        found.dtype if dtype is None else dtype, torch.device(found.device if device is None else device)
    )
    require(
        place.dtype in (torch.float32, torch.float64), "dtype", "torch.float32 or torch.float64", place.dtype
    )
    return place


def _tensors(source: object) -> list[Tensor]:
    if isinstance(source, nn.Module):
        return [*source.parameters(), *source.buffers()]
    return [source] if isinstance(source, Tensor) else []


def _event_shape(
    energy: Energy,
    dim: int | None,
    event_shape: Sequence[int] | None,
    reference: Proposal | None,
    data: Tensor | None,
    samples: Tensor | None,
) -> tuple[int, ...]:
    """The one event shape that everything given agrees on."""
    if dim is not None:
        require_count("dim", dim)
    known = {
        "dim": None if dim is None else (dim,),
        "event_shape": event_shape,
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


def _check_values(job: _Job) -> None:
    with torch.no_grad():
        values = job.energy(torch.zeros(2, *job.shape, **job.place._asdict()))
    if not isinstance(values, Tensor) or tuple(values.shape) != (2,):
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise EnergyError(f"energy: must return one value per row, shape (2,) for 2 rows, got {got}")
