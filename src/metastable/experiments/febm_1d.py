"""Section 6.1 of the f-EBM paper: a Gaussian model of data that are not Gaussian, by nine divergences.

The data are 0.33·N(−1, 0.0625) + 0.67·N(2, 2), the model ½((x−μ)/σ)², so each divergence has its own best (μ, σ),
which quadrature and minimisation find exactly. Training sees only draws of both. Figure 1 shows the densities,
Table 5 the parameters, Figure 3 the density ratio that comes with them, Figure 2 what rejection sampling makes of
the model's draws with it, Figure 4 the paths from five starts. Section 3.1's baseline (Theorem 1) is trained for as
long, from the same start and from one far away, where it gets no signal. The draws are exact ones; the paper "does
not leverage" that the model can be drawn from, so every divergence is also trained by chains from a replay buffer,
and those that start elsewhere here also from the paper's start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metastable.core.random import derive, generator
from metastable.energies import MLP
from metastable.evaluation.distances import wasserstein_1d
from metastable.methods import ExactDraws, FDivergence, PersistentCD, rejection_sample
from metastable.report.figures import palette, picture
from metastable.training.config import Adam, Schedule

from .base import Bench, Experiment, Row
from .febm_exact import Bell, divergence_named, exact_divergence, f_and_alpha, log_model, optimum, target
from .trials import Arm, Line, Problem, Trial, Trials, by_scale

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
    # weighs by p/q: infinite from σ = 1, safe from the wide side
    "pearson": Setting(start=(0.0, 3.0), clip=1.0),
}
"""The nine divergences. The paper starts all of them at μ = 0 and σ = 1; where that fails, the start is named."""


class Task(NamedTuple):
    """What sets an arm apart: its divergence, where it starts, and the seed that its names give it."""

    name: str
    start: tuple[float, float]
    seed: int


def arm_of(
    bench: Bench,
    name: str,
    *,
    label: str = "",
    start: tuple[float, float] | None = None,
    estimator: str = "theorem3",
    steps: int | None = None,
    chains: bool = False,
) -> Arm:
    """Algorithm 1 with `batch` draws of the model, exact or of chains, and as many rows of data or more."""
    setting, (f, alpha) = SETTINGS[name], f_and_alpha(name)
    seed = derive(bench.seed, name, label, estimator) % 2**31
    method = FDivergence(
        source=langevin(bench) if chains else ExactDraws(walkers=bench.batch),
        f=f,
        alpha=alpha,
        ratio=MLP(1, hidden=(64, 64), activation="tanh", seed=seed),
        energy_rate=1.0,  # as in the paper
        estimator=estimator,
    )
    settings = {
        "steps": steps or bench.steps,
        "batch_size": setting.data * bench.batch,
        "optimiser": Adam(setting.learning_rate, setting.betas),
        "clip_grad_norm": setting.clip,
    }
    parts = [name, label, "" if estimator == "theorem3" and label != "far" else estimator]
    return Arm(
        "/".join(part for part in parts if part), method, settings, Task(name, start or setting.start, seed)
    )


def langevin(bench: Bench) -> PersistentCD:
    """Langevin dynamics with a replay buffer (line 5); steps so short that σ is 1 % too wide at most.

    No chain starts anew: one in twenty did at first, and these, not yet where the model is, moved every optimum by
    0.1 to 0.7.
    """
    return PersistentCD(
        walkers=10 * bench.batch, batch=bench.batch, step_size=0.05, steps=20, rejuvenation=0.0
    )


def trained(bench: Bench, data: Tensor, arms: list[Arm], may_stop: bool = False) -> dict[str, Trial]:
    """Every arm once, from its own start; μ and σ are watched, the ratio is kept, and for some the correction."""

    def keep(trial: Trial, at: Problem, run: Any) -> Learned:
        log_ratio = run.log_ratio(_view()[0][:, None].float())
        name = trial.arm.name
        return Learned(
            run.energy.place, log_ratio, correct(bench, name, run) if name in bench.corrected else None
        )

    def watch(at: Problem, line: Line) -> Line:
        return dict(zip(("mu", "sigma"), at.model.place, strict=True))

    settings = {"schedule": Schedule("cosine"), "log_every": bench.log_every}
    found = Trials(
        arms,
        lambda arm, seed: Problem(Bell(*arm.about.start), data),
        settings | {"device": "cpu"},  # two thousand numbers are no work for an accelerator
        seed=lambda bench, arm, repeat: arm.about.seed,
        watch=watch,
        from_start=True,
        keep=keep,
        may_stop=may_stop,
        words=lambda t: "mu {:.4f} sigma {:.4f}, off by {:.4f} {:.4f}".format(*place(t), *errors(t)),
        records=(Learned, Correction),
    ).run(bench)
    return {name: trial for name, (trial,) in found.items()}


def path(trial: Trial) -> NDArray[np.float64]:
    """(μ, σ) from the start on, `(lines, 2)`."""
    return np.stack([trial.curves["mu"], trial.curves["sigma"]], 1)


def place(trial: Trial) -> tuple[float, float]:
    """(μ̂, σ̂), the average over the last fifth of the updates."""
    mu, sigma = path(trial)[-max(1, len(trial.curves) // 5) :].mean(0)
    return float(mu), float(sigma)


def errors(trial: Trial) -> tuple[float, float]:
    """|μ̂ − μ*| and |σ̂ − σ*|."""
    found, best = place(trial), optimum(trial.arm.about.name)
    return abs(found[0] - best[0]), abs(found[1] - best[1])


def bound(trial: Trial) -> float:
    """The divergence as training saw it: (14) on its own batches, over the last fifth."""
    seen = trial.curves["divergence"][1:]
    return float(np.mean(seen[-max(1, len(seen) // 5) :]))


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


def correct(bench: Bench, name: str, run: Any) -> Correction:
    """Figure 2: accept draws of the model in proportion to e^{H+E}, and measure 1-Wasserstein distances to p.

    The bound is the ratio that all but one in a thousand draws stay below: far out the network has learned
    nothing, and its largest value there would decide how few draws are accepted.
    """
    rng = generator(derive(bench.seed, "rejection", name))
    data = target().sample(bench.draws, rng).float()
    drawn = run.energy.sample(bench.draws, rng)
    log_ratio = run.log_ratio(drawn)
    kept = rejection_sample(drawn, log_ratio, rng, log_bound=log_ratio.quantile(0.999).item())
    before, after = (float(wasserstein_1d(x, data)) for x in (drawn, kept.x))
    return Correction(drawn, kept.x, before, after, kept.acceptance)


class Learned(NamedTuple):
    """What is kept of a training: its last (μ, σ), H + E along the figures' axis, and its correction, if any."""

    place: tuple[float, float]
    log_ratio: Tensor
    correction: Correction | None


STARTS = ((-1.0, 2.5), (0.0, 1.0), (3.0, 1.0), (3.0, 2.5), (1.0, 3.0))
"""Of Figure 4; the paper draws its own at random and does not say which."""
FAR = (-6.0, 1.0)
"""A start that shares nothing with the data: draws of the model tell nothing of where the data are."""


def body(bench: Bench) -> list[Row]:
    """Every divergence, corrections, Theorem 1 for as many updates, and paths from several starts."""
    data = target().sample(bench.rows, generator(derive(bench.seed, "data"))).float()
    found = trained(bench, data, [arm_of(bench, name) for name in bench.divergences])
    corrections: dict[str, Correction] = {name: found[name].kept.correction for name in bench.corrected}
    for name, c in corrections.items():
        bench.say(f"{name}: W1 {c.before:.4f} → {c.after:.4f}, acceptance {c.acceptance:.2f}")
    others = [arm_of(bench, name, estimator="theorem1") for name in bench.baselines]
    for name in bench.far:
        others += [arm_of(bench, name, label="far", start=FAR, estimator=f"theorem{k}") for k in (1, 3)]
    baselines = trained(bench, data, others)
    paths = {}
    for name in bench.paths:
        arms = [
            arm_of(bench, name, label=f"from {start}", start=start, steps=bench.path_steps)
            for start in STARTS
        ]
        paths[name] = list(trained(bench, data, arms).values())
    others = [arm_of(bench, name, label="chains", chains=True) for name in bench.chains]
    elsewhere = [name for name in bench.chains if SETTINGS[name].start != Setting().start]
    others += [arm_of(bench, name, label="paper's start", start=Setting().start) for name in elsewhere]
    published = trained(bench, data, others, may_stop=True)
    _draw_1(bench, found)
    _draw_2(bench, corrections)
    _draw_3(bench, found)
    if paths:
        _draw_4(bench, paths)
    return [*rows_of(bench, found, corrections, baselines, paths), *published_rows(bench, published)]


def published_rows(bench: Bench, published: Mapping[str, Trial]) -> list[Row]:
    """Chains in the place of exact draws, and the paper's start, each with the optimum beside it."""
    rows: list[Row] = []
    for name, trial in published.items():
        (mu, sigma), best, off = place(trial), optimum(trial.arm.about.name), errors(trial)
        judged = name == "js/chains"
        relation, most = ("<=", bench.chain_tolerance) if judged else (None, None)
        rows += [
            Row(f"error/{name}", max(off), relation, most),
            Row(f"mu/{name}", mu, oracle=best[0]),
            Row(f"sigma/{name}", sigma, oracle=best[1]),
            Row(f"updates_made/{name}", float(trial.stopped or bench.steps)),
        ]
    return rows


def rows_of(
    bench: Bench,
    found: Mapping[str, Trial],
    corrections: Mapping[str, Correction],
    baselines: Mapping[str, Trial],
    paths: Mapping[str, list[Trial]],
) -> list[Row]:
    """Errors of the parameters with their tolerance; what rejection sampling gained; the others' errors."""
    rows: list[Row] = []
    for name, trial in found.items():
        (mu, sigma), at = errors(trial), place(trial)
        rows += [
            Row(f"mu_error/{name}", mu, "<=", bench.tolerance),
            Row(f"sigma_error/{name}", sigma, "<=", bench.tolerance),
            Row(f"mu/{name}", at[0], oracle=optimum(name)[0]),
            Row(f"sigma/{name}", at[1], oracle=optimum(name)[1]),
            Row(f"divergence/{name}", exact_divergence(divergence_named(name), *at)),
            Row(f"divergence_seen/{name}", bound(trial)),
        ]
    for name, correction in corrections.items():
        rows += [
            Row(f"w1_before/{name}", correction.before),
            Row(f"w1_after/{name}", correction.after),
            Row(f"w1_fold/{name}", correction.fold, ">=", bench.fold),
            Row(f"acceptance/{name}", correction.acceptance),
        ]
    for name, trial in baselines.items():
        mu, sigma = errors(trial)
        rows += [Row(f"mu_error/{name}", mu), Row(f"sigma_error/{name}", sigma)]
    for name, trials in paths.items():
        rows.append(Row(f"worst_error_of_five_starts/{name}", max(max(errors(t)) for t in trials)))
    return rows


# ---- pictures


@contextmanager
def _panels(bench: Bench, file: str, names: Iterable[str], height: float = 2.3) -> Iterator[dict[str, Any]]:
    """Axes by name, three in a row; the figure is saved when the `with` ends."""
    names = list(names)
    columns, rows = min(3, len(names)), -(-len(names) // 3)
    size = 1.2 + 3.1 * columns, 0.5 + height * rows
    with picture(bench.folder / file, *size, rows, columns, sharex=True, squeeze=False) as axes:
        for spare in axes.flat[len(names) :]:
            spare.set_visible(False)
        yield dict(zip(names, axes.flat, strict=False))
        axes[0, 0].legend(fontsize=7, loc="upper right")


def _view() -> tuple[Tensor, NDArray[np.float64]]:
    x = torch.linspace(-4, 7, 441, dtype=torch.float64)
    return x, torch.exp(-target()(x[:, None])).numpy()


def _draw_1(bench: Bench, found: Mapping[str, Trial]) -> None:
    """Figure 1: the data, the best model under each divergence, and the learned one."""
    x, p = _view()
    with _panels(bench, "figure-1.png", found) as panels:
        for name, axes in panels.items():
            best, learned = (log_model(x, *at).exp() for at in (optimum(name), place(found[name])))
            axes.plot(x, p, color=palette.blue, label="data")
            axes.plot(x, best, color=palette.orange, lw=2.2, label="best model")
            axes.plot(x, learned, color="#b00020", ls="--", label="f-EBM")
            axes.set(title=name, ylim=(0, 0.6))


def _draw_2(bench: Bench, corrections: Mapping[str, Correction]) -> None:
    """Figure 2: draws of the model with and without rejection sampling."""
    x, p = _view()
    look = {"bins": 110, "range": (-4, 7), "density": True, "alpha": 0.55}
    with _panels(bench, "figure-2.png", corrections, 2.8) as panels:
        for name, axes in panels.items():
            found = corrections[name]
            axes.hist(found.plain[:, 0].numpy(), color=palette.purple, label="model", **look)
            axes.hist(found.kept[:, 0].numpy(), color=palette.green, label="after rejection", **look)
            axes.plot(x, p, color=palette.blue, lw=1.4, label="data")
            axes.set(title=f"{name}: W₁ {found.before:.3f} → {found.after:.3f}", ylim=(0, 0.62))


def _draw_3(bench: Bench, found: Mapping[str, Trial]) -> None:
    """Figure 3: the true ratio of data to the learned model, and e^{H+E}."""
    x, p = _view()
    with _panels(bench, "figure-3.png", found) as panels:
        for name, axes in panels.items():
            kept: Learned = found[name].kept
            axes.plot(x, p / log_model(x, *kept.place).exp().numpy(), color=palette.blue, label="p/q")
            axes.plot(x, kept.log_ratio.exp(), color="#b00020", ls="--", label="exp(H + E)")
            axes.set(title=name, yscale="log", ylim=(1e-2, 30))


def _draw_4(bench: Bench, paths: Mapping[str, list[Trial]]) -> None:
    """Figure 4: paths of (μ, σ) from five starts to the optimum."""
    with _panels(bench, "figure-4.png", paths, 3.0) as panels:
        for name, axes in panels.items():
            for trial, colour in zip(paths[name], palette, strict=False):
                axes.plot(*path(trial).T, color=colour, lw=1.2)
                axes.plot(*path(trial)[0], "o", color=colour, ms=4)
            axes.plot(*optimum(name), "*", color="black", ms=11, zorder=5, label="optimum")
            axes.set(title=name, xlabel="μ", ylabel="σ")


EXPERIMENT = Experiment(
    name="febm-1d",
    title="A Gaussian for data that are not: nine divergences and their density ratios (Fig. 1-4, Table 5)",
    paper="Yu, Song, Song, Ermon, ICML 2020, Section 6.1 and Appendix F",
    scales=by_scale(
        {"batch": 1000, "log_every": 20, "fold": 8.0},
        divergences=(("kl", "reverse-kl", "js"), tuple(SETTINGS)),
        corrected=(("js",), ("kl", "js", "reverse-kl")),
        baselines=((), ("kl", "js")),
        far=((), ("kl",)),
        paths=((), ("js", "reverse-kl")),
        steps=(1500, 4000),
        path_steps=(0, 1500),
        rows=(1_000_000, 4_000_000),
        draws=(100_000, 200_000),
        tolerance=(0.05, 0.03),
        chains=(("js",), tuple(SETTINGS)),
        chain_tolerance=(0.15, 0.05),
    ),
    body=body,
)
