"""`metastable compare RUN RUN …`: finished runs side by side."""

from __future__ import annotations

import json
import shutil

import pytest

import metastable as ms
from metastable.compare import scores
from metastable.compare_runs import compare_runs, differences
from metastable.core.errors import InputError, UnsupportedError
from metastable.runs.run import Run

from .conftest import DATA


def table_of(folder):
    return json.loads((folder / "compare.json").read_text())


@pytest.fixture(scope="module")
def compared(metastable, run_folder, pcd_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "c"
    result = metastable("compare", run_folder, pcd_folder, "--out", out)
    assert result.exit_code == 0, result.output
    return out, result.output


def test_every_run_has_a_row_with_the_scores_that_compare_gives(compared, run_folder, pcd_folder):
    out, output = compared
    table = table_of(out)
    assert [row["method"] for row in table["rows"]] == ["jarzynski (jarzynski)", "pcd (pcd)"]
    for folder, row in zip((run_folder, pcd_folder), table["rows"], strict=True):
        train = ms.data.load_array(DATA).split(0.1, 0)[0].x
        assert {k: row[k] for k in scores(ms.load_run(folder), train)} == scores(ms.load_run(folder), train)
        assert row["status"] == "finished"
    assert table["truth"]["mode_weights"] == ms.load_run(run_folder).modes["data"]
    assert table["budget"] is None
    assert "notes" not in table  # nothing differs but the method
    assert "finished runs" in output
    assert "log Z exact" in output


def test_the_page_stands_alone_and_the_runs_are_left_as_they_were(compared, run_folder):
    out, output = compared
    page = (out / "report.html").read_text()
    assert f"report: {out / 'report.html'}" in output
    assert "Jarzynski (jarzynski)" in page
    assert "No run folder was found" not in page
    assert 'href="./run-1/report.html"' in page
    assert not (out / "run-1" / "checkpoints").exists()
    assert (run_folder / "checkpoints").is_dir()


def test_overwriting_removes_copies_and_nothing_else(metastable, refused, compared, run_folder, tmp_path):
    out = tmp_path / "c"
    shutil.copytree(compared[0], out)
    (out / "mine.txt").write_text("keep")
    shutil.copytree(run_folder, out / "jarzynski")  # as a folder of another comparison might have
    shutil.rmtree(out / "run-2")
    shutil.copytree(run_folder, out / "run-2")  # a run, not a copy of its page
    again = tmp_path / "again"
    shutil.copytree(run_folder, again)
    words = ["compare", run_folder, again, "--out", out]
    shutil.rmtree(out / "jarzynski" / "checkpoints")
    assert f"holds the run {out / 'run-2'}" in refused(*words, "--overwrite")  # which is not touched
    assert (out / "run-2" / "checkpoints").is_dir()
    assert (out / "compare.json").is_file()
    shutil.rmtree(out / "run-2")
    assert "already holds a comparison; give --overwrite" in refused(*words)
    assert metastable(*words, "--overwrite").exit_code == 0
    assert (out / "jarzynski" / "config.json").is_file()
    assert (out / "mine.txt").read_text() == "keep"


def test_a_folder_that_holds_the_runs_is_refused(refused, run_folder, pcd_folder):
    assert "holds the run" in refused("compare", run_folder, pcd_folder, "--out", run_folder.parent)
    assert (run_folder / "checkpoints").is_dir()


def run_of(tmp_path, name="a", **config) -> Run:
    data = {"source": "x.npy", "sha256": "same"}
    settings = {"data": data, "seed": 0, "held_out": 0.1, "energy": {"name": "mlp"}, "units": "none"}
    more = {"scores": {"kl": 1.0}, "modes": {"data": [0.5, 0.5]}, "config": settings | config}
    return Run(lambda x: x, "cd", [], None, None, folder=tmp_path / name, **more)


def test_other_data_and_contexts_are_refused(tmp_path):
    other = run_of(tmp_path, "b", data={"source": "y.npy", "sha256": "other"})
    with pytest.raises(
        InputError, match=r"runs: must be of the same data; .*x\.npy \(sha256 same\), .*y\.npy"
    ):
        differences([run_of(tmp_path), other])
    with pytest.raises(UnsupportedError, match=r"runs: .* has contexts"):
        differences([run_of(tmp_path), run_of(tmp_path, "b", context_shape=[1])])
    with pytest.raises(InputError, match="runs: give at least two folders of finished runs, got 1"):
        differences([run_of(tmp_path)])


def test_what_cannot_be_compared_is_said(tmp_path):
    first = run_of(tmp_path)
    assert differences([first, run_of(tmp_path, "b")]) == []
    assert differences([first, run_of(tmp_path, "b", seed=1)]) == [
        "likelihoods, KL and MMD are of different held-out rows"
    ]
    (words,) = differences([first, run_of(tmp_path, "b", energy={"name": "mixture"})])
    assert "energies differ" in words
    (words,) = differences([first, run_of(tmp_path, "b", units="whiten")])
    assert "units of training differ" in words
    longer = run_of(tmp_path, "b")
    longer.history = [{"step": 9}]
    assert "different budgets" in differences([first, longer])[0]
    split = run_of(tmp_path, "b")
    split.modes = {"data": [0.2, 0.3, 0.5]}
    assert "mode weights cannot be compared: 2 or 3 modes were found" in differences([first, split])
    killed = run_of(tmp_path, "b")
    killed.scores, killed.status = {}, "unfinished"
    assert differences([first, killed]) == [
        f"{tmp_path / 'b'} is unfinished: it has no scores of a finished run"
    ]


def test_a_run_that_diverged_and_modes_that_differ_leave_cells_empty(run_folder, pcd_folder, tmp_path):
    runs = [ms.load_run(folder) for folder in (run_folder, pcd_folder)]
    train = ms.data.load_array(DATA).split(0.1, 0)[0].x
    runs[1].status = "diverged"
    found = compare_runs(runs, [train, train], tmp_path / "a")
    assert found.rows[1]["diagnosis"] == "diverged"
    assert "kl_exact" not in found.rows[1]
    assert found.rows[0]["mode_weights"] is not None
    runs[1].status = "finished"
    runs[1].modes = {"data": [0.2, 0.3, 0.5], "samples": [0.2, 0.3, 0.5]}
    found = compare_runs(runs, [train, train], tmp_path / "b")
    assert [row["mode_weights"] for row in found.rows] == [None, None]
    assert found.truth == {}
    assert found.notes == ["mode weights cannot be compared: 2 or 3 modes were found"]
    assert table_of(tmp_path / "b")["notes"] == found.notes
    assert found.rows[1]["kl_exact"] is not None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--methods", "cd"], "methods: is for training, and finished runs are given; leave it out"),
        (["--seed", "0"], "seed: is for training"),
        (["--set", "trainer.batch_size=3"], "set: is for training"),
        (["--dry-run"], "dry_run: is for training"),
        (["--energy", "own:make"], "has the built-in 'mlp'; leave --energy out"),
    ],
)
def test_options_of_a_training_are_refused(words, line, refused, run_folder, pcd_folder, tmp_path):
    assert line in refused("compare", run_folder, pcd_folder, "--out", tmp_path / "c", *words)
    assert not (tmp_path / "c").exists()


def test_neither_data_nor_runs_or_the_same_run_twice_is_refused(refused, run_folder, tmp_path):
    assert "data: give --data FILE to train on, or the folders of finished runs" in refused("compare")
    out = tmp_path / "c"
    assert "runs: each may be named once" in refused("compare", run_folder, run_folder, "--out", out)
    assert "give at least two" in refused("compare", run_folder, "--out", out)
    assert "nowhere" in refused("compare", run_folder, tmp_path / "nowhere", "--out", out)
    assert not out.exists()
