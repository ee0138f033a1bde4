"""Metrics: gathered on the device, read once per line, written as JSON lines and TensorBoard events."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from metastable.core import processes
from metastable.core.errors import InputError, need
from metastable.core.processes import Shared

Row = dict[str, float]


EXTREMES = {"_min": np.fmin, "_max": np.fmax}
"""Metrics with these endings are gathered as extremes of a line; what is not a number does not count in them."""


LINE_MEANS = frozenset({"ess", "ess_held_out", "pace", "resampled"})
"""Of what follows an update, these are averaged over a line; of the rest a line has the latest."""

CHUNK = 1024
"""Updates after which values of a long line become one tensor each."""


class Line(NamedTuple):
    """Metrics of one update, or of several, a row of float64 each, with their names in the columns' order.

    Attributes:
        names: what each is called, and whether a line has the latest of it only.
        values: `(updates, metrics)`.
    """

    names: tuple[tuple[str, bool], ...]
    values: Tensor

    @classmethod
    def of(cls, averaged: Mapping[str, Tensor], latest: Mapping[str, Tensor]) -> Line:
        """Metrics of one kind of number are joined before they are widened: fewer and smaller kernels."""
        all_ = [((name, False), value) for name, value in averaged.items()]
        all_ += [((name, True), value) for name, value in latest.items()]
        kinds = dict.fromkeys(value.dtype for _, value in all_)
        ordered = [[pair for pair in all_ if pair[1].dtype == kind] for kind in kinds]
        parts = [torch.stack([value.detach().reshape(()) for _, value in same]).double() for same in ordered]
        names = tuple(name for same in ordered for name, _ in same)
        return cls(names, torch.cat(parts)[None] if parts else torch.empty((1, 0), dtype=torch.float64))

    @classmethod
    def joined(cls, lines: Sequence[Line]) -> list[Line]:
        """Those of neighbours with the same names as one."""
        runs = [list(run) for _, run in itertools.groupby(lines, lambda line: line.names)]
        return [cls(run[0].names, torch.cat([line.values for line in run])) for run in runs]


class Gather:
    """Means (or extremes) over a line, and the latest of what is neither; no value is waited for.

    Values are only kept while updates run, and joined when the line is read: a handful of small operations for
    each metric of each update would cost more than many an update's own arithmetic.
    """

    def __init__(self) -> None:
        self.kept: dict[str, list[Tensor]] = {}
        self.latest: dict[str, Tensor] = {}
        self.lines: list[Line] = []
        self.shared: dict[str, list[Shared]] = {}
        self.count = 0

    def add(self, averaged: Mapping[str, Tensor | Shared], latest: Mapping[str, Tensor | Shared]) -> None:
        """One update's metrics; tensors that nothing changes afterwards."""
        self._join()
        for name, value in averaged.items():
            self.kept.setdefault(name, []).append(self._own(name, value).detach())
        for name in latest:
            self.shared.pop(name, None)
        self.latest = {name: self._own(name, value).detach() for name, value in latest.items()}
        self._counted()

    def _own(self, name: str, value: Tensor | Shared) -> Tensor:
        """What this process can say of it; the rest is read with the line."""
        if isinstance(value, Tensor):
            return value
        self.shared.setdefault(name, []).append(value)
        return value.plus

    def add_line(self, line: Line) -> None:
        """The same, of updates that left them in rows."""
        if self.lines and self.lines[-1].names != line.names:
            self._join()
        self.lines.append(line)
        self._counted(len(line.values))

    def _counted(self, updates: int = 1) -> None:
        self.count += updates
        if self.count % CHUNK < updates:
            self._join()
            self.kept = {name: [_line_of(values)] for name, values in self.kept.items()}

    def _join(self) -> None:
        """What was left in rows, by name; those that wait have the same names."""
        if not self.lines:
            return
        names, together = self.lines[0].names, torch.cat([line.values for line in self.lines])
        self.latest = {name: together[-1, i] for i, (name, last) in enumerate(names) if last}
        for i, (name, last) in enumerate(names):
            if not last:
                self.kept.setdefault(name, []).append(together[:, i])
        self.lines = []

    def read(self) -> Row:
        """All values, in one transfer from the device; starts the next line."""
        return self.asked()()

    def asked(self) -> Callable[[], Row]:
        """The same with all values on their way; nobody waits for them but the function that is returned."""
        if self.lines and not self.kept:  # rows need not be taken apart
            names, rows = self.lines[0].names, _fetched(torch.cat([line.values for line in self.lines]))
            self.clear()
            ordered = sorted(enumerate(names), key=lambda column: column[1][1])
            return lambda: {name: _joined(name, rows()[-last:, i].copy()) for i, (name, last) in ordered}
        self._join()
        kept = self.kept | {name: [value.reshape(())] for name, value in self.latest.items()}
        self.clear()
        if not kept:
            return dict
        everything = _fetched(_line_of([value for values in kept.values() for value in values]).double())
        ends = np.cumsum([sum(value.numel() for value in values) for values in kept.values()])
        return lambda: {
            name: _joined(name, line)
            for name, line in zip(kept, np.split(everything(), ends[:-1]), strict=True)
        }

    def clear(self) -> None:
        """Forget the line so far."""
        self.kept, self.latest, self.lines, self.shared, self.count = {}, {}, [], {}, 0

    def save(self) -> dict[str, Any]:
        """For a checkpoint."""
        self._join()
        kept = {name: _line_of(values) for name, values in self.kept.items()}
        return {"kept": kept, "latest": self.latest, "count": self.count}

    def load(self, tree: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.lines = []
        self.kept = {name: [values] for name, values in tree["kept"].items()}
        self.latest, self.count = dict(tree["latest"]), tree["count"]


def _line_of(values: list[Tensor]) -> Tensor:
    """What was kept, as one tensor; whole numbers as float64, since a float32 beside them would not hold them."""
    return torch.cat([(v if v.is_floating_point() else v.double()).reshape(-1) for v in values])


def _fetched(values: Tensor) -> Callable[[], np.ndarray]:
    """On their way to the host; the function waits until they are there."""
    if not values.is_cuda:
        return values.cpu().numpy
    here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    here.copy_(values, non_blocking=True)
    done = torch.cuda.current_stream(values.device).record_event()

    def read() -> np.ndarray:
        done.synchronize()
        return here.numpy()

    return read


def _joined(name: str, line: np.ndarray) -> float:
    join = EXTREMES.get(name[-4:])
    with np.errstate(all="ignore"):  # what diverges is the guard's to say
        return float(line.mean() if join is None else join.reduce(line))


def of_all(shared: Mapping[str, Sequence[Shared]], coming: Callable[[], Row]) -> Callable[[], Row]:
    """A line of all processes, on its way: means, or extremes, of what each of them found.

    What lies on all of them, one of `shared` in each update, is read when it is there.
    """
    if not processes.is_many():
        return coming
    row = coming()
    most = {name: max(processes.shares(kept[0].total)) for name, kept in shared.items()}
    owns = [torch.stack([_padded(one.own, most[name]) for one in kept]) for name, kept in shared.items()]
    numbers = torch.tensor(list(row.values()), dtype=torch.float64)
    every = processes.asked(torch.cat([numbers, *(own.flatten() for own in owns)]))

    def read() -> Row:
        found, *rest = every().split([len(row), *(own.numel() for own in owns)], 1)
        made = {name: _joined(name, found[:, i].numpy().copy()) for i, name in enumerate(row)}
        for (name, kept), own, values in zip(shared.items(), owns, rest, strict=True):
            sizes = processes.shares(kept[0].total)
            parts = [part.view_as(own)[:, :size] for part, size in zip(values, sizes, strict=True)]
            made[name] += float(kept[0].read(torch.cat(parts, 1)).mean())
        return made

    return read


def _padded(values: Tensor, n: int) -> Tensor:
    """As float64 on the host, with zeros up to n."""
    return torch.nn.functional.pad(values.detach().double().cpu(), (0, n - len(values)))


def read_jsonl(path: Path) -> list[Row]:
    """The rows of a metrics file; a last line cut short by a kill is left out, any other is refused by number."""
    rows, lines = [], path.read_bytes().splitlines()
    for i, line in enumerate(lines, 1):
        try:
            row = {k: math.nan if v is None else v for k, v in json.loads(line).items()}
            if not (all(math.isfinite(v) or v != v for v in row.values()) and row["step"] >= 0):
                raise ValueError("not a row of numbers")
            rows.append(row)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if i == len(lines):
                break
            raise InputError(f"{path}: line {i} is damaged ({error!r:.80}); remove the line") from error
    return rows


def line_of(row: Row) -> str:
    """A row of the metrics file. Values that are not finite become null, which JSON can say."""
    return json.dumps({k: (v if math.isfinite(v) else None) for k, v in row.items()}) + "\n"


class Recorder:
    """Keeps the history, and appends each row to `metrics.jsonl` and TensorBoard where there is a folder."""

    def __init__(self, folder: Path | None, tensorboard: bool = False):
        self.history: list[Row] = []
        self._sha = hashlib.sha256()
        self.path = None if folder is None else folder / "metrics.jsonl"
        self._board = None
        if tensorboard and folder is not None:
            need("tensorboard", "tensorboard", "trainer.tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, row: Row) -> None:
        """Append one row."""
        self.history.append(row)
        if self.path is not None:
            line = line_of(row)
            with self.path.open("a") as file:
                file.write(line)
            self._sha.update(line.encode())
        if self._board is not None:
            for name, value in row.items():
                if name != "step":
                    self._board.add_scalar(name, value, int(row["step"]))

    def rewind(self, step: int) -> None:
        """Forget everything after `step`, on disk too: a resumed run writes those rows again."""
        if self.path is not None and self.path.exists():
            self.history = read_jsonl(self.path)
        self.history = [row for row in self.history if row["step"] <= step]
        if self.path is not None:
            kept, self.history = self.history, []
            partial = self.path.with_suffix(".partial")
            text = "".join(map(line_of, kept))
            partial.write_text(text)
            partial.replace(self.path)
            self._sha = hashlib.sha256(text.encode())
            self.history = kept

    @property
    def digest(self) -> str:
        """sha256 of the file so far; nothing where there is none."""
        return "" if self.path is None else self._sha.hexdigest()

    def close(self) -> None:
        """Flush TensorBoard."""
        if self._board is not None:
            self._board.close()
