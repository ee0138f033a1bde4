"""Table 5.2 of the AdaNCE thesis where the truth is known: quality and Var(log g) against the adaptive interval K.

The thesis trains CIFAR-10 with K from 1 to 50 and sees Inception scores fall; it explains that with the variance of
the density ratio g between the model and its frozen copy (Section 5.3). On a set in two dimensions with a known
density both can be measured: KL(data ‖ model) by quadrature, and Var(log g) over the negatives. PCD with the same
chains and random numbers is trained beside K = 1, which must be the same algorithm (Section 3.3): Adam does not see
the factor ½ that lies between the two. What is left between them is rounding, which chains amplify.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from metastable.core.random import derive
from metastable.data.toy import ToySet, toy_set
from metastable.evaluation.quadrature import grid_density, kl_on_grid
from metastable.kernels import MALA
from metastable.methods import AdaptiveNCE, PersistentCD
from metastable.report.figures import MUTED, draw_level, palette, picture
from metastable.runs.run import Run

from .base import Bench, Experiment, Row
from .trials import Arm, Problem, Trial, Trials, by_adam, by_scale, mean

BOX = [(-5.0, 5.0), (-5.0, 5.0)]
POINTS = 301
PUBLISHED = {1: (4.03, 147.82), 5: (3.74, 157.17), 10: (3.57, 165.42), 20: (3.45, 214.12), 50: (2.61, 310.54)}
"""Table 5.2: Inception score and FID on CIFAR-10 for each K."""
PCD = "PCD"


class Learned(NamedTuple):
    """KL and density at the end, and the mean of Var(log g) over updates after the first tenth."""

    kl: float
    var_log_g: float
    var_log_g_data: float
    density: Tensor  # on the grid of the figure


Found = dict[str, list[Learned]]


def name_of(interval: int) -> str:
    """Of the arm."""
    return f"K = {interval}"


def arms(bench: Bench) -> list[Arm]:
    """PCD, and self-adapting NCE with the same chains at each interval."""
    chains = PersistentCD(
        walkers=bench.walkers,
        kernel=MALA(bench.step_size),
        steps=bench.langevin,
        rejuvenation=bench.rejuvenation,
    )
    adapting = [Arm(name_of(K), AdaptiveNCE(chains, interval=K)) for K in bench.intervals]
    return [Arm(PCD, chains), *adapting]


def body(bench: Bench) -> list[Row]:
    """Every interval, and PCD, from every seed."""
    toy = toy_set(bench.toy)
    data = toy.sample(bench.rows, seed=derive(bench.seed, "data") % 2**31)
    truth: Any = toy.log_density

    def keep(trial: Trial, at: Problem, run: Run) -> Learned:
        late = slice(len(trial.curves) // 10, None)
        var, on_data = (mean(trial.curves[name][late]) for name in ("var_log_g", "var_log_g_data"))
        energy: Any = run.energy
        return Learned(kl_on_grid(truth, energy, BOX, POINTS), var, on_data, shown(energy))

    trials = Trials(
        arms(bench),
        lambda arm, seed: Problem({"name": "mlp", "hidden": bench.hidden}, data),
        by_adam(bench, bench.walkers),
        bench.repeats,
        keep=keep,
        words=lambda t: f"KL {t.kept.kl:.4f}, Var(log g) {t.kept.var_log_g:.3g}",
        records=(Learned,),
    )
    found = {name: [trial.kept for trial in own] for name, own in trials.run(bench).items()}
    _draw(bench, found)
    _draw_densities(bench, toy, found)
    return _rows(bench, found)


def shown(energy: Any) -> Tensor:
    """Its density on a grid of 151² points."""
    return grid_density(energy, [(-4.0, 4.0)] * 2, 151).density


def kl_and_spread(learned: Iterable[Learned]) -> tuple[float, float]:
    """Mean and standard deviation of KL over repeats."""
    values = [one.kl for one in learned]
    return mean(values), float(np.std(values, ddof=1))


def largest_difference(some: list[Learned], others: list[Learned]) -> float:
    """The largest |difference of KL| between two trainings from the same seed."""
    return max(abs(a.kl - b.kl) for a, b in zip(some, others, strict=True))


def _rows(bench: Bench, found: Found) -> list[Row]:
    var = {K: mean(one.var_log_g for one in found[name_of(K)]) for K in bench.intervals}
    apart = largest_difference(found[name_of(1)], found[PCD]) / kl_and_spread(found[PCD])[1]
    longer = [K for K in bench.intervals if K > 1]
    steps = [var[b] / var[a] for a, b in itertools.pairwise(longer)]
    rows = [
        Row("kl_difference_over_spread/K=1_from_pcd", apart, "<=", 0.5),
        Row("var_log_g/K=1", var[1], "<=", 0.0, paper=0.0),
        Row("var_log_g_smallest_step_up", min(steps), ">=", 1.0),
        Row(f"var_log_g/K={longer[-1]}_over_K={longer[0]}", var[longer[-1]] / var[longer[0]], ">=", 2.0),
    ]
    rows += [Row(f"var_log_g/K={K}", var[K]) for K in longer]
    published = {
        name_of(K): "IS {:.2f}, FID {:.2f} (CIFAR-10)".format(*scores) for K, scores in PUBLISHED.items()
    }
    for name, learned in found.items():
        kl, spread = kl_and_spread(learned)
        label = name.replace(" ", "").replace(PCD, "pcd")
        rows += [Row(f"kl/{label}", kl, paper=published.get(name)), Row(f"kl_std/{label}", spread)]
    return rows


def _draw(bench: Bench, found: Found) -> None:
    """KL and Var(log g) against K, each repeat a dot."""
    with picture(bench.folder / "interval.png", 8, 3.2, columns=2) as (left, right):
        of = {K: found[name_of(K)] for K in bench.intervals}
        for K, learned in of.items():
            left.plot([K] * len(learned), [one.kl for one in learned], "o", color=palette.sky, ms=4)
        means = [kl_and_spread(learned)[0] for learned in of.values()]
        left.plot(list(of), means, "-", color=palette.blue, lw=1.5, label="self-adapting NCE")
        pcd, spread = kl_and_spread(found[PCD])
        left.axhspan(pcd - spread, pcd + spread, color=palette.grey, alpha=0.2, lw=0)
        draw_level(left, pcd, color=palette.grey, lw=1, label="PCD, ± its spread")
        left.set(title="KL(data ‖ model), nats", xlabel="interval K", xscale="log", ylim=(0, None))
        longer = [K for K in of if K > 1]
        for name, colour, label in (
            ("var_log_g", palette.vermillion, "negatives"),
            ("var_log_g_data", palette.blue, "data"),
        ):
            values = [mean(one._asdict()[name] for one in of[K]) for K in longer]
            right.plot(longer, values, "o-", color=colour, ms=4, label=label)
        start = mean(one.var_log_g for one in of[longer[0]])
        right.plot(longer, [start * K / longer[0] for K in longer], color=MUTED, lw=0.8, ls=":", label="∝ K")
        right.set(title="Var(log g); 0 at K = 1", xlabel="interval K", xscale="log", yscale="log")
        for axis in (left, right):
            axis.legend(fontsize=7)
            axis.set_xticks(list(of), [str(K) for K in of])
            axis.minorticks_off()


def _draw_densities(bench: Bench, toy: ToySet, found: Found) -> None:
    """The truth, and the first repeat of PCD and of the shortest and longest interval."""
    truth: Any = toy.log_density
    densities = {"data": shown(lambda x: -truth(x))}
    for name in (PCD, name_of(bench.intervals[0]), name_of(bench.intervals[-1])):
        densities[name] = found[name][0].density
    with picture(bench.folder / "densities.png", 8, 2.3, columns=len(densities)) as axes:
        for axis, (label, density) in zip(axes, densities.items(), strict=True):
            axis.imshow(density.T, origin="lower", extent=(-4, 4, -4, 4), cmap="viridis")
            axis.set(title=label, xticks=[], yticks=[])
            axis.grid(False)


EXPERIMENT = Experiment(
    name="adance-interval",
    title="Self-adapting NCE on a pinwheel: quality and Var(log g) against the interval K (Table 5.2)",
    paper="Nathaniel Xu, Self-adapting noise-contrastive estimation for energy-based models, 2022, Chapter 5",
    scales=by_scale(
        {"toy": "pinwheel", "rejuvenation": 0.1, "step_size": 0.03},
        intervals=((1, 5, 50), (1, 5, 10, 20, 50)),
        rows=(2000, 5000),
        hidden=((32, 32), (64, 64)),
        walkers=(128, 256),
        langevin=(5, 10),
        steps=(250, 1200),
        rate=(1e-2, 5e-3),
        repeats=(3, 5),
    ),
    body=body,
)
