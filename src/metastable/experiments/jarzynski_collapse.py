"""Figures 14 and 8 of the Jarzynski paper: why unweighted walkers collapse, and that they then oscillate.

In one dimension, with both means known and ten apart, only z is learned. While walkers stay in their modes,
learning is an ordinary differential equation in the shares of data and of first walkers near b (Appendix C).
A walker that changes mode leaves that equation behind: at z = 0 about one run of 200 walkers in twelve has one
before T = 100, and each of them moves PCD's z by up to T/200. Hence PCD has two rows with a target, the mean
over all repeats and the worst of those in which every walker ended where it began, and one without.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metastable.api import fit
from metastable.core.random import derive, generator
from metastable.methods import Jarzynski, Method, PersistentCD

from .base import Bench, Experiment, Row
from .gmm import TwoModes, rates, student, teacher

ALGORITHMS = ("unweighted", "pcd", "jarzynski")
HALF_GAP = 5.0
"""a = −5 and b = 5, so that |a − b| = 10 (A1)."""
RADIUS = 4.0
"""I_a and I_b reach this far from their means (56)."""

Times = NDArray[np.float64]


def share_near_b(x: Tensor) -> float:
    """q̂: the share of points in I_b = [b − 4, b + 4]; `x` is `(n, 1)`."""
    return float(((x[:, 0] - HALF_GAP).abs() <= RADIUS).double().mean())


def drift(q0: float, q_data: float) -> float:
    """ż = q̂(0) − q̂*: (50), and (51) where walkers start at the data."""
    return q0 - q_data


def stable_point(q0: float, q_data: float) -> float:
    """z̃* = ẑ* + log(q̂(0)/p̂(0)): (54)."""
    return math.log((1 - q_data) / q_data) + math.log(q0 / (1 - q0))


def weighted_rate(z: float, q0: float, q_data: float) -> float:
    """ż = q̂(0)e^{−z}/(p̂(0) + q̂(0)e^{−z}) − q̂*: (53)."""
    return q0 / ((1 - q0) * math.exp(z) + q0) - q_data


def integrate(rate: Callable[[float], float], times: Times, z: float = 0.0, substeps: int = 10) -> Times:
    """z at `times` for ż = `rate`(z) from `z` at the first of them, by the classical Runge–Kutta method."""
    path = [z]
    for gap in np.diff(times):
        dt = float(gap) / substeps
        for _ in range(substeps):
            k1 = rate(z)
            k2 = rate(z + dt * k1 / 2)
            k3 = rate(z + dt * k2 / 2)
            k4 = rate(z + dt * k3)
            z += dt * (k1 + 2 * k2 + 2 * k3 + k4) / 6
        path.append(z)
    return np.array(path)


def fitted_slope(times: Times, z: Times) -> float:
    """The slope of the line through the origin that fits z(t) best."""
    return float(times @ z / (times @ times))


def alternations(p: list[float], low: float = 0.1, high: float = 0.9) -> int:
    """How often p goes from below `low` to above `high` or back.

    >>> alternations([0.5, 0.05, 0.5, 0.08, 0.95, 0.99, 0.01])
    2
    """
    sides = [value > high for value in p if value < low or value > high]
    return sum(before != after for before, after in pairwise(sides))


class Line(TwoModes):
    """(45): means fixed, z learned from `z`(0) = 0. Remembers the walkers that were drawn from it."""

    def __init__(self, z: float = 0.0):
        super().__init__(torch.tensor([-HALF_GAP]), torch.tensor([HALF_GAP]), z, train_means=False)
        self.drawn: Tensor | None = None

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        self.drawn = super().sample(n, rng)
        return self.drawn


@dataclass
class Course:
    """One training in one dimension: z(t), where walkers and data were at first, how many walkers crossed."""

    times: Times
    z: Times
    q0: float
    q_data: float
    crossed: int

    @property
    def predicted(self) -> Times:
        """The equation that belongs to walkers without weights: (50), or (51) where q̂(0) = q̂*."""
        return drift(self.q0, self.q_data) * self.times

    @property
    def predicted_weighted(self) -> Times:
        """(53)."""
        return integrate(lambda z: weighted_rate(z, self.q0, self.q_data), self.times)

    @property
    def q(self) -> Times:
        """The model's mass at b, e^{−z}/(1 + e^{−z})."""
        return 0.5 * (1 - np.tanh(self.z / 2))


def method_of(bench: Bench, name: str) -> Method:
    """The three algorithms of Appendix C.1.2: the third is the paper's own, with every walker steering."""
    h, n = bench.step_size, bench.points
    if name == "jarzynski":
        return Jarzynski(walkers=n, held_out=0.0, resample="never", step_size=h, pace=None)
    return PersistentCD(walkers=n, start_at="model" if name == "unweighted" else "data", step_size=h)


def train(bench: Bench, name: str, seed: int) -> Course:
    """(48) by Euler's method with step h, (49) with α = 1: the learning rate of z is h too."""
    data = Line(bench.z_data).sample(bench.points, generator(derive(seed, "data")))
    model = Line()
    h, every = bench.step_size, bench.log_every
    z = [0.0]
    run = fit(
        model,
        data,
        method_of(bench, name),
        round(bench.horizon / h),
        seed=seed,
        units="none",
        batch_size=None,
        optimiser=rates(0.0, h),
        log_every=every,
        device="cpu",  # two hundred numbers are no work for an accelerator
        precision=bench.precision,
        evaluate=False,
        progress=lambda row: z.append(float(model.z.detach())),
    )
    first = data if name == "pcd" else model.drawn
    assert first is not None
    assert run.walkers is not None
    last = run.walkers.x.to(first)
    times = h * every * np.arange(len(z))
    return Course(times, np.array(z), share_near_b(first), share_near_b(data), _crossings(first, last))


def _crossings(first: Tensor, last: Tensor) -> int:
    """Walkers that ended on the other side of the middle; rows of both are the same walkers."""
    return int(((first > 0) != (last > 0)).sum())


def oscillate(bench: Bench) -> tuple[list[int], list[float]]:
    """PCD under the settings of Figure 8: updates, and p_k at each."""
    seed = derive(bench.seed, "oscillation") % 2**31
    source = teacher(bench.walkers, bench.dim, -10.0, 6.0, 0.25, seed)
    model = student(bench.dim, seed)
    steps, p = [0], [model.first_mass()]

    def watch(row: dict[str, Any]) -> None:
        steps.append(int(row["step"]))
        p.append(model.first_mass())

    fit(
        model,
        source.x,
        PersistentCD(walkers=bench.walkers, step_size=0.2),
        bench.steps,
        seed=seed,
        units="none",
        batch_size=None,
        optimiser=rates(1.0, bench.rate_z),
        log_every=10,
        device=bench.device,
        evaluate=False,
        progress=watch,
    )
    return steps, p


def body(bench: Bench) -> list[Row]:
    """Every algorithm on every repeat in one dimension, then PCD's oscillations in fifty."""
    courses: dict[str, list[Course]] = {name: [] for name in ALGORITHMS}
    for r in range(bench.repeats):
        seed = derive(bench.seed, "repeat", r) % 2**31
        for name in ALGORITHMS:
            course = train(bench, name, seed)
            courses[name].append(course)
            bench.say(
                f"{name} repeat {r}: z({bench.horizon:g}) = {course.z[-1]:.4f}, {course.crossed} crossed"
            )
    steps, p = oscillate(bench)
    bench.say(f"pcd in {bench.dim} dimensions: {alternations(p)} alternations in {bench.steps} updates")
    _draw_14(bench, courses)
    _draw_8(bench, steps, p)
    return [*_rows(bench, courses), *_oscillation_rows(bench, p)]


def _rows(bench: Bench, courses: dict[str, list[Course]]) -> list[Row]:
    unweighted, pcd, jarzynski = (courses[name] for name in ALGORITHMS)
    miss = [abs(c.z[-1] - stable_point(c.q0, c.q_data)) for c in jarzynski]
    slow = [_drift_error(c, bench.early) for c in unweighted]
    moved = [float(np.abs(c.z).max()) for c in pcd]
    kept = [m for m, c in zip(moved, pcd, strict=True) if c.crossed == 0]
    rows = [
        Row("distance_from_(54)/jarzynski/worst", max(miss), "<=", 0.05),
        Row("drift_error_of_(50)/unweighted/worst", max(slow), "<=", 0.1),
        Row("displacement/pcd/mean", float(np.mean(moved)), "<=", 0.3, 0.0),
        Row("displacement/pcd/worst_without_crossing", max(kept, default=0.0), "<=", 0.3, 0.0),
        Row("displacement/pcd/worst", max(moved), paper=0.0),
        Row("smaller_mass/unweighted/worst", max(_smaller(c.q[-1]) for c in unweighted), "<=", 0.05, 0.0),
        Row("distance_from_(53)/jarzynski/worst", max(_gap(c.z, c.predicted_weighted) for c in jarzynski)),
        Row("mass_error/jarzynski", float(np.mean([abs(c.q[-1] - c.q_data) for c in jarzynski]))),
    ]
    crossed = {name: float(np.mean([c.crossed for c in courses[name]])) for name in ALGORITHMS}
    return rows + [Row(f"walkers_that_crossed/{name}", value) for name, value in crossed.items()]


def _drift_error(course: Course, early: float) -> float:
    """How far the slope of z(t) for t ≤ `early` is from (50), as a share of (50)."""
    window = course.times <= early
    slope = fitted_slope(course.times[window], course.z[window])
    return abs(slope / drift(course.q0, course.q_data) - 1)


def _oscillation_rows(bench: Bench, p: list[float]) -> list[Row]:
    relation = None if bench.alternations is None else ">="
    return [
        Row("smallest_mass/pcd/50d", min(_smaller(value) for value in p), "<=", 0.01, 0.0),
        Row("alternations/pcd/50d", alternations(p), relation, bench.alternations),
    ]


def _smaller(p: float) -> float:
    return float(min(p, 1 - p))


def _gap(z: Times, predicted: Times) -> float:
    return float(np.abs(z - predicted).max())


def _draw_14(bench: Bench, courses: dict[str, list[Course]]) -> None:
    """Figure 14: z(t) above, q(t) below, the predicted path of the first repeat dashed."""
    from metastable.report.figures import INK, new_figure, palette, save_figure

    figure = new_figure(11, 5.2)
    axes = figure.subplots(2, 3, sharex=True)
    q_data = 1 / (1 + math.exp(bench.z_data))
    for (name, runs), (top, bottom) in zip(courses.items(), axes.T, strict=True):
        for i, course in enumerate(runs):
            style = {"color": palette.blue, "lw": 1.6 if i == 0 else 0.7, "alpha": 1.0 if i == 0 else 0.4}
            top.plot(course.times, course.z, label="z(t)" if i == 0 else None, **style)
            bottom.plot(course.times, course.q, **style)
        top.axhline(bench.z_data, color=INK, lw=1, label="z*")
        bottom.axhline(q_data, color=INK, lw=1)
        _draw_prediction(top, bottom, runs[0], name == "jarzynski")
        top.set_title(name)
        top.legend(fontsize=7)
        bottom.set(xlabel="t", ylim=(-0.02, 1.02))
    axes[0, 0].set_ylabel("z")
    axes[1, 0].set_ylabel("q, mass at b")
    save_figure(figure, bench.folder / "figure-14.png")


def _draw_prediction(top: Any, bottom: Any, course: Course, weighted: bool) -> None:
    from metastable.report.figures import palette

    z = course.predicted_weighted if weighted else course.predicted
    look = {"color": palette.vermillion, "lw": 1.2, "ls": "--"}
    top.plot(course.times, z, label="(53)" if weighted else "(50), (51)", **look)
    bottom.plot(course.times, 0.5 * (1 - np.tanh(z / 2)), **look)
    if weighted:
        point = stable_point(course.q0, course.q_data)
        top.axhline(point, color=palette.green, lw=1, label="(54)")
        bottom.axhline(1 / (1 + math.exp(point)), color=palette.green, lw=1)


def _draw_8(bench: Bench, steps: list[int], p: list[float]) -> None:
    """Figure 8: p_k of PCD."""
    from metastable.report.figures import INK, new_figure, palette, save_figure

    figure = new_figure(6, 3)
    axes = figure.subplots()
    axes.plot(steps, p, color=palette.vermillion)
    axes.axhline(0.25, color=INK, lw=0.8, ls="--")
    axes.set(title="PCD: mass of the first mode", xlabel="update", ylim=(-0.02, 1.02))
    save_figure(figure, bench.folder / "figure-8.png")


LINE = {
    "points": 200,
    "step_size": 0.01,
    "z_data": math.log(3),  # q* = 1/4: the paper does not say its own
    "early": 10.0,
    "log_every": 50,
    "precision": "64-true",
}
"""Figure 14, for walkers and data alike; |z| stays below five up to `early`, as Lemma 2 needs."""

EXPERIMENT = Experiment(
    name="jarzynski-collapse",
    title="Mode collapse as a differential equation, and PCD's oscillations (Fig. 8, 14)",
    paper="Carbone, Hua, Coste, Vanden-Eijnden, NeurIPS 2023, Appendices B.1 and C",
    scales={
        "smoke": LINE
        | {
            "horizon": 40.0,
            "repeats": 2,
            "dim": 50,
            "walkers": 2000,
            "steps": 1000,
            "rate_z": 50.0,  # ten times the paper's, so that the collapse fits into ten times fewer updates
            "alternations": None,
        },
        "cpu": LINE
        | {
            "horizon": 100.0,
            "repeats": 8,
            "dim": 50,
            "walkers": 10_000,
            "steps": 10_000,
            "rate_z": 5.0,
            "alternations": 1,
        },
        "gpu": LINE
        | {
            "horizon": 100.0,
            "repeats": 8,
            "dim": 50,
            "walkers": 100_000,
            "steps": 20_000,
            "rate_z": 5.0,
            "alternations": 1,
        },
    },
    body=body,
)
