"""Calibration against exact answers: known gaps, chance alone, and other implementations."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import assert_within, each, mean_and_error, z_limit
from torch import Tensor

from metastable.core.errors import InputError
from metastable.evaluation.calibration import (
    accuracy,
    brier_score,
    expected_calibration_error,
    negative_log_likelihood,
    reliability,
)

KINDS = ("equal-width", "equal-mass")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_logits(n: int, classes: int = 4, seed: int = 0) -> Tensor:
    return 2 * torch.randn(n, classes, generator=rng(seed), dtype=torch.float64)


def honest_labels(logits: Tensor, seed: int = 1) -> Tensor:
    """Drawn from the classifier's own probabilities: it is calibrated perfectly."""
    return torch.multinomial(torch.softmax(logits, 1), 1, generator=rng(seed))[:, 0]


def two_classes(confidence: Tensor) -> Tensor:
    """Logits of two classes that give class 0 the stated probability."""
    return torch.stack([confidence, 1 - confidence], 1).log()


# ------------------------------------------------------------------------------------------ exact values


def test_scores_of_a_table_that_can_be_done_by_hand():
    logits = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.2, 0.5, 0.3]], dtype=torch.float64).log()
    labels = torch.tensor([0, 2, 0])
    assert accuracy(logits, labels) == pytest.approx(2 / 3)
    assert negative_log_likelihood(logits, labels) == pytest.approx(-math.log(0.7 * 0.6 * 0.2) / 3)
    rows = [0.3**2 + 0.2**2 + 0.1**2, 0.1**2 + 0.3**2 + 0.4**2, 0.8**2 + 0.5**2 + 0.3**2]
    assert brier_score(logits, labels) == pytest.approx(sum(rows) / 3)


def test_equal_width_bins_are_closed_above():
    # the first confidence is ½ exactly, the last 1
    logits = torch.tensor([[0, 0], [1e-9, 0], [2, 0], [800, 0]], dtype=torch.float64)
    curve = reliability(logits, torch.tensor([0, 0, 1, 0]), bins=2)
    assert curve.events.tolist() == [1, 3]
    assert curve.low.tolist() == [0, 0.5]
    assert curve.high.tolist() == [0.5, 1]
    assert curve.accuracy.tolist() == pytest.approx([1, 2 / 3])
    assert curve.confidence.tolist() == pytest.approx([0.5, (0.5 + 1 / (1 + math.exp(-2)) + 1) / 3])


def test_equal_mass_bins_hold_as_many_events_each_and_keep_ties_together():
    confidence = torch.linspace(0.55, 0.95, 12, dtype=torch.float64)
    curve = reliability(two_classes(confidence), torch.zeros(12, dtype=torch.long), 4, "equal-mass")
    assert curve.events.tolist() == [3, 3, 3, 3]
    tied = torch.tensor([0.6] * 7 + [0.7, 0.8, 0.9], dtype=torch.float64)
    curve = reliability(two_classes(tied), torch.zeros(10, dtype=torch.long), 5, "equal-mass")
    assert curve.events.tolist()[0] == 7
    assert curve.events.sum() == 10
    alone = reliability(two_classes(tied[:7]), torch.zeros(7, dtype=torch.long), 5, "equal-mass")
    assert alone.events.tolist() == [7]
    assert alone.confidence.tolist() == pytest.approx([0.6])


@each("kind", KINDS)
@each("confidence, right", [(0.95, 70), (0.6, 90)])
def test_a_constant_confidence_has_the_exact_gap(kind, confidence, right):
    logits = two_classes(torch.full((100,), confidence, dtype=torch.float64))
    labels = torch.tensor([0] * right + [1] * (100 - right))
    found = expected_calibration_error(logits, labels, kind=kind)
    assert found.value == pytest.approx(abs(confidence - right / 100), abs=1e-12)


def test_gaps_of_opposite_sign_do_not_cancel():
    logits = two_classes(torch.tensor([0.9] * 10 + [0.6] * 30, dtype=torch.float64))
    labels = torch.tensor([0] * 6 + [1] * 4 + [0] * 27 + [1] * 3)
    assert expected_calibration_error(logits, labels).value == pytest.approx(0.25 * 0.3 + 0.75 * 0.3)
    # in a single bin they do: 33 of 40 right at a mean confidence of 0.675
    assert expected_calibration_error(logits, labels, bins=1).value == pytest.approx(0.825 - 0.675)


def test_all_bins_together_are_the_accuracy_and_the_mean_confidence():
    logits = random_logits(500)
    labels = honest_labels(logits)
    for kind in KINDS:
        curve = reliability(logits, labels, kind=kind)
        assert curve.events.sum() == 500
        hits = (curve.events * curve.accuracy).sum() / 500
        assert float(hits) == pytest.approx(accuracy(logits, labels))
        mean = torch.softmax(logits, 1).amax(1).mean()
        assert float((curve.events * curve.confidence).sum() / 500) == pytest.approx(float(mean))


# ------------------------------------------------------------------------------------------ chance alone


@pytest.mark.parametrize("kind", KINDS)
def test_a_calibrated_classifier_has_what_chance_gives(kind):
    logits = random_logits(4000)
    repeats = [
        expected_calibration_error(logits, honest_labels(logits, seed), kind=kind) for seed in range(60)
    ]
    mean, error = mean_and_error(torch.tensor([r.value for r in repeats]))
    expected = repeats[0].by_chance
    # the normal limit of sparse bins is a few per cent off
    assert abs(float(mean) - expected) < z_limit() * float(error) + 0.05 * expected
    assert float(torch.tensor([r.value for r in repeats]).std()) == pytest.approx(
        repeats[0].by_chance_std, rel=0.5
    )
    assert expected < 0.025


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_a_calibrated_classifier_vanishes_with_more_data(kind):
    logits = random_logits(200_000)
    found = expected_calibration_error(logits, honest_labels(logits), kind=kind)
    assert found.value < found.by_chance + z_limit() * found.by_chance_std
    assert found.value < 0.005


def test_an_overconfident_classifier_stands_out_from_chance():
    """Logits twice too large: the mutant of the test above."""
    logits = random_logits(4000)
    found = expected_calibration_error(2 * logits, honest_labels(logits))
    gap = torch.softmax(2 * logits, 1).amax(1) - torch.softmax(logits, 1).amax(1)  # exact, row by row
    assert found.value > found.by_chance + z_limit() * found.by_chance_std
    assert_within(found.value, float(gap.mean()), found.by_chance_std + found.by_chance)


def test_the_binomial_error_covers_and_never_vanishes():
    logits = two_classes(torch.full((400,), 0.8, dtype=torch.float64))
    spread, said = [], []
    for seed in range(200):
        curve = reliability(logits, honest_labels(logits, seed))
        spread.append(float(curve.accuracy[0]))
        said.append(float(curve.std_error[0]))
    assert sum(said) / 200 == pytest.approx(math.sqrt(0.8 * 0.2 / 400), rel=0.02)
    assert float(torch.tensor(spread).std()) == pytest.approx(sum(said) / 200, rel=0.3)
    sure = reliability(logits[:3], torch.zeros(3, dtype=torch.long))
    assert 0 < float(sure.std_error[0]) < 0.5


# ------------------------------------------------------------------------------------------ other libraries


def test_scores_agree_with_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    logits = random_logits(300, classes=5)
    labels = honest_labels(logits)
    p = torch.softmax(logits, 1).numpy()
    assert negative_log_likelihood(logits, labels) == pytest.approx(metrics.log_loss(labels.numpy(), p))
    assert accuracy(logits, labels) == pytest.approx(metrics.accuracy_score(labels.numpy(), p.argmax(1)))
    calibration = pytest.importorskip("sklearn.calibration")
    two = random_logits(300, classes=2)
    honest = honest_labels(two)
    guess = two.argmax(1)
    confidence = torch.softmax(two, 1).amax(1).numpy()
    for kind, strategy in zip(KINDS, ("uniform", "quantile"), strict=True):
        ours = reliability(two, honest, bins=10, kind=kind)
        hits, means = calibration.calibration_curve(
            (guess == honest).numpy(), confidence, n_bins=10, strategy=strategy
        )
        if kind == "equal-width":
            assert ours.accuracy.tolist() == pytest.approx(hits.tolist())
            assert ours.confidence.tolist() == pytest.approx(means.tolist())
        else:  # its quantiles are interpolated, which may move one event to the next bin
            assert ours.confidence.tolist() == pytest.approx(means.tolist(), abs=0.02)


def test_the_error_agrees_with_torchmetrics():
    functional = pytest.importorskip("torchmetrics.functional.classification")
    logits = random_logits(500).float()
    labels = honest_labels(logits)
    theirs = functional.multiclass_calibration_error(logits, labels, num_classes=4, n_bins=15, norm="l1")
    assert expected_calibration_error(logits, labels).value == pytest.approx(float(theirs), abs=1e-6)


# ------------------------------------------------------------------------------------------ bad input


@each(
    "logits, labels, words",
    [
        (torch.zeros(3, 2), torch.tensor([0, 1, 2]), "labels: must be from 0 to 1, got 2 in row 2"),
        (torch.zeros(3, 2), torch.tensor([0, -1, 1]), "got -1 in row 1"),
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), r"no rows .*N = 0"),
        (torch.tensor([[0.0, math.nan], [0, 1]]), torch.tensor([0, 1]), "1 of 2 rows hold NaN"),
        (torch.tensor([[0.0, math.inf], [0, 1]]), torch.tensor([0, 1]), "1 of 2 rows hold NaN or infinity"),
        (torch.zeros(3, 2), torch.tensor([0, 1]), r"labels: must be \(3,\), one for each row, got \(2,\)"),
        (torch.zeros(3, 2), torch.zeros(3), "labels: must be integers, got torch.float32"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.long), r"logits: must be \(N, C\)"),
        (torch.zeros(3, 1), torch.zeros(3, dtype=torch.long), "two classes or more"),
    ],
)
@each("score", [accuracy, brier_score, negative_log_likelihood, expected_calibration_error])
def test_bad_input_is_named(score, logits, labels, words):
    with pytest.raises(InputError, match=words):
        score(logits, labels)


def test_bad_bins_are_named():
    logits, labels = torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)
    with pytest.raises(InputError, match="bins: must be an integer of at least 1, got 0"):
        reliability(logits, labels, bins=0)
    with pytest.raises(InputError, match=r"kind: unknown value 'equal-widht'.*did you mean 'equal-width'"):
        reliability(logits, labels, kind="equal-widht")
