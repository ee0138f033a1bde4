"""Diagnosis in words: what a training log and a few facts about the samples say went wrong, and what to try.

Everything here is arithmetic on logged numbers; nothing needs the model or its data. Thresholds are
constants with the reason beside them. A finding carries the numbers it rests on.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from metastable.evaluation import profiles
from metastable.step_advice import REFUSED, StepSigns, signs_of, why_diverged, why_refused, why_slow

Row = Mapping[str, Any]
Evidence = dict[str, float | str | list]

SEVERITIES = ("problem", "warning", "note")

LEAST_ROWS = 20  # four rows in each fifth: below that no trend can be told from noise
CLEAR = 5.0  # standard errors, with noise estimated from few rows, before a difference counts as real
IMPROVED = 3.0  # standard errors by which learning must show
GAP_FLOOR = 0.05  # nats: a smaller energy gap is no reason to say that samples are far from data
JOINT_GAP_FLOOR = 2.0  # of log Σ e^h: densities of JEM that learn end below 1, others beyond 5
WORSE_FLOOR = 0.05  # nats of cross-entropy
WEIGHT_SE = 4.0  # standard errors
WEIGHT_FLOOR = 0.03  # of the total mass
WEIGHT_PROBLEM = 0.1  # of the total mass
WEIGHT_UNKNOWN_SE = 0.1  # floor where no standard error was given
COLLAPSE_LEAST_WEIGHT = 0.05  # a data mode below this may be missed by chance
COLLAPSE_KEPT = 0.2  # share of its mass below which a mode is lost
ESS_PROBLEM, ESS_WARNING = 0.1, 0.2
OFTEN = 0.5  # of late updates that resampled: walkers lose more in one update than they regain
LOG_Z_NOISE_PROBLEM, LOG_Z_NOISE_WARNING = 1.0, 0.5  # nats: beyond 1 a few lucky walkers decide
FEW_ANCESTORS = 0.02  # of the first walkers: two of the 128 of a held-out population
EXPLODED = 1e6  # nats; the guard's own limit, unless it was given another
STUCK = 1e-3  # of the data's standard deviation in one update
SLOW = 1e-2
ENERGY_FLOOR = 50.0  # nats: no barrier that a chain can cross is this high
GAP_GROWTH_FLOOR = 10.0  # nats
FLAT = 0.3  # nats: under a Gaussian, log-densities spread by √(d/2), which is at least 0.7
STEEPER = 3.0  # growth of ‖∇E‖ from the third tenth of a run to its last: settled runs stay below 2
PAIRS_ALIKE = 0.05  # nats of log-odds in a pair: below, σ needs fifty times the data of the best one
PAIRS_APART = 0.01  # mean weight 1 − posterior: below, ten times the data
BIAS_FLOOR = 0.05  # nats of log-density
IGNORED = 0.01  # mean weight of negatives, 1 without β: below, an update is a hundredth of what it was
COLLAPSED = 0.01  # mean weight of a datum among its negatives: below, hardly a gradient is left

FAR_SHARE = 0.01  # of the samples: what lies that far out is mass that has left, not a tail
CONVERGED_FLOOR = 0.1  # nats: below, chains that lag a little behind the energy leave such a gap for ever
MARKOV = 7.0  # nats of mass that a density cannot have around the data but with a probability of e⁻⁷
ENTROPY_SLACK, ENTROPY_SLACK_PER_DIMENSION = (
    5.0,
    3.5,
)  # nats: data may be 30 times finer than neighbours are apart

ENERGIES = ("energy_data", "energy_negatives", "energy_gap")

# Of the data, and of the labels where a classifier is trained.
ENTROPIES = {"cross_entropy": "Cross-entropy", "label_cross_entropy": "Cross-entropy of the labels"}

# Methods whose negatives are meant to be draws from the model: only there does a lasting gap mean anything.
GAP_VANISHES = {
    "contrastivedivergence",
    "cd",
    "persistentcd",
    "pcd",
    "shortrun",
    "jarzynski",
    "mixed",
    "jem",
    "adance",
}
# Methods that learn from the inside of each mode only.
BLIND_TO_WEIGHTS = {
    "contrastivedivergence": "contrastive divergence",
    "cd": "contrastive divergence",
    "persistentcd": "persistent contrastive divergence",
    "pcd": "persistent contrastive divergence",
    "shortrun": "short-run training",
    "scorematching": "score matching",
    "denoisingscorematching": "denoising score matching",
    "slicedscorematching": "sliced score matching",
}

# Methods that contrast data with draws of a proposal: no chains, and no walkers that could lag behind.
RANKED = {"rankingnce", "interpolatingnce", "ibc", "nce", "flowcontrastive", "adversarialcontrastive"}
# Of them, those whose objective is −log(K + 1) where energy and proposal are both the data's law.
WEIGHED = {"rankingnce", "interpolatingnce"}


@dataclass(frozen=True)
class Finding:
    """One thing that the numbers say.

    Attributes:
        name: what was found, in kebab-case.
        severity: `problem` (the model should not be used as it is), `warning` or `note`.
        text: what was seen, in words.
        evidence: the numbers behind it.
        advice: what to try; empty where there is nothing to do.
    """

    name: str
    severity: str
    text: str
    evidence: Evidence = field(default_factory=dict)
    advice: str = ""


@dataclass(frozen=True)
class Facts:
    """What is known beside the log; every field may be left out.

    Attributes:
        method: name of the training method.
        data_mode_weights: weight of each mode in the data.
        sample_mode_weights: weight of each mode in the model's samples.
        mode_weight_se: standard error of the difference of the two, one number or one for each mode.
        separated: whether gaps of low density lie between the modes.
        held_out_energy_gap: mean energy of held-out data minus that of training data, in nats. As log Z
            cancels, this is exactly how much more likely training data are.
        held_out_energy_gap_se: its standard error.
        sample_std_ratio: RMS standard deviation of the samples over that of the data.
        duplicates: share of walkers that have an identical twin.
        step_size: of the kernel, h.
        steps: updates made; by default the last logged step.
        energy_spread: standard deviation of P·E over data and noise together, in nats.
        negatives_per_datum: K of ranking NCE, whose objective ends at −log(K + 1) where all is matched.
        power: P, where what was learned is exp(−P·E). Energies of the log, which are E, are nats when multiplied
            with it, and so they are judged.
        output_scale: o, where P·E is −o·log Σ e^h of a classifier's logits. Where labels are learned too, the gap
            is judged in units of it, and not at all without it.
        far_share: share of the samples that lie far beyond every datum.
        sample_radius: their median distance from the data's centre, in root mean square distances of the data.
        bare: whether the energy stands on no reference density that holds it.
        rays_down: share of the rays away from the data along which exp(−P·E) has no finite integral.
        log_likelihood: mean log-density of held-out data.
        log_likelihood_se: its standard error, that of log Z included.
        entropy: of the data's law, in nats, in the coordinates of `log_likelihood`.
        entropy_se: its standard error.
        copies: share of the data that are copies of another row.
        dimensions: of an event.
        excess_mass: log of the mass that the density has around the data by importance sampling, at most about 0.
    """

    method: str | None = None
    data_mode_weights: Sequence[float] | None = None
    sample_mode_weights: Sequence[float] | None = None
    mode_weight_se: Sequence[float] | float | None = None
    separated: bool | None = None
    held_out_energy_gap: float | None = None
    held_out_energy_gap_se: float | None = None
    sample_std_ratio: float | None = None
    duplicates: float | None = None
    step_size: float | None = None
    steps: int | None = None
    energy_spread: float | None = None
    negatives_per_datum: int | None = None
    power: float = 1.0
    output_scale: float | None = None
    far_share: float | None = None
    sample_radius: float | None = None
    bare: bool = False
    rays_down: float | None = None
    log_likelihood: float | None = None
    log_likelihood_se: float | None = None
    entropy: float | None = None
    entropy_se: float | None = None
    copies: float | None = None
    dimensions: int | None = None
    excess_mass: float | None = None

    def __post_init__(self) -> None:
        if self.data_mode_weights is None or self.sample_mode_weights is None:
            return
        modes, given = len(self.data_mode_weights), len(self.sample_mode_weights)
        errors = self.mode_weight_se
        count = modes if errors is None or isinstance(errors, (int, float)) else len(errors)
        if given != modes or count != modes:
            from ..core.errors import InputError

            raise InputError(
                f"sample_mode_weights, mode_weight_se: must have one number for each of the {modes} "
                f"data_mode_weights, got {given} and {count}"
            )

    @property
    def method_key(self) -> str:
        """The method's name in lower case without punctuation."""
        return "".join(c for c in (self.method or "").lower() if c.isalnum())

    @property
    def gap_should_vanish(self) -> bool:
        """Whether negatives are meant to follow the model, so that the energy gap ends at zero."""
        return self.method is None or self.method_key in GAP_VANISHES

    @property
    def weight_differences(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Data weights, sample weights and standard errors of the difference, each `(M,)`."""
        if self.data_mode_weights is None or self.sample_mode_weights is None:
            return None
        data = np.asarray(self.data_mode_weights, float)
        error = np.nan if self.mode_weight_se is None else self.mode_weight_se
        errors = np.broadcast_to(np.asarray(error, float), data.shape)
        return data, np.asarray(self.sample_mode_weights, float), errors


def diagnose(history: Sequence[Row], facts: Facts | None = None) -> list[Finding]:
    """Findings, worst first; one `healthy` note where nothing speaks against the run.

    Args:
        history: rows of `metrics.jsonl`. Keys that are used where present: step, energy_data,
            energy_negatives, energy_gap, grad_norm, cross_entropy, label_cross_entropy, ess, ess_held_out,
            resamplings, resampled, ancestors, log_z_noise, pace, displacement, acceptance, step_size (where it
            tunes itself), gradient_magnitude, pair_logit, pair_weight, saturated, positive_weight, objective,
            grad_scale, negatives_ignored, beta_o.
        facts: what is known beside the log.

    >>> rows = [{"step": k, "energy_gap": 0.0, "acceptance": 0.02} for k in range(100)]
    >>> [finding.name for finding in diagnose(rows)]
    ['stuck-chains']
    """
    facts = facts or Facts()
    history = [_in_nats(row, facts.power) for row in history]
    checks = (
        _ran_away(facts),
        _impossible_likelihood(facts),
        _no_density(facts),
        _energies_drifting(history, facts),
        _mode_collapse(facts),
        _wrong_mode_weights(facts),
        _spread(facts),
        _constant_energy(facts),
        _steepening(history),
        _no_learning(history, facts),
        _not_converged(history, facts),
        _weight_degeneracy(history, facts),
        _stuck_chains(history, facts),
        _conditional_noise(history),
        _posterior_collapse(history),
        _ranking_profile(history, facts),
        _negatives_ignored(history),
        _estimated_density(history),
        _overfitting(facts),
        _unseen_weights(facts),
        _too_short(history),
    )
    found = [finding for finding in checks if finding is not None]
    if not any(finding.severity != "note" for finding in found) and len(history) >= LEAST_ROWS:
        found.append(_healthy(history, facts))
    if facts.power != 1:
        found.append(_tempered(facts.power))
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


# ---------------------------------------------------------------------------------------------- the log


def _number(value: Any) -> float | None:
    """A logged value as a float, or None where there is none; text such as 'NaN' is read as a number."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _in_nats(row: Row, power: float) -> Row:
    """The row with its energies times P, which is what the log of the learned density is made of."""
    if power == 1:
        return row
    energies = {key: _number(row.get(key)) for key in ENERGIES}
    return {**row, **{key: power * value for key, value in energies.items() if value is not None}}


def _series(history: Sequence[Row], key: str) -> np.ndarray:
    """The finite values of one key, in order."""
    values = [_number(row.get(key)) for row in history]
    return np.array([v for v in values if v is not None and math.isfinite(v)])


def _gap(history: Sequence[Row]) -> np.ndarray:
    """The energy gap, from the two energies where it was not logged itself."""
    logged = _series(history, "energy_gap")
    if len(logged):
        return logged
    pairs = [(_number(r.get("energy_data")), _number(r.get("energy_negatives"))) for r in history]
    gaps = np.array([a - b for a, b in pairs if a is not None and b is not None])
    return gaps[np.isfinite(gaps)]


def _steps(history: Sequence[Row], facts: Facts) -> float:
    logged = _series(history, "step")
    return float(facts.steps or (logged[-1] if len(logged) else len(history)))


@dataclass(frozen=True)
class _Trend:
    """Means over each fifth of the log, and the standard error of one, from the second half's noise."""

    fifths: tuple[float, ...]
    se: float

    @property
    def first(self) -> float:
        return self.fifths[0]

    @property
    def last(self) -> float:
        return self.fifths[-1]

    @property
    def change_se(self) -> float:
        return math.sqrt(2) * self.se


def _trend(values: np.ndarray) -> _Trend | None:
    if len(values) < LEAST_ROWS:
        return None
    fifths = tuple(float(part.mean()) for part in np.array_split(values, 5))
    return _Trend(fifths, _mean_error(values[len(values) // 2 :], len(values) // 5))


def _mean_error(values: np.ndarray, count: int) -> float:
    """Standard error of a mean over `count` successive rows: σ/√count · √((1+ρ)/(1−ρ)).

    σ and the lag-one correlation ρ are those of the residuals around a line; ρ is corrected for the bias
    (1+4ρ)/n that fitting the line gives it, since rows logged from persistent chains follow each other.
    """
    time = np.arange(len(values), dtype=float)
    residual = values - np.polyval(np.polyfit(time, values, 1), time)
    variance = float(residual @ residual) / max(len(values) - 2, 1)
    if variance == 0:
        return 0.0
    rho = float(residual[1:] @ residual[:-1]) / float(residual @ residual)
    rho = min(max(rho + (1 + 4 * max(rho, 0.0)) / len(values), 0.0), 0.98)
    return math.sqrt(variance / count * (1 + rho) / (1 - rho))


def _bins(values: np.ndarray, count: int = 10) -> np.ndarray:
    return np.array([np.median(part) for part in np.array_split(values, count)])


# ----------------------------------------------------------------------------------------- the findings

ON_A_REFERENCE = (
    'Put the energy on a reference with one word, fit(…, reference="gaussian"): a Gaussian fitted to the data '
    "(energies.Tilted), whose energy grows as the square of the distance."
)


def _has_left(facts: Facts) -> bool:
    return facts.far_share is not None and facts.far_share > FAR_SHARE


def _ran_away(facts: Facts) -> Finding | None:
    if not _has_left(facts):
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


def _no_density(facts: Facts) -> Finding | None:
    """Of an energy that falls far away where samples have not yet been: they are of a part of space only."""
    if not facts.rays_down or _has_left(facts):
        return None
    return Finding(
        "no-density",
        "warning",
        f"Along {facts.rays_down:.0%} of the rays away from the data the energy grows too slowly for exp(−E) to "
        "have a finite integral. Samples have not gone there, and log Z is of the part of space where they are.",
        {"rays_down": float(facts.rays_down)},
        ON_A_REFERENCE,
    )


def _impossible_likelihood(facts: Facts) -> Finding | None:
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
    if facts.rays_down or (facts.bare and _has_left(facts)):
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


def _energies_drifting(history: Sequence[Row], facts: Facts) -> Finding | None:
    return _non_finite(history) or _gap_growing(history, facts) or _offset_growing(history)


def _non_finite(history: Sequence[Row]) -> Finding | None:
    watched = ("energy_data", "energy_negatives", "energy_gap", "grad_norm", "log_z", *ENTROPIES)
    for place, row in enumerate(history):
        for key in watched:
            value = _number(row.get(key))
            if value is not None and not math.isfinite(value):
                step = _number(row.get("step")) or float(place)
                cause, advice = why_diverged(signs_of(history[max(place - 1, 0) : place + 1]))
                text = f"{key} became {value} at step {step:g}: from there on the numbers mean nothing."
                return Finding(
                    "energies-drifting",
                    "problem",
                    f"{text} {cause}".strip(),
                    {"step": step, "key": key, "value": str(value)},
                    f"Go back to the last checkpoint before that step. {advice}",
                )
    return None


def _diverged(history: Sequence[Row]) -> bool:
    """Whether the last energies are not numbers, or none that a density has."""
    last = history[-1] if history else {}
    values = [v for key in ENERGIES if (v := _number(last.get(key))) is not None]
    return any(not abs(v) <= EXPLODED for v in values)


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


def _gap_growing(history: Sequence[Row], facts: Facts) -> Finding | None:
    gap = _gap(history)
    if len(gap) < LEAST_ROWS or not facts.gap_should_vanish:
        return None
    bins = _bins(gap)
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
        if _has_left(facts) and (facts.rays_down or facts.bare)
        else "The chains do not follow the energy: take more chain steps for each update or a smaller learning "
        "rate, or penalise the squares of the energies.",
    )


def _offset_growing(history: Sequence[Row]) -> Finding | None:
    sides = [_series(history, key) for key in ("energy_data", "energy_negatives")]
    sides = [values for values in sides if len(values) >= LEAST_ROWS]
    if not sides:
        return None
    bins = np.mean([_bins(values) for values in sides], axis=0)
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


def _lost_modes(facts: Facts) -> list[int]:
    """Data modes of substantial weight that kept less than a fifth of it, beyond chance."""
    differences = facts.weight_differences
    if differences is None:
        return []
    data, sample, error = differences
    certain = (data - sample > WEIGHT_SE * error) | np.isnan(error)
    lost = (data >= COLLAPSE_LEAST_WEIGHT) & (sample < COLLAPSE_KEPT * data) & certain
    return np.flatnonzero(lost).tolist()


def _shares(values: Iterable[float]) -> list[float]:
    return [round(float(v), 4) for v in values]


def _weights_evidence(facts: Facts) -> Evidence:
    differences = facts.weight_differences
    assert differences is not None
    data, sample, error = differences
    evidence: Evidence = {"data_mode_weights": _shares(data), "sample_mode_weights": _shares(sample)}
    if not np.isnan(error).any():
        evidence["mode_weight_se"] = _shares(error)
    return evidence


def _blindness(facts: Facts) -> str:
    """The sentence that is owed to the user of a method that cannot see mode weights."""
    name = BLIND_TO_WEIGHTS.get(facts.method_key)
    if name is None or facts.separated is False:
        return ""
    where = "between these modes lie gaps of low density" if facts.separated else "where gaps separate modes"
    return (
        f" {name.capitalize()} learns from the inside of each mode only, and {where}: it cannot see how much "
        "mass a mode has."
    )


def _weights_advice(facts: Facts) -> str:
    if facts.method_key in BLIND_TO_WEIGHTS:
        return (
            "Use a method that carries weights across gaps, such as jarzynski, or NCE with a good proposal."
        )
    if facts.method_key == "conditionalnce":
        return "Raise sigma, so that noise made in one mode reaches the next, or use ranking-nce."
    if facts.method_key in RANKED:
        return "Use more negatives for each datum or a proposal nearer to the data, or train longer."
    if facts.method_key == "jarzynski":
        return "Use more walkers, a smaller learning rate or earlier resampling, so that the weights keep up."
    return (
        "Use longer chains, or chains that start in every mode; or a method that carries weights across gaps, such "
        "as jarzynski."
    )


def _mode_collapse(facts: Facts) -> Finding | None:
    lost = _lost_modes(facts)
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


def _wrong_mode_weights(facts: Facts) -> Finding | None:
    differences = facts.weight_differences
    if differences is None or _lost_modes(facts):
        return None
    data, sample, error = differences
    off = np.abs(sample - data)
    floor = np.where(np.isnan(error), WEIGHT_UNKNOWN_SE, np.maximum(WEIGHT_FLOOR, WEIGHT_SE * error))
    if not (off > floor).any():
        return None
    worst = int(np.argmax(np.where(off > floor, off, 0)))
    chance = "" if np.isnan(error[worst]) else f", {_in_errors(off[worst], error[worst])}"
    return Finding(
        "wrong-mode-weights",
        "problem" if off[worst] > WEIGHT_PROBLEM else "warning",
        f"Mode {worst + 1} holds {data[worst]:.1%} of the data but {sample[worst]:.1%} of the samples"
        f"{chance}.{_blindness(facts)}",
        _weights_evidence(facts) | {"worst_mode": float(worst + 1), "worst_error": float(off[worst])},
        _weights_advice(facts),
    )


def _in_errors(difference: float, error: float) -> str:
    if error == 0:
        return "with no uncertainty stated"
    return f"{difference / error:.1f} standard errors apart"


def _spread(facts: Facts) -> Finding | None:
    ratio = facts.sample_std_ratio
    if ratio is None or ratio <= 2 or _has_left(facts):  # of which more is said by `_ran_away`
        return None
    return Finding(
        "samples-too-wide",
        "problem" if ratio > 5 else "warning",
        f"Samples spread {ratio:.3g} times as far as the data: chains have not reached them, or have left.",
        {"sample_std_ratio": float(ratio)},
        "Run more chain steps, lower step_size if chains fly off, or train longer.",
    )


def _constant_energy(facts: Facts) -> Finding | None:
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


def _steepening(history: Sequence[Row]) -> Finding | None:
    slope = _series(history, "gradient_magnitude")
    if len(slope) < LEAST_ROWS:
        return None
    bins = _bins(slope)
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


def _far_from_data(facts: Facts) -> bool:
    ratio = facts.sample_std_ratio
    return _has_left(facts) or bool(_lost_modes(facts)) or (ratio is not None and not 0.5 <= ratio <= 2)


def _no_learning(history: Sequence[Row], facts: Facts) -> Finding | None:
    found = _stalled(history, facts)
    if found is None or not len(_series(history, "step_size")):
        return found
    return replace(found, advice=found.advice.replace(" or a larger step_size", ""))  # it tunes itself


def _stalled(history: Sequence[Row], facts: Facts) -> Finding | None:
    gradient = _series(history, "grad_norm")
    if len(gradient) >= LEAST_ROWS and float(np.median(gradient)) < 1e-12:
        return _not_learning("problem", "The gradient is zero: no parameter can change.", {"grad_norm": 0.0})
    gap = _trend(_gap(history))
    open_gap = gap is not None and facts.gap_should_vanish and _is_open(gap)
    entropies = {key: e for key in ENTROPIES if (e := _trend(_series(history, key))) is not None}
    for key, entropy in entropies.items():
        stalled = _entropy_stalled(entropy, key, gap, open_gap or _far_from_data(facts))
        if stalled is not None:
            return stalled
    if "cross_entropy" in entropies:  # of the data: the density is judged, whatever its gap
        return None
    labels = entropies.get("label_cross_entropy")
    if labels is not None:  # so far only the classifier is judged
        return _density_stalled(history, facts, gap, labels)
    if gap is not None and open_gap and not _closes(gap):
        text = f"The energy gap stays open: {gap.first:.3g} early, {gap.last:.3g} at the end, not about 0."
        return _not_learning("problem" if _far_from_data(facts) else "warning", text, _gap_evidence(gap))
    if _far_from_data(facts) and _all_flat(history):
        text = "Energies and gradients are where they were at the start, and samples are not like the data."
        return _not_learning("problem", text, {} if gap is None else _gap_evidence(gap))
    return None


def _not_learning(severity: str, text: str, evidence: Evidence) -> Finding:
    advice = (
        "Raise the learning rate, check that the optimiser holds the energy's parameters, and give chains "
        "more steps or a larger step_size so that negatives show where the model is wrong."
    )
    return Finding("no-learning", severity, text, evidence, advice)


def _density_stalled(
    history: Sequence[Row], facts: Facts, gap: _Trend | None, labels: _Trend
) -> Finding | None:
    """The gap of a classifier's density, which may stay open while the labels are learned.

    In units of o, as log p(x) counts 1/o beside log p(y | x). A classifier alone has no gap, and that of β is not
    meant to vanish: there `negatives-ignored` says whether the density is still trained.
    """
    o = facts.output_scale
    if gap is None or o is None or not facts.gap_should_vanish or np.any(_series(history, "beta_o") != 0):
        return None
    if not _is_open(gap, JOINT_GAP_FLOOR * o) or _closes(gap):
        return None
    learned = labels.first - labels.last >= IMPROVED * labels.change_se
    text = "The labels are learned, but not the density" if learned else "The density is not learned"
    text += (
        f": its energy gap does not close, {gap.first:.3g} early and {gap.last:.3g} at the end, which is "
        f"{abs(gap.last) / o:.2g} times the output scale."
    )
    evidence = _gap_evidence(gap) | {"output_scale": float(o)}
    advice = (
        "Give chains more steps or a larger step_size, and log p(x) more weight (generative; 1/o where it is left "
        "out). Labels need none of this: accuracy holds, but not log p(x), outliers found by it, or samples."
    )
    severity = "problem" if _far_from_data(facts) else "warning"
    return Finding("no-learning", severity, text, evidence, advice)


def _not_converged(history: Sequence[Row], facts: Facts) -> Finding | None:
    """A gap that is clearly not zero at the end, though it may be closing and the likelihood rising."""
    gap = _trend(_gap(history))
    if gap is None or not facts.gap_should_vanish or _no_learning(history, facts) is not None:
        return None
    if len(_series(history, "label_cross_entropy")):  # of a classifier's density `_density_stalled` says more
        return None
    if abs(gap.last) <= max(CLEAR * gap.se, CONVERGED_FLOOR) or not _keeps_its_side(gap):
        return None
    course = f", from {gap.first:.3g} early" if _closes(gap) else ""
    side = "below" if gap.last < 0 else "above"
    return Finding(
        "not-converged",
        "warning",
        f"Training has not ended: the energy of data is still {abs(gap.last):.2g} ± {gap.se:.1g} {side} that of "
        f"the negatives{course}; where the model is the data's law both are the same.",
        _gap_evidence(gap),
        "Train on (more steps), or raise the learning rate while the gap is closing; where it has stopped closing, "
        "give chains more steps for each update, or the energy more capacity.",
    )


def _keeps_its_side(gap: _Trend) -> bool:
    """Whether the last two fifths have one sign: what swings about zero is noise that follows itself."""
    return gap.fifths[-2] * gap.last > 0


def _closes(gap: _Trend) -> bool:
    return abs(gap.first) - abs(gap.last) >= IMPROVED * gap.change_se


def _is_open(gap: _Trend, floor: float = GAP_FLOOR) -> bool:
    """A gap that is really not zero at the end, of a size that matters, and has long been about the same.

    The last three fifths must agree to a factor of two: what chains do slowly looks like a gap for a while.
    """
    largest = max(map(abs, gap.fifths))
    steady = all(gap.last * late > 0 and abs(late) > 0.5 * abs(gap.last) for late in gap.fifths[2:])
    return steady and abs(gap.last) > max(CLEAR * gap.se, floor, 0.5 * largest)


def _gap_evidence(gap: _Trend) -> Evidence:
    return {"gap_first_fifth": gap.first, "gap_last_fifth": gap.last, "gap_se": gap.se}


def _entropy_stalled(entropy: _Trend, key: str, gap: _Trend | None, far: bool) -> Finding | None:
    gained = entropy.first - entropy.last
    worse = -gained > max(CLEAR * entropy.change_se, WORSE_FLOOR)
    if not worse and (gained >= IMPROVED * entropy.change_se or not far):
        return None
    evidence: Evidence = {
        f"{key}_first_fifth": entropy.first,
        f"{key}_last_fifth": entropy.last,
        f"{key}_se": entropy.se,
    }
    verb = "rose" if worse else "did not fall beyond its noise"
    text = f"{ENTROPIES[key]} {verb}: {entropy.first:.4g} in the first fifth, {entropy.last:.4g} in the last"
    text += f" (standard error {entropy.se:.2g})."
    return _not_learning("problem", text, evidence | (_gap_evidence(gap) if gap else {}))


def _all_flat(history: Sequence[Row]) -> bool:
    """Whether every logged level ends where it began, within its noise."""
    trends = [_trend(_series(history, key)) for key in ("energy_data", "energy_negatives", "grad_norm")]
    known = [trend for trend in trends if trend is not None]
    return bool(known) and all(abs(t.last - t.first) <= IMPROVED * t.change_se for t in known)


def _weight_degeneracy(history: Sequence[Row], facts: Facts) -> Finding | None:
    severity, evidence = _low_ess(_series(history, "ess"))
    held_out, more = _low_ess(_series(history, "ess_held_out"))
    spent, meters = _spent_walkers(history)
    twins = facts.duplicates or 0.0
    if twins >= 0.9 or spent == "problem":
        severity = "problem"
    elif not severity and (twins >= 0.5 or held_out or spent):
        severity = "warning"
    if not severity:
        return None
    evidence |= {f"held_out_{key}": value for key, value in more.items()} if held_out else {}
    evidence |= {"duplicates": float(twins)} if facts.duplicates is not None else {}
    resamplings = _series(history, "resamplings")
    evidence |= {"resamplings": float(resamplings[-1])} if len(resamplings) else {}
    evidence |= meters
    text = _degeneracy_text(evidence, twins)
    return Finding("weight-degeneracy", severity, text, evidence, _degeneracy_advice(history))


def _spent_walkers(history: Sequence[Row]) -> tuple[str, Evidence]:
    """Severity and evidence of what weights lost over a whole run, which no single ESS shows."""
    resampled, ess = _late_median(history, "resampled"), _late_median(history, "ess")
    ancestors, noise = _series(history, "ancestors"), _series(history, "log_z_noise")
    evidence: Evidence = {} if resampled is None else {"resampled": resampled}
    evidence |= {"ancestors": float(ancestors[-1])} if len(ancestors) else {}
    evidence |= {"log_z_noise": float(noise[-1])} if len(noise) else {}
    if evidence.get("log_z_noise", 0.0) > LOG_Z_NOISE_PROBLEM:  # type: ignore[operator]
        return "problem", evidence
    often = resampled is not None and ess is not None and resampled > OFTEN and ess < 0.5
    noisy = evidence.get("log_z_noise", 0.0) > LOG_Z_NOISE_WARNING  # type: ignore[operator]
    few = evidence.get("ancestors", 1.0) < FEW_ANCESTORS  # type: ignore[operator]
    return ("warning" if often or noisy or few else ""), evidence


def _degeneracy_advice(history: Sequence[Row]) -> str:
    """Names what makes the weights spread: the learning, the moves, or the number of walkers."""
    pace, adjusted = _late_median(history, "pace"), len(_series(history, "acceptance")) > 0
    moving = len(_series(history, "displacement")) > 0
    resampled = _late_median(history, "resampled")
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


def _stuck_chains(history: Sequence[Row], facts: Facts) -> Finding | None:
    moved, accepted = (_series(history, key) for key in ("displacement", "acceptance"))
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
        if not severity:
            severity, text = _too_slow(distance, _steps(history, facts))
    if not severity:
        return None
    signs = StepSigns(
        *(_late_median(history, key) for key in ("acceptance", "displacement", "step_size", "pace"))
    )
    evidence |= {} if signs.step_size is None else {"step_size": signs.step_size}
    rejected = text.startswith("Chains accept")
    advice = why_refused(signs) if rejected else why_slow(signs, _diverged(history))
    return Finding("stuck-chains", severity, text, evidence, advice)


def _too_slow(distance: float, steps: float) -> tuple[str, str]:
    """A random walk of `distance` in each update needs distance⁻² updates to cross the data."""
    if distance >= SLOW or (distance >= STUCK and distance * math.sqrt(steps) >= 1):
        return "", ""
    need = f"about {distance**-2:.1g} updates" if distance > 0 else "for ever"
    text = f"In one update a chain moves {distance:.2g} of the data's spread: to cross it takes {need}."
    return ("problem" if distance < STUCK else "warning"), text


def _late_median(history: Sequence[Row], key: str) -> float | None:
    """Median of the second half of a column; None where it has fewer than five values."""
    values = _series(history, key)
    return float(np.median(values[len(values) // 2 :])) if len(values) >= 5 else None


def _conditional_noise(history: Sequence[Row]) -> Finding | None:
    logit, weight = (_late_median(history, key) for key in ("pair_logit", "pair_weight"))
    if logit is None or weight is None:
        return None
    evidence: Evidence = {"pair_logit": logit, "pair_weight": weight}
    saturated = _late_median(history, "saturated")
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


def _posterior_collapse(history: Sequence[Row]) -> Finding | None:
    weight = _late_median(history, "positive_weight")
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


def _profile(history: Sequence[Row], facts: Facts) -> profiles.Profile | None:
    """The course of the objective of ranking NCE; None for other methods and short logs."""
    K, objective = facts.negatives_per_datum, _series(history, "objective")
    if K is None or facts.method_key not in WEIGHED or len(objective) < LEAST_ROWS:
        return None
    error = _mean_error(objective[len(objective) // 2 :], len(objective) // 5)
    return profiles.ranking_profile(objective, K, error)


def _ranking_profile(history: Sequence[Row], facts: Facts) -> Finding | None:
    """Which of Figure 2's courses it is; a collapse has a finding of its own, and a balance needs none."""
    profile = _profile(history, facts)
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
        "Train the energy longer, raise its learning rate or energy_steps, or give it more capacity.",
    ),
}
"""Severity, words and advice of each course of the objective."""


def _negatives_ignored(history: Sequence[Row]) -> Finding | None:
    """All negatives far less likely than data: at the end of a log, or in a quarter of it."""
    scale, late = _series(history, "grad_scale"), _late_median(history, "grad_scale")
    if late is None:
        return None
    share = float(np.mean(scale < IGNORED))
    if late >= IGNORED and share < 0.25:
        return None
    evidence: Evidence = {"grad_scale": late, "rows_ignored": share}
    ignored, gap = (_late_median(history, key) for key in ("negatives_ignored", "energy_gap"))
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


def _overfitting(facts: Facts) -> Finding | None:
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


def _unseen_weights(facts: Facts) -> Finding | None:
    if not facts.separated or facts.method_key not in BLIND_TO_WEIGHTS:
        return None
    if _lost_modes(facts) or _wrong_mode_weights(facts) is not None:
        return None
    return Finding(
        "mode-weights-unseen",
        "note",
        f"Nothing in this run checks how much mass each mode has.{_blindness(facts)}",
        {"method": facts.method or "", "separated": "yes"},
        "If the weights matter, train with jarzynski or measure them against data.",
    )


def _estimated_density(history: Sequence[Row]) -> Finding | None:
    bias, draws = (_late_median(history, key) for key in ("density_bias", "density_draws"))
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


def _too_short(history: Sequence[Row]) -> Finding | None:
    if len(history) >= LEAST_ROWS:
        return None
    text = f"The log has {len(history)} rows; {LEAST_ROWS} are needed to tell a trend from noise."
    advice = "Train longer, or log more often."
    return Finding("too-little-history", "note", text, {"rows": float(len(history))}, advice)


def _healthy(history: Sequence[Row], facts: Facts) -> Finding:
    evidence: Evidence = {"rows": float(len(history)), "steps": _steps(history, facts)}
    gap = _trend(_gap(history))
    parts = ["Nothing in the log speaks against this run."]
    if gap is not None:
        evidence |= _gap_evidence(gap)
        parts.append(f"Energy gap {gap.last:.2g} ± {gap.se:.1g} at the end.")
    for key, name in ENTROPIES.items():
        entropy = _trend(_series(history, key))
        if entropy is not None:
            evidence |= {f"{key}_first_fifth": entropy.first, f"{key}_last_fifth": entropy.last}
            parts.append(f"{name} from {entropy.first:.4g} to {entropy.last:.4g}.")
    profile = _profile(history, facts)
    if profile is not None:
        evidence |= {"objective": profile.end, "matched": profile.level}
        parts.append(f"Objective {profile.end:.3f}; −log(K+1) is {profile.level:.3f}.")
    ess = _series(history, "ess")
    if len(ess):
        evidence["ess_median"] = float(np.median(ess))
        parts.append(f"Effective sample size {np.median(ess):.0%} of the walkers.")
    return Finding("healthy", "note", " ".join(parts), evidence)


def _tempered(power: float) -> Finding:
    return Finding(
        "tempered-density",
        "note",
        f"What was learned is exp(−{power:g}·E), the density at temperature {1 / power:.4g}, where the chains "
        "and the weights of their samples put it, and not exp(−E). log Z, likelihoods, samples and the energies in "
        "these findings are of that density.",
        {"power": float(power)},
        "Nothing, unless you use run.energy yourself: run.learned_energy is the one of this density.",
    )


# ---------------------------------------------------------------------------------------------- in words


def format_findings(findings: Sequence[Finding], width: int = 100) -> str:
    """Findings as plain text for a terminal, each with its evidence and what to try.

    >>> finding = Finding("stuck-chains", "problem", "No move.", {"acceptance": 0.0}, "Lower step_size.")
    >>> print(format_findings([finding]))
    problem: stuck-chains
      No move.
      evidence: acceptance 0
      try: Lower step_size.
    """
    return "\n".join(_format(finding, width) for finding in findings)


def _format(finding: Finding, width: int) -> str:
    lines = [f"{finding.severity}: {finding.name}"]
    shown = ", ".join(f"{key} {_show(value)}" for key, value in finding.evidence.items())
    labelled = (("", finding.text), ("evidence: ", shown), ("try: ", finding.advice))
    paragraphs = [label + words for label, words in labelled if words]
    for paragraph in paragraphs:
        lines += textwrap.wrap(paragraph, width, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _show(value: float | str | list) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_show(v) for v in value) + "]"
    return f"{value:.4g}" if isinstance(value, (int, float)) else value
