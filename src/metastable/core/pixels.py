"""Pictures that stay bytes until somebody asks for some of them: a quarter of the memory of their numbers.

The numbers come from a table of 256, made once where the pictures were read, so that they are the same to the last
bit on every device: a division by 255 is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

SCALES = ((-1.0, 1.0), (0.0, 255.0), (0.0, 1.0))
"""Where the bytes 0 and 255 may lie."""
CHANNELS = (1, 3, 4)
"""Of pictures: grey, colour, and colour with a fourth, such as depth."""
BLOCK = 4096
"""Rows that are converted at once, which bounds the memory beyond the result."""
READS = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_select.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.select.int,
)
"""What takes some of the numbers and changes none."""


def order_hint(event_shape: Sequence[int]) -> str:
    """What to do about pictures whose channels are last, in words; empty for those of any other shape.

    >>> order_hint((16, 16, 3)), order_hint((3, 16, 16)), order_hint((8, 4, 4))
    ('looks like (N, H, W, C), and pictures are (N, C, H, W): numpy.moveaxis(x, 3, 1) makes it so', '', '')
    """
    if len(event_shape) != 3 or event_shape[2] not in CHANNELS or min(event_shape[:2]) <= max(CHANNELS):
        return ""
    return "looks like (N, H, W, C), and pictures are (N, C, H, W): numpy.moveaxis(x, 3, 1) makes it so"


class Pixels(Tensor):
    """Bytes as a floating tensor, `(n, *event)`: to everything that asks it is the tensor of their numbers.

    Rows that are taken from it are plain tensors. Whatever else is done with it is done with all of its numbers,
    which are there for as long as that takes; nothing can be written into it.

    >>> x = Pixels(torch.tensor([[0, 255], [255, 0]], dtype=torch.uint8), table_of(-1.0, 1.0))
    >>> x.dtype, x[1], x.mean()
    (torch.float32, tensor([ 1., -1.]), tensor(0.))
    """

    codes: Tensor
    table: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, table: Tensor) -> Pixels:
        """Of bytes, and the number that each stands for, `(256,)`."""
        made: Any = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=table.dtype, device=codes.device)  # pyright: ignore
        made.codes, made.table = codes, table
        return made

    def numbers(self, codes: Tensor) -> Tensor:
        """What bytes stand for, a plain tensor."""
        if codes.dim() == 0 or len(codes) <= BLOCK:
            return self.table.index_select(0, codes.reshape(-1).int()).view(codes.shape)
        made = self.table.new_empty(codes.shape)
        for start in range(0, len(codes), BLOCK):
            made[start : start + BLOCK] = self.numbers(codes[start : start + BLOCK])
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Some rows of the bytes, then their numbers; all numbers for everything else."""
        if func in READS and isinstance(args[0], Pixels):
            return args[0].numbers(func(args[0].codes, *args[1:], **(kwargs or {})))
        if func._schema.is_mutable and isinstance(args[0], Pixels):
            raise RuntimeError(
                f"{func}: pictures that are kept as bytes cannot be written to; clone them first"
            )
        plain = tree_map(lambda v: v.numbers(v.codes) if isinstance(v, Pixels) else v, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def table_of(low: float, high: float) -> Tensor:
    """The numbers of the bytes 0 … 255, as readers of pictures make them, `(256,)`."""
    codes = torch.arange(256.0)
    return codes if (low, high) == (0.0, 255.0) else codes.div_(255 / (high - low)).add_(low)


def in_bytes(x: Tensor, scales: Sequence[tuple[float, float]] = SCALES) -> tuple[Tensor, Tensor] | None:
    """Bytes and table of float32 numbers, `(n, *event)`; None where some number is no byte's to the last bit."""
    for low, high in scales:
        table, codes = table_of(low, high), torch.empty(x.shape, dtype=torch.uint8)
        for start in range(0, len(x), BLOCK):
            block = x[start : start + BLOCK]
            # NaN is no index on any machine: x86 makes it the least of all integers, ARM zero
            near = ((block - low) * (255 / (high - low))).round_().clamp_(0, 255).nan_to_num_(0.0)
            if not torch.equal(table.index_select(0, near.reshape(-1).int()), block.reshape(-1)):
                break
            codes[start : start + BLOCK] = near
        else:
            return codes, table
    return None
