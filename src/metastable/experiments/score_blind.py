"""What score matching sees and what it does not: covariances to the last digit, weights of far modes not at all.

First a Gaussian whose answer is known in closed form: with E = ½xᵀPx − bᵀx, (2.6) is least at the inverse of the
sample covariance S, and (2.7) at (S + σ²I)⁻¹. Then two modes of unequal mass, once so near that data lie between
them and once so far that none do. A method is judged there by two numbers, both exact by quadrature: the
error of the score, averaged over the data's density, and the error of a mode's mass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metastable.api import fit
from metastable.core.random import derive, generator
from metastable.core.types import Energy, energy_and_grad
from metastable.energies import GaussianMixture
from metastable.energies.build import MLPConfig
from metastable.evaluation.modes import mode_weights
from metastable.evaluation.quadrature import GridDensity, grid_density
from metastable.methods import (
    ContrastiveDivergence,
    DenoisingScoreMatching,
    Jarzynski,
    Method,
    ScoreMatching,
    SlicedScoreMatching,
)
from metastable.report.figures import INK, palette, picture
from metastable.runs.run import Run
from metastable.training.config import SGD, Schedule

from .base import Bench, Experiment, Row
from .trials import Arm, Problem, Trial, Trials, by_adam, by_scale, mean

LIGHT = 0.2
"""Mass of the left mode."""
FAR, NEAR = "far", "near"
BLIND = ("score-matching", "denoising", "sliced")


# ---- a Gaussian


class Quadratic(nn.Module):
    """E(x) = ½xᵀPx − bᵀx with P symmetric and free, from P = I and b = 0."""

    def __init__(self, dim: int):
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(dim))
        self.b = nn.Parameter(torch.zeros(dim))

    @property
    def precision(self) -> Tensor:
        """P."""
        return 0.5 * (self.matrix + self.matrix.T)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x @ self.precision * x).sum(1) - x @ self.b


def correlated_rows(rows: int, dim: int, seed: int) -> Tensor:
    """Draws of a Gaussian whose covariance has eigenvalues from ½ to 2 and no axis of the coordinates."""
    rng = generator(derive(seed, "gaussian"))
    turn = torch.linalg.qr(torch.randn((dim, dim), generator=rng, dtype=torch.float64)).Q
    scale = torch.logspace(-0.5, 0.5, dim, base=2.0, dtype=torch.float64)
    return torch.randn((rows, dim), generator=rng) @ (scale[:, None] * turn.T).float()


def covariance(x: Tensor) -> Tensor:
    """S = n⁻¹ Σ (x − x̄)(x − x̄)ᵀ, float64."""
    return torch.cov(x.double().T, correction=0)


def gaussian_methods(sigma: float) -> dict[str, Method]:
    """The four estimators of the score's fit, on a Gaussian."""
    return {
        "exact": ScoreMatching(),
        "hutchinson": ScoreMatching(trace="hutchinson"),
        "sliced": SlicedScoreMatching(),
        "denoising": DenoisingScoreMatching(sigma=sigma),
    }


def fitted_precision(x: Tensor, method: Method, steps: int, seed: int) -> Tensor:
    """P after full-batch descent; P's own condition number is that of S, four, which sets rate and momentum.

    The exact loss is a fixed quadratic and gets the heavy ball's best constants; the noisy ones a rate that falls
    to zero, so that fresh projections average out.
    """
    energy = Quadratic(x.shape[1])
    exact = isinstance(method, ScoreMatching) and method.trace == "exact"
    fit(
        energy,
        x,
        method,
        steps,
        seed=seed,
        units="none",
        batch_size=None,
        optimiser=SGD(0.85, momentum=0.12) if exact else SGD(0.4),
        schedule=Schedule() if exact else Schedule("linear"),
        device="cpu",
        evaluate=False,
    )
    return energy.precision.detach().double()


def relative_error(found: Tensor, truth: Tensor) -> float:
    """‖found − truth‖/‖truth‖ in the Frobenius norm."""
    return float((found - truth).norm() / truth.norm())


def gaussian_rows(bench: Bench) -> list[Row]:
    """Each estimator against its own closed form, and denoising against the form that forgets σ."""
    x = correlated_rows(bench.rows, bench.dim, bench.seed)
    S, eye = covariance(x), torch.eye(bench.dim, dtype=torch.float64)
    rows = []
    for name, method in gaussian_methods(bench.sigma).items():
        steps = bench.exact_steps if name == "exact" else bench.noisy_steps
        P = fitted_precision(x, method, steps, bench.seed)
        smoothed = S + bench.sigma**2 * eye if name == "denoising" else S
        error = relative_error(P, smoothed.inverse())
        rows.append(Row(f"precision_error/{name}", error, "<=", 1e-3 if name == "exact" else 0.03))
        if name == "denoising":
            rows.append(
                Row("precision_error/denoising/as_if_unsmoothed", relative_error(P, S.inverse()), ">=", 0.1)
            )
        bench.say(f"gaussian, {name}: {error:.2g}")
    return rows


# ---- two modes


def arms(bench: Bench) -> list[Arm]:
    """Those that learn from inside the modes, and the one that carries weights across."""
    return [
        Arm("score-matching", ScoreMatching()),
        Arm("denoising", DenoisingScoreMatching(sigma=bench.mode_sigma)),
        Arm("sliced", SlicedScoreMatching(variance_reduced=True)),
        Arm("cd", ContrastiveDivergence(steps=4, step_size=0.05)),
        Arm("jarzynski", Jarzynski(walkers=bench.walkers, step_size=0.1, threshold=0.9, pace=None)),
    ]


def target(distance: float, sigma: float = 0.0) -> GaussianMixture:
    """Two unit Gaussians on the first axis, `distance` apart, smoothed by `sigma`; exact density and weights."""
    means = torch.tensor([[-distance / 2, 0.0], [distance / 2, 0.0]], dtype=torch.float64)
    weights = torch.tensor([LIGHT, 1 - LIGHT], dtype=torch.float64)
    return GaussianMixture(means, (1 + sigma**2) ** 0.5, weights.log())


def box(distance: float) -> list[tuple[float, float]]:
    """Six standard deviations around the modes."""
    return [(-distance / 2 - 6, distance / 2 + 6), (-6.0, 6.0)]


@dataclass(frozen=True)
class Learned:
    """A trained model on the grid: its density, its mass at the left and what it should be, its score's error."""

    density: GridDensity
    left_mass: float
    true_mass: float
    score_error: float


def left_mass(density: GridDensity, centers: Tensor) -> float:
    """Mass of the points that are nearer to the first centre."""
    points = torch.cartesian_prod(*density.axes)
    return float(mode_weights(points, centers, density.density.flatten().log())[0])


def score_error(model: Energy, truth: Energy, density: GridDensity) -> float:
    """𝔼_p‖∇ log p − ∇ log p_θ‖² over 𝔼_p‖∇ log p‖², with p = `density` of the truth on its grid.

    Twice the Fisher divergence (2.6), as a share of what a model without any score would have.
    """
    points = torch.cartesian_prod(*density.axes)
    p = density.density.flatten()
    data_score = energy_and_grad(truth, points).grad
    miss = energy_and_grad(model, points.float()).grad.double() - data_score
    return float((p @ miss.square().sum(1)) / (p @ data_score.square().sum(1)))


def judge(bench: Bench, name: str, model: nn.Module, distance: float) -> Learned:
    """The model against the density that its method should learn: smoothed, for denoising."""
    truth = target(distance, bench.mode_sigma if name == "denoising" else 0.0)
    found = grid_density(model, box(distance), bench.grid)
    own = grid_density(truth, box(distance), bench.grid)
    learned, true = (left_mass(density, truth.means.detach()) for density in (found, own))
    return Learned(found, learned, true, score_error(model, truth, own))


def learn_all(bench: Bench, distance: float, repeats: int) -> dict[str, list[Learned]]:
    """Every method on `repeats` data sets, each a perceptron on a fitted Gaussian, from random weights."""
    config = MLPConfig("gaussian", hidden=(bench.width, bench.width))

    def problem(arm: Arm, seed: int) -> Problem:
        return Problem(config, target(distance).sample(bench.data, generator(seed)).float())

    def keep(trial: Trial, at: Problem, run: Run) -> Learned:
        model: Any = run.energy
        return judge(bench, trial.arm.name, model.cpu(), distance)

    trials = Trials(
        arms(bench),
        problem,
        by_adam(bench, bench.batch),
        repeats,
        seed=lambda bench, arm, repeat: derive(bench.seed, "modes", distance, repeat) % 2**31,
        keep=keep,
        words=lambda t: f"left mass {t.kept.left_mass:.3f} (true {t.kept.true_mass:.3f})",
        records=(Learned, GridDensity),
    )
    return {name: [trial.kept for trial in own] for name, own in trials.run(bench).items()}


def weight_error(found: list[Learned]) -> float:
    """|learned mass − true mass| of the left mode, averaged over repeats."""
    return mean(abs(learned.left_mass - learned.true_mass) for learned in found)


def mode_rows(found: Mapping[str, Mapping[str, list[Learned]]]) -> Iterator[Row]:
    """Far: the blind ones are wrong though their scores are right. Near: all of them see."""
    for place, by_method in found.items():
        for name, learned in by_method.items():
            sees = name == "jarzynski" or place == NEAR
            goal = (">=", 0.1) if place == FAR and name in BLIND else ("<=", 0.05) if sees else (None, None)
            yield Row(f"mode_weight_error/{name}/{place}", weight_error(learned), *goal)
            if len(learned) > 1:
                shares = [one.left_mass for one in learned]
                yield Row(f"left_mass_range/{name}/{place}", max(shares) - min(shares))
            error = mean(one.score_error for one in learned)
            yield Row(f"score_error/{name}/{place}", error, *(("<=", 0.1) if name in BLIND else (None, None)))


def body(bench: Bench) -> list[Row]:
    """The Gaussian, then modes far apart and near."""
    rows = gaussian_rows(bench)
    found = {
        FAR: learn_all(bench, bench.far, bench.repeats),
        NEAR: learn_all(bench, bench.near, bench.near_repeats),
    }
    _draw_densities(bench, found[FAR])
    _draw_cuts(bench, found)
    return [*rows, *mode_rows(found)]


# ---- pictures


def _draw_densities(bench: Bench, found: Mapping[str, list[Learned]]) -> None:
    """The truth, and the first repeat of each method."""
    truth = grid_density(target(bench.far), box(bench.far), bench.grid)
    panels = [("truth", truth, LIGHT), *((n, one[0].density, one[0].left_mass) for n, one in found.items())]
    path = bench.folder / "figure-densities.png"
    with picture(path, 11, 4.2, 2, 3, sharex=True, sharey=True) as grid:
        for axes, (name, density, mass) in zip(grid.flat, panels, strict=True):
            x, y = (axis.numpy() for axis in density.axes)
            height = density.density.sqrt().T.numpy()
            axes.contourf(x, y, height, levels=np.linspace(0.03, 1, 12) * height.max(), cmap="Blues")
            axes.set_title(f"{name}: {mass:.0%} left")
            axes.grid(False)


def _draw_cuts(bench: Bench, found: Mapping[str, Mapping[str, list[Learned]]]) -> None:
    """−log p along the line through both modes, every repeat, zero at the right mode."""
    path = bench.folder / "figure-cuts.png"
    with picture(path, 11, 4.6, 2, len(found[FAR]), sharex="row", sharey="row") as rows:
        for line, (place, distance) in zip(rows, ((FAR, bench.far), (NEAR, bench.near)), strict=True):
            for axes, (name, learned) in zip(line, found[place].items(), strict=True):
                truth = target(distance, bench.mode_sigma if name == "denoising" else 0.0)
                own = grid_density(truth, box(distance), bench.grid)
                for i, one in enumerate(learned):
                    look = {"lw": 1, "alpha": 0.7, "label": None if i else "learned"}
                    axes.plot(*_cut(one.density, distance), color=palette.vermillion, **look)
                axes.plot(*_cut(own, distance), color=INK, lw=1.2, ls="--", label="true")
                axes.set(title=name if place == FAR else "", ylim=(-3, 14))
            line[0].set_ylabel(f"−log p, distance {distance:g}")
        rows[1, 0].legend(loc="upper center")
        for axes in rows[1]:
            axes.set_xlabel("along the modes")


def _cut(density: GridDensity, distance: float) -> tuple[Any, Any]:
    x, y = density.axes
    along = -density.density[:, len(y) // 2].clamp(min=1e-300).log()
    at_right = int((x - distance / 2).abs().argmin())
    return x.numpy(), (along - along[at_right]).numpy()


GAUSSIAN = {"rows": 50_000, "dim": 10, "sigma": 0.5, "exact_steps": 9, "noisy_steps": 40}
MODES = {"far": 12.0, "near": 2.0, "mode_sigma": 0.3, "grid": 160}
"""An even number of points: none lies on the line midway between the modes, which belongs to neither."""

EXPERIMENT = Experiment(
    name="score-blind",
    title="What scores cannot see: the weights of separated modes",
    paper="Xu, MSc thesis 2022, Section 2.2.3.2; the experiment is ours",
    scales=by_scale(
        GAUSSIAN | MODES | {"width": 64, "near_repeats": 1},
        data=(3000, 10_000),
        batch=(256, 512),
        steps=(400, 1500),
        rate=(4e-3, 2e-3),
        walkers=(4000, 8000),
        repeats=(2, 4),
    ),
    body=body,
)
