"""metastable: train energy-based models, sample them, and know what they are worth.

>>> import metastable as ms, torch
>>> energy = ms.energies.GaussianMixture(torch.tensor([[-4.0], [4.0]]))
>>> ms.sample(energy, 8, event_shape=1, steps=5).x.shape
torch.Size([8, 1])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from metastable import (
        data,
        energies,
        evaluation,
        kernels,
        methods,
        policies,
        proposals,
        training,
        walkers,
    )
    from metastable.api import continue_sampling, fit, load_run, log_partition, sample
    from metastable.core.precision import precision
    from metastable.core.types import LogPartition, Walkers
    from metastable.estimator import EnergyDensity
    from metastable.runs.run import Run

_ROOMS = (
    "data",
    "energies",
    "evaluation",
    "kernels",
    "methods",
    "policies",
    "proposals",
    "training",
    "walkers",
)
_NAMES = {
    "fit": "metastable.api",
    "sample": "metastable.api",
    "continue_sampling": "metastable.api",
    "log_partition": "metastable.api",
    "load_run": "metastable.api",
    "precision": "metastable.core.precision",
    "EnergyDensity": "metastable.estimator",
    "Run": "metastable.runs.run",
    "Walkers": "metastable.core.types",
    "LogPartition": "metastable.core.types",
}

__all__ = [
    "EnergyDensity",
    "LogPartition",
    "Run",
    "Walkers",
    "__version__",
    "continue_sampling",
    "data",
    "energies",
    "evaluation",
    "fit",
    "kernels",
    "load_run",
    "log_partition",
    "methods",
    "policies",
    "precision",
    "proposals",
    "sample",
    "training",
    "walkers",
]


def __getattr__(name: str) -> Any:
    """Rooms and names are imported when first used, so that the command line answers at once."""
    if name in _ROOMS:
        return importlib.import_module(f"metastable.{name}")
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'metastable' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
