"""`metastable restore`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Device, OwnEnergy, RunFolder, Seed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from metastable.data import Dataset
    from metastable.evaluation.restoration import Restored
    from metastable.runs.run import Run

SHOWN_DRAWS, MOST_SHOWN = 4, 16
"""Draws of each picture, and pictures, in `restored.png`."""


def restore(
    run: RunFolder,
    images: Annotated[
        str, typer.Option(help="Pictures: FILE.npy, mnist:FOLDER?split=test, images:FOLDER, …")
    ],
    mask: Annotated[
        str | None,
        typer.Option(
            help="What is missing: left, right, top, bottom, centre, or FILE.npy with 1 where it is."
        ),
    ] = None,
    noise: Annotated[float, typer.Option(help="Standard deviation of the noise on what was seen.")] = 0.0,
    add_noise: Annotated[
        bool,
        typer.Option("--add-noise", help="Put that noise on the pictures first; they are then the truth."),
    ] = False,
    truth: Annotated[str | None, typer.Option(help="What the pictures were before, where known.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="How many pictures, the first ones.")] = 8,
    draws: Annotated[int, typer.Option(help="Draws for each picture.")] = 8,
    steps: Annotated[int, typer.Option(help="Steps of each draw's chain.")] = 1000,
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("restored"),
    energy: OwnEnergy = None,
    seed: Seed = 0,
    device: Device = "cpu",
) -> None:
    """Fill in what is missing of pictures, or take noise off them, by a trained model; several draws of each."""
    from metastable.core.errors import require, require_count
    from metastable.core.random import derive, generator, normal_like
    from metastable.data import load_array
    from metastable.data.images import image_source
    from metastable.runs.restoring import events_of, missing_of, read_mask

    from .bars import work_bar
    from .console import say
    from .runs import open_run

    require_count("n", n)
    require(0 <= noise < float("inf"), "noise", "a finite number of at least 0", noise)
    require(noise > 0 or not add_noise, "noise", "above 0 with --add-noise", noise)
    require(out.is_dir() or not out.exists(), "out", "a folder", str(out))
    found = open_run(run, device, energy)
    loaded = load_array(images, least=1)
    pictures = events_of(found.model, loaded.x[:n])
    known: Tensor | None = None
    if truth is not None:
        known = truth_of(found, truth, len(pictures))
    elif add_noise or noise == 0:  # what the mask hides is there to be compared with
        known = pictures
    hidden = None if mask is None else read_mask(mask)
    known_scale = image_source(images) is not None
    look_at_scale(
        found, pictures[~missing_of(hidden, pictures)], 0.0 if add_noise else noise, known=known_scale
    )
    if add_noise:
        rng = generator(derive(seed, "add noise"), pictures.device)
        pictures = pictures + noise * normal_like(pictures, rng)
    with work_bar("restoring"):
        restored = found.restore(pictures, hidden, noise=noise, draws=draws, steps=steps, seed=seed)
    say(f"{len(pictures)} pictures of shape {found.event_shape}, {draws} draws {ran(restored, steps)}")
    errors = None
    if known is not None:
        guesses = mean_of_class(found, loaded, n)
        errors = restored.errors(known, **guesses)
        parts = (f"{name.replace('_', ' ')} {value:.4g}" for name, value in errors.items())
        say(f"mean squared error of what was not known: {', '.join(parts)} (variance is between draws)")
        if errors["given"] > 0:  # what was given may be the truth itself
            left = gained(errors["mean"] / errors["given"])
            say(f"the mean of the draws has {left} of it than what was given")
    for path in write(out, restored, known, errors):
        say(f"wrote {path}")


def ran(restored: Restored, steps: int) -> str:
    """What chains did, in words."""
    if "acceptance" not in restored.info:
        return "each, and no chains: everything is held"
    return f"of {steps} steps each, of which {restored.info['acceptance']:.0%} were accepted"


def truth_of(run: Run, source: str, n: int) -> Tensor:
    """What `n` pictures were before, on the scale of the run's own."""
    from metastable.core.errors import require
    from metastable.data import load_array
    from metastable.data.images import image_source
    from metastable.runs.restoring import events_of, require_scale

    known = events_of(run.model, load_array(source, least=1).x[:n], "truth")
    require(len(known) == n, "truth", f"{n} pictures or more, one for each of those to restore", len(known))
    look_at_scale(run, known, known=image_source(source) is not None, field="truth")
    require_scale(run.model, known, "truth")
    return known


def mean_of_class(run: Run, loaded: Dataset, n: int) -> dict[str, Tensor]:
    """The mean training picture of the class of each of `n`, as `class_mean`; nothing where that is not known."""
    import torch

    from metastable.core.errors import InputError
    from metastable.evaluation.restoration import class_means

    from .runs import training_set

    try:
        train = None if loaded.labels is None else training_set(run)
        labels = None if train is None else loaded.numbered(train.classes, "images").labels
    except InputError:  # rows of an array in memory, or of a file that is gone; or other classes
        return {}
    if train is None or train.labels is None or labels is None:
        return {}
    labels = labels[:n]
    if not bool(torch.isin(labels, train.labels).all()):
        return {}
    return {"class_mean": class_means(train.x, train.labels, labels)}


def gained(left: float) -> str:
    """In words how much of an error is gone, where `left` of it is left; almost all is not all.

    >>> gained(0.25), gained(0.004), gained(1.35)
    ('75% less', '99.6% less', '35% more')
    """
    share = abs(1 - left)
    return f"{share:.{1 if 0.995 <= share < 1 else 0}%} {'less' if left <= 1 else 'more'}"


def look_at_scale(
    run: Run, seen: Tensor, noise: float = 0.0, field: str = "images", known: bool = False
) -> None:
    """Values far from a run's pictures on [−1, 1] are refused; from 0 to 1, or a little outside, they are told.

    With `noise` on them they may lie four standard deviations of it further out. They may be `known` to be of a set
    that is on [−1, 1], also where none is darker than grey.
    """
    from metastable.core.errors import InputError
    from metastable.data.images import image_source
    from metastable.evaluation.image_features import FAR_SHARE, scale_of

    from .console import say

    seen = seen[seen.isfinite()]  # what is not is refused by name later
    if image_source(str(run.config["data"].get("source"))) is None or not len(seen):
        return
    scale, (low, high) = scale_of(seen), seen.aminmax()
    reach = 2 + 4 * noise  # the end of [−1, 1], half its length, and the noise
    said = ", or say with --noise what noise is on them" if field == "images" else ""
    if float((seen.abs() > reach).double().mean()) > FAR_SHARE:
        raise InputError(
            f"{field}: values must lie on [−1, 1] as the run's pictures do, got {low:.4g} … {high:.4g}, more than "
            f"{FAR_SHARE:.0%} of them beyond ±{reach:g}; scale them{said}"
        )
    if noise == 0 and scale in (None, (0.0, 255.0)):
        say(f"warning: {field}: go from {low:.4g} to {high:.4g}, and the run's are on [−1, 1]")
    if scale == (0.0, 1.0) and not known:
        say(f"warning: {field}: go from 0 to 1, and the run's are on [−1, 1]: 2·x − 1 brings them there")


def write(
    out: Path, restored: Restored, truth: Tensor | None, errors: dict[str, float] | None
) -> Iterator[Path]:
    """`restored.npz`, `restored.json`, and of pictures `restored.png`: each path when it is written."""
    import numpy as np

    from metastable.report.figures import save_image_rows
    from metastable.report.plots import image_side, value_range
    from metastable.runs.folder import write_json

    out.mkdir(parents=True, exist_ok=True)
    found = {
        "draws": restored.draws,
        "mean": restored.mean,
        "spread": restored.spread,
        "given": restored.given,
        "missing": restored.missing,
    }
    arrays = {name: array.cpu().numpy() for name, array in found.items()}
    np.savez_compressed(out / "restored.npz", **arrays)  # pyright: ignore
    yield out / "restored.npz"
    facts = {"pictures": len(restored.given), "draws": restored.draws.shape[1], "noise": restored.noise}
    write_json(out / "restored.json", {**facts, **restored.info, "mean_squared_error": errors})
    yield out / "restored.json"
    if image_side(arrays["mean"].shape[1:]) is None:
        return
    rows = {} if truth is None else {"truth": truth.cpu().numpy()}
    rows |= {"given": arrays["given"], "mean": arrays["mean"], "spread": arrays["spread"]}
    rows |= {f"draw {k + 1}": arrays["draws"][:, k] for k in range(min(SHOWN_DRAWS, restored.draws.shape[1]))}
    low, high = value_range(rows.get("truth", arrays["mean"]))
    half = max(high - low, 1e-12) / 2
    shown = {name: (x[:MOST_SHOWN] - low) / half - 1 for name, x in rows.items()}
    shown["spread"] = arrays["spread"][:MOST_SHOWN] / half - 1
    pictures = {name: x if x.ndim == 4 else x[:, None] for name, x in shown.items()}
    yield save_image_rows(out / "restored.png", pictures)
