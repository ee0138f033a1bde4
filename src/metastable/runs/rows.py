"""Rows as training sees them: in its units, alone or with the labels or contexts that a method needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.augment import augmented, require_images
from metastable.core.batch import Batch, Beside
from metastable.core.errors import InputError, UnsupportedError, require
from metastable.core.parts import NUMBERS
from metastable.core.pixels import Pixels, in_bytes
from metastable.core.random import derive, generator, normal_like, with_normal
from metastable.core.types import Proposal, is_discrete
from metastable.core.units import Coordinates, Units, default_kind, require_near, require_squares, rounded
from metastable.data import Dataset
from metastable.data.columns import columns_settings
from metastable.data.smoothing import smoothed
from metastable.energies import AsEnergy, as_energy
from metastable.energies.build import ENERGIES
from metastable.methods import ChainMethod, Density, Method, Objective
from metastable.training.config import TrainerConfig
from metastable.training.engine import Engine

LARGE = 2**24
"""Numbers from which on pictures are worth to be kept as bytes."""
SOME = 2000
"""Rows that tell the spread of them all."""
BYTES_ON = ("cuda",)
"""Kinds of devices that they are kept on: where training is on the host, the numbers are there already."""


def check_sizes(dataset: Dataset, train: int | None = None) -> None:
    """Refuse a single row to `train` on, and squares that float64 cannot hold, before anything is fitted."""
    if train is not None and train < 2:
        more = "; --held-out 0 trains on them all" if len(dataset) > train else ""
        raise InputError(f"data: must leave 2 rows to train on, got {train} of {len(dataset)}{more}")
    require_squares("data", dataset.x)
    if dataset.given is not None:
        require_squares("given", dataset.given)


def coordinates_for(
    kind: str,
    energy: Any,
    train: Dataset,
    method: Method,
    trainer: TrainerConfig,
    seed: int,
    noise_before: float | None = None,
) -> Coordinates | None:
    """The units to train in; None for the data's own. They are fitted to what training sees, noise included.

    `noise_before` is what the units of a run that goes on hold of its noise: older ones hold none, and have other
    noise in empty directions.
    """
    noise = trainer.noise_at(0)
    beside = "" if train.given is None and method.needs == "given?" else method.needs.rstrip("?")
    kind = _kind_of_units(kind, energy, train, method, beside)
    if kind == "none":
        return None
    rows = train.x.detach().cpu().double()
    if noise:
        rng = generator(derive(seed, "units"))
        rows = rows + noise * torch.randn(rows.shape, generator=rng, dtype=torch.float64)
    given = None
    if beside == "given" and train.given is not None:
        vectors = train.given.dim() == 2
        given = Units.of_contexts(train.given) if vectors else Units.none(tuple(train.given.shape[1:]))
    lasting = 0.0 if trainer.data_noise_final == 0 else noise  # none where it falls to nothing
    return Coordinates(Units.fit(rows, kind, lasting if noise_before is None else noise_before), given)


def _kind_of_units(kind: str, energy: Any, train: Dataset, method: Method, beside: str) -> str:
    """What `auto` means here; a kind that this energy cannot be trained in is refused."""
    why = _without_units(energy, method, beside)
    if kind == "auto":
        still = is_own(energy) and not isinstance(method, (ChainMethod, Objective))  # nothing to move
        if why or still or beside == "labels":
            return "none"
        found = default_kind(train.event_shape, lambda: spread_of(train.x))
        return "scale" if beside == "given" and found == "whiten" else found
    if kind != "none" and why:
        raise UnsupportedError(f"units: must be 'none' for {why}, got {kind!r}")
    return kind


def spread_of(x: Tensor) -> float:
    """Standard deviation of all the numbers of some rows."""
    return float(x[:: max(1, len(x) // SOME)].double().std(correction=0))


def _has_things(setting: Any) -> bool:
    """Whether some network of these tables takes numbers of a context alike, or holds them against events.

    Pixels are such: a scale for each would be another picture.
    """
    if isinstance(setting, Mapping):
        several = any(group[1] > 1 for group in setting.get("tokens") or ())
        own = several or setting.get("near") or setting.get("pictures")
        return bool(own or any(map(_has_things, setting.values())))
    return isinstance(setting, list) and any(map(_has_things, setting))


def _without_units(energy: Any, method: Method, beside: str) -> str:
    """Why an energy has to be trained in the data's own units; empty where it need not."""
    if _has_own_parts(method):
        return "a method with modules of your own, which expect the data's units"
    settings = ENERGIES.get(energy if isinstance(energy, str) else "")
    if isinstance(energy, Mapping):
        settings = ENERGIES.get(str(energy.get("name")))
    if is_discrete(energy) or is_discrete(settings):
        return "units coded −1 and +1"
    if _has_things([energy, vars(method).get("proposal")]):
        return "things of a context that share their units (`near`, `pictures`, and `tokens` of several)"
    if not is_own(energy):
        return ""
    if isinstance(as_energy(energy), AsEnergy) or isinstance(method, Density):
        return "a density of your own, which expects the data's units"
    if beside:
        return f"an energy of your own with {'contexts' if beside == 'given' else 'classes'}"
    return ""


def _has_own_parts(method: Any) -> bool:
    """Whether a method, or the source of its negatives, holds a module or a function of the user's own."""
    for field in dataclasses.fields(method):
        value = vars(method)[field.name]
        parts = value if isinstance(value, tuple) else (value,)
        for part in parts:
            own = isinstance(part, (nn.Module, Proposal)) and not isinstance(part, type)
            if _has_own_parts(part) if isinstance(part, Method) else own:
                return True
    return False


def is_own(energy: Any) -> bool:
    """Whether an energy is the user's own module, and not settings of a built-in one."""
    config = dataclasses.is_dataclass(energy) and hasattr(energy, "build")
    return not (energy is None or isinstance(energy, (str, Mapping)) or config)


def training_rows(
    dataset: Dataset,
    method: Method,
    engine: Engine,
    coordinates: Coordinates | None = None,
    seed: int = 0,
    batch: int | None = None,
    like: Tensor | None = None,
) -> Batch:
    """The rows as training sees them: in its units, alone, or with the labels or contexts that the method needs.

    Where a `batch` of them is seen at a time, large pictures stay bytes on a device. Rows held out are treated
    `like` those trained on: a few of them leave directions empty in which there is something to see.
    """
    x, beside = dataset.x, needed_beside(dataset, method)
    if coordinates is not None:
        x = coordinates.events.enter(x, derive(seed, "still columns"), like)
    some = batch is not None and batch < len(x) and coordinates is None
    require_near("data", x)
    x = pixels_on(engine, x) if some else engine.place(x)
    if beside is None:
        return Batch(x)
    if method.needs == "labels":
        return Batch(x, beside.to(x.device), Beside.LABELS)
    units = None if coordinates is None else coordinates.given
    return Batch(x, contexts_in(units, beside, engine))


def contexts_in(units: Units | None, given: Tensor, engine: Engine) -> Tensor:
    """Contexts in the units of training on the device, a part at a time: on the way they are doubles."""
    if units is None or units.trivial:
        require_near("given", given)
        return engine.place(given)
    made = torch.empty(given.shape, dtype=engine.dtype, device=engine.device)
    rows = max(1, NUMBERS // given[0].numel())
    for there, part in zip(made.split(rows), given.split(rows), strict=True):
        u = rounded(units.forward(part))
        require_near("given", u)
        there.copy_(u)
    return made


def pixels_on(engine: Engine, x: Tensor) -> Tensor:
    """Rows on the device, as bytes where they are many pictures of bytes and the device is not the host."""
    large = x.dim() == 4 and x.numel() >= LARGE and engine.device.type in BYTES_ON
    found = in_bytes(x) if large and x.dtype == torch.float32 and x.device.type == "cpu" else None
    if found is None:
        return engine.place(x)
    codes, table = found
    return Pixels(codes.to(engine.device), engine.place(table))


def smoothed_rows(rows: Batch, smoothing: float, seed: int) -> Batch:
    """Rows blurred by `smoothing`, which must be vectors alone."""
    require(0 <= smoothing < 1, "smoothing", "at least 0 and below 1", smoothing)
    if rows.given is not None or rows.x.dim() != 2:
        raise UnsupportedError("smoothing: is for vectors without labels or contexts; use data_noise")
    return Batch(smoothed(rows.x, smoothing, derive(seed, "smoothing")))


def as_seen(
    rows: Batch, noise: float, coordinates: Coordinates | None, seed: int, augment: Sequence[str] = ()
) -> Batch:
    """The rows as the first update sees them, augmented and with its noise, for whatever is fitted to them."""
    x = rows.x
    if augment:
        x = augmented(x, augment, generator(derive(seed, "seen augment"), rows.device))
    rng = generator(derive(seed, "seen noise"), rows.device)
    if noise and coordinates is None:
        x = with_normal(x, noise, rng)
    elif noise and coordinates is not None:
        x = x + noise * coordinates.events.turn(normal_like(x, rng))
    if noise:
        require_near("data with trainer.data_noise", x)
    return rows if x is rows.x else rows.with_events(x)


def check_augmented(trainer: TrainerConfig, rows: Batch, coordinates: Coordinates | None) -> TrainerConfig:
    """Refuse to augment what is no picture, or no longer one in the units of training.

    Where contexts are pictures, that is told to what is returned.
    """
    if trainer.augment:
        require_images("trainer.augment", rows.event_shape)
    if trainer.given_augment or trainer.given_pictures:
        trainer = dataclasses.replace(trainer, given_pictures=_pictures_at(trainer.given_pictures, rows))
    events, given = (None, None) if coordinates is None else (coordinates.events, coordinates.given)
    each = {"augment": (trainer.augment, events), "given_augment": (trainer.given_augment, given)}
    for field, (names, units) in each.items():
        if names and units is not None and not units.trivial:
            raise UnsupportedError(
                f"trainer.{field}: is for pictures as they are; use units='none', got {units.kind!r}"
            )
    return trainer


def _pictures_at(at: tuple[int, ...], rows: Batch) -> tuple[int, ...]:
    """Where pictures lie in contexts: where it was said, or they are pictures themselves."""
    shape, field = rows.context_shape, "trainer.given_pictures" if at else "trainer.given_augment"
    if shape is None or rows.kind is not Beside.CONTEXTS:
        raise UnsupportedError(f"{field}: is for events with contexts, which these have not")
    if not at:
        require_images("trainer.given_augment", shape, "contexts")
        return 0, 1, *shape
    rule = f"within the {math.prod(shape)} numbers of a context"
    require(at[0] + math.prod(at[1:]) <= math.prod(shape), "trainer.given_pictures", rule, at)
    return at


def needed_beside(dataset: Dataset, method: Method) -> Tensor | None:
    """The labels or contexts that the method needs, which the rows must have; None where it needs neither."""
    if not method.needs or (method.needs == "given?" and dataset.given is None):
        return None
    beside = dataset.labels if method.needs == "labels" else dataset.given
    if beside is None:
        name, what = ("labels", "class") if method.needs == "labels" else ("given", "context")
        kind = "integers" if name == "labels" else "numbers"
        why = dataset.unlabelled if name == "labels" else ""
        none = f"holds an array that was not taken ({why})" if why else "has none"
        raise InputError(
            f"{method.needs}: {method.name!r} needs the {what} of each row, and {dataset.name} {none}; fit with "
            f"{name}=…, or give an .npz file with an array {name!r} of {kind} beside the rows"
        )
    return beside


def beside_settings(rows: Batch, dataset: Dataset) -> dict[str, Any]:
    """What a run's settings keep of labels or contexts, so that its modules can be built again."""
    if rows.kind is Beside.LABELS:
        assert rows.given is not None
        names = {"class_names": list(dataset.classes)} if dataset.classes else {}
        return {"classes": classes_of(dataset), **names, "class_rows": rows_by_class(rows.given)}
    return {} if rows.context_shape is None else {"context_shape": list(rows.context_shape)}


def rows_by_class(labels: Tensor) -> list[int]:
    """How many rows each class has, from class 0 on."""
    return torch.bincount(labels.cpu()).tolist()


def data_settings(dataset: Dataset) -> dict[str, Any]:
    """What a run's settings keep of where its rows are from."""
    return {"source": dataset.name, "rows": len(dataset), "sha256": dataset.digest}


def row_settings(dataset: Dataset, held_out: float, seed: int) -> dict[str, Any]:
    """What the settings of a run that holds out this share tell rows by that another machine drew."""
    train = dataset.split(held_out, seed)[0] if held_out else dataset
    labels, given = train.labels, train.given
    return {
        **columns_settings(train),
        **({} if labels is None else {"class_rows": rows_by_class(labels)}),
        **({} if given is None else {"context_shape": list(given.shape[1:])}),
    }


def classes_of(dataset: Dataset) -> int:
    """One more than the largest label of all rows: those of a rare class may all be held out."""
    assert dataset.labels is not None
    return int(dataset.labels.max()) + 1
