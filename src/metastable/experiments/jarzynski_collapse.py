"""Figures 14 and 8 of the Jarzynski paper: why unweighted walkers collapse, and that they then oscillate.

In one dimension, with both means known and ten apart, only z is learned. While walkers stay in their modes,
learning is an ordinary differential equation in the shares of data and of first walkers near b (Appendix C).
CD, whose walkers restart at the data before every update, does not learn z either (52).
A walker that changes mode leaves that equation behind: at z = 0 about one run of 200 walkers in twelve has one
before T = 100, and each of them moves PCD's z by up to T/200. Hence PCD has two rows with a target, the mean
over all repeats and the worst of those in which every walker ended where it began, and one without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metastable.core.random import derive, generator
from metastable.methods import ContrastiveDivergence, Jarzynski, PersistentCD
from metastable.report.figures import INK, draw_level, palette, picture
from metastable.runs.run import Run

from .base import Bench, Experiment, Row
from .gmm import TwoModes, rates, student, teacher
from .trials import Arm, Problem, Trial, Trials, by_scale, draw_curves, mean

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


def alternations(p: Sequence[float] | Times, low: float = 0.1, high: float = 0.9) -> int:
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


@dataclass(frozen=True)
class Shares:
    """q̂(0) and q̂*, where walkers and data were at first, and how many walkers crossed."""

    q0: float
    q_data: float
    crossed: int


@dataclass(frozen=True)
class Path(Shares):
    """One training in one dimension: z(t), beside the equations that its shares set."""

    times: Times
    z: Times

    @property
    def predicted(self) -> Times:
        """The equation that belongs to walkers without weights: (50), or (51) and (52) where q̂(0) = q̂*."""
        return drift(self.q0, self.q_data) * self.times

    @property
    def predicted_weighted(self) -> Times:
        """(53)."""
        return integrate(lambda z: weighted_rate(z, self.q0, self.q_data), self.times)

    @property
    def q(self) -> Times:
        """The model's mass at b."""
        return mass_at_b(self.z)


def mass_at_b(z: Times) -> Times:
    """e^{−z}/(1 + e^{−z})."""
    return 0.5 * (1 - np.tanh(z / 2))


def arms(bench: Bench) -> list[Arm]:
    """The three algorithms of Appendix C.1.2: the third is the paper's own, with every walker steering."""
    walkers = {"walkers": bench.points, "step_size": bench.step_size}
    return [
        Arm("unweighted", PersistentCD(**walkers, start_at="model")),
        Arm("pcd", PersistentCD(**walkers, start_at="data")),
        Arm("jarzynski", Jarzynski(**walkers, held_out=0.0, resample="never", pace=None)),
    ]


def restarting(bench: Bench) -> Arm:
    """CD, whose walkers make P = 4 steps from the data before each update."""
    method = ContrastiveDivergence(walkers=bench.points, step_size=bench.step_size, steps=4)
    return Arm("cd", method)


def one_dimension(bench: Bench) -> Trials:
    """(48) by Euler's method with step h, (49) with α = 1: the learning rate of z is h too."""
    h = bench.step_size

    def problem(arm: Arm, seed: int) -> Problem:
        return Problem(Line(), Line(bench.z_data).sample(bench.points, generator(derive(seed, "data"))))

    def keep(trial: Trial, at: Problem, run: Run) -> Shares:
        first = at.data if trial.arm.name in ("pcd", "cd") else at.model.drawn
        # CD's walkers are gone after an update
        end = first if run.walkers is None else run.walkers.x.to(first)
        return Shares(share_near_b(first), share_near_b(at.data), crossings(first, end))

    settings = {
        "steps": round(bench.horizon / h),
        "batch_size": None,
        "optimiser": rates(0.0, h),
        "log_every": bench.log_every,
        "device": "cpu",  # two hundred numbers are no work for an accelerator
        "precision": bench.precision,
    }
    return Trials(
        arms(bench),
        problem,
        settings,
        bench.repeats,
        watch=lambda at, line: {"z": float(at.model.z.detach())},
        from_start=True,
        keep=keep,
        words=lambda t: f"z({bench.horizon:g}) = {t.curves['z'][-1]:.4f}, {t.kept.crossed} crossed",
        records=(Shares,),
    )


def path_of(bench: Bench, trial: Trial) -> Path:
    """The course of z in time."""
    z = trial.curves["z"]
    return Path(**vars(trial.kept), times=bench.step_size * bench.log_every * np.arange(len(z)), z=z)


def crossings(first: Tensor, last: Tensor) -> int:
    """Walkers that ended on the other side of the middle; rows of both are the same walkers."""
    return int(((first > 0) != (last > 0)).sum())


def fifty_dimensions(bench: Bench) -> Trials:
    """PCD under the settings of Figure 8: p at each update."""

    def problem(arm: Arm, seed: int) -> Problem:
        source = teacher(bench.walkers, bench.dim, -10.0, 6.0, 0.25, seed)
        return Problem(student(bench.dim, seed), source.x)

    optimiser = rates(1.0, bench.rate_z)
    return Trials(
        [Arm("pcd", PersistentCD(walkers=bench.walkers, step_size=0.2))],
        problem,
        {"steps": bench.steps, "batch_size": None, "optimiser": optimiser, "log_every": 10},
        seed=lambda bench, arm, repeat: derive(bench.seed, "oscillation") % 2**31,
        watch=lambda at, line: {"p": at.model.first_mass()},
        from_start=True,
        words=lambda trial: f"{alternations(trial.curves['p'])} alternations in {bench.dim} dimensions",
    )


def body(bench: Bench) -> list[Row]:
    """Every algorithm on every repeat in one dimension, then PCD's oscillations in fifty."""
    trials = one_dimension(bench)
    found = trials.run(bench)
    found |= replace(trials, arms=[restarting(bench)], repeats=bench.cd_repeats).run(bench)
    paths = {name: [path_of(bench, trial) for trial in trials] for name, trials in found.items()}
    oscillation = fifty_dimensions(bench).run(bench)["pcd"]
    _draw_14(bench, paths)
    with picture(bench.folder / "figure-8.png", 6, 3) as axes:
        draw_curves(axes, oscillation, "p", palette.vermillion)
        draw_level(axes, 0.25)
        axes.set(title="PCD: mass of the first mode", xlabel="update", ylim=(-0.02, 1.02))
    p = oscillation[0].curves["p"]
    relation = None if bench.alternations is None else ">="
    return [
        *_rows(bench, paths),
        Row("smallest_mass/pcd/50d", min(_smaller(value) for value in p), "<=", 0.01, 0.0),
        Row("alternations/pcd/50d", alternations(p), relation, bench.alternations),
    ]


def _rows(bench: Bench, paths: dict[str, list[Path]]) -> list[Row]:
    unweighted, pcd, jarzynski, cd = paths.values()
    miss = [abs(c.z[-1] - stable_point(c.q0, c.q_data)) for c in jarzynski]
    slow = []  # how far the slopes of z(t) at first are from (50), as a share of (50)
    for c in unweighted:
        window = c.times <= bench.early
        slow.append(abs(fitted_slope(c.times[window], c.z[window]) / drift(c.q0, c.q_data) - 1))
    gaps = [float(np.abs(c.z - c.predicted_weighted).max()) for c in jarzynski]
    moved = [float(np.abs(c.z).max()) for c in pcd]
    stayed = [m for m, c in zip(moved, pcd, strict=True) if c.crossed == 0]
    rows = [
        Row("distance_from_(54)/jarzynski/worst", max(miss), "<=", 0.05),
        Row("drift_error_of_(50)/unweighted/worst", max(slow), "<=", 0.1),
        Row("displacement/pcd/mean", mean(moved), "<=", 0.3, 0.0),
        Row("displacement/pcd/worst_without_crossing", max(stayed, default=0.0), "<=", 0.3, 0.0),
        Row("displacement/pcd/worst", max(moved), paper=0.0),
        Row("smaller_mass/unweighted/worst", max(_smaller(c.q[-1]) for c in unweighted), "<=", 0.05, 0.0),
        Row("distance_from_(53)/jarzynski/worst", max(gaps)),
        Row("mass_error/jarzynski", mean(abs(c.q[-1] - c.q_data) for c in jarzynski)),
        Row("displacement_(52)/cd/worst", max(float(np.abs(c.z).max()) for c in cd), "<=", 0.3, 0.0),
    ]
    crossed = {name: mean(c.crossed for c in own) for name, own in paths.items() if name != "cd"}
    return rows + [Row(f"walkers_that_crossed/{name}", value) for name, value in crossed.items()]


def _smaller(p: float) -> float:
    return float(min(p, 1 - p))


def _draw_14(bench: Bench, paths: dict[str, list[Path]]) -> None:
    """Figure 14 and CD: z(t) above, q(t) below, the predicted path of the first repeat dashed."""
    with picture(bench.folder / "figure-14.png", 13, 5.2, 2, 4, sharex=True) as axes:
        for (name, own), (top, bottom) in zip(paths.items(), axes.T, strict=True):
            for i, path in enumerate(own):
                style = {"color": palette.blue, "lw": 0.7 if i else 1.6, "alpha": 0.4 if i else 1.0}
                top.plot(path.times, path.z, label=None if i else "z(t)", **style)
                bottom.plot(path.times, path.q, **style)
            top.axhline(bench.z_data, color=INK, lw=1, label="z*")
            bottom.axhline(1 / (1 + math.exp(bench.z_data)), color=INK, lw=1)
            first, weighted = own[0], name == "jarzynski"
            z = first.predicted_weighted if weighted else first.predicted
            look = {"color": palette.vermillion, "lw": 1.2, "ls": "--"}
            top.plot(first.times, z, label="(53)" if weighted else "(50), (51), (52)", **look)
            bottom.plot(first.times, mass_at_b(z), **look)
            if weighted:
                point = stable_point(first.q0, first.q_data)
                top.axhline(point, color=palette.green, lw=1, label="(54)")
                bottom.axhline(1 / (1 + math.exp(point)), color=palette.green, lw=1)
            top.set_title(name)
            top.legend(fontsize=7)
            bottom.set(xlabel="t", ylim=(-0.02, 1.02))
        axes[0, 0].set_ylabel("z")
        axes[1, 0].set_ylabel("q, mass at b")


LINE = {
    "dim": 50,
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
    scales=by_scale(
        LINE,
        horizon=(40.0, 100.0, 100.0),
        repeats=(2, 8, 8),
        cd_repeats=(1, 2, 2),
        walkers=(2000, 10_000, 100_000),
        steps=(1000, 10_000, 20_000),
        # at first ten times the paper's: the collapse fits into ten times fewer updates
        rate_z=(50.0, 5.0, 5.0),
        alternations=(None, 1, 1),
    ),
    body=body,
)
