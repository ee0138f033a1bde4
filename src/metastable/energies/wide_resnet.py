"""Wide residual networks without normalisation.

S. Zagoruyko and N. Komodakis, *Wide residual networks*, 2016. A density needs an energy whose rows do not depend
on each other, so batch normalisation is left out; what it did for the scale of activations, initial weights do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from metastable.core.errors import require, require_count
from metastable.core.precision import last_sum
from metastable.core.random import seeded
from metastable.core.types import precise

LEAK = 0.2
GAIN = nn.init.calculate_gain("leaky_relu", LEAK)
"""√(2/(1 + 0.2²)), which makes up for what a leaky ReLU takes from the second moment."""
STEM = 16
"""Channels before the first group; the groups have `width` times 16, 32 and 64."""


class WideResNet(nn.Module):
    """WRN-`depth`-`width` for `(B, C, H, W)` images: three groups of residual blocks, a mean, a linear layer.

    A block is x + conv(φ(conv(φ(x)))) with φ a leaky ReLU of slope 0.2; the second and third group halve the side.
    As nothing is normalised, the first weights keep the size of what passes: 3 × 3 convolutions start with He's
    variance for φ, a shortcut with that of a linear map, and the last convolution of each of N blocks with 1/N of
    it, so that all of them together multiply the variance by (1 + 1/N)ᴺ < e and not by 2ᴺ.

    Args:
        event_shape: (channels, height, width), 4 × 4 at least.
        depth: 6n + 4 for n blocks in a group: 10, 16, 22, 28, …
        width: how many times wider than a plain residual network.
        outputs: logits in a row, or None for one energy per row.
        seed: of the initial weights; nothing global is touched.

    >>> import torch
    >>> WideResNet((1, 8, 8), depth=10, width=1, outputs=10)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        event_shape: Sequence[int],
        depth: int = 28,
        width: int = 10,
        outputs: int | None = None,
        seed: int = 0,
    ):
        super().__init__()
        is_image = len(event_shape) == 3 and min(event_shape[1:]) >= 4
        require(is_image, "event_shape", "(channels, height, width), 4 × 4 at least", tuple(event_shape))
        require_count("depth", depth, 10)
        require((depth - 4) % 6 == 0, "depth", "6n + 4: 10, 16, 22, 28, …", depth)
        require_count("width", width)
        self.event_shape = tuple(event_shape)
        self.outputs = outputs
        n = (depth - 4) // 6
        with seeded(seed):
            self.stem = nn.Conv2d(event_shape[0], STEM, 3, padding=1)
            self.blocks = nn.Sequential(*_blocks(n, width))
            self.head = nn.Linear(64 * width, 1 if outputs is None else outputs)
            _keep_variance(self.stem, gain=1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Energies `(B,)`, or logits `(B, outputs)`."""
        features = precise(F.leaky_relu(self.blocks(self.stem(x)), LEAK)).mean((2, 3))
        made = last_sum(self.head, features)
        return made.squeeze(-1) if self.outputs is None else made


class Block(nn.Module):
    """x + conv(φ(conv(φ(x)))), with a 1 × 1 convolution as shortcut where the shape changes."""

    def __init__(self, before: int, after: int, stride: int, share: float):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, padding=1)
        self.second = nn.Conv2d(after, after, 3, padding=1, stride=stride)
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, after, 1, stride=stride)
        _keep_variance(self.first, GAIN)
        _keep_variance(self.second, GAIN * math.sqrt(share))
        if isinstance(self.shortcut, nn.Conv2d):
            _keep_variance(self.shortcut, gain=1.0)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.second(F.leaky_relu(self.first(F.leaky_relu(x, LEAK)), LEAK))
        return self.shortcut(x) + branch


def _blocks(n: int, width: int) -> list[Block]:
    """Three groups of `n` blocks."""
    made, before = [], STEM
    for group, channels in enumerate((16, 32, 64)):
        for i in range(n):
            after, stride = channels * width, 2 if group > 0 and i == 0 else 1
            made.append(Block(before, after, stride, share=1 / (3 * n)))
            before = after
    return made


def _keep_variance(layer: nn.Conv2d, gain: float) -> None:
    """Normal weights with variance gain²/fan_in, and no bias."""
    fan_in = layer.weight[0].numel()
    nn.init.normal_(layer.weight, std=gain / math.sqrt(fan_in))
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
