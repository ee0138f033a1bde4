"""What `metastable evaluate` says about a classifier that is an energy model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from metastable.data import Dataset
    from metastable.evaluation.classifier import ClassifierSummary
    from metastable.kernels import Kernel
    from metastable.runs.run import Run

PER_CLASS, STEPS = 8, 100
"""Chains for each class, and their length."""
MOST_CLASSES = 20


def judge(run: Run, dataset: Dataset, outside: dict[str, Tensor], name: str, seed: int) -> ClassifierSummary:
    """Accuracy, calibration, outsiders told apart, and samples of each class."""
    from metastable.evaluation.classifier import classifier_summary

    from .runs import home_of

    assert dataset.labels is not None
    home = home_of(run.energy)
    placed = {source: x.to(**home) for source, x in outside.items()}
    labels = dataset.labels.to(home["device"])
    found = classifier_summary(run.learned_energy, dataset.x.to(**home), labels, placed, seed=seed)
    numbers, arrays = sampled(run, dataset, seed)
    return replace(
        found,
        numbers={"data": name, **found.numbers, "class_samples": numbers},
        arrays=found.arrays | arrays,
    )


def sampled(run: Run, dataset: Dataset, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Samples of p(x | y) from the run's walkers, or from noise where it kept none, by the run's own kernel."""
    import torch

    from metastable.core.configure import describe
    from metastable.core.parts import in_parts
    from metastable.core.random import derive, generator
    from metastable.evaluation.classifier import class_samples
    from metastable.proposals import fit_gaussian

    from .runs import home_of, kept_walkers

    kept, _ = kept_walkers(run)
    if kept is not None and len(kept) >= PER_CLASS:
        start, origin = kept.resampled(seed=derive(seed, "class-samples")).x, "the run's own samples"
    else:
        x = dataset.x.to(**home_of(run.energy))
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
        "classes": list(dataset.classes)[: len(drawn)] or [str(i) for i in range(len(drawn))],
        "agreement": float(((guess == asked) & there).double().mean()),
    }
    return numbers, {"class_samples": drawn.cpu().float().numpy()}


def moves_of(run: Run, start: Tensor, seed: int) -> Kernel:
    """The kernel of the run's own chains on P·E; of a run without any, MALA with a step size found at `start`.

    Chains at temperature T on E, of drift h∇E and noise σ, are chains of step size hT = σ²/2 on E/T.
    """
    from metastable.core.random import derive, generator
    from metastable.kernels import MALA, ULA, StepKernel, warm_up
    from metastable.summary import kernel_of

    own, h = kernel_of(run.trained_with), run.history[-1].get("step_size") if run.history else None
    if h is not None and isinstance(own, StepKernel):  # it tuned itself
        own = replace(own, step_size=h)
    if isinstance(own, ULA) and own.temperature != 1:
        return replace(own, step_size=own.step_size * own.temperature, noise=None)
    if own is not None:
        return own
    rng = generator(derive(seed, "warm-up"), start.device)
    return warm_up(MALA(0.1), run.learned_energy, start[:256], 100, rng)[0]


def say_classifier(judged: ClassifierSummary | None) -> None:
    """Two tables: as a classifier, and against outsiders."""
    if judged is None:
        return
    from metastable.report.classifier_section import SCORES

    from .console import console, number, plus_minus, table

    found = judged.numbers
    ece, mass = found["calibration_error"], found["calibration_error_equal_mass"]
    rows = [
        ("accuracy", plus_minus(found["accuracy"], found["accuracy_se"]), "1"),
        ("calibration error", number(ece["value"]), number(ece["by_chance"])),
        ("calibration error, equal-mass bins", number(mass["value"]), number(mass["by_chance"])),
        ("negative log-likelihood (nats)", number(found["negative_log_likelihood"]), ""),
        ("Brier score", number(found["brier_score"]), "0"),
    ]
    console().print(table(["as a classifier", "model", "if perfect"], rows, "", f"{found['rows']} rows"))
    if not found["ood"]:
        return
    rows = [
        (entry["name"], *(plus_minus(a["value"], a["std_error"]) for a in entry["auroc"].values()))
        for entry in found["ood"]
    ]
    names = [SCORES[score][0] for score in found["ood"][0]["auroc"]]
    console().print(table(["AUROC against", *names], rows))


def write_figures(run: Path, target: Path, judged: ClassifierSummary | None) -> None:
    """Arrays and pictures into the folder beside the JSON, and the run's page anew where that is the run's own."""
    import numpy as np

    from metastable.report import write_report
    from metastable.report.classifier_section import save_classifier_figures
    from metastable.report.read import read_object, read_run

    from .console import say

    own = target == run / "evaluation.json"
    if judged is not None:
        folder = target.with_suffix("")
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / "figures.npz", **judged.arrays)  # pyright: ignore
        seen = replace(read_run(run), evaluation=read_object(target), evaluation_arrays=judged.arrays)
        written = save_classifier_figures(seen, folder)
        say(f"pictures: {', '.join(str(path) for path in written)}")
    if own:
        say(f"report: {write_report(run)}")
