"""Table 5.2 of the AdaNCE thesis: FID against the interval 𝒦 at which the noise is renewed, and where chains begin.

Arms `interval-𝒦` have the thesis's chains: from a buffer, of which a tenth begins afresh from noise at each update.
In `noise` all of them do, and in `data` all begin at data (Section 3.2.1), both at 𝒦 = 1. All arms have the same
minutes. Samples are the buffer's; those of `data`, which keeps none, are chains from noise of as many steps as in
training. Such chains are also drawn from every other arm, `fresh_…`, since the thesis shows short runs.

The network is spectrally normalised, as in the thesis. Without that, energies between two renewals run away from
those of the copy: at 𝒦 = 10 the variance of log g went to 10⁹, and chains were thrown out of all bounds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from metastable.core.types import Walkers
from metastable.energies.network_configs import ShortRunConfig
from metastable.kernels import ULA
from metastable.methods import AdaptiveNCE, ContrastiveDivergence, PersistentCD
from metastable.methods.base import ChainMethod
from metastable.report.figures import palette, picture
from metastable.runs.run import Run

from .base import Bench, Experiment, Row
from .image_figures import distances_in, draw_curves, draw_distances, draw_samples, half_width, over_minutes
from .image_runs import (
    BY_NETWORK,
    CIFAR10,
    COLD,
    ImageArm,
    ImageTrials,
    from_noise,
    measure,
    measures_of,
    pictures_of,
    rows_of,
)
from .trials import by_scale

INTERVALS = (1, 5, 10, 20, 50)
PAPER = dict(zip((f"interval-{k}" for k in INTERVALS), (147.82, 157.17, 165.42, 214.12, 310.54), strict=True))
"""FID of Table 5.2."""
ALL_ARMS = (*PAPER, "noise", "data")


def kernel_of(bench: Bench) -> ULA:
    """A step of 1 along the gradient, little noise."""
    return ULA(bench.chain_step, noise=bench.chain_noise)


def arm_of(bench: Bench, arm: str) -> ImageArm:
    """The thesis's loss, P = 1, on the chains of an arm."""
    chains: dict[str, Any] = {"steps": bench.chain_steps, "kernel": kernel_of(bench)}
    share = 1.0 if arm == "noise" else bench.fresh
    fresh: dict[str, Any] = {"start_at": "noise", "noise": "uniform", "rejuvenation": share}
    source: ChainMethod = ContrastiveDivergence(**chains)
    if arm != "data":
        source = PersistentCD(walkers=bench.walkers, batch=bench.chains, **chains, **fresh)
    interval = int(arm.removeprefix("interval-")) if arm in PAPER else 1
    method = AdaptiveNCE(source=source, interval=interval, tempered=False)
    return ImageArm(arm, method, lambda data, seed: replace(bench.energy, reference="none"))


def body(bench: Bench) -> list[Row]:
    """The pieces that were asked for, then rows and figures of all that are there."""
    data = pictures_of(bench)
    measures = measures_of(bench, data)

    def short_run(run: Run) -> Walkers:
        return Walkers.equal(from_noise(bench, run, kernel_of(bench), bench.images, bench.chain_steps))

    def more(run: Run, walkers: Walkers) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return ({} if run.walkers is None else measure(measures, short_run(run), bench.images, "fresh_")), {}

    def samples(run: Run) -> Walkers:
        # the buffer as it is: short cold chains are no draws that weights could correct
        return short_run(run) if run.walkers is None else Walkers.equal(run.walkers.x)

    trials = ImageTrials(bench, data, lambda name: arm_of(bench, name), measures, more, samples)
    found = trials.run(ALL_ARMS)
    if found:
        draw_samples(bench, found, data.x)
        draw_curves(bench, found, (("energy_gap", "energy, data − negatives"),), "curves.png")
    rows = rows_of(bench, found, PAPER, bench.required)
    keys = (*(f"fresh_{by}" for by in BY_NETWORK), "fresh_pixels_over_noise", "var_log_g")
    return rows + [
        Row(f"{key}/{arm}/minutes={mark:g}", piece.numbers[key])
        for (arm, mark), piece in found.items()
        for key in keys
        if key in piece.numbers
    ]


def compared(bench: Bench, rows: list[Row]) -> list[Row]:
    """Distances over minutes, and Table 5.2 as a picture: those over 𝒦 at the last mark that all intervals have."""
    key, name = distances_in(rows)
    found, bars = over_minutes(rows, key), over_minutes(rows, f"{key}_se")
    common = set.intersection(*(set(found.get(arm, ())) for arm in PAPER))
    if common:
        last = max(common)
        with picture(bench.folder / "table-5-2.png", 5, 3.4) as axes:
            values = [found[arm][last] for arm in PAPER]
            off = [half_width(bars.get(arm, {}).get(last, 0.0)) for arm in PAPER]
            ours = {"marker": "o", "capsize": 3, "color": palette.blue, "label": f"ours, {last:g} min"}
            axes.errorbar(INTERVALS, values, off, **ours)
            if key == "fid":
                axes.plot(INTERVALS, list(PAPER.values()), marker="s", color=palette.grey, label="thesis")
            axes.set(xlabel="interval", ylabel=name, xscale="log")
            axes.set_xticks(INTERVALS, [str(k) for k in INTERVALS])
            axes.minorticks_off()
            axes.margins(x=0.05)
            axes.legend(fontsize=7)
    return draw_distances(bench, rows, ALL_ARMS)


EXPERIMENT = Experiment(
    name="cifar10-adance",
    title="CIFAR-10 with self-adapting NCE: FID against the interval, and where chains begin (Table 5.2)",
    paper="Nathaniel Xu, MSc thesis, Tsinghua University, 2022, Sections 3.2.1 and 5.2",
    scales=by_scale(
        {**COLD, "fresh": 0.1},
        **CIFAR10,
        energy=tuple(ShortRunConfig(filters=filters, spectral_norm=True) for filters in (4, 16, 64)),
        arms=(("interval-1", "interval-10", "data"), ALL_ARMS, ALL_ARMS),
        required=(("interval-1",), ("interval-1",), ()),
        minutes=(10.0, 2.0, 1.5),
        marks=((10.0,), (2.0,), (1.5,)),
        chain_steps=(5, 20, 40),
    ),
    body=body,
    compared=compared,
)
