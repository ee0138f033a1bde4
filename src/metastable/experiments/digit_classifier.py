"""A small classifier of digits, to say which digit a sample is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from metastable.core.parts import in_parts
from metastable.core.random import derive, generator, normal_like, seeded

BATCH = 256


class ImageClassifier(NamedTuple):
    """Logits of images `(B, C, H, W)`, and the share of test images that they are right about."""

    network: nn.Module
    accuracy: float

    def __call__(self, x: Tensor) -> Tensor:
        """Logits, `(B, classes)`."""
        return in_parts(self.network, x)


def train_classifier(
    x: Tensor,
    labels: Tensor,
    test: tuple[Tensor, Tensor],
    *,
    noise: float = 0.0,
    epochs: int = 4,
    width: int = 32,
    seed: int = 0,
) -> ImageClassifier:
    """Three convolutions, on images with normal noise of up to `noise`; Adam, at a rate that falls to zero."""
    classes = int(labels.max()) + 1
    with seeded(derive(seed, "classifier")):
        network = nn.Sequential(
            *(nn.Conv2d(x.shape[1], width, 3, 1, 1), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU()),
            *(nn.Conv2d(2 * width, 4 * width, 3, 2, 1), nn.ReLU(), nn.Flatten()),
            *(nn.LazyLinear(128), nn.ReLU(), nn.Linear(128, classes)),
        )
        network(torch.zeros_like(x[:1], device="cpu"))
    network = network.to(x.device)
    optimiser = torch.optim.Adam(network.parameters(), 3e-3)
    rng, per_epoch = generator(derive(seed, "batches"), x.device), -(-len(x) // BATCH)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * per_epoch)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=rng, device=x.device).split(BATCH):
            level = noise * torch.rand((len(rows), 1, 1, 1), generator=rng, device=x.device)
            loss = cross_entropy(network(x[rows] + level * normal_like(x[rows], rng)), labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            rates.step()
    found = ImageClassifier(network.requires_grad_(False), 0.0)
    right = found(test[0]).argmax(1) == test[1]
    return found._replace(accuracy=float(right.double().mean()))
