"""The script that holds two folders of results against each other."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).resolve().parents[2] / "scripts" / "same_results.py"
ROWS = {
    "kl": {"value": 0.1, "relation": "<=", "target": 0.2, "ok": True},
    "ess": {"value": float("nan"), "relation": None, "target": None, "ok": True},
    "seconds_per_call/a": {"value": 3.0, "relation": None, "target": None, "ok": True},
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("same_results", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, rows: dict[str, Any], place: str = "a/smoke", **facts: Any) -> Path:
    (folder / place).mkdir(parents=True)
    listed = [{"metric": metric, **row} for metric, row in rows.items()]
    (folder / place / "result.json").write_text(json.dumps({"rows": listed, **facts}))
    return folder


def compare(script, tmp_path: Path, rows: dict[str, Any], **facts: Any) -> int:
    before = write(tmp_path / "before", ROWS, seconds=1.0)
    return script.main([str(before), str(write(tmp_path / "after", rows, **facts))])


def test_time_and_machine_do_not_count(script, tmp_path, capsys):
    rows = {**ROWS, "seconds_per_call/a": {**ROWS["seconds_per_call/a"], "value": 9.0}}
    assert compare(script, tmp_path, rows, seconds=2.0, device="cuda") == 0
    assert "unchanged" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change", [{"value": 0.10000000000000002}, {"target": 0.3}, {"ok": False}, {"relation": ">="}]
)
def test_a_row_that_differs_fails_and_is_named(script, tmp_path, capsys, change):
    assert compare(script, tmp_path, {**ROWS, "kl": {**ROWS["kl"], **change}}) == 1
    assert f"a/smoke: kl: {next(iter(change))} was" in capsys.readouterr().out


def test_rows_and_files_of_one_side_are_told(script, tmp_path, capsys):
    write(tmp_path / "after", ROWS, "b")
    assert compare(script, tmp_path, {"kl": ROWS["kl"], "new": ROWS["kl"]}) == 0
    out = capsys.readouterr().out
    assert "ess only in" in out
    assert "new only in" in out
    assert "b: only in" in out


def test_nothing_to_compare_is_no_success(script, tmp_path):
    (tmp_path / "empty").mkdir()
    assert script.main([str(write(tmp_path / "before", ROWS)), str(tmp_path / "empty")]) == 2
