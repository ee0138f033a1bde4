"""A folder that an earlier state of the code wrote is read, shown, and trained on as if nothing had changed.

`older_folder` holds the first six updates of the training below, without samples and pictures.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import metastable as ms
from metastable.core.errors import InputError
from metastable.report import write_report

ROWS = torch.tensor([[0.0, 0.0], [3.0, 0.0], [-3.0, 1.0]])
AFTER_SIX = [-12.130469, -1.252428, -4.345006]
AFTER_NINE = [-12.109695, -1.230252, -4.326464]
"""Log-densities of `ROWS` that the code of that time printed."""


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(Path(__file__).parent / "older_folder", tmp_path / "run")


def test_it_is_read_with_its_numbers(folder):
    run = ms.load_run(folder)
    assert run.log_prob(ROWS).tolist() == pytest.approx(AFTER_SIX, abs=1e-4)
    assert run.log_partition.value == pytest.approx(-0.004029, abs=1e-6)
    assert [row["step"] for row in run.history] == [1, 2, 3, 4, 5, 6]
    assert run.modes["data"] == [pytest.approx(0.22), pytest.approx(0.78)]


def test_it_has_a_page(folder):
    page = write_report(folder).read_text()
    assert "Diagnosis" in page
    assert "−0.0040 ± 0.0082" in page


def test_its_training_goes_on_where_it_would_have_gone(folder):
    method = {"name": "jarzynski", "walkers": 16, "populations": 4}
    method["kernel"] = {"name": "ula", "step_size": 0.05}
    options = {"seed": 0, "log_every": 1, "checkpoint_every": 3, "resume": True, "evaluate": False}
    run = ms.fit({"name": "mlp", "hidden": [4]}, "toy:two-modes?n=100", method, 9, out=folder, **options)
    assert [row["step"] for row in run.history] == list(range(1, 10))
    assert run.log_prob(ROWS).tolist() == pytest.approx(AFTER_NINE, abs=1e-4)


@pytest.mark.filterwarnings("ignore:.*was altered since")
def test_a_toy_set_that_another_machine_drew_is_gone_on_with(tmp_path):
    """Last digits of normal draws are a machine's own: other digests, and means and spreads that are near."""
    options = {"seed": 0, "evaluate": False, "out": tmp_path / "run"}
    ms.fit("mlp", "toy:two-modes?n=100", "nce", 2, **options)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "seals.json").unlink()

    def drawn_elsewhere(**columns):
        first = {**config["columns"][0], **columns}
        other = {**config["data"], "sha256": "0" * 16}
        text = json.dumps({**config, "data": other, "columns": [first, *config["columns"][1:]]})
        (tmp_path / "run" / "config.json").write_text(text)

    drawn_elsewhere(mean=config["columns"][0]["mean"] + 1e-6)
    assert ms.fit("mlp", "toy:two-modes?n=100", "nce", 4, resume=True, **options).history[-1]["step"] == 4
    drawn_elsewhere(mean=config["columns"][0]["mean"] + 0.01)
    with pytest.raises(InputError, match="data differs"):
        ms.fit("mlp", "toy:two-modes?n=100", "nce", 6, resume=True, **options)
    drawn_elsewhere()
    with pytest.raises(InputError, match="data differs"):
        ms.fit("mlp", "toy:two-modes?n=100&seed=1", "nce", 6, resume=True, **options)
