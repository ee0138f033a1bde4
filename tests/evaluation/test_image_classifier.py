"""Shares of classes by a classifier that is worth its accuracy."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from metastable.core.errors import InputError
from metastable.core.types import Walkers
from metastable.data import load_images
from metastable.evaluation.image_classifier import class_shares, small_network, train_classifier, with_noise


@pytest.fixture(scope="module")
def digits():
    found = load_digits()
    x = torch.from_numpy(found.images).float()[:, None] / 8 - 1
    return x, torch.from_numpy(found.target).long()


def test_digits_are_told_apart_and_the_accuracy_is_that_of_unseen_ones(digits):
    x, labels = digits
    found = train_classifier(x[:1400], labels[:1400], (x[1400:], labels[1400:]), epochs=10, width=8)
    assert found.accuracy > 0.9
    assert found.test_images == 397
    guess = found(x[1400:]).argmax(1)
    assert found.accuracy == pytest.approx(float((guess == labels[1400:]).double().mean()))
    assert found.accuracy_se == pytest.approx(math.sqrt(found.accuracy * (1 - found.accuracy) / 397), rel=0.1)
    again = train_classifier(x[:300], labels[:300], epochs=1, seed=3)
    same = train_classifier(x[:300], labels[:300], epochs=1, seed=3)
    assert torch.equal(again(x[:5]), same(x[:5]))
    assert math.isnan(again.accuracy)


def test_few_images_are_passed_over_more_often(digits):
    x, labels = digits
    found = train_classifier(x[:150], labels[:150], (x[1400:], labels[1400:]), width=4)
    assert found.accuracy > 0.6  # a fifth after four passes


def test_noise_is_in_training_and_in_the_accuracy(digits):
    x, labels = digits
    test = (x[1400:], labels[1400:])
    found = train_classifier(x[:300], labels[:300], test, epochs=1, width=8, noise=50.0)
    assert found.accuracy < 0.3  # nothing can be seen
    assert found.noise == 50.0
    with pytest.raises(InputError, match="noise: must be a finite number of at least 0, got -1"):
        train_classifier(x, labels, noise=-1)
    with pytest.raises(InputError, match=r"noise: must be .*, and another that is no less, got"):
        train_classifier(x, labels, noise=(0.3, 0.1))


def test_noise_in_a_range_is_every_images_own(digits):
    rng = torch.Generator().manual_seed(0)
    levels = with_noise(torch.zeros(300, 1, 40, 40), (0.1, 0.3), rng).flatten(1).std(1).sort().values
    assert torch.allclose(levels, torch.linspace(0.1, 0.3, 300), atol=0.02)
    x, labels = digits
    found = train_classifier(
        x[:300], labels[:300], (x[1400:], labels[1400:]), epochs=12, width=8, noise=(0.0, 2.0)
    )
    assert found.accuracy == found.right_about(x[1400:], labels[1400:])
    assert found.accuracy < replace(found, noise=0.0).right_about(x[1400:], labels[1400:]) - 0.1


@pytest.mark.parametrize(("side", "strides"), [(8, [1, 2, 2]), (28, [2, 2, 2])])
def test_small_pictures_keep_their_sides_once(side, strides):
    network = small_network((1, side, side), 3, width=4)
    found = [layer.stride[0] for layer in network.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert found == strides
    assert network(torch.zeros(2, 1, side, side)).shape == (2, 3)


def test_shares_are_by_weight_and_their_errors_by_the_effective_number():
    x = torch.tensor([[-1.0]]).repeat(100, 1).index_fill(0, torch.arange(40), 1.0)
    two = class_shares(x, lambda rows: torch.cat([-rows, rows], 1))
    assert two.shares.tolist() == pytest.approx([0.6, 0.4])
    assert two.std_error.tolist() == pytest.approx([math.sqrt(0.24 / 100)] * 2, rel=0.01)
    log_weight = torch.zeros(100)
    log_weight[40:] = math.log(2 / 3)  # as much weight on either class
    walkers = Walkers(x, log_weight, info={"start_ess": 25.0})
    found = class_shares(walkers, lambda rows: torch.cat([-rows, rows], 1))
    assert found.shares.tolist() == pytest.approx([0.5, 0.5])
    assert found.ess < 25.01
    assert found.std_error.tolist() == pytest.approx([0.5 / math.sqrt(found.ess)] * 2)
    assert found.confidence == pytest.approx(1 / (1 + math.exp(-2)))
    with pytest.raises(InputError, match=r"classifier: must give logits \(N, K\), got \(100,\)"):
        class_shares(x, lambda rows: rows[:, 0])


@pytest.mark.slow
@pytest.mark.skipif("METASTABLE_DATA" not in os.environ, reason="METASTABLE_DATA names no folder with MNIST")
@pytest.mark.parametrize("noise", [0.0, 0.3, (0.0, 0.3)])
def test_mnist_is_told_apart_at_99_percent(noise):
    folder = Path(os.environ["METASTABLE_DATA"])
    train, test = (load_images("mnist", folder, split) for split in ("train", "test"))
    assert train.labels is not None
    assert test.labels is not None
    found = train_classifier(train.x, train.labels, (test.x, test.labels), noise=noise)
    assert found.accuracy >= 0.99
