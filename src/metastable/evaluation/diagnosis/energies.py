"""Energies that run away, fall flat or grow steep."""

from __future__ import annotations

import math

import numpy as np

from metastable.core.step_advice import signs_of, why_diverged

from .density import ON_A_REFERENCE
from .facts import Facts
from .finding import Finding
from .log import ENTROPIES, LEAST_ROWS, Log, number, tenths

ENERGY_FLOOR = 50.0  # nats: no barrier that a chain can cross is this high
GAP_GROWTH_FLOOR = 10.0  # nats
FLAT = 0.3  # nats: under a Gaussian, log-densities spread by √(d/2), which is at least 0.7
STEEPER = 3.0  # growth of ‖∇E‖ from the third tenth of a run to its last: settled runs stay below 2


def energies_drifting(log: Log, facts: Facts) -> Finding | None:
    """Energies that are no numbers, a gap that opens, or an offset that grows."""
    return _non_finite(log) or _gap_growing(log, facts) or _offset_growing(log)


def _non_finite(log: Log) -> Finding | None:
    watched = ("energy_data", "energy_negatives", "energy_gap", "grad_norm", "log_z", *ENTROPIES)
    for place, row in enumerate(log.rows):
        for key in watched:
            value = number(row.get(key))
            if value is not None and not math.isfinite(value):
                step = number(row.get("step")) or float(place)
                cause, advice = why_diverged(signs_of(log.rows[max(place - 1, 0) : place + 1]))
                text = f"{key} became {value} at step {step:g}: from there on the numbers mean nothing."
                return Finding(
                    "energies-drifting",
                    "problem",
                    f"{text} {cause}".strip(),
                    {"step": step, "key": key, "value": str(value)},
                    f"Go back to the last checkpoint before that step. {advice}",
                )
    return None


def _keeps_growing(bins: np.ndarray, floor: float) -> bool:
    """Whether ten successive medians run away from zero without settling.

    The end must be past `floor` and three times the start, most steps must go the same way, and the last
    third must be as steep as the whole (0.6 of it: a logarithm settles, a straight line does not).
    """
    start, end = bins[1], bins[-1]
    direction = math.copysign(1.0, end - start)
    onward = float(np.mean(np.diff(bins[1:]) * direction > 0))
    late, whole = (end - bins[-4]) / 3, (end - start) / 8
    return abs(end) > max(floor, 3 * abs(start)) and onward >= 0.75 and late * direction >= 0.6 * abs(whole)


def _gap_growing(log: Log, facts: Facts) -> Finding | None:
    gap = log.gap
    if len(gap) < LEAST_ROWS or not facts.traits.gap_vanishes:
        return None
    bins = tenths(gap)
    if not _keeps_growing(bins, GAP_GROWTH_FLOOR):
        return None
    side = "below" if bins[-1] < 0 else "above"
    return Finding(
        "energies-drifting",
        "problem",
        f"The energy of data runs ever further {side} that of the negatives (gap {bins[1]:.3g} early, "
        f"{bins[-1]:.3g} at the end); at equilibrium the gap is about 0.",
        {"gap_early": float(bins[1]), "gap_late": float(bins[-1]), "gap_bins": bins.tolist()},
        ON_A_REFERENCE
        if facts.has_left and (facts.rays_down or facts.bare)
        else "The chains do not follow the energy: take more chain steps for each update or a smaller learning "
        "rate, or penalise the squares of the energies.",
    )


def _offset_growing(log: Log) -> Finding | None:
    sides = [log.series(key) for key in ("energy_data", "energy_negatives")]
    sides = [values for values in sides if len(values) >= LEAST_ROWS]
    if not sides:
        return None
    bins = np.mean([tenths(values) for values in sides], axis=0)
    if not _keeps_growing(bins, ENERGY_FLOOR):
        return None
    accelerating = abs(bins[-1] - bins[-4]) > 2 * abs(bins[-4] - bins[-7])
    pace = "faster and faster" if accelerating else "steadily"
    return Finding(
        "energies-drifting",
        "problem" if accelerating else "warning",
        f"Energies move away from zero {pace}, from {bins[1]:.4g} to {bins[-1]:.4g}, and have not settled.",
        {"energy_early": float(bins[1]), "energy_late": float(bins[-1]), "energy_bins": bins.tolist()},
        "A common offset does not change the model but costs precision: penalise the squares of the energies "
        "a little, or lower the learning rate. If training simply is not finished, train on.",
    )


def constant_energy(log: Log, facts: Facts) -> Finding | None:
    """An energy that does not tell data from noise."""
    spread = facts.energy_spread
    if spread is None or not spread < FLAT:
        return None
    return Finding(
        "constant-energy",
        "problem",
        f"Energies of data and noise together spread by {spread:.2g} nats: the model hardly tells the two apart.",
        {"energy_spread": float(spread)},
        "Let a share of the chains begin afresh from noise at each update (rejuvenation=0.1 to 0.25), so that "
        "negatives are not all near the data; raise the learning rate, or train longer.",
    )


def energy_steepening(log: Log, facts: Facts) -> Finding | None:
    """A slope along the chains that grows."""
    slope = log.series("gradient_magnitude")
    if len(slope) < LEAST_ROWS:
        return None
    bins = tenths(slope)
    if not bins[-1] > STEEPER * max(bins[2], 1e-300):
        return None
    return Finding(
        "energy-steepening",
        "warning",
        f"The energy's slope along the chains grew from {bins[2]:.3g} in the third tenth of the run to "
        f"{bins[-1]:.3g}: chains with a fixed step will be thrown away.",
        {"gradient_early": float(bins[2]), "gradient_late": float(bins[-1])},
        "Bound it with spectral normalisation (energies.spectral_norm), or lower the learning rate and step_size.",
    )
