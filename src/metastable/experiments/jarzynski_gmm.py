"""Figures 1, 6 and 7 of the Jarzynski paper: who learns the weights of two modes in fifty dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from metastable.core.types import LogPartition
from metastable.methods import ContrastiveDivergence, Jarzynski, PersistentCD
from metastable.report.figures import draw_level, palette, picture
from metastable.runs.run import Run

from .base import Bench, Experiment, Row
from .gmm import kl_from_teacher, rates, student, teacher
from .trials import Arm, Line, Problem, Trial, Trials, by_scale, draw_curves, last, mean

Found = dict[str, list[Trial]]


def jarzynski(bench: Bench, name: str, threshold: float, **settings: int) -> Arm:
    """Algorithm 1, half of whose walkers only follow.

    Moves and learning rate are the paper's, which `Jarzynski` by default has not: ULA with a fixed step, and no
    bound on the pace.
    """
    walkers = {"walkers": 2 * bench.walkers, "held_out": 0.5, "step_size": bench.step_size}
    return Arm(name, Jarzynski(**walkers, threshold=threshold, pace=None), settings)


def arms(bench: Bench) -> list[Arm]:
    """The three algorithms under the settings of Appendix B.1: CD learns ten times as fast."""
    chains = {"walkers": bench.walkers, "step_size": bench.step_size}
    fast = {"optimiser": rates(10 * bench.rate_means, 10 * bench.rate_z)}
    return [
        jarzynski(bench, "jarzynski", bench.threshold),
        Arm("pcd", PersistentCD(**chains)),
        Arm("cd", ContrastiveDivergence(**chains, steps=4), fast),
    ]


def watch(at: Problem, line: Line) -> Line:
    """p and its error, the means along the first axis, and KL: exact, and with log Z as the walkers have it."""
    mass, exact = at.model.first_mass(), float(at.model.log_partition())
    a, b = at.model.means.detach()[:, 0].tolist()
    kl = kl_from_teacher(at.truth, at.model, exact)
    estimated = kl + line.get("log_z", math.nan) - exact
    known = {"mass": mass, "mass_error": abs(mass - at.truth.first_mass), "a": a, "b": b}
    return known | {"kl": kl, "estimated_kl": estimated, "exact_log_z": exact}


def trials_of(
    bench: Bench,
    compared: list[Arm],
    begin: Callable[[int, int], Any] = student,
    log_every: int | None = None,
    **options: Any,
) -> Trials:
    """Every arm on every repeat: modes at −10 and 6, 0.25 of the mass in the first. Fifty lines by default."""

    def problem(arm: Arm, seed: int) -> Problem:
        source = teacher(bench.data, bench.dim, -10.0, 6.0, 0.25, seed)
        return Problem(begin(bench.dim, seed), source.x, source)

    settings = {
        "steps": bench.steps,
        "batch_size": None,
        "optimiser": rates(bench.rate_means, bench.rate_z),
        "log_every": log_every or max(1, bench.steps // 50),
    }
    options = {"watch": watch, "words": lambda trial: f"p = {trial.curves['mass'][-1]:.4f}"} | options
    return Trials(compared, problem, settings, bench.repeats, **options)


def body(bench: Bench) -> list[Row]:
    """Every method on every repeat, then thresholds 1/(1 + c) on the first."""

    def keep(trial: Trial, at: Problem, run: Run) -> LogPartition | None:
        return run.log_partition and replace(run.log_partition, walkers=None)

    every = max(1, bench.steps // 100)
    trials = trials_of(bench, arms(bench), log_every=every, keep=keep, records=(LogPartition,))
    found = trials.run(bench)
    sweep = [jarzynski(bench, f"c={c}", 1 / (1 + c), steps=bench.sweep_steps) for c in bench.sweep]
    swept = replace(trials, arms=sweep, repeats=1).run(bench)
    draw_6(bench, found)
    if swept:
        draw_7(bench, swept)
    errors = {f"mode_weight_error/jarzynski/{c}": last(own, "mass_error") for c, own in swept.items()}
    return [*rows_of(bench, found), *(Row(metric, float(error[0])) for metric, error in errors.items())]


def rows_of(bench: Bench, found: Found) -> list[Row]:
    """Errors of the weights, of log Z and of the KL divergence."""
    jar, pcd, cd = found.values()
    off = [abs(t.kept.value - z) for t, z in zip(jar, last(jar, "exact_log_z"), strict=True)]
    errors = [error / t.kept.std_error for t, error in zip(jar, off, strict=True)]
    smaller = max(min(p, 1 - p) for p in last(pcd, "mass"))
    kl_off = abs(last(jar, "estimated_kl") - last(jar, "kl"))
    rows = [
        Row("mode_weight_error/jarzynski", mean(last(jar, "mass_error")), "<=", bench.mass_target),
        Row("smaller_mass/pcd", smaller, "<=", 0.02, 0.0),
        Row("mode_weight_error/cd", min(last(cd, "mass_error")), ">=", 0.05),
        Row("log_z_error/jarzynski", max(off), "<=", bench.log_z_target),
        Row("log_z_error_in_std_errors/jarzynski", max(errors), "<=", bench.z_target),
        Row("kl_error/jarzynski", max(kl_off), "<=", bench.log_z_target),
    ]
    for (name, trials), paper in zip(found.items(), (0.25, 0.0, None), strict=True):
        rows.append(Row(f"first_mass/{name}", mean(last(trials, "mass")), paper=paper))
        rows.append(Row(f"kl_exact/{name}", mean(last(trials, "kl"))))
    return [*rows, Row("log_z_std_error/jarzynski", mean(t.kept.std_error for t in jar))]


@contextmanager
def courses(path: Path, found: Found, **look: Any) -> Iterator[tuple[Any, Any]]:
    """Weights, means and KL of all methods; the axes of means and of KL, for what a figure has more."""
    with picture(path, 11, 3.3, columns=3) as (mass, means, kl):
        for (name, trials), colour in zip(found.items(), palette, strict=False):
            draw_curves(mass, trials, "mass", colour, **look)
            draw_curves(means, trials, "a", colour, **look)
            draw_curves(means, trials, "b", colour, **look)
            draw_curves(kl, trials, "kl", colour, name, **look)
        yield means, kl
        draw_level(mass, 0.25)
        mass.set(title="mass of the first mode", xlabel="update", ylim=(-0.02, 1.02))
        means.set(title="first coordinate of the means", xlabel="update")
        kl.set(title="KL(data ‖ model)", xlabel="update")
        kl.set_yscale("log", nonpositive="mask")  # an estimate below 0 is within its error of it
        kl.legend(fontsize=7)


def draw_6(bench: Bench, found: Found) -> None:
    """Figure 6: the three methods, and Jarzynski's own estimate of KL, which is dotted."""
    with courses(bench.folder / "figure-6.png", found) as (_, kl):
        estimated = {"label": "jarzynski, estimated", "lw": 0.8, "ls": ":"}
        draw_curves(kl, found["jarzynski"], "estimated_kl", "black", **estimated)


def draw_7(bench: Bench, swept: Found) -> None:
    """Figure 7: effective sample size for each threshold."""
    with picture(bench.folder / "figure-7.png", 8, 3.3, columns=2) as (ess, mass):
        for (c, trials), colour in zip(swept.items(), palette, strict=False):
            draw_curves(ess, trials, "ess", colour, c.replace("=", " = "))
            draw_curves(mass, trials, "mass", colour)
        draw_level(mass, 0.25)
        ess.set(title="effective sample size", xlabel="update", ylim=(0, 1.02))
        mass.set(title="mass of the first mode", xlabel="update")
        ess.legend(fontsize=7)


EXPERIMENT = Experiment(
    name="jarzynski-gmm",
    title="Two modes in 50 dimensions: Jarzynski, PCD and CD (Fig. 1, 6, 7)",
    paper="Carbone, Hua, Coste, Vanden-Eijnden, NeurIPS 2023, Section 4.1 and Appendix B.1",
    scales=by_scale(
        {"dim": 50, "step_size": 0.1, "rate_z": 0.125, "rate_means": 0.025, "threshold": 0.95},
        data=(4000, 10_000, 100_000),
        walkers=(4000, 10_000, 100_000),
        steps=(900, 2000, 4000),
        repeats=(1, 5, 3),
        sweep=((), (0.1, 0.2, 0.4, 0.8, 1.0), (0.1, 0.4, 1.0)),
        sweep_steps=(0, 2000, 2000),
        mass_target=(0.08, 0.03, 0.02),
        log_z_target=(0.6, 0.15, 0.1),
        z_target=(5.0, 3.0, 3.0),
    ),
    body=body,
)
