"""Runs on toy sets that were trained on another machine, where normal draws have other last digits."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from conftest import each

from metastable.api import fit
from metastable.cli.runs import open_run, training_set
from metastable.cli.settings import data_of
from metastable.compare_runs import differences
from metastable.core.errors import InputError
from metastable.data import load_array
from metastable.runs.folder import read_config, same_rows
from metastable.runs.rows import data_settings, row_settings
from metastable.runs.run import Run

LAST_DIGIT = 1e-6
ELSEWHERE = "0" * 16


def carried(run_folder, folder, data=(), mean=LAST_DIGIT):
    """A copy of a run as another machine would have written it: another digest, and means that are near."""
    shutil.copytree(run_folder, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["data"] |= {"sha256": ELSEWHERE, **dict(data)}
    for column in config.get("columns", []):
        column["mean"] += mean
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "seals.json").unlink()
    return folder


@pytest.mark.parametrize("command", ["evaluate", "sample", "report"])
def test_every_command_knows_the_rows_again(command, metastable, run_folder, tmp_path):
    folder = carried(run_folder, tmp_path / "run")
    more = ("--n", 5, "--steps", 2, "--out", tmp_path / "x.npy") if command == "sample" else ()
    result = metastable(command, folder, *more)
    assert result.exit_code == 0, result.output
    assert "has changed" not in result.output


CHANGED = {
    "other means": {"mean": 0.01},
    "another seed": {"data": {"source": "toy:two-modes?n=300&seed=1"}},
    "another size": {"data": {"source": "toy:two-modes?n=299"}},
    "another set": {"data": {"source": "toy:eight-gaussians?n=300"}},
    "noise": {"data": {"source": "toy:two-modes?n=300&noise=0.1"}},
}


@pytest.mark.parametrize("change", CHANGED)
def test_another_toy_set_is_refused(change, refused, run_folder, tmp_path):
    folder = carried(run_folder, tmp_path / "run", **CHANGED[change])
    source = read_config(folder)["data"]["source"]
    now = load_array(source).digest
    line = refused("evaluate", folder)
    assert f"data: {source} has changed (sha256 {ELSEWHERE} in the settings, now {now}); give --data" in line
    with pytest.raises(InputError, match="has changed"):
        training_set(open_run(folder))


def test_rows_of_a_file_that_changed_are_refused_however_near(metastable, refused, tmp_path):
    x = np.random.default_rng(0).normal(size=(100, 2))
    np.save(tmp_path / "x.npy", x)
    words = ("--steps", 2, "--no-progress", "--method", "nce", "--energy", "mlp", "--out", tmp_path / "run")
    assert metastable("train", "--data", tmp_path / "x.npy", *words).exit_code == 0
    np.save(tmp_path / "x.npy", x + LAST_DIGIT)
    assert "x.npy has changed (sha256 " in refused("evaluate", tmp_path / "run")


def test_rows_from_elsewhere_are_taken_if_they_are_the_runs(run_folder, tmp_path):
    run = open_run(carried(run_folder, tmp_path / "run"))
    own = training_set(run).x
    for source in ("toy:two-modes?seed=0&n=300", "toy:two-modes?n=300&seed=1"):
        assert training_set(run, source).x.equal(own)
    with pytest.raises(InputError, match="data: the settings of this run do not say which rows"):
        training_set(Run(run.energy, "own", [], None, None, config={"event_shape": [2]}), "toy:two-modes")


def test_runs_of_two_machines_can_be_compared(run_folder, pcd_folder, tmp_path):
    here = open_run(pcd_folder)
    differences([here, open_run(carried(run_folder, tmp_path / "run"))])
    with pytest.raises(InputError, match="runs: must be of the same data"):
        differences([here, open_run(carried(run_folder, tmp_path / "other", mean=0.01))])


@each(
    "before, now, same",
    [
        ("toy:digits?n=50", "toy:digits?n=50", True),
        ("toy:digits", "toy:digits?seed=0", True),
        ("toy:digits?n=50", "toy:digits?n=50&seed=1", False),
        ("toy:digits?n=50", "toy:digits?n=51", False),
        ("toy:two-modes?noise=0.1", "toy:two-modes?noise=0.1", True),
        ("toy:digits?noise=0.1", "toy:digits?n=1797&noise=0.1", False),
        ("toy:digits?noise=0.1", "toy:digits", False),
    ],
)
def test_a_toy_set_is_known_by_set_seed_size_and_noise(before, now, same):
    """Pictures have no columns to tell them by."""
    assert (
        same_rows(settings_of(before), data_settings(load_array(now)), lambda: row_settings_of(now)) is same
    )


def row_settings_of(source):
    return row_settings(load_array(source), 0.1, 0)


def settings_of(source):
    data = data_settings(load_array(source)) | {"sha256": ELSEWHERE}
    return row_settings_of(source) | {"data": data}


@each(
    "key, value",
    [("class_rows", [30, 15]), ("context_shape", [1]), ("columns", [7]), ("columns", 7), ("columns", [{}])],
)
def test_labels_and_contexts_of_ones_own_and_damaged_columns_are_told(key, value):
    source = "toy:two-modes?n=50"
    settings = settings_of(source) | {key: value}
    data = data_settings(load_array(source))
    assert not same_rows(settings, data, lambda: row_settings_of(source))


@pytest.mark.parametrize("kept", ["toy:two-modes", "two-modes"])
def test_a_run_made_in_python_on_a_toy_set_is_judged(kept, metastable, tmp_path):
    folder = tmp_path / "run"
    fit("mlp", "toy:two-modes", "cd", 3, out=folder, evaluate=False, progress=False)
    config = json.loads((folder / "config.json").read_text())
    assert config["data"]["source"] == "toy:two-modes"
    config["data"]["source"] = kept  # older folders leave `toy:` out
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "seals.json").unlink()
    rows, odd = data_of(read_config(folder))
    assert (rows.name, odd) == ("toy:two-modes", ())
    assert len(training_set(open_run(folder))) == 5000
