"""What `metastable evaluate` asks and says about samples that are pictures."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.core.array_files import open_arrays
from metastable.core.errors import InputError, require, require_count
from metastable.core.types import Walkers
from metastable.core.weights import require_weight
from metastable.data import Dataset
from metastable.data.image_files import data_folder
from metastable.data.images import image_source
from metastable.evaluation.frechet import Statistics
from metastable.evaluation.image_features import (
    FAR_SHARE,
    Pictures,
    Progress,
    as_pictures,
    installed_network,
    open_network,
    scale_of,
)
from metastable.evaluation.image_measures import SLIGHTLY, ImageQuestion, Labelled
from metastable.report.sections.images import copying_lines, measure_rows, share_lines
from metastable.runs.run import Run
from metastable.summary.samples import kept_walkers
from metastable.training.engine import Engine

from .console import console, say, table
from .runs import rows_for, training_set
from .sample import draw
from .settings import data_of

NETWORK_VARIABLE = "METASTABLE_INCEPTION"
"""Names the network where images are asked about and no option does."""
SET_SCALE = (-1.0, 1.0)
"""Of image sets and folders of pictures, whatever their values and the noise in their settings."""


@dataclass(frozen=True)
class ImageOptions:
    """The options about images, as they were given."""

    inception: Path | None = None
    images: int | None = None
    samples: str | None = None
    log_weight: Path | None = None
    reference: str | None = None
    fid_statistics: Path | None = None
    class_shares: bool = False
    denoise: bool = False

    @property
    def asked(self) -> bool:
        """Whether any was."""
        return self != ImageOptions()


def run_question(
    run: Run, dataset: Dataset, name: str, asked: ImageOptions, seed: int, progress: Progress | None
) -> ImageQuestion:
    """Samples of a run against the images it was trained on; rows that it held out are the floor.

    Args:
        run: the run.
        dataset: the rows that it is judged by.
        name: what those are.
        asked: the options.
        seed: of samples that are drawn.
        progress: is told of batches.
    """
    if run.conditional or len(run.event_shape) not in (2, 3):
        kind = "conditional" if run.conditional else f"on events of shape {run.event_shape}"
        raise InputError(f"images: needs a run on pictures, (C, H, W), without contexts; this one is {kind}")
    reference = rows_for(run, asked.reference, "reference")[0] if asked.reference else training_set(run)
    if asked.samples is not None:
        samples, origin = read_samples(asked, reference), asked.samples
    else:
        kept, origin = kept_walkers(run)
        if kept is None and asked.images is None:
            raise InputError("images: this run kept no samples; say how many are to be drawn, --images N")
        if asked.images is not None and (kept is None or asked.images > len(kept)):
            require_count("images", asked.images, 2)
            kept, origin = draw(run, asked.images, None, None, seed)
        assert kept is not None
        samples = kept
    fresh = None if name.endswith("the rows it was trained on") else dataset
    noise = 0.0 if asked.samples else run.data_noise
    if asked.denoise:
        require(asked.samples is None, "denoise", "left out with --samples, which are not the run's", True)
        samples = replace(samples, x=run.denoised(samples.x).to(samples.x))
        origin, noise = f"{origin}, without the noise of their training, {noise:g}", 0.0
    if noise:
        origin += f", which still have the noise of their training, {noise:g}"
    question = question_of(asked, samples, origin, reference, fresh, str(run._home.device), noise, progress)
    return replace(question, own=asked.samples is None)


def set_question(
    asked: ImageOptions, data: str | None, device: str, progress: Progress | None
) -> ImageQuestion:
    """Images of a file or a set, without any run: `--reference` are compared with them, `--data` are the floor."""
    if asked.samples is None:
        raise InputError("run: give the folder of a run, or --samples with the images that are to be judged")
    if asked.reference is None and asked.fid_statistics is None:
        raise InputError(
            "reference: give the images to compare with, --reference, or --fid-statistics FILE.npz"
        )
    reference = None if asked.reference is None else data_of({}, asked.reference)[0]
    fresh = None if data is None else data_of({}, data)[0]
    samples = read_samples(asked, reference)
    where = str(Engine(device).device)
    return question_of(asked, samples, asked.samples, reference, fresh, where, 0.0, progress)


def question_of(
    asked: ImageOptions,
    samples: Walkers,
    origin: str,
    reference: Dataset | None,
    fresh: Dataset | None,
    device: str,
    noise: float,
    progress: Progress | None,
) -> ImageQuestion:
    """Everything that is measured, with the network opened and the pictures as bytes."""
    if asked.images is not None:
        require_count("images", asked.images, 2)
    path = asked.inception or os.environ.get(NETWORK_VARIABLE) or installed_network()
    require(
        path is not None or asked.fid_statistics is None, "fid_statistics", "given with --inception", path
    )
    data, held_out = (None if rows is None else pictures_of(rows) for rows in (reference, fresh))
    return ImageQuestion(
        samples,
        data,
        held_out,
        None if path is None else open_network(path, device),
        None if asked.fid_statistics is None else Statistics.load(asked.fid_statistics),
        data_folder() / "features",
        labelled_of(reference, fresh, noise, device) if asked.class_shares else None,
        asked.images,
        origin,
        progress,
        scale=SET_SCALE if image_source(asked.samples or "") else None,
    )


def pictures_of(dataset: Dataset) -> Pictures:
    """Rows of a set as pictures."""
    return as_pictures(dataset.x, dataset.name, SET_SCALE if image_source(dataset.name) else None)


def read_samples(asked: ImageOptions, reference: Dataset | None) -> Walkers:
    """Images of `--samples` with the weights of `--log-weight`, on the scale of the reference."""
    dataset, _ = data_of({}, asked.samples)
    x = dataset.x if reference is None else on_scale_of(reference, dataset)
    if asked.log_weight is None:
        if Path(str(asked.samples)).with_suffix(".log_weight.npy").is_file():
            say(
                f"warning: {asked.samples} has weights beside it that are not used: give them with --log-weight"
            )
        return Walkers.equal(x)
    return Walkers(x, read_log_weight(asked.log_weight, len(x)))


def read_log_weight(path: Path, n: int) -> Tensor:
    """`n` log-weights of a .npy file, float64."""
    if not path.is_file():
        raise InputError(f"log_weight: no such file: {path}")
    try:
        found = open_arrays(path)
    except Exception as error:  # zipfile and the header parser have errors of their own
        raise InputError(f"log_weight: {path} is not a readable .npy file ({error})") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "fiu" or found.shape != (n,):
        got = f"{found.dtype} of shape {found.shape}" if isinstance(found, np.ndarray) else "several arrays"
        raise InputError(f"log_weight: must be {n} numbers, one for each of --samples, got {got}")
    return require_weight(torch.from_numpy(found.astype(np.float64)))


def on_scale_of(reference: Dataset, samples: Dataset) -> Tensor:
    """Samples on the scale of the reference. That of an array is told by its values, and by the reference's.

    Values from 0 to 1 lie on [−1, 1], too: they are left there where the reference has nothing darker either.
    """
    x, (low, high) = samples.x, pictures_of(reference).scale
    scale = SET_SCALE if image_source(samples.name) else scale_of(x, beyond=SLIGHTLY)
    if scale == (0.0, 1.0) and (low, high) == SET_SCALE:
        bright = float((reference.x < 0).double().mean()) <= FAR_SHARE
        scale = SET_SCALE if bright else scale
        say(f"note: {samples.name} goes from 0 to 1 and was read on {'[−1, 1]' if bright else '[0, 1]'}")
    return x if scale is None else (x - scale[0]) * ((high - low) / (scale[1] - scale[0])) + low


def labelled_of(reference: Dataset | None, fresh: Dataset | None, noise: float, device: str) -> Labelled:
    """Labelled images for a classifier, and others for its accuracy: the fresh ones, else a tenth."""
    if reference is None or reference.labels is None:
        raise InputError(
            "class_shares: needs labelled images to train a classifier on, --reference mnist:FOLDER"
        )
    if fresh is None or fresh.labels is None:
        reference, fresh = reference.split(0.1)
    fresh = fresh.numbered(reference.classes)
    assert reference.labels is not None
    assert fresh.labels is not None
    test = fresh.x, fresh.labels
    return Labelled(reference.x, reference.labels, test, reference.classes, noise, device)


def say_images(found: dict[str, Any] | None) -> None:
    """Every measure beside its floor, and in words what could not be measured."""
    if found is None:
        return
    rows = measure_rows(found)
    clipped = (
        f", {found['clipped_share']:.1%} of their values clipped" if found["clipped_share"] > 0.001 else ""
    )
    caption = f"{found['samples']} samples, worth {found['ess']:.0f} ({found['samples_from']}){clipped}"
    if rows:
        head = ["as pictures", "value", "95 % interval", "images", "floor: fresh data"]
        console().print(table(head, rows, "", caption))
    else:
        say(caption)
    say(*copying_lines(found), *share_lines(found), *found["notes"])
