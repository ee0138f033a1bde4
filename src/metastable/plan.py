"""What is settled before training begins: rows in their units, energy, method, trainer and players, as one value.

`fit`, `train --dry-run` and reading a run back all ask this file, so that they cannot disagree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.configure import build_tagged, describe
from metastable.core.errors import ConfigError, InputError, UnsupportedError, nearest, require
from metastable.core.powered import without_rounding
from metastable.core.random import derive, generator, normal_like
from metastable.core.types import Pairs, Proposal, events, is_discrete
from metastable.core.units import Coordinates, Units, default_kind, require_kind, rounded
from metastable.data import Dataset
from metastable.data.columns import columns_settings
from metastable.data.smoothing import smoothed
from metastable.energies import AsEnergy, as_energy, check_conditional, check_energy
from metastable.energies.build import ENERGIES, default_config
from metastable.energies.in_units import in_training_units
from metastable.energies.joint import JointEnergy, as_joint
from metastable.energies.networks import Tilted, on_reference
from metastable.evaluation.rays import bare_network_words
from metastable.kernels import KERNELS, Kernel
from metastable.methods import METHODS, ChainMethod, Density, Method, Objective
from metastable.proposals import Gaussian, Signs, fit_gaussian, fit_signs
from metastable.training.config import RATE_NAMES, Adam, TrainerConfig
from metastable.training.engine import Engine


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
    rows: Tensor | Pairs
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

    def validation_rows(self) -> Tensor | Pairs:
        """Rows for scores, as training sees rows."""
        if self.validation is self.train:
            return self.rows
        return training_rows(self.validation, self.method, self.engine, self.coordinates, self.seed)

    def settings(self, version: str) -> dict[str, Any]:
        """Everything as `config.json` holds it."""
        kept = None if self.coordinates is None else self.coordinates.as_json()
        return {
            "version": version,
            "seed": self.seed,
            "held_out": self.held_out,
            "event_shape": list(self.dataset.event_shape),
            **_beside(self.rows, self.dataset),
            "data": {
                "source": self.dataset.name,
                "rows": len(self.dataset),
                "sha256": self.dataset.digest,
            },
            "units": self.units,
            **({} if kept is None else {"coordinates": kept}),
            **columns_settings(self.train),
            "energy": self.energy_settings,
            "method": describe(self.method),
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
) -> Plan:
    """Settle everything, or raise an error that names what does not fit."""
    require_kind(units)
    if dataset.given is not None and not method.needs.startswith("given"):
        raise UnsupportedError(
            f"given: {method.name!r} does not look at contexts; use one that does, such as 'ranking-nce'"
        )
    engine = Engine(trainer.device, trainer.precision)
    train, validation = dataset.split(held_out, seed) if held_out > 0 else (dataset, dataset)
    needed_beside(train, method)
    mixture = not smoothing and on_mixture(energy, train, method)
    trainer = trainer.resolved(len(train), train.x[0].numel(), mixture)
    coordinates = coordinates_for(units, energy, train, method, trainer.noise_at(0), seed)
    rows = training_rows(train, method, engine, coordinates, seed)
    if smoothing:
        rows = _smoothed(rows, smoothing, seed)
    seen = _as_seen(rows, trainer.noise_at(0), coordinates, seed)
    power = power_of(method, trainer.steps or 0)
    module, energy_settings = _resolve_energy(
        energy, seen, seed, method, dataset, coordinates, power, reference
    )
    if isinstance(module, nn.Module):
        engine.place_module(module)
    _check_energy(module, method, rows)
    _check_discrete(module, method)
    noise = noise_around(module, events(seen))
    doubt = None
    if not isinstance(rows, Pairs) and callable(module):
        doubt = bare_network_words(module, rows)
    return Plan(
        dataset,
        train,
        validation,
        method,
        trainer,
        engine,
        coordinates,
        rows,
        module,
        energy_settings,
        noise,
        seed,
        held_out,
        doubt,
    )


# ---- rows and their units


def coordinates_for(
    kind: str, energy: Any, train: Dataset, method: Method, noise: float, seed: int
) -> Coordinates | None:
    """The units to train in; None for the data's own. They are fitted to what training sees, noise included."""
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
        given = Units.fit(train.given, "scale" if train.given.dim() == 2 else "none")
    return Coordinates(Units.fit(rows, kind), given)


def _kind_of_units(kind: str, energy: Any, train: Dataset, method: Method, beside: str) -> str:
    """What `auto` means here; a kind that this energy cannot be trained in is refused."""
    why = _without_units(energy, method, beside)
    if kind == "auto":
        still = is_own(energy) and not isinstance(method, (ChainMethod, Objective))  # nothing to move
        if why or still or beside == "labels":
            return "none"
        found = default_kind(train.event_shape)
        return "scale" if beside == "given" and found == "whiten" else found
    if kind != "none" and why:
        raise UnsupportedError(f"units: must be 'none' for {why}, got {kind!r}")
    return kind


def _without_units(energy: Any, method: Method, beside: str) -> str:
    """Why an energy has to be trained in the data's own units; empty where it need not."""
    if _has_own_parts(method):
        return "a method with modules of your own, which expect the data's units"
    settings = ENERGIES.get(energy if isinstance(energy, str) else "")
    if isinstance(energy, Mapping):
        settings = ENERGIES.get(str(energy.get("name")))
    if is_discrete(energy) or is_discrete(settings):
        return "units coded −1 and +1"
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
        value = getattr(method, field.name)
        parts = value if isinstance(value, tuple) else (value,)
        if any(_has_own_parts(part) if isinstance(part, Method) else _is_density(part) for part in parts):
            return True
    return False


def _is_density(part: Any) -> bool:
    return isinstance(part, (nn.Module, Proposal)) and not isinstance(part, type)


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
) -> Tensor | Pairs:
    """The rows as training sees them: in its units, alone, or with the labels or contexts that the method needs."""
    x, beside = dataset.x, needed_beside(dataset, method)
    if coordinates is not None:
        x = coordinates.events.enter(x, derive(seed, "still columns"))
    x = engine.place(x)
    if beside is None:
        return x
    if method.needs == "labels":
        return Pairs(x, beside.to(x.device))
    if coordinates is not None and coordinates.given is not None:
        beside = rounded(coordinates.given.forward(beside))
    return Pairs(x, engine.place(beside))


def _smoothed(rows: Tensor | Pairs, smoothing: float, seed: int) -> Tensor:
    require(0 <= smoothing < 1, "smoothing", "at least 0 and below 1", smoothing)
    if isinstance(rows, Pairs) or rows.dim() != 2:
        raise UnsupportedError("smoothing: is for vectors without labels or contexts; use data_noise")
    return smoothed(rows, smoothing, derive(seed, "smoothing"))


def _as_seen(
    rows: Tensor | Pairs, noise: float, coordinates: Coordinates | None, seed: int
) -> Tensor | Pairs:
    """The rows with the noise of the first update, for whatever is fitted to them."""
    if not noise:
        return rows
    x = events(rows)
    drawn = normal_like(x, generator(derive(seed, "seen noise"), x.device))
    x = x + noise * (drawn if coordinates is None else coordinates.events.turn(drawn))
    return Pairs(x, rows.given) if isinstance(rows, Pairs) else x


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


def _beside(rows: Tensor | Pairs, dataset: Dataset) -> dict[str, Any]:
    """What a run's settings keep of labels or contexts, so that its modules can be built again."""
    if not isinstance(rows, Pairs):
        return {}
    if not rows.given.is_floating_point():
        return {"classes": _classes(dataset)}
    return {"context_shape": list(rows.given.shape[1:])}


def _classes(dataset: Dataset) -> int:
    """One more than the largest label of all rows: those of a rare class may all be held out."""
    assert dataset.labels is not None
    return int(dataset.labels.max()) + 1


def with_classes(config: Any, method: Method, dataset: Dataset) -> Any:
    """The settings of an energy, with the number of classes where they leave it to the labels."""
    if method.needs != "labels" or getattr(config, "classes", 0) is not None:
        return config
    return dataclasses.replace(config, classes=max(_classes(dataset), 2))


def _check_energy(energy: Any, method: Method, rows: Tensor | Pairs) -> None:
    """One value per row, finite, differentiable; given its context where the method has those."""
    if isinstance(energy, AsEnergy):
        energy.check(rows)
    elif isinstance(rows, Pairs) and method.needs != "labels":
        check_conditional(energy, rows)
    else:
        check_energy(energy, events(rows))


def trainer_config(
    trainer: TrainerConfig | None, steps: int | None, learning_rate: float | None, options: dict[str, Any]
) -> TrainerConfig:
    """All settings of the trainer: a whole set, or the defaults, changed by what was given apart."""
    if learning_rate is not None:
        if "optimiser" in options:
            raise ConfigError("learning_rate", "give either learning_rate or optimiser, not both")
        options["optimiser"] = Adam(learning_rate)
    if steps is not None:
        options["steps"] = steps
    return dataclasses.replace(trainer or TrainerConfig(), **options)


def check_options(options: Mapping[str, Any], method: Method) -> None:
    """What is neither the trainer's nor an argument of `fit` is refused; a method's setting is shown its place."""
    known = {"learning_rate"} | {f.name for f in dataclasses.fields(TrainerConfig)}
    for name in options.keys() - known:
        if name in {f.name for f in dataclasses.fields(method)}:
            table = f"{{'name': {method.name!r}, {name!r}: {options[name]!r}}}"
            raise ConfigError(name, f"is a setting of the method: fit(…, method={table})")
        meant = " (did you mean 'learning_rate'?)" if name in RATE_NAMES else nearest(name, known)
        raise ConfigError(f"trainer.{name}", f"unknown setting{meant}")


def resolve_method(method: Method | str | Mapping[str, Any], path: str = "method") -> Method:
    """A method from itself, its name, or a mapping with a `name` and settings."""
    if isinstance(method, Method):
        return method
    if isinstance(method, type) and issubclass(method, Method):
        return method()
    if isinstance(method, Mapping):
        method = {k: _resolve_part(k, _on_default(method, k, v), path) for k, v in method.items()}
    return build_tagged(METHODS, method, path)


def _on_default(method: Mapping[str, Any], key: str, value: Any) -> Any:
    """A table without a name changes settings of the part that the method has by default."""
    kind = METHODS.get(method.get("name", ""))
    if kind is None or not isinstance(value, Mapping) or "name" in value:
        return value
    default = next(
        (f.default_factory for f in dataclasses.fields(kind) if f.name == key), dataclasses.MISSING
    )
    return value if default is dataclasses.MISSING else _changed(describe(default()), value)


def _changed(settings: Any, changes: Mapping[str, Any]) -> Any:
    """`settings` with `changes`, in which tables without a name are changes of their own."""
    if not isinstance(settings, Mapping):
        return changes
    within = (k for k, v in changes.items() if isinstance(v, Mapping) and "name" not in v)
    return {**settings, **changes, **{k: _changed(settings.get(k), changes[k]) for k in within}}


def _resolve_part(key: str, value: Any, path: str) -> Any:
    """A kernel, or the method that negatives come from, given by name or as a table."""
    if value is None or isinstance(value, (Kernel, Method)):
        return value
    if key == "kernel":
        return build_tagged(KERNELS, value, f"{path}.kernel")
    if key == "sources" and isinstance(value, (list, tuple)):
        return tuple(resolve_method(v, f"{path}.sources.{i}") for i, v in enumerate(value))
    return resolve_method(value, f"{path}.source") if key == "source" else value


def _resolve_energy(
    energy: Any,
    rows: Tensor | Pairs,
    seed: int,
    method: Method,
    dataset: Dataset,
    coordinates: Coordinates | None,
    power: float,
    reference: str | None,
) -> tuple[Any, Any]:
    """The energy as training sees it, and its description: settings for a built-in one, a name for any other."""
    config = energy_config(energy, tuple(events(rows).shape[1:]), _kind(rows), method.timed)
    if config is not None:
        if reference is not None:
            config = _with_reference(config, reference)
        config = settled(config, rows)
        return built(with_classes(config, method, dataset), rows, seed), describe(config)
    module = _own_energy(energy, rows, method)
    settings = {"name": "custom", "class": type(energy).__qualname__} | _wrapping(module, energy)
    if reference is not None:
        module = _on_reference(module, reference, rows, coordinates)
        settings["reference"] = reference
    if isinstance(module, nn.Module):
        module = in_training_units(module, coordinates, power)
    return module, settings


def energy_config(energy: Any, event_shape: tuple[int, ...], beside: str, timed: bool) -> Any:
    """Settings of a built-in energy, from themselves, a name, a table or None; None for an energy of one's own."""
    if energy is None or energy == "default":
        return default_config(event_shape, beside, timed)
    if isinstance(energy, Mapping) and energy.get("name") == "default":
        energy = {**energy, "name": default_config(event_shape, beside, timed).name}
    if isinstance(energy, (str, Mapping)):
        return build_tagged(ENERGIES, energy, "energy")
    return None if is_own(energy) else energy


def _on_reference(
    module: Any, reference: str, rows: Tensor | Pairs, coordinates: Coordinates | None
) -> nn.Module:
    """An energy of one's own on a Gaussian fitted to the data, in the data's units, which it expects."""
    if reference != "gaussian":
        raise ConfigError("reference", f"must be 'gaussian' for an energy of your own, got {reference!r}")
    if isinstance(rows, Pairs) or not isinstance(module, nn.Module) or isinstance(module, AsEnergy):
        raise UnsupportedError("reference: only an energy of events alone can be put on one; leave it out")
    x = rows if coordinates is None else coordinates.events.inverse(rows)
    return on_reference(module, x.cpu())


def on_mixture(energy: Any, train: Dataset, method: Method) -> bool:
    """Whether a built-in energy will stand on a mixture fitted to these rows, which leaves little to learn."""
    if is_own(energy) or method.needs == "labels" or train.given is not None:
        return False
    config = settled(energy_config(energy, train.event_shape, "", method.timed), train.x)
    return getattr(config, "reference", "") == "mixture"


def _with_reference(config: Any, reference: str) -> Any:
    if not hasattr(config, "reference"):
        raise ConfigError("reference", f"the energy {config.name!r} has none; leave it out")
    return dataclasses.replace(config, reference=reference)


def _own_energy(energy: Any, rows: Tensor | Pairs, method: Method) -> Any:
    """An energy of the user's own: a density or, where the method needs labels, a classifier is made one."""
    return as_joint(energy, events(rows)) if method.needs == "labels" else as_energy(energy)


def reloaded(energy: Any, config: dict[str, Any], method: Method) -> Any:
    """What `load_run` was handed, made an energy as it was for training: a classifier of the same output scale."""
    kept = config["energy"].get("joint")
    if kept and not hasattr(energy, "logits"):
        return JointEnergy(energy, event_shape=tuple(config["event_shape"]), **kept)
    if method.needs == "labels":
        return energy
    energy = as_energy(energy)
    coordinates = Coordinates.from_json(config.get("coordinates"))
    if config["energy"]["name"] != "custom" or not isinstance(energy, nn.Module):
        return energy
    if config["energy"].get("reference") and not isinstance(energy, Tilted):
        x = torch.randn((8, *config["event_shape"]), generator=generator(0))
        energy = on_reference(energy, x, zero_start=False)
    return in_training_units(energy, coordinates, power_of(method, config["trainer"]["steps"]))


def _wrapping(module: Any, energy: Any) -> dict[str, Any]:
    """What a run's settings keep of a classifier that was made an energy."""
    if module is energy or not isinstance(module, JointEnergy):
        return {}
    return {"joint": {"output_scale": module.output_scale, "classes": module.classes}}


def settled(config: Any, rows: Tensor | Pairs) -> Any:
    """The settings of an energy, with what they leave to the data decided: a run records what it was."""
    return config.settled(events(rows)) if hasattr(config, "settled") else config


def built(config: Any, rows: Tensor | Pairs, seed: int) -> nn.Module:
    """The energy of these settings; those that are `paired` also look at labels or contexts."""
    return config.build(rows if getattr(config, "paired", False) else events(rows), seed)


def _kind(rows: Tensor | Pairs) -> str:
    if not isinstance(rows, Pairs):
        return ""
    return "given" if rows.given.is_floating_point() else "labels"


def noise_around(energy: Any, x: Tensor) -> Gaussian | Signs:
    """Noise around the data: Gaussian, or independent units with the data's means for a discrete energy."""
    return fit_signs(x) if is_discrete(energy) else fit_gaussian(x)


def _check_discrete(energy: Any, method: Method) -> None:
    """Refuse a method that would leave the states of a discrete energy."""
    if not is_discrete(energy) or is_discrete(method):
        return
    kernel = getattr(getattr(method, "source", method), "moves", None)
    if kernel is None or not kernel.discrete:
        kind = "works on" if kernel is None else f"with kernel {kernel.name!r} moves in"
        raise UnsupportedError(
            f"method: {method.name!r} {kind} continuous space, but the energy is over units coded −1 and +1; use "
            "cd, pcd or jarzynski with kernel=ms.kernels.Gibbs() (method.kernel=gibbs)"
        )


def players_of(plan: Plan) -> dict[str, nn.Module]:
    """The energy, and the modules that the method brings."""
    if not isinstance(plan.energy, nn.Module):
        raise InputError(
            "energy: to be trained it must be an nn.Module with parameters; a plain function can be sampled "
            "(ms.sample) and normalised (ms.log_partition)"
        )
    companions = plan.method.companions(plan.energy, plan.rows, plan.noise, derive(plan.seed, "companions"))
    return {"energy": plan.energy} | {name: plan.engine.place_module(m) for name, m in companions.items()}


def power_of(method: Method, step: int) -> float:
    """P of exp(−P·E), which is what the method was learning after `step` updates."""
    return without_rounding(method.power(step))
