"""Frozen dataclasses from plain mappings: unknown keys are refused with a dotted path and the nearest name."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from .errors import ConfigError, nearest, short

T = TypeVar("T")


def build(cls: type[T], settings: Mapping[str, Any], path: str) -> T:
    """An instance of the dataclass `cls` from `settings`.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Walk:
    ...     steps: int = 1
    >>> build(Walk, {"step": 3}, "method")
    Traceback (most recent call last):
    ...
    metastable.core.errors.ConfigError: method.step: unknown setting (did you mean 'steps'?)
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(path, f"must be a table of settings, got {short(settings)}")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # pyright: ignore
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in settings.items():
        if key not in fields:
            raise ConfigError(f"{path}.{key}", f"unknown setting{nearest(key, fields)}")
        values[key] = _convert(value, hints.get(key, Any), f"{path}.{key}")
    return cls(**values)


def build_tagged(choices: Mapping[str, type], settings: Any, path: str) -> Any:
    """One of `choices`, named by the key `name` (or by a bare string), from the other keys."""
    if isinstance(settings, str):
        settings = {"name": settings}
    if not isinstance(settings, Mapping) or "name" not in settings:
        raise ConfigError(
            path, f"must have a 'name', one of {', '.join(sorted(choices))}, got {short(settings)}"
        )
    name = settings["name"]
    if not isinstance(name, str) or name not in choices:
        near = nearest(name if isinstance(name, str) else short(name), choices)
        raise ConfigError(f"{path}.name", f"unknown value {short(name)}{near}")
    return build(choices[name], {k: v for k, v in settings.items() if k != "name"}, path)


def describe(config: Any) -> Any:
    """The inverse: a JSON-able description, with `name` where the class has one."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        name = getattr(config, "name", None)
        named = {"name": name} if isinstance(name, str) else {}
        return named | {f.name: describe(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(k): describe(v) for k, v in config.items()}
    if isinstance(config, (list, tuple)):
        return [describe(v) for v in config]
    if isinstance(config, (str, int, float, bool)) or config is None:
        return config
    return f"<{name_of(config)}>"


def name_of(thing: Any) -> str:
    """What a function, a class or an object of a class is called."""
    return getattr(thing, "__qualname__", type(thing).__qualname__)


def _convert(value: Any, hint: Any, path: str) -> Any:
    """Numbers, tuples and optional values as the field's type asks; anything else is refused by name."""
    options = _options(hint)
    if value is None:
        if type(None) in options or hint is Any:
            return None
        raise ConfigError(path, "must not be empty")
    if isinstance(value, str) and str not in options and tuple[str, ...] in options:
        value = value.split(",")  # words, as one writes them on a command line
    if isinstance(value, list):
        value = tuple(tuple(v) if isinstance(v, list) else v for v in value)
    plain = [o for o in options if o in (int, float, bool, str)]
    if isinstance(value, tuple):
        row = next((o for o in options if typing.get_origin(o) is tuple), None)
        if row is not None:
            return _row(value, typing.get_args(row), path)
    for wanted in (bool, int, float, str):
        if wanted in plain and _is(value, wanted):
            return _number(value, wanted, path) if wanted in (int, float) else value
    if any(o not in (int, float, bool, str, type(None)) and _may_be(value, o) for o in options):
        return value
    known = dict.fromkeys(in_words(o) for o in plain or options if o is not type(None))
    raise ConfigError(path, f"must be {' or '.join(known)}, got {short(value)}")


def in_words(kind: Any) -> str:
    """What a setting of this type is, for people.

    >>> in_words(int), in_words(tuple[int, ...]), in_words(tuple[float, float])
    ('an integer', 'a list, each an integer', 'a list of 2, each a number')
    """
    of = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and of:
        count = "" if of[-1] is ... else f" of {len(of)}"
        return f"a list{count}, each {in_words(of[0])}"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a text"}.get(
        kind, name_of(kind)
    )


def _row(value: tuple[Any, ...], kinds: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    """A tuple of as many elements, each of its kind, as the type asks for."""
    if kinds[-1:] == (...,):
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        raise ConfigError(path, f"must be a list of {len(kinds)}, got {short(list(value))}")
    return tuple(
        _convert(v, kind, f"{path}.{i}") for i, (v, kind) in enumerate(zip(value, kinds, strict=True))
    )


def _number(value: Any, wanted: type, path: str) -> Any:
    """A number that the machine can hold."""
    if wanted is int and not -(2**63) <= value < 2**63:
        raise ConfigError(path, f"must be an integer of at most 64 bits, got {short(value)}")
    try:
        return wanted(value)
    except OverflowError:
        raise ConfigError(path, f"must be a number of at most 308 digits, got {short(value)}") from None


def _may_be(value: Any, kind: Any) -> bool:
    """Whether a value may stand for an object of `kind`: itself, or a table of settings, never a mere number."""
    is_row = (typing.get_origin(kind) or kind) is tuple
    if isinstance(value, (bool, int, float, str)):
        return kind is Any
    return isinstance(value, tuple) == is_row or kind is Any


def _options(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [o for arg in typing.get_args(hint) for o in _options(arg)]
    return [hint]


def _is(value: Any, wanted: type) -> bool:
    if wanted is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
