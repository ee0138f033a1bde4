"""Types, errors, random numbers and the arithmetic of log-weights."""

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
