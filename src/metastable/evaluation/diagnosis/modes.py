"""Modes: lost ones, wrong weights, weights that a method cannot see; and how far samples spread."""

from __future__ import annotations

import numpy as np

from .facts import WEIGHT_SE, Facts
from .finding import Evidence, Finding
from .log import Log

WEIGHT_FLOOR = 0.03  # of the total mass
WEIGHT_PROBLEM = 0.1  # of the total mass
WEIGHT_UNKNOWN_SE = 0.1  # floor where no standard error was given


def _blindness(facts: Facts) -> str:
    """The sentence that is owed to the user of a method that cannot see mode weights."""
    traits = facts.traits
    if traits.sees_mode_weights or facts.separated is False:
        return ""
    where = "between these modes lie gaps of low density" if facts.separated else "where gaps separate modes"
    return (
        f" {traits.words.capitalize()} learns from the inside of each mode only, and {where}: it cannot see how "
        "much mass a mode has."
    )


def _weights_advice(facts: Facts) -> str:
    if not facts.traits.sees_mode_weights:
        return (
            "Use a method that carries weights across gaps, such as jarzynski, or NCE with a good proposal."
        )
    return facts.traits.mode_weights_advice or (
        "Use longer chains, or chains that start in every mode; or a method that carries weights across gaps, such "
        "as jarzynski."
    )


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(v), 4) for v in values]


def _weights_evidence(facts: Facts) -> Evidence:
    differences = facts.weight_differences
    assert differences is not None
    data, sample, error = differences
    evidence: Evidence = {"data_mode_weights": _rounded(data), "sample_mode_weights": _rounded(sample)}
    if not np.isnan(error).any():
        evidence["mode_weight_se"] = _rounded(error)
    return evidence


def mode_collapse(log: Log, facts: Facts) -> Finding | None:
    """Modes of the data that samples lost, or samples that cover a part of the data."""
    lost = facts.lost_modes
    if lost:
        evidence = _weights_evidence(facts)
        evidence["lost_modes"] = [m + 1 for m in lost]  # people count modes from one, as tables do
        which = ", ".join(str(m + 1) for m in lost)
        data, sample, _ = facts.weight_differences  # type: ignore[misc]
        text = (
            f"Mode{'s' if len(lost) > 1 else ''} {which} held {data[lost].sum():.1%} of the data and "
            f"{sample[lost].sum():.1%} of the samples.{_blindness(facts)}"
        )
        return Finding("mode-collapse", "problem", text, evidence, _weights_advice(facts))
    ratio = facts.sample_std_ratio
    if ratio is None or ratio >= 0.5:
        return None
    return Finding(
        "mode-collapse",
        "problem" if ratio < 0.3 else "warning",
        f"Samples spread over {ratio:.2g} of the data's standard deviation: they cover only a part of it.",
        {"sample_std_ratio": float(ratio)},
        "Start chains from noise or from data in every mode, use more walkers, and look at the samples.",
    )


def wrong_mode_weights(log: Log, facts: Facts) -> Finding | None:
    """Modes whose share of the samples is not that of the data."""
    differences = facts.weight_differences
    if differences is None or facts.lost_modes:
        return None
    data, sample, error = differences
    off = np.abs(sample - data)
    floor = np.where(np.isnan(error), WEIGHT_UNKNOWN_SE, np.maximum(WEIGHT_FLOOR, WEIGHT_SE * error))
    if not (off > floor).any():
        return None
    worst = int(np.argmax(np.where(off > floor, off, 0)))
    chance = ", with no uncertainty stated"
    if error[worst] != 0:
        apart = off[worst] / error[worst]
        chance = "" if np.isnan(error[worst]) else f", {apart:.1f} standard errors apart"
    return Finding(
        "wrong-mode-weights",
        "problem" if off[worst] > WEIGHT_PROBLEM else "warning",
        f"Mode {worst + 1} holds {data[worst]:.1%} of the data but {sample[worst]:.1%} of the samples"
        f"{chance}.{_blindness(facts)}",
        _weights_evidence(facts) | {"worst_mode": float(worst + 1), "worst_error": float(off[worst])},
        _weights_advice(facts),
    )


def samples_too_wide(log: Log, facts: Facts) -> Finding | None:
    """Samples that spread much further than the data."""
    ratio = facts.sample_std_ratio
    if ratio is None or ratio <= 2 or facts.has_left:  # of which more is said by `mass_ran_away`
        return None
    return Finding(
        "samples-too-wide",
        "problem" if ratio > 5 else "warning",
        f"Samples spread {ratio:.3g} times as far as the data: chains have not reached them, or have left.",
        {"sample_std_ratio": float(ratio)},
        "Run more chain steps, lower step_size if chains fly off, or train longer.",
    )


def mode_weights_unseen(log: Log, facts: Facts) -> Finding | None:
    """Separated modes under a method that cannot see their weights."""
    if not facts.separated or facts.traits.sees_mode_weights:
        return None
    if facts.lost_modes or wrong_mode_weights(log, facts) is not None:
        return None
    return Finding(
        "mode-weights-unseen",
        "note",
        f"Nothing in this run checks how much mass each mode has.{_blindness(facts)}",
        {"method": facts.traits.name, "separated": "yes"},
        "If the weights matter, train with jarzynski or measure them against data.",
    )
