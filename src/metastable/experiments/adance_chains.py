"""Section 5.3 of the AdaNCE thesis: is it short chains or the variance of g that a long interval suffers from?

The thesis names two reasons why quality falls with the interval K: short-run chains are biased samples of the
frozen copy, and the density ratio g spreads. Chapter 6 would use convergent chains to tell them apart. In two
dimensions the frozen copy can be drawn from as exactly as a grid is fine, so the same training runs with chains
from noise (short-run), with a buffer of which a quarter begins afresh (the thesis's), with a buffer alone, and with
exact draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.random import derive
from metastable.data.toy import toy_set
from metastable.energies import MLP
from metastable.evaluation.quadrature import kl_on_grid
from metastable.kernels import MALA
from metastable.methods import AdaptiveNCE, ExactDraws, PersistentCD, ShortRun
from metastable.report.figures import palette, picture

from .base import Bench, Experiment, Row
from .trials import Arm, Problem, Trial, Trials, by_adam, by_scale, mean

BOX, POINTS = [(-5.0, 5.0), (-5.0, 5.0)], 301
REACH, CELLS = 6.0, 161
"""Draws are made on [−6, 6]², three widths of the reference, in as many cells a side."""


class GridSampled(nn.Module):
    """A network on a Gaussian reference in the plane that draws from itself: a cell by its mass, a place in it."""

    def __init__(self, hidden: tuple[int, ...], seed: int):
        super().__init__()
        self.network = MLP(2, hidden, seed=seed)
        self.event_shape = (2,)
        self.cell = 2 * REACH / CELLS
        middle = torch.linspace(-REACH + self.cell / 2, REACH - self.cell / 2, CELLS)
        self.register_buffer("middles", torch.cartesian_prod(middle, middle), persistent=False)

    middles: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x) + 0.5 * (x / 2).square().sum(1)

    @torch.no_grad()
    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` draws; within a cell of 0.07 they are uniform."""
        p = torch.softmax(-self(self.middles), 0)
        rows = torch.multinomial(p, n, replacement=True, generator=rng)
        inside = torch.rand((n, 2), generator=rng, device=p.device) - 0.5
        return self.middles[rows] + self.cell * inside


def sources(bench: Bench) -> dict[str, Any]:
    """Where negatives of the frozen copy come from, the nearer to it the later."""
    chains = {"kernel": MALA(0.03), "steps": bench.langevin}
    return {
        "short-run": ShortRun(**chains),
        "rejuvenated": PersistentCD(walkers=bench.walkers, rejuvenation=0.25, **chains),
        "persistent": PersistentCD(walkers=bench.walkers, **chains),
        "converged": ExactDraws(walkers=bench.walkers),
    }


def name_of(source: str, K: int) -> str:
    """Of the arm."""
    return f"{source}/K={K}"


def on_pinwheel(
    bench: Bench, arms: list[Arm], model: Callable[[int], Any], **settings: Any
) -> dict[str, list[Trial]]:
    """Every arm from every seed on rows of a pinwheel; what is kept is KL(data ‖ model) in nats, by quadrature."""
    toy = toy_set("pinwheel")
    data, truth = toy.sample(bench.rows, seed=derive(bench.seed, "data") % 2**31), toy.log_density
    return Trials(
        arms,
        lambda arm, seed: Problem(model(seed), data),
        by_adam(bench, bench.walkers, **settings),
        bench.repeats,
        keep=lambda trial, at, run: kl_on_grid(truth, run.energy, BOX, POINTS),  # pyright: ignore
        may_stop=True,
        words=lambda t: "stopped" if t.kept is None else f"KL {t.kept:.4f}",
    ).run(bench)


def body(bench: Bench) -> list[Row]:
    """Every source at every interval, from every seed."""
    arms = [
        Arm(name_of(name, K), AdaptiveNCE(source, interval=K))
        for K in bench.intervals
        for name, source in sources(bench).items()
    ]
    # on the CPU: a few hundred chains of a small network
    found = on_pinwheel(bench, arms, lambda seed: GridSampled(bench.hidden, seed), device="cpu")
    kl, rows = {}, []
    for name, own in found.items():
        ended = [t for t in own if t.kept is not None]
        kl[name] = mean(t.kept for t in ended) if ended else math.nan
        var = mean(t.curves["var_log_g"][-1] for t in ended) if ended else math.nan
        rows += [Row(f"kl/{name}", kl[name]), Row(f"var_log_g/{name}", var)]
        rows.append(Row(f"runs_stopped/{name}", float(len(own) - len(ended))))
    draw(bench, kl)
    return rows_of(bench, kl) + rows


def rows_of(bench: Bench, kl: dict[str, float]) -> list[Row]:
    """What converged chains gain at each K, and what K costs each source; not a number where all runs stopped."""
    first, *_, longest = bench.intervals
    rows = []
    for K in bench.intervals:
        gain = kl[name_of("short-run", K)] / kl[name_of("converged", K)]
        judged = (">=", 1.0) if bench.judged else (None, None)
        rows.append(
            Row(f"kl_of_short_run_over_converged/K={K}", gain, *judged, paper="short chains are biased")
        )
    for source in sources(bench):
        cost = kl[name_of(source, longest)] / kl[name_of(source, first)]
        rows.append(Row(f"kl_at_K={longest}_over_K={first}/{source}", cost, paper="quality falls with K"))
    return rows


def draw(bench: Bench, kl: dict[str, float]) -> None:
    """KL against K, a line for each source."""
    with picture(bench.folder / "chains.png", 6, 3.2) as axes:
        for source, colour in zip(sources(bench), palette, strict=False):
            values = [kl[name_of(source, K)] for K in bench.intervals]
            axes.plot(bench.intervals, values, "o-", color=colour, ms=4, label=source)
        axes.set(title="KL(data ‖ model), nats", xlabel="interval K", xscale="log")
        axes.set_ylim(bottom=0)
        axes.set_xticks(list(bench.intervals), [str(K) for K in bench.intervals])
        axes.minorticks_off()
        axes.legend(fontsize=7)


EXPERIMENT = Experiment(
    name="adance-chains",
    title="Short-run against converged chains in self-adapting NCE, for every interval (Section 5.3)",
    paper="Nathaniel Xu, Self-adapting noise-contrastive estimation for energy-based models, 2022, Section 5.3",
    scales=by_scale(
        intervals=((1, 20), (1, 5, 20, 50)),
        rows=(1000, 5000),
        hidden=((32, 32), (64, 64)),
        walkers=(128, 256),
        langevin=(5, 10),
        steps=(40, 1200),
        rate=(1e-2, 5e-3),
        repeats=(1, 3),
        judged=(False, True),
    ),
    body=body,
)
