"""`metastable sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sample(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    n: Annotated[int, typer.Option("--n", "-n", help="How many.")] = 1000,
    out: Annotated[Path, typer.Option(help="The .npy file to write.")] = Path("samples.npy"),
    steps: Annotated[
        int | None, typer.Option(help="Steps of each walker at the final parameters; 100 by default.")
    ] = None,
    weighted: Annotated[
        bool, typer.Option("--weighted", help="Keep the weights: also write NAME.log_weight.npy.")
    ] = False,
    corrected: Annotated[
        bool,
        typer.Option(
            "--corrected", help="Weigh by the learned density ratio: samples of the data's law (f-ebm)."
        ),
    ] = False,
    given: Annotated[
        str | None,
        typer.Option(
            help="Contexts of a conditional run: FILE.npy, an .npz with an array given, or 0.5,1.2."
        ),
    ] = None,
    label: Annotated[
        int | None, typer.Option(help="Draw from p(x | label) of a classifier that is an energy model (jem).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of every random number.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "cpu",
) -> None:
    """Draw samples from a trained model: walkers go on at its final parameters, and are weighed."""
    import numpy as np

    from metastable.api import continue_sampling
    from metastable.core.errors import require, require_count

    from .console import say
    from .runs import model_walkers, open_run

    require_count("n", n)
    require_count("steps", 100 if steps is None else steps)
    require(out.suffix == ".npy", "out", "a file that ends in .npy", str(out))
    found = open_run(run, device)
    if found.conditional or given is not None:
        from .conditional import sample_contexts

        sample_contexts(found, n, given, out, steps, seed)
        return
    steps = 100 if steps is None else steps
    start, origin = model_walkers(found, seed=seed)
    energy = found.energy
    if label is not None:
        from .classifier import of_label

        energy, start, origin = of_label(found, start, label, origin)
    walkers = continue_sampling(energy, start, n, steps=steps, seed=seed)
    if corrected:
        walkers, origin = found.corrected(walkers), f"{origin}, weighted by the learned density ratio"
    ess = walkers.ess
    kept = walkers if weighted else walkers.resampled(n, seed=seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    np.save(out, kept.x.cpu().numpy())
    say(
        f"{n} samples of shape {found.event_shape} from {origin}, effective sample size {ess:.0f}",
        f"wrote {out}",
    )
    if weighted:
        beside = out.with_suffix(".log_weight.npy")
        np.save(beside, kept.log_weight.cpu().numpy())
        say(f"wrote {beside}")
