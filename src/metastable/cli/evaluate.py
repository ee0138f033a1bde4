"""`metastable evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import Tensor

    from metastable.core.types import LogPartition, Walkers
    from metastable.data import Dataset
    from metastable.evaluation.classifier import ClassifierSummary
    from metastable.run import Run

MOST_ROWS = 2000
"""Rows behind the distances, whose cost grows with the square."""
OUTLIER_LEVEL = 0.01
"""A row is an outlier where the density is lower than at all but this share of the model's own samples."""


def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    data: Annotated[
        str | None, typer.Option(help="A file or toy:NAME; by default the run's held-out rows.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The .json file to write; RUN/evaluation.json.")] = None,
    log_z: Annotated[
        bool, typer.Option("--log-z", help="Estimate log Z where that takes minutes too (images, jem).")
    ] = False,
    ood: Annotated[
        list[str] | None,
        typer.Option(help="Data of another kind, for a classifier to tell apart; may be repeated."),
    ] = None,
    energy: Annotated[
        str | None, typer.Option(help="What makes the module of a run of your own: module:factory.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of every random number.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "cpu",
) -> None:
    """Score a trained model on data: likelihood, mode weights, distances and outliers.

    A classifier that is an energy model is also scored as a classifier, where the data have labels. A conditional
    run is scored on pairs, an .npz file with the arrays x and given.
    """
    from metastable.summary import why_costly

    from .classifier import judge, say_classifier, write_figures
    from .console import console, say
    from .runs import open_run, rows_for

    found = open_run(run, device, energy)
    dataset, name = rows_for(found, data)
    outside = outsiders(found, dataset, ood or [])
    if found.conditional:
        from .conditional import evaluate_pairs

        evaluate_pairs(found, dataset, name, out or run / "evaluation.json", seed)
        return
    result = scores(found, dataset, seed, log_z)
    judged = judge(found, dataset, outside, name, seed) if classifies(found, dataset) else None
    target = out or run / "evaluation.json"
    say(f"{run} on {name}, {result['rows']} rows", f"samples of the model: {result['samples']}")
    if found.power != 1:
        say(f"what was learned is exp(−{found.power:g}·E), and all numbers are of that density")
    console().print(score_table(result))
    for warning in (result["log_partition"] or {}).get("warnings", []):
        say(f"log Z: {warning}")
    if result["log_partition"] is None:
        say(
            f"log Z was not estimated: {why_costly(found.learned_energy, dataset.x)}; ask for it with --log-z"
        )
    if hasattr(found.energy, "logits") and judged is None:
        say(f"not judged as a classifier: {dataset.unlabelled or 'the data have no labels'}")
    say_classifier(judged)
    write(target, {"run": str(run), "step": found.steps, "data": name, **result}, judged)
    if target == run / "evaluation.json":
        look_at_negatives(found, data, seed)
    write_figures(run, target, judged)
    say(f"wrote {target}")


def write(target: Path, result: dict[str, Any], judged: ClassifierSummary | None) -> None:
    """The scores as JSON."""
    from metastable.run import write_json

    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, result if judged is None else {**result, "classifier": judged.numbers})


def look_at_negatives(run: Run, data: str | None, seed: int) -> None:
    """Histograms of negatives for the page of a run without any, as it was killed or never evaluated."""
    from metastable.api import load_chains
    from metastable.core.errors import InputError
    from metastable.report.read import read_arrays
    from metastable.step_check import step_check
    from metastable.summary import keep_histograms

    from .console import say
    from .runs import training_set

    assert run.folder is not None
    if "energies_negatives" in read_arrays(run.folder):
        return
    try:
        chains = load_chains(run, training_set(run, data))
    except InputError as error:  # rows of an array in memory, or of a file that is gone
        say(f"no histograms of negatives, which need the rows of training: {error}")
        return
    check = step_check(chains, seed=seed)
    keep_histograms(run.folder, check, chains.context.step, run.coordinates, run.power)


def classifies(run: Run, dataset: Dataset) -> bool:
    """Whether there is a classifier to judge, and labels to judge it by."""
    return hasattr(run.energy, "logits") and dataset.labels is not None


def outsiders(run: Run, dataset: Dataset, sources: list[str]) -> dict[str, Tensor]:
    """Rows of every source of another kind, by its name."""
    from metastable.core.errors import InputError

    from .runs import rows_for

    if sources and not classifies(run, dataset):
        without = dataset.unlabelled or "the data have no labels"
        lack = without if hasattr(run.energy, "logits") else "its energy has no logits"
        raise InputError(f"ood: needs a run of a classifier that is an energy model (jem), and {lack}")
    return {source: rows_for(run, source, "ood")[0].x for source in sources}


def scores(run: Run, dataset: Dataset, seed: int, log_z: bool = False) -> dict[str, Any]:
    """Every score of a run on some rows; None for what needs samples or log Z that there are not.

    Events of many dimensions get no estimate of log Z unless it is asked for.
    """
    from dataclasses import replace

    from metastable.summary import affordable

    from .runs import home_of, kept_walkers, model_walkers, normalised

    shift = 0.0
    if run.coordinates is not None:  # found in the units of training, where no column outweighs another
        units = run.coordinates.events
        dataset = replace(dataset, x=units.forward(dataset.x), toy=_toy_within(dataset.toy, run.coordinates))
        run, shift = run.within(), units.log_det
    x = dataset.x.to(**home_of(run.energy))
    may_take_long = log_z or affordable(run.learned_energy, x)
    walkers, origin = model_walkers(run, x, seed) if may_take_long else kept_walkers(run)
    z = run.log_partition or (normalised(run, x, seed) if may_take_long else None)
    none: dict[str, Any] = dict.fromkeys(("outlier_share", "mmd2", "energy_distance", "mode_weights"))
    return {
        "rows": len(x),
        "samples": origin,
        "power": run.power,
        "log_partition": None if z is None else z.as_json(),
        **likelihood(run, x, z, shift),
        **(none if walkers is None else against(run, dataset, x, walkers, seed)),
    }


def against(run: Run, dataset: Dataset, x: Tensor, walkers: Walkers, seed: int) -> dict[str, Any]:
    """The rows against samples of the model."""
    return {
        "outlier_share": outlier_share(run, x, walkers, seed),
        **distances(x, walkers, seed),
        "mode_weights": modes(dataset, x, walkers, seed),
    }


def _toy_within(toy: Any, coordinates: Any) -> Any:
    from metastable.summary import toy_within

    return None if toy is None else toy_within(toy, coordinates)


def likelihood(run: Run, x: Tensor, z: LogPartition | None, shift: float = 0.0) -> dict[str, float | None]:
    """Mean of −P·E − log Z + `shift` over the rows; its standard error holds that of log Z."""
    import math

    from metastable.core.parts import energies_of

    if z is None:
        return {"log_likelihood": None, "log_likelihood_se": None}
    energies = energies_of(run.learned_energy, x)
    return {
        "log_likelihood": float(-energies.mean()) - z.value + shift,
        "log_likelihood_se": math.hypot(float(energies.std()) / math.sqrt(len(x)), z.std_error),
    }


def outlier_share(run: Run, x: Tensor, walkers: Walkers, seed: int) -> float:
    """Share of rows whose energy is above that of all but `OUTLIER_LEVEL` of the model's own samples."""
    from metastable.core.parts import energies_of

    own = energies_of(run.energy, walkers.resampled(seed=seed).x)
    return float((energies_of(run.energy, x) > own.quantile(1 - OUTLIER_LEVEL)).double().mean())


def distances(x: Tensor, walkers: Walkers, seed: int) -> dict[str, float]:
    """MMD² and energy distance between rows and samples; both are zero on average where the laws agree."""
    from metastable.core.random import derive, generator
    from metastable.evaluation.distances import energy_distance, mmd2
    from metastable.walkers.starts import random_rows

    rng = generator(derive(seed, "evaluate"), x.device)
    rows = x[random_rows(len(x), min(MOST_ROWS, len(x)), rng, x.device)]
    # Weighted rather than resampled: copies of one walker would count as pairs at distance zero.
    drawn, weight = walkers.x, walkers.log_weight
    return {
        "mmd2": float(mmd2(drawn, rows, log_weight_x=weight)),
        "energy_distance": float(energy_distance(drawn, rows, weight)),
    }


def modes(dataset: Dataset, x: Tensor, walkers: Walkers, seed: int) -> dict[str, list[float]] | None:
    """Weights of each mode in the rows and in the model; None where the rows have one mode."""
    from metastable.evaluation.modes import find_modes, mode_weight_errors, mode_weights

    if dataset.toy is not None and dataset.toy.centers is not None:
        centers = dataset.toy.centers.to(x)
    elif len(x) >= 20:
        centers = find_modes(x, seed=seed).centers
    else:
        return None
    if len(centers) < 2:
        return None
    share = mode_weights(x, centers)
    spread = (share * (1 - share) / len(x)).sqrt()
    found = mode_weight_errors(walkers.x, centers, share, walkers.log_weight, target_std_error=spread)
    return {
        "data": share.tolist(),
        "model": found.weights.tolist(),
        "std_error": found.std_error.tolist(),
    }


def score_table(result: dict[str, Any]) -> Any:
    """All scores with what a perfect model would have."""
    from .console import number, plus_minus, table

    z = result["log_partition"] or {"value": None, "std_error": None}
    rows = [
        (
            "log-likelihood (nats a row)",
            plus_minus(result["log_likelihood"], result["log_likelihood_se"]),
            "",
        ),
        ("log Z", plus_minus(z["value"], z["std_error"]), ""),
        ("outlier share", number(result["outlier_share"]), f"{OUTLIER_LEVEL}"),
        ("MMD²", number(result["mmd2"]), "0"),
        ("energy distance", number(result["energy_distance"]), "0"),
    ]
    rows = [row for row in rows if row[1]]
    weights = result["mode_weights"] or {"data": [], "model": [], "std_error": []}
    columns = zip(weights["data"], weights["model"], weights["std_error"], strict=True)
    rows += [(f"weight of mode {i + 1}", plus_minus(m, e), f"{d:.3f}") for i, (d, m, e) in enumerate(columns)]
    return table(["score", "model", "data"], rows)
