"""Results that were made apart, as one: rows of each, what compares them, and who made what."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from metastable.cli.main import app
from metastable.core.errors import InputError
from metastable.experiments.base import Bench, Experiment, Row, reproduce
from metastable.experiments.joined import gather, join, label_of, told


def body(bench: Bench) -> list[Row]:
    (bench.folder / f"{bench.arm}.png").write_bytes(b"picture")
    return [Row("common", bench.value), Row(f"error/{bench.arm}", bench.value, "<=", 1.0)]


def compared(bench: Bench, rows: list[Row]) -> list[Row]:
    own = [row for row in rows if row.metric != "worst"]
    return [*own, Row("worst", max(row.value for row in own))]


TWO = Experiment("two", "Two arms.", "nobody", {"smoke": {"arm": "a", "value": 0.5}}, body, compared)


def made(tmp_path, arm: str, value: float, seed: int = 0):
    folder = tmp_path / arm
    reproduce(TWO, "smoke", seed, folder, device="cpu", changes={"arm": arm, "value": value})
    return folder


def test_rows_of_all_and_what_compares_them(tmp_path):
    folders = [made(tmp_path, "a", 0.5), made(tmp_path, "b", 2.0)]
    result = join(TWO, "smoke", 0, folders, tmp_path / "both")
    assert [(row.metric, row.value) for row in result.rows] == [
        ("common", 0.5),
        ("error/a", 0.5),
        ("error/b", 2.0),
        ("worst", 2.0),
    ]
    assert not result.ok  # whether a row holds is asked of its value
    content = json.loads((tmp_path / "both" / "result.json").read_text())
    assert [part["changes"] for part in content["parts"]] == [
        {"arm": "a", "value": 0.5},
        {"arm": "b", "value": 2.0},
    ]
    seconds = [json.loads((folder / "result.json").read_text())["seconds"] for folder in folders]
    assert content["seconds"] == pytest.approx(sum(seconds), abs=0.02)
    assert content["device"] == "cpu"
    assert {path.name for path in (tmp_path / "both").glob("*.png")} == {"a.png", "b.png"}
    assert (
        label_of(folders[0], {"parts": [{"changes": {"arms": ["x"]}}, {"changes": {"arms": ["y"]}}]}) == "x-y"
    )
    assert label_of(folders[0], {"parts": [{}]}) == "a"
    assert label_of(folders[0], {"parts": [{"changes": {"arms": list("vwxyz")}}]}) == "a"  # too many to name


def test_a_part_of_which_nothing_is_left_is_not_told(tmp_path):
    arms = Experiment(
        "arms",
        "Arms of one setting.",
        "nobody",
        {"smoke": {"arms": ("a",), "value": 0.5}},
        lambda bench: [Row("common", bench.value), *(Row(f"error/{a}", bench.value) for a in bench.arms)],
    )

    def asked(folder: str, value: float, *names: str):
        changes = {"arms": names, "value": value}
        reproduce(arms, "smoke", 0, tmp_path / folder, device="cpu", changes=changes)
        return tmp_path / folder

    old = join(arms, "smoke", 0, [asked("a", 2.0, "a"), asked("bc", 2.0, "b", "c")], tmp_path / "old")
    result = join(arms, "smoke", 0, [asked("ab", 0.5, "a", "b"), tmp_path / "old"], tmp_path / "out")
    assert {row.metric: row.value for row in result.rows} == {
        "common": 0.5,
        "error/a": 0.5,
        "error/b": 0.5,
        "error/c": 2.0,
    }
    assert [list(part["changes"]["arms"]) for part in result.parts] == [["a", "b"], ["b", "c"]]
    assert len(old.parts) == 2
    whole = {"rows": [Row("common", 0.5)], "device": "cpu", "seconds": 1.0}
    assert len(told(whole, {"common"})) == 1  # nobody said which arms it was asked for


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_is_null_and_holds_nothing(tmp_path, value):
    def refuse(word: str):
        raise AssertionError(f"{word} is no JSON")

    rows = [Row("told", value), Row("asked", value, "<=", 1.0)]
    odd = Experiment("odd", "No numbers.", "nobody", {"smoke": {}}, lambda bench: rows)
    reproduce(odd, "smoke", 0, tmp_path / "a", device="cpu")
    content = json.loads((tmp_path / "a" / "result.json").read_text(), parse_constant=refuse)
    assert [(row["value"], row["ok"]) for row in content["rows"]] == [(None, True), (None, False)]
    again = join(odd, "smoke", 0, [tmp_path / "a"], tmp_path / "again")
    assert not again.ok
    assert all(math.isnan(row.value) for row in again.rows)


def test_a_joined_result_is_joined_on_where_it_lies(tmp_path):
    first = join(TWO, "smoke", 0, [made(tmp_path, "a", 0.5), made(tmp_path, "b", 0.7)], tmp_path / "out")
    second = join(TWO, "smoke", 0, [tmp_path / "out", made(tmp_path, "c", 0.9)], tmp_path / "out")
    assert len(first.parts) == 2
    assert len(second.parts) == 3
    assert [row.metric for row in second.rows] == ["common", "error/a", "error/b", "error/c", "worst"]
    assert second.rows[-1].value == 0.9


def test_no_picture_is_lost_but_those_that_are_made_anew(tmp_path):
    made = {"drawn": ["table"], "a": ["table", "one"], "x/b": ["one"], "y/b": ["one"], "z/b": ["one", "two"]}
    for folder, names in made.items():
        (tmp_path / folder).mkdir(parents=True)
        for name in names:
            (tmp_path / folder / f"{name}.png").write_text("x/b" if folder == "z/b" else folder)
    labels = {folder: "" if folder == "drawn" else folder[-1] for folder in made}
    out = tmp_path / "out"
    out.mkdir()
    gather([(tmp_path / folder, label) for folder, label in labels.items()], out)
    found = {path.stem: path.read_text() for path in out.glob("*.png")}
    assert found == {"table": "drawn", "one": "a", "one-b": "x/b", "one-b-2": "y/b", "two": "x/b"}


def test_other_seeds_and_other_files_are_refused(tmp_path):
    folders = [made(tmp_path, "a", 0.5), made(tmp_path, "b", 0.7, seed=1)]
    with pytest.raises(InputError, match=r"join: must be results with seed = 0: .*b, got 1"):
        join(TWO, "smoke", 0, folders, tmp_path / "out")
    (tmp_path / "a" / "result.json").write_text('{"rows": [{"size": 1}]}')
    with pytest.raises(InputError, match=r"join: .*result.json is no result of an experiment"):
        join(TWO, "smoke", 0, folders[:1], tmp_path / "out")


def test_by_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr("metastable.experiments.EXPERIMENTS", {"two": TWO})
    words = ["reproduce", "two", "--out", str(tmp_path / "out"), "--join", str(made(tmp_path, "a", 0.5))]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    assert "error/a" in done.output
    assert (tmp_path / "out" / "report.html").is_file()
    refused = CliRunner().invoke(app, [*words, "--set", "arm=b"])
    assert refused.exit_code == 2
    assert "--set: must be left out beside --join" in refused.stderr
    missing = CliRunner().invoke(app, [*words[:4], "--join", str(tmp_path / "nothing")])
    assert missing.exit_code == 2
    assert "nothing" in missing.stderr
