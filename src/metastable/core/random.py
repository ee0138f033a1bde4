"""Random numbers from explicit state: a seed or a `torch.Generator`, never anything global."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral

import torch
from torch import Tensor

from .errors import InputError, require, short

Seed = int | torch.Generator


def whole_seed(seed: int) -> int:
    """A seed as files of runs hold it, which is a whole number."""
    require(isinstance(seed, Integral) and not isinstance(seed, bool), "seed", "an integer", seed)
    return int(seed)


def derive(seed: int, *names: object) -> int:
    """A seed for the named stream: streams of different names are independent.

    >>> derive(0, "walkers") == derive(0, "walkers"), derive(0, "walkers") == derive(0, "data")
    (True, False)
    """
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Initial weights of torch's layers from `seed`, with the global random state put back afterwards.

    `torch.manual_seed` would also reseed every GPU, which nothing here would put back.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def generator(seed: Seed, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on `device` from a seed; a generator passes through."""
    if isinstance(seed, torch.Generator):
        return seed
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise InputError(f"seed: must be an integer or a torch.Generator, got {seed!r}")
    if not -(2**63) <= seed < 2**64:
        raise InputError(f"seed: must be an integer of at most 64 bits, got {short(seed)}")
    return torch.Generator(device=device).manual_seed(seed)


def normal_like(x: Tensor, rng: torch.Generator) -> Tensor:
    """Standard normal noise of the shape, device and dtype of `x`.

    float64 noise on the CPU is drawn in float32 and widened: torch's scalar float64 path costs nine times
    the vectorised one, and no weight in this library depends on the noise having more than 24 bits, since
    each is computed from the displacement that was really made.
    """
    narrow = torch.float32 if x.dtype == torch.float64 and x.device.type == "cpu" else x.dtype
    noise = torch.randn(x.shape, generator=rng, device=x.device, dtype=narrow)
    return noise.to(x.dtype)


def with_normal(x: Tensor, scale: float, rng: torch.Generator) -> Tensor:
    """`x` + `scale`·noise, the noise that `normal_like` draws, in little more room than the result takes.

    On the CPU draws of sixteen or more follow each other as one long draw does.
    """
    if x.device.type != "cpu" or x[:1].numel() < 16:
        return x + scale * normal_like(x, rng)
    made = x.clone()
    for part in made.split(4096):
        part.add_(scale * normal_like(part, rng))
    return made


def uniform_rows(x: Tensor, rng: torch.Generator) -> Tensor:
    """One uniform number on [0, 1) for each row of `x`, shape `(B,)`."""
    return torch.rand(x.shape[0], generator=rng, device=x.device, dtype=x.dtype)
