"""A folder in, one HTML file out."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from .compare_page import compare_page
from .read import Comparison, Reproduction, read_folder
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
    folder = Path(folder).expanduser()
    found = read_folder(folder)
    target = folder if out is None else Path(out).expanduser()
    target = target / _NAME if target.is_dir() else target
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(found, Comparison):
        for run in found.runs:  # the table links to each run's own page, so that page should be there
            if run is not None and not (run.folder / _NAME).exists():
                with suppress(OSError):  # a folder that cannot be written costs a link, not the page
                    _replace(run.folder / _NAME, run_page(run))
        page = compare_page(found, target.parent)
    else:
        page = result_page(found) if isinstance(found, Reproduction) else run_page(found)
    _replace(target, page)
    return target


def _replace(path: Path, text: str) -> None:
    """Whole or not at all: a reader never sees half a page."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
