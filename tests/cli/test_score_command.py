"""`metastable score`: a score for every row, in the order of the file."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pytest
import torch

import metastable as ms


def table_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A table with a header, whose last row is far from everything."""
    path = tmp_path_factory.mktemp("score") / "new.csv"
    drawn = np.random.default_rng(0).normal([4, 0], 1, (20, 2))
    np.savetxt(path, [*drawn, [90, -70]], delimiter=",", header="a,b", comments="")
    return path


def test_every_row_has_its_log_density_in_the_order_of_the_file(metastable, run_folder, rows, tmp_path):
    out = tmp_path / "deep" / "s.csv"
    result = metastable("score", run_folder, "--data", rows, "--out", out)
    assert result.exit_code == 0, result.output
    found = table_of(out)
    assert [row["index"] for row in found] == [str(i) for i in range(21)]
    x = torch.tensor(np.loadtxt(rows, delimiter=",", skiprows=1))
    expected = ms.load_run(run_folder).log_prob(x).tolist()
    assert [float(row["log_density"]) for row in found] == pytest.approx(expected, abs=1e-4)
    assert found[-1]["outlier"] == "1"
    assert sum(row["outlier"] == "1" for row in found) < 10
    assert "log-density of each" in result.output


def test_the_threshold_is_of_the_run_s_own_rows(metastable, run_folder, rows, tmp_path):
    out = tmp_path / "s.npz"
    result = metastable("score", run_folder, "--data", rows, "--out", out, "--outliers", 0.1)
    assert "of 30 held-out rows of the run" in result.output  # which are enough for a tenth
    with np.load(out) as kept:
        assert sorted(kept.files) == ["index", "log_density", "outlier"]
        flags, scores = kept["outlier"], kept["log_density"]
    run = ms.load_run(run_folder)
    held = ms.data.load_array("toy:two-modes?n=300").split(0.1, 0)[1]
    assert flags.tolist() == (scores < run.score(held.x).threshold(0.1)).tolist()
    result = metastable("score", run_folder, "--data", rows, "--out", out)
    assert "of 300 rows of the run (held out or not)" in result.output


def test_one_row_is_enough_and_has_the_score_it_has_among_others(metastable, run_folder, rows, tmp_path):
    one, out = tmp_path / "one.npy", tmp_path / "s.csv"
    np.save(one, np.loadtxt(rows, delimiter=",", skiprows=1)[3:4])
    assert metastable("score", run_folder, "--data", one, "--out", out).exit_code == 0
    (row,) = table_of(out)
    metastable("score", run_folder, "--data", rows, "--out", out)
    assert row["log_density"] == table_of(out)[3]["log_density"]


def test_rows_that_are_drawn_are_those_that_training_would_draw(metastable, run_folder, tmp_path):
    source, out = "toy:two-modes?n=5&noise=0.1", tmp_path / "s.npz"
    assert metastable("score", run_folder, "--data", source, "--out", out).exit_code == 0
    expected = ms.load_run(run_folder).score(ms.data.load_array(source).x).value
    assert np.load(out)["log_density"] == pytest.approx(expected.numpy(), abs=1e-4)


def test_an_untrusted_log_z_gives_energies_and_says_so(metastable, run_folder, rows, tmp_path):
    folder, out = tmp_path / "run", tmp_path / "s.csv"
    shutil.copytree(run_folder, folder)
    summary = json.loads((folder / "summary.json").read_text())
    summary["log_z_source"] = "independent"
    summary["log_partition"]["warnings"] = ["populations disagree"]
    (folder / "summary.json").write_text(json.dumps(summary))
    result = metastable("score", folder, "--data", rows, "--out", out)
    assert "energy of each (log Z is not to be trusted: populations disagree)" in result.output
    found = table_of(out)
    assert set(found[0]) == {"index", "energy", "outlier"}
    assert float(found[-1]["energy"]) > float(found[0]["energy"])
    assert found[-1]["outlier"] == "1"


def test_rows_that_are_gone_leave_samples_of_the_model(metastable, run_folder, rows, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["data"]["source"] = str(tmp_path / "gone.npy")
    (folder / "config.json").write_text(json.dumps(config))
    result = metastable("score", folder, "--data", rows, "--out", tmp_path / "s.csv")
    assert result.exit_code == 0, result.output
    assert "samples of the model (the rows of training cannot be read)" in result.output
    assert table_of(tmp_path / "s.csv")[-1]["outlier"] == "1"


def test_pairs_are_scored_given_their_contexts(metastable, tmp_path):
    given = torch.linspace(-1, 1, 20)[:, None]
    x = given + 0.1 * torch.randn(20, 1, generator=torch.Generator().manual_seed(0))
    pairs, folder, out = tmp_path / "pairs.npz", tmp_path / "run", tmp_path / "s.npz"
    np.savez(pairs, x=x.numpy(), given=given.numpy())
    energy = {"name": "default", "width": 8}
    ms.fit(energy, ms.data.load_array(pairs), "ranking-nce", 3, out=folder, evaluate=False)
    config = json.loads((folder / "config.json").read_text())
    config["data"]["source"] = str(pairs)  # the name of a file alone says nothing about its folder
    (folder / "config.json").write_text(json.dumps(config))
    result = metastable("score", folder, "--data", pairs, "--out", out)
    assert result.exit_code == 0, result.output
    with np.load(out) as found:
        assert sorted(found.files) == ["index", "log_density", "outlier", "std_error"]
        expected = ms.load_run(folder).log_prob(x, given)
        assert found["log_density"] == pytest.approx(expected.numpy(), abs=1e-4)
    np.save(tmp_path / "x.npy", x)
    line = metastable("score", folder, "--data", tmp_path / "x.npy", "--out", out).stderr
    assert "data: this is a conditional run; give an .npz file with the arrays x and given" in line


def test_columns_in_another_order_are_refused(refused, tmp_path):
    table, turned = tmp_path / "t.csv", tmp_path / "turned.csv"
    x = np.random.default_rng(0).normal(size=(60, 2))
    np.savetxt(table, x, delimiter=",", header="a,b", comments="")
    np.savetxt(turned, x[:, ::-1], delimiter=",", header="b,a", comments="")
    ms.fit("default", ms.data.load_array(table), "cd", 1, out=tmp_path / "r", evaluate=False)
    line = refused("score", tmp_path / "r", "--data", turned, "--out", tmp_path / "s.csv")
    assert "data: columns must come as in training, a, b, got b, a" in line


def test_what_cannot_be_scored_is_refused(refused, run_folder, rows, tmp_path):
    out = tmp_path / "s.csv"
    np.save(tmp_path / "x.npy", np.zeros((5, 3)))
    for words, line in (
        (["--data", tmp_path / "x.npy"], "data: rows must have the run's shape (2,), got (3,)"),
        (["--data", rows, "--outliers", 0], "outliers: must be a share above 0 and below 1, got 0.0"),
        (["--data", tmp_path / "none.csv"], "none.csv: no such file"),
    ):
        assert line in refused("score", run_folder, "--out", out, *words)
    assert "out: must be a file that ends in .csv or .npz" in refused(
        "score", run_folder, "--data", rows, "--out", tmp_path / "s.txt"
    )
    assert not out.exists()
