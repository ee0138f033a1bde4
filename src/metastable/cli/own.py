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
    place = _imported(module)
    make = getattr(place, factory, None)
    if make is None:
        known = [n for n, value in vars(place).items() if callable(value) and not n.startswith("_")]
        raise InputError(f"energy: the module {module!r} has no {factory!r}{nearest(factory, known)}")
    if not callable(make):
        raise InputError(
            f"energy: {name} must be a function or a class that makes the module, got {make!r:.80}"
        )
    try:
        energy = make()
    except Exception as error:
        raise InputError(
            f"energy: {name}() is called without arguments, and raised {type(error).__name__}: {_line(error)}"
        ) from error
    if not isinstance(energy, nn.Module):
        raise InputError(f"energy: {name}() must return an nn.Module, got {type(energy).__name__}")
    return energy


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


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
