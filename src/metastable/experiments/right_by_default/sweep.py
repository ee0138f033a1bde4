"""Trainings that are broken on purpose: what they still call trusted must be true."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metastable.api import fit
from metastable.core.errors import DivergenceError
from metastable.core.random import derive, generator
from metastable.evaluation.quadrature import bounding_box, log_partition_quadrature
from metastable.methods import Jarzynski

from .scales import two_humps


@dataclass(frozen=True)
class Broken:
    """One way to break a training.

    Attributes:
        name: in words.
        method: settings of `Jarzynski`.
        training: settings of `fit`.
    """

    name: str
    method: dict[str, Any]
    training: dict[str, Any]


LONG_STEP, FAST, FEW = {"step_size": 5.0}, {"learning_rate": 0.3}, {"walkers": 32, "populations": 4}
WAYS = (
    Broken("as it comes", {}, {}),
    Broken("step × 100", LONG_STEP, {}),
    Broken("rate × 100", {}, FAST),
    Broken("rate × 100, no pace", {"pace": None}, FAST),
    Broken("32 walkers", FEW, {}),
    Broken("32 walkers, rate × 100", {**FEW, "pace": None}, FAST),
    Broken("32 walkers, step × 100", {**FEW, **LONG_STEP}, {}),
    Broken("step and rate × 100, no pace", {**LONG_STEP, "pace": None}, FAST),
)


def rows_of(kind: str, seed: int, n: int = 500) -> Tensor:
    """Two humps on a line, narrow rows on a line, or a bent cloud in the plane."""
    if kind == "humps":
        return two_humps(n, seed)
    rng = generator(derive(seed, "rows", kind))
    z = torch.randn((n, 2), generator=rng, dtype=torch.float64)
    if kind == "narrow":
        return 0.1 * z[:, :1]
    return torch.stack([2 * z[:, 0], 0.4 * z[:, 1] + z[:, 0].square()], 1)


KINDS = ("humps", "narrow", "bent")


def attempt(way: Broken, kind: str, seed: int, steps: int, walkers: int) -> dict[str, Any]:
    """One training, with its own log Z and with that of its evaluation, against quadrature.

    Returns:
        `trusted` and `errors` (standard errors off) of both numbers, as `training_…` and `run_…`; `diverged`.
    """
    x = rows_of(kind, seed)
    method = Jarzynski(**{"walkers": walkers, **way.method})
    options = {"steps": steps, "seed": seed, **way.training}
    tried = {"way": way.name, "kind": kind, "seed": seed}
    try:
        run = fit({"name": "mlp", "hidden": (32, 32)}, x, method, evaluate=False, **options)
    except DivergenceError:
        return {**tried, "diverged": True, "trusted": False, "errors": 0.0}
    z = run.log_partition
    assert z is not None
    box = bounding_box(x, 2.0)
    exact = log_partition_quadrature(run.learned_energy, box, points=20_001 if x.shape[1] == 1 else 601)
    errors = abs(z.value - exact) / z.std_error if z.std_error > 0 else float("inf")
    return {
        **tried,
        "diverged": False,
        "trusted": z.trusted,
        "errors": errors,
        "value": z.value,
        "std_error": z.std_error,
        "exact": exact,
        "warnings": list(z.warnings),
    }


def sweep(runs: int, seed: int, steps: int = 60, walkers: int = 4096) -> list[dict[str, Any]]:
    """`runs` trainings, every way on every kind of rows in turn."""
    turns = itertools.islice(itertools.cycle(itertools.product(WAYS, KINDS)), runs)
    return [
        attempt(way, kind, derive(seed, "sweep", i) % 2**31, steps, walkers)
        for i, (way, kind) in enumerate(turns)
    ]
