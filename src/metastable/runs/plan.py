"""What is settled before training begins: rows in their units, energy, method, trainer and players, as one value.

`fit`, `train --dry-run` and reading a run back all ask this file, so that they cannot disagree.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import nn

from metastable.core.batch import Batch
from metastable.core.configure import describe
from metastable.core.errors import InputError, UnsupportedError
from metastable.core.protocols import provides
from metastable.core.random import derive, whole_seed
from metastable.core.traits import Traits
from metastable.core.units import Coordinates, require_kind
from metastable.data import Dataset
from metastable.data.columns import columns_settings
from metastable.evaluation.rays import bare_network_words
from metastable.methods import Method
from metastable.methods.base import Context
from metastable.methods.draw_pool import Inheriting
from metastable.proposals import Gaussian, Signs
from metastable.training.config import TrainerConfig
from metastable.training.engine import Choice, Engine, choose_engine
from metastable.training.trainer import Trainer
from metastable.walkers.space import space_of

from .memory import require_walkers_fit
from .resolve import check_discrete, check_fits, on_mixture, power_of, resolve_energy
from .rows import (
    as_seen,
    beside_settings,
    check_augmented,
    check_sizes,
    coordinates_for,
    data_settings,
    needed_beside,
    smoothed_rows,
    training_rows,
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One training, settled.

    Attributes:
        dataset: all rows, in the data's own units.
        train: those to train on.
        validation: those for scores; all of `train` where none are held out.
        method: the method.
        trainer: its settings, with everything that depends on the data filled in.
        engine: device and precision.
        coordinates: the units of training; None where they are the data's own.
        rows: what training sees, in those units, on the device.
        seen: the same as methods look at them outside of updates: with their noise.
        energy: the energy as training sees it.
        energy_settings: its description.
        noise: a normalised density around the rows.
        seed: of every random number.
        held_out: share of the rows kept from training.
        doubt: why the energy cannot hold a density, in words, where it cannot.
    """

    dataset: Dataset
    train: Dataset
    validation: Dataset
    method: Method
    trainer: TrainerConfig
    engine: Engine
    coordinates: Coordinates | None
    rows: Batch
    seen: Batch
    energy: Any
    energy_settings: Any
    noise: Gaussian | Signs
    seed: int
    held_out: float
    doubt: str | None = None

    @property
    def units(self) -> str:
        """The kind of units that events are trained in."""
        return "none" if self.coordinates is None else self.coordinates.events.kind

    @property
    def power(self) -> float:
        """P of exp(−P·E), which is what the method will have learned in the end."""
        return power_of(self.method, self.trainer.steps or 0)

    def validation_rows(self) -> Batch:
        """Rows for scores, as training sees rows."""
        if self.validation is self.train:
            return self.rows
        whose = (self.validation, self.method, self.engine, self.coordinates, self.seed)
        return training_rows(*whose, like=self.train.x)

    @property
    def updates(self) -> Choice:
        """How updates will run, and why not faster."""
        steps, device = self.trainer.steps or 0, self.engine.device
        x, precision = self.rows.x, self.engine.precision
        return choose_engine(self.trainer.engine, device, self.method, steps, self.energy, x, precision)

    def settings(self, version: str) -> dict[str, Any]:
        """Everything as `config.json` holds it."""
        kept = None if self.coordinates is None else self.coordinates.as_json()
        return {
            "version": version,
            "seed": self.seed,
            "held_out": self.held_out,
            "event_shape": list(self.dataset.event_shape),
            **beside_settings(self.rows, self.dataset),
            "data": data_settings(self.dataset),
            "units": self.units,
            **({} if kept is None else {"coordinates": kept}),
            **columns_settings(self.train),
            "energy": self.energy_settings,
            "method": describe(self.method),
            "traits": vars(Traits.of(self.method)),
            "trainer": describe(self.trainer) | {"device": str(self.engine.device)},
        }


def make_plan(
    energy: Any,
    dataset: Dataset,
    method: Method,
    trainer: TrainerConfig,
    *,
    seed: int = 0,
    held_out: float = 0.0,
    units: str = "auto",
    reference: str | None = None,
    smoothing: float = 0.0,
    noise_before: float | None = None,
) -> Plan:
    """Settle everything, or raise an error that names what does not fit.

    `noise_before` is that in the units of a run that goes on, see `coordinates_for`.
    """
    require_kind(units)
    if dataset.given is not None and not method.needs.startswith("given"):
        raise UnsupportedError(
            f"given: {method.name!r} does not look at contexts; use one that does, such as 'ranking-nce'"
        )
    engine = Engine(trainer.device, trainer.precision)
    train, validation = dataset.split(held_out, seed) if held_out > 0 else (dataset, dataset)
    check_sizes(dataset, len(train))
    needed_beside(train, method)
    mixture = not smoothing and on_mixture(energy, train, method)
    trainer = trainer.resolved(len(train), train.x[0].numel(), mixture)
    coordinates = coordinates_for(units, energy, train, method, trainer, seed, noise_before)
    rows = training_rows(train, method, engine, coordinates, seed, None if smoothing else trainer.batch_size)
    if smoothing:
        rows = smoothed_rows(rows, smoothing, seed)
    trainer = check_augmented(trainer, rows, coordinates)
    seen = as_seen(rows, trainer.noise_at(0), coordinates, seed, trainer.augment)
    power = power_of(method, trainer.steps or 0)
    module, energy_settings = resolve_energy(
        energy, seen, seed, method, dataset, coordinates, power, reference
    )
    if isinstance(module, nn.Module):
        engine.place_module(module)
    require_walkers_fit(method, trainer, module, rows)
    check_fits(module, energy_settings, method, rows)
    check_discrete(module, method)
    noise = space_of(module).noise_around(seen.x)
    doubt = bare_network_words(module, rows.x) if rows.given is None and callable(module) else None
    return Plan(
        dataset,
        train,
        validation,
        method,
        trainer,
        engine,
        coordinates,
        rows,
        seen if trainer.noise_at(0) else rows,
        module,
        energy_settings,
        noise,
        whole_seed(seed),
        held_out,
        doubt,
    )


def players_of(plan: Plan) -> dict[str, nn.Module]:
    """The energy, and the modules that the method brings."""
    if not isinstance(plan.energy, nn.Module):
        raise InputError(
            "energy: to be trained it must be an nn.Module with parameters; a plain function can be sampled "
            "(ms.sample) and normalised (ms.log_partition)"
        )
    rows, seed = plan.method.takes(plan.seen), derive(plan.seed, "companions")
    companions = plan.method.companions(plan.energy, rows, plan.noise, seed)
    if provides(plan.energy, Inheriting) and plan.energy.inherits:  # pyright: ignore
        plan.energy.begin_as(companions.get("proposal"))  # pyright: ignore
    return {"energy": plan.energy} | {name: plan.engine.place_module(m) for name, m in companions.items()}


def trainer_of(plan: Plan, folder: Path | None = None, run: str = "") -> Trainer:
    """The training that was planned, before its first update; in memory where there is no folder.

    `run` is the identity of the run whose folder it is.
    """
    held, last = None, plan.trainer.noise_at(plan.trainer.steps or 0)
    if plan.validation is not plan.train:
        held = as_seen(plan.validation_rows(), last, plan.coordinates, derive(plan.seed, "held out"))
    return Trainer(
        plan.energy,
        players_of(plan),
        plan.rows,
        plan.method,
        plan.trainer,
        noise=plan.noise,
        engine=plan.engine,
        make_context=Context,
        seed=plan.seed,
        folder=folder,
        held_out=held,
        seen=plan.seen,
        coordinates=plan.coordinates,
        power=plan.power,
        run=run,
    )
