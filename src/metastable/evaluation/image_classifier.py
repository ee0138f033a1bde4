"""Shares of classes among a model's samples, told by a small classifier of labelled images.

The classifier is no part of the model: it is trained on data, at the noise that the samples have, and what it
says is worth as much as its accuracy on images that it never saw.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.errors import InputError, require, require_count
from ..core.parts import in_parts
from ..core.random import derive, generator, seeded
from ..core.types import Walkers
from ..core.weights import weighted_mean
from .modes import sampled_mode_weights

Logits = Callable[[Tensor], Tensor]
Noise = float | tuple[float, float]
BATCH = 256
PEAK_RATE = 4e-3
EPOCHS, UPDATES = 4, 250
"""Passes over a large set; a small one has as many as give so many updates."""


@dataclass(frozen=True)
class ImageClassifier:
    """Logits of images, and how far they are to be believed.

    Attributes:
        network: `(B, C, H, W)` to logits `(B, K)`.
        classes: K.
        accuracy: on images it was not trained on, with the same noise; NaN where there were none.
        test_images: how many those were.
        noise: standard deviation of the normal noise on its images, or the least and the most of them.
    """

    network: nn.Module
    classes: int
    accuracy: float = math.nan
    test_images: int = 0
    noise: Noise = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """Logits, `(B, K)`, where the network lies."""
        home = next(self.network.parameters())
        return in_parts(lambda part: self.network(part.to(home)), x)

    @property
    def accuracy_se(self) -> float:
        """Standard error of the accuracy, of a share with half an error more and half a hit more."""
        n = self.test_images
        share = (self.accuracy * n + 0.5) / (n + 1)
        return math.sqrt(share * (1 - share) / n) if n else math.nan

    def right_about(self, x: Tensor, labels: Tensor, seed: int = 0) -> float:
        """Share of images `(N, C, H, W)` whose class it tells, with noise of its own put on them."""
        rng = generator(derive(seed, "classifier-test"))
        guess = self(with_noise(x.float(), self.noise, rng)).argmax(1)
        return float((guess.cpu() == labels.cpu()).double().mean())


def small_network(event_shape: tuple[int, ...], classes: int, width: int = 16) -> nn.Module:
    """Three convolutions that halve the sides, and two linear layers: 0.1 million parameters for digits.

    Pictures with sides below 16 have none to spare: the first convolution leaves them.
    """
    channels, *sides = event_shape
    strides = (2 if min(sides) >= 16 else 1, 2, 2)
    layers: list[nn.Module] = []
    for wide, side, stride in zip((width, 2 * width, 4 * width), (5, 5, 3), strides, strict=True):
        convolution = nn.Conv2d(channels, wide, side, stride, side // 2, bias=False)
        layers += [convolution, nn.BatchNorm2d(wide), nn.ReLU()]
        channels, sides = wide, [-(-length // stride) for length in sides]
    flat, last = channels * math.prod(sides), 4 * width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, last), nn.ReLU(), nn.Linear(last, classes))


def train_classifier(
    x: Tensor,
    labels: Tensor,
    test: tuple[Tensor, Tensor] | None = None,
    *,
    noise: Noise = 0.0,
    epochs: int | None = None,
    width: int = 16,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> ImageClassifier:
    """A small classifier of labelled images.

    Adam with a rate that rises and falls once. Images are moved by up to two pixels, which a digit is none the
    worse for, and have fresh noise at every pass.

    Args:
        x: images, `(N, C, H, W)`.
        labels: their classes, integers from 0 to K − 1, `(N,)`.
        test: images and labels that it is not trained on, for its accuracy.
        noise: standard deviation of normal noise on the images, as in the training of the model whose samples it
            is to judge; or the least and the most, and each image has its own in between. The accuracy is at this
            noise.
        epochs: passes over the images; None has four, or as many as make 250 updates of 256 images.
        width: channels of the first convolution.
        seed: of the network, the order, the shifts and the noise.
        device: where to train; by default where `x` lies.
    """
    require(
        x.dim() == 4 and len(x) == len(labels) > 1, "x", "images (N, C, H, W), a label each", tuple(x.shape)
    )
    least, most = noise if isinstance(noise, tuple) else (noise, noise)
    rule = "a finite number of at least 0" + (
        ", and another that is no less" if isinstance(noise, tuple) else ""
    )
    require(0 <= least <= most < math.inf, "noise", rule, noise)
    require_count("width", width)
    device = x.device if device is None else torch.device(device)
    classes = int(max(labels.max(), labels.max() if test is None else test[1].max())) + 1
    with seeded(derive(seed, "classifier")):
        network = small_network(tuple(x.shape[1:]), classes, width).to(device)
    rng = generator(derive(seed, "classifier-batches"))
    batches = -(-len(x) // BATCH)
    epochs = max(EPOCHS, -(-UPDATES // batches)) if epochs is None else epochs
    require_count("epochs", epochs)
    optimiser = torch.optim.Adam(network.parameters(), PEAK_RATE, betas=(0.9, 0.99))
    rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, PEAK_RATE, total_steps=max(2, epochs * batches))
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=rng).split(BATCH):
            part, truth = (values[rows.to(values.device)].to(device) for values in (x, labels))
            logits = network(with_noise(_moved(part.float(), rng), noise, rng))
            optimiser.zero_grad()
            nn.functional.cross_entropy(logits, truth).backward()
            optimiser.step()
            rates.step()
    found = ImageClassifier(network.eval().requires_grad_(False), classes, noise=noise)
    if test is None:
        return found
    return replace(found, accuracy=found.right_about(*test, seed), test_images=len(test[1]))


def _moved(x: Tensor, rng: torch.Generator, most: int = 2) -> Tensor:
    """All images of a batch moved by the same few pixels; the border repeats itself."""
    most = min(most, min(x.shape[2:]) // 14)
    down, right = torch.randint(2 * most + 1, (2,), generator=rng).tolist()
    padded = nn.functional.pad(x, (most,) * 4, mode="replicate")
    return padded[..., down : down + x.shape[2], right : right + x.shape[3]]


def with_noise(x: Tensor, noise: Noise, rng: torch.Generator) -> Tensor:
    """Images with normal noise; where it is a range, each image has its own standard deviation, evenly in it."""
    if not isinstance(noise, tuple):
        return x + noise * torch.randn(x.shape, generator=rng).to(x) if noise else x
    level = noise[0] + (noise[1] - noise[0]) * torch.rand((len(x), 1, 1, 1), generator=rng)
    return x + (level * torch.randn(x.shape, generator=rng)).to(x)


class ClassShares(NamedTuple):
    """Share of each class among samples, `(K,)`, its standard error, and the effective number of samples.

    `confidence` is the mean of the largest p(y | x): far below the classifier's accuracy, samples are of no class.
    """

    shares: Tensor
    std_error: Tensor
    ess: float
    confidence: float

    def as_json(self) -> dict[str, Any]:
        """The numbers."""
        return {**self._asdict(), "shares": self.shares.tolist(), "std_error": self.std_error.tolist()}


def class_shares(samples: Walkers | Tensor, classifier: Logits) -> ClassShares:
    """Shares of classes among samples, by weight, with √(w(1−w)/ESS) as the standard error.

    Args:
        samples: weighted walkers, or samples of equal weight, `(N, *event)`.
        classifier: from samples to logits, `(N, K)`: an `ImageClassifier`, or `energy.logits` of a classifier
            that is an energy model.

    >>> found = class_shares(torch.tensor([[-1.0], [1.0], [2.0], [3.0]]), lambda x: torch.cat([-x, x], 1))
    >>> found.shares.tolist()
    [0.25, 0.75]
    """
    walkers = samples if isinstance(samples, Walkers) else Walkers.equal(samples)
    logits = in_parts(classifier, walkers.x).double().to(walkers.x.device)
    if logits.dim() != 2 or len(logits) != len(walkers):
        raise InputError(
            f"classifier: must give logits (N, K), got {tuple(logits.shape)} for {len(walkers)} samples"
        )
    corners = torch.eye(logits.shape[1], dtype=torch.float64, device=logits.device)
    told = sampled_mode_weights(replace(walkers, x=corners[logits.argmax(1)]), corners)
    sure = weighted_mean(torch.softmax(logits, 1).amax(1), walkers.log_weight)
    return ClassShares(told.weights.cpu(), told.std_error.cpu(), told.ess, float(sure))
