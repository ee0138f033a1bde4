"""torch's layers in a form that can be differentiated as often as wanted, and forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps what others have hung on it, which no kernel of ours calls."""


@contextmanager
def plain_layers() -> Iterator[None]:
    """Within it attention, transformer layers and norms are computed by plain operations.

    torch's fused attention has one derivative, and only backwards: scores that are trained need three, a divergence
    needs one forwards, under `vmap`. Its norms have two right derivatives; the third, by which score matching
    learns, takes mean and deviation for constants, without a word. What is recorded within can be differentiated
    afterwards as well. Other layers compute what they always do, and torch's settings are put back.

    >>> layer = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    >>> x = torch.randn(3, 5, 4)
    >>> with plain_layers():
    ...     change = torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1]
    >>> change.shape
    torch.Size([3, 5, 4])
    """
    if torch.compiler.is_compiling():  # the compiler has its own way with these layers
        yield
        return
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), _PlainNorms():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """`torch.nn.functional.layer_norm` by plain operations."""
    white = _white(x, list(range(x.dim() - len(normalized_shape), x.dim())), eps)
    white = white if weight is None else white * weight
    return white if bias is None else white + bias


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """`torch.nn.functional.group_norm` by plain operations."""
    grouped = x.reshape(x.shape[0], num_groups, -1)
    white = _white(grouped, [2], eps).reshape(x.shape)
    channels = (1, -1, *[1] * (x.dim() - 2))
    white = white if weight is None else white * weight.view(channels)
    return white if bias is None else white + bias.view(channels)


def _white(x: Tensor, dims: list[int], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


NORMS: dict[Any, Callable[..., Tensor]] = {
    functional.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    functional.group_norm: group_norm,
    torch.group_norm: group_norm,
}


class _PlainNorms(TorchFunctionMode):
    """Norms by the functions above, everything else as it is."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain, options = NORMS.get(func), kwargs or {}
        if plain is None:
            return func(*args, **options)
        return plain(*args, **{"x" if name == "input" else name: value for name, value in options.items()})
