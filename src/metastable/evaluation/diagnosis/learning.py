"""Whether anything is learned, and whether training has ended."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .contrasts import COLLAPSED
from .facts import Facts
from .finding import Evidence, Finding
from .log import CLEAR, ENTROPIES, IMPROVED, LEAST_ROWS, Log, Trend

GAP_FLOOR = 0.05  # nats: a smaller energy gap is no reason to say that samples are far from data
JOINT_GAP_FLOOR = 2.0  # of log Σ e^h: densities of JEM that learn end below 1, others beyond 5
WORSE_FLOOR = 0.05  # nats of cross-entropy
CONVERGED_FLOOR = 0.1  # nats: below, chains that lag a little behind the energy leave such a gap for ever


def no_learning(log: Log, facts: Facts) -> Finding | None:
    """No gradient, no gain in likelihood, or a gap that stays open."""
    found = _stalled(log, facts)
    if found is None or not len(log.series("step_size")):
        return found
    return replace(found, advice=found.advice.replace(" or a larger step_size", ""))  # it tunes itself


def _stalled(log: Log, facts: Facts) -> Finding | None:
    gradient = log.series("grad_norm")
    told = (weight := log.late("positive_weight")) is not None and weight < COLLAPSED  # what left no gradient
    if len(gradient) >= LEAST_ROWS and float(np.median(gradient)) < 1e-12 and not told:
        return _not_learning("problem", "The gradient is zero: no parameter can change.", {"grad_norm": 0.0})
    gap = log.gap_trend
    open_gap = gap is not None and facts.traits.gap_vanishes and _is_open(gap)
    entropies = {key: e for key in ENTROPIES if (e := log.trend(key)) is not None}
    for key, entropy in entropies.items():
        stalled = _entropy_stalled(entropy, key, gap, open_gap or facts.far_from_data)
        if stalled is not None:
            return stalled
    if "cross_entropy" in entropies:  # of the data: the density is judged, whatever its gap
        return None
    labels = entropies.get("label_cross_entropy")
    if labels is not None:  # so far only the classifier is judged
        return _density_stalled(log, facts, gap, labels)
    if gap is not None and open_gap and not _closes(gap):
        text = f"The energy gap stays open: {gap.first:.3g} early, {gap.last:.3g} at the end, not about 0."
        return _not_learning("problem" if facts.far_from_data else "warning", text, gap.evidence("gap"))
    levels = [log.trend(key) for key in ("energy_data", "energy_negatives", "grad_norm")]
    moved = [abs(t.last - t.first) > IMPROVED * t.change_se for t in levels if t is not None]
    if facts.far_from_data and moved and not any(moved):
        text = "Energies and gradients are where they were at the start, and samples are not like the data."
        return _not_learning("problem", text, {} if gap is None else gap.evidence("gap"))
    return None


def _not_learning(severity: str, text: str, evidence: Evidence) -> Finding:
    advice = (
        "Raise the learning rate, check that the optimiser holds the energy's parameters, and give chains "
        "more steps or a larger step_size so that negatives show where the model is wrong."
    )
    return Finding("no-learning", severity, text, evidence, advice)


def _density_stalled(log: Log, facts: Facts, gap: Trend | None, labels: Trend) -> Finding | None:
    """The gap of a classifier's density, which may stay open while the labels are learned.

    In units of o, as log p(x) counts 1/o beside log p(y | x). A classifier alone has no gap, and that of β is not
    meant to vanish: there `negatives-ignored` says whether the density is still trained.
    """
    o = facts.output_scale
    if gap is None or o is None or not facts.traits.gap_vanishes or np.any(log.series("beta_o") != 0):
        return None
    if not _is_open(gap, JOINT_GAP_FLOOR * o) or _closes(gap):
        return None
    learned = labels.first - labels.last >= IMPROVED * labels.change_se
    text = "The labels are learned, but not the density" if learned else "The density is not learned"
    text += (
        f": its energy gap does not close, {gap.first:.3g} early and {gap.last:.3g} at the end, which is "
        f"{abs(gap.last) / o:.2g} times the output scale."
    )
    evidence = gap.evidence("gap") | {"output_scale": float(o)}
    advice = (
        "Give chains more steps or a larger step_size, and log p(x) more weight (generative; 1/o where it is left "
        "out). Labels need none of this: accuracy holds, but not log p(x), outliers found by it, or samples."
    )
    severity = "problem" if facts.far_from_data else "warning"
    return Finding("no-learning", severity, text, evidence, advice)


def _entropy_stalled(entropy: Trend, key: str, gap: Trend | None, far: bool) -> Finding | None:
    gained = entropy.first - entropy.last
    worse = -gained > max(CLEAR * entropy.change_se, WORSE_FLOOR)
    if not worse and (gained >= IMPROVED * entropy.change_se or not far):
        return None
    verb = "rose" if worse else "did not fall beyond its noise"
    text = f"{ENTROPIES[key]} {verb}: {entropy.first:.4g} in the first fifth, {entropy.last:.4g} in the last"
    text += f" (standard error {entropy.se:.2g})."
    return _not_learning("problem", text, entropy.evidence(key) | (gap.evidence("gap") if gap else {}))


def not_converged(log: Log, facts: Facts) -> Finding | None:
    """A gap that is clearly not zero at the end, though it may be closing and the likelihood rising."""
    gap = log.gap_trend
    if gap is None or not facts.traits.gap_vanishes or no_learning(log, facts) is not None:
        return None
    if len(log.series("label_cross_entropy")):  # of a classifier's density `_density_stalled` says more
        return None
    swings = gap.fifths[-2] * gap.last <= 0  # about zero: noise that follows itself
    if abs(gap.last) <= max(CLEAR * gap.se, CONVERGED_FLOOR) or swings:
        return None
    course = f", from {gap.first:.3g} early" if _closes(gap) else ""
    side = "below" if gap.last < 0 else "above"
    return Finding(
        "not-converged",
        "warning",
        f"Training has not ended: the energy of data is still {abs(gap.last):.2g} ± {gap.se:.1g} {side} that of "
        f"the negatives{course}; where the model is the data's law both are the same.",
        gap.evidence("gap"),
        "Train on (more steps), or raise the learning rate while the gap is closing; where it has stopped closing, "
        "give chains more steps for each update, or the energy more capacity.",
    )


def _closes(gap: Trend) -> bool:
    return abs(gap.first) - abs(gap.last) >= IMPROVED * gap.change_se


def _is_open(gap: Trend, floor: float = GAP_FLOOR) -> bool:
    """A gap that is really not zero at the end, of a size that matters, and has long been about the same.

    The last three fifths must agree to a factor of two: what chains do slowly looks like a gap for a while.
    """
    largest = max(map(abs, gap.fifths))
    steady = all(gap.last * late > 0 and abs(late) > 0.5 * abs(gap.last) for late in gap.fifths[2:])
    return steady and abs(gap.last) > max(CLEAR * gap.se, floor, 0.5 * largest)


def too_little_history(log: Log, facts: Facts) -> Finding | None:
    """A log in which no trend can be told from noise."""
    if len(log) >= LEAST_ROWS:
        return None
    steps = facts.steps or log.last_step
    evidence: Evidence = {"rows": float(len(log)), "steps": float(steps)}
    if steps < LEAST_ROWS:
        text = f"Training ended at step {steps:.0f}, which is too short to judge: a trend needs {LEAST_ROWS} steps."
        return Finding("too-little-history", "note", text, evidence, "" if log.diverged else "Train longer.")
    text = f"The log has {len(log)} rows; {LEAST_ROWS} are needed to tell a trend from noise."
    advice = "Log more often (trainer.log_every), or train longer where training did not end by itself."
    return Finding("too-little-history", "note", text, evidence, advice)
