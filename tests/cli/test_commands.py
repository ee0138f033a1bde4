"""Help, version, and what each command does with a finished run."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from metastable._version import __version__
from metastable.cli.guard import explain

COMMANDS = ("train", "sample", "evaluate", "score", "compare", "reproduce", "bench", "report")


def test_version(metastable):
    assert metastable("--version").output == f"{__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_listed_and_helps(command, metastable):
    assert f"  {command} " in metastable("--help").output
    result = metastable(command, "--help")
    assert result.exit_code == 0
    assert "--debug" in result.output


def test_help_and_the_list_of_experiments_import_no_torch():
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from metastable.cli.main import app\n"
        f"asks = [['--help'], ['reproduce', '--list'], *([c, '--help'] for c in {COMMANDS})]\n"
        "for words in asks:\n"
        "    assert CliRunner().invoke(app, words).exit_code == 0, words\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_unknown_command_is_refused_with_the_nearest(metastable):
    result = metastable("trian")
    assert result.exit_code == 2
    assert "train" in result.stderr


# ---- sample


def test_samples_have_equal_weights_unless_asked(metastable, run_folder, tmp_path):
    out = tmp_path / "deep" / "x.npy"
    result = metastable("sample", run_folder, "--n", 17, "--steps", 3, "--out", out)
    assert result.exit_code == 0, result.output
    assert "weighted" in result.output
    assert np.load(out).shape == (17, 2)
    assert not (out.parent / "x.log_weight.npy").exists()
    metastable("sample", run_folder, "--n", 17, "--steps", 3, "--out", out, "--weighted")
    weight = np.load(out.parent / "x.log_weight.npy")
    assert weight.shape == (17,)
    assert np.ptp(weight) == 0  # moves that keep the model keep weights equal


def test_samples_of_chains_without_weights_come_from_the_finished_energy(metastable, pcd_folder, tmp_path):
    result = metastable("sample", pcd_folder, "--n", 9, "--steps", 2, "--out", tmp_path / "x.npy")
    assert result.exit_code == 0, result.output
    assert "drawn from the finished energy" in result.output


def test_samples_follow_the_seed(metastable, run_folder, tmp_path):
    drawn = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        path = tmp_path / f"{name}.npy"
        metastable("sample", run_folder, "--n", 8, "--steps", 2, "--seed", seed, "--out", path)
        drawn.append(np.load(path))
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


def test_sample_refuses_what_it_cannot_write(refused, run_folder, tmp_path):
    assert "out: must be a file that ends in .npy" in refused(
        "sample", run_folder, "--out", tmp_path / "x.csv"
    )
    assert "n: must be an integer of at least 1, got 0" in refused("sample", run_folder, "--n", 0)


@pytest.mark.parametrize("command", ["sample", "evaluate", "report"])
def test_a_folder_that_is_not_a_run_is_refused(command, refused, tmp_path):
    assert str(tmp_path) in refused(command, tmp_path)
    assert "nowhere" in refused(command, tmp_path / "nowhere")


# ---- evaluate


def test_evaluate_prints_and_writes_the_same_numbers(metastable, run_folder, tmp_path):
    out = tmp_path / "e.json"
    result = metastable("evaluate", run_folder, "--out", out)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["rows"] == 30  # a tenth of 300
    assert f"{found['log_likelihood']:.3f} ± {found['log_likelihood_se']:.3f}" in result.output
    assert found["log_likelihood_se"] > found["log_partition"]["std_error"]
    assert sum(found["mode_weights"]["model"]) == pytest.approx(1)
    assert 0 <= found["outlier_share"] <= 1
    summary = json.loads((run_folder / "summary.json").read_text())
    assert found["log_likelihood"] == pytest.approx(summary["scores"]["log_likelihood"], abs=1e-5)


def test_evaluate_on_data_far_away_sees_outliers(metastable, run_folder, tmp_path):
    data, out = tmp_path / "far.npy", tmp_path / "e.json"
    np.save(data, np.random.default_rng(0).normal(40, 1, (50, 2)))
    result = metastable("evaluate", run_folder, "--data", data, "--out", out)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["outlier_share"] == 1
    assert found["energy_distance"] > 10


def test_evaluate_without_weighted_walkers(metastable, pcd_folder, tmp_path):
    result = metastable("evaluate", pcd_folder, "--out", tmp_path / "e.json")
    assert result.exit_code == 0, result.output
    assert "drawn from the finished energy" in json.loads((tmp_path / "e.json").read_text())["samples"]


def test_evaluate_refuses_rows_of_another_shape(refused, run_folder, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((5, 3)))
    line = refused("evaluate", run_folder, "--data", tmp_path / "x.npy")
    assert "(2,)" in line
    assert "(3,)" in line


# ---- report, reproduce, bench


def test_report_prints_the_page_it_wrote(metastable, run_folder, tmp_path):
    page = tmp_path / "page.html"
    result = metastable("report", run_folder, "--out", page)
    assert result.output.strip() == str(page)
    assert page.read_text().startswith("<!")


def test_experiments_are_listed_with_their_own_titles(metastable):
    from metastable.experiments import EXPERIMENTS, TITLES

    listed = metastable("reproduce", "--list").output
    assert "jarzynski-gmm" in listed
    assert {name: experiment.title for name, experiment in EXPERIMENTS.items()} == TITLES
    assert {e.name for e in EXPERIMENTS.values()} == set(TITLES)


def fake_experiment(monkeypatch, value):
    from metastable import experiments
    from metastable.experiments.base import Experiment, Row

    rows = [Row("error/ours", value, "<=", 0.02, 0.01), Row("seen", 3.0)]
    made = Experiment("fake", "A title", "A paper", {"smoke": {}}, lambda bench: rows)
    monkeypatch.setattr(experiments, "EXPERIMENTS", {"fake": made})


@pytest.mark.parametrize(("value", "status", "verdict"), [(0.01, 0, "holds"), (0.5, 1, "fails")])
def test_reproduce_exits_1_when_a_row_is_not_ok(value, status, verdict, metastable, monkeypatch, tmp_path):
    fake_experiment(monkeypatch, value)
    result = metastable("reproduce", "fake", "--out", tmp_path / "r", "--device", "cpu")
    assert result.exit_code == status, result.output
    assert verdict in result.output
    assert json.loads((tmp_path / "r" / "result.json").read_text())["rows"][0]["ok"] is (status == 0)


def test_reproduce_names_its_folder(metastable, monkeypatch, tmp_path):
    fake_experiment(monkeypatch, 0.0)
    monkeypatch.chdir(tmp_path)
    metastable("reproduce", "fake", "--seed", 3, "--device", "cpu")
    assert (tmp_path / "runs" / "fake-smoke-seed3" / "result.json").is_file()


def test_reproduce_refuses_unknown_names_and_scales(refused, metastable, tmp_path):
    assert "did you mean 'jarzynski-gmm'" in refused("reproduce", "jarzinski-gmm")
    assert "scale" in refused("reproduce", "jarzynski-gmm", "--scale", "huge", "--out", tmp_path / "r")
    assert metastable("reproduce").exit_code == 2
    assert metastable("reproduce", "jarzynski-gmm", "--scale", "huge", "--dry-run").exit_code == 2
    assert not (tmp_path / "r").exists()


def test_a_dry_reproduction_prints_the_settings_and_writes_nothing(metastable, tmp_path):
    result = metastable("reproduce", "jarzynski-gmm", "--dry-run", "--out", tmp_path / "r")
    assert result.exit_code == 0, result.output
    assert '"walkers": ' in result.output
    assert not (tmp_path / "r").exists()


def test_bench_runs_the_suites_that_are_asked_for(metastable, monkeypatch):
    import types

    from metastable.experiments.base import Row

    made = types.ModuleType("metastable.benchmarks")
    made.SUITES = {"kernels": None, "walkers": None}
    made.run_suite = lambda name: [Row(f"{name} ratio", 2.5, "<=", 3.0 if name == "kernels" else 2.0)]
    made.write_rows = lambda folder, suites, partly: folder / "-".join(suites)
    monkeypatch.setitem(sys.modules, "metastable.benchmarks", made)
    assert metastable("bench", "--list").output.split() == ["kernels", "walkers"]
    both = metastable("bench")
    assert both.exit_code == 1  # one claim does not hold, and the other suite is still shown
    assert "kernels ratio" in both.output
    assert "walkers ratio" in both.output
    one = metastable("bench", "--suite", "kernels")
    assert one.exit_code == 0
    assert "2.5" in one.output
    assert "walkers" not in one.output
    assert "written" not in one.output
    written = metastable("bench", "--suite", "kernels", "--out", "there")
    assert "written to there/kernels" in written.output
    result = metastable("bench", "--suite", "kernel")
    assert result.exit_code == 2
    assert "did you mean 'kernels'" in result.stderr


def test_fewer_films_than_none_are_refused_before_anything_is_rolled_out(refused, run_folder):
    said = refused("rollout", run_folder, "--films", -1, "--out", "films")
    assert "films: must be an integer of at least 0, got -1" in said


def test_a_file_that_is_not_there_needs_no_space(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "none.npy").read_bytes()
    assert explain(caught.value) == (f"{tmp_path / 'none.npy'}: no such file or folder", 2)
