"""Figure 1 of the Jarzynski paper as published: Algorithm 2, PCD and CD on two modes in fifty dimensions.

Figure 6 (`jarzynski-gmm`) is Algorithm 1 with slow rates from means that are told apart at the start. Figure 1 has
N = n = 10⁵ walkers and data, of which N′ = 10⁴ walkers move in an update while the others are only reweighed, eight
times the rates (0.2 and 1), both means drawn from N(0, 0.01·I), and every walker steers: `held_out=0` and
`order="none"`. Each run may find the modes in either order; the first mode is the one at the smaller coordinate.

At these rates the means jump so far in the first updates, while nine walkers in ten stand still, that few walkers
carry the weight. Three remedies are tried beside it: sorted resampling, a bound on the pace, and Figure 6's rates.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from metastable.core.random import derive, generator
from metastable.methods import ContrastiveDivergence, Jarzynski, PersistentCD
from metastable.report.figures import draw_level, palette, picture

from .base import Bench, Experiment, Row
from .gmm import TwoModes, rates
from .jarzynski_gmm import courses, trials_of
from .trials import Arm, Trial, by_scale, draw_curves, last, mean

Found = dict[str, list[Trial]]
TEACHER = (-10.0, 6.0)
"""First coordinates of the data's means."""


def start(d: int, seed: int, spread: float = 0.1) -> TwoModes:
    """a₀ and b₀ from N(0, ε²I) with ε = 0.1, and z₀ = 0 (Section 4.1)."""
    means = spread * torch.randn((2, d), generator=generator(derive(seed, "student")))
    return TwoModes(means[0], means[1])


def arms(bench: Bench) -> list[Arm]:
    """Algorithm 2 as it is printed, and the other two with the same moves.

    PCD has the paper's "same parameters": as many walkers from the first model, as many of which move at once.
    CD learns ten times as fast, as in Appendix B.1.
    """
    chains = {"walkers": bench.walkers, "step_size": bench.step_size}
    fast = {"optimiser": rates(10 * bench.rate_means, 10 * bench.rate_z)}
    return [
        Arm("algorithm-2", printed(bench)),
        Arm("pcd", PersistentCD(**chains, batch=bench.batch, start_at="model")),
        Arm("cd", ContrastiveDivergence(**chains, steps=4), fast),
    ]


def printed(bench: Bench) -> Jarzynski:
    """Algorithm 2, all of whose walkers steer and weigh: lines 4 to 16."""
    return Jarzynski(
        walkers=bench.walkers,
        step_size=bench.step_size,
        batch=bench.batch,
        held_out=0.0,
        order="none",
        threshold=1 / 1.05,
        pace=None,
        gradient="all",
    )


def tried(bench: Bench) -> list[Arm]:
    """One change to Algorithm 2 each; the last one has the rates of Figure 6, and as many more updates."""
    slow = {"steps": 4 * bench.steps, "optimiser": rates(bench.rate_means / 8, bench.rate_z / 8)}
    return [
        Arm("sorted", replace(printed(bench), order="principal")),
        Arm("paced", replace(printed(bench), pace=0.03)),
        Arm("slow", printed(bench), slow),
    ]


def body(bench: Bench) -> list[Row]:
    """Every method on every run."""
    trials = trials_of(bench, arms(bench), start)
    found = trials.run(bench)
    other = replace(trials, arms=tried(bench), repeats=bench.tried).run(bench)
    draw(bench, found, other)
    return rows_of(bench, found, other)


def rows_of(bench: Bench, found: Found, other: Found) -> list[Row]:
    """Weights, means and KL of the average of all runs, with what the figure shows; then what was tried."""
    ours, pcd, cd = found.values()
    off = abs(last(ours, "estimated_kl") - last(ours, "kl"))
    collapsed = mean(min(p, 1 - p) <= 0.02 for p in last(pcd, "mass"))
    rows = [
        Row("mode_weight_error/slow", mean(last(other["slow"], "mass_error")), "<=", bench.mass_target),
        Row("mode_weight_error/algorithm-2", mean(last(ours, "mass_error")), paper=0.0),
        Row("runs_that_collapsed/pcd", collapsed, ">=", bench.collapse_target, 1.0),
        Row("mode_weight_error/cd", mean(last(cd, "mass_error")), ">=", 0.05, "biased"),
        Row("kl_error/algorithm-2", mean(off), paper=0.0),
    ]
    for name in ("sorted", "paced"):
        rows.append(Row(f"mode_weight_error/{name}", mean(last(other[name], "mass_error"))))
    for name, trials in (found | other).items():
        paper = {"algorithm-2": 0.25, "pcd": "0 or 1"}.get(name)
        places = [sorted((t.curves["a"][-1], t.curves["b"][-1])) for t in trials]
        errors = [max(abs(a - b) for a, b in zip(place, TEACHER, strict=True)) for place in places]
        rows += [
            Row(f"first_mass/{name}", mean(last(trials, "mass")), paper=paper),
            Row(f"means_error/{name}", mean(errors), paper=0.0),
            Row(f"kl_exact/{name}", mean(last(trials, "kl"))),
            Row(f"kl_smallest/{name}", mean(t.curves["kl"].min() for t in trials)),
        ]
    return [*rows, Row("worst_mode_weight_error/algorithm-2", max(last(ours, "mass_error")))]


def draw(bench: Bench, found: Found, other: Found) -> None:
    """Figure 1: weights, means and KL, each run a line; Algorithm 2's own estimate of KL is dotted."""
    with picture(bench.folder / "tried.png", 9, 3, columns=3, sharey=True) as axes:
        for axis, (name, trials) in zip(axes, other.items(), strict=True):
            draw_curves(axis, trials, "mass", palette.blue)
            draw_level(axis, 0.25)
            axis.set(title=f"mass of the first mode, {name}", xlabel="update", ylim=(-0.02, 1.02))
    with courses(bench.folder / "figure-1.png", found, lw=0.7, alpha=0.5) as (means, kl):
        draw_curves(kl, found["algorithm-2"][:1], "estimated_kl", "black", "estimated", lw=0.9, ls=":")
        for place in TEACHER:
            draw_level(means, place)


EXPERIMENT = Experiment(
    name="jarzynski-minibatch",
    title="Two modes in 50 dimensions by mini-batches of walkers: Algorithm 2, PCD and CD (Fig. 1)",
    paper="Carbone, Hua, Coste, Vanden-Eijnden, NeurIPS 2023, Section 4.1 and Appendix A.3",
    scales=by_scale(
        {"dim": 50, "step_size": 0.1, "rate_z": 1.0, "rate_means": 0.2},
        data=(1000, 10_000, 100_000),
        walkers=(1000, 10_000, 100_000),
        batch=(100, 1000, 10_000),
        steps=(100, 600, 600),
        repeats=(1, 5, 20),
        tried=(1, 2, 5),
        mass_target=(0.5, 0.15, 0.1),
        collapse_target=(0.0, 0.6, 0.6),
    ),
    body=body,
)
