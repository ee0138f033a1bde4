"""A folder in, one HTML file out."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from .compare_page import compare_page
from .read import Comparison, Reproduction, Run, read_folder
from .result_page import result_page
from .run_page import run_page

_NAME = "report.html"


def write_report(folder: Path | str, out: Path | str | None = None) -> Path:
    """Write the page of a run, a comparison or a reproduction as one file that needs nothing else.

    Args:
        folder: what training, a comparison or a reproduction wrote.
        out: the file to write, or a folder to write `report.html` into; by default `folder` itself.

    Returns:
        The file that was written.

    Raises:
        InputError: `folder` is none of the three kinds, or one of its files cannot be read.

    """
    folder = Path(folder)
    found = read_folder(folder)
    target = _target(folder, out)
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(found, Comparison):
        _write_missing_reports(found)
    _replace(target, _page(found, target.parent))
    return target


def _target(folder: Path, out: Path | str | None) -> Path:
    target = folder if out is None else Path(out)
    return target / _NAME if target.is_dir() else target


def _page(found: Run | Comparison | Reproduction, links_from: Path) -> str:
    if isinstance(found, Comparison):
        return compare_page(found, links_from)
    return result_page(found) if isinstance(found, Reproduction) else run_page(found)


def _write_missing_reports(comparison: Comparison) -> None:
    """The table links to each run's own page, so that page should be there."""
    for run in comparison.runs:
        if run is not None and not (run.folder / _NAME).exists():
            with suppress(OSError):  # a folder that cannot be written costs a link, not the page
                _replace(run.folder / _NAME, run_page(run))


def _replace(path: Path, text: str) -> None:
    """Whole or not at all: a reader never sees half a page."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
