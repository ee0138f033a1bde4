"""Whether a model has learned or copied: nearest training images of its samples, against images it never saw.

Where nothing is copied, training and held-out images are exchangeable, so that the image nearest to a sample is
one of training with probability n/(n + m), n and m being their numbers. More than that is copying.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import InputError
from ..core.random import derive, generator
from ..core.weights import require_weight

BLOCK = 1 << 25
"""Distances held at once, and numbers of rows: 128 MiB in float32."""


class Nearest(NamedTuple):
    """Distances to the nearest rows, `(N, k)`, nearest first, and which they are."""

    distance: Tensor
    which: Tensor


def nearest_rows(x: Tensor, rows: Tensor, k: int = 1) -> Nearest:
    """The `k` rows, `(M, *event)`, that are nearest to each row of `x`, `(N, *event)`.

    Rows of any type, bytes or those of a file, are made float32 and brought to `x` a block at a time.

    >>> nearest_rows(torch.tensor([[0.9], [5.0]]), torch.tensor([[0.0], [1.0], [4.0]])).which.flatten().tolist()
    [1, 2]
    """
    if x.shape[1:] != rows.shape[1:]:
        raise InputError(f"rows: must have the shape {tuple(x.shape[1:])}, got {tuple(rows.shape[1:])}")
    x, at_once, first = x.flatten(1).float(), max(1, BLOCK // math.prod(rows.shape[1:])), 0
    # about which rounding in float32 is least
    center = rows[:at_once].flatten(1).float().mean(0).to(x.device)
    x, found = x - center, Nearest(x.new_empty(len(x), 0), torch.empty(len(x), 0).long().to(x.device))
    for block in rows.split(at_once):
        near = _nearest_of(x, block.flatten(1).to(x.device).float() - center, k)
        distance = torch.cat([found.distance, near.distance], 1)
        best = distance.argsort(dim=1, stable=True)[:, :k]
        which = torch.cat([found.which, near.which + first], 1)
        found, first = Nearest(distance.gather(1, best), which.gather(1, best)), first + len(block)
    return found


def _nearest_of(x: Tensor, rows: Tensor, k: int) -> Nearest:
    found = []
    for part in x.split(max(1, BLOCK // max(len(rows), k * rows.shape[1]))):
        near = torch.cdist(part, rows).topk(min(k, len(rows)), largest=False).indices
        # cdist multiplies matrices, whose rounding hides distances near zero: those that matter are found again
        found.append(Nearest((part[:, None] - rows[near]).square().sum(2).sqrt(), near))
    return Nearest(*(torch.cat(parts) for parts in zip(*found, strict=True)))


class Copying(NamedTuple):
    """What says whether samples are copies of training images.

    Attributes:
        nearest_is_training: share of samples, by weight, whose nearest image is one of training.
        expected: that share where nothing is copied, n/(n + m).
        std_error: of the share where nothing is copied: which image lies where is chance, and one that is the
            nearest to many samples counts once.
        copied: share of samples that are copies, (share − expected)/(1 − expected); around 0 where there are none.
        copied_std_error: of that.
        ratio: median over samples of the distance to the nearest of equally many training and held-out images,
            one over the other; 1 where nothing is copied.
        training: n.
        held_out: m.
    """

    nearest_is_training: float
    expected: float
    std_error: float
    copied: float
    copied_std_error: float
    ratio: float
    training: int
    held_out: int

    def as_json(self) -> dict[str, Any]:
        """The numbers."""
        return self._asdict()


def copying(
    samples: Tensor, training: Tensor, held_out: Tensor, log_weight: Tensor | None = None, *, seed: int = 0
) -> Copying:
    """Whether samples lie nearer to training images than to images of the same law that training never saw.

    Args:
        samples: pictures or features, `(N, *event)`.
        training: those that the model was trained on, `(n, *event)`.
        held_out: fresh ones, `(m, *event)`.
        log_weight: raw log-weights of the samples, `(N,)`.
        seed: of the training images that are left out where equally many are compared.
    """
    raw = torch.zeros(len(samples)) if log_weight is None else require_weight(log_weight)
    p = torch.softmax(raw.double(), 0).to(samples.device)
    n, m = len(training), len(held_out)
    near, fresh = nearest_rows(samples, training), nearest_rows(samples, held_out)
    # a tie, as of a picture that is in both sets, is half a win
    wins = (near.distance < fresh.distance).double() + 0.5 * (near.distance == fresh.distance).double()
    share, expected = float(p @ wins[:, 0]), n / (n + m)
    owner = torch.where(near.distance < fresh.distance, near.which, n + fresh.which)[:, 0]
    per_image = torch.zeros(n + m, dtype=torch.float64, device=p.device).index_add(0, owner, p)
    error = math.sqrt(expected * (1 - expected) * float(per_image.square().sum()))
    few = min(n, m)
    some = [
        rows[
            torch.randperm(len(rows), generator=generator(derive(seed, "copying", name)))[:few].to(
                rows.device
            )
        ]
        for name, rows in (("training", training), ("held out", held_out))
    ]
    a, b = (nearest_rows(samples, rows).distance[:, 0] for rows in some)
    ratio = _median(torch.where((a == 0) & (b == 0), torch.ones_like(a), a / b), p)
    rest = 1 - expected
    return Copying(share, expected, error, (share - expected) / rest, error / rest, ratio, n, m)


def _median(values: Tensor, p: Tensor) -> float:
    values, order = values.sort()
    middle = torch.searchsorted(p[order].cumsum(0), 0.5)
    return float(values[middle.clamp(max=len(values) - 1)])
