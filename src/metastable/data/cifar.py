"""The binary version of CIFAR-10: files of 10,000 records, each a label byte and 3 × 32 × 32 pixel bytes.

The files have no header, so their length is all that tells a whole one from one that was cut short.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np

from ..core.errors import InputError

SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
RECORDS = 10_000
"""Records in each file."""
ARCHIVE = "cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"
"""The folder inside the archive."""


def read_records(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(pixels, labels) of a `.bin` file, memory-mapped: `(n, 3, 32, 32)` and `(n,)`, uint8."""
    _check_length(str(path), path.stat().st_size)
    return _split(np.memmap(path, np.uint8, "r", shape=(RECORDS, RECORD)))


def read_archive(path: Path, names: tuple[str, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(pixels, labels) of some files of the publisher's archive, in memory; nothing is written to disk."""
    try:
        with tarfile.open(path, "r:gz") as archive:
            return [_split(_member(archive, path, name)) for name in names]
    except (tarfile.TarError, EOFError, OSError) as error:
        raise InputError(f"{path}: is a damaged or incomplete archive ({error}); get it again") from error


def _member(archive: tarfile.TarFile, path: Path, name: str) -> np.ndarray:
    inside = f"{FOLDER}/{name}"
    try:
        file = archive.extractfile(inside)
    except KeyError:
        file = None
    if file is None:
        raise InputError(f"{path}: must hold {inside}, and does not; get it again")
    raw = file.read(RECORDS * RECORD + 1)  # never more than a whole one, whatever the archive holds
    _check_length(f"{path}, {inside}", len(raw))
    return np.frombuffer(raw, np.uint8).reshape(RECORDS, RECORD)


def _split(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # A slice of the columns can be given the shape of images without a copy.
    return records[:, 1:].reshape(len(records), *SHAPE), records[:, 0]


def _check_length(what: str, found: int) -> None:
    expected = RECORDS * RECORD
    if found != expected:
        raise InputError(
            f"{what}: must have {expected} bytes ({RECORDS} records of {RECORD}), found {found}; get it again"
        )
