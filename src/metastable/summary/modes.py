"""Weights of the modes in data and model, with errors from what samples are independently worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from metastable.core.parts import in_parts
from metastable.core.traits import Traits
from metastable.core.types import Walkers
from metastable.energies.by_class import ClassEnergy
from metastable.evaluation.modes import find_modes, independent_size, mode_weight_errors, mode_weights
from metastable.walkers.space import space_of

from .section import Judged, Measured

FEWEST_ROWS = 20
"""Rows in which modes can be looked for."""


class Modes:
    """Mode weights of data and model, around the toy set's centres or the modes found in the rows of training.

    Also whether gaps of low density lie between parts of the data, which can be so with a single centre. Units
    coded −1 and +1 have no density to find modes in.
    """

    name = "modes"

    def applies(self, judged: Judged) -> bool:
        """Centres must be known, or rows enough to find them."""
        known = judged.toy is not None and judged.toy.centers is not None
        plain = not judged.run.conditional and space_of(judged.run.energy).has_volume
        return plain and (known or len(judged.trained_on) >= FEWEST_ROWS)

    def measure(self, judged: Judged) -> Measured:
        """Into `run.modes`; None there where the rows have one mode or the model no samples."""
        run, train, toy, truth = judged.run, judged.trained_on, judged.toy, None
        if toy is not None and toy.centers is not None:
            centers, separated = toy.centers.to(train), True
            truth = None if toy.weights is None else toy.weights.tolist()
        else:
            found = find_modes(train, seed=judged.stream("modes") % 2**31)
            centers, separated = found.centers.to(train), found.separated
        if run.walkers is None or len(centers) < 2:
            run.modes = None
            return Measured(facts={"separated": separated})
        walkers, energy = run.walkers, run.learned_energy
        if (
            isinstance(energy, ClassEnergy)
            and walkers.labels is None
            and not Traits.of(run.trained_with or run.method).sees_mode_weights
        ):
            walkers = in_class_shares(walkers, energy)
        weights = weights_of_modes(train, walkers, centers)
        shown = centers.flatten(1).tolist() if centers[0].numel() <= 64 else None
        run.modes = {"centers": shown, "truth": truth, **weights}
        facts = {
            "data_mode_weights": weights["data"],
            "sample_mode_weights": weights["samples"],
            "mode_weight_se": weights["std_error"],
        }
        return Measured(facts={"separated": separated, **facts})


def in_class_shares(walkers: Walkers, energy: ClassEnergy) -> Walkers:
    """Walkers of E(x) = −log Σ_y exp(−E(x, y)) weighed so that each class has its share of the data.

    Chains with fixed labels and equal weights learn E(x, y) up to a constant of each class: p(x | y) is what such a
    model says, and how much mass a class has in E(x) is nothing that it has learned.
    """
    log_p = torch.log_softmax(in_parts(energy.logits, walkers.x).double(), 1)
    log_weight = walkers.log_weight.to(log_p)
    log_mass = torch.logsumexp(log_p + torch.log_softmax(log_weight, 0)[:, None], 0)
    factor = torch.logsumexp(log_p + energy.log_shares.to(log_p) - log_mass, 1)
    return replace(walkers, log_weight=log_weight + factor)


def weights_of_modes(rows: Tensor, walkers: Walkers, centers: Tensor) -> dict[str, Any]:
    """Weights in rows and walkers, and the standard error of their difference if the model is right."""
    in_data = mode_weights(rows, centers)
    errors = mode_weight_errors(
        walkers.x,
        centers,
        in_data,
        walkers.log_weight,
        target_std_error=(in_data * (1 - in_data) / len(rows)).sqrt(),
        effective_size=min(walkers.ess, independent_size(walkers, centers)),
    )
    return {
        "data": in_data.tolist(),
        "samples": errors.weights.tolist(),
        "std_error": errors.std_error.tolist(),
    }
