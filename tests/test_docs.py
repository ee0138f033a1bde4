"""The documentation is true: its examples run, its commands exist, its tables are those of the stored results."""

from __future__ import annotations

import doctest
import importlib.util
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def load(path: str):
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables():
    return load("scripts/tables.py")


# ---- examples


def test_readme_examples_run():
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testfile(str(ROOT / "README.md"), module_relative=False, optionflags=options)
    assert tried > 3
    assert failed == 0


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_sessions_end_with_a_blank_line(page):
    """Without one, doctest takes the closing fence for expected output."""
    for block in re.findall(r"```pycon\n(.*?)```", page.read_text(), re.DOTALL):
        assert block.endswith("\n\n"), block
        assert ">>> " in block


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_is_shown_as_sessions_that_run(page):
    assert "```python" not in page.read_text(), "write examples as >>> sessions, which are tested"


def test_the_example_script_tells_the_methods_apart():
    example = load("examples/jarzynski_two_modes.py")
    in_data, rows = example.compare(rows=500, walkers=1000, steps=150, rate=0.1)
    by_name = {row.method: row for row in rows}
    assert list(by_name) == ["jarzynski", "pcd", "cd"]
    assert abs(in_data - 0.25) < 0.1
    jarzynski = by_name["jarzynski"]
    assert abs(jarzynski.left_weight - in_data) < 0.2
    assert abs(jarzynski.log_z.value - jarzynski.log_z_exact) < 1.5
    assert by_name["pcd"].log_z is None


# ---- commands


def shown_commands() -> list[tuple[str, str]]:
    """Every line `metastable …` of a console block, with its page."""
    found = []
    for page, name in zip(PAGES, NAMES):
        for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
            found += [(name, line) for line in block.splitlines() if line.startswith("metastable ")]
    return found


def test_every_command_of_the_documentation_exists():
    from typer.main import get_command

    from metastable.cli.main import app

    commands = get_command(app).commands  # pyright: ignore
    lines = shown_commands()
    assert {shlex.split(line)[1] for _, line in lines} >= set(commands), "a command is not documented"
    for page, line in lines:
        words = shlex.split(line, comments=True)[1:]
        if words[0].startswith("-"):
            continue
        assert words[0] in commands, f"{page}: {line}"
        known = {name for p in commands[words[0]].params for name in (*p.opts, *p.secondary_opts)}
        unknown = [w for w in words[1:] if w.startswith("-") and w not in known]
        assert not unknown, f"{page}: {line}: {unknown}"


def test_every_option_is_documented():
    from typer.main import get_command

    from metastable.cli.main import app

    text = (ROOT / "docs" / "command-line.md").read_text()
    train = get_command(app).commands["train"]  # pyright: ignore
    options = {max(p.opts, key=len) for p in train.params if p.param_type_name == "option"}
    missing = {o for o in options - {"--help", "--progress"} if f"`{o}" not in text}
    assert not missing


def test_settings_files_of_the_documentation_resolve():
    import tomllib

    from metastable.cli.settings import resolve

    text = (ROOT / "docs" / "command-line.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        job = resolve(tomllib.loads(block))
        assert job.method.name == "jarzynski"


# ---- what pages say


def test_every_finding_has_a_section():
    files = [ROOT / "src/metastable/evaluation/diagnosis.py", *(ROOT / "src/metastable/summary").glob("*.py")]
    source = "".join(path.read_text() for path in files)
    from metastable.evaluation.diagnosis import PROFILES

    named = set(re.findall(r'Finding\(\s*"([a-z-]+)"', source)) | set(PROFILES)
    assert len(named) > 8
    sections = set(re.findall(r"^### (\S+)$", (ROOT / "docs/diagnosis.md").read_text(), re.MULTILINE))
    assert named == sections


def test_every_setting_of_jarzynski_is_on_its_page():
    import dataclasses

    from metastable.methods import Jarzynski

    text = (ROOT / "docs/methods/jarzynski.md").read_text()
    missing = [f.name for f in dataclasses.fields(Jarzynski) if f"`{f.name}`" not in text]
    assert set(missing) <= {"energy_l2"}  # explained with the contrastive family


def test_defaults_on_the_jarzynski_page_are_the_defaults():
    from metastable.methods import Jarzynski

    text = (ROOT / "docs/methods/jarzynski.md").read_text()
    shown = dict(re.findall(r"^\| `(\w+)` \| `?([^`|]+?)`? \|", text, re.MULTILINE))
    method = Jarzynski()
    for name in (
        "walkers",
        "held_out",
        "populations",
        "steps",
        "gradient",
        "resample",
        "threshold",
        "scheme",
        "pace",
    ):
        assert shown[name] == str(getattr(method, name)), name
    assert shown["step_size"] == "tuned"
    assert method.tuned
    assert shown["order"] == method.order


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert pages == set(re.findall(r"([\w/-]+\.md)$", text, re.MULTILINE))


def test_the_site_fetches_nothing():
    text = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in text
    assert "http" not in text


def test_links_of_the_readme_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", (ROOT / name).read_text()):
            assert target.startswith("https://") or (ROOT / target).exists(), f"{name}: {target}"


def test_pictures_are_small():
    for picture in (ROOT / "docs" / "images").rglob("*.png"):
        assert picture.stat().st_size < 200_000, picture


def test_the_picture_is_drawn_from_a_comparison(tmp_path):
    from metastable.report.read import Comparison, Run

    picture = load("scripts/picture.py")
    x, y = np.linspace(-6, 6, 31), np.linspace(-3, 3, 21)
    log_density = -((np.abs(x)[None] - 3) ** 2) - y[:, None] ** 2
    arrays = {"grid_x": x, "grid_y": y, "log_density": log_density, "truth_log_density": log_density}
    row = {"method": "cd", "mode_weights": [0.4, 0.6], "mode_weight_error": 0.15, "kl_exact": 0.02}
    table = {"rows": [row], "truth": {"mode_weights": [0.25, 0.75]}}
    found = Comparison(tmp_path, table, (Run(tmp_path, arrays=arrays),))
    titles = [title for title, *_ in picture.panels(found)]
    assert titles == ["true density", "contrastive divergence"]
    drawn = picture.draw(found, tmp_path / "picture.png")
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert drawn.stat().st_size < picture.MOST_BYTES


# ---- tables


def test_tables_are_those_of_the_results(tables):
    assert tables.stale() == [], "run python scripts/tables.py"


def test_every_stored_experiment_is_on_the_results_page(tables):
    from metastable.experiments import TITLES

    sections = set(re.findall(r"<!-- table: (\S+) -->", (ROOT / "docs/results.md").read_text()))
    assert {r.name for r in tables.read_results()} <= sections
    assert set(TITLES) <= sections


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
    assert "| some-paper | smoke<br>cpu | 2 of 2<br>1 of 2 | `error/a` 0.01235 (≤ 0.02)<br>" in text
    assert "<br>`error/b` 0.5 (≥ 0.6, paper 0.7) **not met** |" in text
    assert "aside" not in text
    assert "old" not in text
    assert text.endswith("<!-- end table -->\n\nafter\n")


def test_an_experiments_table_has_every_scale_and_each_picture_of_the_largest_that_has_it(tables, copy):
    (copy / "results/some-paper/smoke/figure-2.png").write_bytes(b"small")
    tables.write(copy)
    text = (copy / "docs/deep/page.md").read_text()
    assert text.index("**Scale smoke.**") < text.index("**Scale cpu.**")
    assert "| `error/b` | 0.5 | ≥ 0.6 | 0.7 | **no** |" in text
    assert "| `aside` | 3 | – | – | – |" in text
    assert "![some-paper, figure-1](../images/results/some-paper-cpu-figure-1.png)" in text
    assert (copy / "docs/images/results/some-paper-cpu-figure-1.png").read_bytes() == b"cpu"
    assert not (copy / "docs/images/results/some-paper-smoke-figure-1.png").exists()
    assert "![some-paper, figure-2](../images/results/some-paper-smoke-figure-2.png)" in text
    assert (copy / "docs/images/results/some-paper-smoke-figure-2.png").read_bytes() == b"small"


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


# ---- the reference


def test_sessions_in_docstrings_become_code_blocks():
    pytest.importorskip("griffe")
    fenced = load("scripts/doctest_fences.py").fenced
    fence = "`" * 3
    assert fenced("One.\n>>> 1\n1\n\nTwo.") == f"One.\n\n{fence}pycon\n>>> 1\n1\n{fence}\n\nTwo."
    assert (
        fenced("Example:\n    >>> 1\n    1") == f"Example:\n\n    {fence}pycon\n    >>> 1\n    1\n    {fence}"
    )
    assert fenced("Nothing.") == "Nothing."
