"""The documentation is true: its examples run, its commands exist, its names and defaults are the code's."""

from __future__ import annotations

import doctest
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
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


# ---- examples


def test_readme_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # else what one run of the tests leaves in runs/ stops the next
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testfile(str(ROOT / "README.md"), module_relative=False, optionflags=options)
    assert tried > 3
    assert failed == 0


def test_python_is_shown_as_sessions_that_run_and_end_with_a_blank_line():
    """Without one, doctest takes the closing fence for expected output."""
    for page, name in zip(PAGES, NAMES):
        text = page.read_text()
        assert "```python" not in text, f"{name}: write examples as >>> sessions, which are tested"
        for block in re.findall(r"```pycon\n(.*?)```", text, re.DOTALL):
            assert block.endswith("\n\n"), f"{name}: {block}"
            assert ">>> " in block, name


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
    source = "".join(path.read_text() for path in (ROOT / "src/metastable").rglob("*.py"))
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


METHOD_PAGES = {
    "jarzynski": ("jarzynski",),
    "contrastive-divergence": ("cd", "pcd", "short-run"),
    "f-divergence": ("f-ebm",),
    "robust": ("robust",),
    "noise-contrastive": ("nce", "flow-contrastive", "adversarial-contrastive"),
    "ranking": ("ranking-nce", "ibc", "conditional-nce"),
    "interpolating": ("interpolating-nce",),
    "adaptive-nce": ("adance",),
    "score-matching": ("score-matching", "denoising-score-matching", "sliced-score-matching"),
}
"""Methods whose settings a page has in tables."""


def same_default(shown: str, default: object) -> bool:
    """Whether a cell says what the default is; one that is no number, word or truth value is told in words."""
    try:
        return float(shown) == default
    except ValueError:
        told = isinstance(default, (int, float, str)) and default != ""
        return shown == str(default) if told else True


@pytest.mark.parametrize("page", METHOD_PAGES)
def test_defaults_in_tables_of_settings_are_the_defaults(page):
    from metastable.methods import METHODS

    text = (ROOT / f"docs/methods/{page}.md").read_text()
    defaults: dict[str, list[object]] = {}
    for name in METHOD_PAGES[page]:
        for field, value in vars(METHODS[name]()).items():
            defaults.setdefault(field, []).append(value)
    tables = re.findall(r"^\| setting \| default \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [
        (n, s) for t in tables for n, s in re.findall(r"^\| `(\w+)` \| `?([^`|]+?)`? \|", t, re.MULTILINE)
    ]
    known = [(name, shown) for name, shown in rows if name in defaults]
    assert len(known) >= 2
    wrong = [row for row in known if not any(same_default(row[1], value) for value in defaults[row[0]])]
    assert not wrong


def test_a_wrong_default_is_noticed():
    assert not same_default("0.05", None)
    assert not same_default("batch", "all")
    assert not same_default("False", True)
    assert same_default("0", 0.0)
    assert same_default("tuned", None)
    assert not same_default("4", 1)


def test_the_command_line_page_names_every_energy_kernel_toy_set_and_preset():
    from metastable.data.toy import TOY_SETS
    from metastable.energies.build import ENERGIES
    from metastable.kernels import KERNELS

    text = (ROOT / "docs/command-line.md").read_text()
    names = {*ENERGIES, *KERNELS, *TOY_SETS}
    assert not [name for name in names if f"`{name}`" not in text]
    line = re.findall(r"^metastable train two-modes .*$", text, re.MULTILINE)[0]
    numbered = " ".join(f"jem-{i}" for i in range(1, 8))
    listed = set(re.findall(r"[\w-]+", line.replace("jem-1 to jem-7", numbered)))
    assert {path.stem for path in (ROOT / "src/metastable/presets").glob("*.json")} <= listed


def test_every_method_says_how_to_cite_it_and_all_pages_say_the_same():
    entries: dict[str, str] = {}
    for page in sorted((ROOT / "docs/methods").glob("*.md")):
        last = page.read_text().rpartition("\n## ")[2]
        assert last.startswith("How to cite\n"), page.name
        found = re.findall(r"^(@\w+\{(\w+),\n.*?^\})$", last, re.DOTALL | re.MULTILINE)
        assert found, page.name
        for entry, key in found:
            assert entries.setdefault(key, entry) == entry, f"{page.name}: {key}"
    for entry in entries.values():
        assert {"title", "author"} <= set(re.findall(r"^  (\w+) +=", entry, re.MULTILINE)), entry
    cited = "".join(entries.values()).replace("{", "").replace("}", "")
    yaml = pytest.importorskip("yaml")
    software = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert len(software["references"]) == 5
    for work in (software, *software["references"]):
        assert work["title"].lower() in cited.lower(), work["title"]
        assert all(author.get("family-names", author.get("name")) in cited for author in work["authors"])
    assert f"version = {software['version']}" in cited


def test_every_public_name_on_the_pages_exists():
    import metastable

    named = {
        (n, path) for p, n in zip(PAGES, NAMES) for path in re.findall(r"\bms\.(\w[\w.]*\w)", p.read_text())
    }
    assert len({path for _, path in named}) > 50
    missing = []
    for page, path in sorted(named):
        thing: object = metastable
        for part in path.split("."):
            if not hasattr(thing, part):
                missing.append(f"{page}: ms.{path}")
                break
            thing = getattr(thing, part)
    assert not missing


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
    table = {
        "rows": [row],
        "truth": {"mode_weights": [0.25, 0.75]},
        "data": "toy:two-modes",
        "methods": ["cd"],
    }
    found = Comparison(tmp_path, table, (Run(tmp_path, arrays=arrays),))
    titles = [title for title, *_ in picture.panels(found)]
    assert titles == ["true density", "contrastive divergence"]
    drawn = picture.draw(found, tmp_path / "picture.png")
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert drawn.stat().st_size < picture.MOST_BYTES
    assert Image.open(drawn).info["Description"] == "metastable compare --data toy:two-modes --methods cd"


def test_the_picture_is_the_one_that_make_demo_draws():
    picture = load("scripts/picture.py")
    compare, draw = re.findall(r"^demo: .*\n\t(.*)\n\t(.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]
    words = shlex.split(compare)
    folder, methods = words[words.index("--out") + 1], words[words.index("--methods") + 1]
    assert ROOT / folder == picture.DEMO
    assert shlex.split(draw)[1:3] == ["scripts/picture.py", folder]
    assert set(methods.split(",")) <= set(picture.TITLES)
    assert compare.startswith(f"$(BIN)/{Image.open(picture.TARGET).info['Description']} --out")


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
