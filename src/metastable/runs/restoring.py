"""Events of which part is missing or noisy, checked against a run and restored by its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.core.errors import InputError, UnsupportedError, require, require_count
from metastable.core.random import derive, generator
from metastable.data import Dataset, load_array
from metastable.data.checks import as_tensor
from metastable.data.files import read_arrays
from metastable.evaluation.image_features import are_bytes
from metastable.evaluation.restoration import PARTS, Restored, mask_named, restore
from metastable.walkers.space import space_of

from .model import Model


def restored(
    model: Model,
    energy: Any,
    images: Any,
    mask: Any,
    *,
    noise: float,
    data_noise: float,
    draws: int,
    steps: int,
    seed: int,
) -> Restored:
    """See `Run.restore`; `energy` is the learned one in the data's units."""
    if model.context_shape is not None:
        raise UnsupportedError(
            "restore: this is a conditional run; one without contexts can be restored with"
        )
    if not space_of(energy).has_volume:
        raise UnsupportedError("restore: units coded −1 and +1 have no noise, and no gradient to restore by")
    require_count("draws", draws)
    require_count("steps", steps, 0)
    require(0 <= noise < float("inf"), "noise", "a finite number of at least 0", noise)
    given = events_of(model, images)
    missing = missing_of(mask, given)
    if not bool(missing.any()) and noise == 0:
        raise InputError("mask: hides nothing, and noise is 0: there is nothing to restore")
    if not bool(given[~missing].isfinite().all()):
        raise InputError("images: must be finite numbers where the mask hides nothing")
    require_scale(model, given[~missing & given.isfinite()])
    scale = torch.ones_like(given[0])
    if model.coordinates is not None and model.walkers is not None:
        scale = model.walkers.x.std(0).to(given).clamp(min=1e-12)
    return restore(
        energy,
        given,
        missing,
        model.walkers,
        noise=noise,
        data_noise=data_noise,
        draws=draws,
        steps=steps,
        scale=scale,
        rng=generator(derive(seed, "restore"), given.device),
    )


def require_scale(model: Model, seen: Tensor, field: str = "images") -> None:
    """Pictures must be on the scale of the run's own: bytes for a model of bytes, and for no other."""
    if len(model.event_shape or ()) not in (2, 3) or model.walkers is None or not len(seen):
        return
    own, whole = model.walkers.x, bool((seen == seen.round()).all())
    most = 1.0 if are_bytes(own) else max(1.0, 2 * float(own.max()))
    dark = whole and float(seen.max()) > most  # bytes nevertheless; a model of 0 to 16 has its own integers
    if are_bytes(own) != (are_bytes(seen) or dark):
        raise InputError(
            f"{field}: must be on the scale of the run's pictures, whose samples go from {float(own.min()):.4g} to "
            f"{float(own.max()):.4g}, got {float(seen.min()):.4g} to {float(seen.max()):.4g}"
        )


def events_of(model: Model, images: Any, field: str = "images") -> Tensor:
    """Events `(B, *event)` in the data's units, from all that data come from; one event alone will do."""
    if isinstance(images, (str, Path)):
        images = load_array(images, least=1)
    x, shape = as_tensor(images.x if isinstance(images, Dataset) else images, field), model.event_shape
    if shape is None:
        shape = tuple(x.shape[1:])
    x = x[None] if tuple(x.shape) == shape else x
    if tuple(x.shape[1:]) != shape or not len(x):
        got, colours = tuple(x.shape[1:]), {1: "grey", 3: "colour"}
        hint = ""
        if len(shape) == len(got) == 3 and shape[1:] == got[1:] and {shape[0], got[0]} == {1, 3}:
            hint = f": the run is of {colours[shape[0]]} pictures, these are {colours[got[0]]}"
        elif len(shape) == len(got) == 3 and shape[1] == shape[2] < min(got[1:]):
            hint = f": an image set is shrunk to it with ?size={shape[1]}"
        raise InputError(f"{field}: must have the run's shape {shape}, got {got}{hint}")
    home = model.home
    if model.coordinates is None:
        return x.to(home)
    return x.to(device=home.device, dtype=torch.float64)


def missing_of(mask: Any, given: Tensor) -> Tensor:
    """Which numbers are missing, bool as `given`: from a name, or ones and zeros of an event or a picture."""
    shape = tuple(given.shape[1:])
    if mask is None:
        return torch.zeros_like(given, dtype=torch.bool)
    if isinstance(mask, str):
        require(len(shape) >= 2, "mask", "ones and zeros for events that are no pictures", mask)
        return mask_named(mask, shape).expand(given.shape).to(given.device)
    held = np.asarray(mask.cpu() if isinstance(mask, Tensor) else mask)
    require(held.dtype.kind in "biuf", "mask", "numbers, 1 where one is missing and 0 where not", held.dtype)
    values = torch.as_tensor(held)
    fits = {shape, shape[1:] if len(shape) == 3 else shape, tuple(given.shape)}
    if tuple(values.shape) not in fits:
        raise InputError(f"mask: must have the shape {shape} of an event, got {tuple(values.shape)}")
    if not bool(((values == 0) | (values == 1)).all()):
        odd = values[(values != 0) & (values != 1)][0].item()
        raise InputError(f"mask: must hold 1 where a number is missing and 0 where not, got {odd:g}")
    return (values == 1).expand(given.shape).to(given.device)


def read_mask(source: str) -> Any:
    """A mask by its name, or from a `.npy` file."""
    path = Path(source).expanduser()
    if source in PARTS:
        return source
    if path.suffix == ".npy" and path.is_file():
        try:
            return read_arrays(path)["x"]
        except InputError as error:
            raise InputError(f"mask: {error}") from error
    names = ", ".join(PARTS)
    raise InputError(f"mask: must be one of {names}, or a .npy file that is there, got {source!r}")
