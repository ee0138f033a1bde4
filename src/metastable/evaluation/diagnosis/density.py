"""Whether there is a density, and whether its likelihood is one that a density can have."""

from __future__ import annotations

import math

from .facts import WEIGHT_SE, Facts
from .finding import Evidence, Finding
from .log import CLEAR, Log

MARKOV = 7.0  # nats of mass that a density cannot have around the data but with a probability of e⁻⁷
ENTROPY_SLACK = 5.0  # nats
ENTROPY_SLACK_PER_DIMENSION = 3.5  # nats: data may be 30 times finer than neighbours are apart
BIAS_FLOOR = 0.05  # nats of log-density

ON_A_REFERENCE = (
    'Put the energy on a reference with one word, fit(…, reference="gaussian"): a Gaussian fitted to the data '
    "(energies.Tilted), whose energy grows as the square of the distance."
)


def mass_ran_away(log: Log, facts: Facts) -> Finding | None:
    """Samples far beyond every datum."""
    if not facts.has_left:
        return None
    evidence: Evidence = {"far_share": float(facts.far_share or 0)}
    evidence |= {} if facts.sample_radius is None else {"sample_radius": float(facts.sample_radius)}
    evidence |= {} if facts.rays_down is None else {"rays_down": float(facts.rays_down)}
    where = (
        ""
        if facts.sample_radius is None
        else f", at a median of {facts.sample_radius:.3g} spreads of the data"
    )
    why = ""
    if facts.rays_down:
        why = f" The energy grows too slowly along {facts.rays_down:.0%} of the rays away from the data."
    elif facts.bare:
        why = " The energy stands on no reference that would hold it."
    return Finding(
        "mass-ran-away",
        "problem",
        f"{facts.far_share:.0%} of the samples lie more than five times as far out as any datum{where}: the mass "
        f"of the model has run away.{why}",
        evidence,
        ON_A_REFERENCE
        if facts.rays_down or facts.bare
        else "Use a smaller learning rate and more walkers, so that chains follow; begin some afresh from noise.",
    )


def no_density(log: Log, facts: Facts) -> Finding | None:
    """Of an energy that falls far away where samples have not yet been: they are of a part of space only."""
    if not facts.rays_down or facts.has_left:
        return None
    return Finding(
        "no-density",
        "warning",
        f"Along {facts.rays_down:.0%} of the rays away from the data the energy grows too slowly for exp(−E) to "
        "have a finite integral. Samples have not gone there, and log Z is of the part of space where they are.",
        {"rays_down": float(facts.rays_down)},
        ON_A_REFERENCE,
    )


def impossible_likelihood(log: Log, facts: Facts) -> Finding | None:
    """More than a density can have: mass beyond one around the data, or less surprise than the data's law has."""
    claimed = facts.log_likelihood
    if claimed is None:
        return None
    error = facts.log_likelihood_se or 0.0
    evidence: Evidence = {"log_likelihood": float(claimed), "log_likelihood_se": float(error)}
    too_much = facts.excess_mass is not None and facts.excess_mass > MARKOV + CLEAR * error
    if too_much:
        evidence["excess_mass"] = float(facts.excess_mass or 0)
        what = (
            f"with this log Z the density sums to e^{facts.excess_mass:.4g} around the data, and no density to "
            "more than 1: log Z is too low by at least as much"
        )
    elif _below_entropy(facts):
        assert facts.entropy is not None
        evidence |= {"entropy": float(facts.entropy), "entropy_se": float(facts.entropy_se or 0)}
        evidence |= {"copies": float(facts.copies)} if facts.copies else {}
        what = (
            f"the entropy of the data is about {facts.entropy:.4g} nats, and no density gives their law more than "
            "minus that on average"
        )
    else:
        return None
    return Finding(
        "impossible-likelihood",
        "problem",
        f"A log-likelihood of {claimed:.4g} nats is none that a density can have: {what}.",
        evidence,
        _impossible_advice(facts),
    )


def _below_entropy(facts: Facts) -> bool:
    claimed, entropy, d = facts.log_likelihood, facts.entropy, facts.dimensions
    if claimed is None or entropy is None or d is None or not math.isfinite(entropy):
        return False
    error = math.hypot(facts.log_likelihood_se or 0.0, facts.entropy_se or 0.0)
    slack = ENTROPY_SLACK + ENTROPY_SLACK_PER_DIMENSION * d + CLEAR * error
    return claimed + entropy > slack


def _impossible_advice(facts: Facts) -> str:
    if facts.rays_down or (facts.bare and facts.has_left):
        return ON_A_REFERENCE
    if facts.copies:
        return (
            "Rows are copies of each other, where a density may rise without end: add noise (data_noise=…) or "
            "dequantise columns of few distinct values."
        )
    return (
        "Do not use it: take log Z from another estimate (`metastable evaluate --log-z`), and use more walkers or "
        "a smaller learning rate, so that weights keep up. Where the model has spikes at single rows, add noise to "
        "the data (data_noise=…)."
    )


def estimated_density(log: Log, facts: Facts) -> Finding | None:
    """Noise whose log-density is an estimate, and biased."""
    bias, draws = (log.late(key) for key in ("density_bias", "density_draws"))
    if bias is None or draws is None:
        return None
    return Finding(
        "estimated-density",
        "warning" if bias < -BIAS_FLOOR else "note",
        f"The noise's log-density is a Monte-Carlo estimate with {draws:.0f} draws, biased low by about "
        f"{-bias:.2g} nats on the data: the objective and the learned log Z are biased with it.",
        {"density_bias": bias, "density_draws": draws},
        "Use a flow, whose density is exact, or more draws; take log Z from another estimate.",
    )


def overfitting(log: Log, facts: Facts) -> Finding | None:
    """Training data that are more likely than held-out ones."""
    gap, error = facts.held_out_energy_gap, facts.held_out_energy_gap_se
    floor = 0.5 if error is None else max(0.1, WEIGHT_SE * error)
    if gap is None or not gap > floor:
        return None
    evidence: Evidence = {"held_out_energy_gap": float(gap)}
    evidence |= {} if error is None else {"held_out_energy_gap_se": float(error)}
    return Finding(
        "overfitting",
        "warning",
        f"Held-out data lie {gap:.3g} nats higher in energy than training data: examples were memorised.",
        evidence,
        "Stop earlier, use a smaller energy or weight decay, add noise to the data, or get more of them.",
    )


def tempered_density(log: Log, facts: Facts) -> Finding | None:
    """What was learned is another power of exp(−E)."""
    power = facts.power
    if power == 1:
        return None
    return Finding(
        "tempered-density",
        "note",
        f"What was learned is exp(−{power:g}·E), the density at temperature {1 / power:.4g}, where the chains "
        "and the weights of their samples put it, and not exp(−E). log Z, likelihoods, samples and the energies in "
        "these findings are of that density.",
        {"power": float(power)},
        "Nothing, unless you use run.energy yourself: run.learned_energy is the one of this density.",
    )
