"""Algorithm 1 of the Jarzynski paper exactly as printed, beside ours: what held-out walkers and sorting buy.

The paper lets every walker steer θ, reads log Z from those same walkers and resamples them in the order in which
they stand. `Jarzynski` by default holds half of them out, reads log Z there, and sorts before resampling. Here the
settings are those of Appendix B.1 (Figures 6 and 7) for every threshold 1/(1 + c), five runs each: as printed,
sorted only, and with as many held-out walkers beside those that steer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from metastable.methods import Jarzynski
from metastable.report.figures import draw_level, palette, picture

from .base import Bench, Experiment, Row
from .jarzynski_gmm import trials_of
from .trials import Arm, Trial, by_scale, draw_curves, last, mean

KINDS = {
    "printed": {"held_out": 0.0, "order": "none"},
    "sorted": {"held_out": 0.0, "order": "principal"},
    "held-out": {"held_out": 0.5, "order": "principal"},
}
"""Of Algorithm 1: the paper's, with sorted resampling, and with walkers that only follow as well."""


def name_of(kind: str, c: float) -> str:
    """Of the arm."""
    return f"{kind}/c={c:g}"


def arms(bench: Bench) -> list[Arm]:
    """Every kind at every c; as many walkers steer in each."""
    compared = []
    for c in bench.sweep:
        for kind in KINDS:
            if kind == "printed" or c in bench.beside:
                held = KINDS[kind]["held_out"] > 0
                method = Jarzynski(
                    walkers=(2 if held else 1) * bench.walkers,
                    step_size=bench.step_size,
                    threshold=1 / (1 + c),
                    pace=None,
                    **KINDS[kind],
                )
                compared.append(Arm(name_of(kind, c), method, about=kind))
    return compared


def body(bench: Bench) -> list[Row]:
    """Every arm on every run."""
    found = trials_of(bench, arms(bench), keep=lambda trial, at, run: run.log_partition.value).run(bench)
    draw(bench, found)
    return rows_of(bench, found)


def log_z_errors(trials: list[Trial]) -> list[float]:
    """log Z as the run gives it, minus the exact one."""
    return [t.kept - z for t, z in zip(trials, last(trials, "exact_log_z"), strict=True)]


def rows_of(bench: Bench, found: dict[str, list[Trial]]) -> list[Row]:
    """Errors of p and log Z, their means over runs and over all c, and what each addition is worth."""

    def pooled(kind: str, measure: Callable[[list[Trial]], list[float]]) -> float:
        """The mean of a measure over every run of a kind, at the c that all kinds have."""
        return mean(x for c in bench.beside for x in measure(found[name_of(kind, c)]))

    def weight(trials: list[Trial]) -> list[float]:
        return last(trials, "mass_error").tolist()

    error = {kind: pooled(kind, weight) for kind in KINDS}
    bias = {kind: pooled(kind, log_z_errors) for kind in KINDS}
    rows = [
        Row("mode_weight_error/held-out", error["held-out"], "<=", bench.mass_target),
        Row("log_z_bias/printed", bias["printed"], "<=", bench.bias_target),
        Row("log_z_bias/held-out", abs(bias["held-out"]), "<=", bench.log_z_target),
        Row("mode_weight_error/printed", error["printed"], paper=0.0),
        Row("mode_weight_error/sorted", error["sorted"]),
        Row("log_z_bias/sorted", bias["sorted"]),
    ]
    for name, trials in found.items():
        rows += [
            Row(f"first_mass/{name}", mean(last(trials, "mass")), paper=0.25),
            Row(f"first_mass_std/{name}", float(np.std(last(trials, "mass"), ddof=1))),
            Row(f"mode_weight_error/{name}", mean(weight(trials))),
            Row(f"log_z_error/{name}", mean(abs(x) for x in log_z_errors(trials))),
            Row(f"kl_exact/{name}", mean(last(trials, "kl"))),
        ]
    return rows


def draw(bench: Bench, found: dict[str, list[Trial]]) -> None:
    """p for each kind, and by how much log Z is wrong on the way, at the first c that all kinds have."""
    c = bench.beside[0]
    with picture(bench.folder / "published.png", 9, 3.3, columns=2) as (mass, log_z):
        for kind, colour in zip(KINDS, palette, strict=False):
            trials = found[name_of(kind, c)]
            draw_curves(mass, trials, "mass", colour, kind)
            for trial in trials:
                off = trial.curves["log_z"] - trial.curves["exact_log_z"]
                log_z.plot(trial.curves["step"], off, color=colour, lw=1)
        draw_level(mass, 0.25)
        draw_level(log_z, 0.0)
        mass.set(title=f"mass of the first mode, c = {c:g}", xlabel="update", ylim=(-0.02, 1.02))
        log_z.set(title="log Z of the walkers minus the exact one", xlabel="update")
        mass.legend(fontsize=7)


EXPERIMENT = Experiment(
    name="jarzynski-published",
    title="Algorithm 1 as printed, sorted, and with held-out walkers, for every threshold (Fig. 6, 7)",
    paper="Carbone, Hua, Coste, Vanden-Eijnden, NeurIPS 2023, Appendix B.1",
    scales=by_scale(
        {"dim": 50, "step_size": 0.1, "rate_z": 0.125, "rate_means": 0.025},
        data=(1000, 10_000, 10_000),
        walkers=(1000, 10_000, 10_000),
        steps=(250, 2000, 8000),
        repeats=(2, 5, 5),
        sweep=((0.1,), (0.1, 1.0), (0.1, 0.2, 0.4, 0.8, 1.0)),
        beside=((0.1,), (0.1, 1.0), (0.1,)),
        mass_target=(0.3, 0.05, 0.05),
        bias_target=(0.0, -0.05, -0.05),
        log_z_target=(2.0, 0.3, 0.3),
    ),
    body=body,
)
