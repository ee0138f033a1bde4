"""What all processes of a training decide together: when to stop, and when a checkpoint is due by the clock."""

from __future__ import annotations

import torch

from metastable.core import processes

EVERY = 0.25
"""Seconds between two agreements: clocks and signals differ, and to ask in every update would cost some."""
MOST = 1000
"""Updates between them at most."""


class Agreement:
    """What is known of one process is known of all, at the same update; one that is alone agrees with itself.

    Attributes:
        stopped: whether somebody asked to stop.
        late: whether the time for training is spent.
        old: whether the latest checkpoint is; whoever writes one says that it no longer is.
    """

    def __init__(self) -> None:
        self.stopped = self.late = self.old = False
        self._next, self._last = 0, (0, 0.0)

    def reach(self, step: int, seconds: float, stopped: bool, late: bool, old: bool) -> None:
        """After update `step`, at so many `seconds` of training."""
        if not processes.is_many():
            self.stopped, self.late, self.old = stopped, late, old
            return
        if self._next <= step or step < self._last[0]:  # or it went back
            before, then = self._last
            each = (seconds - then) / max(step - before, 1)
            wait = EVERY / max(each, 1e-9) if step > before else 1.0
            own = torch.tensor([stopped, late, old, min(max(wait, 1.0), MOST)], dtype=torch.float64)
            told = processes.stacked(own)
            self.stopped, self.late, self.old = (bool(one) for one in told[:, :3].amax(0))
            self._next, self._last = step + int(told[0, 3]), (step, seconds)
