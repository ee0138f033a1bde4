"""An energy of one's own, named on the command line as `module:factory`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from torch import nn

from metastable.core.errors import InputError, nearest, require


def own_energy(name: str) -> nn.Module:
    """What `factory()` of `module:factory` makes; the module is in the current folder, or installed."""
    module, colon, factory = name.partition(":")
    require(bool(module and colon and factory), "energy", "a name such as module:factory", name)
    made = _called(_member(_imported(module), module, factory), name)
    if not isinstance(made, nn.Module):
        raise InputError(f"energy: {name}() must return an nn.Module, got {type(made).__name__}")
    return made


def _imported(module: str) -> Any:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise InputError(
                f"energy: {module} needs the module {error.name!r}, which is not there"
            ) from error
        raise InputError(f"energy: no module {module!r} in {here}, nor is one installed") from error
    except Exception as error:
        raise InputError(
            f"energy: importing {module} raised {type(error).__name__}: {_line(error)}"
        ) from error
    finally:
        sys.path.remove(here)


def _member(module: Any, name: str, factory: str) -> Any:
    found = getattr(module, factory, None)
    if found is None:
        known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise InputError(f"energy: the module {name!r} has no {factory!r}{nearest(factory, known)}")
    if not callable(found):
        raise InputError(
            f"energy: {name}:{factory} must be a function or a class that makes the module, got {found!r:.80}"
        )
    return found


def _called(factory: Any, name: str) -> Any:
    try:
        return factory()
    except Exception as error:
        raise InputError(
            f"energy: {name}() is called without arguments, and raised {type(error).__name__}: {_line(error)}"
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
