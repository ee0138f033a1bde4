"""log Z and the likelihood of rows: whose estimate is believed, and what was learnt by heart."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from metastable.core.parts import energies_of
from metastable.core.protocols import StepwiseSolved, output_scale_of, provides
from metastable.core.random import derive
from metastable.core.types import LogPartition, Walkers
from metastable.evaluation.diagnosis import Finding
from metastable.evaluation.log_partition import log_partition
from metastable.runs.run import Run
from metastable.walkers.importance import importance_log_partition, importance_walkers
from metastable.walkers.space import space_of
from metastable.walkers.starts import some_numbers, some_rows

from .samples import FROM_ENERGY, SHOWN, kept_walkers, normalised
from .section import COSTLY_ROWS, Judged, Measured

DISAGREEMENT = 3.0
"""Standard errors between two estimates of log Z beyond which the first is doubted."""
LOOKED_AT = 10_000
"""Rows of the data behind means of their energies."""
MOST_DIMENSIONS = 200
"""Dimensions of an event above which log Z by sequential Monte Carlo takes minutes, and is left to be asked for."""
MOST_SCALE = 100.0
"""The same for the output scale of a joint energy."""

SECOND_ADVICE = (
    "Walkers of training have no part in it: train longer, or estimate it with more walkers and steps than here, "
    "`metastable.log_partition(run.learned_energy, data=…, walkers=…, steps=…)`."
)
"""Where it is log Z by sequential Monte Carlo after training that is in doubt."""


class Likelihood:
    """log Z with its error, and the mean log-density of rows.

    log Z and samples come from the method's own walkers where it has weighted ones (Jarzynski). For the others
    both come from sequential Monte Carlo on the trained energy: chains that start at the data would show the
    data's mode weights, not the model's. A method's own log Z is compared with that of sequential Monte Carlo,
    which shares nothing with the training and is believed where it is surer of itself.

    Events of many dimensions (images) get no sequential Monte Carlo, which would take minutes: their samples are
    the method's own walkers, where it has any, and a finding says that log Z was not estimated.
    """

    name = "likelihood"

    def applies(self, judged: Judged) -> bool:
        """Contexts have a log Z each."""
        return not judged.run.conditional

    def measure(self, judged: Judged) -> Measured:
        """Settle log Z and the walkers of the run, then score its rows."""
        run, findings, second = judged.run, [], None
        if judged.after_training:
            second, findings = _settle(judged)
        else:
            _find_missing(judged)
        numbers = _log_likelihood(judged)
        if "log_partition" in run.players:  # a method that learns log Z beside the energy
            numbers["log_z_learned"] = float(run.players["log_partition"]().detach())  # pyright: ignore
        scale = output_scale_of(run.learned_energy)
        facts = {"power": run.power, "output_scale": scale, **_held_out(judged)}
        z = run.log_partition
        if z is not None and z.warnings:
            text = "log Z should not be trusted: " + "; ".join(z.warnings) + "."
            evidence: dict[str, Any] = {"log_z": z.value, "std_error": z.std_error}
            advice = SECOND_ADVICE if run.log_z_source == "independent" else "Use more walkers."
            findings.append(Finding("log-z-doubtful", "warning", text, evidence, advice))
        return Measured(numbers | _second_scores(second), facts=facts, findings=findings)


def _settle(judged: Judged) -> tuple[LogPartition | None, list[Finding]]:
    """log Z and walkers when training has ended, an independent estimate, and what speaks against either."""
    run = judged.run
    if run.normalised:  # a density has log Z = 0, and draws for itself
        run.walkers = run.sample(SHOWN, seed=derive(judged.seed, "evaluate"))
        return None, []
    if (own := _weighted_draws(run, judged.seed)) is not None:
        run.walkers, run.log_partition = own, importance_log_partition(own)
        return None, []
    train = judged.trained_on
    if not affordable(run.learned_energy, train):
        return None, [_skipped(run, train)]
    second = log_partition(run.learned_energy, data=train, seed=judged.stream("evaluate"))
    disagreement = _take(run, second)
    return second, [] if disagreement is None else [disagreement]


def _find_missing(judged: Judged) -> None:
    """log Z and walkers of a run that was read back, by sequential Monte Carlo where it kept none."""
    run, x = judged.run, judged.trained_on
    walkers, judged.samples_from = kept_walkers(run)
    may_take_long = judged.log_z_asked or affordable(run.learned_energy, x)
    if may_take_long and (walkers is None or run.log_partition is None):
        z = normalised(run, x, judged.stream("evaluate"))
        if walkers is None and z.walkers is not None:
            walkers, judged.samples_from = z.walkers, FROM_ENERGY
        run.log_partition = run.log_partition or z
    run.walkers = walkers


def _log_likelihood(judged: Judged) -> dict[str, float]:
    """What the rows are given, as they are."""
    run, z = judged.run, judged.run.log_partition
    if z is None:
        return {}
    few = judged.costly and judged.after_training
    value, error = mean_log_prob(run, z, some_rows(judged.x, COSTLY_ROWS) if few else judged.x)
    return {"log_likelihood": value, "log_likelihood_se": error, "cross_entropy": -value}


def mean_log_prob(run: Run, z: LogPartition, x: Tensor) -> tuple[float, float]:
    """Mean of −P·E − log Z over rows, and its standard error, which holds that of log Z."""
    energies = energies_of(run.learned_energy, x)
    error = math.hypot(float(energies.std()) / math.sqrt(len(energies)), z.std_error)
    return float(-energies.mean()) - z.value, error


def _held_out(judged: Judged) -> dict[str, float]:
    """How much more likely training rows are than held-out ones; nothing where none were held out."""
    train, rows = (judged.rows if judged.train is None else judged.train).x, judged.x
    if torch.equal(rows, train):
        return {}
    most = COSTLY_ROWS if judged.costly else LOOKED_AT
    energy = judged.run.learned_energy
    own, other = (energies_of(energy, part, some_numbers(part, most)) for part in (train, rows))
    error = math.hypot(float(own.std()) / math.sqrt(len(own)), float(other.std()) / math.sqrt(len(other)))
    return {"held_out_energy_gap": float(other.mean() - own.mean()), "held_out_energy_gap_se": error}


def _weighted_draws(run: Run, seed: int) -> Walkers | None:
    """Draws of an energy that also is a density up to what its draws' weights put right: a diffusion's φ."""
    if not provides(run.energy, StepwiseSolved):
        return None
    return importance_walkers(run.learned_energy, run.model.own_draws, SHOWN, seed)


def affordable(energy: Any, x: Tensor) -> bool:
    """Whether log Z of an energy of such events is a matter of seconds.

    Units coded −1 and +1 are listed where they can be, and annealed by Gibbs sweeps, which are cheap.
    """
    return not space_of(energy).has_volume or (
        x[0].numel() <= MOST_DIMENSIONS and _scale(energy) <= MOST_SCALE
    )


def why_costly(energy: Any, x: Tensor) -> str:
    """What makes log Z of an energy of such events a matter of minutes, in words."""
    dimensions = x[0].numel()
    if dimensions > MOST_DIMENSIONS:
        return f"events have {dimensions} dimensions, where sequential Monte Carlo takes minutes"
    scale = _scale(energy)
    return f"the energy has an output scale of {scale:g}, where sequential Monte Carlo takes minutes"


def _scale(energy: Any) -> float:
    """What a joint energy multiplies log Σ e^h with."""
    return output_scale_of(energy) or 1.0


def _take(run: Run, second: LogPartition) -> Finding | None:
    """log Z and samples from an independent estimate, where the method has none or this one is to be believed.

    Of two that disagree it is said which one is believed, and why.
    """
    own = run.log_partition
    if own is None:
        run.log_partition, run.walkers = second, second.walkers or run.walkers
        run.log_z_source = run.samples_source = "independent"
        return None
    found = _disagreement(own, second)
    if _better(second, own):
        run.log_partition, run.log_z_source = second, "independent"
        if found is not None or not own.trusted:
            run.walkers, run.samples_source = second.walkers or run.walkers, "independent"
    elif found is not None:
        words = f"an independent estimate says {second.value:.3f} ± {second.std_error:.3f}"
        run.log_partition = dataclasses.replace(own, warnings=(*own.warnings, words))
    return found


def _better(second: LogPartition, own: LogPartition) -> bool:
    """Whether to believe the estimate that shares nothing with the training: trusted, and surer of itself."""
    return second.trusted and (not own.trusted or not own.std_error <= second.std_error)


def _disagreement(own: LogPartition, second: LogPartition) -> Finding | None:
    """Two estimates of one log Z that are further apart than both errors allow.

    The spread between populations cannot show what all of them missed, such as mass that training put where no
    walker was; a path from the reference goes there.
    """
    error = math.hypot(own.std_error, second.std_error)
    apart = abs(own.value - second.value)
    if not apart > DISAGREEMENT * error + 0.01:
        return None
    how = "enumeration" if second.std_error == 0 else "sequential Monte Carlo on the finished energy"
    believed = _better(second, own)
    why = (
        "the second is believed: it shares nothing with the training, and nothing speaks against it"
        if believed
        else "neither is to be trusted: something speaks against the second one too"
    )
    text = (
        f"Two estimates of log Z disagree: the walkers of training say {own.value:.3f} ± {own.std_error:.3f}, "
        f"{how} {second.value:.3f} ± {second.std_error:.3f}. Of these {why}."
    )
    evidence: dict[str, Any] = {
        "log_z_training": own.value,
        "log_z_independent": second.value,
        "apart": apart,
    }
    advice = (
        "Nothing, for log Z, likelihoods and samples are those of the second. The gradients of training came from "
        "walkers that were off, though: use more walkers, a smaller learning rate or a smaller pace."
        if believed
        else "Use more walkers, a smaller learning rate or a smaller pace."
    )
    return Finding("log-z-disagree", "warning" if believed else "problem", text, evidence, advice)


def _skipped(run: Run, train: Tensor) -> Finding:
    what = "log Z was not estimated"
    if run.log_partition is not None:
        what = "The method's own log Z was not compared with an independent estimate"
    where = "RUN" if run.folder is None else str(run.folder)
    text = f"{what}: {why_costly(run.learned_energy, train)}."
    evidence: dict[str, Any] = {"dimensions": train[0].numel(), "most": MOST_DIMENSIONS}
    if output_scale_of(run.energy) is not None:
        evidence |= {"output_scale": _scale(run.learned_energy), "most_scale": MOST_SCALE}
    advice = f"Ask for it with `metastable evaluate {where} --log-z`."
    return Finding("log-z-not-estimated", "note", text, evidence, advice)


def _second_scores(second: LogPartition | None) -> dict[str, float]:
    """The estimate that shares nothing with the training, under the name of what it is."""
    if second is None:
        return {}
    if second.std_error == 0:
        return {"log_z_exact": second.value}
    return {"log_z_smc": second.value, "log_z_smc_se": second.std_error}
