"""Which data rows an update sees: a function of seed and step alone, so that resuming needs no bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from metastable.core.augment import augmented, augmented_contexts
from metastable.core.batch import Batch, Beside, Rows, as_batch
from metastable.core.errors import ConfigError
from metastable.core.pixels import Frames
from metastable.core.processes import count, own_seed, rank
from metastable.core.random import derive, generator, normal_like
from metastable.core.units import Coordinates

from .config import TrainerConfig


class Batches:
    """Shuffled mini-batches without replacement within an epoch; the whole set when `size` is None.

    Events are shuffled with what they are given. Pictures are changed at random in the ways that `augment` names,
    those within contexts, at `pictures`, in those of `given_augment`.
    Noise is added to the events, and `given_noise` times as much to the contexts: in the data's units, where
    `coordinates` are others. Of several processes each sees its own part of every batch, all of one size.
    """

    def __init__(
        self,
        data: Rows,
        size: int | None,
        seed: int,
        coordinates: Coordinates | None = None,
        augment: Sequence[str] = (),
        given_noise: float | tuple[float, ...] = 0.0,
        given_augment: Sequence[str] = (),
        pictures: Sequence[int] = (),
    ):
        self.data = data = as_batch(data)
        self.units = None if coordinates is None else coordinates.events
        self.given_units = None if coordinates is None else coordinates.given
        self.given_noise, self.augment = _given_noise(given_noise, data), augment
        self.given_augment, self.pictures = given_augment, pictures
        self.noised = _noised(self.given_noise, data.given)
        self.device = data.device
        size, self.parts = len(data) if size is None else min(size, len(data)), count()
        if size < self.parts:
            rule = f"must have a row for each of {self.parts} processes"
            raise ConfigError("trainer.batch_size", f"{rule}, got {size}")
        self.size = size - size % self.parts
        self.seed = seed
        self.per_epoch = len(data) // self.size
        self._epoch = -1
        self._order = torch.arange(len(data), device=self.device)

    @classmethod
    def of(cls, data: Rows, config: TrainerConfig, seed: int, coordinates: Coordinates | None) -> Batches:
        """Those that a trainer's settings ask for."""
        changes = (config.augment, config.given_noise, config.given_augment, config.given_pictures)
        return cls(data, config.batch_size, seed, coordinates, *changes)

    def at(self, step: int, noise: float = 0.0) -> Batch:
        """The rows of update `step`, augmented, with fresh normal noise of standard deviation `noise`."""
        batch = self._rows(step)
        if self.augment:
            rng = generator(own_seed(self.seed, "augment", step), self.device)
            batch = batch.with_events(augmented(batch.x, self.augment, rng))
        if self.given_augment:
            seed = own_seed(self.seed, "given-augment", step)
            changed = augmented_contexts(batch.conditions, self.pictures, self.given_augment, seed)
            batch = replace(batch, given=changed)
        return self._noisy(batch, step, noise) if noise else batch

    def several(self, step: int, noises: Sequence[float]) -> list[Batch]:
        """Those of as many updates from `step` on as there are `noises`; rows of one epoch are gathered at once."""
        changed = self.augment or self.given_augment or any(noises)
        if self.size == len(self.data) or changed or self.parts > 1:
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
            return self.data[rank() :: self.parts] if self.parts > 1 else self.data
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            rng = generator(derive(self.seed, "epoch", epoch))
            order = torch.randperm(len(self.data), generator=rng)
            # so that nobody waits for the copy
            order = order.pin_memory() if self.device.type == "cuda" else order
            self._order = order.to(self.device, non_blocking=True)
            self._epoch = epoch
        rows = self._order[place * self.size : (place + updates) * self.size]
        return self.data[rows[rank() :: self.parts] if self.parts > 1 else rows]

    def _noisy(self, batch: Batch, step: int, noise: float) -> Batch:
        rng = generator(own_seed(self.seed, "data-noise", step), self.device)
        drawn = noise * normal_like(batch.x, rng)
        noisy = batch.with_events(batch.x + (drawn if self.units is None else self.units.turn(drawn)))
        if self.given_noise is None:
            return noisy
        given, share = noisy.conditions, self.given_noise
        if self.noised is not None:
            numbers, pictures = given[:, : self.noised], given[:, self.noised :]
            numbers = numbers + noise * share[: self.noised] * normal_like(numbers, rng)
            return replace(noisy, given=torch.cat([numbers, pictures], 1))
        drawn = noise * share * normal_like(given, rng)
        turned = drawn if self.given_units is None else self.given_units.turn(drawn)
        return replace(noisy, given=given + turned)


def _noised(share: Tensor | None, given: Tensor | None) -> int | None:
    """How many numbers of contexts stand before their pictures, where those have no noise: nobody draws it then."""
    numbers = given.beside.shape[1] if isinstance(given, Frames) else None
    return None if numbers is None or share is None or share[numbers:].any() else numbers


def _given_noise(share: float | tuple[float, ...], data: Batch) -> Tensor | None:
    """What the noise of contexts is multiplied with, of the shape of one; None where they have none."""
    shares = torch.as_tensor(share, dtype=data.x.dtype, device=data.device)
    if not bool(shares.any()):
        return None
    if data.kind is not Beside.CONTEXTS:
        raise ConfigError(
            "trainer.given_noise", "is for events with contexts, which these have not; leave it out"
        )
    one = data.conditions[0]
    if shares.dim() and shares.numel() != one.numel():
        raise ConfigError(
            "trainer.given_noise",
            f"must be one number, or one for each of the {one.numel()} of a context, got {len(shares)}",
        )
    return shares.expand(one.shape) if shares.dim() == 0 else shares.view(one.shape)
