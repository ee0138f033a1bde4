"""From a preset, a file and flags to everything a training needs, checked on the way.

Settings are one plain tree: `{"data", "energy", "method", "trainer", "seed", "held_out"}`. A preset or file
gives it, flags and `--set` change it, `resolve` turns it into objects. The `config.json` of a run is such a
tree with a few facts added, so a run can be trained again from its own folder.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from metastable._version import __version__
from metastable.core.configure import build, build_tagged, describe
from metastable.core.errors import ConfigError, InputError, nearest, refuse_newer, require, short
from metastable.core.pixels import order_hint
from metastable.core.protocols import reference_of
from metastable.core.units import require_kind
from metastable.data import Dataset, load_array
from metastable.data.arrays import full_name
from metastable.data.columns import oddities
from metastable.methods import Method
from metastable.runs.folder import same_rows
from metastable.runs.resolve import beside_of, energy_config, on_mixture, resolve_method
from metastable.runs.rows import check_sizes, data_settings, row_settings
from metastable.training.config import OPTIMISERS, RATE_NAMES, Schedule, TrainerConfig

from .own import own_energy

Settings = dict[str, Any]

SECTIONS = ("data", "energy", "method", "trainer", "seed", "held_out", "units", "dequantise")
FACTS = (
    "about",
    "version",
    "event_shape",
    "context_shape",
    "classes",
    "class_names",
    "class_rows",
    "coordinates",
    "columns",
    "traits",
    "run",
)
"""What a run or a preset says about itself; toy sets are known again by it, and nothing else is read from it."""
HELD_OUT, SET = 0.1, "set: must read NAME=VALUE, as in method.walkers=1000"
STILL = 0.05
"""Share of the typical standard deviation below which a pixel counts as one that does not change."""


@dataclass(frozen=True)
class Job:
    """One training, ready to begin. `notes` are things its owner should know."""

    dataset: Dataset
    energy: Any
    method: Method
    trainer: TrainerConfig
    seed: int
    held_out: float
    units: str = "auto"
    dequantise: bool = False
    notes: tuple[str, ...] = ()

    def described(self) -> Settings:
        """Every setting with the value it has, as a file could hold it."""
        return {
            "data": self.dataset.name,
            "energy": describe(self.energy),
            "method": describe(self.method),
            "trainer": describe(self.trainer),
            "seed": self.seed,
            "held_out": self.held_out,
            "units": self.units,
            "dequantise": self.dequantise,
        }


# ---- reading


def preset_names() -> list[str]:
    """Names of the presets that come with the package."""
    folder = resources.files("metastable") / "presets"
    return sorted(p.name.removesuffix(".json") for p in folder.iterdir() if p.name.endswith(".json"))


def read_preset(name: str) -> Settings:
    """A preset by name; a near miss is named."""
    if name not in preset_names():
        raise InputError(
            f"preset: unknown name {name!r}{nearest(name, preset_names())}; a settings file ends in .json or .toml"
        )
    text = (resources.files("metastable") / "presets" / f"{name}.json").read_text(encoding="utf-8")
    return json.loads(text)


def read_settings(source: str | Path) -> Settings:
    """Settings from a preset's name, a `.json` or `.toml` file, or the folder of a run."""
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise InputError(f"config: {source} is not a run (it holds no config.json)")
    if path.suffix not in (".json", ".toml"):
        return read_preset(str(source))
    try:
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except FileNotFoundError:
        raise InputError(f"config: no such file: {path}") from None
    except (ValueError, RecursionError) as error:  # both decoders' errors are; one of brackets without end
        raise InputError(f"{path}: is not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: must hold a table of settings, got {type(found).__name__}")
    if isinstance(found.get("energy"), str) and ":" in found["energy"]:
        raise InputError(
            f"{path}: energy: a file must not name code to run, got {short(found['energy'])}; give --energy"
        )
    refuse_newer(path, found.get("version"), __version__)
    return found


# ---- changing


def with_flags(settings: Mapping[str, Any], flags: Mapping[str, Any]) -> Settings:
    """Settings with the flags that were given (not None), by dotted name, put in their place."""
    for dotted, value in flags.items():
        if value is not None:
            settings = _placed(settings, dotted.split("."), value)
    return dict(settings)


def with_assignments(settings: Mapping[str, Any], assignments: Iterable[str], rule: str = SET) -> Settings:
    """Settings changed by `a.b=VALUE`; a value is JSON, or as Python writes it, or else a word."""
    for text in assignments:
        dotted, equals, value = text.partition("=")
        if not equals or not dotted.strip():
            raise InputError(f"{rule}, got {text!r}")
        parsed = value_of(value.strip())
        settings = with_flags(settings, {dotted.strip(): _Null if parsed is None else parsed})
    return dict(settings)


def value_of(text: str) -> Any:
    """What was typed: JSON, a number or list as Python takes them too, or a word.

    >>> value_of("[1, 2]"), value_of(".5"), value_of("(.9, True)"), value_of("kl"), value_of("2024_01")
    ([1, 2], 0.5, [0.9, True], 'kl', '2024_01')
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also of more digits or brackets than Python reads
        pass
    if re.search(r"\d_\d", text):  # a date or a version, not Python's 1_000
        return text
    try:
        with warnings.catch_warnings(action="ignore"):  # of words that begin like numbers
            return json.loads(json.dumps(ast.literal_eval(text)))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


def with_method(settings: Mapping[str, Any], name: str | None) -> Settings:
    """Settings with another method; the settings of the method that it replaces do not fit and are dropped."""
    if name is None or _named(settings.get("method"), None).get("name") == name:
        return dict(settings)
    return {**settings, "method": {"name": name}}


class _Null:
    """`null` of JSON, told apart from a flag that was not given."""


def _placed(tree: Any, path: list[str], value: Any) -> Settings:
    """`tree` with `value` at `path`; nothing that was given is changed in place."""
    head, *rest = path
    inside = dict(tree) if isinstance(tree, Mapping) else {}
    if rest:
        below = inside.get(head)
        inside[head] = _placed({"name": below} if isinstance(below, str) else below, rest, value)
    else:
        inside[head] = None if value is _Null else value
    return inside


def _named(table: Any, default: str | None) -> Settings:
    """A tagged table: a bare name becomes one, and where the name is missing it is `default`."""
    if isinstance(table, str):
        return {"name": table}
    if isinstance(table, Mapping):
        return {"name": default, **table}
    return {"name": default} if table is None else {"name": table}


# ---- resolving


def resolve(settings: Mapping[str, Any]) -> Job:
    """Every object of a training, or an error that names the setting by its dotted path."""
    for key in settings:
        if key not in (*SECTIONS, *FACTS):
            raise ConfigError(str(key), f"unknown setting{nearest(str(key), SECTIONS)}")
    seed, held_out = settings.get("seed", 0), settings.get("held_out", HELD_OUT)
    require(isinstance(seed, int) and not isinstance(seed, bool), "seed", "an integer", seed)
    is_share = isinstance(held_out, (int, float)) and not isinstance(held_out, bool) and 0 <= held_out < 1
    require(is_share, "held_out", "a share of at least 0 and below 1", held_out)
    units, dequantise = settings.get("units", "auto"), settings.get("dequantise", False)
    require_kind(units)
    require(isinstance(dequantise, bool), "dequantise", "true or false", dequantise)
    trainer, method = trainer_of(settings.get("trainer")), method_of(settings.get("method"))
    dataset, notes = data_of(settings)
    check_sizes(dataset)
    needs = "" if method.needs == "given?" and dataset.given is None else method.needs.rstrip("?")
    energy = energy_of(settings.get("energy"), dataset.event_shape, beside_of(method, needs), method.timed)
    mixture = on_mixture(energy, dataset, method)
    trainer = trainer.resolved(round((1 - held_out) * len(dataset)), dataset.x[0].numel(), mixture)
    last = trainer.data_noise if trainer.data_noise_final is None else trainer.data_noise_final
    least, field = min((trainer.data_noise, "trainer.data_noise"), (last, "trainer.data_noise_final"))
    if order := order_hint(dataset.event_shape):
        notes += (f"data: shape {tuple(dataset.x.shape)} {order}",)
    notes += _still_pixels(dataset, energy, least)
    if not dequantise:
        noisy = trainer.data_noise or last
        notes += tuple(f"data: {words}" for words in oddities(dataset, least, field if noisy else ""))
    return Job(dataset, energy, method, trainer, seed, float(held_out), units, dequantise, notes)


def _still_pixels(dataset: Dataset, energy: Any, noise: float) -> tuple[str, ...]:
    """A note where pixels hardly change: on a Gaussian fitted to them any ordinary step is far too long.

    `noise` is the least that training puts on them.
    """
    if len(dataset.event_shape) != 3 or reference_of(energy) in (None, "none"):
        return ()
    sd = (dataset.x.var(0) + noise**2).sqrt()
    still = int((sd < STILL * sd.square().mean().sqrt()).sum())
    if not still:
        return ()
    return (
        f"data: {still} of {sd.numel()} pixels hardly change and have no density to speak of, so that training is "
        "likely to diverge; add a little noise, as in --set trainer.data_noise=0.2",
    )


def data_of(settings: Mapping[str, Any], source: Any = None) -> tuple[Dataset, tuple[str, ...]]:
    """The rows, under the name by which they can be read again, and what is odd about them.

    `source` is where to look for them instead.
    """
    data = settings.get("data")
    before = data if isinstance(data, Mapping) else {"source": data}
    asked = before.get("source") if source is None else source
    if not isinstance(asked, (str, Path)) or not str(asked):
        raise ConfigError("data", "give --data FILE, toy:NAME or mnist:FOLDER, or a preset with data")
    source = full_name(str(asked)) if source is None else asked
    dataset = replace(load_array(str(source)), name=str(source))
    split = settings.get("held_out", 0.0), settings.get("seed", 0)
    sha = before.get("sha256")  # without one nothing is hashed
    if sha is None or same_rows(settings, data_settings(dataset), lambda: row_settings(dataset, *split)):
        return dataset, ()
    return dataset, (f"data: {source} has changed (sha256 {sha} in the settings, now {dataset.digest})",)


def energy_of(table: Any, event_shape: tuple[int, ...], needs: str = "", timed: bool = False) -> Any:
    """The settings of a built-in energy, or a module of one's own, `module:factory`; else the default.

    The default is for data of this shape and this method.
    """
    if isinstance(table, str) and ":" in table:
        return own_energy(table)
    named = _named(table, "default")
    if named["name"] == "custom":
        raise ConfigError(
            "energy.name",
            f"was {named.get('class', 'a class')} of your own; name a function that makes it, "
            "--energy module:factory, or train it from Python with metastable.fit",
        )
    return energy_config(named, event_shape, needs, timed)


def method_of(table: Any) -> Method:
    """The method, with its kernel or its source of negatives."""
    return resolve_method(_named(table, "jarzynski"))


def trainer_of(table: Any) -> TrainerConfig:
    """The trainer's settings, with optimiser and schedule made from their tables."""
    if table is not None and not isinstance(table, Mapping):
        raise ConfigError("trainer", f"must be a table of settings, got {table!r}")
    settings = dict(table or {})
    for name in settings.keys() & {"learning_rate", *RATE_NAMES}:
        raise ConfigError(
            f"trainer.{name}",
            "the rate is the optimiser's: --learning-rate, or trainer.optimiser.learning_rate",
        )
    for name, make in (("optimiser", _optimiser), ("schedule", _schedule)):
        if name in settings:
            settings[name] = make(settings[name], f"trainer.{name}")
        if (several := f"{name}s") in settings:
            path, players = f"trainer.{several}", settings[several]
            if not isinstance(players, Mapping):
                raise ConfigError(path, f"must be a table of {several} by player, got {players!r}")
            settings[several] = {player: make(given, f"{path}.{player}") for player, given in players.items()}
    return build(TrainerConfig, settings, "trainer")


def _optimiser(table: Any, path: str) -> Any:
    """From its name, or a table."""
    return build_tagged(OPTIMISERS, _named(table, "adam"), path)


def _schedule(shape: Any, path: str) -> Schedule:
    """From its shape, or a table."""
    return build(Schedule, {"shape": shape} if isinstance(shape, str) else shape, path)
