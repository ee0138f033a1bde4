"""`metastable compare` and the logic behind it."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import drawn

from metastable.compare import (
    STEPS,
    Comparison,
    compact,
    main_finding,
    methods_for,
    parse_budget,
    scores,
    trainer_for,
)
from metastable.core.errors import ConfigError, InputError
from metastable.energies import two_modes
from metastable.energies.build import ConvConfig, MLPConfig
from metastable.evaluation.diagnosis import Finding
from metastable.runs.run import Run
from metastable.training.config import Schedule, TrainerConfig

from .conftest import DATA

SMALL = [
    *(
        "--no-progress",
        "--set",
        "energy.hidden=[8]",
        "--set",
        "jarzynski.walkers=64",
        "--set",
        "pcd.walkers=64",
    ),
    *("--set", "trainer.batch_size=64", "--set", "trainer.log_every=1"),
]


def table_of(folder):
    return json.loads((folder / "compare.json").read_text())


@pytest.fixture(scope="module")
def compared(metastable, tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "c"
    words = ["--methods", "cd,jarzynski", "--steps", 4, "--out", out]
    with drawn():
        result = metastable("compare", "--data", DATA, *words, *SMALL)
    assert result.exit_code == 0, result.output
    return out, result.output


def test_one_table_with_a_row_for_each_method(compared):
    out, output = compared
    table = table_of(out)
    assert [row["method"] for row in table["rows"]] == ["cd", "jarzynski"]
    assert table["budget"] == "4 steps"
    for column in ("mode weights", "|error|", "KL exact", "log Z exact", "diagnosis"):
        assert output.count(column) >= 1
    assert output.count(f"{DATA}, 4 steps each") == 1
    assert f"report: {out / 'report.html'}" in output
    page = (out / "report.html").read_text()
    assert '<td class="truth">data</td>' in page  # whose shares they are; nobody knows the truth
    assert "close to the data" in page


def test_rows_hold_what_the_runs_say(compared):
    out, _ = compared
    table = table_of(out)
    assert sum(table["truth"]["mode_weights"]) == pytest.approx(1)
    for row in table["rows"]:
        summary = json.loads((out / row["run"] / "summary.json").read_text())
        assert row["log_z"] == summary["log_partition"]["value"]
        assert row["kl_exact"] == summary["scores"]["kl_exact"]
        assert row["steps"] == 4
        truth = table["truth"]["mode_weights"]
        worst = max(abs(w - t) for w, t in zip(row["mode_weights"], truth, strict=True))
        assert row["mode_weight_error"] == pytest.approx(worst)


def test_every_method_starts_from_the_same_energy_and_batches(compared):
    out, _ = compared
    first = [json.loads((out / m / "metrics.jsonl").read_text().splitlines()[0]) for m in ("cd", "jarzynski")]
    assert first[0]["energy_data"] == first[1]["energy_data"]


def test_overwriting_clears_what_a_comparison_wrote_and_nothing_else(metastable, refused, tmp_path):
    out = tmp_path / "c"
    words = ["compare", "--data", DATA, "--methods", "jarzynski", "--steps", 1, "--out", out, *SMALL]
    assert metastable(*words).exit_code == 0
    (out / "mine.txt").write_text("keep")
    assert "--overwrite" in refused(*words)
    assert metastable(*words, "--overwrite").exit_code == 0
    assert (out / "mine.txt").read_text() == "keep"
    (out / "compare.json").unlink()
    assert "not a comparison" in refused(*words, "--overwrite")


def test_a_method_that_diverges_gets_a_row_and_the_others_go_on(metastable, tmp_path):
    out = tmp_path / "c"
    words = ["--methods", "cd,jarzynski", "--steps", 4, "--out", out, "--set", "cd.step_size=1e12"]
    result = metastable("compare", "--data", DATA, *words, *SMALL)
    assert result.exit_code == 0, result.output
    rows = {row["method"]: row for row in table_of(out)["rows"]}
    assert rows["cd"]["status"] == "diverged"
    assert rows["jarzynski"]["status"] == "finished"


def test_a_time_budget(metastable, tmp_path):
    words = ["--methods", "jarzynski", "--budget", "0.05s", "--out", tmp_path / "c"]
    result = metastable("compare", "--data", DATA, *words, *SMALL)
    assert result.exit_code == 0, result.output
    table = table_of(tmp_path / "c")
    assert table["budget"] == "0.05 s"
    assert table["rows"][0]["seconds"] >= 0.05


def test_dry_run_writes_nothing(metastable, tmp_path):
    result = metastable("compare", "--data", DATA, "--out", tmp_path / "c", "--dry-run")
    assert result.exit_code == 0, result.output
    assert result.output.count("nothing was written") == 3
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--methods", "cd,pdc"], "methods: unknown value 'pdc' (did you mean 'pcd'?)"),
        (["--methods", "cd,cd"], "each may be named once"),
        (["--methods", ","], "give at least one"),
        (["--methods", "cd,jem"], "labels: 'jem' needs the class of each row"),
        (["--budget", "60"], "budget: must be a time above 0 such as 60s"),
        (["--budget", "-3s"], "budget: must be a time above 0"),
        (["--steps", "0"], "trainer.steps: must be an integer of at least 1, got 0"),
        (["--set", "jarzynski.walker=3"], "method.walker: unknown setting (did you mean 'walkers'?)"),
        (["--set", "method.walkers=3"], "name the method"),
        (["--data", "toy:pinwheel-given"], "has contexts, and a comparison is of densities without them"),
        (["--data", "toy:pinwheel-given", "--dry-run"], "has contexts"),
    ],
)
def test_bad_input_is_refused(words, line, refused, tmp_path):
    assert line in refused("compare", "--data", DATA, "--out", tmp_path / "c", *words)
    assert not (tmp_path / "c").exists()


# ---- the logic


def test_budgets():
    assert [parse_budget(t) for t in ("60s", "2m", "2min", "1.5h", " 3 s")] == [60, 120, 120, 5400, 3]
    for text in ("", "s", "60", "1d", "nan s", "infs", "0s"):
        with pytest.raises(InputError):
            parse_budget(text)


def test_limits_of_the_trainer():
    free, timed = trainer_for(TrainerConfig(), None, None), trainer_for(TrainerConfig(), None, 60.0)
    assert (free.steps, free.max_seconds, free.schedule) == (STEPS, None, Schedule("cosine"))
    assert timed.max_seconds == 60
    assert timed.steps > 10**6
    assert timed.schedule is None
    chosen = trainer_for(TrainerConfig(schedule=Schedule("linear")), 7, None)
    assert (chosen.steps, chosen.schedule) == (7, Schedule("linear"))
    with pytest.raises(ConfigError):
        trainer_for(TrainerConfig(), 0, None)


def test_methods_share_walkers_unless_told_otherwise():
    jarzynski, pcd, cd = methods_for(
        ["jarzynski", "pcd", "cd"], {"pcd": {"walkers": 5}, "cd": {"step_size": 0.5}}
    )
    assert (jarzynski.walkers, pcd.walkers, cd.walkers) == (8192, 5, None)
    assert (jarzynski.step_size, cd.step_size) == (None, 0.5)


def test_compact_energies():
    assert compact(MLPConfig()).hidden == (64, 64)
    assert compact(ConvConfig()) == ConvConfig()


def run_of(energy, weights, **more) -> Run:
    modes = {"centers": [[-4.0, 0.0], [4.0, 0.0]], "data": [0.3, 0.7], "samples": weights}
    return Run(energy, "cd", [], None, None, modes=modes, config={"event_shape": [2]}, **more)


def test_mode_weights_are_those_of_the_energy_not_of_the_samples():
    energy = two_modes(8.0, (0.2, 0.8), 2)
    data = energy.sample(500, torch.Generator().manual_seed(0))
    row = scores(run_of(energy, [0.3, 0.7]), data)
    assert row["mode_weights"] == pytest.approx([0.2, 0.8], abs=1e-3)
    assert row["mode_weight_error"] == pytest.approx(0.1, abs=1e-3)
    assert row["log_z_exact"] == pytest.approx(float(energy.log_partition()), abs=1e-3)
    assert row["log_z"] is None


def test_beyond_two_dimensions_mode_weights_come_from_samples():
    row = scores(run_of(two_modes(8.0, (0.2, 0.8), 3), [0.25, 0.75]), torch.zeros(5, 3))
    assert row["mode_weights"] == [0.25, 0.75]
    assert row["log_z_exact"] is None


def test_the_gravest_finding_is_named():
    found = [
        Finding("a-note", "note", ""),
        Finding("wrong-mode-weights", "problem", ""),
        Finding("w", "warning", ""),
    ]
    assert main_finding(run_of(None, [0.3, 0.7], diagnosis=found)) == "wrong mode weights"
    assert main_finding(run_of(None, [0.3, 0.7])) is None


def test_columns_that_nothing_fills_are_left_out(tmp_path):
    found = Comparison(tmp_path, "x", "1 steps", ["cd"], [{"method": "cd", "kl": None, "log_z": 1.0}])
    assert found.columns == ["log_z"]


def test_a_budget_of_evaluations_is_spent_by_every_method(metastable, tmp_path):
    words = ["--methods", "cd,score-matching,nce", "--evaluations", 3000, "--out", tmp_path / "c"]
    result = metastable("compare", "--data", DATA, *words, *SMALL)
    assert result.exit_code == 0, result.output
    table = table_of(tmp_path / "c")
    assert table["budget"] == "3,000 energy evaluations"
    assert "evaluations" in result.output
    assert "MMD" in result.output
    for row in table["rows"]:
        one_update = row["evaluations"] / row["steps"]
        assert 3000 <= row["evaluations"] < 3000 + one_update
        assert row["mmd"] >= 0


def test_a_dry_run_solves_no_second_derivatives_of_an_ode(metastable, tmp_path, monkeypatch):
    monkeypatch.setattr("metastable.methods.score.kink_share", lambda *_: pytest.fail("computed"))
    asked = ["--data", DATA, "--method", "score-matching", "--dry-run", "--out", tmp_path / "r"]
    few = ["--set", "energy.steps=2", "--set", "energy.scored=2"]
    result = metastable("train", *asked, "--energy", "diffusion", *few)
    assert result.exit_code == 0, result.output
    assert "the start was not tried" in result.output
