"""Sections about negatives and about classifiers: what they say, and what they bear."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import each

from metastable.report import plots, write_report
from metastable.report.read import Run, read_run
from metastable.report.sections.classifier import save_classifier_figures, short
from metastable.report.sections.negatives import negatives, share_below

from .conftest import build_run, summary_of, write_json
from .test_page import read

CURVE = {
    "low": [0.4, 0.6, 0.8],
    "high": [0.6, 0.8, 1.0],
    "confidence": [0.52, 0.71, 0.93],
    "accuracy": [0.5, 0.7, 0.95],
    "events": [10, 30, 60],
    "std_error": [0.15, 0.08, 0.03],
}
JUDGED: dict[str, Any] = {
    "data": "mnist:data/mnist?split=test",
    "rows": 100,
    "classes": 3,
    "accuracy": 0.8712,
    "accuracy_se": 0.0335,
    "negative_log_likelihood": 0.31,
    "brier_score": 0.21,
    "calibration_error": {"value": 0.0123, "by_chance": 0.021, "by_chance_std": 0.004},
    "calibration_error_equal_mass": {"value": 0.014, "by_chance": 0.02, "by_chance_std": 0.004},
    "reliability": CURVE,
    "ood": [
        {
            "name": "fashion-mnist:data/f?split=test",
            "rows": 80,
            "auroc": {
                "log_density": {"value": 0.9654, "std_error": 0.0041},
                "confidence": {"value": 0.9, "std_error": 0.01},
                "gradient": {"value": 0.2, "std_error": 0.01},
            },
        }
    ],
    "class_samples": {
        "steps": 100,
        "start": "the run's own samples",
        "classes": ["cat", "dog", "owl"],
        "agreement": 0.75,
    },
}


def evaluated(folder: Path, event: tuple[int, ...] = (1, 6, 6), **changes: Any) -> Path:
    """A run with an evaluation, of pictures unless `event` says otherwise."""
    build_run(folder)
    write_json(folder / "summary.json", summary_of("jem", np.array([0.2, 0.5, 0.3]), event_shape=list(event)))
    rng = np.random.default_rng(0)
    pictures = rng.uniform(-1, 1, (70, *event))
    np.savez(folder / "figures.npz", data=pictures, samples=pictures)
    write_json(folder / "evaluation.json", {"classifier": JUDGED, **changes})
    scores = {
        f"{kind}_{score}": rng.normal(size=n)
        for kind, n in (("inside", 100), ("outside_0", 80))
        for score in ("log_density", "confidence", "gradient")
    }
    (folder / "evaluation").mkdir()
    np.savez(
        folder / "evaluation" / "figures.npz", class_samples=rng.uniform(-1, 1, (3, 4, *event)), **scores
    )
    return folder


def test_a_classifier_gets_a_section_with_its_numbers(tmp_path):
    page = read(write_report(evaluated(tmp_path / "run")))
    assert "As a classifier" in page.headings
    for words in (
        "0.871 ± 0.034",
        "0.0123",
        "0.021 by chance alone if calibrated",
        "Reliability",
        "against fashion-mnist",
        "0.9654 ± 0.0041",
        "By log p(x)",
        "By −‖∇ log p(x)‖",
        "chains of 100 steps from the run's own samples",
        "The classifier takes 75 % for their class",
        "Rows, from the top: cat, dog, owl.",
    ):
        assert words in page.text, words


def test_classes_of_points_are_drawn_in_colours(tmp_path):
    page = read(write_report(evaluated(tmp_path / "run", event=(2,))))
    assert "Samples of each class" in page.text
    assert "class 2" in page.text


def test_pictures_can_be_had_as_files(tmp_path):
    folder = evaluated(tmp_path / "run")
    written = save_classifier_figures(read_run(folder), folder / "evaluation")
    assert [p.name for p in written] == ["reliability.png", "scores.png", "class_samples.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in written)


@pytest.mark.parametrize(
    "classifier",
    [
        {},
        {"accuracy": 0.5},
        {"reliability": {"low": [0], "high": []}, "ood": [{"name": "x"}], "class_samples": None},
        {"ood": "none", "calibration_error": None},
        None,
    ],
)
def test_half_an_evaluation_makes_half_a_page(tmp_path, classifier):
    folder = evaluated(tmp_path / "run", classifier=classifier)
    page = read(write_report(folder))
    assert ("As a classifier" in page.headings) is bool(classifier)


def test_an_evaluation_supplies_the_log_z_that_training_left_out(tmp_path):
    folder = evaluated(tmp_path / "run", log_partition={"value": 12.5, "std_error": 0.3, "warnings": []})
    finding = {"name": "log-z-not-estimated", "severity": "note", "text": "Not estimated.", "advice": "Ask."}
    summary = summary_of("jem", np.array([0.2, 0.5, 0.3]), log_partition=None, diagnosis=[finding])
    write_json(folder / "summary.json", summary)
    assert "12.50 ± 0.30" in read(write_report(folder)).text
    (folder / "evaluation.json").unlink()
    page = read(write_report(folder)).text
    assert "not estimated" in page
    assert "Log Z not estimated" in page
    assert page.count("Ask.") == 2  # beside the missing number, and in the diagnosis


def test_an_evaluation_from_before_is_said_to_be_one(tmp_path):
    now = read(write_report(evaluated(tmp_path / "now", step=600)))
    assert "evaluate again" not in now.text
    folder = evaluated(tmp_path / "run", step=400, log_partition={"value": 12.5, "std_error": 0.3})
    write_json(folder / "summary.json", summary_of("jem", np.array([0.2, 0.5, 0.3]), log_partition=None))
    page = read(write_report(folder))
    assert "Judged at step 400; training has gone on since: evaluate again." in page.text
    assert "12.5" not in page.text


def test_names_of_data_are_short():
    assert short("mnist:a/b?split=test, held-out rows") == "mnist"
    assert short("toy:digits?n=5") == "toy:digits"


# ---------------------------------------------------------------------------------------------- negatives


def with_energies(shift: float = 0.0, longer: float | None = None, **method: Any) -> Run:
    rng = np.random.default_rng(0)
    data = rng.normal(size=400)
    arrays = {"energies_data": data, "energies_negatives": rng.normal(size=256) + shift}
    if longer is not None:
        arrays |= {"energies_larger_steps": rng.normal(size=256) + longer, "larger_steps": np.array([20.0])}
    return Run(Path("run"), arrays=arrays, config={"method": method})


@each(
    "shift, longer, said, unsaid",
    [
        (0.0, 0.0, "20 steps four times as long", "Here"),
        (9.0, None, "negatives lie higher (median ", "four times"),
        (-9.0, None, "negatives lie lower (median −", "four times"),
        (9.0, 0.0, "Here they find lower energies", "end at higher"),
        (0.0, 9.0, "Here they end at higher energies", "find lower"),
    ],
)
def test_words_follow_the_histograms(shift, longer, said, unsaid):
    text = str(negatives(with_energies(shift, longer)))
    assert said in text
    assert unsaid not in text


def test_flatter_chains_are_explained_where_they_are_meant():
    assert "flatter" in str(negatives(with_energies(beta=0.5)))
    assert "flatter" in str(negatives(with_energies(source={"beta": [0.1, 0.2]})))
    assert "flatter" not in str(negatives(with_energies(source={"beta": 5e-5})))
    assert "flatter" not in str(negatives(with_energies()))


def test_chains_that_ran_away_are_counted():
    run = with_energies(0.0, 0.0)
    run.arrays["energies_larger_steps"][:10] = np.nan
    run.arrays["energies_larger_steps"][10:40] = 1e9
    text = str(negatives(run))
    assert "10 values of negatives at four times the step not finite." in text
    assert "30 values of negatives at four times the step outside the axis." in text


def test_longer_steps_are_not_taken_for_negatives_that_all_ran_away():
    run = with_energies(0.0, -9.0)
    run.arrays["energies_negatives"][:] = np.nan
    text = str(negatives(run))
    assert "256 negatives as training draws them, none of finite energy: all chains ran away." in text
    assert "negatives at four times the step" in text  # still in the picture
    assert "lie lower" not in text
    del run.arrays["energies_larger_steps"]
    assert "all chains ran away" in str(negatives(run))


def test_without_energies_there_is_no_section(run_folder):
    run = read_run(run_folder)
    assert negatives(run) == ""
    nothing = np.full(5, np.nan)
    text = str(negatives(replace(run, arrays={"energies_data": nothing, "energies_negatives": nothing})))
    assert "is finite." in text
    assert "<svg" not in text


def test_the_update_of_the_histograms_is_named_where_training_went_on():
    run = replace(with_energies(), metrics={"step": np.array([10.0, 400.0])})
    assert "Seen at" not in str(negatives(run))

    def words(step: int, status: str) -> str:
        arrays = run.arrays | {"negatives_step": np.array([float(step)])}
        return str(negatives(replace(run, arrays=arrays, summary={"status": status})))

    seen = "Seen at update 350, the last good checkpoint; training diverged by update 400."
    assert seen in words(350, "diverged")
    assert "Seen at update 350, the last good checkpoint. 256 negatives" in words(350, "unfinished")
    assert "a smaller checkpoint_every" in words(0, "diverged")
    assert "Seen at" not in words(400, "finished")


@pytest.mark.parametrize("status", ["diverged", "unfinished", "finished"])
def test_a_run_cut_short_says_why_it_has_no_histograms(tmp_path, status):
    metrics = {"step": np.arange(3.0), "displacement": np.ones(3)}
    run = Run(tmp_path, metrics=metrics, summary={"status": status})
    text = str(negatives(run))
    assert ("holds none" in text) is (status != "finished")
    (tmp_path / "checkpoints" / "step-00000000").mkdir(parents=True)
    assert ("metastable evaluate draws them" in str(negatives(run))) is (status != "finished")
    assert negatives(replace(run, config={"context_shape": [1]})) == ""  # of contexts there never are any
    assert negatives(replace(run, metrics={"step": np.arange(3.0)})) == ""  # nor without chains
    said = replace(run, summary={"status": "diverged", "no_negatives": "Because."})
    assert "to compare. Because." in str(negatives(said))


def test_huge_energies_are_drawn():
    run = with_energies(0.0, 0.0)
    for name in ("energies_data", "energies_negatives", "energies_larger_steps"):
        run.arrays[name][:5] = [3e38, -3e38, np.inf, -np.inf, np.nan]
    assert "<svg" in str(negatives(run))


def test_pairs_are_counted_with_ties_half():
    a, b = (
        plots.Cloud("a", np.array([0.0, 1.0, np.nan]), "#000000"),
        plots.Cloud("b", np.array([1.0, 2.0]), "#000000"),
    )
    assert share_below(a, b) == pytest.approx((2 + 1.5 + 0) / 6)


def test_constant_values_and_one_value_are_drawn():
    for values in (np.zeros(50), np.array([3.0])):
        clouds = [plots.Cloud("a", values, "#000000", filled=True), plots.Cloud("b", values + 1, "#000000")]
        assert plots.overlaid("x", clouds, "x").svg.startswith("<svg")
