"""Figure 1 of the R-NCE paper: where IBC and R-NCE have their optimum when the proposal is not uniform.

Data are N(1, 1), the proposal is N(0, 1), and the energy ½(x − θ)² can hold the data's density exactly, at θ = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from metastable.api import fit
from metastable.core.random import derive, generator
from metastable.methods import ImplicitBC, Method, RankingNCE
from metastable.proposals import Gaussian
from metastable.training.config import Adam, Schedule

from .base import Bench, Experiment, Row

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
    data, proposal = (cell * torch.exp(_log_normal(x, mean)) for mean in (DATA_MEAN, 0.0))
    difference = torch.exp(-u.exp()) - (transform @ data) * (transform @ proposal) ** K
    return float(data @ r - step * difference.sum())


def _log_normal(x: Tensor, mean: float) -> Tensor:
    return -0.5 * (x - mean).square() - 0.5 * math.log(2 * math.pi)


def log_likelihood(theta: float) -> float:
    """E log p_θ under the data, (3.9): the same parabola whatever the proposal."""
    return -0.5 * (1 + (theta - DATA_MEAN) ** 2) - 0.5 * math.log(2 * math.pi)


def optimum(kind: str, K: int) -> float:
    """θ* of the population objective."""
    from scipy.optimize import minimize_scalar

    found: Any = minimize_scalar(
        lambda theta: -population_objective(kind, theta, K),
        bounds=(0.0, 3.0),
        method="bounded",
        options={"xatol": 1e-5},
    )
    return float(found.x)


# ---- training


@dataclass
class Course:
    """θ along one training."""

    steps: list[int] = field(default_factory=list)
    thetas: list[float] = field(default_factory=list)

    @property
    def estimate(self) -> float:
        """θ̂: the mean over the second half of the training."""
        late = self.thetas[len(self.thetas) // 2 :]
        return sum(late) / len(late)


def method_of(kind: str, K: int) -> Method:
    """Both methods with the same proposal, N(0, 1)."""
    return METHODS[kind](negatives_per_datum=K, proposal=Gaussian(torch.zeros(1), 1.0))


def train(bench: Bench, kind: str, K: int, seed: int) -> Course:
    """One training on draws of N(1, 1), from θ = 0."""
    x = DATA_MEAN + torch.randn((bench.data, 1), generator=generator(derive(seed, "data")))
    model, course = Shifted(), Course()

    def watch(row: dict[str, Any]) -> None:
        course.steps.append(int(row["step"]))
        course.thetas.append(float(model.theta.detach()))

    fit(
        model,
        x,
        method_of(kind, K),
        bench.steps,
        seed=seed,
        units="none",
        batch_size=bench.batch,
        optimiser=Adam(bench.rate),
        schedule=Schedule("cosine"),
        log_every=max(1, bench.steps // 100),
        device=bench.device,
        evaluate=False,
        progress=watch,
    )
    return course


# ---- the experiment


def body(bench: Bench) -> list[Row]:
    """The optimum of each curve, and where training ends."""
    rows, courses = [], {}
    for (kind, K), truth in OPTIMA.items():
        on_curve = optimum(kind, K)
        seeds = [derive(bench.seed, kind, K, r) % 2**31 for r in range(bench.repeats)]
        courses[kind, K] = [train(bench, kind, K, seed) for seed in seeds]
        trained = [course.estimate for course in courses[kind, K]]
        bench.say(
            f"{kind}, K = {K}: optimum {on_curve:.3f}, trained {', '.join(f'{t:.3f}' for t in trained)}"
        )
        rows += [
            Row(f"optimum/{kind}/K={K}", on_curve),
            Row(f"optimum_error/{kind}/K={K}", abs(on_curve - truth), "<=", TOLERANCE),
            Row(f"trained/{kind}/K={K}", sum(trained) / len(trained)),
            Row(f"trained_error/{kind}/K={K}", max(abs(t - truth) for t in trained), "<=", TOLERANCE),
        ]
    _draw(bench, courses)
    return rows


def _draw(bench: Bench, courses: dict[tuple[str, int], list[Course]]) -> None:
    """Figure 1, and θ along training beside it."""
    from metastable.report.figures import INK, new_figure, palette, save_figure

    figure = new_figure(10, 3.8)
    curves, paths = figure.subplots(1, 2)
    grid = torch.linspace(-0.5, 3.0, bench.points).tolist()
    colours, names = {"rnce": palette.blue, "ibc": palette.vermillion}, {"rnce": "R-NCE", "ibc": "IBC"}
    likelihood = [log_likelihood(t) for t in grid]
    curves.plot(grid, _from_top(likelihood), color=INK, lw=1.2, ls="--", label="likelihood")
    for (kind, K), runs in courses.items():
        style = {"color": colours[kind], "ls": "-" if K == 10 else ":", "label": f"{names[kind]}, K = {K}"}
        values = _from_top([population_objective(kind, t, K) for t in grid])
        curves.plot(grid, values, lw=1.6, **style)
        curves.plot(grid[values.index(0.0)], 0, "o", ms=5, color=colours[kind])
        for i, course in enumerate(runs):
            paths.plot(
                course.steps, course.thetas, lw=1.2, **{**style, "label": None if i else style["label"]}
            )
    curves.set(title="population objective, its maximum at 0", xlabel="θ", ylim=(-2.2, 0.12))
    paths.axhline(DATA_MEAN, color=INK, lw=0.8, ls="--")
    paths.set(title="θ while training (data: 1)", xlabel="update", ylim=(-0.1, 2.2))
    curves.legend(fontsize=8, loc="lower center")
    save_figure(figure, bench.folder / "figure-1.png")


def _from_top(values: list[float]) -> list[float]:
    top = max(values)
    return [v - top for v in values]


EXPERIMENT = Experiment(
    name="nce-bias",
    title="The optimum of R-NCE and of IBC under a Gaussian proposal (Fig. 1)",
    paper="Singh, Tu, Sindhwani, TMLR 2024, Section 4.1.1",
    scales={
        "smoke": {"data": 200_000, "batch": 1000, "steps": 800, "rate": 0.03, "repeats": 1, "points": 71},
        "cpu": {"data": 400_000, "batch": 1000, "steps": 3000, "rate": 0.02, "repeats": 3, "points": 141},
    },
    body=body,
)
