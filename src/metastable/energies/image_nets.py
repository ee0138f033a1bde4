"""The convolutional energies of the papers' image runs, for pictures of any side from 8 on, grey or colour.

- `short-run`: E. Nijkamp and others, 2019, as D. Carbone and others, *Efficient training of energy-based models
  using Jarzynski equality*, NeurIPS 2023, use it on CIFAR-10.
- `adance-a`, `adance-c`: Table 5.1 of N. Xu, *Self-adapting noise-contrastive estimation for energy-based models*,
  2022.
- `f-ebm`: L. Yu and others, *Training deep energy-based models with f-divergence minimization*, ICML 2020, whose
  image runs follow Y. Du and I. Mordatch, 2019.

Nothing is normalised over a batch, no layer has a state, and rows do not depend on each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from metastable.core.errors import require, require_choice, require_count
from metastable.core.precision import last_sum, on_tensor_cores
from metastable.core.random import seeded
from metastable.core.types import precise

from .networks import patch_conv
from .wide_resnet import LEAK, Block

LEAST_SIDE = 8
"""These nets halve the side three times."""


def require_pictures(event_shape: Sequence[int]) -> tuple[int, int, int]:
    """(channels, height, width) with sides of at least `LEAST_SIDE`, or an error that names the rule."""
    fits = len(event_shape) == 3 and min(event_shape[1:]) >= LEAST_SIDE
    rule = f"(channels, height, width) with sides of {LEAST_SIDE} or more: they are halved three times"
    require(fits, "event_shape", rule, tuple(event_shape))
    channels, height, width = event_shape
    return channels, height, width


def _smaller(sides: tuple[int, int], kernel: int, stride: int, padding: int) -> tuple[int, int]:
    """The sides that a convolution leaves."""
    high, wide = ((side + 2 * padding - kernel) // stride + 1 for side in sides)
    return high, wide


class ShortRunNet(nn.Module):
    """conv 3 × 3 to `filters`, three of 4 × 4 and stride 2 that double them, and one over all that is left.

    Leaky ReLU of slope 0.2. At 32 × 32 the last convolution is the paper's 4 × 4; at another side it is as large as
    what three halvings leave, so that one number comes out.

    Args:
        event_shape: (channels, height, width), sides of 8 or more.
        filters: n_f. The paper's text says 128, its public code runs 64.
        seed: of the initial weights; nothing global is touched.
        outputs: logits in a row, `(B, outputs)`, in the place of one energy, `(B,)`.

    >>> sum(p.numel() for p in ShortRunNet((3, 32, 32), filters=128).parameters())
    11031809
    """

    def __init__(
        self, event_shape: Sequence[int], filters: int = 64, seed: int = 0, outputs: int | None = None
    ):
        super().__init__()
        channels, *sides = self.event_shape = require_pictures(event_shape)
        require_count("filters", filters)
        self.outputs = outputs
        widths = [filters, 2 * filters, 4 * filters, 8 * filters]
        with seeded(seed):
            layers: list[nn.Module] = [nn.Conv2d(channels, filters, 3, padding=1), nn.LeakyReLU(LEAK)]
            for before, after in itertools.pairwise(widths):
                layers += [nn.Conv2d(before, after, 4, stride=2, padding=1), nn.LeakyReLU(LEAK)]
                sides = _smaller((sides[0], sides[1]), 4, 2, 1)
            self.body = nn.Sequential(*layers)
            self.head = nn.Conv2d(8 * filters, outputs or 1, (sides[0], sides[1]))

    def forward(self, x: Tensor) -> Tensor:
        """Energies `(B,)`, or logits `(B, outputs)`."""
        tensor_cores = x.is_cuda and on_tensor_cores(x)
        h = self.body[1:](patch_conv(self.body[0], x)) if tensor_cores else self.body(x)
        if self.outputs is None and tensor_cores:  # a convolution over everything is a sum
            return (precise(h) * self.head.weight).sum((1, 2, 3)) + self.head.bias  # pyright: ignore
        made = last_sum(self.head, h).flatten(1)
        return made.squeeze(-1) if self.outputs is None else made


ADANCE = {"a": ((3, 256), (512,)), "c": ((4, 512), (512, 256))}
"""Kernel and channels of the fourth convolution, and widths of the linear layers, of models A and C."""


class AdaNCENet(nn.Module):
    """Models A and C of the thesis's Table 5.1: five convolutions to 1,024 channels, then linear layers.

    The table has (kernel, stride, padding) × channels: (3, 1, 1) × 64, (4, 2, 1) × 128, (4, 2, 1) × 256, then
    (3, 2, 1) × 256 in A and (4, 2, 1) × 512 in C, (4, 1, 0) × 1024, and FC 512-1 in A, FC 512-256-1 in C. As it is
    printed the columns of the table are garbled; read like this, the nets fit the sides they were made for. Model B
    trained nothing. The slope of its leaky ReLU is not said; here it is 0.2. At sides where three halvings leave
    less than 4 × 4, the last convolution is as large as what is left.

    Args:
        event_shape: (channels, height, width), sides of 8 or more. A is for 28 × 28, C for 32 × 32.
        model: `a` or `c`.
        seed: of the initial weights; nothing global is touched.
        outputs: logits in a row, `(B, outputs)`, in the place of one energy, `(B,)`.

    >>> sum(p.numel() for p in AdaNCENet((1, 28, 28), "a").parameters())
    5967105
    """

    def __init__(
        self, event_shape: Sequence[int], model: str = "c", seed: int = 0, outputs: int | None = None
    ):
        super().__init__()
        before, *sides = self.event_shape = require_pictures(event_shape)
        require_choice("model", model, ADANCE)
        self.outputs = outputs
        (kernel, channels), hidden = ADANCE[model]
        convolutions = [(3, 1, 1, 64), (4, 2, 1, 128), (4, 2, 1, 256), (kernel, 2, 1, channels)]
        layers: list[nn.Module] = []
        with seeded(seed):
            for k, stride, padding, after in convolutions:
                layers += [nn.Conv2d(before, after, k, stride, padding), nn.LeakyReLU(LEAK)]
                before, sides = after, _smaller((sides[0], sides[1]), k, stride, padding)
            last = (min(4, sides[0]), min(4, sides[1]))
            layers += [nn.Conv2d(before, 1024, last), nn.LeakyReLU(LEAK), nn.Flatten()]
            width = 1024 * (sides[0] - last[0] + 1) * (sides[1] - last[1] + 1)
            for after in hidden:
                layers += [nn.Linear(width, after), nn.LeakyReLU(LEAK)]
                width = after
            self.body = nn.Sequential(*layers)
            self.head = nn.Linear(width, outputs or 1)

    def forward(self, x: Tensor) -> Tensor:
        """Energies `(B,)`, or logits `(B, outputs)`."""
        made = last_sum(self.head, self.body(x))
        return made.squeeze(-1) if self.outputs is None else made


class FEBMNet(nn.Module):
    """The residual net of f-EBM's image runs: a convolution, six blocks, a sum over positions, a linear layer.

    Blocks of `filters`, `filters`, then twice as many; the first, third and fifth halve the side. It is meant to be
    normalised spectrally (`spectral_norm`), as the energy `f-ebm` does.

    Deviations: the paper gives no table of layers. This one has the blocks of Du and Mordatch's CIFAR-10 net, whose
    settings the paper says it took; sides are halved by a stride and not by a mean over 2 × 2.

    Args:
        event_shape: (channels, height, width), sides of 8 or more.
        filters: 128 in the public runs.
        seed: of the initial weights; nothing global is touched.
        outputs: logits in a row, `(B, outputs)`, in the place of one energy, `(B,)`.
    """

    def __init__(
        self, event_shape: Sequence[int], filters: int = 128, seed: int = 0, outputs: int | None = None
    ):
        super().__init__()
        channels, _, _ = self.event_shape = require_pictures(event_shape)
        require_count("filters", filters)
        self.outputs = outputs
        n, m = filters, 2 * filters
        steps = [(n, n, 2), (n, n, 1), (n, m, 2), (m, m, 1), (m, m, 2), (m, m, 1)]
        with seeded(seed):
            self.stem = nn.Conv2d(channels, filters, 3, padding=1)
            self.blocks = nn.Sequential(*(Block(*step, share=1 / len(steps)) for step in steps))
            self.head = nn.Linear(m, outputs or 1)

    def forward(self, x: Tensor) -> Tensor:
        """Energies `(B,)`, or logits `(B, outputs)`."""
        made = last_sum(self.head, precise(F.leaky_relu(self.blocks(self.stem(x)), LEAK)).sum((2, 3)))
        return made.squeeze(-1) if self.outputs is None else made
