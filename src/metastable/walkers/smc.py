"""Annealed importance sampling and sequential Monte Carlo from a normalised reference q to exp(−E).

Everything here walks the geometric path

    E_β(x) = (1 − β)·(−log q(x)) + β·E(x),    0 = β₀ < β₁ < … < β_K = 1,

and is one loop, `anneal`: reweight from β to β′ by exp(−(β′ − β)·(E(x) + log q(x))), resample where the weights
have become uneven, move with a kernel that leaves exp(−E_β′) invariant. The raw log-weights carry the partition
function: the mean of exp(log_weight) over a population is an unbiased estimate of Z, whatever the number of
walkers, temperatures or moves (Neal 2001; Del Moral, Doucet and Jasra 2006). This holds only while temperatures
and step sizes were not chosen by looking at those walkers, so a pilot learns them and is then thrown away
(`find_schedule`).

Over units coded −1 and +1 the path is the same, but an energy that knows its conditionals at every β may walk its
own (`tempered(fields, beta)`, from independent units with those fields to E): see `DiscretePath`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import EnergyError, UnsupportedError, require, require_count
from metastable.core.random import normal_like
from metastable.core.resampling import resample_indices
from metastable.core.types import Energy, EnergyGrad, Proposal, Walkers, energy_and_grad, is_discrete, per_row
from metastable.core.weights import ess_fraction, log_mean_exp
from metastable.kernels import HMC, ChainState, Gibbs, Kernel, StepKernel, run_chain

RESAMPLE_BELOW = 0.5
"""A population whose effective sample size falls under this share of its walkers is resampled."""
CONDITIONAL_ESS = 0.9
"""Effective share that one change of temperature leaves: sets the number of temperatures."""
STEP_JITTER = 0.4
"""Standard deviation of each walker's log step size, so that no chain is locked to one scale."""
MAX_TEMPERATURES = 500
"""A pilot that needs more jumps to β = 1, and says so."""
RUNAWAY = 300.0
"""A pilot whose walkers are further out than this many standard deviations of the reference jumps too."""
ENDLESS = 1e-9
"""As does one that is still not there at 1 − β below this."""


class Schedule(NamedTuple):
    """Inverse temperatures from one end of the path to the other, and the step size of the moves at each.

    Attributes:
        betas: `(K + 1,)`, float64.
        step_sizes: `(K + 1,)`; entry k belongs to the kernel that leaves exp(−E_{β_k}) invariant.
    """

    betas: Tensor
    step_sizes: Tensor

    @classmethod
    def equal(cls, gaps: int, step_size: float = 0.1) -> Schedule:
        """`gaps` equal changes of β from 0 to 1, one step size."""
        betas = torch.linspace(0, 1, gaps + 1, dtype=torch.float64)
        return cls(betas, torch.full_like(betas, step_size))

    def reversed(self) -> Schedule:
        """The same path walked from the other end."""
        return Schedule(self.betas.flip(0), self.step_sizes.flip(0))

    def scaled(self, by: float) -> Schedule:
        """The same temperatures with step sizes multiplied by `by`."""
        return Schedule(self.betas, by * self.step_sizes)

    def refined(self) -> Schedule:
        """Twice as many changes of temperature: every gap is halved, step sizes between are geometric means."""
        betas = torch.stack([self.betas[:-1], (self.betas[:-1] + self.betas[1:]) / 2], 1).flatten()
        between = (self.step_sizes[:-1] * self.step_sizes[1:]).sqrt()
        steps = torch.stack([self.step_sizes[:-1], between], 1).flatten()
        return Schedule(torch.cat([betas, self.betas[-1:]]), torch.cat([steps, self.step_sizes[-1:]]))


@dataclass(frozen=True)
class Annealed(Walkers):
    """Walkers at the end of a path, in `populations` independent groups of equal size.

    `log_weight` is raw and stays so through resampling, so that `log_partitions` can be read off it.
    `info` holds `acceptance` (mean probability of each temperature's moves, `(K,)`), `ess` (effective share of
    each population after each change of temperature, `(K, G)`) and `undefined` (how many energies were met that
    are not a number, and were taken as probability zero).

    Attributes:
        populations: G, how many independent groups the rows form.
        schedule: the path that was walked.
        complete: whether the schedule reached its end with even weights (false for a pilot that gave up).
    """

    populations: int = 1
    schedule: Schedule = field(default_factory=lambda: Schedule.equal(1))
    complete: bool = True

    @property
    def log_partitions(self) -> Tensor:
        """log of the mean weight of each population, `(G,)`: exp of it is unbiased for Z."""
        return log_mean_exp(self.log_weight.view(self.populations, -1), 1)


class Tempered:
    """E_β(x) = (1 − β)·(−log q(x)) + β·E(x) as an energy with its own gradient."""

    def __init__(self, energy: Energy, reference: Proposal, beta: Tensor):
        self.energy, self.reference = energy, ReferenceEnergy(reference)
        self.beta, self.rest = beta, 1 - beta

    def __call__(self, x: Tensor) -> Tensor:
        """Energies, `(B,)`."""
        return self.beta * self.energy(x) + self.rest * self.reference(x)

    def value_and_grad(self, x: Tensor) -> EnergyGrad:
        """Both ends' values and gradients, mixed."""
        return self.mixed(_Ends(energy_and_grad(self.energy, x), energy_and_grad(self.reference, x)))

    def mixed(self, ends: _Ends) -> EnergyGrad:
        """Values and gradients of E_β from those of both ends; 0·inf is NaN, which every kernel rejects."""
        return EnergyGrad(*(self.beta * m + self.rest * r for m, r in zip(*ends, strict=True)))


class ReferenceEnergy:
    """−log q(x) as an energy; a density that is constant in x, as a uniform one, has gradient zero."""

    def __init__(self, reference: Proposal):
        self.reference = reference

    def __call__(self, x: Tensor) -> Tensor:
        """−log q(x), `(B,)`."""
        return -self.reference.log_prob(x)

    def value_and_grad(self, x: Tensor) -> EnergyGrad:
        """The reference's own closed form where it has one, else automatic differentiation."""
        own = getattr(self.reference, "value_and_grad", None)
        if own is not None:
            return EnergyGrad(*own(x))
        with torch.enable_grad():
            y = x.detach().requires_grad_(True)
            values = self(y)
            grad = (
                torch.autograd.grad(values.sum(), y, allow_unused=True)[0] if values.requires_grad else None
            )
        return EnergyGrad(values.detach(), torch.zeros_like(x) if grad is None else grad)


class _Ends(NamedTuple):
    """Energies and gradients of both ends of the path at the same positions."""

    model: EnergyGrad
    reference: EnergyGrad

    def gap(self) -> Tensor:
        """E(x) + log q(x) in float64, `(B,)`; what is not a number has no probability, so +inf."""
        gap = self.model.energy.double() - self.reference.energy.double()
        return torch.where(gap.isnan(), torch.inf, gap)

    def undefined(self) -> Tensor:
        """How many energies are not a number; +inf is one that says probability zero."""
        return self.model.energy.isnan().sum()

    def rows(self, index: Tensor) -> _Ends:
        return _Ends(*(EnergyGrad(e.energy[index], e.grad[index]) for e in self))


class GeometricPath:
    """E_β = (1 − β)·(−log q) + β·E, with both ends' gradients evaluated once where walkers stand."""

    discrete = False

    def __init__(self, energy: Energy, reference: Proposal):
        self.energy, self.reference = energy, reference

    def look(self, x: Tensor) -> _Ends:
        """What is known where the walkers stand."""
        return _Ends(energy_and_grad(self.energy, x), energy_and_grad(ReferenceEnergy(self.reference), x))

    def gap(self, here: _Ends) -> Tensor:
        """E_1 − E_0, `(n,)`, float64."""
        return here.gap()

    def log_change(self, here: _Ends, before: Tensor | float, after: Tensor | float) -> Tensor:
        """E_before − E_after, the log-weight of a change of temperature, `(n,)`, float64."""
        return -((after - before) * here.gap())

    def at(self, beta: Tensor) -> Tempered:
        """E_β."""
        return Tempered(self.energy, self.reference, beta)

    def at_rest(self, like: Tensor) -> Energy:
        """E_0."""
        return ReferenceEnergy(self.reference)

    def state(self, kernel: Kernel, tempered: Any, x: Tensor, here: _Ends) -> ChainState:
        """Chains of E_β at `x`, from what is known there."""
        return ChainState(x, *tempered.mixed(here))


class _Standing(NamedTuple):
    """Walkers of a discrete path: nothing is kept but where they stand."""

    x: Tensor

    def undefined(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=self.x.device)

    def rows(self, index: Tensor) -> _Standing:
        return _Standing(self.x[index])


class DiscretePath:
    """The path of an energy over units coded −1 and +1: its own where it has one, else the geometric one.

    A restricted Boltzmann machine's own path scales its parameters, which is not geometric in the energy of its
    visible units but keeps them drawable in blocks. Only E_β at the walkers is needed, and no gradient.
    """

    discrete = True

    def __init__(self, energy: Energy, reference: Proposal):
        self.energy, self.reference = energy, reference
        self.fields = getattr(reference, "fields", None)
        self.own = getattr(energy, "tempered", None) if self.fields is not None else None

    def look(self, x: Tensor) -> _Standing:
        """Nothing is evaluated yet."""
        return _Standing(x)

    def gap(self, here: _Standing) -> Tensor:
        """E_1 − E_0, `(n,)`, float64."""
        return -self.log_change(here, 0.0, 1.0)

    def log_change(self, here: _Standing, before: Tensor | float, after: Tensor | float) -> Tensor:
        """E_before − E_after, `(n,)`, float64; what is not a number has no probability."""
        with torch.no_grad():
            change = self.at(before)(here.x).double() - self.at(after)(here.x).double()
        return torch.where(change.isnan(), -torch.inf, change)

    def at(self, beta: Tensor | float) -> Energy:
        """E_β."""
        if self.own is not None:
            with torch.no_grad():
                return self.own(self.fields, beta)
        return DiscreteTempered(self.energy, self.reference, torch.as_tensor(beta))

    def at_rest(self, like: Tensor) -> Energy:
        """E_0."""
        return self.at(0.0)

    def state(self, kernel: Kernel, tempered: Energy, x: Tensor, here: _Standing) -> ChainState:
        """Chains of E_β at `x`."""
        return kernel.init(tempered, x)


class DiscreteTempered(Tempered):
    """The geometric mixture of two energies over units coded −1 and +1, for kernels that look at energies only."""

    discrete = True


def path_for(energy: Energy, reference: Proposal) -> GeometricPath | DiscretePath:
    """The path from `reference` to `energy`."""
    discrete = is_discrete(energy)
    if discrete and not is_discrete(reference):
        raise UnsupportedError(
            "reference: the energy is over units coded −1 and +1, so its reference must be too; use Signs"
        )
    return DiscretePath(energy, reference) if discrete else GeometricPath(energy, reference)


def anneal(
    energy: Energy,
    reference: Proposal,
    x: Tensor,
    schedule: Schedule,
    kernel: Kernel,
    rng: torch.Generator,
    *,
    steps: int = 1,
    populations: int = 1,
    resample_below: float = RESAMPLE_BELOW,
    jitter: float = STEP_JITTER,
) -> Annealed:
    """Carry walkers along `schedule`, from whichever end of the path it begins at.

    For k = 1…K: log w += −(β_k − β_{k−1})·(E(x) + log q(x)); populations whose ESS is under `resample_below` of
    their size are resampled and each walker gets the population's mean weight; `steps` moves at β_k.
    Nothing in the loop waits for the host.

    Args:
        energy: E, `(B, *event)` to `(B,)`.
        reference: q, normalised.
        x: draws from exp(−E_{β₀})/Z_{β₀}, `(G·n, *event)`, population after population.
        schedule: inverse temperatures and step sizes.
        kernel: leaves its target exactly invariant.
        rng: source of randomness.
        steps: moves at each temperature.
        populations: G.
        resample_below: 0 never resamples, which is annealed importance sampling.
        jitter: standard deviation of each walker's log step size around the schedule's.
    """
    _require_invariant(kernel)
    require_count("populations", populations)
    require(x.shape[0] % populations == 0, "x", f"a multiple of {populations} rows", x.shape[0])
    betas, sizes = schedule.betas.to(x.device), schedule.step_sizes.to(x.device, x.dtype)
    log_weight = torch.zeros(populations, x.shape[0] // populations, dtype=torch.float64, device=x.device)
    bad = torch.zeros((), dtype=torch.int64, device=x.device)
    acceptance, ess = [], []
    path: Any = path_for(energy, reference)
    for k in range(1, len(betas)):
        here = path.look(x)
        bad = bad + here.undefined()
        log_weight = log_weight + path.log_change(here, betas[k - 1], betas[k]).view_as(log_weight)
        ess.append(ess_fraction(log_weight))
        if resample_below > 0:
            rows, log_weight = _resample(log_weight, ess[-1] < resample_below, rng)
            x, here = x[rows], here.rows(rows)
        tempered = path.at(betas[k])
        state = path.state(kernel, tempered, x, here)
        h = _jittered(sizes[k], x, jitter, rng) if isinstance(kernel, StepKernel) else None
        state, info = run_chain(kernel, tempered, state, steps, rng, step_size=h)[:2]
        x = state.x
        acceptance.append(info.acceptance.mean())
    info = {"acceptance": torch.stack(acceptance), "ess": torch.stack(ess), "undefined": bad}
    return Annealed(x, log_weight.flatten(), info, populations=populations, schedule=schedule)


def _resample(log_weight: Tensor, uneven: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows that each walker continues from, `(G·n,)`, and the new raw log-weights, `(G, n)`."""
    G, n = log_weight.shape
    stay = torch.arange(n, device=log_weight.device)
    # a population that has lost every walker has no weights to draw from: it stays, and its Z is 0
    drawn = resample_indices(log_weight.nan_to_num(neginf=-1e300), rng=rng, check=False)
    rows = torch.where(uneven[:, None], drawn, stay) + n * torch.arange(G, device=stay.device)[:, None]
    mean = log_mean_exp(log_weight)[:, None]
    return rows.flatten(), torch.where(uneven[:, None], mean, log_weight)


def _jittered(step_size: Tensor, x: Tensor, jitter: float, rng: torch.Generator) -> Tensor:
    """One step size per walker, drawn without looking at the walker, so that the kernel stays invariant."""
    if jitter == 0:
        return step_size
    rows = normal_like(x.flatten(1)[:, 0], rng)
    return per_row(step_size * torch.exp(jitter * rows), x)


def _require_invariant(kernel: Kernel) -> None:
    if not kernel.invariant:
        raise UnsupportedError(
            f"kernel: {kernel.name!r} does not leave its target invariant, so the estimate of Z would be biased; "
            "use MALA or HMC"
        )


def _own_step_size(kernel: Kernel) -> float:
    """That of a kernel; not a number for one that has none."""
    return kernel.step_size if isinstance(kernel, StepKernel) else math.nan


def _require_densities(gap: Tensor) -> None:
    if bool((gap == -torch.inf).any()):
        raise EnergyError(
            "energy: −inf on a walker, an infinite density; it must be bounded below where walkers go"
        )
    if not bool(torch.isfinite(gap).any()):
        raise EnergyError(
            f"energy: infinite or not a number on all {len(gap)} walkers that were drawn; give data or samples "
            "from where it is finite, or a reference with draws there"
        )


def _draw(reference: Proposal, n: int, rng: torch.Generator) -> Tensor:
    with torch.no_grad():
        return reference.sample(n, rng)


def ais(
    energy: Energy,
    reference: Proposal,
    n: int,
    betas: Tensor | int,
    kernel: Kernel,
    steps_per_beta: int,
    rng: torch.Generator,
) -> Annealed:
    """Annealed importance sampling (Neal 2001): n independent walkers, mean of exp(log_weight) unbiased for Z.

    Args:
        energy: E, `(B, *event)` to `(B,)`.
        reference: q, normalised; walkers start as its draws.
        n: walkers.
        betas: increasing from 0 to 1, `(K + 1,)`, or the number K of equal gaps.
        kernel: leaves its target invariant; its own step size is used at every temperature.
        steps_per_beta: moves at each temperature.
        rng: source of randomness.

    >>> from metastable.kernels import MALA
    >>> from metastable.proposals import Gaussian
    >>> rng = torch.Generator().manual_seed(0)
    >>> w = ais(lambda x: 2 * x.square().sum(1), Gaussian(torch.zeros(1)), 2000, 20, MALA(0.2), 2, rng)
    >>> round(w.log_partitions.item(), 1)  # ½ log(π/2) = 0.226
    0.2
    """
    require_count("n", n)
    grid = Schedule.equal(betas).betas if isinstance(betas, int) else betas.double()
    _require_path(grid)
    schedule = Schedule(grid, torch.full_like(grid, _own_step_size(kernel)))
    x = _draw(reference, n, rng)
    return anneal(
        energy, reference, x, schedule, kernel, rng, steps=steps_per_beta, resample_below=0, jitter=0
    )


def reverse_ais(
    energy: Energy,
    reference: Proposal,
    samples: Tensor,
    betas: Tensor,
    step_sizes: Tensor | float,
    kernel: Kernel,
    rng: torch.Generator,
    *,
    steps: int = 1,
    populations: int = 1,
    resample_below: float = 0.0,
    jitter: float = STEP_JITTER,
) -> Annealed:
    """The path walked backwards, from draws of the model to the reference.

    The mean weight is unbiased for 1/Z, so −log of it lies above log Z in expectation, as the forward estimate
    lies below it: together they bracket log Z (Grosse, Ghahramani and Adams 2015). Read `−log_partitions`.

    Args:
        energy: E, `(B, *event)` to `(B,)`.
        reference: q, normalised.
        samples: draws of exp(−E)/Z, `(G·n, *event)`.
        betas: increasing from 0 to 1, `(K + 1,)`, as in the forward run.
        step_sizes: one for each of `betas`, or one for all.
        kernel: leaves its target invariant.
        rng: source of randomness.
        steps: moves at each temperature.
        populations: G, groups whose estimates are kept apart.
        resample_below: 0 never resamples.
        jitter: standard deviation of each walker's log step size.
    """
    _require_path(betas)
    sizes = torch.as_tensor(step_sizes, dtype=torch.float64, device=betas.device).expand(betas.shape)
    backwards = Schedule(betas.double(), sizes).reversed()
    options = {"steps": steps, "populations": populations, "resample_below": resample_below, "jitter": jitter}
    return anneal(energy, reference, samples.detach(), backwards, kernel, rng, **options)


def _require_path(betas: Tensor) -> None:
    ends = len(betas) > 1 and float(betas[0]) == 0 and float(betas[-1]) == 1
    require(ends and bool((betas.diff() > 0).all()), "betas", "increasing from 0 to 1", betas.tolist())


def find_schedule(
    energy: Energy,
    reference: Proposal,
    walkers: int,
    kernel: Kernel,
    rng: torch.Generator,
    *,
    steps: int = 4,
    conditional_ess: float = CONDITIONAL_ESS,
    max_temperatures: int = MAX_TEMPERATURES,
) -> Annealed:
    """A pilot run that chooses each next β so that the change leaves `conditional_ess`, and tunes step sizes.

    Its own weights are a good guess but not unbiased, because the path looked at them: use its `schedule` on
    fresh walkers. `complete` is false where the path had to end in a jump: too many temperatures, or walkers that
    run away because exp(−E) has no integral.
    """
    _require_invariant(kernel)
    require_count("walkers", walkers, 2)
    x = _draw(reference, walkers, rng)
    log_weight = torch.zeros(1, walkers, dtype=torch.float64, device=x.device)
    path: Any = path_for(energy, reference)
    at_rest, centre, scale = path.at_rest(x), x.mean(0), x.std(0)
    h, x, _ = _tuned(at_rest, kernel.init(at_rest, x), kernel, rng, _own_step_size(kernel), 10)
    betas, sizes, acceptance, ess, bad, jumped = [0.0], [h], [], [], 0, False
    while betas[-1] < 1:
        here, left = path.look(x), 1 - betas[-1]
        _require_densities(path.gap(here))
        bad += int(here.undefined())
        far = not path.discrete and _far(x, centre, scale)
        jumped = len(betas) >= max_temperatures or left < ENDLESS or far
        changes = _changes(path, here, betas[-1])
        gain = left if jumped else _next_gap(log_weight[0], changes, left, conditional_ess)
        betas.append(1.0 if gain >= left else betas[-1] + gain)
        log_weight = log_weight + path.log_change(here, betas[-2], betas[-1])
        ess.append(ess_fraction(log_weight))
        rows, log_weight = _resample(log_weight, ess[-1] < RESAMPLE_BELOW, rng)
        tempered = path.at(log_weight.new_tensor(betas[-1]))
        state = path.state(kernel, tempered, x[rows], here.rows(rows))
        h, x, accepted = _tuned(tempered, state, kernel, rng, h, steps)
        sizes.append(h)
        acceptance.append(accepted)
    info = {"acceptance": torch.tensor(acceptance), "ess": torch.stack(ess), "undefined": torch.tensor(bad)}
    schedule = Schedule(log_weight.new_tensor(betas), log_weight.new_tensor(sizes))
    return Annealed(x, log_weight.flatten(), info, schedule=schedule, complete=not jumped)


def _far(x: Tensor, centre: Tensor, scale: Tensor) -> bool:
    """Whether the typical walker has left every region where the reference has draws."""
    return bool(((x - centre) / scale).square().flatten(1).mean(1).median() > RUNAWAY**2)


def _changes(path: Any, here: Any, beta: float) -> Callable[[Tensor], Tensor]:
    """log w of each of several changes of β, `(C,)` to `(C, n)`."""
    if not path.discrete:  # one look serves all of them
        return lambda change: -change[:, None] * path.gap(here)
    return lambda change: torch.stack([path.log_change(here, beta, beta + c) for c in change])


def _next_gap(log_weight: Tensor, changes: Callable[[Tensor], Tensor], left: float, target: float) -> float:
    """The largest change of β up to `left` that keeps the conditional ESS at `target`.

    (Σ W w)²/(Σ W w²) with W the weights so far and w those of the change: one number for each candidate Δβ of a
    grid over ten decades, then of a finer one between the two that enclose the answer.
    """
    coarse = left * torch.logspace(-10, 0, 61, dtype=torch.float64, device=log_weight.device)
    low, high = _enclose(_conditional_ess(log_weight, changes(coarse)) >= target, coarse)
    fine = torch.linspace(low, high, 33, dtype=torch.float64, device=log_weight.device)
    return low if low == high else _enclose(_conditional_ess(log_weight, changes(fine)) >= target, fine)[0]


def _enclose(good: Tensor, tries: Tensor) -> tuple[float, float]:
    """The last try of the good ones that come first, and the next; twice the same at either end."""
    count = int(good.cumprod(0).sum())
    last = max(count - 1, 0)
    return float(tries[last]), float(tries[min(count, len(tries) - 1)])


def _conditional_ess(log_weight: Tensor, step: Tensor) -> Tensor:
    once, twice = (torch.logsumexp(log_weight + k * step, 1) for k in (1, 2))
    return torch.exp(2 * once - twice - torch.logsumexp(log_weight, 0))


def _tuned(
    energy: Energy, state: ChainState, kernel: Kernel, rng: torch.Generator, step_size: float, steps: int
) -> tuple[float, Tensor, float]:
    """`steps` moves while the step size follows the acceptance: step size, positions and acceptance after them."""
    if not isinstance(kernel, StepKernel):
        state, info = run_chain(kernel, energy, state, steps, rng)[:2]
        return step_size, state.x, float(info.acceptance.mean())
    log_step = state.x.new_tensor(step_size).log()
    accepted = torch.ones_like(log_step)
    for _ in range(steps):
        h = _jittered(log_step.exp(), state.x, STEP_JITTER, rng)
        state, info = run_chain(kernel, energy, state, 1, rng, step_size=h)[:2]
        accepted = info.acceptance.mean()
        # the acceptance is a mean over all walkers, so the gain can be large and constant
        log_step = log_step + 1.5 * (accepted - kernel.target_acceptance)
    return float(log_step.exp()), state.x, float(accepted)


def smc(
    energy: Energy,
    reference: Proposal,
    populations: int,
    walkers: int,
    rng: torch.Generator,
    *,
    kernel: Kernel | None = None,
    schedule: Schedule | None = None,
    steps: int = 4,
    pilot_walkers: int | None = None,
    conditional_ess: float = CONDITIONAL_ESS,
    resample_below: float = RESAMPLE_BELOW,
    jitter: float = STEP_JITTER,
) -> Annealed:
    """Sequential Monte Carlo on a path that a pilot found: G independent unbiased estimates of Z in one batch.

    Args:
        energy: E, `(B, *event)` to `(B,)`.
        reference: q, normalised.
        populations: G, independent groups; they share the schedule, which the pilot fixed beforehand.
        walkers: n in each population.
        rng: source of randomness.
        kernel: leaves its target invariant; by default HMC, or Gibbs for a discrete energy. Its step size, where
            it has one, is where the pilot starts.
        schedule: skip the pilot and use this path.
        steps: moves at each temperature.
        pilot_walkers: of the pilot, by default as many as one population has, at least 256.
        conditional_ess: share of effective walkers that one change of temperature leaves.
        resample_below: populations with a smaller effective share are resampled.
        jitter: standard deviation of each walker's log step size around the schedule's.
    """
    require_count("populations", populations)
    require_count("walkers", walkers, 2)
    require(0 < conditional_ess < 1, "conditional_ess", "between 0 and 1", conditional_ess)
    kernel = default_kernel(energy) if kernel is None else kernel
    complete = True
    if schedule is None:
        size = max(walkers, 256) if pilot_walkers is None else pilot_walkers
        options = {"steps": 2 * steps, "conditional_ess": conditional_ess}
        pilot = find_schedule(energy, reference, size, kernel, rng, **options)
        schedule, complete = pilot.schedule, pilot.complete
    x = _draw(reference, populations * walkers, rng)
    options = {"steps": steps, "populations": populations, "resample_below": resample_below, "jitter": jitter}
    return replace(anneal(energy, reference, x, schedule, kernel, rng, **options), complete=complete)


def default_kernel(energy: Energy | None = None) -> Kernel:
    """Short Hamiltonian trajectories: they forget their start in fewer gradients than Langevin steps.

    Gibbs sweeps where the energy is discrete.
    """
    if is_discrete(energy):
        return Gibbs()
    return HMC(step_size=0.3, leapfrog=4)
