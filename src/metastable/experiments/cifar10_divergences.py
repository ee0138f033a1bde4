"""Table 1 of the f-EBM paper: four divergences and contrastive divergence, class-conditional, at equal minutes.

All arms train one network E(x | y) and the same cold chains, each with a label of its own. `theorem1` is the
baseline of Appendix G.1, in which the energy never sees data; `samples` of it show what that makes of pictures. For
every arm chains are followed from noise (Appendix G.6).

The energy learns at the same rate as H, as in the paper. Left alone, H comes to tell pictures from chains beyond
doubt, and at equal rates nothing holds the common constant of H + E: the exponent stays at its bounds, no gradient
reaches the energy, and nothing is learned. A penalty on exponents stops the first, and exponents
normalised over the chains of an update the second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from metastable.core.types import Walkers
from metastable.energies.network_configs import ShortRunConfig
from metastable.evaluation.image_features import as_pictures
from metastable.kernels import ULA
from metastable.methods import FDivergence, Method, PersistentCD
from metastable.report.figures import palette, picture, save_image_rows
from metastable.runs.run import Run

from .base import Bench, Experiment, Row
from .image_figures import (
    DPI,
    arms_of,
    distances_in,
    draw_curves,
    draw_distances,
    draw_samples,
    draw_side_by_side,
    over_minutes,
)
from .image_runs import (
    CIFAR10,
    COLD,
    Found,
    ImageArm,
    ImageTrials,
    from_noise,
    measures_of,
    pictures_of,
    rows_of,
)
from .trials import by_scale

PAPER = {"js": 30.86, "hellinger": 32.19, "reverse-kl": 33.25, "kl": 37.36, "cd": 37.90}
"""FID of Table 1, in the paper's order."""
ALL_ARMS = (*PAPER, "theorem1")
CLASSES = 10
"""Chains that are followed from noise, one for each class."""


def method_of(bench: Bench, arm: str) -> Method[Any]:
    """Chains with labels, and the loss of an arm on them."""
    source = PersistentCD(
        walkers=bench.walkers,
        batch=bench.chains,
        steps=bench.chain_steps,
        kernel=ULA(bench.chain_step, noise=bench.chain_noise, drift_clip=bench.drift_clip),
        start_at="noise",
        noise="uniform",
        rejuvenation=bench.fresh,
        energy_l2=bench.energy_l2,
        labels=True,
    )
    if arm == "cd":
        return source
    baseline = arm == "theorem1"
    return FDivergence(
        source=source,
        f="js" if baseline else arm,
        estimator="theorem1" if baseline else "theorem3",
        ratio_steps=bench.ratio_steps,
        energy_rate=bench.energy_rate,
        clip_exponent=bench.clip_exponent,
        normalise=bench.normalise and not baseline,
        exponent_l2=bench.exponent_l2,
    )


def arm_of(bench: Bench, arm: str) -> ImageArm:
    """All of them on the same network."""
    return ImageArm(
        arm, method_of(bench, arm), lambda data, seed: replace(bench.energy, reference="none"), labels=True
    )


def followed(bench: Bench, run: Run) -> np.ndarray:
    """Chains from noise after some numbers of steps, one chain for each class, as bytes `(times, 10, C, H, W)`."""
    kernel = ULA(bench.chain_step, noise=bench.chain_noise, drift_clip=bench.drift_clip)
    labels = torch.arange(CLASSES, device=bench.device)
    chains = [from_noise(bench, run, kernel, CLASSES, steps, labels) for steps in bench.followed]
    x = torch.cat(chains).clamp(-1, 1)
    made = as_pictures(x, "samples", (-1, 1)).bytes.cpu().numpy()
    return made.reshape(len(chains), CLASSES, *made.shape[1:])


def body(bench: Bench) -> list[Row]:
    """The pieces that were asked for, then rows and figures of all that are there."""
    data = pictures_of(bench)

    def more(run: Run, walkers: Walkers) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return {}, {"followed": followed(bench, run)}

    trials = ImageTrials(bench, data, lambda name: arm_of(bench, name), measures_of(bench, data), more)
    found = trials.run(ALL_ARMS)
    if found:
        draw_samples(bench, found, data.x)
        logged = (
            ("energy_gap", "energy, data − negatives"),
            ("exponent_min", "least H + E"),
            ("exponent_max", "largest H + E"),
        )
        draw_curves(bench, found, logged, "curves.png")
        draw_followed(bench, found)
    return rows_of(bench, found, PAPER, bench.required)


def compared(bench: Bench, rows: list[Row]) -> list[Row]:
    """Distances over minutes, and Table 1 as a picture: the last of each arm, its 95 % interval, the paper's."""
    key, _ = distances_in(rows)
    if over_minutes(rows, key):
        with picture(bench.folder / "table-1.png", 5.4, 3.4) as axes:
            draw_side_by_side(axes, rows, ALL_ARMS)
            if key == "fid":
                grey = {"marker": "s", "ls": "", "color": palette.grey, "label": "paper"}
                axes.plot(range(len(PAPER)), list(PAPER.values()), **grey)
            axes.legend(fontsize=7, loc="upper left")
    return draw_distances(bench, rows, ALL_ARMS)


def draw_followed(bench: Bench, found: Found) -> None:
    """Appendix G.6: chains from noise, the same for all arms, at the first, the middle and the last of the times.

    Each number of steps has a row, and each class a column.
    """
    times, rows = len(bench.followed), {}
    shown = sorted({0, times // 2, times - 1})
    for arm in arms_of(found):
        arrays = found[max(key for key in found if key[0] == arm)].arrays
        for at in shown if "followed" in arrays else ():
            name = f"{arm}, {bench.followed[at]} steps" if bench.followed[at] else "noise"
            rows[name] = arrays["followed"][at].astype(np.float32) / 127.5 - 1
    if rows:
        save_image_rows(bench.folder / "followed.png", rows, DPI)


EXPERIMENT = Experiment(
    name="cifar10-divergences",
    title="CIFAR-10 by class: four divergences and contrastive divergence at equal minutes (Table 1, G.1, G.6)",
    paper="Yu, Song, Song, Ermon, ICML 2020, Section 6.2 and Appendix G",
    scales=by_scale(
        {
            **COLD,
            "drift_clip": None,
            "fresh": 0.05,
            "energy_l2": 1e-3,
            "energy_rate": 1.0,
            "ratio_steps": 1,
            "clip_exponent": 5.0,
            "normalise": True,
            "exponent_l2": 0.1,
        },
        **CIFAR10,
        energy=(ShortRunConfig(filters=4), ShortRunConfig(filters=16), ShortRunConfig(filters=64)),
        arms=(("js", "cd"), ALL_ARMS, ALL_ARMS),
        required=(("js", "cd"), ("cd",), ()),
        minutes=(10.0, 2.0, 2.0),
        marks=((10.0,), (2.0,), (2.0,)),
        chain_steps=(5, 20, 20),
        followed=((0, 5, 20), (0, 20, 100, 300), (0, 20, 60, 200, 600)),
    ),
    body=body,
    compared=compared,
)
