"""The site that `make docs` builds: it fetches nothing, and its search works with and without a server."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A site of one page, built with the settings of ours but for the API reference, which takes long."""
    pytest.importorskip("material")
    import yaml
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    (folder / "docs").mkdir()
    (folder / "docs" / "index.md").write_text("# One page\n\nHere is a walrus.\n")
    for name in ("iframe-worker.js", "style.css"):
        shutil.copy(ROOT / "docs" / name, folder / "docs" / name)
    config = load_config(
        str(ROOT / "mkdocs.yml"),
        docs_dir=str(folder / "docs"),
        site_dir=str(folder / "site"),
        nav=[{"Home": "index.md"}],
        plugins=[
            p for p in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["plugins"] if isinstance(p, str)
        ],
    )
    build(config)
    return folder / "site"


def test_a_page_fetches_nothing_from_elsewhere(site):
    page = (site / "index.html").read_text()
    fetched = re.findall(r"<(?:script|img)[^>]* src=\"([^\"]+)", page)
    fetched += re.findall(r"<link[^>]*rel=\"(?:stylesheet|preconnect|icon)\"[^>]*href=\"([^\"]+)", page)
    fetched += re.findall(r"<link[^>]*href=\"([^\"]+)[^>]*rel=\"(?:stylesheet|preconnect|icon)\"", page)
    assert len(fetched) > 3
    assert all((site / path).exists() for path in fetched), fetched


def test_search_has_what_it_needs_without_a_server(site):
    scripts = re.findall(r"<script src=\"([^\"]+)", (site / "index.html").read_text())
    bundle = next(path for path in scripts if "bundle" in path)
    assert scripts.index("iframe-worker.js") < scripts.index(bundle), (
        "Worker is replaced before search starts one"
    )
    assert "walrus" in (site / "search" / "search_index.js").read_text()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no browser")
def test_search_finds_a_word_on_a_page_that_is_opened_from_a_disk(site):
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--dump-dom"]
    opened = f"file://{site}/index.html?q=walrus"
    page = subprocess.run(
        [CHROMIUM, *options, opened], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "1 matching document" in page
    assert "<mark>walrus" in page
