"""The experiment `jem-ood` on small made-up images in the publishers' files."""

from __future__ import annotations

import numpy as np
import pytest

from metastable.core.errors import InputError
from metastable.data.idx import write_idx
from metastable.evaluation.classifier import ClassifierSummary
from metastable.experiments import EXPERIMENTS
from metastable.experiments.base import Bench, Row
from metastable.experiments.jem_ood import EXPERIMENT, body, gains, method, numbers, row
from metastable.methods import Robust

SMALL = {
    "rows": None,
    "tested": None,
    "steps": 12,
    "buffer": 40,
    "chain_steps": 1,
    "sample_steps": 1,
    "batch_size": 16,
}


def write_set(folder, seed, kinds, n=60):
    """`n` images of ten kinds: a bright bar at a place that the label says, or bright noise."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        labels = (np.arange(n) % 10).astype(np.uint8)
        images = rng.integers(0, 40, (n, 28, 28)) if kinds else rng.integers(0, 256, (n, 28, 28))
        for image, label in zip(images, labels, strict=True):
            if kinds:
                image[2 * label + 2 : 2 * label + 6] = 220
        write_idx(folder / f"{part}-images-idx3-ubyte", images.astype(np.uint8))
        write_idx(folder / f"{part}-labels-idx1-ubyte", labels)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    write_set(tmp_path / "data" / "mnist", 0, True)
    write_set(tmp_path / "data" / "fashion-mnist", 1, False)
    monkeypatch.setenv("METASTABLE_DATA", str(tmp_path / "data"))
    folder = tmp_path / "out"
    folder.mkdir()
    return Bench({**EXPERIMENT.scales["cpu"], **SMALL}, "cpu", 0, "cpu", folder)


def test_it_scores_a_joint_model_beside_a_classifier(bench):
    rows = {r.metric: r for r in body(bench)}
    assert {"accuracy/jem", "calibration_error/jem", "auroc/log_density/jem"} <= rows.keys()
    assert {"accuracy/classifier", "auroc/confidence/classifier"} <= rows.keys()
    assert [m for m, r in rows.items() if r.relation] == [
        "accuracy/jem",
        "calibration_error/jem",
        "auroc/log_density/jem",
    ]
    gain = rows["auroc/log_density/jem"].value - rows["auroc/log_density/classifier"].value
    assert rows["auroc_gain/log_density"].value == pytest.approx(gain)
    made = {p.name for p in bench.folder.iterdir()}
    assert {"scores-jem.png", "scores-classifier.png", "class-samples.png"} <= made


def test_beta_is_given_as_beta_times_o(bench):
    source = method(bench, 0.5).source
    assert isinstance(source, Robust)
    assert method(bench, 0.5).beta_o(0, bench.output_scale) == pytest.approx(bench.beta_o)
    assert method(bench, 0.5).generative == pytest.approx(0.5 / bench.output_scale)


def test_targets_are_those_of_the_joint_model(bench):
    assert not row(bench, "jem", "accuracy", 0.97).ok
    assert row(bench, "classifier", "accuracy", 0.1).ok
    assert not row(bench, "jem", "calibration_error", 0.04).ok


def test_the_gain_is_the_joint_models_less_the_classifiers():
    scores = {"a": (0.9, 0.7), "b": (0.4, 0.5)}
    rows = [Row("accuracy/jem", 0.9)]
    rows += [
        Row(f"auroc/{s}/{m}", v) for s, pair in scores.items() for m, v in zip(("jem", "classifier"), pair)
    ]
    assert {r.metric: round(r.value, 6) for r in gains(rows)} == {"auroc_gain/a": 0.2, "auroc_gain/b": -0.1}


def test_without_the_images_it_says_where_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv("METASTABLE_DATA", str(tmp_path))
    smoke = Bench(EXPERIMENTS["jem-ood"].scales["smoke"], "smoke", 0, "cpu", tmp_path)
    with pytest.raises(InputError, match="mnist"):
        body(smoke)


def test_numbers_are_read_off_a_summary():
    found = ClassifierSummary(
        {
            "accuracy": 0.9,
            "calibration_error": {"value": 0.1},
            "ood": [{"auroc": {"log_density": {"value": 0.7}}}],
        },
        {},
    )
    assert numbers(found) == {"accuracy": 0.9, "calibration_error": 0.1, "auroc/log_density": 0.7}
