"""What a classifier that is an energy model is worth: as a classifier, as a detector of outliers, as a sampler.

Such an energy has `logits(x)`, `(B, *event)` to `(B, C)`, beside E(x), and `given(labels)`, an energy of p(x | y).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.core.protocols import Classifier, provides

from ..core.errors import InputError, require_count
from ..core.parts import in_parts
from ..core.powered import powered
from ..core.random import derive, generator
from ..core.types import Bound, Walkers
from ..kernels import Kernel, run_chain
from .calibration import (
    BINS,
    accuracy,
    brier_score,
    expected_calibration_error,
    negative_log_likelihood,
    reliability,
)
from .outliers import ood_aurocs, ood_scores

MOST_SCORED = 5000
"""Rows of each sample behind AUROC: its standard error is then at most 0.006, and a gradient each is affordable."""


@dataclass(frozen=True)
class ClassifierSummary:
    """Numbers for a file, and arrays for pictures.

    Attributes:
        numbers: plain values that JSON can hold: `accuracy` with `accuracy_se`, `negative_log_likelihood`,
            `brier_score`, `calibration_error` and `calibration_error_equal_mass` (each with `value`, `by_chance`
            and `by_chance_std`), `reliability` (columns), `ood` (a list, one entry for each set of outsiders:
            `name`, `rows`, and `auroc` by score with `value` and `std_error`).
        arrays: `inside_SCORE` and `outside_I_SCORE`, the scores of `ood_scores` for the I-th set of outsiders.
    """

    numbers: dict[str, Any]
    arrays: dict[str, np.ndarray]


def classifier_summary(
    energy: Any,
    x: Tensor,
    labels: Tensor,
    outside: Mapping[str, Tensor] | None = None,
    *,
    bins: int = BINS,
    most_scored: int = MOST_SCORED,
    seed: int = 0,
) -> ClassifierSummary:
    """Accuracy, calibration, and how well outsiders are told apart.

    Args:
        energy: a classifier that is an energy, with `logits`.
        x: events that the classifier did not see, `(N, *event)`.
        labels: their classes, integers `(N,)`.
        outside: events of another kind by name, each `(M, *event)`.
        bins: of the calibration error.
        most_scored: at most so many rows of `x` and of each set outside are scored, chosen by `seed`.
        seed: of that choice.

    >>> import metastable as ms
    >>> network = torch.nn.Linear(2, 2)
    >>> _ = network.weight.data.copy_(torch.eye(2)), network.bias.data.zero_()
    >>> found = classifier_summary(ms.energies.JointEnergy(network), torch.eye(2), torch.tensor([0, 1]))
    >>> found.numbers["accuracy"], round(found.numbers["negative_log_likelihood"], 4)  # log(1 + 1/e)
    (1.0, 0.3133)
    """
    outside = outside or {}
    for name, events in outside.items():
        if events.shape[1:] != x.shape[1:]:
            raise InputError(
                f"outside: {name} must have events of the shape {tuple(x.shape[1:])}, got {tuple(events.shape[1:])}"
            )
    logits = in_parts(energy.logits, x)
    share = accuracy(logits, labels)
    by_mass = expected_calibration_error(logits, labels, bins, "equal-mass")
    curve = reliability(logits, labels, bins)
    numbers: dict[str, Any] = {
        "rows": len(logits),
        "classes": logits.shape[1],
        "accuracy": share,
        "accuracy_se": math.sqrt(share * (1 - share) / len(logits)),
        "negative_log_likelihood": negative_log_likelihood(logits, labels),
        "brier_score": brier_score(logits, labels),
        "calibration_error": expected_calibration_error(logits, labels, bins)._asdict(),
        "calibration_error_equal_mass": by_mass._asdict(),
        "reliability": {name: column.tolist() for name, column in curve._asdict().items()},
    }
    inside = ood_scores(energy, _some(x, most_scored, seed))
    arrays = {f"inside_{name}": values.cpu().numpy() for name, values in inside.items()}
    numbers["ood"] = []
    for i, (name, events) in enumerate(outside.items()):
        rows = _some(events.to(x), most_scored, seed)
        scores = ood_scores(energy, rows)
        found = {score: value._asdict() for score, value in ood_aurocs(inside, scores).items()}
        numbers["ood"].append({"name": name, "rows": len(rows), "auroc": found})
        arrays |= {f"outside_{i}_{score}": values.cpu().numpy() for score, values in scores.items()}
    return ClassifierSummary(numbers, arrays)


def _some(x: Tensor, most: int, seed: int) -> Tensor:
    if len(x) <= most:
        return x
    rows = torch.randperm(len(x), generator=generator(derive(seed, "scored")))[:most]
    return x[rows.to(x.device)]


def given_label(energy: Any, walkers: Walkers, label: Any) -> tuple[Bound, Walkers]:
    """The energy of p(x | label), and walkers of p(x) weighed by p(label | x), which are walkers of it.

    Args:
        energy: of p(x), with `logits(x)`, `(B, C)`, and `given(label)`, an energy of p(x | y).
        walkers: weighted samples of p(x), or of p(x, y) where they carry labels: then those of this one.
        label: the class, an integer.
    """
    if not provides(energy, Classifier):
        raise InputError(
            "label: needs a run of a classifier that is an energy model (jem), and there are no logits; an energy "
            "of your own whose chains had another temperature than 1 needs powered(power), as JointEnergy has"
        )
    target: Bound = energy.given(label)  # refuses a label that there is not
    if len(target.given) != 1:
        raise InputError(f"label: must be one class, got {len(target.given)} labels")
    if walkers.labels is not None:  # chains of p(x | label) already
        return target, walkers.of_class(int(target.given))
    log_p = torch.log_softmax(in_parts(energy.logits, walkers.x).double(), 1)[:, int(target.given)]
    return target, replace(walkers, log_weight=walkers.log_weight.to(log_p) + log_p)


def class_samples(
    energy: Any,
    start: Tensor,
    *,
    kernel: Kernel,
    per_class: int = 8,
    steps: int = 100,
    most_classes: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Samples of p(x | y) for every class, `(C, per_class, *event)`.

    p(x | y) ∝ p(x)·p(y | x), so rows of `start` are chosen for class y in proportion to p(y | x) and then moved by
    chains that leave p(x | y) as it is. Where `start` holds draws of the model (a run's walkers, with equal
    weights), these are draws of p(x | y) from the first step on, whatever the chains' length. Started from noise,
    they are as good as chains of that length.

    Args:
        energy: with `logits(x)`, `(B, C)`, and `given(labels)`, an energy of p(x | y) over equally many rows for
            each label, in order.
        start: events to begin at, `(N, *event)`, `per_class` of them at least.
        kernel: what moves the chains.
        per_class: chains for each class.
        steps: of each chain; 0 gives the chosen rows as they are.
        most_classes: of the first so many classes only.
        seed: of every random number.
    """
    require_count("per_class", per_class)
    if len(start) < per_class:
        raise InputError(f"start: must have {per_class} rows or more, one for each chain, got {len(start)}")
    rng = generator(derive(seed, "class-samples"), start.device)
    log_p = torch.log_softmax(in_parts(energy.logits, start).double(), 1)[:, :most_classes]
    # the largest of log p + Gumbel noise are draws without replacement in proportion to p
    uniform = torch.rand(log_p.shape, generator=rng, device=start.device, dtype=torch.float64)
    drawn = log_p - (-uniform.log()).log()
    # NaN would come before every number: a walker that ran away is of no class
    there = start.flatten(1).isfinite().all(1, keepdim=True) & log_p.isfinite().all(1, keepdim=True)
    rows = drawn.masked_fill(~there, -torch.inf).topk(per_class, 0).indices.T.flatten()
    x = start[rows]
    if steps:
        target = energy.given(torch.arange(log_p.shape[1], device=start.device))
        target = powered(target, kernel.temperature)  # a chain of temperature T on T·E samples exp(−E)
        x = run_chain(kernel, target, kernel.init(target, x), steps, rng).state.x
    return x.view(log_p.shape[1], per_class, *start.shape[1:])
