"""What is made of tensors that seldom change, kept until they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .capture import is_recording

T = TypeVar("T")


class Kept(Generic[T]):
    """The value of a function of tensors, made anew where one of them is another or was written to.

    >>> kept, x = Kept(), torch.ones(2)
    >>> kept(lambda: x.sum(), x) is kept(lambda: x.sum(), x)
    True
    >>> kept(lambda: x.sum(), x.add_(1)).item()
    4.0
    """

    def __init__(self) -> None:
        self.made_of: list[tuple[Tensor, int]] = []
        self.value: T | None = None

    def __call__(self, make: Callable[[], T], *tensors: Tensor) -> T:
        """What `make` gives, which looks at these tensors and at nothing else that changes."""
        if torch.compiler.is_compiling() or any(t.requires_grad or t.is_inference() for t in tensors):
            return make()
        made_of = [(t, t._version) for t in tensors]
        pairs = zip(made_of, self.made_of, strict=False)
        if self.value is not None and all(t is own and now == then for (t, now), (own, then) in pairs):
            return self.value
        value = make()
        if not is_recording():  # what is made in a recording has its numbers only while that runs
            self.made_of, self.value = made_of, value
        return value
