"""A folder of pictures, one file each, in folders by class or all together."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from ..core.errors import InputError
from ..core.room import require_room

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
BROKEN = (OSError, ValueError, SyntaxError, struct.error, EOFError, IndexError)
"""What Pillow raises for files that are no pictures, by format."""
COPIES = 8
"""Bytes for each number of all pictures, until they are float32."""
GREY, COLOUR = ("1", "L"), ("P", "RGB", "RGBA", "LA")


def read_folder(folder: Path) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """(pixels, labels, classes): uint8 `(n, C, H, W)` in the order of the paths, and `(n,)`.

    C is 1 where every picture is grey and 3 otherwise. A picture's class is the folder it is in; pictures that lie
    in `folder` itself have none, and `classes` is empty.
    """
    if not folder.is_dir():
        raise InputError(f"images: {folder} is not a folder")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in ENDINGS and p.is_file())
    if not paths:
        raise InputError(f"images: {folder} holds no picture; their names must end in {', '.join(ENDINGS)}")
    classes, labels = _classes(folder, paths)
    mode, numbers = _check_alike(paths)
    require_room("images", f"{len(paths)} pictures in {folder}", COPIES * len(paths) * numbers)
    pixels = np.stack([_decoded(path, mode) for path in paths])
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), labels, classes


def _classes(folder: Path, paths: list[Path]) -> tuple[tuple[str, ...], np.ndarray]:
    inside = [path.relative_to(folder).parts for path in paths]
    loose = [path for path, parts in zip(paths, inside, strict=True) if len(parts) == 1]
    if len(loose) == len(paths):
        return (), np.zeros(len(paths), np.int64)
    if loose:
        raise InputError(
            f"images: {folder} holds pictures in folders by class and others outside of them, such as "
            f"{loose[0].name}; move those into a folder"
        )
    classes = tuple(sorted({parts[0] for parts in inside}))
    return classes, np.array([classes.index(parts[0]) for parts in inside], np.int64)


def _check_alike(paths: list[Path]) -> tuple[str, int]:
    """The mode to decode in, and numbers in a picture; another size, or more than 8 bits, is refused."""
    found = [_facts(path) for path in paths]
    usual = Counter(size for size, _ in found).most_common(1)[0][0]
    for path, (size, mode) in zip(paths, found, strict=True):
        if size != usual:
            raise InputError(
                f"{path}: all pictures must have one size, {usual[1]} × {usual[0]} (height × width) like most in "
                f"this folder, got {size[1]} × {size[0]}; crop or resize it, or move it away"
            )
        if mode not in GREY + COLOUR:
            raise InputError(f"{path}: must have 8 bits for each value, grey or RGB, got mode {mode!r}")
    mode = "L" if all(mode in GREY for _, mode in found) else "RGB"
    return mode, usual[0] * usual[1] * len(mode)


def _facts(path: Path) -> tuple[tuple[int, int], str]:
    """(width, height) and mode, from the header alone."""
    try:
        with Image.open(path) as picture:
            return picture.size, picture.mode
    except Image.DecompressionBombError as error:
        raise InputError(f"{path}: claims more pixels than a picture has ({error})") from error
    except BROKEN as error:
        raise InputError(f"{path}: is not a readable picture ({error})") from error


def _decoded(path: Path, mode: str) -> np.ndarray:
    try:
        with Image.open(path) as picture:
            values = np.asarray(picture.convert(mode))
    except BROKEN as error:
        raise InputError(f"{path}: is a damaged picture ({error}); get it again") from error
    return values[..., None] if mode == "L" else values
