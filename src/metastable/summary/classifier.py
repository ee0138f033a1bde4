"""What a classifier that is an energy model is worth: accuracy, calibration, outsiders, samples of each class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from metastable.core import protocols
from metastable.core.configure import describe
from metastable.core.parts import in_parts
from metastable.core.random import derive, generator
from metastable.evaluation.classifier import class_samples, classifier_summary
from metastable.kernels import MALA, ULA, Kernel, StepKernel, warm_up
from metastable.proposals import fit_gaussian
from metastable.runs.run import Run
from metastable.walkers.starts import some_rows

from .samples import kept_walkers
from .section import Judged, Measured

PER_CLASS, STEPS = 8, 100
"""Chains for each class, and their length."""
MOST_CLASSES = 20


class Classifier:
    """Accuracy, calibration, outsiders told apart, and samples of each class, in the data's units."""

    name = "classifier"

    def applies(self, judged: Judged) -> bool:
        """There must be a classifier to judge, and labels to judge it by; when somebody asks."""
        able = protocols.provides(judged.run.energy, protocols.Classifier) and judged.labels is not None
        return able and not judged.after_training

    def measure(self, judged: Judged) -> Measured:
        """All numbers under one name."""
        run, x = judged.in_data_units()
        assert judged.labels is not None
        placed = {name: rows.to(x) for name, rows in judged.outsiders.items()}
        found = classifier_summary(run.learned_energy, x, judged.labels, placed, seed=judged.seed)
        numbers, arrays = sampled(run, x, list(judged.classes), judged.seed)
        numbers = {**found.numbers, "class_samples": numbers}
        if (words := caveat(run.trained_with)) is not None:
            numbers["caveat"] = words
        return Measured({"classifier": numbers}, found.arrays | arrays)


def caveat(method: Any) -> str | None:
    """Why p(y | x) of a run by class is not to be trusted, in words; None where classes are weighed together."""
    if method is None or method.needs != "labels" or method.classifies:
        return None
    if any(each.weighs_together for each in (method, *method.sources)):
        return None
    return (
        f"Each class has a free constant in E(x, y): chains of {method.name!r} keep their labels, and do not "
        "compare classes. So p(y | x), and every score of it, says little; ask for one class at a time, or "
        "train with 'jarzynski', whose weights compare them."
    )


def sampled(run: Run, x: Tensor, classes: list[str], seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Samples of p(x | y) from the run's walkers, or from noise where it kept none, by the run's own kernel."""
    kept, _ = kept_walkers(run)
    if kept is not None and len(kept) >= PER_CLASS:
        start, origin = kept.resampled(seed=derive(seed, "class-samples")).x, "the run's own samples"
    else:
        rng = generator(derive(seed, "class-samples"), x.device)
        start, origin = fit_gaussian(x).sample(1000, rng).to(x), "noise"
    kernel = moves_of(run, start, seed)
    settings: dict[str, Any] = {"per_class": PER_CLASS, "steps": STEPS, "most_classes": MOST_CLASSES}
    drawn = class_samples(run.learned_energy, start, kernel=kernel, seed=seed, **settings)
    guess = in_parts(run.energy.logits, drawn.flatten(0, 1)).argmax(1)  # pyright: ignore
    asked = torch.arange(len(drawn), device=guess.device).repeat_interleave(PER_CLASS)
    there = drawn.flatten(0, 1).flatten(1).isfinite().all(1)  # a chain that ran away is of no class
    numbers = {
        "per_class": PER_CLASS,
        "steps": STEPS,
        "start": origin,
        "kernel": describe(kernel),
        "classes": classes[: len(drawn)] or [str(i) for i in range(len(drawn))],
        "agreement": float(((guess == asked) & there).double().mean()),
    }
    return numbers, {"class_samples": drawn.cpu().float().numpy()}


def moves_of(run: Run, start: Tensor, seed: int) -> Kernel:
    """The kernel of the run's own chains on P·E; of a run without any, MALA with a step size found at `start`.

    Chains at temperature T on E, of drift h∇E and noise σ, are chains of step size hT = σ²/2 on E/T.
    """
    log = run.kept_history
    own, h = kernel_of(run.trained_with), log[-1].get("step_size") if log else None
    if h is not None and isinstance(own, StepKernel):  # it tuned itself
        own = replace(own, step_size=h)
    if isinstance(own, ULA) and own.temperature != 1:
        return replace(own, step_size=own.step_size * own.temperature, noise=None)
    if own is not None:
        return own
    rng = generator(derive(seed, "warm-up"), start.device)
    return warm_up(MALA(0.1), run.learned_energy, some_rows(start, 256), 100, rng)[0]


def kernel_of(method: Any) -> Kernel | None:
    """The kernel that moves a method's chains, of several samplers the first one's; None where nothing moves."""
    return method.chain_kernel
