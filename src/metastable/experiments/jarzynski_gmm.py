"""Figures 1, 6 and 7 of the Jarzynski paper: who learns the weights of two modes in fifty dimensions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from metastable.api import fit
from metastable.core.random import derive
from metastable.core.types import LogPartition
from metastable.methods import ContrastiveDivergence, Jarzynski, Method, PersistentCD

from .base import Bench, Experiment, Row
from .gmm import Teacher, TwoModes, kl_from_teacher, rates, student, teacher

METHODS = ("jarzynski", "pcd", "cd")


@dataclass
class Course:
    """One training: what it ended with and how it got there."""

    first_mass: float
    mass_error: float
    kl: float
    log_z_error: float = float("nan")
    log_z_se: float = float("nan")
    steps: list[int] = field(default_factory=list)
    masses: list[float] = field(default_factory=list)
    means: list[tuple[float, float]] = field(default_factory=list)
    kls: list[float] = field(default_factory=list)
    estimated_kls: list[float] = field(default_factory=list)
    ess: list[float] = field(default_factory=list)


def method_of(bench: Bench, name: str, threshold: float) -> Method:
    """The three algorithms under the settings of Appendix B.1.

    Moves and learning rate are the paper's, which `Jarzynski` by default has not: ULA with a fixed step, and no
    bound on the pace.
    """
    if name == "pcd":
        return PersistentCD(walkers=bench.walkers, step_size=bench.step_size)
    if name == "cd":
        return ContrastiveDivergence(walkers=bench.walkers, step_size=bench.step_size, steps=4)
    return Jarzynski(
        walkers=2 * bench.walkers,
        held_out=0.5,
        step_size=bench.step_size,
        threshold=threshold,
        pace=None,
    )


def train(
    bench: Bench, name: str, seed: int, source: Teacher, threshold: float, steps: int | None = None
) -> Course:
    """One training of a fresh student on the teacher's data."""
    model = student(bench.dim, seed)
    course = Course(0, 0, 0)

    def watch(row: dict[str, Any]) -> None:
        course.steps.append(int(row["step"]))
        course.masses.append(model.first_mass())
        course.means.append(tuple(model.means.detach()[:, 0].tolist()))
        exact = float(model.log_partition())
        course.kls.append(kl_from_teacher(source, model, exact))
        course.estimated_kls.append(course.kls[-1] + row.get("log_z", float("nan")) - exact)
        course.ess.append(row.get("ess", float("nan")))

    factor = 10 if name == "cd" else 1
    run = fit(
        model,
        source.x,
        method_of(bench, name, threshold),
        steps or bench.steps,
        seed=seed,
        units="none",
        batch_size=None,
        optimiser=rates(factor * bench.rate_means, factor * bench.rate_z),
        log_every=max(1, bench.steps // 100),
        device=bench.device,
        evaluate=False,
        progress=watch,
    )
    return _finish(course, model, source, run.log_partition)


def _finish(course: Course, model: TwoModes, source: Teacher, z: LogPartition | None) -> Course:
    course.first_mass = model.first_mass()
    course.mass_error = abs(course.first_mass - source.first_mass)
    course.kl = course.kls[-1]
    if z is not None:
        course.log_z_error = z.value - float(model.log_partition())
        course.log_z_se = z.std_error
    return course


def body(bench: Bench) -> list[Row]:
    """Train every method on every repeat, then sweep the threshold on the first."""
    seeds = [derive(bench.seed, "repeat", r) % 2**31 for r in range(bench.repeats)]
    teachers = [teacher(bench.data, bench.dim, -10.0, 6.0, 0.25, seed) for seed in seeds]
    courses: dict[str, list[Course]] = {}
    for name in METHODS:
        courses[name] = []
        for r, (seed, source) in enumerate(zip(seeds, teachers, strict=True)):
            course = train(bench, name, seed, source, bench.threshold)
            courses[name].append(course)
            bench.say(f"{name} repeat {r}: p = {course.first_mass:.4f} (data {source.first_mass:.4f})")
    sweep = {}
    for c in bench.sweep:
        sweep[c] = train(bench, "jarzynski", seeds[0], teachers[0], 1 / (1 + c), bench.sweep_steps)
        bench.say(f"threshold c = {c}: p = {sweep[c].first_mass:.4f}")
    _draw(bench, courses, sweep)
    return [*_rows(bench, courses), *_sweep_rows(sweep)]


def _rows(bench: Bench, courses: dict[str, list[Course]]) -> list[Row]:
    jar, pcd, cd = (courses[name] for name in METHODS)
    strict = bench.scale != "smoke"
    z = [abs(c.log_z_error) / c.log_z_se for c in jar]
    rows = [
        Row("mode_weight_error/jarzynski", _mean(c.mass_error for c in jar), "<=", bench.mass_target),
        Row("smaller_mass/pcd", max(min(c.first_mass, 1 - c.first_mass) for c in pcd), "<=", 0.02, 0.0),
        Row("mode_weight_error/cd", min(c.mass_error for c in cd), ">=", 0.05),
        Row("log_z_error/jarzynski", max(abs(c.log_z_error) for c in jar), "<=", bench.log_z_target),
        Row("log_z_error_in_std_errors/jarzynski", max(z), "<=", 3.0 if strict else 5.0),
        Row(
            "kl_error/jarzynski",
            max(abs(c.estimated_kls[-1] - c.kl) for c in jar),
            "<=",
            bench.log_z_target,
        ),
    ]
    for name in METHODS:
        mass = _mean(c.first_mass for c in courses[name])
        rows.append(Row(f"first_mass/{name}", mass, paper={"jarzynski": 0.25, "pcd": 0.0}.get(name)))
        rows.append(Row(f"kl_exact/{name}", _mean(c.kl for c in courses[name])))
    rows.append(Row("log_z_std_error/jarzynski", _mean(c.log_z_se for c in jar)))
    return rows


def _sweep_rows(sweep: dict[float, Course]) -> list[Row]:
    return [Row(f"mode_weight_error/jarzynski/c={c}", course.mass_error) for c, course in sweep.items()]


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


def _positive(values: list[float]) -> np.ndarray:
    """Values for a logarithmic axis: an estimate below zero is within its error of zero and leaves a gap."""
    array = np.asarray(values, dtype=float)
    return np.where(array > 0, array, np.nan)


def _draw(bench: Bench, courses: dict[str, list[Course]], sweep: dict[float, Course]) -> None:
    """Figure 6 (weights, means, KL of the three methods) and Figure 7 (ESS for each threshold)."""
    from metastable.report.figures import new_figure, palette, save_figure

    figure = new_figure(11, 3.3)
    axes = figure.subplots(1, 3)
    for name, colour in zip(METHODS, palette, strict=False):
        for i, course in enumerate(courses[name]):
            style = {"color": colour, "lw": 1.2, "alpha": 0.8, "label": name if i == 0 else None}
            axes[0].plot(course.steps, course.masses, **style)
            axes[1].plot(course.steps, [m[0] for m in course.means], **style)
            axes[1].plot(course.steps, [m[1] for m in course.means], color=colour, lw=1.2, alpha=0.8)
            axes[2].plot(course.steps, _positive(course.kls), **style)
            if name == "jarzynski":
                label = "jarzynski, estimated" if i == 0 else None
                axes[2].plot(
                    course.steps, _positive(course.estimated_kls), color="black", lw=0.8, ls=":", label=label
                )
    axes[0].axhline(0.25, color="black", lw=0.8, ls="--")
    axes[0].set(title="mass of the first mode", xlabel="update", ylim=(-0.02, 1.02))
    axes[1].set(title="first coordinate of the means", xlabel="update")
    axes[2].set(title="KL(data ‖ model)", xlabel="update", yscale="log")
    axes[2].legend(fontsize=7)
    save_figure(figure, bench.folder / "figure-6.png")
    if sweep:
        figure = new_figure(8, 3.3)
        axes = figure.subplots(1, 2)
        for (c, course), colour in zip(sweep.items(), palette, strict=False):
            axes[0].plot(course.steps, course.ess, color=colour, lw=1.2, label=f"c = {c}")
            axes[1].plot(course.steps, course.masses, color=colour, lw=1.2, label=f"c = {c}")
        axes[0].set(title="effective sample size", xlabel="update", ylim=(0, 1.02))
        axes[1].axhline(0.25, color="black", lw=0.8, ls="--")
        axes[1].set(title="mass of the first mode", xlabel="update")
        axes[0].legend(fontsize=7)
        save_figure(figure, bench.folder / "figure-7.png")


PAPER = {"step_size": 0.1, "rate_z": 0.125, "rate_means": 0.025, "threshold": 0.95}

EXPERIMENT = Experiment(
    name="jarzynski-gmm",
    title="Two modes in 50 dimensions: Jarzynski, PCD and CD (Fig. 1, 6, 7)",
    paper="Carbone, Hua, Coste, Vanden-Eijnden, NeurIPS 2023, Section 4.1 and Appendix B.1",
    scales={
        "smoke": PAPER
        | {
            "dim": 50,
            "data": 4000,
            "walkers": 4000,
            "steps": 900,
            "repeats": 1,
            "sweep": (),
            "mass_target": 0.08,
            "log_z_target": 0.6,
        },
        "cpu": PAPER
        | {
            "dim": 50,
            "data": 10_000,
            "walkers": 10_000,
            "steps": 2000,
            "repeats": 5,
            "sweep": (0.1, 0.2, 0.4, 0.8, 1.0),
            "sweep_steps": 2000,
            "mass_target": 0.03,
            "log_z_target": 0.15,
        },
        "gpu": PAPER
        | {
            "dim": 50,
            "data": 100_000,
            "walkers": 100_000,
            "steps": 4000,
            "repeats": 3,
            "sweep": (0.1, 0.4, 1.0),
            "sweep_steps": 2000,
            "mass_target": 0.02,
            "log_z_target": 0.1,
        },
    },
    body=body,
)
