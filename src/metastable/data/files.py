"""Arrays and tables in files: npy, npz, csv and tsv, with labels or contexts beside the rows."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..core.array_files import open_arrays
from ..core.errors import InputError, nearest
from ..core.labels import integers, within
from .images import IMAGE_SETS, PICTURES
from .toy import TOY_SETS

PICKLED = {".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib"}

BESIDE = ("labels", "given")
"""Arrays of an `.npz` file that are not the rows."""

DELIMITERS = {".csv": ",", ".tsv": "\t"}

READABLE = (".npy", ".npz", ".csv", ".tsv")


def read_arrays(path: Path) -> dict[str, Any]:
    """The rows, as `x`, and what lies beside them in an `.npz` file as `Dataset.of` takes it."""
    _check_path(path)
    suffix = path.suffix.lower()
    if suffix in DELIMITERS:
        table, header = _read_table(path, DELIMITERS[suffix])
        return {"x": table} | ({} if header is None else {"columns": tuple(c.strip() for c in header)})
    return _read_numpy(path)


def _check_path(path: Path) -> None:
    suffix = path.suffix.lower()
    if suffix in PICKLED:
        raise InputError(
            f"{path}: {suffix} files are pickles, and reading a pickle runs the code in it; save the array "
            "with numpy.save('data.npy', x.numpy()) and give that file"
        )
    if not path.exists():
        raise InputError(f"{path}: no such file{_near_path(path)}")
    if path.is_dir() or suffix not in READABLE:
        what = "is a folder" if path.is_dir() else f"has the unknown ending {suffix!r}"
        named = ", ".join(f"{name}:FOLDER" for name in (*IMAGE_SETS, PICTURES))
        raise InputError(f"{path}: {what}; give a file ending in {', '.join(READABLE)}, or toy:NAME, {named}")


def _near_path(path: Path) -> str:
    if str(path) in TOY_SETS:
        return f" (did you mean 'toy:{path}'?)"
    scheme, colon, _ = str(path).partition(":")
    if colon and (meant := difflib.get_close_matches(scheme, ("toy", PICTURES, *IMAGE_SETS), n=1)):
        return f" (did you mean '{meant[0]}:'?)"
    around = [p.name for p in path.parent.iterdir() if p.is_file()] if path.parent.is_dir() else []
    hint = nearest(path.name, around)
    return hint if hint.startswith(" (did") else "; give a path, or toy:NAME for a toy set"


def _read_numpy(path: Path) -> dict[str, Any]:
    # zipfile, zlib and the .npy header parser each have errors of their own for a damaged file.
    try:
        loaded = open_arrays(path)
        if isinstance(loaded, np.ndarray):
            return {"x": loaded}
        with loaded:
            beside = {name: loaded[name] for name in BESIDE if name in loaded.files}
            if "labels" in beside:
                beside |= _classes(beside.pop("labels"))
            rows = [name for name in loaded.files if name not in BESIDE]
            return {"x": loaded[_pick_key(path, rows)], **beside}
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{path}: is not a readable array file ({error}); save plain numbers with numpy.save"
        ) from error


def _classes(labels: np.ndarray) -> dict[str, Any]:
    """Labels as integers; where they are no classes of rows (names, scores), why not: few methods need them."""
    if labels.ndim != 1:
        return {"unlabelled": f"labels: must be one integer for each row, got shape {labels.shape}"}
    try:
        return {"labels": within(integers(labels, "labels"), None, "labels")}
    except InputError as error:
        return {"unlabelled": str(error)}


def _pick_key(path: Path, keys: list[str]) -> str:
    if len(keys) == 1:
        return keys[0]
    for key in ("x", "data"):
        if key in keys:
            return key
    raise InputError(
        f"{path}: must hold one array, or one named 'x' or 'data'; it holds {', '.join(keys) or 'none'}"
    )


def _read_table(path: Path, delimiter: str) -> tuple[np.ndarray, list[str] | None]:
    """Numbers of a delimited file, and its header: the first row, when no cell of it is a number."""
    rows = _table_rows(path, delimiter)
    line, first = next(rows, (0, []))
    header = first if first and not any(map(_is_number, first)) else None
    table = [] if header is not None or not first else [_numbers(path, line, first, None)]
    for line, row in rows:
        if len(row) != len(first):
            raise InputError(f"{path}: row {line} has {len(row)} cells, but the first row has {len(first)}")
        table.append(_numbers(path, line, row, header))
    array = np.array(table, dtype=np.float64).reshape(len(table), len(first))
    _refuse_row_index(path, array, header)
    return array, header


def _table_rows(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of each row that is not blank; utf-8-sig drops the mark that spreadsheets write first."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=delimiter)
            for row in reader:
                if len(row) > 1 or (row and row[0].strip()):
                    yield reader.line_num, row
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: is not a text table in UTF-8 ({error})") from error


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _numbers(path: Path, line: int, row: list[str], header: list[str] | None) -> list[float]:
    try:
        return [float(cell) for cell in row]
    except ValueError:
        column = next(i for i, cell in enumerate(row) if not _is_number(cell))
    named = f" ({header[column]!r})" if header else ""
    cell = row[column]
    what = f"{cell!r} is not a number" if cell.strip() else "the cell is empty"
    encode = "; drop the column or encode it as numbers" if cell.strip() else "; drop or fill such rows"
    hint = "; separate the cells with commas" if ";" in cell else encode
    raise InputError(f"{path}: row {line}, column {column + 1}{named}: {what}{hint}")


def _refuse_row_index(path: Path, table: np.ndarray, header: list[str] | None) -> None:
    """A nameless first column that counts rows is an index that pandas wrote, not a coordinate."""
    if header is None or header[0].strip() or not len(table):
        return
    if np.array_equal(table[:, 0], np.arange(len(table))):
        raise InputError(
            f"{path}: column 1 has no name and only counts the rows; save with to_csv(index=False)"
        )
