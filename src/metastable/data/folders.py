"""A folder of pictures, one file each, in folders by class or all together."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps

from ..core.errors import InputError
from ..core.room import require_room

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
BROKEN = (OSError, ValueError, SyntaxError, struct.error, EOFError, IndexError)
"""What Pillow raises for files that are no pictures, by format."""
COPIES = 8
"""Bytes for each number of all pictures, until they are float32."""
SIDEWAYS = (5, 6, 7, 8)
"""Orientations of EXIF in which width and height change places."""
GREY, COLOUR = ("1", "L", "LA"), ("P", "RGB", "RGBA")


def read_folder(folder: Path) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """(pixels, labels, classes): uint8 `(n, C, H, W)` in the order of the paths, and `(n,)`.

    C is 1 where every picture is grey, or has a palette of grey, and 3 otherwise. Pictures are turned as their EXIF
    data say, and refused where they are transparent. A picture's class is the folder it is in; pictures that lie
    in `folder` itself have none, and `classes` is empty.
    """
    if not folder.is_dir():
        raise InputError(f"images: {folder} is not a folder")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in ENDINGS and p.is_file())
    if not paths:
        raise InputError(f"images: {folder} holds no picture; their names must end in {', '.join(ENDINGS)}")
    classes, labels = _classes(folder, paths)
    mode, size = _check_alike(paths)
    numbers = len(paths) * size[0] * size[1] * len(mode)
    require_room("images", f"{len(paths)} pictures in {folder}", COPIES * numbers)
    pixels = np.stack([_decoded(path, mode, size) for path in paths])
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


def _check_alike(paths: list[Path]) -> tuple[str, tuple[int, int]]:
    """The mode to decode in, and (width, height) of a picture; another size, or more than 8 bits, is refused."""
    found = [_facts(path) for path in paths]
    usual = Counter(size for size, _ in found).most_common(1)[0][0]
    for path, (size, mode) in zip(paths, found, strict=True):
        _check_size(path, size, usual)
        if mode not in GREY + COLOUR:
            raise InputError(f"{path}: must have 8 bits for each value, grey or RGB, got mode {mode!r}")
    mode = "L" if all(mode in GREY for _, mode in found) else "RGB"
    return mode, usual


def _check_size(path: Path, size: tuple[int, int], usual: tuple[int, int]) -> None:
    if size != usual:
        raise InputError(
            f"{path}: all pictures must have one size, {usual[1]} × {usual[0]} (height × width) like most in "
            f"this folder, got {size[1]} × {size[0]}; crop or resize it, or move it away"
        )


def _facts(path: Path) -> tuple[tuple[int, int], str]:
    """(width, height) when it is upright, and mode, from the header alone; that of a grey palette is `L`."""
    try:
        with Image.open(path) as picture:
            exif, (width, height) = Image.Image.getexif(picture), picture.size  # PNG's own would decode it
            size = (height, width) if exif.get(ExifTags.Base.Orientation) in SIDEWAYS else (width, height)
            return size, "L" if picture.mode == "P" and _is_grey(picture) else picture.mode
    except Image.DecompressionBombError as error:
        raise InputError(f"{path}: claims more pixels than a picture has ({error})") from error
    except BROKEN as error:
        raise InputError(f"{path}: is not a readable picture ({error})") from error


def _is_grey(picture: Image.Image) -> bool:
    colours = np.asarray(picture.convert("RGB"))
    return bool((colours == colours[..., :1]).all())


def hidden_pixels(picture: Image.Image) -> int:
    """How many of its pixels are not opaque."""
    if picture.mode not in ("LA", "RGBA") and "transparency" not in picture.info:
        return 0
    return int((np.asarray(picture.convert("RGBA"))[..., 3] < 255).sum())


def _decoded(path: Path, mode: str, size: tuple[int, int]) -> np.ndarray:
    hidden = 0
    try:
        with Image.open(path) as opened:
            picture = ImageOps.exif_transpose(opened)
            values = np.asarray(picture.convert(mode))
            hidden = hidden_pixels(picture)
    except BROKEN as error:
        raise InputError(f"{path}: is a damaged picture ({error}); get it again") from error
    _check_size(path, picture.size, size)
    if hidden:
        raise InputError(
            f"{path}: must be opaque, got {hidden} transparent pixels, whose colour nobody sees; put it on a "
            "background, and save it without alpha"
        )
    return values[..., None] if mode == "L" else values
