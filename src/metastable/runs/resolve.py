"""Methods, energies and settings of the trainer, from what a user gave: themselves, a name or a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.batch import Batch, Beside
from metastable.core.configure import build_tagged, describe
from metastable.core.errors import ConfigError, InputError, UnsupportedError, nearest, require, require_choice
from metastable.core.powered import without_rounding
from metastable.core.protocols import (
    ByClass,
    Classifier,
    Counted,
    Encoding,
    OnReference,
    Settling,
    provides,
    reference_of,
)
from metastable.core.random import generator
from metastable.core.types import is_discrete
from metastable.core.units import Coordinates
from metastable.data import Dataset
from metastable.energies import AsEnergy, as_energy, check_conditional, check_energy
from metastable.energies.build import ENERGIES, default_config
from metastable.energies.by_class import ClassEnergy, as_class_energy
from metastable.energies.in_units import in_training_units
from metastable.energies.joint import JointEnergy, as_joint
from metastable.energies.networks import Tilted, on_reference
from metastable.kernels import KERNELS, Kernel
from metastable.methods import METHODS, Method
from metastable.training.config import RATE_NAMES, Adam, TrainerConfig

from .folder import trainer_again
from .memory import require_energy_fits
from .rows import classes_of, is_own

NEEDS = ("", "labels", "given", "given?")
"""What a method may need beside events."""


def with_classes(config: Any, method: Method, dataset: Dataset) -> Any:
    """The settings of an energy, with the number of classes where they leave it to the labels."""
    if method.needs != "labels" or not provides(config, Counted) or config.classes is not None:
        return config
    return dataclasses.replace(config, classes=max(classes_of(dataset), 2))


def check_fits(energy: Any, settings: Mapping[str, Any], method: Method, rows: Batch) -> None:
    """One value per row, finite, differentiable; given its context where the method has those."""
    if isinstance(energy, AsEnergy):
        energy.check(rows)
    elif rows.kind is Beside.CONTEXTS:
        named = {"custom": ""}.get(settings["name"], repr(settings["name"]))
        check_conditional(energy, rows, named)
    else:
        check_energy(energy, rows.x)
    if rows.kind is Beside.LABELS and not method.classifies:
        _check_classes(energy, rows.conditions)


def _check_classes(energy: Any, labels: Tensor) -> None:
    """Refuse an energy that has no classes, and a label that is none of them."""
    if not provides(energy, ByClass) or not provides(energy, Encoding):
        raise InputError(
            f"energy: {type(energy).__name__} is no energy by class, which chains with labels need; make one of a "
            "module (B, *event) → (B, classes) with ms.energies.ClassEnergy, or name a built-in one"
        )
    energy.encode(labels)


def trainer_config(
    trainer: TrainerConfig | None, steps: int | None, learning_rate: float | None, options: dict[str, Any]
) -> TrainerConfig:
    """All settings of the trainer: a whole set, or the defaults, changed by what was given apart."""
    rule = "a TrainerConfig; single settings are arguments of their own, such as batch_size=64"
    require(trainer is None or isinstance(trainer, TrainerConfig), "trainer", rule, trainer)
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
        require_choice(f"{path}.needs", method.needs, NEEDS)
        return method
    if isinstance(method, type) and issubclass(method, Method):
        return method()
    if isinstance(method, Mapping):
        method = {k: _resolve_part(k, _on_default(method, k, v), path) for k, v in method.items()}
    elif not isinstance(method, str):
        raise ConfigError(
            path, f"must be a Method, its name or a table with a name, got {type(method).__name__}"
        )
    return build_tagged(METHODS, method, path)


def _on_default(method: Mapping[str, Any], key: str, value: Any) -> Any:
    """A table without a name changes settings of the part that the method has by default."""
    kind = METHODS.get(str(method.get("name")))
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


def resolve_energy(
    energy: Any,
    rows: Batch,
    seed: int,
    method: Method,
    dataset: Dataset,
    coordinates: Coordinates | None,
    power: float,
    reference: str | None,
) -> tuple[Any, Any]:
    """The energy as training sees it, and its description: settings for a built-in one, a name for any other."""
    config = energy_config(energy, rows.event_shape, beside_of(method, rows.kind), method.timed)
    if config is not None:
        if reference is not None:
            config = _with_reference(config, reference)
        require_energy_fits(config, rows.x[0].numel(), rows.x.device)
        config = settled(config, rows)
        return built(with_classes(config, method, dataset), rows, seed), describe(config)
    # a density or, where the method needs labels, a classifier is made an energy
    if rows.kind is Beside.LABELS:
        module = as_joint(energy, rows.x) if method.classifies else as_class_energy(energy, rows)
    else:
        module = as_energy(energy)
    settings = {"name": "custom", "class": type(energy).__qualname__} | _wrapping(module, energy)
    if reference is not None:
        module = _on_reference(module, reference, rows, coordinates)
        settings["reference"] = reference
    if isinstance(module, nn.Module):
        module = in_training_units(module, coordinates, power)
    return module, settings


def beside_of(method: Method, beside: str) -> str:
    """What a default energy has to know of: classes of an energy by class it is told apart (`with_classes`)."""
    return "" if beside == "labels" and not method.classifies else beside


def energy_config(energy: Any, event_shape: tuple[int, ...], beside: str, timed: bool) -> Any:
    """Settings of a built-in energy, from themselves, a name, a table or None; None for an energy of one's own."""
    if energy is None or energy == "default":
        return default_config(event_shape, beside, timed)
    if isinstance(energy, Mapping) and energy.get("name") == "default":
        energy = {**energy, "name": default_config(event_shape, beside, timed).name}
    if isinstance(energy, (str, Mapping)):
        return build_tagged(ENERGIES, energy, "energy")
    return None if is_own(energy) else energy


def _on_reference(module: Any, reference: str, rows: Batch, coordinates: Coordinates | None) -> nn.Module:
    """An energy of one's own on a Gaussian fitted to the data, in the data's units, which it expects."""
    if reference != "gaussian":
        raise ConfigError("reference", f"must be 'gaussian' for an energy of your own, got {reference!r}")
    if rows.given is not None or not isinstance(module, nn.Module) or isinstance(module, AsEnergy):
        raise UnsupportedError("reference: only an energy of events alone can be put on one; leave it out")
    x = rows.x if coordinates is None else coordinates.events.inverse(rows.x)
    return on_reference(module, x.cpu())


def on_mixture(energy: Any, train: Dataset, method: Method) -> bool:
    """Whether a built-in energy will stand on a mixture fitted to these rows, which leaves little to learn."""
    if is_own(energy) or method.needs == "labels" or train.given is not None:
        return False
    config = settled(energy_config(energy, train.event_shape, "", method.timed), Batch(train.x))
    return reference_of(config) == "mixture"


def _with_reference(config: Any, reference: str) -> Any:
    if not provides(config, OnReference):
        raise ConfigError("reference", f"the energy {config.name!r} has none; leave it out")
    return dataclasses.replace(config, reference=reference)


def reloaded(energy: Any, config: dict[str, Any], method: Method) -> Any:
    """What `load_run` was handed, made an energy as it was for training: a classifier of the same output scale."""
    kept = config["energy"].get("joint")
    if kept and not provides(energy, Classifier):
        return JointEnergy(energy, event_shape=tuple(config["event_shape"]), **kept)
    if method.needs == "labels":
        by_class = config["energy"].get("by_class")
        return ClassEnergy(energy, by_class, event_shape=tuple(config["event_shape"])) if by_class else energy
    energy = as_energy(energy)
    coordinates = Coordinates.from_json(config.get("coordinates"))
    if config["energy"]["name"] != "custom" or not isinstance(energy, nn.Module):
        return energy
    if config["energy"].get("reference") and not isinstance(energy, Tilted):
        x = torch.randn((8, *config["event_shape"]), generator=generator(0))
        energy = on_reference(energy, x, zero_start=False)
    return in_training_units(energy, coordinates, power_of(method, trainer_again(config).steps or 0))


def _wrapping(module: Any, energy: Any) -> dict[str, Any]:
    """What a run's settings keep of a classifier that was made an energy."""
    if module is not energy and isinstance(module, ClassEnergy):
        return {"by_class": module.classes}
    if module is energy or not isinstance(module, JointEnergy):
        return {}
    return {"joint": {"output_scale": module.output_scale, "classes": module.classes}}


def settled(config: Any, rows: Batch) -> Any:
    """The settings of an energy, with what they leave to the data decided: a run records what it was."""
    return config.settled(rows.x) if provides(config, Settling) else config


def built(config: Any, rows: Batch, seed: int) -> nn.Module:
    """The energy of these settings; those that are `paired` also look at labels or contexts."""
    return config.build(rows if getattr(config, "paired", False) else rows.x, seed)


def check_discrete(energy: Any, method: Method) -> None:
    """Refuse a method that would leave the states of a discrete energy."""
    if not is_discrete(energy) or is_discrete(method):
        return
    kernel = method.chain_kernel
    if kernel is None or not kernel.discrete:
        kind = "works on" if kernel is None else f"with kernel {kernel.name!r} moves in"
        raise UnsupportedError(
            f"method: {method.name!r} {kind} continuous space, but the energy is over units coded −1 and +1; use "
            "cd, pcd or jarzynski with kernel=ms.kernels.Gibbs() (method.kernel=gibbs)"
        )


def power_of(method: Method, step: int) -> float:
    """P of exp(−P·E), which is what the method was learning after `step` updates."""
    return without_rounding(method.power(step))
