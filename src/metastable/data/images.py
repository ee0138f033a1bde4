"""MNIST, Fashion-MNIST and CIFAR-10 from the publishers' own files, and folders of pictures.

Nothing is ever downloaded. The files hold one byte for each value, and so does `Images`: plain files are
memory-mapped, and bytes become floating numbers on [−1, 1], by x = byte/127.5 − 1, only for the rows that are
asked for.
"""

from __future__ import annotations

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
from .image_files import (
    IMAGE_SETS,
    PICTURES,
    ImageSet,
    check_size,
    home_of_set,
    read_cifar_set,
    read_idx_set,
    read_pictures,
)

SPLITS = ("train", "test")
BLOCK = 4096
"""Rows that are converted at once, which bounds the memory beyond the result."""


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
        source, pixels, labels = read_pictures(folder)
    else:
        source = IMAGE_SETS[name]
        read = read_cifar_set if name == "cifar10" else read_idx_set
        pixels, labels = read(source, home_of_set(source, folder, split), split, verify)
    check_size(source, size)
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


# ---- choosing rows


def _class_numbers(source: ImageSet, classes: Sequence[int | str] | None) -> list[int]:
    if classes is None:
        return list(range(len(source.classes)))
    several = not isinstance(classes, str) and len(classes) > 0
    require(several, "classes", "a list of labels or names", classes)
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
