"""How products of matrices and convolutions are rounded, for as long as somebody asks for it.

A rounded energy is a function of its own, and weights of walkers are exact for it where every energy in them is
evaluated in the same way: the rounding is noise on the energy, not on the weights. So training opens one precision
around everything that evaluates energies, and energies leave it in float32 (`types.precise`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from .errors import require_choice

T = TypeVar("T")
PRECISIONS = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "tf32": torch.float32,
    "bf16-mixed": torch.float32,
}
"""What tensors are kept in. float16 is left out: its loss scaling would have to reach through every chain."""
CASTING = ("cpu", "cuda", "mps")
"""Devices that autocast knows."""
ROUNDED = ("tf32", "bf16-mixed")
"""Those whose products are coarser than what tensors are kept in."""


@contextmanager
def precision(name: str, device: torch.device | str | None = None) -> Iterator[None]:
    """Everything inside is computed at this precision: chains, log Z, scores, training by hand.

    Args:
        name: `32-true` leaves all as it is; `tf32` has products and convolutions of float32 numbers made with 10
            bits after the leading one, on a GPU that can; `bf16-mixed` with 7, through autocast, on any device.
        device: where; the GPU if there is one.

    >>> with precision("bf16-mixed", "cpu"):
    ...     (torch.ones(1, 2) @ torch.ones(2, 1)).dtype
    torch.bfloat16
    """
    require_choice("precision", name, ("32-true", *ROUNDED))
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    if name == "bf16-mixed":
        # a store of weights outlives recordings
        with torch.autocast(kind, torch.bfloat16, cache_enabled=False):
            yield
        return
    if name == "32-true" or kind != "cuda":
        yield
        return
    with _on_a_gpu("high", True):
        yield


@contextmanager
def _on_a_gpu(products: str, convolutions: bool) -> Iterator[None]:
    """How float32 is multiplied inside: `highest` or `high`, and whether convolutions may be rounded."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def unrounded(x: Tensor) -> AbstractContextManager:
    """For what must not be rounded: a sum of everything that went before, a known density.

    Compilers see autocast only: what they make of TF32 is one function of its own.
    """
    kind = x.device.type
    if kind in CASTING and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    if kind == "cuda" and not torch.compiler.is_compiling() and _rounds():
        return _on_a_gpu("highest", False)
    return nullcontext()


def products_said() -> str | None:
    """How float32 is multiplied, in torch's older words; None where its newer `fp32_precision` says it."""
    return _said(torch.get_float32_matmul_precision)


def convolutions_said() -> bool | None:
    """Whether convolutions of float32 may be rounded, as `products_said` says it."""
    return _said(lambda: torch.backends.cudnn.allow_tf32)


def _said(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except RuntimeError:  # torch does not have the older words mixed with those
        return None


def products_are_tf32() -> bool:
    """Whether torch's own products may be TF32: `torch.set_float32_matmul_precision("high")` allows for it, and so
    does `torch.backends.cuda.matmul.fp32_precision = "tf32"`.
    """
    said = products_said() or torch.backends.cuda.matmul.fp32_precision  # newer words, where it is those
    return said in ("high", "medium", "tf32")


def _rounds() -> bool:
    """Whether products of float32 are rounded; what torch's newer words say is left be."""
    return products_said() not in (None, "highest")


def last_sum(head: nn.Module, h: Tensor) -> Tensor:
    """`head(h)` as it is without autocast, whose rounding would move an energy as a whole; as `head` is kept."""
    with unrounded(h):
        return head(h.to(next(head.parameters()).dtype))


def on_tensor_cores(x: Tensor) -> bool:
    """Whether products of rows like `x` on a GPU are rounded, one way or the other; compilers see autocast only."""
    kind = x.device.type
    casting = kind in CASTING and torch.is_autocast_enabled(kind)
    return casting or (not torch.compiler.is_compiling() and _rounds())


@contextmanager
def cast_once(device: torch.device) -> Iterator[None]:
    """Inside, autocast casts each trained weight the first time it meets it: for chains, in which weights stay.

    What was cast is forgotten at the end, and with it the memory of a recording. Nothing in it may run beside the
    rest on another stream, which would not wait for the weights.
    """
    kind = device.type
    if kind not in CASTING or not torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=True):
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            torch.clear_autocast_cache()


def channels_last(module: nn.Module) -> nn.Module:
    """In place: kernels of convolutions of images with their channels side by side, as tensor cores take them."""
    for weight in _image_kernels(module):
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return module


def laid_out(x: Tensor, energy: object) -> Tensor:
    """Images on a GPU as the energy's convolutions have their channels: side by side, or one after the other."""
    if not x.is_cuda or x.dim() != 4 or not isinstance(energy, nn.Module):
        return x
    # kernels of one channel, or one pixel wide, are both
    beside = any(not w.is_contiguous() for w in _image_kernels(energy))
    return x.contiguous(memory_format=torch.channels_last) if beside else x


def _image_kernels(module: nn.Module) -> list[Tensor]:
    """Those of convolutions that are parameters, not made from others."""
    layers = [m._parameters.get("weight") for m in module.modules() if isinstance(m, nn.Conv2d)]
    return [weight for weight in layers if weight is not None]
