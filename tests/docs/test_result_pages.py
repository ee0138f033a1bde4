"""Tables and pictures of the documentation are those of the stored results, and `scripts/tables.py` writes them."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from test_docs import ROOT, load


@pytest.fixture(scope="module")
def tables():
    return load("scripts/tables.py")


def test_tables_are_those_of_the_results(tables):
    assert tables.stale() == [], "run python scripts/tables.py"


def test_every_experiment_has_a_page_with_its_command_its_numbers_and_its_pictures(tables):
    from metastable.experiments import TITLES

    stored = tables.by_name(tables.read_results())
    pages = {page.stem: page.read_text() for page in (ROOT / "docs/results").glob("*.md")}
    assert pages.keys() == {*TITLES, *stored, "index", "papers"}
    for name in pages.keys() - {"index", "papers"}:
        text = pages[name]
        assert text.startswith(f"# {name}\n")
        assert f"```console\nmetastable reproduce {name} --scale " in text
        assert re.findall(r"<!-- table: (.*) -->", text) == [name], "nothing less than all of it"
        assert all(f"(../images/results/{kept})" in text for kept in tables.pictures_of(stored.get(name, [])))


RESULT = {
    "experiment": "some-paper",
    "scale": "cpu",
    "seed": 0,
    "version": "0.1.0",
    "device": "cpu",
    "seconds": 71.2,
    "rows": [
        {
            "metric": "error/a",
            "value": 0.01234567,
            "relation": "<=",
            "target": 0.02,
            "paper": None,
            "ok": True,
        },
        {"metric": "error/b", "value": 0.5, "relation": ">=", "target": 0.6, "paper": 0.7, "ok": False},
        {"metric": "aside", "value": 3, "relation": None, "target": None, "paper": None, "ok": True},
    ],
}
PAGE = "# Page\n\n<!-- table: {name} -->\nold\n<!-- end table -->\n\nafter\n"


@pytest.fixture
def copy(tmp_path):
    """A repository with one page for each kind of table, and the results of one experiment at two scales."""
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "README.md").write_text(PAGE.format(name="summary"))
    (tmp_path / "docs" / "deep" / "page.md").write_text(PAGE.format(name="some-paper"))
    for scale in ("cpu", "smoke"):
        folder = tmp_path / "results" / "some-paper" / scale
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(RESULT | {"scale": scale}))
        (folder / "figure-1.png").write_bytes(scale.encode())
    return tmp_path


def test_tables_without_results_say_so(tables, copy):
    shutil.rmtree(copy / "results")
    tables.write(copy)
    assert "No results are stored yet" in (copy / "README.md").read_text()
    assert "Not run yet: `metastable reproduce some-paper`" in (copy / "docs/deep/page.md").read_text()
    assert tables.stale(copy) == []


def test_summary_has_a_line_for_each_experiment_with_every_scale_and_the_largest_ones_numbers(tables, copy):
    smoke = copy / "results/some-paper/smoke/result.json"
    rows = [row | {"value": 0.01, "ok": True} for row in RESULT["rows"]]
    smoke.write_text(json.dumps(RESULT | {"scale": "smoke", "rows": rows}))
    tables.write(copy)
    text = (copy / "README.md").read_text()
    assert "| [some-paper](docs/results/some-paper.md) | smoke<br>cpu | 2 of 2<br>1 of 2 | `error/a`" in text
    assert "`error/a` 0.01235 (≤ 0.02)<br>" in text
    assert "<br>`error/b` 0.5 (≥ 0.6, paper 0.7) **not met** |" in text
    assert "aside" not in text
    assert "old" not in text
    assert text.endswith("<!-- end table -->\n\nafter\n")


def test_headlines_are_of_numbers_that_are_stored(tables):
    stored = {(r.name, r.scale, row["metric"]) for r in tables.read_results() for row in r.rows}
    assert tables.HEADLINES.keys() <= stored, "a headline of a number that is none is left out"


def test_headlines_name_every_number_that_is_not_as_required(tables, copy):
    readme = copy / "README.md"
    readme.write_text(PAGE.format(name="headlines"))
    tables.write(copy)
    text = readme.read_text()
    assert (
        "2 of 4 numbers are as required. These are not: [some-paper](docs/results/some-paper.md), smoke"
        in text
    )
    assert text.count("`error/b` 0.5 (≥ 0.6, paper 0.7) **not met**") == 2


def test_the_index_has_a_line_for_each_experiment_run_or_not(tables, copy):
    folder = copy / "results" / "nce-bias" / "cpu"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(RESULT | {"experiment": "nce-bias"}))
    page = copy / "docs/deep/page.md"
    page.write_text(PAGE.format(name="index"))
    tables.write(copy)
    lines = [line for line in page.read_text().splitlines() if line.startswith("| [")]
    assert lines[0].startswith("| [jarzynski-gmm](../results/jarzynski-gmm.md) | Two modes in 50 dimensions")
    assert lines[0].endswith("| not run yet | not run yet | not run yet |")
    assert (
        f"| {tables.TITLES['nce-bias']} | cpu | 1&nbsp;of&nbsp;2 | 1&nbsp;min&nbsp;11&nbsp;s |"
        in "\n".join(lines)
    )
    assert "| – | smoke<br>cpu | 1&nbsp;of&nbsp;2<br>1&nbsp;of&nbsp;2 | 1&nbsp;min" in lines[-1]
    assert len(lines) == len(tables.TITLES) + 1


def test_an_experiments_table_has_every_scale_and_each_picture_of_the_largest_that_has_it(tables, copy):
    (copy / "results/some-paper/smoke/figure-2.png").write_bytes(b"small")
    tables.write(copy)
    text = (copy / "docs/deep/page.md").read_text()
    assert text.index("figure-2.png") < text.index("**Scale smoke.**") < text.index("**Scale cpu.**")
    assert "| `error/b` | 0.5 | ≥ 0.6 | 0.7 | **no** |" in text
    assert "| `aside` | 3 | – | – | – |" in text
    assert (
        "![some-paper, figure-1](../images/results/some-paper-cpu-figure-1.png)\n\n*figure 1, scale cpu*"
        in text
    )
    assert (copy / "docs/images/results/some-paper-cpu-figure-1.png").read_bytes() == b"cpu"
    assert not (copy / "docs/images/results/some-paper-smoke-figure-1.png").exists()
    assert "![some-paper, figure-2](../images/results/some-paper-smoke-figure-2.png)" in text
    assert (copy / "docs/images/results/some-paper-smoke-figure-2.png").read_bytes() == b"small"


def test_the_gallery_has_each_picture_once_of_the_largest_scale(tables, copy):
    (copy / "docs" / "deep" / "page.md").write_text(PAGE.format(name="gallery"))
    tables.write(copy)
    text = (copy / "docs/deep/page.md").read_text()
    assert "### some-paper\n" in text
    assert text.count("](../images/results/some-paper-cpu-figure-1.png)") == text.count("![") == 1
    shutil.rmtree(copy / "results")
    tables.write(copy)
    assert "No pictures are stored yet" in (copy / "docs/deep/page.md").read_text()


def test_exact_answers_have_a_column_where_some_number_has_one(tables, copy):
    rows = [RESULT["rows"][0] | {"oracle": 0.0125}, RESULT["rows"][2]]
    (copy / "results/some-paper/cpu/result.json").write_text(json.dumps(RESULT | {"rows": rows}))
    tables.write(copy)
    text = (copy / "docs/deep/page.md").read_text()
    cpu = text.index("**Scale cpu.**")
    assert "| number | ours | exact | required | paper | holds |" in text[cpu:]
    assert "| `error/a` | 0.01235 | 0.0125 | ≤ 0.02 | – | yes |" in text[cpu:]
    assert "| `aside` | 3 | – | – | – | – |" in text[cpu:]
    assert "exact" not in text[:cpu]


def test_pictures_stand_in_the_order_of_their_numbers(tables, copy):
    for name in ("figure-10", "figure-2"):
        (copy / f"results/some-paper/cpu/{name}.png").write_bytes(b"some")
    tables.write(copy)
    shown = re.findall(r"some-paper, (figure-\d+)", (copy / "docs/deep/page.md").read_text())
    assert shown == ["figure-1", "figure-2", "figure-10"]


def test_words_after_the_experiment_say_less(tables, copy):
    page = copy / "docs/deep/page.md"
    (copy / "results/some-paper/cpu/figure-2.png").write_bytes(b"two")
    page.write_text(PAGE.format(name="some-paper required figure-2"))
    tables.write(copy)
    text = page.read_text()
    assert "aside" not in text
    assert "| `error/b` | 0.5 | ≥ 0.6 | 0.7 | **no** |" in text
    assert "cpu-figure-2.png" in text
    assert "cpu-figure-1.png" not in text


def test_writing_twice_changes_nothing_and_a_new_number_is_noticed(tables, copy):
    assert [str(p) for p in tables.write(copy)] == [
        "README.md",
        "docs/deep/page.md",
        "docs/images/results/some-paper-cpu-figure-1.png",
    ]
    assert tables.write(copy) == []
    changed = json.loads(json.dumps(RESULT))
    changed["rows"][0]["value"] = 0.019
    (copy / "results/some-paper/cpu/result.json").write_text(json.dumps(changed))
    (copy / "results/some-paper/cpu/figure-1.png").write_bytes(b"new")
    assert [p.name for p in tables.stale(copy)] == ["README.md", "page.md", "some-paper-cpu-figure-1.png"]
