"""MNIST, Fashion-MNIST and CIFAR-10 from the publishers' own files, and folders of pictures.

Nothing is ever downloaded. The files hold one byte for each value, and so does `Images`: plain files are
memory-mapped, and bytes become floating numbers on [−1, 1], by x = byte/127.5 − 1, only for the rows that are
asked for.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError, InputError, nearest, require, require_choice, require_count
from ..core.random import derive, generator
from . import cifar
from .folders import read_folder
from .idx import content, read_idx

FOLDER_VARIABLE = "METASTABLE_DATA"
DEFAULT_FOLDER = Path("~/.cache/metastable")
SPLITS = ("train", "test")
PICTURES = "images"
"""The name under which a folder of pictures is read."""
BLOCK = 4096
"""Rows that are converted at once, which bounds the memory beyond the result."""


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


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled pictures as their files hold them, a byte for each value.

    `images[rows]` are those rows as floating numbers on [−1, 1]; nothing else is converted or, where the files
    are plain ones, even read. A whole set as floats takes four times the room of its bytes: use this class where
    that is too much, `load_images` where it is not.

    Attributes:
        source: the published set.
        parts: the pixels of each file, uint8 `(n_k, C, H, W)`; memory maps where the files are not compressed.
        rows: which rows of all parts together, in this order, `(n,)`.
        labels: of those rows, int64 `(n,)`.
        size: side to which rows are shrunk when they are read; None leaves them.
    """

    source: ImageSet
    parts: tuple[np.ndarray, ...]
    rows: Tensor
    labels: Tensor
    size: int | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def event_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a row as it is read."""
        channels, height, width = self.source.event_shape
        return (channels, self.size or height, self.size or width)

    def __getitem__(self, index: int | slice | Tensor) -> Tensor:
        """float32 `(b, C, H, W)` for a slice or a tensor of row numbers, `(C, H, W)` for one."""
        if isinstance(index, int):
            # Not through a slice: −1 and numbers out of range mean what they mean for a tensor.
            return self._read(self.rows[index][None])[0]
        return self._read(self.rows[index.cpu() if isinstance(index, Tensor) else index])

    def tensor(self) -> Tensor:
        """All rows, float32 `(n, C, H, W)`, converted block by block."""
        x = torch.empty((len(self), *self.event_shape))
        for start in range(0, len(self), BLOCK):
            x[start : start + BLOCK] = self[start : start + BLOCK]
        return x

    def batches(
        self, size: int, *, seed: int | None = None, noise: float = 0.0, epoch: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass over the rows as (x, labels), `size` rows at a time; the last batch may be smaller.

        Args:
            size: rows in a batch.
            seed: of the order of the rows and of the noise; None keeps the order, and is seed 0 for the noise.
            noise: standard deviation of normal noise on every row.
            epoch: which pass this is: each has its own order and its own noise, the same ones whenever it is made.
        """
        require_count("size", size)
        require_count("epoch", epoch, 0)
        require(0 <= noise < float("inf"), "noise", "a finite number of at least 0", noise)
        rng = generator(derive(seed or 0, "batches", epoch))
        order = torch.arange(len(self)) if seed is None else torch.randperm(len(self), generator=rng)
        for rows in order.split(size):
            x = self[rows]
            yield (x + noise * torch.randn(x.shape, generator=rng) if noise else x), self.labels[rows]

    def choose(
        self,
        classes: Sequence[int | str] | None = None,
        n: int | None = None,
        counts: Sequence[int] | None = None,
        seed: int = 0,
    ) -> Images:
        """Some of the rows, in the order of the files.

        Args:
            classes: labels or names to keep; None keeps all.
            n: how many rows, drawn without replacement; None keeps all.
            counts: how many rows of each of `classes`, drawn likewise.
            seed: of the draw.
        """
        require(n is None or counts is None, "counts", "left out where n is given", counts)
        wanted = _class_numbers(self.source, classes)
        if counts is None:
            kept = torch.arange(len(self))
            if classes is not None:
                kept = torch.isin(self.labels, torch.tensor(wanted)).nonzero()[:, 0]
            return self._kept(_drawn(kept, n, derive(seed, "rows"), "n"))
        require(len(counts) == len(wanted), "counts", f"one number for each of {len(wanted)} classes", counts)
        each = [
            _drawn(
                (self.labels == label).nonzero()[:, 0],
                count,
                derive(seed, "rows", label),
                f"counts (class {self.source.classes[label]})",
            )
            for label, count in zip(wanted, counts, strict=True)
        ]
        return self._kept(torch.cat(each))

    def _kept(self, index: Tensor) -> Images:
        index = index.sort().values
        return replace(self, rows=self.rows[index], labels=self.labels[index])

    def _read(self, rows: Tensor) -> Tensor:
        raw = torch.from_numpy(self._bytes(rows.numpy())).float()
        if self.size is not None and self.size != raw.shape[-1]:
            raw = torch.nn.functional.interpolate(raw, size=(self.size, self.size), mode="area")
        return raw.div_(127.5).sub_(1)

    def _bytes(self, rows: np.ndarray) -> np.ndarray:
        """The rows, gathered from the files that hold them."""
        found = np.empty((len(rows), *self.source.event_shape), np.uint8)
        first = 0
        for part in self.parts:
            here = (rows >= first) & (rows < first + len(part))
            found[here] = part[rows[here] - first]
            first += len(part)
        return found


def open_images(
    name: str,
    folder: str | Path | None = None,
    split: str = "train",
    *,
    size: int | None = None,
    verify: bool = False,
) -> Images:
    """A published set from its files, memory-mapped where they are not compressed.

    Args:
        name: `mnist`, `fashion-mnist` or `cifar10`; `images` for a folder of pictures, which are read at once.
        folder: where the files are, or a folder that holds that folder; by default the one in the environment
            variable `METASTABLE_DATA`, or else `~/.cache/metastable`.
        split: `train` or `test`, of a published set.
        size: side to which the pictures are shrunk, by averaging areas.
        verify: compare every file with its published checksum. Lengths and labels are checked in any case.
    """
    require_choice("name", name, (*IMAGE_SETS, PICTURES))
    require_choice("split", split, SPLITS)
    if name == PICTURES:
        require(split == "train", "split", "left out for a folder of pictures", split)
        require(not verify, "verify", "left out for a folder of pictures, which has no checksums", verify)
        source, pixels, labels = _read_pictures(folder)
    else:
        source = IMAGE_SETS[name]
        read = _read_cifar if name == "cifar10" else _read_idx
        pixels, labels = read(source, _home(source, folder, split), split, verify)
    _check_size(source, size)
    return Images(source, pixels, torch.arange(len(labels)), labels, size)


def image_source(text: str) -> str | None:
    """The name of the image set that `text` means, as in `mnist`, `mnist:FOLDER` or `mnist?n=100`; else None.

    >>> image_source("mnist:data?classes=2,3"), image_source("mnist.npy")
    ('mnist', None)
    """
    head, colon, _ = text.partition("?")[0].partition(":")
    return head if head in IMAGE_SETS or (head == PICTURES and colon) else None


def parse_images(text: str) -> dict[str, Any]:
    """The arguments of `load_images` in `NAME[:FOLDER][?key=value&…]`.

    >>> parse_images("mnist:data?classes=2,3&n=100")
    {'name': 'mnist', 'folder': 'data', 'classes': ['2', '3'], 'n': 100}
    """
    place, _, query = text.partition("?")
    name, _, folder = place.partition(":")
    given: dict[str, Any] = {"name": name, "folder": folder or None}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in _PARSERS:
            raise InputError(f"{text}: unknown setting {key!r}{nearest(key, _PARSERS)}")
        try:
            given[key] = _PARSERS[key](value)
        except ValueError:
            raise InputError(f"{text}: {key} must be {_RULES[key]}, got {value!r}") from None
    return given


def _flag(text: str) -> bool:
    if text not in ("0", "1", "false", "true"):
        raise ValueError(text)
    return text in ("1", "true")


_PARSERS = {
    "split": str,
    "classes": lambda text: [word.strip() for word in text.split(",")],
    "counts": lambda text: [int(word) for word in text.split(",")],
    "n": int,
    "seed": int,
    "noise": float,
    "size": int,
    "verify": _flag,
}
_RULES = {
    "counts": "integers with commas between them",
    "n": "an integer",
    "seed": "an integer",
    "noise": "a number",
    "size": "an integer",
    "verify": "1 or 0",
}


# ---- finding the files


def data_folder() -> Path:
    """The folder of data sets: `METASTABLE_DATA` where it is set, else `~/.cache/metastable`."""
    return Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER).expanduser()


def _home(source: ImageSet, folder: str | Path | None, split: str) -> Path:
    """The folder that holds files of the split; complaints name it with all that it should hold."""
    root = data_folder() if folder is None else Path(folder).expanduser()
    if root.is_file():
        raise InputError(f"{source.name}: give the folder of {root}, not a file")
    for home in (*(root / below for below in source.folders), root):
        found = [name for name in source.files[split] if _find(home, name)]
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


def _find(home: Path, name: str) -> Path | None:
    """A file by its name, or as others have renamed or packed it; plain files first, for they can be mapped."""
    dotted = name.replace("-idx", ".idx")
    for candidate in (name, dotted, f"{name}.gz", f"{dotted}.gz"):
        if (home / candidate).is_file():
            return home / candidate
    return None


def _path(home: Path, name: str) -> Path:
    path = _find(home, name)
    if path is None:
        raise InputError(f"{home / name}: no such file")
    return path


def _archive(source: ImageSet, home: Path) -> Path | None:
    path = home / cifar.ARCHIVE
    return path if source.name == "cifar10" and path.is_file() else None


# ---- reading them


def _read_pictures(folder: str | Path | None) -> tuple[ImageSet, tuple[np.ndarray, ...], Tensor]:
    if folder is None:
        raise InputError("images: give the folder of the pictures, images:FOLDER")
    pixels, labels, classes = read_folder(Path(folder).expanduser())
    _, channels, height, width = pixels.shape
    source = ImageSet(PICTURES, (channels, height, width), classes, "", (), {}, {})
    return source, (pixels,), torch.from_numpy(labels)


def _check_size(source: ImageSet, size: int | None) -> None:
    _, height, width = source.event_shape
    if size is None:
        return
    require(
        height == width, "size", f"left out for pictures of {height} × {width}: they are not square", size
    )
    ok = isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= width
    require(ok, "size", f"an integer from 1 to {width}, the side of a picture in {source.name}", size)


def _read_idx(
    source: ImageSet, home: Path, split: str, verify: bool
) -> tuple[tuple[np.ndarray, ...], Tensor]:
    paths = [_path(home, name) for name in source.files[split]]
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


def _read_cifar(
    source: ImageSet, home: Path, split: str, verify: bool
) -> tuple[tuple[np.ndarray, ...], Tensor]:
    names = source.files[split]
    paths = [path for path in (_find(home, name) for name in names) if path]
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


# ---- choosing rows


def _class_numbers(source: ImageSet, classes: Sequence[int | str] | None) -> list[int]:
    if classes is None:
        return list(range(len(source.classes)))
    require(
        not isinstance(classes, str) and len(classes) > 0, "classes", "a list of labels or names", classes
    )
    numbers = [_class_number(source, given) for given in classes]
    require(len(set(numbers)) == len(numbers), "classes", "all different", list(classes))
    return numbers


def _class_number(source: ImageSet, given: int | str) -> int:
    if isinstance(given, str) and given in source.classes:
        return source.classes.index(given)
    number = int(given) if str(given).isdigit() else -1
    if not 0 <= number < len(source.classes):
        last = len(source.classes) - 1
        raise ConfigError(
            "classes",
            f"must be labels from 0 to {last} or names of {source.name}, got {given!r}"
            f"{nearest(str(given), source.classes)}",
        )
    return number


def _drawn(rows: Tensor, n: int | None, seed: int, field: str) -> Tensor:
    if n is None:
        return rows
    ok = isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= len(rows)
    require(ok, field, f"an integer from 1 to {len(rows)}, the rows there are", n)
    return rows[torch.randperm(len(rows), generator=generator(seed))[:n]]
