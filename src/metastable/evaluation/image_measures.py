"""What images are worth: every measure of them against data, each with its number of images, interval and floor.

The floor is what fresh data have at the same number of images: no model can be told from data below it.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import InputError
from ..core.random import derive, generator
from ..core.types import Walkers
from .copying import copying, nearest_rows
from .distances import without_copies
from .frechet import Statistics, needed, statistics_of
from .image_classifier import class_shares, train_classifier
from .image_distances import frechet, inception_score, kid, precision_recall
from .image_features import FeatureNetwork, Features, Pictures, Progress, as_pictures, scale_of

PAIRS = 10_000
"""Images of either kind behind KID, precision and recall, whose cost grows with the square."""
LEAST_PAIRED = 2.0
"""Images that samples must be worth to be compared by pairs."""
COMPARED = 1000
"""Samples whose nearest images are looked for."""
SLIGHTLY = 0.1
"""How far samples may lie outside a scale that nothing but themselves tells, as a share of its length."""
SHOWN, BESIDE = 8, 5
"""Samples in the picture of nearest images, and how many images beside each."""


@dataclass(frozen=True)
class Described:
    """The features of all images of a set, `(N, D)`, in memory or in the file that keeps them; their statistics."""

    features: Tensor
    statistics: Statistics

    @property
    def some(self) -> Tensor:
        """Those of at most `PAIRS` images, some of all and not the first ones: sets may be sorted by class."""
        chosen = torch.randperm(len(self.features), generator=torch.Generator().manual_seed(0))[:PAIRS]
        return self.features[chosen]


@dataclass(frozen=True)
class Labelled:
    """Images of known classes, for a classifier that tells the classes of samples.

    Attributes:
        x: images in the units of the samples, `(N, C, H, W)`.
        labels: their classes, `(N,)`.
        test: others with their labels, for the accuracy.
        classes: names of the classes by label, where they have any.
        noise: that the samples have beyond the images' own.
        device: where the classifier is trained.
    """

    x: Tensor
    labels: Tensor
    test: tuple[Tensor, Tensor]
    classes: tuple[str, ...] = ()
    noise: float = 0.0
    device: torch.device | str = "cpu"


@dataclass(frozen=True)
class ImageQuestion:
    """What is to be measured.

    Attributes:
        samples: images of the model with their weights, `(N, C, H, W)`, on the scale of the data.
        data: images that the samples are compared with, those of training; None where `statistics` are all
            there is.
        held_out: fresh images of the same law, for the floors and for copying.
        network: gives features; without one nothing is measured but distances between pixels.
        statistics: stand for `data` in the Fréchet distance.
        cache: a folder in which features of data are kept; None keeps none.
        labelled: images of known classes, where shares of classes are asked for.
        most: samples that are looked at, at most.
        samples_from: in words, where they came from.
        own: whether they are a model's own, so that the data's scale is theirs however far they lie outside.
        progress: is told of every batch of images.
        scale: of the samples where there are no `data`; None tells it by their values.
    """

    samples: Walkers
    data: Pictures | None = None
    held_out: Pictures | None = None
    network: FeatureNetwork | None = None
    statistics: Statistics | None = None
    cache: Path | None = None
    labelled: Labelled | None = None
    most: int | None = None
    samples_from: str = ""
    progress: Progress | None = None
    own: bool = False
    scale: tuple[float, float] | None = None


def image_measures(asked: ImageQuestion, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """All measures as `evaluation.json` holds them, and the arrays behind their pictures.

    Fewer walkers than there are (`most`) are drawn in proportion to their weights and stand for all, none twice.
    """
    walkers, data, held_out = asked.samples, asked.data, asked.held_out
    if asked.most is not None:
        walkers = without_copies(walkers, asked.most, derive(seed, "images"))
    scale = data.scale if data is not None else asked.scale or scale_of(walkers.x, beyond=SLIGHTLY)
    shown = as_pictures(walkers.x, "samples", scale, anywhere=asked.own)
    for pictures in (data, held_out):
        if pictures is not None and pictures.event_shape != shown.event_shape:
            raise InputError(
                f"{pictures.name}: pictures must be {_shape(shown)} as the samples are, got "
                f"{_shape(pictures)}; shrink a set with ?size=SIDE, and compare grey pictures with grey ones"
            )
    worth = min(asked.samples.ess, walkers.ess)
    numbers: dict[str, Any] = {
        "samples": len(walkers),
        "samples_from": asked.samples_from,
        "ess": worth,
        "clipped_share": shown.clipped,
        "data": None if data is None else data.name,
        "data_images": 0 if data is None else len(data),
        "held_out": None if held_out is None else held_out.name,
        "held_out_images": 0 if held_out is None else len(held_out),
    }
    notes = [] if held_out is not None else ["no floors and no look at copying: there are no held-out images"]
    compared, arrays = nearest_images(asked, shown, walkers.log_weight, seed)
    if asked.network is None:
        notes.append(
            "no FID, KID, precision and recall: no network was named (--inception FILE), and none is installed "
            "(pip install 'metastable[fid]')"
        )
    else:
        features = asked.network(shown, asked.progress)
        found, copied, more = feature_measures(
            asked, features, replace(walkers, x=features.values), worth, seed
        )
        numbers, compared, notes = numbers | found, compared | copied, notes + more
    if asked.labelled is not None:
        numbers["class_shares"] = shares_beside_data(asked.labelled, asked.samples, seed)
    return numbers | {"notes": notes, "copying": compared}, arrays


def _shape(pictures: Pictures) -> str:
    return " × ".join(map(str, pictures.event_shape))


def shares_beside_data(labelled: Labelled, samples: Walkers, seed: int) -> dict[str, Any]:
    """Shares of classes among samples beside those of the data, by a classifier whose accuracy is told."""
    classifier = train_classifier(
        labelled.x, labelled.labels, labelled.test, noise=labelled.noise, seed=seed, device=labelled.device
    )
    found = class_shares(samples, classifier)
    data = torch.bincount(labelled.labels.cpu(), minlength=classifier.classes).double() / len(labelled.labels)
    there = [i for i in range(classifier.classes) if data[i] > 0 or found.shares[i] > 0]
    return {
        "classes": [labelled.classes[i] if labelled.classes else str(i) for i in there],
        "data": data[there].tolist(),
        "samples": found.shares[there].tolist(),
        "std_error": found.std_error[there].tolist(),
        "ess": found.ess,
        "confidence": found.confidence,
        "accuracy": classifier.accuracy,
        "accuracy_se": classifier.accuracy_se,
        "test_images": classifier.test_images,
        "noise": classifier.noise,
    }


def describe(
    network: FeatureNetwork, pictures: Pictures, cache: Path | None = None, progress: Progress | None = None
) -> Described:
    """Features of data, from the cache where they were asked for before; there they stay in their file."""
    if cache is None:
        features = network(pictures, progress).values
        return Described(features, statistics_of(features, device=network.device).to("cpu"))
    cache.mkdir(parents=True, exist_ok=True)
    rows, kept = (cache / f"{network.digest}-{pictures.digest}.{kind}" for kind in ("npy", "npz"))
    if not (rows.is_file() and kept.is_file()):
        own = f".{os.getpid()}"  # a cache that was cut short is none
        done, shape = 0, (len(pictures), network.width)
        file = np.lib.format.open_memmap(f"{rows}{own}", "w+", np.float32, shape)
        for found in network.batches(pictures, progress):
            file[done : done + len(found.values)] = found.values.numpy()
            done += len(found.values)
        file.flush()
        part = kept.with_suffix(f"{own}.npz")
        statistics_of(torch.from_numpy(file), device=network.device).save(part)
        Path(f"{rows}{own}").replace(rows)
        part.replace(kept)
    return Described(torch.from_numpy(np.load(rows, mmap_mode="c")), Statistics.load(kept))


def described(asked: ImageQuestion, pictures: Pictures | None, notes: list[str]) -> Described | None:
    """Features of data; where they cannot be kept that is noted, and they are made all the same."""
    assert asked.network is not None
    if pictures is None:
        return None
    try:
        return describe(asked.network, pictures, asked.cache, asked.progress)
    except OSError as error:
        notes.append(f"features of {pictures.name} are not kept for the next time ({error})")
        return describe(asked.network, pictures, None, asked.progress)


def feature_measures(
    asked: ImageQuestion, features: Features, samples: Walkers, worth: float, seed: int
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Measures of features with their floors, whether samples are copies by them, and what could not be measured.

    Args:
        asked: the network, the data, and statistics that stand for them.
        features: of the samples, as the network gave them.
        samples: their values with weights, `(N, D)`.
        worth: effective number of samples.
        seed: of resamples and of the rows behind floors.
    """
    network = asked.network
    assert network is not None
    device, log_weight = network.device, samples.log_weight.cpu()
    notes: list[str] = []
    data, held_out = (
        described(asked, pictures, notes)
        for pictures in (
            # statistics that are known leave only pairs to be looked at
            asked.data if asked.data is None or asked.statistics is None else asked.data.some(PAIRS),
            asked.held_out,
        )
    )
    fresh = (held_out.some[: round(worth)] if held_out else features.values[:0]).to(device)
    kind = {"name": network.name, "features": network.width, "is_inception": network.is_inception}
    found: dict[str, Any] = {"network": kind | {"classes": network.classes}}
    reference = asked.statistics or (None if data is None else data.statistics)
    assert reference is not None
    measured, more = frechet_beside_floor(network, samples, reference, fresh, worth, seed)
    found, copied, notes = found | measured, {}, notes + more
    if data is not None:
        measured, more = pairs_beside_floors(samples, data.some.to(device), fresh, worth, seed)
        found, notes = found | measured, notes + more
        if held_out is not None:
            some = _some(len(samples), seed)
            near = copying(
                features.values[some], data.features, held_out.features, log_weight[some], seed=seed
            )
            copied = {"features": near.as_json() | {"training_images": len(asked.data or ())}}
    if features.log_p is None:
        notes.append(f"no Inception Score: {network.name} ends at its features and has no class head")
    else:
        key = "inception_score" if network.is_inception else "class_score"
        found[key] = inception_score(features.log_p, log_weight, seed=seed, worth=worth).as_json()
    return found, copied, notes


def frechet_beside_floor(
    network: FeatureNetwork, samples: Walkers, reference: Statistics, fresh: Tensor, worth: float, seed: int
) -> tuple[dict[str, Any], list[str]]:
    """The Fréchet distance of samples, called FID where the network is Inception, or why there is none."""
    name, least = "FID" if network.is_inception else "Fréchet distance", needed(network.width)
    behind = reference.images
    if min(worth, behind if math.isfinite(behind) else worth) < least - 0.5:
        words = (
            f"no {name}: {network.width} features need {least} images or more, and there are {worth:.0f} effective "
            f"samples{f' and {behind:.0f} images of data' if behind < least else ''}; KID is unbiased at any number"
        )
        return {}, [words]
    value = frechet(samples.x.to(network.device), samples.log_weight, reference, seed=seed, worth=worth)
    floor = None
    if len(fresh) >= least:
        floor = frechet(fresh, torch.zeros(len(fresh)), reference, seed=seed).as_json()
    key = "fid" if network.is_inception else "frechet_distance"
    known = behind if math.isfinite(behind) else None
    return {key: value.as_json() | {"reference_images": known, "floor": floor}}, []


def pairs_beside_floors(
    samples: Walkers, rows: Tensor, fresh: Tensor, worth: float, seed: int
) -> tuple[dict[str, Any], list[str]]:
    """KID, precision and recall, of pairs of images, or why there are none."""
    if worth < LEAST_PAIRED:
        return {}, [
            f"no KID, precision and recall: by their weights the samples are worth {worth:.1f} images"
        ]
    pairs = without_copies(samples, PAIRS, derive(seed, "pairs"))
    few, log_weight = pairs.x.to(rows.device), pairs.log_weight.cpu()
    settings: dict[str, Any] = {"log_weight": log_weight, "seed": seed, "worth": worth}
    values, floors = [kid(few, rows, **settings), *precision_recall(few, rows, **settings)], []
    if len(fresh) > 3:
        floors = [kid(fresh, rows, seed=seed), *precision_recall(fresh, rows, seed=seed)]
    return {
        name: value.as_json()
        | {"reference_images": len(rows), "floor": floors[i].as_json() if floors else None}
        for i, (name, value) in enumerate(zip(("kid", "precision", "recall"), values, strict=True))
    }, []


def nearest_images(
    asked: ImageQuestion, samples: Pictures, log_weight: Tensor, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The nearest training images of some samples, and whether samples are copies, both by pixels."""
    if asked.data is None:
        return {}, {}
    log_weight = log_weight.cpu()
    device = torch.device("cpu") if asked.network is None else asked.network.device
    some, training = _some(len(samples), seed), asked.data.bytes
    x = samples.bytes[some.to(samples.bytes.device)].to(device)
    first = log_weight[some].topk(min(SHOWN, len(some))).indices.to(device)
    near = nearest_rows(x[first], training, BESIDE)
    sheet = torch.cat([x[first][:, None].cpu(), training[near.which.to(training.device)].cpu()], 1)
    arrays = {
        "nearest_images": sheet.float().div(255).numpy(),
        "nearest_distance": near.distance.div(255).cpu().numpy(),
    }
    if asked.held_out is None:
        return {}, arrays
    found = copying(x, training, asked.held_out.bytes, log_weight[some], seed=seed)
    return {"pixels": found.as_json()}, arrays


def _some(n: int, seed: int) -> Tensor:
    """Samples whose nearest images are looked for."""
    return torch.randperm(n, generator=generator(derive(seed, "nearest")))[:COMPARED]
