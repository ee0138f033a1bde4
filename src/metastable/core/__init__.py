"""Types, errors, random numbers and the arithmetic of log-weights."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    CheckpointError,
    ConfigError,
    DivergenceError,
    EnergyError,
    InputError,
    MetastableError,
    MissingDependencyError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from .types import Energy, EnergyGrad, LogPartition, Proposal, Walkers, energy_and_grad
    from .weights import entropy_fraction, ess_fraction, log_mean_exp

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DivergenceError",
    "Energy",
    "EnergyError",
    "EnergyGrad",
    "InputError",
    "LogPartition",
    "MetastableError",
    "MissingDependencyError",
    "Proposal",
    "UnsupportedError",
    "Walkers",
    "energy_and_grad",
    "entropy_fraction",
    "ess_fraction",
    "log_mean_exp",
]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when first used: errors and a log are read without it."""
    if name in __all__:
        room = "weights" if name in ("entropy_fraction", "ess_fraction", "log_mean_exp") else "types"
        return vars(importlib.import_module(f"metastable.core.{room}"))[name]
    raise AttributeError(f"module 'metastable.core' has no attribute {name!r}")
