"""What stops a training and what diagnoses it say the same about steps, and name the knob that is wrong."""

from __future__ import annotations

import math

import pytest

from metastable.core.step_advice import StepSigns, why_diverged, why_refused, why_slow
from metastable.evaluation.diagnosis import diagnose
from metastable.training.guard import Guard

CASES = {
    "thrown": ({"displacement": 30.0}, "Lower step_size"),
    "refused": ({"displacement": 0.2, "acceptance": 0.01}, "Lower step_size"),
    "crawling": ({"displacement": 1e-4}, "One step cannot fit"),
    "hasty": (
        {"displacement": 0.2, "acceptance": 0.6, "step_size": 0.1, "pace": 40.0},
        "Lower the learning rate",
    ),
    "tuned": ({"displacement": 0.2, "acceptance": 0.6, "step_size": 0.1}, "Try a smaller learning rate"),
    "without chains": ({}, "Try a smaller learning rate"),
}


def log(**metrics: float) -> list[dict[str, float]]:
    rows = [{"step": 10.0 * k, "energy_gap": 0.0, "energy_data": 1.0, **metrics} for k in range(30)]
    return [*rows, {"step": 300.0, "energy_gap": math.nan, "energy_data": math.nan}]


@pytest.mark.parametrize(("metrics", "words"), CASES.values(), ids=CASES)
def test_the_error_and_the_diagnosis_agree(metrics, words):
    rows = log(**metrics)
    message = str(Guard(1e6, 0).error("energy_data is nan", 300, None, rows))
    finding = next(f for f in diagnose(rows) if f.name == "energies-drifting")
    assert words in message
    assert words in finding.advice
    cause, advice = why_diverged(StepSigns(**{k: metrics.get(k) for k in StepSigns._fields}))
    assert (cause in message, cause in finding.text) == (True, True)
    assert (advice in message, advice in finding.advice) == (True, True)
    for other in diagnose(rows):
        assert "Raise step_size" not in other.advice


def test_a_crawling_chain_is_not_told_to_take_longer_steps_where_they_cannot_be():
    assert "Raise step_size" in why_slow(StepSigns(displacement=1e-4), diverged=False)
    assert "Raise step_size" not in why_slow(StepSigns(displacement=1e-4), diverged=True)
    assert "Raise step_size" not in why_slow(StepSigns(acceptance=0.3, displacement=1e-4), diverged=False)
    tuned = StepSigns(acceptance=0.65, displacement=1e-4, step_size=1e-6)
    assert "tunes itself, and what keeps it short" in why_slow(tuned, diverged=False)
    assert "learning rate" in why_refused(tuned._replace(acceptance=0.01))
    assert "Lower step_size" in why_refused(StepSigns(acceptance=0.01))


def degenerate(**metrics: float):
    rows = [{"step": 10.0 * k, "energy_gap": 0.0, "displacement": 0.3, **metrics} for k in range(30)]
    return next((f for f in diagnose(rows) if f.name == "weight-degeneracy"), None)


def test_weights_that_were_spent_are_seen_though_they_are_equal_after_resampling():
    assert degenerate(ess=0.93, resampled=0.3, ancestors=0.4, log_z_noise=0.1) is None
    spent = degenerate(ess=0.4, resampled=1.0, ancestors=0.008, log_z_noise=1.4)
    assert spent.severity == "problem"
    assert "resampled after 100%" in spent.text
    assert "0.8% of the first" in spent.text
    assert "Unadjusted moves" in spent.advice
    hasty = degenerate(ess=0.4, resampled=1.0, acceptance=0.6, pace=0.8, log_z_noise=0.7)
    assert hasty.severity == "warning"
    assert "learning rate" in hasty.advice
    assert degenerate(ess=0.95, resampled=0.2, ancestors=0.008).severity == "warning"
