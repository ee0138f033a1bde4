"""Numbers below full precision count as zero while a model trains on the CPU.

A softmax over far negatives has weights such as e^{−90}, and a CPU takes a hundred cycles for an operation on such
a number where it takes one for another: updates become several times as slow, for weights that no parameter feels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def are_flushed() -> bool:
    """Whether this thread takes numbers below full precision for zero.

    >>> are_flushed()
    False
    """
    return not bool(torch.tensor(1e-40, dtype=torch.float32, device="cpu") * 0.5 > 0)


@contextmanager
def flushed() -> Iterator[None]:
    """Take them for zero inside, and leave the thread as it was; where a CPU cannot, nothing changes.

    >>> with flushed():
    ...     small = torch.tensor(1e-40) * 0.5
    >>> float(small), are_flushed()
    (0.0, False)
    """
    before = are_flushed()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
