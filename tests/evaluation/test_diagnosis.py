"""Synthetic logs: each finding on the log that shows it, none on healthy ones, and the thresholds' edges."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import each

from metastable.core.errors import InputError
from metastable.evaluation.diagnosis import Facts, Finding, diagnose, format_findings


def noise(rng: np.random.Generator, rows: int, correlation: float) -> np.ndarray:
    """Stationary noise of unit variance with the given correlation from one row to the next."""
    values = rng.normal(size=rows)
    for k in range(1, rows):
        values[k] = correlation * values[k - 1] + math.sqrt(1 - correlation**2) * values[k]
    return values


def healthy(seed: int = 0, rows: int = 200, correlation: float = 0.0, scale: float = 1.0) -> list[dict]:
    """Energies settle, the gap opens and closes, cross-entropy falls, walkers stay alive."""
    rng = np.random.default_rng(seed)
    t = np.arange(rows) / rows
    gap = -1.5 * np.exp(-t / 0.1) + 0.2 * scale * noise(rng, rows, correlation)
    data = -8 * (1 - np.exp(-t / 0.15)) + 0.3 * scale * noise(rng, rows, correlation)
    columns = {
        "step": 10.0 * np.arange(rows),
        "energy_data": data,
        "energy_negatives": data - gap,
        "energy_gap": gap,
        "grad_norm": 0.5 + 2 * np.exp(-t / 0.2) + 0.1 * np.abs(rng.normal(size=rows)),
        "cross_entropy": 1.5 + 2 * np.exp(-t / 0.2) + 0.1 * scale * noise(rng, rows, correlation),
        "ess": 0.9 + 0.08 * rng.uniform(-1, 1, rows),
        "displacement": 0.2 + 0.02 * rng.normal(size=rows),
        "acceptance": 0.8 + 0.05 * rng.normal(size=rows),
    }
    return [{key: float(values[k]) for key, values in columns.items()} for k in range(rows)]


def changed(rows: list[dict], **columns: object) -> list[dict]:
    """The log with columns replaced by numbers or functions of time in [0, 1), or dropped by None."""
    out = []
    for k, row in enumerate(rows):
        new = dict(row)
        for key, value in columns.items():
            new[key] = value(k / len(rows)) if callable(value) else value
        out.append({key: value for key, value in new.items() if value is not None})
    return out


def names(findings: list[Finding], least: str = "warning") -> list[str]:
    kept = ("problem",) if least == "problem" else ("problem", "warning")
    return [finding.name for finding in findings if finding.severity in kept]


def only(findings: list[Finding], name: str) -> Finding:
    (finding,) = [f for f in findings if f.name == name]
    return finding


@each("rows", [20, 60, 300])
@each("correlation", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("entropy", [True, False])
def test_a_healthy_noisy_log_raises_no_alarm(rows: int, correlation: float, entropy: bool) -> None:
    facts = Facts("jarzynski", [0.25, 0.75], [0.26, 0.74], 0.01, separated=True, sample_std_ratio=1.02)
    for seed in range(50):
        log = healthy(seed, rows, correlation, scale=2.0)
        log = log if entropy else changed(log, cross_entropy=None)
        findings = diagnose(log, facts)
        assert names(findings, "problem") == [], (seed, format_findings(findings))
        if rows * (1 - correlation) >= 10:  # else the log is hardly longer than its own memory
            assert [f.name for f in findings] == ["healthy"], (seed, format_findings(findings))


@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_a_run_that_starts_at_its_end_is_no_failure_to_learn(correlation: float) -> None:
    for seed in range(50):
        log = [dict(row, step=k) for k, row in enumerate(healthy(seed, 400, correlation)[200:])]
        assert names(diagnose(log)) == []
        assert names(diagnose(changed(log, cross_entropy=None), Facts("pcd", sample_std_ratio=0.97))) == []


def test_healthy_note_carries_its_evidence() -> None:
    (note,) = diagnose(healthy(3))
    assert (note.name, note.severity) == ("healthy", "note")
    assert note.evidence["cross_entropy_first_fifth"] > note.evidence["cross_entropy_last_fifth"] + 1
    assert abs(note.evidence["gap_last_fifth"]) < 5 * note.evidence["gap_se"]
    assert "cross-entropy" in note.text.lower()


def test_evidence_is_plain_json() -> None:
    facts = Facts("pcd", [0.5, 0.5], [0.0, 1.0], 0.01, True, 3.0, 0.1, 0.2, 0.95, 0.1, 100)
    log = changed(
        healthy(), ess=0.01, acceptance=0.01, energy_data=lambda t: -300 * t, cross_entropy=lambda t: t
    )
    findings = diagnose(log, facts)
    assert json.loads(json.dumps([f.evidence for f in findings])) == [f.evidence for f in findings]
    assert {f.name for f in findings} >= {
        "mode-collapse",
        "weight-degeneracy",
        "stuck-chains",
        "energies-drifting",
        "overfitting",
        "no-learning",
    }


# ------------------------------------------------------------------------------------------------ modes


def test_a_lost_mode_is_a_collapse_and_not_also_a_wrong_weight() -> None:
    findings = diagnose(healthy(), Facts("pcd", [0.25, 0.75], [0.0, 1.0], 0.01, separated=True))
    assert names(findings) == ["mode-collapse"]
    collapse = only(findings, "mode-collapse")
    assert collapse.severity == "problem"
    assert collapse.evidence["lost_modes"] == [1]
    assert "cannot see" in collapse.text
    assert "jarzynski" in collapse.advice


@each(
    "data, sample, error, collapsed",
    [
        (0.25, 0.049, 0.01, True),  # less than a fifth of 0.25 is left
        (0.25, 0.051, 0.01, False),
        (0.05, 0.0, 0.01, True),  # the smallest weight that counts
        (0.049, 0.0, 0.01, False),
        (0.25, 0.0, 0.07, False),  # within four standard errors
        (0.25, 0.0, None, True),
    ],
)
def test_edges_of_mode_collapse(data: float, sample: float, error: float | None, collapsed: bool) -> None:
    facts = Facts("jarzynski", [data, 1 - data], [sample, 1 - sample], error)
    assert ("mode-collapse" in names(diagnose(healthy(), facts))) is collapsed


@pytest.mark.parametrize(
    ("ratio", "severity"), [(0.29, "problem"), (0.31, "warning"), (0.5, None), (1.0, None)]
)
def test_tiny_spread_is_a_collapse(ratio: float, severity: str | None) -> None:
    found = [
        f.severity for f in diagnose(healthy(), Facts(sample_std_ratio=ratio)) if f.name == "mode-collapse"
    ]
    assert found == ([severity] if severity else [])


@pytest.mark.parametrize(("ratio", "severity"), [(2.0, None), (2.1, "warning"), (5.1, "problem")])
def test_samples_that_spread_too_far(ratio: float, severity: str | None) -> None:
    found = [
        f.severity for f in diagnose(healthy(), Facts(sample_std_ratio=ratio)) if f.name == "samples-too-wide"
    ]
    assert found == ([severity] if severity else [])


@each(
    "off, error, severity",
    [
        (0.029, 0.001, None),  # too small to matter, however certain
        (0.031, 0.001, "warning"),
        (0.031, 0.008, None),  # within four standard errors
        (0.05, 0.012, "warning"),
        (0.11, 0.02, "problem"),
        (0.09, None, None),  # no standard error: only gross differences
        (0.11, None, "problem"),
    ],
)
def test_edges_of_wrong_weights(off: float, error: float | None, severity: str | None) -> None:
    facts = Facts("jarzynski", [0.5, 0.5], [0.5 + off, 0.5 - off], error)
    found = [f.severity for f in diagnose(healthy(), facts) if f.name == "wrong-mode-weights"]
    assert found == ([severity] if severity else [])


@pytest.mark.parametrize(
    "method", ["ContrastiveDivergence", "cd", "PersistentCD", "pcd", "ShortRun", "short-run"]
)
def test_blind_methods_are_told_so(method: str) -> None:
    wrong = Facts(method, [0.25, 0.75], [0.5, 0.5], 0.01, separated=True)
    assert "cannot see" in only(diagnose(healthy(), wrong), "wrong-mode-weights").text
    right = Facts(method, [0.25, 0.75], [0.25, 0.75], 0.01, separated=True)
    findings = diagnose(healthy(), right)
    assert names(findings) == []
    assert only(findings, "mode-weights-unseen").severity == "note"


def test_no_blindness_where_the_method_sees_or_modes_touch() -> None:
    for facts in (
        Facts("jarzynski", [0.25, 0.75], [0.5, 0.5], 0.01, separated=True),
        Facts("pcd", [0.25, 0.75], [0.5, 0.5], 0.01, separated=False),
    ):
        findings = diagnose(healthy(), facts)
        assert "cannot see" not in only(findings, "wrong-mode-weights").text
        assert "mode-weights-unseen" not in [f.name for f in findings]


def test_weights_of_different_length_are_refused() -> None:
    with pytest.raises(InputError, match="2 data_mode_weights, got 3"):
        Facts(data_mode_weights=[0.5, 0.5], sample_mode_weights=[0.3, 0.3, 0.4])
    with pytest.raises(InputError, match="mode_weight_se"):
        Facts(data_mode_weights=[0.5, 0.5], sample_mode_weights=[0.5, 0.5], mode_weight_se=[0.1] * 3)


# --------------------------------------------------------------------------------------------- learning


def flat(seed: int, gap: float, rows: int = 200) -> list[dict]:
    """Nothing changes but for noise."""
    rng = np.random.default_rng(seed)
    data = 1 + 0.1 * rng.normal(size=rows)
    gaps = gap + 0.1 * rng.normal(size=rows)
    return [
        {
            "step": k,
            "energy_data": data[k],
            "energy_negatives": data[k] - gaps[k],
            "energy_gap": gaps[k],
            "grad_norm": 1 + 0.1 * rng.normal(),
            "cross_entropy": 4 + 0.1 * rng.normal(),
        }
        for k in range(rows)
    ]


@each("seed", range(10))
def test_flat_cross_entropy_with_an_open_gap_is_no_learning(seed: int) -> None:
    finding = only(diagnose(flat(seed, gap=1.0), Facts("jarzynski")), "no-learning")
    assert finding.severity == "problem"
    assert finding.evidence["gap_last_fifth"] == pytest.approx(1.0, abs=0.1)


@each("seed", range(10))
def test_an_open_gap_alone_is_a_warning_and_with_far_samples_a_problem(seed: int) -> None:
    log = changed(flat(seed, gap=-1.0), cross_entropy=None)
    assert only(diagnose(log, Facts("pcd")), "no-learning").severity == "warning"
    assert only(diagnose(log, Facts("pcd", sample_std_ratio=4.0)), "no-learning").severity == "problem"


@each("seed", range(10))
def test_a_frozen_model_shows_only_through_its_samples(seed: int) -> None:
    log = changed(flat(seed, gap=0.0), cross_entropy=None)
    assert "no-learning" not in names(diagnose(log, Facts("pcd", sample_std_ratio=1.0)))
    assert "no-learning" in names(diagnose(log, Facts("pcd", sample_std_ratio=3.0)), "problem")


def test_rising_cross_entropy_is_a_problem_and_a_wiggle_is_not() -> None:
    rising = changed(healthy(), cross_entropy=lambda t: 1.5 + t)
    assert "rose" in only(diagnose(rising), "no-learning").text
    assert names(diagnose(changed(healthy(), cross_entropy=lambda t: 1.5 + 0.03 * t))) == []


def test_cross_entropy_of_labels_is_named_as_such() -> None:
    """Rising it is a problem, falling it is good news about the classifier, and neither is about the data."""
    fall = [{"label_cross_entropy": row.pop("cross_entropy"), **row} for row in healthy()]
    note = only(diagnose(fall, Facts("jem")), "healthy")
    assert "Cross-entropy of the labels from" in note.text
    assert "cross_entropy_first_fifth" not in note.evidence
    rise = [{**row, "label_cross_entropy": 8 - row["label_cross_entropy"]} for row in fall]
    finding = only(diagnose(rise, Facts("jem")), "no-learning")
    assert finding.text.startswith("Cross-entropy of the labels rose")


def joint(seed: int, gap: object, o: float, **columns: object) -> list[dict]:
    """A JEM whose classifier learns, with a gap of `gap` times o: a number, or a function of time."""
    rng = np.random.default_rng(seed)
    rows = changed(healthy(seed), energy_data=None, energy_negatives=None, cross_entropy=None, energy_gap=gap)
    for row in rows:
        row["energy_gap"] = o * (row["energy_gap"] + 0.1 * rng.normal())
        row["label_cross_entropy"] = 0.1 + 2 * math.exp(-row["step"] / 400) + 0.02 * rng.normal()
    return changed(rows, **columns)


@each("seed", range(10))
@pytest.mark.parametrize("o", [2.0, 20_000.0])
@pytest.mark.parametrize("gap", [6.0, -6.0, lambda t: 27 * (1 - math.exp(-3 * t))], ids=["+", "-", "opens"])
def test_labels_that_are_learned_do_not_hide_a_density_that_is_not(seed: int, o: float, gap: object) -> None:
    log = joint(seed, gap, o)
    finding = only(diagnose(log, Facts("jem", output_scale=o)), "no-learning")
    assert finding.severity == "warning"
    assert finding.text.startswith("The labels are learned, but not the density")
    assert finding.evidence["output_scale"] == o
    assert abs(finding.evidence["gap_last_fifth"]) > 5 * o
    assert "generative" in finding.advice
    far = diagnose(log, Facts("jem", output_scale=o, sample_std_ratio=4.0))
    assert only(far, "no-learning").severity == "problem"


@each("seed", range(10))
@pytest.mark.parametrize("o", [2.0, 20_000.0])
def test_a_joint_model_that_learns_raises_no_alarm(seed: int, o: float) -> None:
    facts = Facts("jem", output_scale=o)
    quiet = [
        joint(seed, 0.0, o),
        joint(seed, 0.7, o),  # what chains of few steps and little noise leave open: thousands of nats
        joint(seed, lambda t: -6 * math.exp(-4 * t), o),  # opened, and closes
        joint(seed, lambda t: -8 + 3 * t, o),  # large still, but on its way
        joint(seed, -6.0, o, beta_o=0.5),  # flatter negatives, as β means them
        joint(seed, 0.0, o, energy_gap=None),  # a classifier alone
    ]
    assert [names(diagnose(log, facts)) for log in quiet] == [[]] * len(quiet)
    plain = joint(seed, -6.0, o, beta_o=0.0)
    assert names(diagnose(plain, facts)) == ["no-learning"]


def test_the_gap_of_a_joint_model_is_not_judged_without_its_scale() -> None:
    log = joint(0, -6.0, 20_000.0)
    assert names(diagnose(log, Facts("jem"))) == []
    assert names(diagnose(log, Facts("jem", output_scale=2e6))) == []
    assert names(diagnose(log, Facts("robust", output_scale=20_000.0))) == []


def test_labels_are_looked_at_beside_the_entropy_of_the_data() -> None:
    log = changed(healthy(), label_cross_entropy=lambda t: 0.5 + t)
    finding = only(diagnose(log, Facts("jem", output_scale=1.0)), "no-learning")
    assert finding.text.startswith("Cross-entropy of the labels rose")
    gap = joint(0, -6.0, 1.0, cross_entropy=lambda t: 4 - t)  # that of the data falls: the density is learned
    assert names(diagnose(gap, Facts("jem", output_scale=1.0))) == []


def test_a_gap_to_fixed_noise_is_what_nce_should_have() -> None:
    log = changed(flat(0, gap=-6.0), cross_entropy=None)
    assert names(diagnose(log, Facts("nce"))) == []
    assert "no-learning" in names(diagnose(log, Facts("jarzynski")))


def test_zero_gradient() -> None:
    finding = only(diagnose(changed(healthy(), grad_norm=0.0)), "no-learning")
    assert "gradient is zero" in finding.text


# ---------------------------------------------------------------------------------------------- walkers


@each(
    "low, share, severity",
    [
        (0.05, 0.3, "problem"),
        (0.05, 0.2, None),  # an episode that resampling ended
        (0.15, 0.6, "warning"),
        (0.15, 0.4, None),
        (0.25, 1.0, None),
    ],
)
def test_edges_of_weight_degeneracy(low: float, share: float, severity: str | None) -> None:
    log = changed(healthy(), ess=lambda t: low if t > 1 - share else 0.9)
    found = [f.severity for f in diagnose(log) if f.name == "weight-degeneracy"]
    assert found == ([severity] if severity else [])


def test_copies_and_held_out_walkers() -> None:
    for twins, severity in ((0.49, None), (0.5, "warning"), (0.9, "problem")):
        found = [
            f.severity for f in diagnose(healthy(), Facts(duplicates=twins)) if f.name == "weight-degeneracy"
        ]
        assert found == ([severity] if severity else [])
    finding = only(diagnose(changed(healthy(), ess_held_out=0.01)), "weight-degeneracy")
    assert finding.severity == "warning"
    assert "held-out" in finding.text


@each(
    "displacement, steps, severity",
    [
        (9e-4, 10**9, "problem"),
        (2e-3, 10**5, "warning"),  # 500² = 250 000 updates to cross
        (2e-3, 10**6, None),
        (1.1e-2, 10, None),
        (0.0, 10**9, "problem"),
    ],
)
def test_edges_of_stuck_chains(displacement: float, steps: int, severity: str | None) -> None:
    log = changed(healthy(), displacement=displacement)
    found = [f.severity for f in diagnose(log, Facts(steps=steps)) if f.name == "stuck-chains"]
    assert found == ([severity] if severity else [])


def test_rejected_proposals_ask_for_a_smaller_step() -> None:
    finding = only(diagnose(changed(healthy(), acceptance=0.09), Facts(step_size=0.5)), "stuck-chains")
    assert finding.evidence["step_size"] == 0.5
    assert "Lower step_size" in finding.advice
    assert names(diagnose(changed(healthy(), acceptance=0.11))) == []
    slow = only(diagnose(changed(healthy(), displacement=1e-5)), "stuck-chains")
    assert "Raise step_size" in slow.advice


# --------------------------------------------------------------------------------------------- energies


def with_offset(seed: int, offset: object, rows: int = 200) -> list[dict]:
    """A healthy log whose energies share an offset that depends on time."""
    log = healthy(seed, rows)
    shift = [offset(k / rows) for k in range(rows)]
    sides = ("energy_data", "energy_negatives")
    return [dict(row, **{key: row[key] + s for key in sides}) for row, s in zip(log, shift)]


@each("seed", range(10))
def test_drift_is_told_from_settling(seed: int) -> None:
    def severity(offset: object) -> list[str]:
        return [f.severity for f in diagnose(with_offset(seed, offset)) if f.name == "energies-drifting"]

    assert severity(lambda t: -300 * t) == ["warning"]
    assert severity(lambda t: 300 * t) == ["warning"]
    assert severity(lambda t: math.exp(7 * t)) == ["problem"]
    assert severity(lambda t: -300 * (1 - math.exp(-t / 0.15))) == []
    assert severity(lambda t: -300.0) == []
    assert severity(lambda t: 30 * t) == []


@each("seed", range(10))
def test_a_gap_that_runs_away_is_a_problem(seed: int) -> None:
    rng = np.random.default_rng(seed)
    log = changed(healthy(seed), energy_gap=lambda t: -40 * t + rng.normal(), cross_entropy=None)
    finding = only(diagnose(log, Facts("pcd")), "energies-drifting")
    assert finding.severity == "problem"
    assert "below" in finding.text
    assert "energies-drifting" not in names(diagnose(log, Facts("nce")))


@pytest.mark.parametrize("bad", [math.nan, math.inf, "NaN"])
def test_non_finite_numbers_name_the_step(bad: object) -> None:
    log = healthy()
    log[150]["energy_data"] = bad
    finding = only(diagnose(log), "energies-drifting")
    assert finding.severity == "problem"
    assert finding.evidence["step"] == 1500.0


# ------------------------------------------------------------------------------------------- everything


@each(
    "gap, error, found",
    [(0.4, None, False), (0.6, None, True), (0.2, 0.04, True), (0.2, 0.06, False), (0.09, 0.001, False)],
)
def test_edges_of_overfitting(gap: float, error: float | None, found: bool) -> None:
    facts = Facts(held_out_energy_gap=gap, held_out_energy_gap_se=error)
    assert ("overfitting" in names(diagnose(healthy(), facts))) is found


def test_short_and_empty_logs_say_so_and_still_use_the_facts() -> None:
    assert [f.name for f in diagnose([])] == ["too-little-history"]
    findings = diagnose(healthy(rows=19), Facts("pcd", [0.5, 0.5], [0.01, 0.99], 0.01))
    assert [f.name for f in findings] == ["mode-collapse", "too-little-history"]


def test_a_training_of_few_steps_is_too_short_to_judge_however_often_it_logs() -> None:
    rows = healthy(rows=4)
    short = only(diagnose([{**row, "step": k + 1} for k, row in enumerate(rows)]), "too-little-history")
    assert "ended at step 4, which is too short to judge" in short.text
    assert short.advice == "Train longer."
    rarely = only(diagnose([{**row, "step": 100 * k} for k, row in enumerate(rows)]), "too-little-history")
    assert "Log more often" in rarely.advice
    lost = diagnose([{**row, "step": k + 1} for k, row in enumerate(changed(rows, energy_data=math.nan))])
    assert only(lost, "too-little-history").advice == ""


def test_the_gap_is_read_from_the_energies_where_it_was_not_logged() -> None:
    log = changed(flat(1, gap=1.0), energy_gap=None)
    assert only(diagnose(log), "no-learning").evidence["gap_last_fifth"] == pytest.approx(1.0, abs=0.1)


def test_rows_without_a_key_are_skipped() -> None:
    log = [
        row if k % 3 == 0 else {"step": row["step"], "energy_gap": None} for k, row in enumerate(healthy())
    ]
    assert names(diagnose(log)) == []


def test_worst_comes_first_and_text_wraps() -> None:
    facts = Facts("cd", [0.5, 0.5], [0.44, 0.56], 0.001, separated=True)
    findings = diagnose(changed(healthy(), acceptance=0.01), facts)
    assert [f.severity for f in findings] == ["problem", "warning"]
    text = format_findings(findings, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[0] == "problem: stuck-chains"
    assert "try: " in text
    assert "evidence: " in text


def test_reading_a_log_needs_no_torch() -> None:
    """The rules import numpy and the standard library only."""
    code = (
        "import sys; from metastable.evaluation import diagnosis; "
        "diagnosis.diagnose([{'step': 0}]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --------------------------------------------------------------------------------------- flat and steep energies


@pytest.mark.parametrize(
    ("spread", "found"), [(0.0, True), (0.29, True), (0.31, False), (5.0, False), (None, False)]
)
def test_an_energy_that_tells_nothing_apart_is_constant(spread: float | None, found: bool) -> None:
    findings = diagnose(healthy(), Facts("adance", energy_spread=spread))
    assert ("constant-energy" in names(findings)) is found
    if found:
        assert only(findings, "constant-energy").severity == "problem"
        assert "rejuvenation" in only(findings, "constant-energy").advice


@each(
    "slope, found",
    [
        (lambda t: 1 - math.exp(-t / 0.02), False),  # rises by orders of magnitude at the start, then stays
        (lambda t: 0.5 + 0.5 * t, False),
        (lambda t: math.exp(3 * t), True),
        (lambda t: 1e-3 if t < 0.5 else 10.0, True),
        (lambda t: math.exp(-3 * t), False),
    ],
)
def test_a_slope_that_goes_on_growing_is_named(slope, found: bool) -> None:
    rng = np.random.default_rng(0)
    log = changed(healthy(), gradient_magnitude=lambda t: slope(t) * (1 + 0.1 * rng.normal()))
    assert ("energy-steepening" in names(diagnose(log))) is found
    if found:
        assert "spectral" in only(diagnose(log), "energy-steepening").advice


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("jarzynski", "earlier resampling"),
        ("pcd", "carries weights across gaps"),
        ("robust", "longer chains"),
        ("jem", "longer chains"),
        ("ranking-nce", "more negatives"),
    ],
)
def test_advice_on_mode_weights_is_the_methods_own(method: str, words: str) -> None:
    findings = diagnose(healthy(), Facts(method, [0.5, 0.5], [0.2, 0.8], 0.01, separated=True))
    assert words in only(findings, "wrong-mode-weights").advice


# ---- training that has not ended


def closing(last: float, noise_: float = 0.05, **columns: object) -> list[dict]:
    """A gap that closes from −3 to `last`, with a likelihood that rises."""
    rng = np.random.default_rng(1)
    gap = lambda t: last + (-3 - last) * math.exp(-t / 0.15) + noise_ * rng.normal()  # noqa: E731
    return changed(healthy(), energy_gap=gap, **columns)


def test_a_gap_that_is_clearly_open_at_the_end_is_not_healthy() -> None:
    """−0.33 ± 0.01, while the cross-entropy falls: the run has learned, and has not ended."""
    (finding,) = diagnose(closing(-0.33), Facts("jarzynski"))
    assert (finding.name, finding.severity) == ("not-converged", "warning")
    assert finding.evidence["gap_last_fifth"] == pytest.approx(-0.33, abs=0.03)
    assert finding.evidence["gap_se"] < 0.02
    assert re.search(r"still 0\.3\d ± 0\.0", finding.text)
    assert "below" in finding.text
    assert "steps" in finding.advice
    assert "learning rate" in finding.advice
    above = only(diagnose(closing(0.33), Facts("pcd")), "not-converged")
    assert "above" in above.text


@pytest.mark.parametrize(
    ("log", "method"),
    [
        (closing(-0.05), "jarzynski"),  # too small to matter
        (closing(-0.33, noise_=1.5), "jarzynski"),  # not told from noise
        (closing(-0.33), "ranking-nce"),  # whose negatives are not draws of the model
        (closing(-0.33), "nce"),
        (closing(-0.33, label_cross_entropy=lambda t: 2 - t), "jem"),  # a classifier's
    ],
)
def test_a_gap_that_says_nothing_is_left_alone(log: list[dict], method: str) -> None:
    assert "not-converged" not in names(diagnose(log, Facts(method)))


def test_a_gap_that_never_closes_is_said_once() -> None:
    log = changed(healthy(), energy_gap=lambda t: -3.0, cross_entropy=None)
    assert names(diagnose(log, Facts("pcd"))) == ["no-learning"]


# ---- densities that are none


def test_mass_that_has_run_away_is_a_problem_with_the_knob_that_is_wrong() -> None:
    facts = Facts("jarzynski", far_share=0.4, sample_radius=300.0, rays_down=0.3, sample_std_ratio=300.0)
    (finding,) = diagnose(healthy(), facts)
    assert (finding.name, finding.severity) == ("mass-ran-away", "problem")
    assert "40% of the samples" in finding.text
    assert "300 spreads" in finding.text
    assert 'reference="gaussian"' in finding.advice
    held = only(diagnose(healthy(), Facts("jarzynski", far_share=0.4, rays_down=0.0)), "mass-ran-away")
    assert "reference" not in held.advice
    bare = only(diagnose(healthy(), Facts("jarzynski", far_share=0.4, bare=True)), "mass-ran-away")
    assert 'reference="gaussian"' in bare.advice
    assert [f.name for f in diagnose(healthy(), Facts("jarzynski", far_share=0.01))] == ["healthy"]


def test_an_energy_that_falls_far_away_is_a_warning_while_samples_stay() -> None:
    (finding,) = diagnose(healthy(), Facts("pcd", far_share=0.0, rays_down=0.02))
    assert (finding.name, finding.severity) == ("no-density", "warning")
    assert [f.name for f in diagnose(healthy(), Facts("pcd", far_share=0.0, rays_down=0.0))] == ["healthy"]


def test_a_likelihood_that_no_density_can_have_is_a_problem() -> None:
    claimed = {"log_likelihood": 61436.0, "log_likelihood_se": 70.0, "dimensions": 2}
    for facts in (
        Facts("jarzynski", excess_mass=61000.0, **claimed),
        Facts("jarzynski", entropy=2.8, entropy_se=0.03, copies=0.0, **claimed),
    ):
        (finding,) = diagnose(healthy(), facts)
        assert (finding.name, finding.severity) == ("impossible-likelihood", "problem")
        assert "6.144e+04 nats is none that a density can have" in finding.text


@each(
    "facts, found",
    [
        ({"log_likelihood": -2.0, "excess_mass": 6.9}, False),
        ({"log_likelihood": -2.0, "excess_mass": 7.1}, True),
        (
            {"log_likelihood": -2.0, "log_likelihood_se": 1.0, "excess_mass": 11.9},
            False,
        ),  # log Z is not so sure
        ({"log_likelihood": 9.1, "entropy": 2.8, "dimensions": 2}, False),  # 11.9 of 5 + 3.5·2
        ({"log_likelihood": 9.3, "entropy": 2.8, "dimensions": 2}, True),
        ({"log_likelihood": 9.3, "entropy": 2.8, "dimensions": 20}, False),
        ({"log_likelihood": 9.3, "entropy": -math.inf, "dimensions": 1}, False),  # atoms alone
        ({"excess_mass": 100.0}, False),  # nothing was claimed
    ],
)
def test_the_edges_of_what_a_density_can_have(facts: dict, found: bool) -> None:
    assert ("impossible-likelihood" in names(diagnose(healthy(), Facts("jarzynski", **facts)))) == found


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"copies": 0.4}, "dequantise"),
        ({"rays_down": 0.5}, 'reference="gaussian"'),
        ({"bare": True, "far_share": 0.5}, 'reference="gaussian"'),
        ({}, "more walkers"),
    ],
)
def test_advice_on_an_impossible_likelihood_names_its_cause(facts: dict, words: str) -> None:
    facts = {"log_likelihood": 500.0, "excess_mass": 400.0, **facts}
    assert words in only(diagnose(healthy(), Facts("jarzynski", **facts)), "impossible-likelihood").advice
