"""Which data rows an update sees: a function of seed and step alone, so that resuming needs no bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from metastable.core.augment import augmented
from metastable.core.batch import Batch, Rows, as_batch
from metastable.core.random import derive, generator, normal_like
from metastable.core.units import Units


class Batches:
    """Shuffled mini-batches without replacement within an epoch; the whole set when `size` is None.

    Events are shuffled with what they are given, and noise is added to the events only: in the data's units, where
    `units` are others. Pictures are changed at random in the ways that `augment` names, before the noise.
    """

    def __init__(
        self,
        data: Rows,
        size: int | None,
        seed: int,
        units: Units | None = None,
        augment: Sequence[str] = (),
    ):
        self.data = data = as_batch(data)
        self.units, self.augment = units, augment
        self.device = data.device
        self.size = len(data) if size is None else min(size, len(data))
        self.seed = seed
        self.per_epoch = len(data) // self.size
        self._epoch = -1
        self._order = torch.arange(len(data), device=self.device)

    def at(self, step: int, noise: float = 0.0) -> Batch:
        """The rows of update `step`, augmented, with fresh normal noise of standard deviation `noise`."""
        batch = self._rows(step)
        if self.augment:
            rng = generator(derive(self.seed, "augment", step), self.device)
            batch = batch.with_events(augmented(batch.x, self.augment, rng))
        return self._noisy(batch, step, noise) if noise else batch

    def several(self, step: int, noises: Sequence[float]) -> list[Batch]:
        """Those of as many updates from `step` on as there are `noises`; rows of one epoch are gathered at once."""
        if self.size == len(self.data) or any(noises):
            return [self.at(step + i, noise) for i, noise in enumerate(noises)]
        found, end = [], step + len(noises)
        while step < end:
            count = min(end - step, self.per_epoch - step % self.per_epoch)
            rows = self._rows(step, count)
            found += (
                [rows[i * self.size : (i + 1) * self.size] for i in range(count)] if count > 1 else [rows]
            )
            step += count
        return found

    def _rows(self, step: int, updates: int = 1) -> Batch:
        if self.size == len(self.data):
            return self.data
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            rng = generator(derive(self.seed, "epoch", epoch))
            order = torch.randperm(len(self.data), generator=rng)
            order = (
                order.pin_memory() if self.device.type == "cuda" else order
            )  # so that nobody waits for the copy
            self._order = order.to(self.device, non_blocking=True)
            self._epoch = epoch
        return self.data[self._order[place * self.size : (place + updates) * self.size]]

    def _noisy(self, batch: Batch, step: int, noise: float) -> Batch:
        rng = generator(derive(self.seed, "data-noise", step), self.device)
        drawn = noise * normal_like(batch.x, rng)
        return batch.with_events(batch.x + (drawn if self.units is None else self.units.turn(drawn)))
