"""Chains that do not move, and walkers whose weights are spent."""

from __future__ import annotations

import math

import numpy as np

from metastable.core.step_advice import REFUSED, StepSigns, why_refused, why_slow

from .facts import Facts
from .finding import Evidence, Finding
from .log import Log

ESS_PROBLEM, ESS_WARNING = 0.1, 0.2
OFTEN = 0.5  # of late updates that resampled: walkers lose more in one update than they regain
LOG_Z_NOISE_PROBLEM, LOG_Z_NOISE_WARNING = 1.0, 0.5  # nats: beyond 1 a few lucky walkers decide
FEW_ANCESTORS = 0.02  # of the first walkers: two of the 128 of a held-out population
STUCK = 1e-3  # of the data's standard deviation in one update
SLOW = 1e-2


def weight_degeneracy(log: Log, facts: Facts) -> Finding | None:
    """Few walkers carry the weight, now or over the whole run."""
    severity, evidence = _low_ess(log.series("ess"))
    held_out, more = _low_ess(log.series("ess_held_out"))
    spent, meters = _spent_walkers(log)
    twins = facts.duplicates or 0.0
    if twins >= 0.9 or spent == "problem":
        severity = "problem"
    elif not severity and (twins >= 0.5 or held_out or spent):
        severity = "warning"
    if not severity:
        return None
    evidence |= {f"held_out_{key}": value for key, value in more.items()} if held_out else {}
    evidence |= {"duplicates": float(twins)} if facts.duplicates is not None else {}
    resamplings = log.series("resamplings")
    evidence |= {"resamplings": float(resamplings[-1])} if len(resamplings) else {}
    evidence |= meters
    text = _degeneracy_text(evidence, twins)
    return Finding("weight-degeneracy", severity, text, evidence, _degeneracy_advice(log))


def _spent_walkers(log: Log) -> tuple[str, Evidence]:
    """Severity and evidence of what weights lost over a whole run, which no single ESS shows."""
    resampled, ess = log.late("resampled"), log.late("ess")
    ancestors, noise = log.series("ancestors"), log.series("log_z_noise")
    evidence: Evidence = {} if resampled is None else {"resampled": resampled}
    evidence |= {"ancestors": float(ancestors[-1])} if len(ancestors) else {}
    evidence |= {"log_z_noise": float(noise[-1])} if len(noise) else {}
    if evidence.get("log_z_noise", 0.0) > LOG_Z_NOISE_PROBLEM:  # type: ignore[operator]
        return "problem", evidence
    often = resampled is not None and ess is not None and resampled > OFTEN and ess < 0.5
    noisy = evidence.get("log_z_noise", 0.0) > LOG_Z_NOISE_WARNING  # type: ignore[operator]
    few = evidence.get("ancestors", 1.0) < FEW_ANCESTORS  # type: ignore[operator]
    return ("warning" if often or noisy or few else ""), evidence


def _degeneracy_advice(log: Log) -> str:
    """Names what makes the weights spread: the learning, the moves, or the number of walkers."""
    pace, adjusted = log.late("pace"), len(log.series("acceptance")) > 0
    moving = len(log.series("displacement")) > 0
    resampled = log.late("resampled")
    if pace is not None and pace > 0.1:
        return (
            "Lower the learning rate, or bound the pace (pace=0.03): θ moves faster than walkers can follow."
        )
    if moving and not adjusted and resampled is not None and (pace is None or pace < 0.05):
        return (
            "Unadjusted moves add noise of their own to the weights, which grows with the cube of the step: lower "
            "step_size, or leave it out, so that moves are adjusted and the step tunes itself. If step_size "
            "is short already, lower the learning rate."
        )
    return (
        "Use more walkers, a smaller learning rate (or pace), more chain steps between updates, or "
        "resample earlier (a higher ESS threshold)."
    )


def _low_ess(ess: np.ndarray) -> tuple[str, Evidence]:
    """Severity and evidence: below 0.1 for a quarter of the run, or below 0.2 for half of it."""
    if len(ess) < 5:
        return "", {}
    low, lower = float(np.mean(ess < ESS_WARNING)), float(np.mean(ess < ESS_PROBLEM))
    severity = "problem" if lower >= 0.25 else "warning" if low >= 0.5 else ""
    return severity, {"ess_median": float(np.median(ess)), "share_below_0.1": lower, "share_below_0.2": low}


def _degeneracy_text(evidence: Evidence, twins: float) -> str:
    parts = []
    for prefix, who in (("", "walkers"), ("held_out_", "held-out walkers")):
        if f"{prefix}ess_median" in evidence:
            median, lower = evidence[f"{prefix}ess_median"], evidence[f"{prefix}share_below_0.1"]
            parts.append(
                f"The effective sample size of the {who} has a median of {median:.2g} of their number"
            )
            parts[-1] += f" and is below 0.1 in {lower:.0%} of the log."
    if evidence.get("resampled", 0.0) > OFTEN:  # type: ignore[operator]
        parts.append(f"Walkers are resampled after {evidence['resampled']:.0%} of the late updates.")
    if evidence.get("ancestors", 1.0) < FEW_ANCESTORS:  # type: ignore[operator]
        parts.append(f"Those that are left descend from {evidence['ancestors']:.1%} of the first ones.")
    if evidence.get("log_z_noise", 0.0) > LOG_Z_NOISE_WARNING:  # type: ignore[operator]
        parts.append(
            f"By their weights alone, a population's log Z is uncertain by {evidence['log_z_noise']:.2g}."
        )
    if twins >= 0.5:
        parts.append(f"{twins:.0%} of the walkers are copies of another.")
    return " ".join([*parts, "Averages over so few different walkers are mostly noise."])


def stuck_chains(log: Log, facts: Facts) -> Finding | None:
    """Chains that hardly move, by what they refuse or by how far they go."""
    moved, accepted = (log.series(key) for key in ("displacement", "acceptance"))
    evidence: Evidence = {} if facts.step_size is None else {"step_size": float(facts.step_size)}
    severity, text = "", ""
    if len(accepted) >= 5:
        rate = float(np.median(accepted[len(accepted) // 2 :]))
        evidence["acceptance"] = rate
        if rate < REFUSED:
            severity, text = "problem", f"Chains accept {rate:.1%} of their proposals, so they hardly move."
    if len(moved) >= 5:
        distance = float(np.median(moved[len(moved) // 2 :]))
        evidence["displacement"] = distance
        # a random walk of `distance` in each update needs distance⁻² updates to cross the data
        crosses = distance * math.sqrt(float(facts.steps or log.last_step)) >= 1
        if not severity and distance < SLOW and (distance < STUCK or not crosses):
            severity = "problem" if distance < STUCK else "warning"
            need = f"about {distance**-2:.1g} updates" if distance > 0 else "for ever"
            text = (
                f"In one update a chain moves {distance:.2g} of the data's spread: to cross it takes {need}."
            )
    if not severity:
        return None
    signs = StepSigns(*(log.late(key) for key in ("acceptance", "displacement", "step_size", "pace")))
    evidence |= {} if signs.step_size is None else {"step_size": signs.step_size}
    rejected = text.startswith("Chains accept")
    advice = why_refused(signs) if rejected else why_slow(signs, log.diverged)
    return Finding("stuck-chains", severity, text, evidence, advice)
