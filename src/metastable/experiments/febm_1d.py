"""Section 6.1 of the f-EBM paper: a Gaussian model of data that are not Gaussian, by nine divergences.

The data are 0.33·N(−1, 0.0625) + 0.67·N(2, 2), the model ½((x−μ)/σ)², so each divergence has its own best (μ, σ),
which quadrature and minimisation find exactly. Training sees only draws of both. Figure 1 shows the densities,
Table 5 the parameters, Figure 3 the density ratio that comes with them, Figure 2 what rejection sampling makes of
the model's draws with it, Figure 4 the paths from five starts. Section 3.1's baseline (Theorem 1) is trained for as
long, from the same start and from one far away, where it gets no signal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from metastable.api import fit
from metastable.core.random import derive, generator
from metastable.energies import MLP, GaussianMixture
from metastable.evaluation.distances import wasserstein_1d
from metastable.methods import ExactDraws, FDivergence, rejection_sample
from metastable.methods.divergences import Divergence, divergence_of
from metastable.runs.run import Run
from metastable.training.config import Adam, Schedule

from .base import Bench, Experiment, Row

LOG_2PI = math.log(2 * math.pi)
BOX, POINTS = (-14.0, 16.0), 12_001
"""The grid of every integral; at its ends all densities here are below e⁻³⁰."""


def target() -> GaussianMixture:
    """p, normalised."""
    means, scales = torch.tensor([[-1.0], [2.0]]), torch.tensor([0.25, math.sqrt(2)])
    return GaussianMixture(means, scales, torch.tensor([0.33, 0.67]).log()).double()


class Bell(nn.Module):
    """½((x−μ)/σ)², with μ and log σ as parameters; it draws its own exact samples.

    >>> Bell(0.0, 2.0)(torch.tensor([[2.0], [4.0]]))
    tensor([0.5000, 2.0000], grad_fn=<MulBackward0>)
    """

    def __init__(self, mu: float, sigma: float):
        super().__init__()
        self.mu = nn.Parameter(torch.tensor(mu))
        self.log_sigma = nn.Parameter(torch.tensor(math.log(sigma)))
        self.event_shape = (1,)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * ((x[:, 0] - self.mu) * torch.exp(-self.log_sigma)).square()

    @torch.no_grad()
    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` exact draws."""
        noise = torch.randn(n, 1, generator=rng, device=self.mu.device, dtype=self.mu.dtype)
        return self.mu + self.log_sigma.exp() * noise

    @property
    def place(self) -> tuple[float, float]:
        """(μ, σ)."""
        return self.mu.item(), math.exp(self.log_sigma.item())


# ---- the exact answers


@cache
def _grid() -> tuple[Tensor, Tensor]:
    x = torch.linspace(*BOX, POINTS, dtype=torch.float64)
    return x, -target()(x[:, None])


def log_model(x: Tensor, mu: float, sigma: float) -> Tensor:
    """log q(x), `(n,)`."""
    return -0.5 * ((x - mu) / sigma).square() - math.log(sigma) - 0.5 * LOG_2PI


def exact_divergence(f: Divergence, mu: float, sigma: float) -> float:
    """D_f(p‖q) by the trapezoid rule: q f(p/q) = p f′ − q f*(f′), functions of log p/q."""
    x, log_p = _grid()
    log_q = log_model(x, mu, sigma)
    ratio = log_p - log_q
    integrand = log_p.exp() * f.slope(ratio) - log_q.exp() * f.conjugate(ratio)
    return float(torch.trapezoid(integrand, x))


@cache
def optimum(name: str) -> tuple[float, float]:
    """(μ*, σ*), the minimum of D_f(p‖q) over all normal q.

    >>> [round(v, 3) for v in optimum("kl")]  # the mean and standard deviation of the data
    [1.01, 1.83]
    """
    from scipy.optimize import minimize

    f = divergence_named(name)
    found = minimize(
        lambda at: exact_divergence(f, at[0], math.exp(at[1])),
        (1.3, math.log(1.7)),
        method="Nelder-Mead",
        options={"xatol": 1e-7, "fatol": 1e-12},
    )
    return float(found.x[0]), math.exp(float(found.x[1]))


def divergence_named(name: str) -> Divergence:
    """`kl`, …, or `alpha=-0.5`."""
    return divergence_of(*_f_and_alpha(name))


def _f_and_alpha(name: str) -> tuple[str, float | None]:
    f, _, alpha = name.partition("=")
    return f, float(alpha) if alpha else None


# ---- training


@dataclass(frozen=True)
class Setting:
    """How one divergence is trained.

    Attributes:
        start: μ and σ at first.
        learning_rate: of both players, falling to 0 as a cosine.
        betas: of Adam.
        clip: of the gradient's norm.
        data: data rows for each draw of the model.
    """

    start: tuple[float, float] = (0.0, 1.0)
    learning_rate: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float | None = None
    data: int = 1


TAIL = Setting(start=(1.0, 1.0), betas=(0.5, 0.9), data=4)
"""Divergences that weigh the data by (q/p)², or nearly: a model narrower than the data is safe, one much wider is
at an infinite distance. Few data points carry the gradient, in bursts, without which H runs away to −∞ where the
model has draws and the batch no data. Hence more data, a short memory, and no clipping, which would cut what pulls
H back."""

SETTINGS: Mapping[str, Setting] = {
    "kl": Setting(),
    "reverse-kl": Setting(),
    "js": Setting(),
    "hellinger": Setting(),
    "alpha=-0.5": TAIL,
    "alpha=-1": TAIL,
    "alpha=0.9": Setting(),
    "neyman": TAIL,
    "pearson": Setting(
        start=(0.0, 3.0), clip=1.0
    ),  # weighs by p/q: infinite from σ = 1, safe from the wide side
}
"""The nine divergences. The paper starts all of them at μ = 0 and σ = 1; where that fails, the start is named."""


@dataclass
class Course:
    """One training: its path of (μ, σ), and the run."""

    name: str
    path: NDArray[np.float64]
    run: Run

    @property
    def place(self) -> tuple[float, float]:
        """(μ̂, σ̂), the average over the last fifth of the updates."""
        mu, sigma = self.path[-max(1, len(self.path) // 5) :].mean(0)
        return float(mu), float(sigma)

    @property
    def errors(self) -> tuple[float, float]:
        """|μ̂ − μ*| and |σ̂ − σ*|."""
        best = optimum(self.name)
        return abs(self.place[0] - best[0]), abs(self.place[1] - best[1])

    @property
    def bound(self) -> float:
        """The divergence as training saw it: (14) on its own batches, over the last fifth."""
        lines = [row["divergence"] for row in self.run.history]
        return float(np.mean(lines[-max(1, len(lines) // 5) :]))


def train(
    bench: Bench,
    data: Tensor,
    name: str,
    setting: Setting,
    steps: int,
    *,
    label: str = "",
    estimator: str = "theorem3",
) -> Course:
    """Algorithm 1 with `batch` exact draws of the model, and as many rows of data or more, in each update."""
    seed = derive(bench.seed, name, label, estimator) % 2**31
    f, alpha = _f_and_alpha(name)
    energy = Bell(*setting.start)
    method = FDivergence(
        source=ExactDraws(walkers=bench.batch),
        f=f,
        alpha=alpha,
        ratio=MLP(1, hidden=(64, 64), activation="tanh", seed=seed),
        energy_rate=1.0,  # as in the paper
        estimator=estimator,
    )
    path = [energy.place]
    run = fit(
        energy,
        data,
        method,
        steps,
        seed=seed,
        units="none",
        batch_size=setting.data * bench.batch,
        optimiser=Adam(setting.learning_rate, setting.betas),
        schedule=Schedule("cosine"),
        clip_grad_norm=setting.clip,
        log_every=bench.log_every,
        device="cpu",  # two thousand numbers are no work for an accelerator
        evaluate=False,
        progress=lambda row: path.append(energy.place),
    )
    course = Course(name, np.array(path), run)
    mu, sigma = course.place
    bench.say(
        f"{name} {label} {estimator}: mu {mu:.4f} sigma {sigma:.4f}, off by "
        f"{course.errors[0]:.4f} {course.errors[1]:.4f}, {run.seconds:.0f} s"
    )
    return course


# ---- the density ratio at work


@dataclass(frozen=True)
class Correction:
    """Draws of the model before and after rejection sampling with the learned ratio."""

    plain: Tensor
    kept: Tensor
    before: float
    after: float
    acceptance: float

    @property
    def fold(self) -> float:
        """How many times nearer to the data rejection sampling came."""
        return self.before / self.after


def correct(bench: Bench, course: Course) -> Correction:
    """Figure 2: accept draws of the model in proportion to e^{H+E}, and measure 1-Wasserstein distances to p.

    The bound is the ratio that all but one in a thousand draws stay below: far out the network has learned
    nothing, and its largest value there would decide how few draws are accepted.
    """
    rng = generator(derive(bench.seed, "rejection", course.name))
    data = target().sample(bench.draws, rng).float()
    drawn = course.run.energy.sample(bench.draws, rng)  # pyright: ignore
    log_ratio = course.run.log_ratio(drawn)
    kept = rejection_sample(drawn, log_ratio, rng, log_bound=log_ratio.quantile(0.999).item())
    before, after = (float(wasserstein_1d(x, data)) for x in (drawn, kept.x))
    bench.say(f"{course.name}: W1 {before:.4f} → {after:.4f}, acceptance {kept.acceptance:.2f}")
    return Correction(drawn, kept.x, before, after, kept.acceptance)


def body(bench: Bench) -> list[Row]:
    """Every divergence, corrections, the baseline, and paths from several starts."""
    data = target().sample(bench.rows, generator(derive(bench.seed, "data"))).float()
    steps = bench.steps
    courses = {name: train(bench, data, name, SETTINGS[name], steps) for name in bench.divergences}
    corrections = {name: correct(bench, courses[name]) for name in bench.corrected}
    baselines = _baselines(bench, data)
    paths = {name: _from_starts(bench, data, name) for name in bench.paths}
    _draw_1(bench, courses)
    _draw_2(bench, corrections)
    _draw_3(bench, courses)
    if paths:
        _draw_4(bench, paths)
    return [
        *(row for course in courses.values() for row in _rows(bench, course)),
        *(row for name, found in corrections.items() for row in _correction_rows(bench, name, found)),
        *(row for label, course in baselines.items() for row in _baseline_rows(label, course)),
        *(_path_row(name, found) for name, found in paths.items()),
    ]


STARTS = ((-1.0, 2.5), (0.0, 1.0), (3.0, 1.0), (3.0, 2.5), (1.0, 3.0))
"""Of Figure 4; the paper draws its own at random and does not say which."""


def _from_starts(bench: Bench, data: Tensor, name: str) -> list[Course]:
    settings = [replace(SETTINGS[name], start=start) for start in STARTS]
    return [train(bench, data, name, s, bench.path_steps, label=f"from {s.start}") for s in settings]


FAR = (-6.0, 1.0)
"""A start that shares nothing with the data: draws of the model tell nothing of where the data are."""


def _baselines(bench: Bench, data: Tensor) -> dict[str, Course]:
    """Theorem 1 for as many updates from the same start; then both estimators from far away."""
    found = {}
    for name in bench.baselines:
        found[f"{name}/theorem1"] = train(
            bench, data, name, SETTINGS[name], bench.steps, estimator="theorem1"
        )
    for name in bench.far:
        away = replace(SETTINGS[name], start=FAR)
        for which in ("theorem1", "theorem3"):
            course = train(bench, data, name, away, bench.steps, label="far", estimator=which)
            found[f"{name}/far/{which}"] = course
    return found


def _rows(bench: Bench, course: Course) -> list[Row]:
    name, f = course.name, divergence_named(course.name)
    mu, sigma = course.errors
    return [
        Row(f"mu_error/{name}", mu, "<=", bench.tolerance),
        Row(f"sigma_error/{name}", sigma, "<=", bench.tolerance),
        Row(f"mu/{name}", course.place[0]),
        Row(f"sigma/{name}", course.place[1]),
        Row(f"divergence/{name}", exact_divergence(f, *course.place)),
        Row(f"divergence_seen/{name}", course.bound),
    ]


def _correction_rows(bench: Bench, name: str, found: Correction) -> list[Row]:
    return [
        Row(f"w1_before/{name}", found.before),
        Row(f"w1_after/{name}", found.after),
        Row(f"w1_fold/{name}", found.fold, ">=", bench.fold),
        Row(f"acceptance/{name}", found.acceptance),
    ]


def _baseline_rows(label: str, course: Course) -> list[Row]:
    mu, sigma = course.errors
    return [Row(f"mu_error/{label}", mu), Row(f"sigma_error/{label}", sigma)]


def _path_row(name: str, courses: list[Course]) -> Row:
    return Row(f"worst_error_of_five_starts/{name}", max(max(c.errors) for c in courses))


# ---- pictures


def _axes(figure: Any, n: int) -> list[Any]:
    columns = min(3, n)
    rows = -(-n // columns)
    axes = np.atleast_1d(figure.subplots(rows, columns, sharex=True, squeeze=False)).ravel()
    for spare in axes[n:]:
        spare.set_visible(False)
    return list(axes[:n])


def _figure(n: int, height: float = 2.3) -> Any:
    from metastable.report.figures import new_figure

    return new_figure(1.2 + 3.1 * min(3, n), 0.5 + height * -(-n // 3))


def _view() -> tuple[Tensor, NDArray[np.float64]]:
    x = torch.linspace(-4, 7, 441, dtype=torch.float64)
    return x, torch.exp(-target()(x[:, None])).numpy()


def _draw_1(bench: Bench, courses: Mapping[str, Course]) -> None:
    """Figure 1: the data, the best model under each divergence, and the learned one."""
    from metastable.report.figures import palette, save_figure

    x, p = _view()
    figure = _figure(len(courses))
    for axes, (name, course) in zip(_axes(figure, len(courses)), courses.items(), strict=True):
        axes.plot(x, p, color=palette.blue, label="data")
        axes.plot(x, log_model(x, *optimum(name)).exp(), color=palette.orange, lw=2.2, label="best model")
        axes.plot(x, log_model(x, *course.place).exp(), color="#b00020", ls="--", label="f-EBM")
        axes.set(title=name, ylim=(0, 0.6))
    figure.axes[0].legend(fontsize=7)
    save_figure(figure, bench.folder / "figure-1.png")


def _draw_2(bench: Bench, corrections: Mapping[str, Correction]) -> None:
    """Figure 2: draws of the model with and without rejection sampling."""
    from metastable.report.figures import palette, save_figure

    x, p = _view()
    figure = _figure(len(corrections), 2.8)
    look = {"bins": 110, "range": (-4, 7), "density": True, "alpha": 0.55}
    for axes, (name, found) in zip(_axes(figure, len(corrections)), corrections.items(), strict=True):
        axes.hist(found.plain[:, 0].numpy(), color=palette.purple, label="model", **look)
        axes.hist(found.kept[:, 0].numpy(), color=palette.green, label="after rejection", **look)
        axes.plot(x, p, color=palette.blue, lw=1.4, label="data")
        axes.set(title=f"{name}: W₁ {found.before:.3f} → {found.after:.3f}", ylim=(0, 0.62))
    figure.axes[0].legend(fontsize=7, loc="upper right")
    save_figure(figure, bench.folder / "figure-2.png")


def _draw_3(bench: Bench, courses: Mapping[str, Course]) -> None:
    """Figure 3: the true ratio of data to the learned model, and e^{H+E}."""
    from metastable.report.figures import palette, save_figure

    x, p = _view()
    figure = _figure(len(courses))
    for axes, (name, course) in zip(_axes(figure, len(courses)), courses.items(), strict=True):
        last = course.run.energy.place  # pyright: ignore
        learned = course.run.log_ratio(x[:, None].float()).exp()
        axes.plot(x, p / log_model(x, *last).exp().numpy(), color=palette.blue, label="p/q")
        axes.plot(x, learned, color="#b00020", ls="--", label="exp(H + E)")
        axes.set(title=name, yscale="log", ylim=(1e-2, 30))
    figure.axes[0].legend(fontsize=7, loc="upper right")
    save_figure(figure, bench.folder / "figure-3.png")


def _draw_4(bench: Bench, paths: Mapping[str, list[Course]]) -> None:
    """Figure 4: paths of (μ, σ) from five starts to the optimum."""
    from metastable.report.figures import palette, save_figure

    figure = _figure(len(paths), 3.0)
    for axes, (name, courses) in zip(_axes(figure, len(paths)), paths.items(), strict=True):
        for course, colour in zip(courses, palette, strict=False):
            axes.plot(*course.path.T, color=colour, lw=1.2)
            axes.plot(*course.path[0], "o", color=colour, ms=4)
        axes.plot(*optimum(name), "*", color="black", ms=11, zorder=5, label="optimum")
        axes.set(title=name, xlabel="μ", ylabel="σ")
        axes.legend(fontsize=7)
    save_figure(figure, bench.folder / "figure-4.png")


EXPERIMENT = Experiment(
    name="febm-1d",
    title="A Gaussian for data that are not: nine divergences and their density ratios (Fig. 1-4, Table 5)",
    paper="Yu, Song, Song, Ermon, ICML 2020, Section 6.1 and Appendix F",
    scales={
        "smoke": {
            "divergences": ("kl", "reverse-kl", "js"),
            "corrected": ("js",),
            "baselines": (),
            "far": (),
            "paths": (),
            "steps": 1500,
            "path_steps": 0,
            "batch": 1000,
            "rows": 1_000_000,
            "draws": 100_000,
            "log_every": 20,
            "tolerance": 0.05,
            "fold": 8.0,
        },
        "cpu": {
            "divergences": tuple(SETTINGS),
            "corrected": ("kl", "js", "reverse-kl"),
            "baselines": ("kl", "js"),
            "far": ("kl",),
            "paths": ("js", "reverse-kl"),
            "steps": 4000,
            "path_steps": 1500,
            "batch": 1000,
            "rows": 4_000_000,
            "draws": 200_000,
            "log_every": 20,
            "tolerance": 0.03,
            "fold": 8.0,
        },
    },
    body=body,
)
