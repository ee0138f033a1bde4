"""Figures 9 and 10 of the Jarzynski paper: what happens without resampling, how often, and by which scheme.

Weights that are never reset degenerate. Walkers that steer θ hide it, since θ is pulled towards what the heavy ones
want and their share shrinks again; walkers that only follow θ show it. So the runs without resampling carry a
second population that follows.

Every resampling moves the share of walkers in a mode at random, and nothing moves it back: learning then shifts z
to make up for it. This noise is what a scheme can keep small, and is also measured by itself, by resampling the
same weighted walkers many times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metastable.api import fit
from metastable.core.random import derive, generator
from metastable.core.resampling import resample_indices
from metastable.core.types import Walkers
from metastable.methods import Jarzynski
from metastable.walkers.population import principal_scores

from .base import Bench, Experiment, Row
from .gmm import Teacher, rates, student, teacher

MIDDLE = -2.0
"""Between the teacher's modes, which stand at −10 and 6 along the first axis."""


class Scheme(NamedTuple):
    """How rows are drawn, and how walkers are sorted before that."""

    draw: str
    order: str


SCHEMES = {
    "multinomial": Scheme("multinomial", "none"),
    "stratified": Scheme("stratified", "none"),
    "systematic": Scheme("systematic", "none"),
    "sorted": Scheme("systematic", "principal"),
}
"""The three of Appendix A.4, and systematic resampling of walkers sorted along their main axis."""


@dataclass
class Course:
    """One training: p_k and effective sample sizes, and the walkers it ended with."""

    data_mass: float
    steps: list[int] = field(default_factory=list)
    masses: list[float] = field(default_factory=list)
    ess: list[float] = field(default_factory=list)
    ess_held_out: list[float] = field(default_factory=list)
    walkers: Walkers | None = None

    @property
    def errors(self) -> NDArray[np.float64]:
        """p_k minus the share of data in the first mode."""
        return np.array(self.masses) - self.data_mass


def method_of(bench: Bench, scheme: Scheme | None, lag: int) -> Jarzynski:
    """Algorithm 1 with a fixed lag, or without resampling and then with as many walkers that only follow.

    ULA with a fixed step and no bound on the pace, as the paper has it and `Jarzynski` by default has not.
    """
    if scheme is None:
        return Jarzynski(
            walkers=2 * bench.walkers,
            held_out=0.5,
            populations=2,
            step_size=bench.step_size,
            resample="never",
            pace=None,
        )
    return Jarzynski(
        walkers=bench.walkers,
        held_out=0.0,
        step_size=bench.step_size,
        resample="lag",
        lag=lag,
        scheme=scheme.draw,
        order=scheme.order,
        pace=None,
    )


def train(bench: Bench, scheme: Scheme | None, lag: int, seed: int, source: Teacher) -> Course:
    """One training of a fresh student on the teacher's data."""
    model = student(bench.dim, seed)
    course = Course(source.first_mass)

    def watch(row: dict[str, Any]) -> None:
        course.steps.append(int(row["step"]))
        course.masses.append(model.first_mass())
        course.ess.append(row["ess"])
        course.ess_held_out.append(row.get("ess_held_out", float("nan")))

    run = fit(
        model,
        source.x,
        method_of(bench, scheme, lag),
        bench.steps,
        seed=seed,
        units="none",
        batch_size=None,
        optimiser=rates(bench.rate_means, bench.rate_z),
        log_every=bench.log_every,
        device=bench.device,
        evaluate=False,
        progress=watch,
    )
    course.walkers = run.walkers
    return course


def resampling_noise(x: Tensor, log_weight: Tensor, scheme: Scheme, draws: int, seed: int) -> float:
    """Root mean square change that one resampling makes to the mass left of `MIDDLE`, over `draws` of it.

    For multinomial draws this is √(p(1−p)/N) with the mass p; `x` is `(N, d)` and `log_weight` `(N,)`.
    """
    p = torch.softmax(log_weight.double(), 0)
    order = None
    if scheme.order == "principal":
        order = principal_scores(x[None], p[None]).argsort(-1).expand(draws, -1)
    rng = generator(derive(seed, "noise", *scheme), x.device)
    rows = resample_indices(log_weight.expand(draws, -1), scheme=scheme.draw, rng=rng, order=order)
    first = (x[:, 0] < MIDDLE).double()
    return float((first[rows].mean(1) - p @ first).square().mean().sqrt())


Grid = dict[tuple[str, int], list[Course]]


def body(bench: Bench) -> list[Row]:
    """Every scheme at every lag, and no resampling, on every repeat."""
    seeds = [derive(bench.seed, "repeat", r) % 2**31 for r in range(bench.repeats)]
    never: list[Course] = []
    grid: Grid = {(name, lag): [] for lag in bench.lags for name in SCHEMES}
    noise: dict[str, list[float]] = {name: [] for name in SCHEMES}
    for r, seed in enumerate(seeds):
        source = teacher(bench.data, bench.dim, -10.0, 6.0, 0.25, seed)
        never.append(train(bench, None, 1, seed, source))
        bench.say(f"never repeat {r}: p = {never[-1].masses[-1]:.4f} (data {source.first_mass:.4f})")
        for (name, lag), courses in grid.items():
            courses.append(train(bench, SCHEMES[name], lag, seed, source))
            bench.say(f"{name} every {lag} repeat {r}: p = {courses[-1].masses[-1]:.4f}")
        _measure_noise(bench, grid["systematic", bench.lags[1]][-1], noise, seed)
        for course in (never[-1], *(courses[-1] for courses in grid.values())):
            course.walkers = None  # kept, they would fill gigabytes at gpu scale
    _draw_9(bench, never)
    _draw_10(bench, grid)
    return [*_never_rows(bench, never), *_grid_rows(bench, grid), *_noise_rows(noise)]


def _measure_noise(bench: Bench, course: Course, noise: dict[str, list[float]], seed: int) -> None:
    """The noise of every scheme on the walkers of one course, whose last resampling lies some updates back."""
    assert course.walkers is not None
    x, log_weight = course.walkers.x, course.walkers.log_weight
    for name, scheme in SCHEMES.items():
        noise[name].append(resampling_noise(x, log_weight, scheme, bench.noise_draws, seed))


def mean_error(courses: Iterable[Course]) -> float:
    """How far the mean of the final p is from the mean mass of the data, sign included."""
    return float(np.mean([c.errors[-1] for c in courses]))


def absolute_error(courses: Iterable[Course]) -> float:
    """Mean of |p − mass of the data| at the end."""
    return float(np.mean([abs(c.errors[-1]) for c in courses]))


def spread(courses: Iterable[Course]) -> float:
    """Standard deviation of p − mass over repeats: its root mean square over the second half of training."""
    deviation = np.std([c.errors for c in courses], axis=0, ddof=1)
    return float(np.sqrt(np.mean(deviation[len(deviation) // 2 :] ** 2)))


def _never_rows(bench: Bench, never: list[Course]) -> list[Row]:
    return [
        Row("ess_final/never/held_out", _mean(c.ess_held_out[-1] for c in never), "<=", bench.ess_target),
        Row("ess_smallest/never/steering", _mean(min(c.ess) for c in never), "<=", bench.smallest_ess_target),
        Row("ess_final/never/steering", _mean(c.ess[-1] for c in never)),
        Row("mass_off/never", abs(mean_error(never)), ">=", bench.off_target),
    ]


def _grid_rows(bench: Bench, grid: Grid) -> list[Row]:
    often, well, rarely = bench.lags
    many = bench.repeats >= 6  # a ratio of two spreads says little with fewer
    relation, most = ("<=", 1.0) if many else (None, None)
    widest = spread(grid["multinomial", often])
    rows = [Row(f"mass_off/systematic/lag={rarely}", _off(grid, rarely), ">=", bench.rare_target)]
    for name in ("systematic", "sorted"):
        ratio = spread(grid[name, often]) / widest
        rows.append(Row(f"spread_over_multinomial/{name}/lag={often}", ratio, relation, most))
    for (name, lag), courses in grid.items():
        limit = ("<=", bench.mass_target) if (name, lag) == ("sorted", well) else (None, None)
        rows.append(Row(f"mass_error/{name}/lag={lag}", absolute_error(courses), *limit))
        rows.append(Row(f"mass_spread/{name}/lag={lag}", spread(courses)))
    return rows


def _off(grid: Grid, lag: int) -> float:
    return abs(mean_error(grid["systematic", lag]))


def _noise_rows(noise: dict[str, list[float]]) -> list[Row]:
    rms = {name: float(np.sqrt(np.mean(np.square(values)))) for name, values in noise.items()}
    rows = [Row(f"resampling_noise/{name}", value) for name, value in rms.items()]
    for name, most in (("stratified", 0.9), ("systematic", 0.9), ("sorted", 0.2)):
        rows.append(
            Row(f"resampling_noise_over_multinomial/{name}", rms[name] / rms["multinomial"], "<=", most)
        )
    return rows


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _draw_9(bench: Bench, never: list[Course]) -> None:
    """Figure 9: p_k and the effective sample size without resampling."""
    from metastable.report.figures import INK, new_figure, palette, save_figure

    figure = new_figure(8, 3.2)
    left, right = figure.subplots(1, 2)
    for i, course in enumerate(never):
        left.plot(course.steps, course.masses, color=palette.blue, lw=1)
        for ess, colour, label in (
            (course.ess, palette.blue, "walkers that steer"),
            (course.ess_held_out, palette.vermillion, "walkers that follow"),
        ):
            right.plot(course.steps, ess, color=colour, lw=1, label=label if i == 0 else None)
    left.axhline(0.25, color=INK, lw=0.8, ls="--")
    left.set(title="mass of the first mode", xlabel="update", ylim=(0, 0.52))
    right.set(title="effective sample size", xlabel="update", yscale="log")
    right.legend(fontsize=7)
    save_figure(figure, bench.folder / "figure-9.png")


def _draw_10(bench: Bench, grid: Grid) -> None:
    """Figure 10: p_k above (mean over repeats, each repeat thin), its standard error below."""
    from metastable.report.figures import INK, new_figure, palette, save_figure

    figure = new_figure(12, 5)
    axes = figure.subplots(2, len(SCHEMES), sharex=True, sharey="row")
    for name, (top, bottom) in zip(SCHEMES, axes.T, strict=True):
        for lag, colour in zip(bench.lags, palette, strict=False):
            _draw_course(top, bottom, grid[name, lag], colour, f"every {lag}")
        top.axhline(0.25, color=INK, lw=0.8, ls="--")
        top.set(title=name, ylim=(0, 0.62))
        bottom.set(xlabel="update", yscale="log")
    axes[0, 0].set_ylabel("mass of the first mode")
    axes[1, 0].set_ylabel("standard error")
    axes[0, -1].legend(fontsize=7)
    save_figure(figure, bench.folder / "figure-10.png")


def _draw_course(top: Any, bottom: Any, courses: list[Course], colour: str, label: str) -> None:
    masses = np.array([c.masses for c in courses])
    steps = courses[0].steps
    for mass in masses:
        top.plot(steps, mass, color=colour, lw=0.5, alpha=0.4)
    top.plot(steps, masses.mean(0), color=colour, lw=1.6, label=label)
    error = np.std([c.errors for c in courses], axis=0, ddof=1) / np.sqrt(len(courses))
    bottom.plot(steps, error, color=colour, lw=1.2)


PAPER = {"dim": 50, "step_size": 0.1, "rate_z": 0.125, "rate_means": 0.025, "lags": (1, 10, 200)}
"""Appendix B.1. It gives neither the lags nor the rates of Figures 9 and 10: the rates are those of Figure 6."""

EXPERIMENT = Experiment(
    name="jarzynski-resampling",
    title="Two modes in 50 dimensions: whether, when and how to resample (Fig. 9, 10)",
    paper="Carbone, Hua, Coste, Vanden-Eijnden, NeurIPS 2023, Appendices A.4 and B.1",
    scales={  # no number of steps is a multiple of the second lag: walkers then end with weights to resample
        "smoke": PAPER
        | {
            "data": 1000,
            "walkers": 1000,
            "steps": 305,
            "log_every": 5,
            "repeats": 3,
            "noise_draws": 100,
            "ess_target": 0.15,
            "smallest_ess_target": 0.2,
            "off_target": 0.02,
            "rare_target": 0.01,
            "mass_target": 0.12,
        },
        "cpu": PAPER
        | {
            "data": 10_000,
            "walkers": 10_000,
            "steps": 605,
            "log_every": 11,
            "repeats": 6,
            "noise_draws": 100,
            "ess_target": 0.05,
            "smallest_ess_target": 0.1,
            "off_target": 0.02,
            "rare_target": 0.01,
            "mass_target": 0.04,
        },
        "gpu": PAPER
        | {
            "data": 100_000,
            "walkers": 100_000,
            "steps": 2005,
            "log_every": 20,
            "repeats": 10,
            "noise_draws": 100,
            "ess_target": 0.02,
            "smallest_ess_target": 0.05,
            "off_target": 0.015,
            "rare_target": 0.005,
            "mass_target": 0.015,
        },
    },
    body=body,
)
