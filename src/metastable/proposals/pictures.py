"""Images as a few places: a residual network that knows coordinates, and the mean place of what a filter sees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from metastable.core.errors import require, require_count
from metastable.core.types import transforms_are_active


def coordinates(height: int, width: int, like: Tensor | None = None) -> Tensor:
    """x and y of every pixel from −1 to 1, `(2, height, width)`, where `like` lies: nobody waits for a copy."""
    kind = {} if like is None else {"dtype": like.dtype, "device": like.device}
    y, x = (torch.linspace(-1, 1, size, **kind) for size in (height, width))
    return torch.stack([x.expand(height, -1), y[:, None].expand(-1, width)])


class SpatialSoftmax(nn.Module):
    """The mean place of each channel, weighed by softmax over its pixels: `(B, C, H, W)` to `(B, 2C)`.

    References:
        S. Levine, C. Finn, T. Darrell, P. Abbeel, *End-to-end training of deep visuomotor policies*, JMLR 2016.

    >>> seen = torch.zeros(1, 1, 3, 3)
    >>> seen[0, 0, 0, 2] = 100.0  # the upper right corner
    >>> SpatialSoftmax()(seen)
    tensor([[ 1., -1.]])
    """

    def forward(self, x: Tensor) -> Tensor:
        """x and y of each channel."""
        share = x.flatten(2).softmax(-1)
        at = coordinates(x.shape[2], x.shape[3], x).flatten(1)
        return (share @ at.T).flatten(1)


class Residual(nn.Module):
    """Two convolutions with group norm beside a shortcut."""

    def __init__(self, width: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, stride, 1)
        self.second = nn.Conv2d(width, width, 3, 1, 1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(2))
        self.short = nn.Conv2d(width, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """`(B, width, H, W)`, with fewer pixels where there is a stride."""
        h = silu(self.norms[0](self.first(x)))
        return silu(self.short(x) + self.norms[1](self.second(h)))


class PictureEncoder(nn.Module):
    """A residual network over an image and its coordinates, with spatial softmax at its end (App. B.4).

    Args:
        shape: `(channels, height, width)` of an image, in numbers from −1 to 1.
        width: d_res.
        layers: residual layers, of which the first two halve the image.
        filters: of the spatial softmax; d_o is twice as many.

    References:
        R. Liu and others, *An intriguing failing of convolutional neural networks and the CoordConv solution*,
        NeurIPS 2018.

    >>> PictureEncoder((3, 24, 24), width=8)(torch.zeros(5, 3, 24, 24)).shape
    torch.Size([5, 8])
    """

    def __init__(self, shape: Sequence[int], width: int = 64, layers: int = 4, filters: int = 4):
        super().__init__()
        ok = len(shape) == 3 and min(shape[1:]) >= 16
        require(ok, "pictures", "(channels, height, width) of at least 16 by 16 pixels", tuple(shape))
        require_count("pictures.layers", layers)
        self.features = 2 * filters
        self.register_buffer("at", coordinates(shape[1], shape[2]), persistent=False)
        strides = [2, 2, *[1] * layers][:layers]
        self.body = nn.Sequential(
            nn.Conv2d(shape[0] + 2, width, 5, 2, 2),
            nn.SiLU(),
            *(Residual(width, stride) for stride in strides),
            nn.Conv2d(width, filters, 1),
            SpatialSoftmax(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """`(B, channels, height, width)` to `(B, 2·filters)`."""
        x = torch.cat([x, self.at.expand(len(x), -1, -1, -1)], 1)  # pyright: ignore
        if x.device.type == "cpu" and not transforms_are_active():
            x = x.contiguous(memory_format=torch.channels_last)  # which halves the time of a processor
        return self.body(x)
