"""Whether a model has learned or copied: nearest training images of its samples, against images it never saw.

Where nothing is copied, training and held-out images are exchangeable, so that the image nearest to a sample is
one of training with probability n/(n + m), n and m being their numbers. More than that is copying. Held-out images
of another law are not exchangeable, and then say nothing: whether they are is told by their own nearest images.
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
ASKED = 1000
"""Held-out images whose nearest ones are looked for."""


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
        fresh_is_training: share of held-out images whose nearest other image is one of training.
        fresh_expected: that share where they are exchangeable, n/(n + m − 1).
        fresh_std_error: of that share.
    """

    nearest_is_training: float
    expected: float
    std_error: float
    copied: float
    copied_std_error: float
    ratio: float
    training: int
    held_out: int
    fresh_is_training: float
    fresh_expected: float
    fresh_std_error: float

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
    share, expected = float(p @ _wins(near, fresh)), n / (n + m)
    error = _chance(near, fresh, p, n, m, expected)
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
    copied = (share - expected) / rest, error / rest, ratio
    return Copying(share, expected, error, *copied, n, m, *exchangeable(training, held_out, seed))


def exchangeable(training: Tensor, held_out: Tensor, seed: int = 0) -> tuple[float, float, float]:
    """(share of held-out images whose nearest other one is of training, what it is by chance, its standard error).

    Exchangeable ones have n/(n + m − 1), n and m being the numbers; those of another law lie nearer to one another.
    The error is rather too large than too small: it is there to find other laws, and not to measure.

    >>> exchangeable(torch.zeros(3, 1), torch.tensor([[8.0], [9.0], [9.5]]))[:2]
    (0.0, 0.6)
    """
    n, m = len(training), len(held_out)
    asked = torch.randperm(m, generator=generator(derive(seed, "exchangeable")))[:ASKED].to(held_out.device)
    x, expected = held_out[asked], n / (n + m - 1)
    if m < 2:  # there is no other
        return 1.0, 1.0, 0.0
    near, pair = nearest_rows(x, training), nearest_rows(x, held_out, 2)
    # the first of the two, but for its copies
    itself = (pair.which[:, :1] == asked[:, None].to(pair.which)).long()
    other = Nearest(pair.distance.gather(1, itself), pair.which.gather(1, itself))
    p = torch.full((len(x),), 1 / len(x), dtype=torch.float64, device=x.device)
    # two images may be nearest to each other and count twice; an image at least is chance
    error = math.sqrt(2) * max(_chance(near, other, p, n, m, expected), 1 / len(x))
    return float(p @ _wins(near, other)), expected, error


def _wins(near: Nearest, fresh: Nearest) -> Tensor:
    """1 where the nearest image is one of training; a tie, as of a picture that is in both sets, is half a win."""
    wins = (near.distance < fresh.distance).double() + 0.5 * (near.distance == fresh.distance).double()
    return wins[:, 0]


def _chance(near: Nearest, fresh: Nearest, p: Tensor, n: int, m: int, expected: float) -> float:
    """Standard error of the share of `_wins` where which image lies where is chance."""
    owner = torch.where(near.distance < fresh.distance, near.which, n + fresh.which)[:, 0]
    per_image = torch.zeros(n + m, dtype=torch.float64, device=p.device).index_add(0, owner, p)
    return math.sqrt(expected * (1 - expected) * float(per_image.square().sum()))


def _median(values: Tensor, p: Tensor) -> float:
    values, order = values.sort()
    middle = torch.searchsorted(p[order].cumsum(0), 0.5)
    return float(values[middle.clamp(max=len(values) - 1)])
