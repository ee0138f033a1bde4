"""What a training asks of its method, whether that is a `Method` or an object of the user's own that says less."""

from __future__ import annotations

from typing import Any

from torch import Tensor

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


def why_alone(method: Any) -> str:
    """Why several processes cannot train with it, in words; nothing where they can."""
    if isinstance(method, Method):
        return method.why_not_shared()
    return "it is no `Method`, and does not say which of its state each process has a part of"
