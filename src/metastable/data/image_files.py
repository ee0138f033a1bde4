"""Files of known image sets: where they are, whether they are the right ones, and what is in them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..core.errors import InputError, require
from . import cifar
from .folders import read_folder
from .idx import content, read_idx

FOLDER_VARIABLE = "METASTABLE_DATA"

DEFAULT_FOLDER = Path("~/.cache/metastable")

PICTURES = "images"
"""The name under which a folder of pictures is read."""


@dataclass(frozen=True)
class ImageSet:
    """What is known about a published set before any file of it is opened.

    Attributes:
        name: as in `--data NAME:FOLDER`.
        event_shape: channels, height, width.
        classes: their names, by label.
        page: where the publisher offers the files.
        folders: where, under a data folder, the files may lie.
        files: the names of the files of each split.
        md5: of each file's unpacked content.
    """

    name: str
    event_shape: tuple[int, int, int]
    classes: tuple[str, ...]
    page: str
    folders: tuple[str, ...]
    files: dict[str, tuple[str, ...]]
    md5: dict[str, str]


_IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}

IMAGE_SETS = {
    image_set.name: image_set
    for image_set in (
        ImageSet(
            "mnist",
            (1, 28, 28),
            tuple("0123456789"),
            "http://yann.lecun.com/exdb/mnist/",
            ("mnist", "MNIST/raw", "MNIST"),
            _IDX_FILES,
            {
                "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
                "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
                "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
                "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
            },
        ),
        ImageSet(
            "fashion-mnist",
            (1, 28, 28),
            (
                *("t-shirt", "trouser", "pullover", "dress", "coat"),
                *("sandal", "shirt", "sneaker", "bag", "ankle-boot"),
            ),
            "https://github.com/zalandoresearch/fashion-mnist",
            ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
            _IDX_FILES,
            {
                "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
                "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
                "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
            },
        ),
        ImageSet(
            "cifar10",
            cifar.SHAPE,
            ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            "https://www.cs.toronto.edu/~kriz/cifar.html",
            (cifar.FOLDER, f"cifar10/{cifar.FOLDER}", "cifar10"),
            {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)},
            {
                "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
                "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
                cifar.ARCHIVE: "c32a1d4ab5d03f1284b67883e8d87530",  # of the archive itself, as on its page
            },
        ),
    )
}
"""Every image set by name."""


def data_folder() -> Path:
    """The folder of data sets: `METASTABLE_DATA` where it is set, else `~/.cache/metastable`."""
    return Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER).expanduser()


def home_of_set(source: ImageSet, folder: str | Path | None, split: str) -> Path:
    """The folder that holds files of the split; complaints name it with all that it should hold."""
    root = data_folder() if folder is None else Path(folder).expanduser()
    if root.is_file():
        raise InputError(f"{source.name}: give the folder of {root}, not a file")
    for home in (*(root / below for below in source.folders), root):
        found = [name for name in source.files[split] if find_file(home, name)]
        if len(found) == len(source.files[split]) or _archive(source, home):
            return home
        if found:
            missing = [name for name in source.files[split] if name not in found]
            raise InputError(
                f"{source.name}: {home} holds {', '.join(found)}, but {_missing(source, missing)}"
            )
    what = _missing(source, source.files[split])
    here = "" if root.is_dir() else ", which does not exist"
    raise InputError(f"{source.name}: in {root}{here}, {what}")


def _missing(source: ImageSet, names: Sequence[str]) -> str:
    packed = f"or {cifar.ARCHIVE}" if source.name == "cifar10" else "plain or .gz"
    return (
        f"these files are missing: {', '.join(names)} ({packed}). Nothing is downloaded: get them from "
        f"{source.page} and name their folder, {source.name}:FOLDER, or put them in "
        f"{data_folder() / source.folders[0]} (the environment variable {FOLDER_VARIABLE} moves it)"
    )


def find_file(home: Path, name: str) -> Path | None:
    """A file by its name, or as others have renamed or packed it; plain files first, for they can be mapped."""
    dotted = name.replace("-idx", ".idx")
    for candidate in (name, dotted, f"{name}.gz", f"{dotted}.gz"):
        if (home / candidate).is_file():
            return home / candidate
    return None


def path_of(home: Path, name: str) -> Path:
    """The file of that name; an error where there is none."""
    path = find_file(home, name)
    if path is None:
        raise InputError(f"{home / name}: no such file")
    return path


def _archive(source: ImageSet, home: Path) -> Path | None:
    path = home / cifar.ARCHIVE
    return path if source.name == "cifar10" and path.is_file() else None


def read_pictures(folder: str | Path | None) -> tuple[ImageSet, tuple[np.ndarray, ...], Tensor]:
    """A folder of pictures as an image set, with its pixels and labels."""
    if folder is None:
        raise InputError("images: give the folder of the pictures, images:FOLDER")
    pixels, labels, classes = read_folder(Path(folder).expanduser())
    _, channels, height, width = pixels.shape
    source = ImageSet(PICTURES, (channels, height, width), classes, "", (), {}, {})
    return source, (pixels,), torch.from_numpy(labels)


def check_size(source: ImageSet, size: int | None) -> None:
    """Refuse a side that the pictures cannot be brought to."""
    _, height, width = source.event_shape
    if size is None:
        return
    rule = f"left out for pictures of {height} × {width}: they are not square"
    require(height == width, "size", rule, size)
    ok = isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= width
    require(ok, "size", f"an integer from 1 to {width}, the side of a picture in {source.name}", size)


def read_idx_set(
    source: ImageSet, home: Path, split: str, verify: bool
) -> tuple[tuple[np.ndarray, ...], Tensor]:
    """Pixels and labels of a split in idx-ubyte files."""
    paths = [path_of(home, name) for name in source.files[split]]
    _refuse_other_set(source, paths[1])
    if verify:
        for path, name in zip(paths, source.files[split], strict=True):
            _check_md5(source, path, name, content(path))
    pixels, labels = map(read_idx, paths)
    _check_pixels(paths[0], pixels, source.event_shape[1:])
    if labels.dtype != np.uint8 or labels.shape != (len(pixels),):
        raise InputError(
            f"{paths[1]}: must hold {len(pixels)} labels of type uint8, as many as the pictures in "
            f"{paths[0].name}, got {labels.dtype} of shape {labels.shape}"
        )
    return (pixels[:, None],), _checked_labels(source, paths[1], labels)


def read_cifar_set(
    source: ImageSet, home: Path, split: str, verify: bool
) -> tuple[tuple[np.ndarray, ...], Tensor]:
    """Pixels and labels of a split of CIFAR-10 in its binary batches."""
    names = source.files[split]
    paths = [path for path in (find_file(home, name) for name in names) if path]
    if len(paths) == len(names):
        if verify:
            for path in paths:
                _check_md5(source, path, path.name, path.read_bytes())
        read = [cifar.read_records(path) for path in paths]
    else:
        archive = home / cifar.ARCHIVE
        if verify:
            _check_md5(source, archive, cifar.ARCHIVE, archive.read_bytes())
        read, paths = cifar.read_archive(archive, names), [archive / name for name in names]
    labels = [_checked_labels(source, path, found) for path, (_, found) in zip(paths, read, strict=True)]
    return tuple(pixels for pixels, _ in read), torch.cat(labels)


def _check_pixels(path: Path, pixels: np.ndarray, side: tuple[int, ...]) -> None:
    if pixels.dtype != np.uint8 or pixels.shape[1:] != side:
        raise InputError(
            f"{path}: must hold uint8 pictures of {side[0]} × {side[1]}, got {pixels.dtype} of shape "
            f"{pixels.shape}"
        )


def _checked_labels(source: ImageSet, path: Path, labels: np.ndarray) -> Tensor:
    last = len(source.classes) - 1
    bad = np.flatnonzero(labels > last)
    if len(bad):
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise InputError(
            f"{path}: labels must be from 0 to {last}, got {labels[bad[0]]} in record {bad[0]} (counting from 0)"
            f"{more}; the file is damaged or of another set"
        )
    return torch.from_numpy(labels.astype(np.int64))


def _check_md5(source: ImageSet, path: Path, name: str, raw: bytes) -> None:
    found = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if found != source.md5[name]:
        raise InputError(
            f"{path}: is not the publisher's {name} of {source.name}: its content must have MD5 "
            f"{source.md5[name]}, got {found}; get it again from {source.page}, or leave verify "
            "out to use it as it is"
        )


def _refuse_other_set(source: ImageSet, path: Path) -> None:
    """MNIST and Fashion-MNIST have files of the same names and shapes; the labels tell them apart at no cost."""
    found = hashlib.md5(content(path), usedforsecurity=False).hexdigest()
    for other in IMAGE_SETS.values():
        if other is not source and found in other.md5.values():
            raise InputError(
                f"{path}: is a file of {other.name}, not of {source.name}; give {other.name}:FOLDER"
            )
