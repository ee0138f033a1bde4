"""The idx format of MNIST and its relatives: a header that says type and shape, then the numbers.

| bytes | what |
|---|---|
| 0, 1 | zero |
| 2 | type: 08 uint8, 09 int8, 0B int16, 0C int32, 0D float32, 0E float64 |
| 3 | number of dimensions, d |
| 4 … 4 + 4d | the dimensions, big-endian uint32 |
| the rest | the values, big-endian, last dimension fastest |
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import numpy as np

from ..core.errors import InputError
from ..core.room import bytes_in_words, free_bytes

TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP = b"\x1f\x8b"
LONGEST_HEADER = 4 + 4 * 255
COPIES = 3
"""Of what is unpacked, until it is an array."""


def read_idx(path: str | Path) -> np.ndarray:
    """The array in an idx file, read-only.

    A plain file is memory-mapped: nothing is read until it is asked for. A gzip file, told by its first bytes and
    not by its name, is unpacked into memory. A file whose length is not the one its header asks for is refused.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "numbers-idx1-ubyte"
    >>> write_idx(path, np.array([3, 1, 4], dtype=np.uint8))
    >>> read_idx(path).tolist()
    [3, 1, 4]
    """
    path = Path(path)
    with path.open("rb") as file:
        head = file.read(LONGEST_HEADER)
    if head[:2] == GZIP:
        return _parse(path, *_unpacked(path, path.read_bytes()))
    dtype, shape, start = _header(path, head)
    _check_length(path, dtype, shape, start, path.stat().st_size)
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", offset=start, shape=shape or (1,)).reshape(shape)


def write_idx(path: str | Path, array: np.ndarray) -> None:
    """Write an array as an uncompressed idx file."""
    array = np.asarray(array)
    big = array.dtype.newbyteorder(">")
    code = next((code for code, kind in TYPES.items() if np.dtype(kind) == big), None)
    if code is None:
        raise InputError(f"array: idx has no type for {array.dtype}; use uint8, int8, 16, 32 or float32, 64")
    if array.ndim > 255:
        raise InputError(f"array: idx has at most 255 dimensions, got {array.ndim}")
    dims = np.array(array.shape, dtype=">u4").tobytes()
    Path(path).write_bytes(bytes([0, 0, code, array.ndim]) + dims + array.astype(big).tobytes())


def content(path: Path) -> bytes:
    """All bytes of a file, unpacked where it is a gzip file; one that ends early gives what is there."""
    raw = path.read_bytes()
    return _unpacked(path, raw)[0] if raw[:2] == GZIP else raw


def _unpacked(path: Path, raw: bytes) -> tuple[bytes, bool]:
    """What a gzip file holds, and whether it goes on to its end and checksum."""
    parts, ended, free = [], False, free_bytes()
    room = int(min(free // COPIES, 1 << 62))
    try:
        while raw[:2] == GZIP:
            member = zlib.decompressobj(16 + zlib.MAX_WBITS)
            parts.append(member.decompress(raw, room))
            if member.unconsumed_tail:
                raise InputError(
                    f"{path}: unpacks to more than the {bytes_in_words(free)} of memory that are free"
                )
            room -= len(parts[-1])
            raw, ended = member.unused_data, member.eof
    except zlib.error as error:
        raise InputError(f"{path}: is a damaged gzip file ({error}); get it again") from error
    return b"".join(parts), ended


def _parse(path: Path, raw: bytes, ended: bool) -> np.ndarray:
    dtype, shape, start = _header(path, raw[:LONGEST_HEADER])
    _check_length(path, dtype, shape, start, len(raw), " when unpacked")
    if not ended:
        raise InputError(f"{path}: is cut short within its last bytes, the checksum; get it again")
    return np.frombuffer(raw, dtype, offset=start).reshape(shape)


def _header(path: Path, head: bytes) -> tuple[np.dtype, tuple[int, ...], int]:
    """(dtype, shape, where the values begin)."""
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in TYPES:
        known = ", ".join(f"{code:02x}" for code in TYPES)
        raise InputError(
            f"{path}: is not an idx file: it must begin with 00 00, a type ({known}) and the number of "
            f"dimensions, got {head[:4].hex(' ') or 'an empty file'}"
        )
    start = 4 + 4 * head[3]
    if len(head) < start:
        raise InputError(f"{path}: must have a header of {start} bytes, found {len(head)}; get it again")
    shape = tuple(int(d) for d in np.frombuffer(head, ">u4", head[3], 4))
    return np.dtype(TYPES[head[2]]), shape, start


def _check_length(
    path: Path, dtype: np.dtype, shape: tuple[int, ...], start: int, found: int, when: str = ""
) -> None:
    expected = start + math.prod(shape) * dtype.itemsize
    if found != expected:
        what = "is cut short" if found < expected else "is too long"
        raise InputError(
            f"{path}: {what}: for shape {shape} in its header it must have {expected} bytes{when}, found {found}; "
            "get it again"
        )
