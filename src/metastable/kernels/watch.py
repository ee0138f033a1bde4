"""What a function reads besides its arguments: what a recording of it would go on reading.

A CUDA graph holds numbers as they were and reads tensors where they lay. It stands for the function as long as what
`reads` finds is the same: plain numbers by their value, tensors of the device by their place and others by value.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metastable.core.plain import HOOKS

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    torch.dtype,
    torch.device,
    Enum,
    range,
    slice,
)
SMALL = 4096
"""Numbers of a tensor elsewhere than on the device that are compared by value."""
LIBRARIES = ("torch", "metastable", "math", "numpy", "functools")
OWN = {"_parameters", "_buffers", "_modules", "training"}


class UnwatchedError(Exception):
    """Something is read that cannot be watched; the message says where and what."""


class Reads(NamedTuple):
    """What is read: `key` is equal where a recording still stands, `tensors` are by the name of their place."""

    key: Hashable
    tensors: dict[str, Tensor]


def modules_in(energy: Any) -> Iterator[nn.Module]:
    """The modules of an energy, behind wrappers too that are none and have it as `energy` or `inner`."""
    if isinstance(energy, nn.Module):
        yield from energy.modules()
    try:
        held = vars(energy)  # in which a module does not have its children
    except TypeError:  # it keeps nothing by name
        return
    for name in ("energy", "inner"):
        if held.get(name) is not None:
            yield from modules_in(held[name])


def reads(value: Any, device: torch.device, name: str = "energy") -> Reads:
    """All that `value`, a module, function or object, can read; raises `UnwatchedError`."""
    tensors: dict[str, Tensor] = {}
    return Reads(_key(value, name, device, tensors, {}), tensors)


_looked: ContextVar[dict[Hashable, tuple[Any, Hashable]] | None] = ContextVar("looked", default=None)


@contextmanager
def unchanging() -> Iterator[None]:
    """Inside, what is watched is looked at once: nothing trains, moves or is loaded there."""
    token = _looked.set({})
    try:
        yield
    finally:
        _looked.reset(token)


def key_of(value: Any, device: torch.device, name: str = "energy", anew: bool = False) -> Hashable:
    """The key of `reads`, milliseconds of work; inside of `unchanging` that of the first look, if not `anew`."""
    looked = _looked.get()
    if looked is None:
        return reads(value, device, name).key
    place = id(value), device
    if anew or place not in looked:
        looked[place] = value, reads(value, device, name).key  # kept, so that its place is nobody else's
    return looked[place][1]


def _key(
    value: Any, name: str, device: torch.device, tensors: dict[str, Tensor], seen: dict[int, int]
) -> Any:
    if isinstance(value, PLAIN):
        return value
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    inner: Callable[[str, Any], Any] = lambda part, v: _key(v, f"{name}{part}", device, tensors, seen)  # noqa: E731
    if isinstance(value, Tensor):
        tensors[name] = value
        if value.device == device:
            return (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() > SMALL:
            raise UnwatchedError(
                f"{name} is a tensor of {value.numel()} numbers on {value.device}, not on {device}"
            )
        return (tuple(value.detach().flatten().tolist()), value.shape, value.dtype)
    if isinstance(value, Mapping):
        return tuple((inner(".key", k), inner(f".{k}", v)) for k, v in value.items())
    if isinstance(value, (set, frozenset)) and all(isinstance(v, PLAIN) for v in value):
        return (type(value), frozenset(value))
    if isinstance(value, (tuple, list)):
        return (type(value), *(inner(f"[{i}]", v) for i, v in enumerate(value)))
    if isinstance(value, functools.partial):
        return (inner("", value.func), inner("", value.args), inner("", value.keywords))
    if isinstance(value, types.MethodType):
        return (inner("", value.__func__), inner("", value.__self__))
    if isinstance(value, types.FunctionType):
        return (value.__code__, *(inner(f".{part}", v) for part, v in _of_function(value).items()))
    if isinstance(value, nn.Module):
        return (
            type(value),
            value.training,
            *(inner(f".{part}", v) for part, v in _of_module(value, name).items()),
        )
    if isinstance(value, (types.ModuleType, types.BuiltinFunctionType)):
        return value.__name__
    if isinstance(value, torch.Generator) or "__dict__" not in dir(value):
        raise UnwatchedError(f"{name} is a {type(value).__name__}, whose changes would not be noticed")
    return (type(value), *((part, inner(f".{part}", v)) for part, v in vars(value).items()))


def _of_function(function: types.FunctionType) -> dict[str, Any]:
    """Its defaults, what it encloses, and the globals that it names; those of libraries stay as they are."""
    code = function.__code__
    known = {} if function.__module__.split(".")[0] in LIBRARIES else function.__globals__
    cells = {n: c.cell_contents for n, c in zip(code.co_freevars, function.__closure__ or (), strict=True)}
    fixed = (type, types.ModuleType, types.BuiltinFunctionType)
    named = {n: known[n] for n in code.co_names if n in known and not isinstance(known[n], fixed)}
    return {"defaults": function.__defaults__, "keywords": function.__kwdefaults__, **named, **cells}


def _of_module(module: nn.Module, name: str) -> dict[str, Any]:
    """Parameters, buffers, children and plain attributes; hooks cannot be recorded."""
    own = vars(module)
    if any(own.get(hooks) for hooks in HOOKS):
        raise UnwatchedError(f"{name} ({type(module).__name__}) has hooks, which a recording would not call")
    quiet = {k: v for k, v in own.items() if k not in OWN and not (k.startswith("_") and not v)}
    return {**own["_parameters"], **own["_buffers"], **own["_modules"], **quiet}
