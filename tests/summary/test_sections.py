"""A section of one's own: measured with the others, kept in the run's folder, and shown on its page."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import metastable as ms
from metastable.cli.main import app
from metastable.core.errors import InputError
from metastable.evaluation.diagnosis import Finding
from metastable.summary import SECTIONS, Judged, Measured, register


class Tails:
    """How often samples lie farther out than every row; says so where that is always."""

    name = "tails"

    def applies(self, judged: Judged) -> bool:
        return judged.run.walkers is not None

    def measure(self, judged: Judged) -> Measured:
        reach = judged.x.norm(dim=1).max()
        share = float((judged.run.walkers.x.norm(dim=1) > reach).double().mean())
        found = Finding("long-tails", "problem", "Samples lie beyond the rows.", {"share": share})
        return Measured({"beyond_rows": share}, {"reach": np.array([float(reach)])}, findings=[found])


@pytest.fixture
def tails():
    before = list(SECTIONS)
    yield register(Tails())
    SECTIONS[:] = before


@pytest.fixture
def cheap(monkeypatch):
    monkeypatch.setattr("metastable.summary.likelihood.affordable", lambda *_: False)


def test_a_registered_section_is_measured_kept_and_shown(tails, cheap, tmp_path):
    np.save(tmp_path / "x.npy", torch.randn(100, 2, generator=torch.Generator().manual_seed(0)).numpy())
    method = ms.methods.PersistentCD(walkers=50, step_size=0.01)
    energy, out = {"name": "mlp", "hidden": [4]}, tmp_path / "run"
    run = ms.fit(energy, tmp_path / "x.npy", method, 2, out=out)
    share = run.scores["tails/beyond_rows"]
    assert 0 <= share <= 1
    assert run.diagnosis[0].name == "long-tails"  # the gravest comes first
    assert ms.load_run(out).scores["tails/beyond_rows"] == share
    with np.load(out / "figures.npz") as stored:
        assert stored["tails/reach"][0] > 1
    page = (out / "report.html").read_text()
    assert "<h2>Tails</h2>" in page
    assert page.count("eyond rows") == 1  # in its own table, not among the scores too
    words = ["evaluate", out, "--data", tmp_path / "x.npy", "--out", tmp_path / "e.json"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    assert '"tails/beyond_rows"' in (tmp_path / "e.json").read_text()


def test_names_of_sections_are_their_own(tails):
    class Other(Tails):
        def measure(self, judged: Judged) -> Measured:
            return Measured()

    other = register(Other())
    assert [section for section in SECTIONS if section.name == "tails"] == [other]
    for name in ("modes", "exact", "", "a/b"):
        other.name = name
        with pytest.raises(InputError, match=r"section\.name: must be"):
            register(other)
