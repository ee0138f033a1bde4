"""Does the interval of `log_partition` cover the truth? Default settings, targets whose log Z is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.errors import require_choice
from metastable.core.random import derive
from metastable.energies import Banana, DoubleWell, Gaussian, two_modes
from metastable.evaluation.log_partition import log_partition

from .base import Bench, Experiment, Row
from .trials import by_scale


def correlated_covariance(dim: int = 10, correlation: float = 0.9) -> Tensor:
    """Dense: standard deviations from ½ to 2, correlations `correlation`^|i−j|."""
    scale = torch.logspace(-1, 1, dim, base=2.0)
    index = torch.arange(dim, dtype=torch.float32)
    return scale[:, None] * correlation ** (index[:, None] - index).abs() * scale


def correlated_gaussian(dim: int = 10) -> Gaussian:
    """A Gaussian with a dense covariance, away from the origin."""
    return Gaussian(torch.linspace(-2, 2, dim), correlated_covariance(dim))


TARGETS: dict[str, Callable[[], nn.Module]] = {
    "gaussian": correlated_gaussian,
    "two-modes": lambda: two_modes(8.0, (0.2, 0.8), 5),
    "double-well": DoubleWell,
    "banana": Banana,
}


def estimate(target_name: str, seed: int) -> dict[str, Any]:
    """One call at default settings against the exact log Z."""
    require_choice("target_name", target_name, TARGETS)
    energy: Any = TARGETS[target_name]()
    return against_exact(target_name, energy, float(energy.log_partition()), seed)


def against_exact(name: str, energy: Any, exact: float, seed: int, **options: Any) -> dict[str, Any]:
    """What one call of `log_partition` says of a log Z that is known; `options` are its own."""
    began = time.perf_counter()
    z = log_partition(energy, seed=seed, **options)
    seconds = time.perf_counter() - began
    low, high = z.interval(0.95)
    return {
        "target": name,
        "seed": seed,
        "exact": exact,
        "value": z.value,
        "std_error": z.std_error,
        "error": z.value - exact,
        "z_score": (z.value - exact) / z.std_error,
        "covered": low <= exact <= high,
        "trusted": z.trusted,
        "warnings": list(z.warnings),
        "seconds": seconds,
    }


def coverage(target_name: str, seeds: int | Iterable[int] = 100) -> dict[str, Any]:
    """How often the 95 % interval covers log Z over `seeds`, and how the errors compare with what it claims.

    Returns:
        `coverage` (share of seeds), `mean_error` and its own `mean_error_std_error` (bias against noise),
        `rms_error` and `median_std_error` (which should be alike), `warned` (share of seeds with a warning),
        `seconds` (in all) and `rows` (one dictionary for each seed).
    """
    rows = [estimate(target_name, s) for s in (range(seeds) if isinstance(seeds, int) else seeds)]
    error = torch.tensor([row["error"] for row in rows], dtype=torch.float64)
    return {
        "target": target_name,
        "seeds": len(rows),
        "coverage": sum(row["covered"] for row in rows) / len(rows),
        "mean_error": float(error.mean()),
        "mean_error_std_error": float(error.std() / len(rows) ** 0.5),
        "rms_error": float(error.square().mean().sqrt()),
        "median_std_error": float(torch.tensor([row["std_error"] for row in rows]).median()),
        "warned": sum(bool(row["warnings"]) for row in rows) / len(rows),
        "seconds": sum(row["seconds"] for row in rows),
        "rows": rows,
    }


def told(bench: Bench, name: str) -> dict[str, Any]:
    """`coverage` of one target, once it is said."""
    first = derive(bench.seed, "coverage", name) % 2**31
    seeds = range(first, first + bench.seeds)
    found, before = bench.finished.once(name, lambda: coverage(name, seeds), first=first)
    more = " (made before)" if before else ""
    bench.say(f"{name}: {found['coverage']:.0%} of {bench.seeds} intervals cover log Z{more}")
    return found


def body(bench: Bench) -> list[Row]:
    """Coverage, bias and width of the interval on every target."""
    rows, all_found = [], bench.finished.each([partial(told, bench, name) for name in TARGETS])
    for name, found in zip(TARGETS, all_found, strict=True):
        rows += [
            Row(f"coverage/{name}", found["coverage"], ">=", bench.least),
            Row(f"mean_error/{name}", found["mean_error"]),
            Row(f"mean_error_std_error/{name}", found["mean_error_std_error"]),
            Row(f"median_std_error/{name}", found["median_std_error"]),
            Row(f"seconds_per_call/{name}", found["seconds"] / bench.seeds),
        ]
    return rows


EXPERIMENT = Experiment(
    name="log-partition-coverage",
    title="log Z of four targets: how often the 95 % interval covers the truth",
    paper="Ours: no paper gives an interval for log Z to compare with",
    scales=by_scale(seeds=(6, 100, 100), least=(0.6, 0.9, 0.9)),
    body=body,
)
