"""Three digits at 4/7, 2/7 and 1/7: the pictures, and an energy whose widths are learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from metastable.core.errors import require
from metastable.data import load_array, load_images
from metastable.proposals import Gaussian

from .base import Bench

CLASSES = (2, 3, 6)
TIMES = (4, 2, 1)
TRUE = torch.tensor(TIMES, dtype=torch.float64) / sum(TIMES)


class Digits(NamedTuple):
    """Pictures to learn, with those that were not seen; all digits for the classifier, `(x, labels)` each."""

    x: Tensor
    labels: Tensor
    held_out: Tensor
    held_out_labels: Tensor
    all_train: tuple[Tensor, Tensor]
    all_test: tuple[Tensor, Tensor]


def digits(bench: Bench) -> Digits:
    """MNIST, or scikit-learn's digits of 8 × 8, on the device."""
    if bench.data == "digits":
        parts = load_array("toy:digits").split(0.25, seed=0)
    else:
        ask = {"size": bench.size, "seed": bench.seed}
        parts = (
            load_images("mnist", split="train", n=bench.train_rows, **ask),
            load_images("mnist", split="test", n=bench.test_rows, **ask),
        )
    train, test = ((part.x.to(bench.device), part.labels.to(bench.device)) for part in parts)  # pyright: ignore
    return Digits(*some_of(*train, bench.count), *some_of(*test, bench.held_out_count), train, test)


def some_of(x: Tensor, labels: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """The first 4, 2 and 1 times `least` pictures of the three digits."""
    rows = [
        (labels == label).nonzero()[:, 0][: times * least]
        for label, times in zip(CLASSES, TIMES, strict=True)
    ]
    for label, times, found in zip(CLASSES, TIMES, rows, strict=True):
        enough = f"such that there are {times} times as many pictures of a {label}; there are {len(found)}"
        require(len(found) == times * least, "count", enough, least)
    return x[torch.cat(rows)], labels[torch.cat(rows)]


def correlated(x: Tensor, noise: float, inflate: float) -> Gaussian:
    """The Gaussian with mean and covariance of pictures with their noise, its standard deviations × `inflate`.

    Of 28 × 28 pixels it knows 180 nats more than one without correlations at noise 0.3, and 370 at 0.05.
    """
    flat = x.double().flatten(1)
    covariance = flat.T.cov(correction=0) + noise**2 * torch.eye(flat.shape[1]).to(flat)
    return Gaussian(x.mean(0), inflate * torch.linalg.cholesky(covariance).to(x))


class Sharpened(nn.Module):
    """A network, and factors e^a on the reference's precisions, `(*event)`, all of them 0 at the start."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor):
        super().__init__()
        self.log_precision = nn.Parameter(torch.zeros_like(mean))
        self.network = network
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: Tensor) -> Tensor:
        """f(x) + Σ ½(e^a − 1)z² − ½a, with z the number of standard deviations of the reference."""
        a, squares = self.log_precision, ((x - self.mean) / self.std).square()
        return self.network(x) + 0.5 * (torch.expm1(a) * squares - a).flatten(1).sum(1)


def sharpening(rate: float, faster: float) -> Callable[[nn.Module], Optimizer]:
    """Adam, with a rate of its own for the precisions, which have a long way to go."""

    def make(module: nn.Module) -> Optimizer:
        named = dict(module.named_parameters())
        own = [p for name, p in named.items() if name.endswith("log_precision")]
        rest = [p for name, p in named.items() if not name.endswith("log_precision")]
        groups = [{"params": rest}, {"params": own, "lr": faster * rate}]
        return AdamW(groups, lr=rate, weight_decay=0.0, fused=own[0].device.type in ("cpu", "cuda"))

    make.per_module = True  # pyright: ignore
    return make
