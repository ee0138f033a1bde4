"""Where chains begin: noise, data, or where they stood before."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from metastable.core.batch import Batch
from metastable.core.random import generator
from metastable.core.types import per_row


class Starts(Protocol):
    """Anything that fresh chains can be drawn from: a proposal, a box."""

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` draws, `(n, *event)`."""
        ...


class Box(NamedTuple):
    """Uniform starts between `low` and `high`, both `(*event)`; ends that meet give a constant."""

    low: Tensor
    high: Tensor

    @classmethod
    def around(cls, data: Tensor) -> Box:
        """Between the data's least and greatest values: of each coordinate, or of all pixels of images together.

        A pixel at the border that never changes is noise like any other.
        """
        together = data.dim() == 4
        low, high = (data.amin(), data.amax()) if together else (data.amin(0), data.amax(0))
        return cls(low.expand(data.shape[1:]).clone(), high.expand(data.shape[1:]).clone())

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` draws, `(n, *event)`."""
        u = torch.rand((n, *self.low.shape), generator=rng, device=self.low.device, dtype=self.low.dtype)
        return torch.lerp(self.low, self.high, u)


def from_noise(noise: Starts, n: int, rng: torch.Generator) -> Tensor:
    """`n` positions drawn from noise, `(n, *event)`."""
    return noise.sample(n, rng)


def random_rows(total: int, n: int, rng: torch.Generator, device: torch.device) -> Tensor:
    """`n` row numbers: without replacement while there are enough rows, with replacement beyond."""
    if n == total:
        return torch.arange(total, device=device)
    if n < total and torch.device(device).type == "cpu":
        return torch.randperm(total, generator=rng, device=device)[:n]
    if n < total:  # elsewhere by sorting numbers, which can be recorded
        return torch.rand(total, generator=rng, device=device, dtype=torch.float64).argsort()[:n]
    return torch.randint(total, (n,), generator=rng, device=device)


def some_rows(rows: Tensor, most: int, seed: int = 0) -> Tensor:
    """All rows, in order, or `most` of them at random where there are more: the first ones may be of one class."""
    return rows[some_numbers(rows, most, seed)]


def some_numbers(rows: Tensor, most: int, seed: int = 0) -> Tensor:
    """The numbers of these."""
    return random_rows(len(rows), min(most, len(rows)), generator(seed, rows.device), rows.device)


def from_batch(data: Batch, n: int, rng: torch.Generator) -> Batch:
    """`n` rows of the data with what they are given: all of them, in order, when n is their number."""
    return data[random_rows(len(data), n, rng, data.device)]


class Reading(NamedTuple):
    """What was read from a replay buffer: the positions and the rows they came from."""

    x: Tensor
    rows: Tensor


class ReplayBuffer(NamedTuple):
    """Persistent chains, `(capacity, *event)`. Chains go back to the rows they were read from.

    A buffer that is read at random rows and written back in another order loses chains: a hundred fell to
    three in a measured case. Here `write` needs the rows that `read` gave.
    """

    x: Tensor

    def read(
        self, n: int, rng: torch.Generator, rejuvenation: float = 0.0, fresh: Starts | None = None
    ) -> Reading:
        """`n` chains; each is replaced by a fresh start with probability `rejuvenation`."""
        rows = random_rows(len(self.x), n, rng, self.x.device)
        x = self.x if n == len(self.x) else self.x.index_select(0, rows)
        if rejuvenation > 0 and fresh is not None:
            u = torch.rand(len(rows), generator=rng, device=x.device)
            x = torch.where(per_row(u < rejuvenation, x), fresh.sample(len(rows), rng).to(x.dtype), x)
        return Reading(x, rows)

    def write(self, rows: Tensor, x: Tensor) -> ReplayBuffer:
        """A buffer in which `rows` hold `x` and every other row is untouched."""
        return ReplayBuffer(self.x.index_copy(0, rows, x))
