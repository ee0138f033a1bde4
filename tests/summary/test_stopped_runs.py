"""A run that was killed or diverged is judged by its last good checkpoint, and says so."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

import metastable as ms
from metastable.cli.main import app
from metastable.report.read import read_run
from metastable.runs.folder import write_json

DATA = "toy:two-modes?n=200"
pytestmark = pytest.mark.usefixtures("quickly_judged")


class Killed(Exception):
    """What stops a training without a word."""


def train(out, stop_at: int, **settings) -> None:
    def stop(row) -> None:
        if row["step"] >= stop_at:
            raise Killed

    method = ms.methods.Jarzynski(walkers=64)
    energy = {"name": "mlp", "hidden": [8]}
    ms.fit(energy, DATA, method, 30, out=out, log_every=1, progress=stop, evaluate=False, **settings)


def evaluated(folder) -> tuple[str, dict, str]:
    result = CliRunner().invoke(app, ["evaluate", str(folder), "--data", DATA])
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "evaluation.json").read_text())
    return " ".join(result.output.split()), found, (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed") / "run"
    with pytest.raises(Killed):
        train(folder, 13, checkpoint_every=5)
    return folder


def test_a_killed_run_names_the_update_of_the_weights_it_is_judged_by(killed):
    said, found, page = evaluated(killed)
    assert ms.load_run(killed).history[-1]["step"] == 13
    assert found["step"] == 10
    assert "those of update 10, the last good checkpoint: training stopped by update 13" in said
    assert "Seen at update 10, the last good checkpoint." in page
    assert "Nothing speaks against it" not in page
    run = ms.load_run(killed)
    assert run.kept == 10
    assert run.kept_history[-1]["step"] == 10
    assert not read_run(killed).outdated


def test_of_a_run_without_an_update_nothing_was_learned(tmp_path):
    with pytest.raises(Killed):
        train(tmp_path / "run", 3)
    write_json(tmp_path / "run" / "summary.json", {"status": "diverged", "steps": 3, "method": "jarzynski"})
    said, found, page = evaluated(tmp_path / "run")
    assert found["step"] == 0
    assert found["log_partition"]["std_error"] == 0  # log Z of the reference, which is known
    assert "training diverged by update 3, and nothing was learned" in said
    assert "Nothing was learned by then" in page
    assert "Nothing speaks against it" not in page


def test_a_summary_from_before_training_went_on_says_nothing_about_these_weights(killed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    z = ms.LogPartition(99.0, 0.1).as_json()
    before = {"status": "finished", "steps": 5, "log_partition": z, "log_z_source": "independent"}
    write_json(folder / "summary.json", before)
    run = ms.load_run(folder)
    assert run.status == "unfinished"
    assert run.log_partition.value < 10
    write_json(folder / "summary.json", before | {"steps": 13})
    assert ms.load_run(folder).log_partition.value == 99


def test_an_evaluation_is_outdated_by_a_later_checkpoint(killed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    write_json(folder / "evaluation.json", {"step": 5, "log_partition": ms.LogPartition(1.0, 0.1).as_json()})
    assert read_run(folder).outdated
    assert read_run(folder).log_partition is None
    kept = {"status": "finished", "steps": 13, "kept": 5}  # the model of update 5 was the best, and was kept
    write_json(folder / "summary.json", kept)
    assert not read_run(folder).outdated
    write_json(folder / "summary.json", kept | {"kept": None})
    assert read_run(folder).outdated
