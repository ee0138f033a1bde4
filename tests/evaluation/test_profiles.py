"""The five courses of Figure 2 and their neighbours, on logs made for them, with noise and at their edges."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from conftest import each

from metastable.evaluation.diagnosis import Facts, diagnose
from metastable.evaluation.profiles import ranking_profile

K = 15
LEVEL = -math.log(K + 1)
COURSES = {
    "posterior-collapse": lambda t: -1.5 * np.exp(-t / 0.02) - 0.003,
    "proposal-caught-up": lambda t: LEVEL + 1.8 * (1 - np.exp(-t / 0.03)) * np.exp(-t / 0.1),
    "proposal-behind": lambda t: LEVEL + 1 + 1.2 * np.exp(-t / 0.1) * (1 - 3 * np.exp(-t / 0.02)),
    "proposal-ahead": lambda t: LEVEL - 0.9 * np.exp(-t / 0.1),
    "energy-overtook": lambda t: LEVEL + 1.2 - 1.9 * np.exp(-t / 0.1),
    "energy-behind": lambda t: LEVEL - 0.3 - 0.6 * np.exp(-t / 0.1),
    "balanced": lambda t: LEVEL + 0 * t,
    "": lambda t: LEVEL + 1 + 0 * t,
}


def log_of(course, rows=150, noise=0.05, seed=0, **columns):
    t = np.arange(rows) / rows
    values = COURSES[course](t) + noise * np.random.default_rng(seed).normal(size=rows)
    return [{"step": 10 * k, "objective": float(v), **columns} for k, v in enumerate(values)]


FACTS = Facts("ranking-nce", negatives_per_datum=K)
NAMED = [name for name in COURSES if name not in ("posterior-collapse", "balanced", "")]


@each("name", COURSES)
@each("rows", [60, 400])
def test_courses_are_told_apart(name, rows):
    for seed in range(20):
        noise = 0.0005 if name == "posterior-collapse" else 0.05  # a posterior that is certain hardly varies
        log = log_of(name, rows, noise, seed)
        values = np.array([row["objective"] for row in log])
        assert ranking_profile(values, K, 0.05 / math.sqrt(rows // 5)).name == name


@pytest.mark.parametrize("name", NAMED)
def test_each_is_a_finding_with_its_numbers(name):
    findings = diagnose(log_of(name), FACTS)
    (finding,) = [f for f in findings if f.name == name]
    assert finding.severity == ("warning" if name == "energy-behind" else "note")
    assert finding.evidence["matched"] == pytest.approx(LEVEL)
    assert f"{finding.evidence['objective']:.3f}" in finding.text
    assert json.loads(json.dumps(finding.evidence)) == finding.evidence
    assert [f.name for f in findings if f.name != "healthy"] == [name]


def test_a_collapse_is_named_once_and_a_balance_is_healthy():
    collapse = diagnose(log_of("posterior-collapse", noise=0.0005, positive_weight=0.003), FACTS)
    assert [f.name for f in collapse] == ["posterior-collapse"]
    still = log_of("posterior-collapse", noise=0.0005, positive_weight=0.0, grad_norm=0.0)
    assert [f.name for f in diagnose(still, FACTS)] == [
        "posterior-collapse"
    ]  # which is why there is no gradient
    (healthy,) = diagnose(log_of("balanced"), FACTS)
    assert healthy.name == "healthy"
    assert healthy.evidence["matched"] == pytest.approx(LEVEL)
    assert "−log(K+1) is -2.773" in healthy.text


def test_other_methods_and_unknown_k_have_no_profile():
    for facts in (
        Facts("ibc", negatives_per_datum=K),
        Facts("nce", negatives_per_datum=K),
        Facts("ranking-nce"),
    ):
        assert [f.name for f in diagnose(log_of("proposal-behind"), facts)] == ["healthy"]


def test_the_edges_of_being_matched():
    t = np.arange(200) / 200
    rising = LEVEL - 0.9 * np.exp(-t / 0.02)
    assert ranking_profile(rising + 0.04, K).name == "proposal-ahead"
    assert ranking_profile(rising + 0.07, K).name == "energy-overtook"
    assert ranking_profile(rising - 0.07, K).name == "energy-behind"


def test_noise_alone_is_no_turn():
    for seed in range(30):
        values = LEVEL + 0.4 * np.random.default_rng(seed).normal(size=100)
        assert ranking_profile(values, K, 0.4 / math.sqrt(20)).name == "balanced"
