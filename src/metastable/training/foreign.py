"""What a training asks of its method, whether that is a `Method` or an object of the user's own that says less."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from metastable.core import processes
from metastable.core.errors import UnsupportedError, require
from metastable.core.memory import rows_in_words
from metastable.core.method import Method


def sizes_of(method: Any, rows: int, batch_size: int | None) -> dict[str, Any]:
    """Settings that the memory of an update grows with."""
    batch = min(batch_size or rows, rows)
    own = method.sizes(batch, rows) if isinstance(method, Method) else {}
    return {f"method.{name}": value for name, value in own.items()} | {"trainer.batch_size": batch}


def held_at_once(method: Any, data: Tensor, batch_size: int | None) -> str:
    """What an update holds, in words."""
    rows = data[:batch_size]
    own = method.moving(len(rows), len(data)) if isinstance(method, Method) else 0
    return rows_in_words(rows, f"rows of data{f' and {own} negatives' if own else ''}")


def require_alone_or_together(method: Any, follows: str) -> None:
    """Refuse several processes for a method that cannot be shared, and for rates that follow the clock of each."""
    if not processes.is_many():
        return
    why = "it is no `Method`, and does not say which of its state each process has a part of"
    if isinstance(method, Method):
        why = method.why_not_shared()
    if why:
        raise UnsupportedError(f"{method.name}: trains in one process only: {why}")
    rule = "'steps' in several processes, whose clocks differ"
    require(follows == "steps", "trainer.follows", rule, follows)
