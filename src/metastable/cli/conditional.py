"""What `sample` and `evaluate` do with a run whose events are given contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.conditional_summary import conditional_scores
from metastable.core.errors import InputError
from metastable.core.types import Pairs
from metastable.data import Dataset
from metastable.runs.folder import write_json
from metastable.runs.run import Run

from .console import console, number, plus_minus, say, table
from .runs import home_of


def contexts_of(source: str | None) -> Tensor:
    """Contexts from a `.npy` file, the array `given` of an `.npz` file, or one context as numbers with commas."""
    if source is None:
        raise InputError(
            "given: this is a conditional run; give contexts, --given FILE.npy or --given 0.5,1.2"
        )
    path = Path(source)
    if path.suffix in (".npy", ".npz"):
        return torch.from_numpy(np.asarray(_array(path)))
    try:
        return torch.tensor([[float(part) for part in source.split(",")]], dtype=torch.float64)
    except ValueError:
        raise InputError(
            f"given: must be a .npy or .npz file, or numbers as in 0.5,1.2, got {source!r}"
        ) from None


def _array(path: Path) -> np.ndarray:
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found:
            return found["given" if "given" in found.files else found.files[0]]
    except (OSError, ValueError, IndexError) as error:
        raise InputError(f"given: {path} is not a readable array file ({error})") from error


def sample_contexts(run: Run, n: int, given: str | None, out: Path, steps: int | None, seed: int) -> None:
    """`n` samples for each context, `(B, n, *event)`, into a file."""
    contexts = contexts_of(given)
    shape = tuple(run.config.get("context_shape", ()))
    if len(contexts) == 1 and contexts.dim() == 2 and contexts[0].numel() == int(np.prod(shape)):
        contexts = contexts.view(1, *shape)  # numbers on the command line have no shape of their own
    walkers = run.sample(n, given=contexts, seed=seed, steps=steps)
    out.parent.mkdir(parents=True, exist_ok=True)
    np.save(out, walkers.x.cpu().numpy())
    say(f"{n} samples of shape {run.event_shape} for each of {len(contexts)} contexts", f"wrote {out}")


def evaluate_pairs(run: Run, dataset: Dataset, name: str, out: Path, seed: int) -> None:
    """Conditional scores of a run on pairs, on the screen and as JSON."""
    if dataset.given is None:
        raise InputError("data: this is a conditional run; give an .npz file with the arrays x and given")
    home = home_of(run.energy)
    found = conditional_scores(run, Pairs(dataset.x.to(**home), dataset.given.to(**home)), seed)
    result: dict[str, Any] = {"run": str(run.folder), "data": name, "rows": len(dataset), **found}
    console().print(_table(result, f"{run.folder} on {name}"))
    for warning in found["warnings"]:
        say(warning)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, result)
    say(f"wrote {out}")


def _table(result: dict[str, Any], title: str) -> Any:
    value = plus_minus(result.get("log_likelihood"), result.get("log_likelihood_se"))
    rows = [
        ("log-likelihood given the context (nats a row)", value, ""),
        ("that of the proposal alone", number(result.get("proposal_log_likelihood")), ""),
        ("effective share of the proposal's draws", number(result.get("ess_proposal")), ""),
        ("energy distance of pairs", number(result.get("energy_distance")), "0"),
    ]
    return table(
        ["score", "model", "data"], [row for row in rows if row[1]], title, f"{result['rows']} pairs"
    )
