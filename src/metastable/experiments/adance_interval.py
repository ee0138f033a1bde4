"""Table 5.2 of the AdaNCE thesis where the truth is known: quality and Var(log g) against the adaptive interval K.

The thesis trains CIFAR-10 with K from 1 to 50 and sees Inception scores fall; it explains that with the variance of
the density ratio g between the model and its frozen copy (Section 5.3). On a set in two dimensions with a known
density both can be measured: KL(data ‖ model) by quadrature, and Var(log g) over the negatives. PCD with the same
chains and random numbers is trained beside K = 1, which must be the same algorithm (Section 3.3): Adam does not see
the factor ½ that lies between the two. What is left between them is rounding, which chains amplify.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from metastable.api import fit
from metastable.core.random import derive
from metastable.data.toy import ToySet, toy_set
from metastable.evaluation.quadrature import grid_density, kl_on_grid
from metastable.kernels import MALA
from metastable.methods import AdaptiveNCE, Method, PersistentCD
from metastable.training.config import Adam, Schedule

from .base import Bench, Experiment, Row

BOX = [(-5.0, 5.0), (-5.0, 5.0)]
POINTS = 301
PUBLISHED = {1: (4.03, 147.82), 5: (3.74, 157.17), 10: (3.57, 165.42), 20: (3.45, 214.12), 50: (2.61, 310.54)}
"""Table 5.2: Inception score and FID on CIFAR-10 for each K."""
PCD = 0
"""Stands for PCD among the intervals."""


class Course(NamedTuple):
    """One training: KL at its end, and the mean of Var(log g) over its updates after the first tenth."""

    kl: float
    var_log_g: float
    var_log_g_data: float
    energy: torch.nn.Module


@dataclass(frozen=True)
class Spread:
    """Mean, standard deviation and count of one number over repeats."""

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """From the numbers."""
        return cls(float(np.mean(values)), float(np.std(values, ddof=1)), len(values))


def method_of(bench: Bench, interval: int) -> Method:
    """Self-adapting NCE, or PCD, with the same chains."""
    chains = PersistentCD(
        walkers=bench.walkers,
        kernel=MALA(bench.step_size),
        steps=bench.langevin,
        rejuvenation=bench.rejuvenation,
    )
    return chains if interval == PCD else AdaptiveNCE(chains, interval=interval)


def train(bench: Bench, toy: ToySet, data: Tensor, interval: int, seed: int) -> Course:
    """One training of a fresh network."""
    history: list[dict[str, Any]] = []
    run = fit(
        {"name": "mlp", "hidden": bench.hidden},
        data,
        method_of(bench, interval),
        bench.steps,
        seed=seed,
        units="none",
        batch_size=bench.walkers,
        optimiser=Adam(bench.rate),
        schedule=Schedule("cosine"),
        device=bench.device,
        evaluate=False,
        progress=history.append,
    )
    assert toy.log_density is not None
    late = history[len(history) // 10 :]

    def mean(name: str) -> float:
        return float(np.mean([row.get(name, math.nan) for row in late]))

    energy: Any = run.energy
    kl = kl_on_grid(toy.log_density, energy, BOX, POINTS)
    return Course(kl, mean("var_log_g"), mean("var_log_g_data"), energy)


Courses = dict[int, list[Course]]


def body(bench: Bench) -> list[Row]:
    """Every interval, and PCD, from every seed."""
    toy = toy_set(bench.toy)
    data = toy.sample(bench.rows, seed=derive(bench.seed, "data") % 2**31)
    courses: Courses = {K: [] for K in (PCD, *bench.intervals)}
    for r in range(bench.repeats):
        seed = derive(bench.seed, "repeat", r) % 2**31
        for K, own in courses.items():
            own.append(train(bench, toy, data, K, seed))
            bench.say(f"{_name(K)} repeat {r}: KL {own[-1].kl:.4f}, Var(log g) {own[-1].var_log_g:.3g}")
    _draw(bench, courses)
    _draw_densities(bench, toy, courses)
    return _rows(bench, courses)


def _name(interval: int) -> str:
    return "PCD" if interval == PCD else f"K = {interval}"


def kl_spread(courses: list[Course]) -> Spread:
    """KL over repeats."""
    return Spread.of([c.kl for c in courses])


def largest_difference(some: list[Course], others: list[Course]) -> float:
    """The largest |difference of KL| between two trainings from the same seed."""
    return max(abs(a.kl - b.kl) for a, b in zip(some, others, strict=True))


def _rows(bench: Bench, courses: Courses) -> list[Row]:
    var = {K: Spread.of([c.var_log_g for c in courses[K]]).mean for K in bench.intervals}
    apart = largest_difference(courses[1], courses[PCD]) / kl_spread(courses[PCD]).std
    longer = [K for K in bench.intervals if K > 1]
    steps = [var[b] / var[a] for a, b in itertools.pairwise(longer)]
    rows = [
        Row("kl_difference_over_spread/K=1_from_pcd", apart, "<=", 0.5),
        Row("var_log_g/K=1", var[1], "<=", 0.0, paper=0.0),
        Row("var_log_g_smallest_step_up", min(steps), ">=", 1.0),
        Row(f"var_log_g/K={longer[-1]}_over_K={longer[0]}", var[longer[-1]] / var[longer[0]], ">=", 2.0),
    ]
    rows += [Row(f"var_log_g/K={K}", var[K]) for K in longer]
    for K in (PCD, *bench.intervals):
        kl = kl_spread(courses[K])
        label = "pcd" if K == PCD else f"K={K}"
        published = "IS {:.2f}, FID {:.2f} (CIFAR-10)".format(*PUBLISHED[K]) if K in PUBLISHED else None
        rows += [Row(f"kl/{label}", kl.mean, paper=published), Row(f"kl_std/{label}", kl.std)]
    return rows


def _draw(bench: Bench, courses: Courses) -> None:
    """KL and Var(log g) against K, each repeat a dot."""
    from metastable.report.figures import MUTED, new_figure, palette, save_figure

    figure = new_figure(8, 3.2)
    left, right = figure.subplots(1, 2)
    intervals = list(bench.intervals)
    for K in intervals:
        left.plot([K] * len(courses[K]), [c.kl for c in courses[K]], "o", color=palette.sky, ms=4)
    means = [kl_spread(courses[K]).mean for K in intervals]
    left.plot(intervals, means, "-", color=palette.blue, lw=1.5, label="self-adapting NCE")
    pcd = kl_spread(courses[PCD])
    left.axhspan(pcd.mean - pcd.std, pcd.mean + pcd.std, color=palette.grey, alpha=0.2, lw=0)
    left.axhline(pcd.mean, color=palette.grey, lw=1, ls="--", label="PCD, ± its spread")
    left.set(title="KL(data ‖ model), nats", xlabel="interval K", xscale="log", ylim=(0, None))
    left.legend(fontsize=7)
    longer = [K for K in intervals if K > 1]
    for name, colour, label in (
        ("var_log_g", palette.vermillion, "negatives"),
        ("var_log_g_data", palette.blue, "data"),
    ):
        values = [float(np.mean([getattr(c, name) for c in courses[K]])) for K in longer]
        right.plot(longer, values, "o-", color=colour, ms=4, label=label)
    start = float(np.mean([c.var_log_g for c in courses[longer[0]]]))
    right.plot(longer, [start * K / longer[0] for K in longer], color=MUTED, lw=0.8, ls=":", label="∝ K")
    right.set(title="Var(log g); 0 at K = 1", xlabel="interval K", xscale="log", yscale="log")
    right.legend(fontsize=7)
    for axis in (left, right):
        axis.set_xticks(intervals, [str(K) for K in intervals])
        axis.minorticks_off()
    save_figure(figure, bench.folder / "interval.png")


def _draw_densities(bench: Bench, toy: ToySet, courses: Courses) -> None:
    """The truth, and the first repeat of PCD and of the shortest and longest interval."""
    from metastable.report.figures import new_figure, save_figure

    assert toy.log_density is not None
    truth = toy.log_density
    shown: list[tuple[str, Any]] = [("data", lambda x: -truth(x))]
    for K in (PCD, bench.intervals[0], bench.intervals[-1]):
        shown.append((_name(K), courses[K][0].energy))
    figure = new_figure(8, 2.3)
    for axis, (label, energy) in zip(figure.subplots(1, len(shown)), shown, strict=True):
        density = grid_density(energy, [(-4.0, 4.0)] * 2, 151).density
        axis.imshow(density.T, origin="lower", extent=(-4, 4, -4, 4), cmap="viridis")
        axis.set(title=label, xticks=[], yticks=[])
        axis.grid(False)
    save_figure(figure, bench.folder / "densities.png")


SAME = {"toy": "pinwheel", "intervals": (1, 5, 10, 20, 50), "rejuvenation": 0.1, "step_size": 0.03}

EXPERIMENT = Experiment(
    name="adance-interval",
    title="Self-adapting NCE on a pinwheel: quality and Var(log g) against the interval K (Table 5.2)",
    paper="Nathaniel Xu, Self-adapting noise-contrastive estimation for energy-based models, 2022, Chapter 5",
    scales={
        "smoke": SAME
        | {
            "intervals": (1, 5, 50),
            "rows": 2000,
            "hidden": (32, 32),
            "walkers": 128,
            "langevin": 5,
            "steps": 250,
            "rate": 1e-2,
            "repeats": 3,
        },
        "cpu": SAME
        | {
            "rows": 5000,
            "hidden": (64, 64),
            "walkers": 256,
            "langevin": 10,
            "steps": 1200,
            "rate": 5e-3,
            "repeats": 5,
        },
    },
    body=body,
)
