"""Diagnosis in words: what a training log and a few facts about the samples say went wrong, and what to try.

Everything here is arithmetic on logged numbers; nothing needs the model or its data. There is one file for each
family of rules, and `RULES` lists them all. Thresholds are constants with the reason beside them. A finding carries
the numbers it rests on. What is asked of the method stands on the method (`core.traits`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from metastable.core.errors import require

from .chains import stuck_chains, weight_degeneracy
from .contrasts import (
    PROFILES,
    conditional_noise,
    negatives_ignored,
    pool_by_heart,
    posterior_collapse,
    profile_of,
    ranking_profile,
)
from .density import (
    estimated_density,
    impossible_likelihood,
    mass_ran_away,
    no_density,
    overfitting,
    tempered_density,
)
from .energies import constant_energy, energies_drifting, energy_steepening
from .facts import Facts
from .finding import SEVERITIES, Evidence, Finding, format_findings
from .learning import no_learning, not_converged, too_little_history
from .log import ENTROPIES, LEAST_ROWS, Log, Row
from .modes import mode_collapse, mode_weights_unseen, samples_too_wide, wrong_mode_weights

Rule = Callable[[Log, Facts], Finding | None]
"""From the log and the facts to what they say, or None where they say nothing."""

RULES: list[Rule] = [
    mass_ran_away,
    impossible_likelihood,
    no_density,
    energies_drifting,
    mode_collapse,
    wrong_mode_weights,
    samples_too_wide,
    constant_energy,
    energy_steepening,
    no_learning,
    not_converged,
    weight_degeneracy,
    stuck_chains,
    conditional_noise,
    posterior_collapse,
    pool_by_heart,
    ranking_profile,
    negatives_ignored,
    estimated_density,
    overfitting,
    mode_weights_unseen,
    too_little_history,
]
"""In the order in which findings of one severity are told. A rule of your own may be appended."""


def diagnose(history: Sequence[Row], facts: Facts | None = None) -> list[Finding]:
    """Findings, worst first; one `healthy` note where nothing speaks against the run.

    Args:
        history: rows of `metrics.jsonl`. Keys that are used where present: step, energy_data,
            energy_negatives, energy_gap, grad_norm, cross_entropy, label_cross_entropy, ess, ess_held_out,
            resamplings, resampled, ancestors, log_z_noise, pace, displacement, acceptance, step_size (where it
            tunes itself), gradient_magnitude, pair_logit, pair_weight, saturated, positive_weight, objective,
            objective_new, grad_scale, negatives_ignored, beta_o.
        facts: what is known beside the log.

    >>> rows = [{"step": k, "energy_gap": 0.0, "acceptance": 0.02} for k in range(100)]
    >>> [finding.name for finding in diagnose(rows)]
    ['stuck-chains']
    """
    facts = facts or Facts()
    log = Log(history, facts.power)
    found = [finding for rule in RULES if (finding := rule(log, facts)) is not None]
    for finding in found:
        require(isinstance(finding, Finding), "RULES", "rules that return a Finding or None", finding)
    if not any(finding.severity != "note" for finding in found) and len(log) >= LEAST_ROWS:
        found.append(healthy(log, facts))
    tempered = tempered_density(log, facts)
    found += [] if tempered is None else [tempered]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def healthy(log: Log, facts: Facts) -> Finding:
    """What is known to be well, where nothing speaks against a run."""
    evidence: Evidence = {"rows": float(len(log)), "steps": float(facts.steps or log.last_step)}
    gap = log.gap_trend
    parts = ["Nothing in the log speaks against this run."]
    if gap is not None:
        evidence |= gap.evidence("gap")
        parts.append(f"Energy gap {gap.last:.2g} ± {gap.se:.1g} at the end.")
    for key, name in ENTROPIES.items():
        entropy = log.trend(key)
        if entropy is not None:
            evidence |= {f"{key}_first_fifth": entropy.first, f"{key}_last_fifth": entropy.last}
            parts.append(f"{name} from {entropy.first:.4g} to {entropy.last:.4g}.")
    profile = profile_of(log, facts)
    if profile is not None:
        evidence |= {"objective": profile.end, "matched": profile.level}
        parts.append(f"Objective {profile.end:.3f}; −log(K+1) is {profile.level:.3f}.")
    ess = log.series("ess")
    if len(ess):
        evidence["ess_median"] = float(np.median(ess))
        parts.append(f"Effective sample size {np.median(ess):.0%} of the walkers.")
    return Finding("healthy", "note", " ".join(parts), evidence)


__all__ = [
    "PROFILES",
    "RULES",
    "SEVERITIES",
    "Evidence",
    "Facts",
    "Finding",
    "Log",
    "Row",
    "Rule",
    "diagnose",
    "format_findings",
]
