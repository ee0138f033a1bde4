"""Negatives that teach nothing: too near to the data, too far, or ignored."""

from __future__ import annotations

import numpy as np

from metastable.evaluation import profiles

from .facts import Facts
from .finding import Evidence, Finding
from .log import LEAST_ROWS, Log, mean_error

PAIRS_ALIKE = 0.05  # nats of log-odds in a pair: below, σ needs fifty times the data of the best one
PAIRS_APART = 0.01  # mean weight 1 − posterior: below, ten times the data
IGNORED = 0.01  # mean weight of negatives, 1 without β: below, an update is a hundredth of what it was
COLLAPSED = 0.01  # mean weight of a datum among its negatives: below, hardly a gradient is left
BY_HEART = 0.25  # nats by which rows of a pool are told from their negatives better than rows just drawn


def conditional_noise(log: Log, facts: Facts) -> Finding | None:
    """Noise of conditional NCE that is too near to its datum or too far from it."""
    logit, weight = (log.late(key) for key in ("pair_logit", "pair_weight"))
    if logit is None or weight is None:
        return None
    evidence: Evidence = {"pair_logit": logit, "pair_weight": weight}
    saturated = log.late("saturated")
    evidence |= {} if saturated is None else {"saturated": saturated}
    if logit < PAIRS_ALIKE:
        return Finding(
            "conditional-noise-too-small",
            "problem" if logit < PAIRS_ALIKE / 5 else "warning",
            f"A datum and the noise made from it differ by {logit:.2g} nats on average: every pair is a coin toss, "
            "and gradients vanish.",
            evidence,
            "Raise sigma until pair_logit is about 1 or 2; if the energy is still flat, train on.",
        )
    if weight < PAIRS_APART:
        return Finding(
            "conditional-noise-too-large",
            "problem" if weight < PAIRS_APART / 10 else "warning",
            f"Noise is told from the datum it was made from with a doubt of {weight:.2g} on average: pairs are too "
            "easy, and gradients vanish.",
            evidence,
            "Lower sigma until pair_logit is about 1 or 2.",
        )
    return None


def posterior_collapse(log: Log, facts: Facts) -> Finding | None:
    """A datum that is told from its negatives without doubt."""
    weight = log.late("positive_weight")
    if weight is None or weight >= COLLAPSED:
        return None
    return Finding(
        "posterior-collapse",
        "problem" if weight < COLLAPSED / 10 else "warning",
        f"A datum is told from its negatives with a doubt of {weight:.2g} on average: hardly any gradient is left.",
        {"positive_weight": weight},
        "Use a proposal that is nearer to the data, such as a flow that is trained beside the energy, or more "
        "negatives for each datum.",
    )


def pool_by_heart(log: Log, facts: Facts) -> Finding | None:
    """Draws that serve so many updates that the energy knows them by heart."""
    later = Log([row for row in log.rows[len(log) // 2 :] if "objective_new" in row])
    if min(len(later.series(key)) for key in ("objective", "objective_new")) < 5:
        return None
    pooled, new = (float(np.median(later.series(key))) for key in ("objective", "objective_new"))
    if (gap := pooled - new) < BY_HEART:
        return None
    return Finding(
        "pool-by-heart",
        "problem" if gap > 4 * BY_HEART else "warning",
        f"The energy knows its pool of draws by heart: the objective is {pooled:.3f} on rows of the pool and "
        f"{new:.3f} on rows just drawn.",
        {"objective": pooled, "objective_new": new},
        "Raise pool or lower reuse, so that a row is seen fewer times; or lower the learning rate.",
    )


def profile_of(log: Log, facts: Facts) -> profiles.Profile | None:
    """The course of the objective of ranking NCE; None for other methods and short logs."""
    by_heart = pool_by_heart(log, facts) is not None  # then the objective says little
    K, objective = facts.negatives_per_datum, log.series("objective_new" if by_heart else "objective")
    if K is None or not facts.traits.weighs or len(objective) < LEAST_ROWS:
        return None
    error = mean_error(objective[len(objective) // 2 :], len(objective) // 5)
    return profiles.ranking_profile(objective, K, error)


def ranking_profile(log: Log, facts: Facts) -> Finding | None:
    """Which of Figure 2's courses it is; a collapse has a finding of its own, and a balance needs none."""
    profile = profile_of(log, facts)
    if profile is None or profile.name not in PROFILES:
        return None
    severity, text, advice = PROFILES[profile.name]
    numbers = {"objective_first": profile.start, "objective_peak": profile.peak, "objective": profile.end}
    evidence: Evidence = {**numbers, "matched": profile.level}
    text = text.format(start=profile.start, peak=profile.peak, end=profile.end, level=profile.level)
    return Finding(profile.name, severity, text, evidence, advice)


PROFILES = {
    profiles.CAUGHT_UP: (
        "note",
        "The energy learned faster than the proposal (objective up to {peak:.3f}), which then caught up: the "
        "objective ends at {end:.3f}, and at −log(K+1) = {level:.3f} nothing tells its draws from data.",
        "",
    ),
    profiles.BEHIND: (
        "note",
        "The proposal stays behind the energy: the objective rose to {peak:.3f} and fell to {end:.3f} only, "
        "above −log(K+1) = {level:.3f}. The energy has learned what the proposal cannot hold.",
        "Give the proposal more capacity or steps if log Z or samples suffer; chains from its draws mend these.",
    ),
    profiles.AHEAD: (
        "note",
        "The proposal was ahead and the energy came up to it from below: the objective rose from {start:.3f} to "
        "{end:.3f}, and at −log(K+1) = {level:.3f} both are matched.",
        "",
    ),
    profiles.OVERTOOK: (
        "note",
        "The energy overtook its proposal: the objective came up from {start:.3f} to {end:.3f}, above −log(K+1) "
        "= {level:.3f}. The energy has learned what the proposal cannot hold.",
        "Give the proposal more capacity or steps if log Z or samples suffer; chains from its draws mend these.",
    ),
    profiles.MISLEADING: (
        "warning",
        "The energy is behind its proposal: the objective ends at {end:.3f}, below −log(K+1) = {level:.3f}, which "
        "an energy that copies −log p_ξ would have. The proposal alone is the better model.",
        "Train the energy longer, raise its learning rate or energy_steps, or give it more capacity. With "
        "contexts, one that starts as its proposal (energy 'on-proposal') is at that level from its first update. "
        "Until then take draws of the proposal: gradients of this energy lead away from them.",
    ),
}


def negatives_ignored(log: Log, facts: Facts) -> Finding | None:
    """All negatives far less likely than data: at the end of a log, or in a quarter of it."""
    scale, late = log.series("grad_scale"), log.late("grad_scale")
    if late is None:
        return None
    share = float(np.mean(scale < IGNORED))
    if late >= IGNORED and share < 0.25:
        return None
    evidence: Evidence = {"grad_scale": late, "rows_ignored": share}
    ignored, gap = (log.late(key) for key in ("negatives_ignored", "energy_gap"))
    evidence |= {} if ignored is None else {"negatives_ignored": ignored}
    evidence |= {} if gap is None else {"energy_gap": gap}
    lasting = "to the end" if late < IGNORED else f"in {share:.0%} of the log"
    return Finding(
        "negatives-ignored",
        "problem" if late < IGNORED else "warning",
        f"Negatives are so much less likely than data that all of them are set aside, {lasting}: late in the run "
        f"they count for {late:.2g} of what they would without β.",
        evidence,
        "An adaptive optimiser (Adam) scales such gradients up again and undoes the protection: use SGD. Lower "
        "beta, and help the chains (more steps, or pcd), so that some negatives are as likely as data.",
    )
