"""What speaks against an estimate of log Z, in words."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from metastable.walkers.anneal import Annealed

from .stationarity import Drift


class Walked(NamedTuple):
    """Populations at the end of the path; how they drifted; how far a finer path moved log Z, and its noise."""

    main: Annealed
    drift: Drift | None = None
    rise: float = 0.0
    rise_error: float = 0.0


def pilot_words(pilot: Annealed, data_given: bool = False) -> tuple[str, ...]:
    """Of a pilot that never reached the model; what there is already is not asked for."""
    if pilot.complete:
        return ()
    ask = "a reference of the model's own width" if data_given else "data, a reference or a larger spread"
    return (
        "walkers ran away before they reached the model: ∫ exp(−E) may not exist; if it does, the model is far "
        f"from where the search began: give {ask}",
    )


def lost_words(data_given: bool) -> str:
    """Of a search that ended without a Gaussian around the model."""
    if data_given:
        return "no Gaussian was found that holds the model: it lies elsewhere than the data, or is far wider"
    return "no Gaussian was found that holds the model: give data or a reference"


def run_words(main: Annealed, error: float) -> list[str]:
    """Of the populations: who carries the weight, whether they agree, whether they moved."""
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


def drift_words(walked: Walked) -> list[str]:
    """Of walkers that went on, and of a finer path."""
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


def contradictions(
    value: float, error: float, reverse: float | None, reverse_error: float | None, wide: float | None
) -> list[str]:
    """Of other estimates of the same number."""
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


def outside_words(who: str, own: Tensor, log_q: Tensor, p: Tensor) -> list[str]:
    """A quarter beyond the reference's 1 % quantile, or a hundredth ten nats beyond its last draw."""
    beyond = float(p[log_q < own.quantile(0.01)].sum())
    far = float(p[log_q < own.min() - 10].sum())
    if beyond <= 0.25 and far <= 0.01:
        return []
    return [f"{max(beyond, far):.0%} {who} outside the reference: it is too narrow or in the wrong place"]
