"""Figures 9 and 10 of the Jarzynski paper: what happens without resampling, how often, and by which scheme.

Weights that are never reset degenerate. Walkers that steer θ hide it, since θ is pulled towards what the heavy ones
want and their share shrinks again; walkers that only follow θ show it. So the runs without resampling carry a
second population that follows.

Every resampling moves the share of walkers in a mode at random, and nothing moves it back: learning then shifts z
to make up for it. This noise is what a scheme can keep small, and is also measured by itself, by resampling the
same weighted walkers many times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metastable.core.random import derive, generator
from metastable.core.resampling import resample_indices
from metastable.methods import Jarzynski
from metastable.report.figures import draw_level, palette, picture
from metastable.runs.run import Run
from metastable.walkers.population import principal_scores

from .base import Bench, Experiment, Row
from .jarzynski_gmm import trials_of
from .trials import Arm, Problem, Trial, by_scale, draw_curves, last, mean

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


NEVER = "never"


def name_of(scheme: str, lag: int) -> str:
    """Of the arm that resamples by a scheme every `lag` updates."""
    return f"{scheme}/lag={lag}"


def arms(bench: Bench) -> list[Arm]:
    """Algorithm 1 without resampling, and then with as many walkers that only follow; and by a scheme, at a lag.

    ULA with a fixed step and no bound on the pace, as the paper has it and `Jarzynski` by default has not.
    """
    paper = {"step_size": bench.step_size, "pace": None}
    followed = {"walkers": 2 * bench.walkers, "held_out": 0.5, "populations": 2}
    compared = [Arm(NEVER, Jarzynski(**followed, **paper, resample="never"))]
    alone = {"walkers": bench.walkers, "held_out": 0.0, "resample": "lag"}
    for lag in bench.lags:
        for name, (scheme, order) in SCHEMES.items():
            method = Jarzynski(**alone, **paper, lag=lag, scheme=scheme, order=order)
            compared.append(Arm(name_of(name, lag), method))
    return compared


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


Found = dict[str, list[Trial]]


def body(bench: Bench) -> list[Row]:
    """Every scheme at every lag, and no resampling, on every repeat."""
    measured = name_of("systematic", bench.lags[1])  # whose last resampling lies some updates back

    def keep(trial: Trial, at: Problem, run: Run) -> dict[str, float] | None:
        if trial.arm.name != measured:
            return None
        assert run.walkers is not None
        x, A = run.walkers.x, run.walkers.log_weight
        return {n: resampling_noise(x, A, s, bench.noise_draws, trial.seed) for n, s in SCHEMES.items()}

    def watch(at: Problem, line: Any) -> dict[str, float]:
        mass = at.model.first_mass()
        return {"mass": mass, "error": mass - at.truth.first_mass}

    found = trials_of(bench, arms(bench), log_every=bench.log_every, watch=watch, keep=keep).run(bench)
    noise = {name: [trial.kept[name] for trial in found[measured]] for name in SCHEMES}
    never = found.pop(NEVER)
    _draw_9(bench, never)
    _draw_10(bench, found)
    return _rows(bench, never, found, noise)


def spread(trials: list[Trial]) -> float:
    """Standard deviation of p − mass over repeats: its root mean square over the second half of training."""
    deviation = deviations(trials)
    return float(np.sqrt(np.mean(deviation[len(deviation) // 2 :] ** 2)))


def deviations(trials: list[Trial]) -> NDArray[np.float64]:
    """Standard deviation of p − mass over repeats, at each line of the log."""
    return np.std([trial.curves["error"] for trial in trials], axis=0, ddof=1)


def off(trials: list[Trial]) -> float:
    """How far the mean of the final p is from the mean mass of the data."""
    return abs(mean(last(trials, "error")))


def _rows(bench: Bench, never: list[Trial], found: Found, noise: dict[str, list[float]]) -> list[Row]:
    """Without resampling; by every scheme at every lag; and what one resampling changes."""
    smallest = mean(trial.curves["ess"].min() for trial in never)
    often, well, rarely = bench.lags
    many = bench.repeats >= 6  # a ratio of two spreads says little with fewer
    relation, most = ("<=", 1.0) if many else (None, None)
    widest = spread(found[name_of("multinomial", often)])
    rare = name_of("systematic", rarely)
    rows = [
        Row("ess_final/never/held_out", mean(last(never, "ess_held_out")), "<=", bench.ess_target),
        Row("ess_smallest/never/steering", smallest, "<=", bench.smallest_ess_target),
        Row("ess_final/never/steering", mean(last(never, "ess"))),
        Row("mass_off/never", off(never), ">=", bench.off_target),
        Row(f"mass_off/{rare}", off(found[rare]), ">=", bench.rare_target),
    ]
    for name in (name_of("systematic", often), name_of("sorted", often)):
        rows.append(Row(f"spread_over_multinomial/{name}", spread(found[name]) / widest, relation, most))
    for name, trials in found.items():
        limit = ("<=", bench.mass_target) if name == name_of("sorted", well) else (None, None)
        rows.append(Row(f"mass_error/{name}", mean(abs(last(trials, "error"))), *limit))
        rows.append(Row(f"mass_spread/{name}", spread(trials)))
    rms = {name: float(np.sqrt(np.mean(np.square(values)))) for name, values in noise.items()}
    rows += [Row(f"resampling_noise/{name}", value) for name, value in rms.items()]
    for name, limit in (("stratified", 0.9), ("systematic", 0.9), ("sorted", 0.2)):
        ratio = rms[name] / rms["multinomial"]
        rows.append(Row(f"resampling_noise_over_multinomial/{name}", ratio, "<=", limit))
    return rows


def _draw_9(bench: Bench, never: list[Trial]) -> None:
    """Figure 9: p_k and the effective sample size without resampling."""
    with picture(bench.folder / "figure-9.png", 8, 3.2, columns=2) as (left, right):
        draw_curves(left, never, "mass", palette.blue)
        draw_curves(right, never, "ess", palette.blue, "walkers that steer")
        draw_curves(right, never, "ess_held_out", palette.vermillion, "walkers that follow")
        draw_level(left, 0.25)
        left.set(title="mass of the first mode", xlabel="update", ylim=(0, 0.52))
        right.set(title="effective sample size", xlabel="update", yscale="log")
        right.legend(fontsize=7)


def _draw_10(bench: Bench, found: Found) -> None:
    """Figure 10: p_k above (mean over repeats, each repeat thin), its standard error below."""
    with picture(bench.folder / "figure-10.png", 12, 5, 2, len(SCHEMES), sharex=True, sharey="row") as axes:
        for scheme, (top, bottom) in zip(SCHEMES, axes.T, strict=True):
            for lag, colour in zip(bench.lags, palette, strict=False):
                trials = found[name_of(scheme, lag)]
                steps, masses = trials[0].curves["step"], [trial.curves["mass"] for trial in trials]
                draw_curves(top, trials, "mass", colour, lw=0.5, alpha=0.4)
                top.plot(steps, np.mean(masses, 0), color=colour, lw=1.6, label=f"every {lag}")
                bottom.plot(steps, deviations(trials) / np.sqrt(len(trials)), color=colour, lw=1.2)
            draw_level(top, 0.25)
            top.set(title=scheme, ylim=(0, 0.62))
            bottom.set(xlabel="update", yscale="log")
        axes[0, 0].set_ylabel("mass of the first mode")
        axes[1, 0].set_ylabel("standard error")
        axes[0, -1].legend(fontsize=7)


PAPER = {"dim": 50, "step_size": 0.1, "rate_z": 0.125, "rate_means": 0.025, "lags": (1, 10, 200)}
"""Appendix B.1. It gives neither the lags nor the rates of Figures 9 and 10: the rates are those of Figure 6."""

EXPERIMENT = Experiment(
    name="jarzynski-resampling",
    title="Two modes in 50 dimensions: whether, when and how to resample (Fig. 9, 10)",
    paper="Carbone, Hua, Coste, Vanden-Eijnden, NeurIPS 2023, Appendices A.4 and B.1",
    scales=by_scale(
        PAPER | {"noise_draws": 100},
        data=(1000, 10_000, 100_000),
        walkers=(1000, 10_000, 100_000),
        steps=(305, 605, 2005),  # no multiple of the second lag: walkers then end with weights to resample
        log_every=(5, 11, 20),
        repeats=(3, 6, 6),
        ess_target=(0.15, 0.05, 0.02),
        smallest_ess_target=(0.2, 0.1, 0.05),
        off_target=(0.02, 0.02, 0.015),
        rare_target=(0.01, 0.01, 0.005),
        mass_target=(0.12, 0.04, 0.015),
    ),
    body=body,
)
