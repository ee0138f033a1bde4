"""Rows from memory, files, toy sets or image sets: what gets through is finite, floating, `(n, *event)`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torch
from torch import Tensor

from ..core.batch import as_batch
from ..core.errors import MOST, InputError, nearest, require, require_moderate
from ..core.parts import NUMBERS
from ..core.pixels import Frames
from ..core.random import derive, generator
from ..core.room import require_room
from .checks import check_data, check_given, check_labels, check_shape
from .conditional_toy import CONDITIONAL_TOY_SETS, ConditionalToySet
from .files import read_arrays
from .images import BLOCK, image_source, open_images, parse_images
from .toy import TOY_SETS, ToySet

KNOWN_TOYS: dict[str, ToySet | ConditionalToySet] = {**TOY_SETS, **CONDITIONAL_TOY_SETS}
TOY_COPIES = 24
"""Bytes for each number of a toy set while it is drawn."""
FARTHEST_DRAW = 10.0
"""Standard deviations that no draw of normal noise reaches."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Rows to learn from.

    Attributes:
        x: the rows, `(n, *event)`, finite.
        name: where they came from, for people.
        digest: sixteen hexadecimal digits of the sha256 of dtype, shape and bytes of `x`, the labels and contexts.
        toy: the toy set they were drawn from, where they were.
        labels: the class of each row where it is known, int64 `(n,)`.
        classes: names of the classes by label, where they have names.
        given: the context of each row where events are learned given one, `(n, *context)`.
        unlabelled: why an array of labels that lay beside the rows was not taken, where there was one.
        columns: names of the columns of a table, where it has a header.
        groups: of rows that belong together, such as those of one episode, int64 `(n,)`: `split` keeps them so.
    """

    x: Tensor
    name: str
    digest: str
    toy: ToySet | None = None
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()
    given: Tensor | None = None
    unlabelled: str = ""
    columns: tuple[str, ...] = ()
    groups: Tensor | None = None

    @classmethod
    def of(
        cls,
        x: Tensor,
        name: str,
        toy: ToySet | None = None,
        *,
        labels: Any = None,
        classes: Sequence[str] = (),
        given: Any = None,
        unlabelled: str = "",
        columns: Sequence[str] = (),
        groups: Any = None,
    ) -> Dataset:
        """A dataset of rows that are known to be good, with its digest; the labels are checked.

        >>> data = Dataset.of(torch.zeros(3, 2), "mine", labels=[0, 1, 1], classes=("cat", "dog"))
        >>> data.labels
        tensor([0, 1, 1])
        """
        if labels is not None:
            labels = check_labels(labels, len(x), len(classes) or None).to(x.device)
        if given is not None:
            kind = None if x.dtype == torch.float32 else x.dtype
            given = check_given(given, len(x), dtype=kind).to(x.device)
        if groups is not None:
            groups = check_labels(groups, len(x), name="groups").to(x.device)
        digest = _digest(x, labels, given)
        return cls(x, name, digest, toy, labels, tuple(classes), given, unlabelled, tuple(columns), groups)

    def beside(self, *, labels: Any = None, given: Any = None) -> Dataset:
        """The same rows with these labels or contexts beside them."""
        labels = self.labels if labels is None else labels
        return self._with(self.x, self.name, labels, self.given if given is None else given, self.groups)

    def numbered(self, classes: Sequence[str], field: str = "data") -> Dataset:
        """The same rows with labels that are places in `classes`; as they are where either has no names of classes.

        A class that some row has and `classes` does not is refused by its name.
        """
        if self.labels is None or not classes or self.classes in ((), tuple(classes)):
            return self
        used = [self.classes[label] for label in self.labels.unique().tolist()]
        if unknown := [name for name in used if name not in classes]:
            raise InputError(f"{field}: classes must be among {', '.join(classes)}, got {', '.join(unknown)}")
        places = [classes.index(name) if name in classes else -1 for name in self.classes]
        labels = torch.tensor(places, device=self.labels.device)[self.labels]
        return replace(self, classes=tuple(classes)).beside(labels=labels)

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return tuple(self.x.shape[1:])

    def __len__(self) -> int:
        return self.x.shape[0]

    def __str__(self) -> str:
        return f"{self.name.removesuffix(':')}: {len(self)} rows of shape {self.event_shape}, sha256 {self.digest}"

    def split(self, fraction: float = 0.1, seed: int = 0) -> tuple[Dataset, Dataset]:
        """(train, held_out): `fraction` of the rows, chosen by `seed`, is held out.

        Both parts have at least one row and no row is in both; groups, where there are some, stay whole.

        >>> train, held_out = load_array("toy:two-modes?n=50").split(0.2, seed=0)
        >>> len(train), len(held_out)
        (40, 10)
        """
        require(0 < fraction < 1, "fraction", "a number between 0 and 1 (the share held out)", fraction)
        groups = None if self.groups is None else self.groups.unique()
        parts = len(self) if groups is None else len(groups)
        require(groups is None or parts > 1, "groups", "at least 2, so that one can be held out", parts)
        held = min(max(round(fraction * parts), 1), parts - 1)
        rng = generator(derive(seed, "split"))
        rows = torch.randperm(parts, generator=rng).to(self.x.device)
        if self.groups is not None and groups is not None:
            held_out = torch.isin(self.groups, groups[rows[:held]])
            return self._part(~held_out, "train"), self._part(held_out, "held out")
        return self._part(rows[held:], "train"), self._part(rows[:held], "held out")

    def _part(self, rows: Tensor, what: str) -> Dataset:
        beside = (self.labels, self.given, self.groups)
        labels, given, groups = (
            None if x is None else x.taken(rows) if isinstance(x, Frames) else x[rows] for x in beside
        )
        return self._with(self.x[rows], f"{self.name} ({what})", labels, given, groups)

    def _with(self, x: Tensor, name: str, labels: Any, given: Any, groups: Any) -> Dataset:
        kept: dict[str, Any] = {name: vars(self)[name] for name in ("classes", "unlabelled", "columns")}
        return Dataset.of(x, name, self.toy, labels=labels, given=given, groups=groups, **kept)


def load_array(
    source: str | Path | np.ndarray | Tensor, *, dtype: torch.dtype | None = None, least: int = 2
) -> Dataset:
    """Read and check rows from memory, a file or a toy set.

    Args:
        source: an array or tensor; `toy:NAME`, `toy:NAME?n=5000`, `toy:NAME?n=5000&seed=1` or
            `toy:NAME?noise=0.1`, which adds normal noise of that standard deviation (`toy:pinwheel-given` and
            `toy:spiral-given` come with a context for each row); `mnist:FOLDER`, `fashion-mnist:FOLDER` or
            `cifar10:FOLDER` with settings of `load_images` as in `mnist:FOLDER?split=test&classes=2,3,6&n=5000`;
            `images:FOLDER`, a folder of pictures; or the path of a `.npy`, `.npz` (one array, or one named `x` or
            `data`; the class or the context of each row may lie beside it, named `labels` or `given`), `.csv` or
            `.tsv` file, with or without a header. Pickled files are refused: reading one runs whatever code is in
            it.
        dtype: floating dtype of the rows; by default float64 for what comes with more digits than float32 holds,
            such as the seconds of a date, and float32 for everything else.
        least: rows that there must be in an array, a file or a folder: two to learn from, one to score.

    Example:
        >>> print(load_array("toy:eight-gaussians?n=100").event_shape)
        (2,)
        >>> print(load_array(np.arange(6).reshape(3, 2)).x.dtype)
        torch.float32
        >>> print(load_array(np.array([1700000000, 1700000001])).x.dtype)
        torch.float64
    """
    if not isinstance(source, (str, Path)):
        return Dataset.of(check_data(source, dtype=dtype, least=least), "array")
    narrow = torch.float32 if dtype is None else dtype
    if str(source).startswith("toy:"):
        return _load_toy(str(source), narrow)
    if image_source(str(source)):
        return load_images(**parse_images(str(source)), dtype=narrow, least=least)
    path = Path(source).expanduser()
    arrays = read_arrays(path)
    x = check_data(arrays.pop("x"), path.name, dtype=dtype, least=least, columns=arrays.get("columns", ()))
    try:
        return Dataset.of(x, path.name, **arrays)  # pyright: ignore
    except InputError as error:
        raise InputError(f"{path.name}: {error}") from error


def load_images(
    name: str,
    folder: str | Path | None = None,
    split: str = "train",
    classes: Sequence[int | str] | None = None,
    *,
    n: int | None = None,
    counts: Sequence[int] | None = None,
    size: int | None = None,
    noise: float = 0.0,
    seed: int = 0,
    verify: bool = False,
    dtype: torch.dtype = torch.float32,
    least: int = 2,
) -> Dataset:
    """MNIST, Fashion-MNIST, CIFAR-10 or a folder of pictures, on [−1, 1], with labels; nothing is downloaded.

    The rows are `(n, 1, 28, 28)` or `(n, 3, 32, 32)`, x = byte/127.5 − 1. Labels stay the publisher's, also when
    some classes are left out. In float32 all of MNIST takes 188 MB and all of CIFAR-10 614 MB; `open_images` reads
    rows as they are needed instead.

    Args:
        name: `mnist`, `fashion-mnist` or `cifar10`; `images` for a folder of pictures of one size, whose classes
            are the folders they are in.
        folder: where the files are, or a folder that holds that folder; by default the one in the environment
            variable `METASTABLE_DATA`, or else `~/.cache/metastable`.
        split: `train` or `test`, of a published set.
        classes: labels, or names such as `cat`, to keep; None keeps all.
        n: how many rows, drawn without replacement.
        counts: how many rows of each of `classes`, drawn without replacement, instead of `n`.
        size: side to which the pictures are shrunk, by averaging areas.
        noise: standard deviation of normal noise, drawn once: pixels of few values have no density without it.
        seed: of the rows that are drawn and of the noise.
        verify: compare every file with its publisher's checksum; lengths and labels are always checked.
        dtype: floating dtype of the rows.
        least: pictures that there must be.
    """
    require(dtype.is_floating_point, "dtype", "a floating dtype such as torch.float32", dtype)
    is_number = isinstance(noise, (int, float)) and not isinstance(noise, bool)
    require(is_number and 0 <= noise < math.inf, "noise", "a finite number of at least 0", noise)
    require_moderate("noise", noise, _most_noise(dtype))
    images = open_images(name, folder, split, size=size, verify=verify).choose(classes, n, counts, seed)
    x = images.tensor()
    check_shape(x, name, least)
    if noise:
        rng = generator(derive(seed, "noise"))
        for block in x.split(BLOCK):
            block.add_(torch.randn(block.shape, generator=rng), alpha=noise)
    classes = images.source.classes
    return Dataset.of(x.to(dtype), name, labels=images.labels if classes else None, classes=classes)


def _digest(x: Tensor, *beside: Tensor | None) -> str:
    found = hashlib.sha256()
    for values in (x, *(b for b in beside if b is not None)):
        found.update(f"{values.dtype} {tuple(values.shape)} ".encode())
        # The buffer itself, not a copy: images can fill half of the memory.
        parts = values.split(max(1, NUMBERS // values.shape[1])) if isinstance(values, Frames) else (values,)
        for part in parts:
            rows = part.plain() if isinstance(part, Frames) else part
            found.update(rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def same_toy(source: str, other: str) -> bool:
    """Whether two names are one toy set's, drawn with one seed and the same noise, however many rows they ask for.

    Example:
        >>> same_toy("two-modes", "toy:two-modes?n=100"), same_toy("toy:two-modes", "toy:two-modes?seed=1")
        (True, False)
    """
    (name, asked), (other_name, other_asked) = _parse_toy(source), _parse_toy(other)
    if name not in KNOWN_TOYS or name != other_name or asked["seed"] != other_asked["seed"]:
        return False
    return source == other or "noise" not in asked | other_asked  # which is drawn by the whole name


def full_name(source: str) -> str:
    """By which rows are found again: toy sets without settings were once kept without `toy:`.

    >>> full_name("two-modes"), full_name("rows.npy")
    ('toy:two-modes', 'rows.npy')
    """
    return f"toy:{source}" if source in KNOWN_TOYS else source


def _parse_toy(source: str) -> tuple[str, dict[str, str]]:
    """The name and the settings in `toy:NAME?n=5000&seed=1`, with or without `toy:`; the seed is 0 by default."""
    name, _, query = source.removeprefix("toy:").partition("?")
    return name, {"seed": "0", **dict(parse_qsl(query, keep_blank_values=True))}


def _load_toy(source: str, dtype: torch.dtype) -> Dataset:
    name, settings = _parse_toy(source)
    if name not in KNOWN_TOYS:
        raise InputError(f"toy set: unknown name {name!r}{nearest(name, KNOWN_TOYS)}")
    for key in settings.keys() - {"n", "seed", "noise"}:
        raise InputError(f"{source}: unknown setting {key!r}{nearest(key, ['n', 'seed', 'noise'])}")
    toy = KNOWN_TOYS[name]
    n = _whole(source, "n", settings.get("n", str(toy.default_rows)))
    require_room(source, n, TOY_COPIES * n * math.prod(toy.event_shape))
    seed = _whole(source, "seed", settings["seed"])
    drawn = as_batch(toy.sample(n, seed))
    labels = toy.labels(n, seed) if isinstance(toy, ToySet) else None
    rows = check_data(drawn.x, source, dtype=dtype)
    if "noise" not in settings:
        own = toy if isinstance(toy, ToySet) else None
        return Dataset.of(rows, source, own, labels=labels, given=drawn.given)
    return Dataset.of(_noisy(rows, settings["noise"], source), source, labels=labels, given=drawn.given)


def _noisy(x: Tensor, scale: str, source: str) -> Tensor:
    """Rows with normal noise, whose density is no longer the toy set's.

    Pixels that never change, or take a few values only, have no density; a little noise gives them one.
    """
    try:
        sd = float(scale)
    except ValueError:
        sd = math.nan
    require(0 < sd < math.inf, source, "given noise as a finite number above 0", scale)
    require_moderate(f"{source}: noise", sd, _most_noise(x.dtype))
    return x + sd * torch.randn(x.shape, generator=generator(derive(0, source)), dtype=x.dtype)


def _most_noise(dtype: torch.dtype) -> float:
    """Standard deviation of noise whose draws a dtype holds, and single precision can reckon with."""
    return min(MOST, torch.finfo(dtype).max / FARTHEST_DRAW)


def _whole(source: str, key: str, text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{source}: {key} must be an integer, got {text!r}") from None
