"""What `sample` does with a run whose events are given contexts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from metastable.core import processes
from metastable.core.array_files import open_arrays
from metastable.core.errors import InputError
from metastable.core.types import Walkers
from metastable.runs.run import Run

from .bars import work_bar
from .console import say
from .runs import drawn_together


def contexts_of(source: str | None) -> Tensor:
    """Contexts from a `.npy` file, the array `given` of an `.npz` file, or one context as numbers with commas."""
    if source is None:
        raise InputError(
            "given: this is a conditional run; give contexts, --given FILE.npy or --given 0.5,1.2"
        )
    path = Path(source)
    if path.suffix in (".npy", ".npz"):
        try:
            found = open_arrays(path)
            if not isinstance(found, np.ndarray):
                with found as arrays:
                    found = arrays["given" if "given" in arrays.files else arrays.files[0]]
        except InputError:
            raise
        except Exception as error:  # as of a damaged zip file, which has errors of its own
            raise InputError(f"given: {path} is not a readable array file ({error})") from error
        return torch.from_numpy(np.asarray(found))
    try:
        return torch.tensor([[float(part) for part in source.split(",")]], dtype=torch.float64)
    except ValueError:
        raise InputError(
            f"given: must be a .npy or .npz file, or numbers as in 0.5,1.2, got {source!r}"
        ) from None


def sample_contexts(run: Run, n: int, given: str | None, out: Path, steps: int | None, seed: int) -> None:
    """`n` samples for each context, `(B, n, *event)`, into a file."""
    contexts = contexts_of(given)
    shape = tuple(run.config.get("context_shape", ()))
    if len(contexts) == 1 and contexts.dim() == 2 and contexts[0].numel() == int(np.prod(shape)):
        contexts = contexts.view(1, *shape)  # numbers on the command line have no shape of their own

    def draws(own: slice, seed: int) -> Walkers:
        """Samples of all contexts side by side, `(n, B, *event)`."""
        walkers = run.sample(own.stop - own.start, given=contexts, seed=seed, steps=steps)
        return Walkers.equal(walkers.x.transpose(0, 1))

    with work_bar("sampling"), processes.together():
        x = drawn_together(n, seed, draws).x.transpose(0, 1)
    if not processes.is_first():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    np.save(out, x.cpu().numpy())
    say(f"{n} samples of shape {run.event_shape} for each of {len(contexts)} contexts", f"wrote {out}")
