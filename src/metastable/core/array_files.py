"""NumPy files that may come from anybody: what a header claims is checked against the file first."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from .errors import InputError
from .room import bytes_in_words, require_room

ZIP = b"PK"
COPIES = 2
"""Of an array while it is read: its bytes, and itself."""


def open_arrays(path: Path, mmap_mode: Any = None) -> Any:
    """`numpy.load` without pickles, of a file that holds what it claims, and no more than there is memory for.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "x.npy"
    >>> np.save(path, np.arange(3))
    >>> open_arrays(path)
    array([0, 1, 2])
    """
    with path.open("rb") as file:
        if file.read(2) == ZIP:
            _check_members(path)
        else:
            file.seek(0)
            _check_claim(str(path), file, path.stat().st_size)
    return np.load(path, allow_pickle=False, mmap_mode=mmap_mode)


def _check_members(path: Path) -> None:
    """Of an `.npz` file, which is a zip file: a small one may unpack to more than any memory."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        whole = sum(member.file_size for member in members)
        require_room(str(path), f"{len(members)} arrays, unpacked,", COPIES * whole)
        for member in members:
            if member.filename.endswith(".npy"):
                with archive.open(member) as file:
                    _check_claim(f"{path}, {member.filename}", file, member.file_size)


def _check_claim(what: str, file: IO[bytes], size: int) -> None:
    """The shape in a header must not ask for more bytes than the file has."""
    header = np.lib.format.read_array_header_1_0
    if np.lib.format.read_magic(file) != (1, 0):
        header = np.lib.format.read_array_header_2_0
    shape, _, dtype = header(file)
    claimed = math.prod(shape) * dtype.itemsize
    if not 0 <= claimed <= size:
        raise InputError(
            f"{what}: its header claims shape {shape}, {bytes_in_words(max(claimed, 0))}, and the file holds "
            f"{bytes_in_words(size)}; it is damaged"
        )
