"""One small tree of errors. Each names the field, the rule and the value, and says what to try."""

from __future__ import annotations

import copyreg
import difflib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

MOST_SHOWN = 200
"""Characters of a value in an error."""

LEAST, MOST = 1e-30, 1e30
"""Lengths that single precision can reckon with."""


class MetastableError(Exception):
    """Everything this library raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """By its message and what else it holds, which `__init__` does not take, so that processes can send it."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # pyright: ignore


class InputError(MetastableError, ValueError):
    """Data, an argument or a file is not what the rule asks for."""


class ConfigError(InputError):
    """A setting is unknown or has a value outside its rule; `path` is its dotted place."""

    def __init__(self, path: str, message: str):
        super().__init__(f"{path}: {message}")
        self.path = path


class EnergyError(InputError):
    """A callable given as an energy does not map `(B, *event)` to `(B,)`."""


class UnsupportedError(MetastableError, ValueError):
    """A combination of choices that would give a number that is not what its name says."""


class CheckpointError(MetastableError, RuntimeError):
    """A checkpoint is missing, truncated, altered or could not be written."""


class DivergenceError(MetastableError, RuntimeError):
    """Training left the region where numbers mean anything; `step` says when."""

    def __init__(self, message: str, *, step: int, checkpoint: str | None = None):
        super().__init__(message)
        self.step = step
        self.checkpoint = checkpoint


class ProcessError(MetastableError, RuntimeError):
    """Another process of the same training or rollout ended; `process` is its number, where that is known."""

    def __init__(self, process: int | None, why: str):
        what = "processes lost touch" if process is None else f"process {process} ended"
        super().__init__(f"{what} ({why}); all have to be there, so that this one ends, too")
        self.process = process


class OutOfMemoryError(MetastableError, RuntimeError):
    """Something did not fit into memory; its cause is the allocator's own error.

    Attributes:
        part: what was being done.
        batch: what was held at once, in words.
        lower: settings to lower, with their values, in words.
        why: what the allocator said.
    """

    def __init__(self, part: str, batch: str, lower: str, why: str):
        advice = f"lower {lower}" if lower else "use a smaller energy"
        super().__init__(f"{part}: {batch} did not fit into memory; {advice} ({why})")
        self.part, self.batch, self.lower, self.why = part, batch, lower, why


class MissingDependencyError(MetastableError, ImportError):
    """An optional package is needed for what was asked."""

    def __reduce__(self) -> Any:
        return ImportError.__reduce__(self)  # with what it has beside its message


def nearest(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"`, or the list of known names when nothing is near.

    >>> nearest("jarzinski", ["cd", "pcd", "jarzynski"])
    " (did you mean 'jarzynski'?)"
    """
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (known: {', '.join(known)})" if known else ""


def short(value: Any) -> str:
    """A value as errors show it: what is long is cut, so that a line stays one.

    >>> short([1, "a"]), short("x" * 1000)[-5:]
    ("[1, 'a']", 'xxxx…')
    """
    try:
        text = " ".join(repr(value).split("\n"))  # arrays write rows
    except (ValueError, RecursionError):  # more digits than Python writes, or lists too deep for it
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def options_of(function: Callable[..., Any]) -> list[str]:
    """The names of its arguments that may be left out.

    >>> options_of(lambda x, *, steps=100, seed=0: x)
    ['steps', 'seed']
    """
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is not p.empty]


def require_options(options: Iterable[str], known: Iterable[str]) -> None:
    """Raise `ConfigError` naming the first of `options` that is not known, and those that are."""
    known = list(known)
    for name in options:
        if name not in known:
            raise ConfigError(name, f"unknown option{nearest(name, known)}")


def require(condition: bool, field: str, rule: str, value: Any) -> None:
    """Raise `ConfigError` naming field, rule and value unless `condition` holds."""
    if not condition:
        raise ConfigError(field, f"must be {rule}, got {short(value)}")


def require_positive(field: str, value: float) -> None:
    """`value` must be a finite number above zero."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
    require(ok, field, "a finite number above 0", value)


def require_length(field: str, value: float) -> None:
    """`value` must be above zero, and such that it, its square root and their inverses are numbers of 32 bits."""
    require_positive(field, value)
    require(LEAST <= value <= MOST, field, f"a number from {LEAST:g} to {MOST:g}", value)


def require_moderate(field: str, value: float, most: float = MOST) -> None:
    """`value` must not be so large that it is no number of 32 bits any more."""
    require(value <= most, field, f"at most {most:g}", value)


def require_count(field: str, value: int, least: int = 1) -> None:
    """`value` must be an integer of at least `least`."""
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(ok, field, f"an integer of at least {least}", value)
    require(value < 2**63, field, "an integer of at most 64 bits", value)


def require_choice(field: str, value: str, known: Iterable[str]) -> None:
    """`value` must be one of `known`; a near miss is named."""
    known = list(known)
    if value not in known:
        near = nearest(value if isinstance(value, str) else short(value), known)
        raise ConfigError(field, f"unknown value {short(value)}{near}")


def refuse_newer(file: object, written: object, ours: str) -> None:
    """Raise `InputError` where a release after `ours` wrote a file; releases that differ in the last number agree.

    >>> refuse_newer("config.json", "0.3.9", "0.3.0")
    >>> refuse_newer("config.json", "0.10.0", "0.9.4")
    Traceback (most recent call last):
    ...
    metastable.core.errors.InputError: config.json: version: must be at most 0.9, as this is 0.9.4, got 0.10.0; ...
    """
    found, known = (re.match(r"(\d+)\.(\d+)", str(text)) for text in (written, ours))
    if found and known and tuple(map(int, found.groups())) > tuple(map(int, known.groups())):
        raise InputError(
            f"{file}: version: must be at most {'.'.join(known.groups())}, as this is {ours}, got {written}; "
            "it was written by a later metastable: install that one (pip install -U metastable)"
        )


def need(module: str, extra: str, purpose: str) -> Any:
    """Import an optional package, or say which extra brings it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{purpose} needs the package {module.split('.')[0]!r}: pip install 'metastable[{extra}]'"
        ) from error
