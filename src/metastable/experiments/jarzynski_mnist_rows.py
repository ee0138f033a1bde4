"""The numbers of `jarzynski_mnist`: the weights of a run, and rows of the pieces that are there."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from metastable.core.types import LogPartition, Walkers
from metastable.evaluation.image_classifier import ImageClassifier, class_shares
from metastable.runs.run import Run

from .base import Bench, Row
from .jarzynski_mnist_figures import Found, draw_errors
from .pieces import Piece
from .three_digits import CLASSES, TRUE

TOLD = (
    *("steering_error", "ten_error", "other", "smc_error", "smc_ten_error", "ess", "ancestors"),
    *("cross_entropy", "smc_cross_entropy", "seconds", "updates"),
)
"""What nothing is required of."""


def relative_error(shares: Tensor, std_error: Tensor) -> tuple[float, float]:
    """Mean relative error of the three weights, and how far it is sure."""
    off, bar = (shares - TRUE).abs() / TRUE, std_error / TRUE
    return float(off.mean()), float(bar.square().sum().sqrt() / len(TRUE))


def weights_of(run: Run, walkers: Walkers, classifier: ImageClassifier, name: str) -> dict[str, Any]:
    """Shares of the three digits among samples without their noise, and their mean relative error.

    The paper's classifier knows the three alone, so each sample is the likeliest of them; `ten_error` is that of
    shares among all ten digits, which counts samples that look like another digit as lost, and `other` are those.
    """
    clean = replace(walkers, x=run.denoised(walkers.x))
    three = class_shares(clean, lambda x: classifier(x)[:, list(CLASSES)])
    error, bar = relative_error(three.shares, three.std_error)
    ten = class_shares(clean, classifier)
    strict, _ = relative_error(*(values[list(CLASSES)] for values in (ten.shares, ten.std_error)))
    other = 1 - float(ten.shares[list(CLASSES)].sum())
    said = {"shares": three.shares.tolist(), "error": error, "error_se": bar}
    return {f"{name}{key}": value for key, value in (said | {"ten_error": strict, "other": other}).items()}


def steering(walkers: Walkers) -> Walkers:
    """Those that the energy was steered by, as all of the paper's are: the first population."""
    n = walkers.info.get("populations", [len(walkers)])[0]
    return Walkers(walkers.x[:n], walkers.log_weight[:n])


def rows_of(bench: Bench, found: Found) -> list[Row]:
    """Errors of the weights first, then log Z, likelihood, what was restored, and what it cost."""
    wanted = {(arm, noise) for arm in bench.required for noise in bench.noises if arm in bench.arms}
    rows = [  # what is required and is not there does not hold
        Row(f"weight_error/{arm}/noise={noise:g}", math.nan, "<=", bench.error_target)
        for arm, noise in sorted(wanted - found.keys())
    ]
    for (arm, noise), piece in found.items():
        n, at = told(piece), f"{arm}/noise={noise:g}"
        judged = ("<=", bench.error_target) if arm in bench.required else (None, None)
        rows += [Row(f"weight_error/{at}", n["error"], *judged), Row(f"weight_error_se/{at}", n["error_se"])]
        rows += [
            Row(f"share_of_{digit}/{at}", share) for digit, share in zip(CLASSES, n["shares"], strict=True)
        ]
        rows += [*log_z_rows(n, at), *restored_rows(bench, n, at, arm in bench.required)]
        rows += [Row(f"{name}/{at}", n[name]) for name in TOLD if n.get(name) is not None]
    return rows


def compared(bench: Bench, rows: list[Row]) -> list[Row]:
    """Also PCD's errors as multiples of Jarzynski's at the same noise, and Figure 3."""
    errors, made = {}, []
    for row in rows:
        name, _, at = row.metric.partition("/")
        if name == "weight_error":
            arm, _, noise = at.partition("/noise=")
            errors[arm, float(noise)] = row.value
    for row in rows:
        name, _, at = row.metric.partition("/")
        made += [row] if name != "error_over_jarzynski" else []
        arm, _, noise = at.partition("/noise=")
        if name == "weight_error_se" and arm.startswith("pcd") and ("jarzynski", float(noise)) in errors:
            ratio = errors[arm, float(noise)] / max(errors["jarzynski", float(noise)], 1e-9)
            made.append(Row(f"error_over_jarzynski/{at}", ratio))
    if errors:
        draw_errors(bench, errors, {row.metric: row.value for row in rows})
    return made


def told(piece: Piece) -> dict[str, Any]:
    """The numbers of a piece; of an older one, updates are where its curves end."""
    curve = piece.arrays.get("curve_step")
    return {"updates": None if curve is None else float(curve[-1]), **piece.numbers}


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
