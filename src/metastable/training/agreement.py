"""What all processes of a training decide together: when to stop, and when a checkpoint is due by the clock."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from metastable.core import processes

EVERY = 0.25
"""Seconds between two agreements: clocks and signals differ, and to ask in every update would cost some."""
MOST = 1000
"""Updates between them at most."""


class Agreement:
    """What is known of one process is known of all, at the same update; one that is alone agrees with itself.

    Before the first update all wait for each other. After that each says what it knows and goes on with the next
    update, at whose end the others' words have long arrived: nobody waits for them.

    Attributes:
        stopped: whether somebody asked to stop.
        late: whether the time for training is spent.
        old: whether the latest checkpoint is; whoever writes one says that it no longer is.
    """

    def __init__(self) -> None:
        self.stopped = self.late = self.old = False
        self._next, self._last = 0, (0, 0.0)
        self._answers: Callable[[], Tensor] | None = None
        self._begun = False

    def reach(self, step: int, seconds: float, stopped: bool, late: bool, old: bool) -> None:
        """After update `step`, at so many `seconds` of training."""
        if not processes.is_many():
            self.stopped, self.late, self.old = stopped, late, old
        elif self._answers is not None:
            self._hear()
        elif self._next <= step or step < self._last[0]:  # or it went back
            before, then = self._last
            each = (seconds - then) / max(step - before, 1)
            wait = EVERY / max(each, 1e-9) if step > before else 1.0
            own = torch.tensor([stopped, late, old, min(max(wait, 1.0), MOST)], dtype=torch.float64)
            self._last, self._answers = (step, seconds), processes.asked(own)
            if not self._begun:
                self._hear()
            self._begun = True

    def _hear(self) -> None:
        """What all said when they were asked last."""
        assert self._answers is not None
        told, self._answers = self._answers(), None
        self.stopped, self.late, self.old = (bool(one) for one in told[:, :3].amax(0))
        self._next = self._last[0] + int(told[0, 3])
