"""log Z read from walkers that only follow θ, and what speaks against it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from metastable.core.types import Energy, LogPartition
from metastable.core.weights import ess_fraction, log_mean_exp, spread_of_log_mean
from metastable.kernels import ULA, Kernel

from .outside import log_mass_outside
from .population import Population
from .space import space_of

MOST_OUTSIDE = math.log(0.02)
"""log of the mass beyond the farthest walker from which on log Z of the walkers is not that of the model."""
LEAST_WALKERS, LEAST_ANCESTORS = 50, 10
"""Of one held-out population, for its spread to say how wrong log Z is."""


def held_out_log_partition(
    energy: Energy, following: Population, steering: Population, kernel: Kernel, updates: int
) -> LogPartition:
    """log Z of the current model from `following`, with every doubt that there is of it.

    Args:
        energy: of the current model.
        following: held-out populations, whose spread is the error.
        steering: the walkers that steer θ.
        kernel: that moved them.
        updates: of θ so far.
    """
    read = HeldOut.of(following)
    ess = float(ess_fraction(following.comparable_log_weight())) * len(following.x)
    doubts = (
        *read.doubts(),
        *doubts_of_moves(read, kernel, math.prod(following.x.shape[1:]), updates),
        *doubts_of_gap(read, steering),
        *doubts_of_reach(energy, following.x, read.value),
    )
    return LogPartition(read.value, read.error, ess, following.groups - 1, doubts)


@dataclass(frozen=True)
class HeldOut:
    """log Z of held-out populations, and what speaks for and against it.

    Attributes:
        value: log Z.
        error: its standard error. It is the spread between populations, or, where that is the smaller by chance,
            what the weights predict, but never more than half as much again.
        spread: standard deviation of log Z between populations.
        noise: the same as the weights predict it, see `Population.noise`.
        agreeing: effective share of the populations in their mean of Z: 1 where all say the same.
        size: walkers of a population.
        ancestors: first walkers that the population with the fewest of them descends from.
        ess: the lowest effective sample size of a population, as a fraction.
        resampled: whether any of them was ever resampled.
    """

    value: float
    error: float
    spread: float
    noise: float
    agreeing: float
    size: int
    ancestors: int
    ess: float
    resampled: bool

    @classmethod
    def of(cls, walkers: Population) -> HeldOut:
        """Read from held-out populations."""
        log_z, size = walkers.log_partition(), len(walkers.x) // walkers.groups
        error, noise = float(spread_of_log_mean(log_z)), math.sqrt(float(walkers.noise().mean()))
        predicted = noise / math.sqrt(walkers.groups)
        return cls(
            value=float(log_mean_exp(log_z)),
            error=max(error, min(predicted, 1.5 * error)),
            spread=float(log_z.std()),
            noise=noise,
            agreeing=float(ess_fraction(log_z)),
            size=size,
            ancestors=round(float(walkers.ancestors().min()) * size),
            ess=float(walkers.ess().min()),
            resampled=bool((walkers.resamplings > 0).any()),
        )

    @property
    def agree(self) -> bool:
        """Whether no few populations decide their mean of Z."""
        return self.spread <= 1 and self.agreeing >= 0.5

    def doubts(self) -> list[str]:
        """Why the value or its error should not be trusted; empty when nothing speaks against them."""
        checks = [
            (
                not self.agree,
                f"the held-out populations disagree by {self.spread:.2f} nats, and a few of them decide; use more "
                "walkers or a lower pace",
            ),
            (
                self.size < LEAST_WALKERS,
                f"each held-out population has only {self.size} walkers; their spread may be too small",
            ),
            (self.error > 0.5, f"the standard error is {self.error:.2f} nats"),
            (
                self.ess < 0.05,
                f"one held-out population has an effective sample size of {100 * self.ess:.1f} %",
            ),
            (
                self.noise > 1,
                f"all the weights since the start make log Z of a population uncertain by {self.noise:.2f} nats, "
                "more than the spread between populations can be believed to show; use a lower pace, more walkers, "
                "or moves that are adjusted",
            ),
            (
                self.resampled and self.ancestors < min(LEAST_ANCESTORS, self.size),
                f"one held-out population descends from {self.ancestors} of its {self.size} first walkers; use a "
                "lower pace or more walkers",
            ),
            (
                self.spread > max(0.2, 1.5 * self.noise),
                f"the held-out populations disagree by {self.spread:.2f} nats where their weights predict "
                f"{self.noise:.2f}: rare walkers of large weight decide, or walkers do not mix; use adjusted moves "
                "(leave step_size and kernel out), shorter steps or more walkers",
            ),
        ]
        return [words for speaks, words in checks if speaks]


def doubts_of_reach(energy: Energy, x: Tensor, log_z: float) -> list[str]:
    """Mass farther out than any walker, where a network has outgrown its reference."""
    if not space_of(energy).has_volume or not math.isfinite(log_z):
        return []
    log_mass = log_mass_outside(energy, x, log_z)
    if not log_mass > MOST_OUTSIDE:
        return []
    return [
        "the energy falls again farther out than any walker, where it puts more mass than around the data: use a "
        "lower learning rate, fewer updates, or a reference that the network cannot outgrow"
        if log_mass > 0
        else f"{100 * math.exp(log_mass):.1f} % of the mass lie farther out than any walker"
    ]


def doubts_of_moves(read: HeldOut, kernel: Kernel, dim: int, updates: int) -> list[str]:
    """Unadjusted moves that lead away from the model: weights then do their work, and rare ones decide.

    A ULA step of h = κσ² adds dim·κ³/2 to the variance of a weight; beyond κ = ½ its own law is a third wider than
    the model. With noise of its own, or a clipped drift, it is another law at any step.
    """
    if not isinstance(kernel, ULA) or updates == 0:
        return []
    altered = kernel.noise is not None or kernel.drift_clip is not None
    most, each = (0.01 if altered else 0.06 * dim), read.noise**2 * read.size / updates
    if not each > most:
        return []
    what = "moves whose noise or drift was altered lead" if altered else "the step is too long: moves lead"
    return [
        f"{what} away from the model, and add a variance of {each:.2g} to the weights in each update, so that rare "
        "walkers decide; leave step_size and kernel out, so that moves are adjusted and the step tunes itself"
    ]


def doubts_of_gap(read: HeldOut, steering: Population) -> list[str]:
    """Two estimates of one log Z that cannot both be right."""
    gap = float(steering.log_partition()[0]) - read.value
    chance = math.sqrt(read.error**2 + float(steering.noise()[0]))
    if not abs(gap) > max(1.0, 4 * chance):
        return []
    side = "above" if gap > 0 else "below"
    return [
        f"the walkers that steer θ give a log Z {abs(gap):.2f} nats {side} this one, which is that of held-out "
        "walkers and is believed, since steering walkers pull their own down; as far apart as that, θ was steered "
        "by walkers that are not the model's. Use a lower pace or learning rate, or more walkers"
    ]
