"""`metastable evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import Tensor

    from metastable.core.types import LogPartition, Walkers
    from metastable.data import Dataset
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
    seed: Annotated[int, typer.Option(help="Of every random number.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "cpu",
) -> None:
    """Score a trained model on data: likelihood, mode weights, distances and outliers."""
    from metastable.run import write_json

    from .console import console, say
    from .runs import open_run, rows_for

    found = open_run(run, device)
    dataset, name = rows_for(found, data)
    result = scores(found, dataset, seed)
    target = out or run / "evaluation.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, {"run": str(run), "data": name, **result})
    console().print(score_table(result, f"{run} on {name}"))
    for warning in result["log_partition"]["warnings"]:
        say(f"log Z: {warning}")
    say(f"wrote {target}")


def scores(run: Run, dataset: Dataset, seed: int) -> dict[str, Any]:
    """Every score of a run on some rows."""
    from .runs import home_of, model_walkers, normalised

    x = dataset.x.to(**home_of(run.energy))
    walkers, origin = model_walkers(run, x, seed)
    z = run.log_partition or normalised(run, x, seed)
    return {
        "rows": len(x),
        "samples": origin,
        "log_partition": z.as_json(),
        **likelihood(run, x, z),
        "outlier_share": outlier_share(run, x, walkers, seed),
        **distances(x, walkers, seed),
        "mode_weights": modes(dataset, x, walkers, seed),
    }


def likelihood(run: Run, x: Tensor, z: LogPartition) -> dict[str, float]:
    """Mean of −E − log Z over the rows; its standard error holds that of log Z."""
    import math

    energies = energies_of(run, x)
    return {
        "log_likelihood": float(-energies.mean()) - z.value,
        "log_likelihood_se": math.hypot(float(energies.std()) / math.sqrt(len(x)), z.std_error),
    }


def energies_of(run: Run, x: Tensor) -> Tensor:
    """Energies of the rows in float64, in parts that fit into memory."""
    import torch

    with torch.no_grad():
        return torch.cat([run.energy(part).double() for part in x.split(4096)])


def outlier_share(run: Run, x: Tensor, walkers: Walkers, seed: int) -> float:
    """Share of rows whose energy is above that of all but `OUTLIER_LEVEL` of the model's own samples."""
    own = energies_of(run, walkers.resampled(seed=seed).x)
    return float((energies_of(run, x) > own.quantile(1 - OUTLIER_LEVEL)).double().mean())


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


def score_table(result: dict[str, Any], title: str) -> Any:
    """All scores with what a perfect model would have."""
    from .console import plus_minus, table

    z = result["log_partition"]
    rows = [
        (
            "log-likelihood (nats a row)",
            plus_minus(result["log_likelihood"], result["log_likelihood_se"]),
            "",
        ),
        ("log Z", plus_minus(z["value"], z["std_error"]), ""),
        ("outlier share", f"{result['outlier_share']:.4f}", f"{OUTLIER_LEVEL}"),
        ("MMD²", f"{result['mmd2']:.5f}", "0"),
        ("energy distance", f"{result['energy_distance']:.5f}", "0"),
    ]
    weights = result["mode_weights"] or {"data": [], "model": [], "std_error": []}
    columns = zip(weights["data"], weights["model"], weights["std_error"], strict=True)
    rows += [(f"weight of mode {i + 1}", plus_minus(m, e), f"{d:.3f}") for i, (d, m, e) in enumerate(columns)]
    return table(
        ["score", "model", "data"], rows, title, f"{result['rows']} rows; samples: {result['samples']}"
    )
