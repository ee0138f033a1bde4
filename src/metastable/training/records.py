"""Metrics: gathered on the device, read once per line, written as JSON lines and TensorBoard events."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metastable.core.errors import need

Row = dict[str, float]


EXTREMES = {"_min": torch.fmin, "_max": torch.fmax}
"""Metrics with these endings are gathered as extremes of a line; what is not a number does not count in them."""


class Gather:
    """Running means (or extremes) over a line, and the latest of what is neither; no value is waited for."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.latest: dict[str, Tensor] = {}
        self.count = 0

    def add(self, averaged: Mapping[str, Tensor], latest: Mapping[str, Tensor]) -> None:
        """One update's metrics."""
        for name, value in averaged.items():
            value = value.detach().double()
            join = EXTREMES.get(name[-4:], torch.add)
            self.sums[name] = value if self.count == 0 else join(self.sums[name], value)
        self.latest = {name: value.detach().double() for name, value in latest.items()}
        self.count += 1

    def read(self) -> Row:
        """All values, in one transfer from the device; starts the next line."""
        names = [*self.sums, *self.latest]
        if not names:
            return {}
        means = [v if name[-4:] in EXTREMES else v / self.count for name, v in self.sums.items()]
        values = torch.stack([v.reshape(()) for v in (*means, *self.latest.values())]).tolist()
        self.clear()
        return dict(zip(names, values, strict=True))

    def clear(self) -> None:
        """Forget the line so far."""
        self.sums, self.latest, self.count = {}, {}, 0

    def save(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"sums": self.sums, "latest": self.latest, "count": self.count}

    def load(self, tree: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.sums, self.latest, self.count = dict(tree["sums"]), dict(tree["latest"]), tree["count"]


def read_jsonl(path: Path) -> list[Row]:
    """The rows of a metrics file; a last line cut short by a kill is left out."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append({k: math.nan if v is None else v for k, v in json.loads(line).items()})
        except json.JSONDecodeError:
            break
    return rows


def _line(row: Row) -> str:
    """A row of the metrics file. Values that are not finite become null, which JSON can say."""
    return json.dumps({k: (v if math.isfinite(v) else None) for k, v in row.items()}) + "\n"


class Recorder:
    """Keeps the history, and appends each row to `metrics.jsonl` and TensorBoard where there is a folder."""

    def __init__(self, folder: Path | None, tensorboard: bool = False):
        self.history: list[Row] = []
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
            with self.path.open("a") as file:
                file.write(_line(row))
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
            partial.write_text("".join(map(_line, kept)))
            partial.replace(self.path)
            self.history = kept

    def close(self) -> None:
        """Flush TensorBoard."""
        if self._board is not None:
            self._board.close()
