"""Pictures that stay bytes until somebody asks for some of them: a quarter of the memory of their numbers.

Where rows show pictures that other rows show, too, as windows over an episode do, each is kept once (`Frames`).
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
AT_ONCE, WEIGHED = 1 << 23, 1 << 20
"""Numbers of contexts that are converted at once, and those of which moments are taken, in double precision."""
UNWRITTEN = "pictures that are kept as bytes cannot be written to; clone them first"
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
        return looked_up(self.table, codes)

    def plain(self) -> Tensor:
        """All of them, a plain tensor."""
        return self.numbers(self.codes)

    def __setitem__(self, *place: Any) -> None:
        raise RuntimeError(f"pictures: {UNWRITTEN}")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Some rows of the bytes, then their numbers; all numbers for everything else."""
        if func in READS and isinstance(args[0], Pixels):
            return args[0].numbers(func(args[0].codes, *args[1:], **(kwargs or {})))
        return done_with_all(func, args, kwargs or {})


class Frames(Tensor):
    """Contexts `(n, c)` of some numbers and then k pictures each, of which every one is kept once, as bytes.

    To everything that asks it is the floating tensor of their numbers. Rows that are taken from it are plain
    tensors, but those of `taken` and `split`, which stay as they are. Nothing can be written into it.

    >>> codes = torch.tensor([[[[0]]], [[[255]]], [[[0]]]], dtype=torch.uint8)
    >>> x = Frames(torch.tensor([[5.0], [6.0]]), codes, torch.tensor([[0, 1], [1, 2]]), table_of(-1.0, 1.0))
    >>> x.shape, x[1], x.sum()
    (torch.Size([2, 3]), tensor([ 6.,  1., -1.]), tensor(11.))
    """

    beside: Tensor
    codes: Tensor
    shown: Tensor
    table: Tensor

    @staticmethod
    def __new__(cls, beside: Tensor, codes: Tensor, shown: Tensor, table: Tensor) -> Frames:
        """Of numbers `(n, a)`, pictures `(T, *shape)`, those that rows show, `(n, k)`, and what bytes stand for."""
        shape = (len(beside), beside.shape[1] + shown.shape[1] * codes[0].numel())
        made: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=table.dtype, device=codes.device)  # pyright: ignore
        made.beside, made.codes, made.shown, made.table = beside, codes, shown, table
        return made

    def taken(self, rows: Any) -> Frames:
        """Some rows, whose pictures stay where they are."""
        return Frames(self.beside[rows], self.codes, self.shown[rows], self.table)

    def plain(self) -> Tensor:
        """All of them, a plain tensor."""
        numbers, rows = self.beside.shape[1], max(1, AT_ONCE // max(1, self.shape[1]))
        made = self.beside.new_empty(self.shape)
        made[:, :numbers] = self.beside
        for pixels, places in zip(made[:, numbers:].split(rows), self.shown.split(rows), strict=True):
            pixels.copy_(looked_up(self.table, self.codes[places].flatten(1)))
        return made

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each number over the rows, `(c,)` each."""
        n, rows = len(self), max(1, WEIGHED // self.codes[0].numel())
        beside = self.beside.double()  # without a column where there are pictures alone
        found = [(beside.mean(0), beside.std(0))] if beside.shape[1] else []
        for times in self._times():
            sums = self.table.new_zeros(2, self.codes[0].numel(), dtype=torch.float64)
            for codes, weights in zip(self.codes.split(rows), times.double().split(rows), strict=True):
                values = looked_up(self.table, codes.flatten(1)).double()
                sums += torch.stack([weights @ values, weights @ values.square()])
            mean = sums[0] / n
            found.append((mean, ((sums[1] - n * mean.square()) / (n - 1)).clamp(min=0).sqrt()))
        mean, std = (torch.cat(parts).to(self.table) for parts in zip(*found, strict=True))
        return mean, std

    def varies(self) -> Tensor:
        """Which numbers are not the same in all rows, `(c,)`."""
        found = [self.beside.amax(0) > self.beside.amin(0)]
        for times in self._times():
            codes = self.codes[times > 0]
            found.append((codes.amax(0) > codes.amin(0)).flatten())
        return torch.cat(found)

    def _times(self) -> list[Tensor]:
        """How many rows show each picture in their first place, their second, and so on."""
        return [torch.bincount(place, minlength=len(self.codes)) for place in self.shown.T]

    def numpy(self, *, force: bool = False) -> Any:
        """All numbers as an array."""
        return self.plain().numpy(force=force)

    def tolist(self) -> list[list[float]]:
        """All numbers as lists."""
        return self.plain().tolist()

    def share_memory_(self) -> Frames:  # pyright: ignore
        """In place, of its parts."""
        for part in (self.beside, self.codes, self.shown, self.table):
            part.share_memory_()
        return self

    def __setitem__(self, *place: Any) -> None:
        raise RuntimeError(f"contexts: {UNWRITTEN}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Frames:
        return self.taken(slice(None))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Frames, (self.beside, self.codes, self.shown, self.table)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Rows, as numbers; parts and copies elsewhere, as they are; all numbers for everything else."""
        x, rest, named = args[0], args[1:], kwargs or {}
        if isinstance(x, Frames):
            if func in READS and rows_alone(func, rest):
                beside, shown = (func(part, *rest, **named) for part in (x.beside, x.shown))
                one = beside.dim() == 1
                beside, shown = (beside[None], shown[None]) if one else (beside, shown)
                read = Frames(beside, x.codes, shown, x.table).plain()
                return read[0] if one else read
            if func is torch.ops.aten.split.Tensor and not any(rest[1:]):
                return [x.taken(slice(at, at + rest[0])) for at in range(0, len(x), rest[0])]
            if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
                return x.taken(slice(None))
            kind, place = named.get("dtype") or x.dtype, named.get("device") or x.device
            if func is torch.ops.aten._to_copy.default and kind.is_floating_point:
                codes, shown = x.codes.to(place), x.shown.to(place)
                return Frames(x.beside.to(place, kind), codes, shown, x.table.to(place, kind))
        return done_with_all(func, args, named)


def rows_alone(func: Any, rest: Any) -> bool:
    """Whether a read takes whole rows: by one index, or along the first dimension."""
    if func is torch.ops.aten.index.Tensor:
        return len(rest[0]) == 1 and rest[0][0].dim() == 1
    return not rest or rest[0] == 0


def done_with_all(func: Any, args: Any, named: Any) -> Any:
    """What is done with all numbers of pictures that are kept as bytes."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        _require_unwritten(func, argument, value)
    for argument in func._schema.arguments:
        _require_unwritten(func, argument, named.get(argument.name))
    plain = tree_map(lambda v: v.plain() if isinstance(v, (Pixels, Frames)) else v, (args, named))
    return func(*plain[0], **plain[1])


def _require_unwritten(func: Any, argument: Any, value: Any) -> None:
    written = argument.alias_info is not None and argument.alias_info.is_write
    values = value if isinstance(value, (list, tuple)) else (value,)
    if written and any(isinstance(each, (Pixels, Frames)) for each in values):
        raise RuntimeError(f"{func}: {UNWRITTEN}")


def looked_up(table: Tensor, codes: Tensor) -> Tensor:
    """What bytes stand for, a plain tensor."""
    if codes.dim() == 0 or len(codes) <= BLOCK:
        return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)
    made = table.new_empty(codes.shape)
    for start in range(0, len(codes), BLOCK):
        made[start : start + BLOCK] = looked_up(table, codes[start : start + BLOCK])
    return made


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
