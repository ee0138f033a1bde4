"""The numbers of `jarzynski_mnist`, from the pieces that are there."""

from __future__ import annotations

import math
from typing import Any

from metastable.core.types import LogPartition

from .base import Bench, Row
from .jarzynski_mnist_figures import Found
from .three_digits import CLASSES

TOLD = (
    *("steering_error", "ten_error", "other", "smc_error", "smc_ten_error", "ess", "ancestors"),
    *("cross_entropy", "smc_cross_entropy", "seconds"),
)
"""What nothing is required of."""


def rows_of(bench: Bench, found: Found) -> list[Row]:
    """Errors of the weights first, then log Z, likelihood, what was restored, and what it cost."""
    wanted = {(arm, noise) for arm in bench.required for noise in bench.noises if arm in bench.arms}
    rows = [  # what is required and is not there does not hold
        Row(f"weight_error/{arm}/noise={noise:g}", math.nan, "<=", bench.error_target)
        for arm, noise in sorted(wanted - found.keys())
    ]
    for (arm, noise), piece in found.items():
        n, at = piece.numbers, f"{arm}/noise={noise:g}"
        judged = ("<=", bench.error_target) if arm in bench.required else (None, None)
        rows += [Row(f"weight_error/{at}", n["error"], *judged), Row(f"weight_error_se/{at}", n["error_se"])]
        rows += [
            Row(f"share_of_{digit}/{at}", share) for digit, share in zip(CLASSES, n["shares"], strict=True)
        ]
        plain = found.get(("jarzynski", noise))
        if plain is not None and arm.startswith("pcd"):
            rows.append(Row(f"error_over_jarzynski/{at}", n["error"] / max(plain.numbers["error"], 1e-9)))
        rows += [*log_z_rows(n, at), *restored_rows(bench, n, at, arm in bench.required)]
        rows += [Row(f"{name}/{at}", n[name]) for name in TOLD if n.get(name) is not None]
    return rows


def log_z_rows(numbers: dict[str, Any], at: str) -> list[Row]:
    """log Z of training beside that of sequential Monte Carlo: they agree, or one of them is not trusted."""
    estimates = {name: numbers[name] for name in ("log_z", "smc_log_z") if numbers[name] is not None}
    read = {name: LogPartition.from_json(kept) for name, kept in estimates.items()}
    rows = [Row(f"{name}/{at}", z.value) for name, z in read.items()]
    rows += [Row(f"{name}_se/{at}", z.std_error) for name, z in read.items()]
    rows += [Row(f"{name}_trusted/{at}", float(z.trusted)) for name, z in read.items()]
    if len(read) == 2:
        own, smc = read.values()
        apart = abs(own.value - smc.value) / max((own.std_error**2 + smc.std_error**2) ** 0.5, 1e-12)
        judged = ("<=", 3.0) if own.trusted and smc.trusted else (None, None)
        rows.append(Row(f"log_z_apart_in_joint_se/{at}", apart, *judged))
    return rows


def restored_rows(bench: Bench, numbers: dict[str, Any], at: str, required: bool) -> list[Row]:
    """Squared error of the filled-in half, as a share of that of the noise it was and of the mean digit's."""
    error = numbers["restored_mean"]
    targets = (("<=", 0.5), ("<=", 1.0)) if required and bench.restore_required else ((None, None),) * 2
    return [
        Row(f"restored_over_start/{at}", error / numbers["restored_given"], *targets[0]),
        Row(f"restored_over_class_mean/{at}", error / numbers["restored_class_mean"], *targets[1]),
    ]
