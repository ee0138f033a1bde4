"""Figure 1 of the R-NCE paper: where IBC and R-NCE have their optimum when the proposal is not uniform.

Data are N(1, 1), the proposal is N(0, 1), and the energy ½(x − θ)² can hold the data's density exactly, at θ = 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from metastable.core.random import derive, generator
from metastable.methods import ImplicitBC, RankingNCE
from metastable.proposals import Gaussian
from metastable.report.figures import INK, draw_level, palette, picture

from .base import Bench, Experiment, Row
from .trials import Arm, Problem, Trial, Trials, by_adam, by_scale, draw_curves

DATA_MEAN = 1.0
OPTIMA = {("rnce", 10): 1.0, ("rnce", 100): 1.0, ("ibc", 10): 1.95, ("ibc", 100): 1.99}
"""θ* of each objective and K, which `TOLERANCE` allows for; at K → ∞ that of IBC goes to 2."""
TOLERANCE = 0.02
METHODS: dict[str, type[RankingNCE] | type[ImplicitBC]] = {"rnce": RankingNCE, "ibc": ImplicitBC}


class Shifted(nn.Module):
    """E(x) = ½(x − θ)², the densities of unit variance."""

    def __init__(self, theta: float = 0.0):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(theta))
        self.event_shape = (1,)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x[:, 0] - self.theta).square()


# ---- the population objectives, exactly


def score(kind: str, theta: Tensor, x: Tensor) -> Tensor:
    """r(x), by which a point is ranked: −E for IBC, −E − log p_ξ for R-NCE, up to a constant."""
    r = -0.5 * (x - theta).square()
    return r if kind == "ibc" else r + 0.5 * x.square()


def population_objective(kind: str, theta: float, K: int) -> float:
    """E log q of the datum among K negatives, (3.4) and (4.3), by quadrature.

    With w = e^r the objective is E r(x₀) − E log(w(x₀) + Σₖ w(xₖ)). The log of a sum of independent terms has
    a one-dimensional form, from log s = ∫ (e^{−t} − e^{−ts}) dt/t and u = log t:

        E log(w₀ + Σₖ wₖ) = ∫ [exp(−eᵘ) − φ₀(eᵘ) φ(eᵘ)^K] du,   φ(t) = E_ξ e^{−t w},   φ₀(t) = E_data e^{−t w}.

    >>> round(population_objective("rnce", 0.0, 10), 6) == round(-math.log(11), 6)  # nothing tells points apart
    True
    """
    x = torch.linspace(-11, 12, 301, dtype=torch.float64)
    u = torch.linspace(-45, 45, 451, dtype=torch.float64)
    cell, step = x[1] - x[0], u[1] - u[0]
    r = score(kind, torch.tensor(theta, dtype=torch.float64), x)
    transform = torch.exp(-torch.exp(u[:, None] + r))  # e^{−t w(x)}
    log_2pi = math.log(2 * math.pi)
    data, proposal = (
        cell * torch.exp(-0.5 * (x - mean).square() - 0.5 * log_2pi) for mean in (DATA_MEAN, 0.0)
    )
    difference = torch.exp(-u.exp()) - (transform @ data) * (transform @ proposal) ** K
    return float(data @ r - step * difference.sum())


def log_likelihood(theta: float) -> float:
    """E log p_θ under the data, (3.9): the same parabola whatever the proposal."""
    return -0.5 * (1 + (theta - DATA_MEAN) ** 2) - 0.5 * math.log(2 * math.pi)


def optimum(kind: str, K: int) -> float:
    """θ* of the population objective."""
    found: Any = minimize_scalar(
        lambda theta: -population_objective(kind, theta, K),
        bounds=(0.0, 3.0),
        method="bounded",
        options={"xatol": 1e-5},
    )
    return float(found.x)


# ---- the experiment


def arms() -> list[Arm]:
    """Both methods with the same proposal, N(0, 1), at both K."""
    proposal = Gaussian(torch.zeros(1), 1.0)
    return [
        Arm(f"{kind}/K={K}", METHODS[kind](negatives_per_datum=K, proposal=proposal), about=(kind, K))
        for kind, K in OPTIMA
    ]


def estimate(trial: Trial) -> float:
    """θ̂: the mean over the second half of the training."""
    late = trial.curves["theta"][len(trial.curves) // 2 :].tolist()
    return sum(late) / len(late)


def body(bench: Bench) -> list[Row]:
    """The optimum of each curve, and where training on draws of N(1, 1) from θ = 0 ends."""

    def problem(arm: Arm, seed: int) -> Problem:
        rng = generator(derive(seed, "data"))
        return Problem(Shifted(), DATA_MEAN + torch.randn((bench.data, 1), generator=rng))

    found = Trials(
        arms(),
        problem,
        by_adam(bench, bench.batch, log_every=max(1, bench.steps // 100)),
        bench.repeats,
        seed=lambda bench, arm, repeat: derive(bench.seed, *arm.about, repeat) % 2**31,
        watch=lambda at, line: {"theta": float(at.model.theta.detach())},
        words=lambda trial: f"trained {estimate(trial):.3f}",
    ).run(bench)
    _draw(bench, found)
    rows = []
    for name, trials in found.items():
        at = trials[0].arm.about
        truth, on_curve = OPTIMA[at], optimum(*at)
        trained = [estimate(trial) for trial in trials]
        rows += [
            Row(f"optimum/{name}", on_curve),
            Row(f"optimum_error/{name}", abs(on_curve - truth), "<=", TOLERANCE),
            Row(f"trained/{name}", sum(trained) / len(trained)),
            Row(f"trained_error/{name}", max(abs(t - truth) for t in trained), "<=", TOLERANCE),
        ]
    return rows


def _draw(bench: Bench, found: dict[str, list[Trial]]) -> None:
    """Figure 1, and θ along training beside it."""
    with picture(bench.folder / "figure-1.png", 10, 3.8, columns=2) as (curves, paths):
        grid = torch.linspace(-0.5, 3.0, bench.points).tolist()
        colours, names = {"rnce": palette.blue, "ibc": palette.vermillion}, {"rnce": "R-NCE", "ibc": "IBC"}
        likelihood = [log_likelihood(t) for t in grid]
        curves.plot(grid, _from_top(likelihood), color=INK, lw=1.2, ls="--", label="likelihood")
        for trials in found.values():
            kind, K = trials[0].arm.about
            style = {"ls": "-" if K == 10 else ":", "label": f"{names[kind]}, K = {K}"}
            values = _from_top([population_objective(kind, t, K) for t in grid])
            curves.plot(grid, values, lw=1.6, color=colours[kind], **style)
            curves.plot(grid[values.index(0.0)], 0, "o", ms=5, color=colours[kind])
            draw_curves(paths, trials, "theta", colours[kind], alpha=1.0, **style)
        curves.set(title="population objective, its maximum at 0", xlabel="θ", ylim=(-2.2, 0.12))
        draw_level(paths, DATA_MEAN)
        paths.set(title="θ while training (data: 1)", xlabel="update", ylim=(-0.1, 2.2))
        curves.legend(fontsize=8, loc="lower center")


def _from_top(values: list[float]) -> list[float]:
    top = max(values)
    return [v - top for v in values]


EXPERIMENT = Experiment(
    name="nce-bias",
    title="The optimum of R-NCE and of IBC under a Gaussian proposal (Fig. 1)",
    paper="Singh, Tu, Sindhwani, TMLR 2024, Section 4.1.1",
    scales=by_scale(
        {"batch": 1000},
        data=(200_000, 400_000),
        steps=(800, 3000),
        rate=(0.03, 0.02),
        repeats=(1, 3),
        points=(71, 141),
    ),
    body=body,
)
