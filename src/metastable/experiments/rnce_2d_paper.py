"""`rnce-2d` with the paper's own settings beside ours: turns, constant rates and sizes (Appendix B.2), and Table 2.

The paper lets the proposal take five steps and then the energy five or two, at a constant rate of 10⁻³ or 5·10⁻⁴,
with batches of 128. Section 7.2 allows 22,000 parameters, the caption of Table 8 says 11,000 for energy and
proposal together, and its widths (eight layers of 64) would have more than either. Both sizes are trained here.
Densities are drawn as in Table 2, from kernel estimates; the coefficients in the paper's pictures are not in its
text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from metastable.core.random import derive
from metastable.evaluation.bhattacharyya import PlaneKDE, least_overlap
from metastable.report.figures import MUTED, density_colours, picture

from .base import Bench, Experiment, Row
from .rnce_2d import (
    DENSITIES,
    IBC,
    RNCE,
    SETS,
    TRUTH,
    Job,
    Outcome,
    learn_all,
    toy_of,
    true_likelihood,
    true_samples,
)
from .rnce_2d import EXPERIMENT as RNCE_2D

PAPER: Mapping[str, Any] = {"rate": 1e-3, "schedule": "constant", "times": 1, "proposal_layers": 2}
SMALL: Mapping[str, Any] = {**PAPER, "energy_width": 37, "proposal_width": 64}
"""About 11,000 parameters with the proposal."""
ARMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "r-nce turns 5+2": (RNCE, {**PAPER, "turns": (5, 2)}),
    "r-nce turns 5+2, 11k": (RNCE, {**SMALL, "turns": (5, 2)}),
    "r-nce turns 5+5": (RNCE, {**PAPER, "turns": (5, 5)}),
    "r-nce turns 5+5, 11k": (RNCE, {**SMALL, "turns": (5, 5)}),
    "r-nce turns 5+5, rate 5e-4": (RNCE, {**PAPER, "turns": (5, 5), "rate": 5e-4}),
    "r-nce ours": (RNCE, {}),
    IBC: (IBC, PAPER),
    **{model: (model, PAPER) for model in DENSITIES},
}
"""The model of each arm and what it changes of our settings; those that take longest first."""
DRAWN = (TRUTH, *DENSITIES, "r-nce turns 5+5", "r-nce turns 5+2", IBC)
"""Columns of the picture."""


def jobs(bench: Bench) -> list[Job]:
    """Every arm on both sets; the same data for all arms."""
    truth = derive(bench.seed, "truth") % 2**31
    return [
        Job(
            model,
            toy,
            0,
            derive(bench.seed, toy) % 2**31,
            truth,
            bench.device,
            {**bench.settings, **own, "arm": arm},
        )
        for arm, (model, own) in ARMS.items()
        if arm in bench.arms
        for toy in SETS
    ]


def rows_of(bench: Bench, name: str, own: Mapping[str, Outcome], ceiling: float) -> Iterator[Row]:
    """Overlaps and likelihoods of every arm; R-NCE's are required, and IBC's is required to be the least."""
    for arm, outcome in own.items():
        least = bench.least_bc if outcome.job.model == RNCE else None
        yield Row(f"bc/{arm}/{name}", outcome.overlap, ">=" if least else None, least)
    yield Row(f"bc/{TRUTH}/{name}", ceiling)
    if IBC in own and bench.least_bc:
        best = min(o.overlap for arm, o in own.items() if arm != IBC)
        yield Row(f"bc_margin/{IBC}/{name}", best - own[IBC].overlap, ">=", 0.0)
    for arm, outcome in own.items():
        yield Row(f"log_likelihood/{arm}/{name}", outcome.likelihood.mean)
    seed = next(iter(own.values())).job.truth
    yield Row(f"log_likelihood/{TRUTH}/{name}", true_likelihood(toy_of(name), seed))
    for arm, outcome in own.items():
        said = "11k" if arm.endswith("11k") else "22k"
        yield Row(f"parameters/{arm}/{name}", outcome.parameters, "<=", 1000.0 * float(said[:-1]), paper=said)


def draw_densities(bench: Bench, name: str, own: Mapping[str, np.ndarray]) -> None:
    """Kernel densities, a row for each context and a column for each model, as Table 2."""
    values, columns = toy_of(name).values, [model for model in DRAWN if model in own]
    axis = torch.linspace(-4, 4, 97, dtype=torch.float64)
    look = {"origin": "lower", "extent": (-4, 4, -4, 4), "vmin": 0, "cmap": density_colours()}
    shape = len(values), len(columns)
    path = bench.folder / f"densities-{name}.png"
    with picture(path, 1.55 * shape[1], 1.62 * shape[0], *shape, dpi=72, squeeze=False) as axes:
        for i, row in enumerate(axes):
            truth = PlaneKDE.of(torch.as_tensor(own[TRUTH][i])).on_grid(axis, axis)
            for ax, model in zip(row, columns, strict=True):
                found = PlaneKDE.of(torch.as_tensor(own[model][i])).on_grid(axis, axis)
                ax.imshow(found.T.numpy(), vmax=float(truth.max()), **look)
                ax.set(xticks=[], yticks=[])
            row[0].set_ylabel(f"{values[i]:g}")
        for ax, model in zip(axes[0], columns, strict=True):
            ax.set_title(model, fontsize=8)
        words = "spokes" if name == "pinwheel" else "degrees"
        axes[0, 0].figure.supylabel(words, fontsize="medium", color=MUTED)


def body(bench: Bench) -> list[Row]:
    """Every arm on both sets."""
    outcomes: Sequence[Outcome] = learn_all(bench, jobs(bench))
    rows: list[Row] = []
    for name in SETS:
        found = {o.job.arm: o for o in outcomes if o.job.toy == name}
        own = {arm: found[arm] for arm in ARMS if arm in found}
        seed = outcomes[0].job.truth
        truth, second = (true_samples(toy_of(name), bench.samples, seed, which) for which in "ab")
        rows += rows_of(bench, name, own, least_overlap(second, truth))
        samples = {TRUTH: np.stack(truth), **{arm: o.samples for arm, o in own.items()}}
        draw_densities(bench, name, samples)
    return rows


QUICK = {"energy_steps": 6000, "density_steps": 16_000}
"""Of 20,000 each: a quarter of an hour on ten cores."""
SMOKE = ("r-nce turns 5+5, 11k",)
EXPERIMENT = Experiment(
    name="rnce-2d-paper",
    title="Conditional densities in the plane with the paper's turns, rates and sizes beside ours (Tables 2 and 8)",
    paper="Singh, Tu, Sindhwani, TMLR 2024, Section 7.2 and Appendix B.2",
    scales={
        "smoke": {**RNCE_2D.scales["smoke"], "arms": SMOKE, "energy_steps": 20},
        "cpu": {**RNCE_2D.scales["cpu"], "arms": tuple(ARMS), "workers": 10, **QUICK},
        "gpu": {**RNCE_2D.scales["gpu"], "arms": tuple(ARMS)},
    },
    body=body,
)
