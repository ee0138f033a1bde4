"""Which data rows an update sees: a function of seed and step alone, so that resuming needs no bookkeeping."""

from __future__ import annotations

import torch
from torch import Tensor

from metastable.core.random import derive, generator


class Batches:
    """Shuffled mini-batches without replacement within an epoch; the whole set when `size` is None."""

    def __init__(self, data: Tensor, size: int | None, seed: int):
        self.data = data
        self.size = len(data) if size is None else min(size, len(data))
        self.seed = seed
        self.per_epoch = len(data) // self.size
        self._epoch = -1
        self._order = torch.arange(len(data), device=data.device)

    def at(self, step: int) -> Tensor:
        """The rows of update `step`."""
        if self.size == len(self.data):
            return self.data
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            rng = generator(derive(self.seed, "epoch", epoch))
            self._order = torch.randperm(len(self.data), generator=rng).to(self.data.device)
            self._epoch = epoch
        return self.data[self._order[place * self.size : (place + 1) * self.size]]
