"""Events, and what each of them is given: nothing, a label or a context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from .errors import InputError


class Beside(StrEnum):
    """What events come with; the words are those of `Method.needs`."""

    NOTHING = ""
    LABELS = "labels"
    CONTEXTS = "given"


@dataclass(frozen=True)
class Batch:
    """Events with what each of them is given.

    Attributes:
        x: events, `(B, *event)`.
        given: labels, int64 `(B,)`, or contexts, `(B, *context)`; None for events alone.
        kind: which of these; contexts where only `given` is there.

    >>> batch = Batch(torch.zeros(3, 2), torch.ones(3, 1))
    >>> len(batch), batch.kind, batch[:2].given.shape
    (3, <Beside.CONTEXTS: 'given'>, torch.Size([2, 1]))
    """

    x: Tensor
    given: Tensor | None = None
    kind: Beside = Beside.NOTHING

    def __post_init__(self) -> None:
        if self.given is None:
            object.__setattr__(self, "kind", Beside.NOTHING)
            return
        if len(self.x) != len(self.given):
            raise InputError(
                f"given: must be one for each of the {len(self.x)} events, got {len(self.given)} of shape "
                f"{tuple(self.given.shape[1:])}"
            )
        object.__setattr__(self, "kind", Beside(self.kind) or Beside.CONTEXTS)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: Any) -> Batch:
        return replace(self, x=self.x[rows], given=None if self.given is None else self.given[rows])

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Shape of one event."""
        return tuple(self.x.shape[1:])

    @property
    def context_shape(self) -> tuple[int, ...] | None:
        """Shape of one label or context; None for events alone."""
        return None if self.given is None else tuple(self.given.shape[1:])

    @property
    def conditions(self) -> Tensor:
        """`given`, where there must be one."""
        if self.given is None:
            raise InputError(f"given: must be one for each of the {len(self.x)} events, got none")
        return self.given

    @property
    def device(self) -> torch.device:
        """Where the events are."""
        return self.x.device

    def with_events(self, x: Tensor) -> Batch:
        """Other events, given the same."""
        return replace(self, x=x)


Rows = Tensor | Batch
"""What a door takes: events alone as a tensor, or a batch. Behind it everything is a batch (`as_batch`)."""


def as_batch(rows: Rows) -> Batch:
    """A batch as it is; a tensor as events that are given nothing."""
    return rows if isinstance(rows, Batch) else Batch(rows)
