"""Figures 3.1 to 3.3 of the AdaNCE thesis on small digits: rejuvenation, and what spectral normalisation is for.

Chains take the thesis's Langevin steps: the whole gradient (h = 1) and noise of standard deviation 0.005, which
samples exp(−E/T) at T = 1.25·10⁻⁵. They go on from a buffer, of which a share R begins afresh from noise at each
update. Every R is trained twice from the same weights, with and without spectral normalisation, and v, the mean of
‖∇E‖ along the chains, is followed. The guard stops a run whose energies explode; that is an outcome here, no error.

What a model has learned is then looked at with long chains from noise: how far they spread, and which classes of
digits they end in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metastable.api import fit, sample
from metastable.core.errors import DivergenceError
from metastable.core.random import derive, generator, seeded
from metastable.energies import spectral_norm
from metastable.evaluation.diagnosis import Facts, diagnose
from metastable.evaluation.modes import mode_weights, nearest_center
from metastable.kernels import ULA
from metastable.methods import AdaptiveNCE, PersistentCD
from metastable.proposals import fit_gaussian
from metastable.training.config import Adam

from .base import Bench, Experiment, Row

KINDS = ("spectral", "plain")
EARLY, LATE = (0.2, 0.3), (0.9, 1.0)
"""Shares of the training whose v are compared."""
NAMES = ("constant-energy", "mode-collapse", "samples-too-wide")
"""Findings that long chains and the spread of the energy can lead to."""
REPORTED = {("0%", "constant-energy"): "yes", ("100%", "mode-collapse"): "yes"}
"""Figure 3.1."""
MOST = 1e6
"""A growth that is reported as this much is at least this much: the guard stops where numbers end."""


class Digits(NamedTuple):
    """Images in [−1, 1], `(n, 1, s, s)`, and the mean image and share of each class."""

    x: Tensor
    centers: Tensor
    shares: Tensor


def digits(size: int) -> Digits:
    """scikit-learn's 1797 digits of 8 × 8 pixels, enlarged to `size` × `size` by linear interpolation."""
    from sklearn.datasets import load_digits

    pixels, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = F.interpolate(pixels.float().div(8).sub(1).view(-1, 1, 8, 8), size=(size, size), mode="bilinear")
    classes = [x[labels == c] for c in range(10)]
    return Digits(
        x, torch.stack([c.mean(0) for c in classes]), torch.tensor([len(c) / len(x) for c in classes])
    )


class LeakyConv(nn.Module):
    """Strided 4 × 4 convolutions and two linear layers with leaky ReLU, `(B, 1, s, s)` to `(B,)`."""

    def __init__(self, size: int, widths: Sequence[int], hidden: int, seed: int):
        super().__init__()
        self.event_shape = (1, size, size)
        with seeded(seed):
            layers: list[nn.Module] = []
            for before, after in zip((1, *widths), widths, strict=False):
                layers += [nn.Conv2d(before, after, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
            self.body = nn.Sequential(*layers, nn.Flatten())
            width = self.body(torch.zeros(1, *self.event_shape)).shape[1]
            self.head = nn.Sequential(nn.Linear(width, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).squeeze(-1)


@dataclass
class Course:
    """One training: v over updates, where it stopped, and what its long chains do."""

    kind: str
    rejuvenation: float
    steps: int
    history: list[dict[str, Any]] = field(default_factory=list)
    stopped: int | None = None
    energy_spread: float = math.nan
    fall: float = math.nan
    separation: float = math.nan
    long_run: Tensor | None = None
    findings: tuple[str, ...] = ()

    @property
    def v(self) -> np.ndarray:
        """The mean of ‖∇E‖ along the chains, one number for each line of the log."""
        return np.array([row["gradient_magnitude"] for row in self.history])

    @property
    def at(self) -> np.ndarray:
        """The updates of these lines."""
        return np.array([row["step"] for row in self.history])

    @property
    def growth(self) -> float:
        """Mean v in the last tenth over that from 20 to 30 %, of the updates that were made."""
        if len(self.history) < 10:  # stopped before there were windows to compare
            return MOST
        late, early = (self._mean(*window) for window in (LATE, EARLY))
        ratio = late / early
        return min(ratio, MOST) if math.isfinite(ratio) else MOST

    def _mean(self, low: float, high: float) -> float:
        end = self.at[-1]
        return float(self.v[(self.at > low * end) & (self.at <= high * end)].mean())


def kernel() -> ULA:
    """Section 5.1.2."""
    return ULA(step_size=1.0, noise=0.005)


def network(bench: Bench, kind: str) -> nn.Module:
    """The same initial weights for every course."""
    net = LeakyConv(bench.size, bench.widths, bench.hidden, derive(bench.seed, "network") % 2**31)
    return spectral_norm(net) if kind == "spectral" else net


def train(bench: Bench, data: Digits, kind: str, rejuvenation: float) -> tuple[Course, nn.Module]:
    """One training, to its end or to where the guard stops it."""
    course, energy = Course(kind, rejuvenation, bench.steps), network(bench, kind)
    source = PersistentCD(
        walkers=bench.buffer,
        batch=bench.batch,
        kernel=kernel(),
        steps=bench.langevin,
        rejuvenation=rejuvenation,
        start_at="noise",
    )
    try:
        fit(
            energy,
            data.x,
            AdaptiveNCE(source, interval=bench.interval, tempered=False),
            bench.steps,
            seed=bench.seed,
            units="none",
            batch_size=bench.batch,
            optimiser=Adam(bench.rate, betas=(0.0, 0.999)),
            log_every=max(1, bench.steps // 100),
            device=bench.device,
            evaluate=False,
            progress=course.history.append,
        )
    except DivergenceError as error:
        course.stopped = error.step
    return course, energy


def look(bench: Bench, data: Digits, course: Course, energy: nn.Module) -> None:
    """Energies of data and noise, long chains from noise, and the diagnosis in the course's own words."""
    x = data.x.to(bench.device)
    noise = fit_gaussian(x).sample(len(x), generator(derive(bench.seed, "noise"), x.device))
    with torch.no_grad():
        on_data, on_noise = energy(x), energy(noise)
    course.energy_spread = float(torch.cat([on_data, on_noise]).std()) / kernel().temperature
    course.fall = float(on_noise.mean() - on_data.mean())
    course.separation = course.fall / float(((on_noise.var() + on_data.var()) / 2).sqrt())
    init = noise[: bench.long_chains]
    course.long_run = sample(
        energy, len(init), kernel=kernel(), steps=bench.long_steps, init=init, seed=bench.seed
    ).x.cpu()
    course.findings = tuple(f.name for f in diagnose(course.history, facts(data, course)))


def facts(data: Digits, course: Course) -> Facts:
    """What the diagnosis is told of long chains: their classes, their spread, and the spread of the energy."""
    assert course.long_run is not None
    shares = mode_weights(course.long_run, data.centers)
    return Facts(
        method="adance",
        data_mode_weights=data.shares.tolist(),
        sample_mode_weights=shares.tolist(),
        mode_weight_se=(data.shares * (1 - data.shares) / len(course.long_run)).sqrt().tolist(),
        sample_std_ratio=spread(data, course),
        energy_spread=course.energy_spread,
    )


def spread(data: Digits, course: Course) -> float:
    """Standard deviation of long chains over that of the data, over all pixels."""
    assert course.long_run is not None
    ratio = course.long_run.flatten(1).var(0).sum() / data.x.flatten(1).var(0).sum()
    return float(ratio.sqrt())


def classes(data: Digits, course: Course) -> float:
    """exp of the entropy of the nearest-class histogram of long chains: 10 where all classes are met alike."""
    assert course.long_run is not None
    p = mode_weights(course.long_run, data.centers)
    return float(torch.special.entr(p).sum().exp())


def distinct(data: Digits, course: Course) -> float:
    """How many different images are nearest to one of the long chains, per chain."""
    assert course.long_run is not None
    return len(torch.unique(nearest_center(course.long_run, data.x))) / len(course.long_run)


def body(bench: Bench) -> list[Row]:
    """Every R, with and without spectral normalisation."""
    data = digits(bench.size)
    courses: dict[tuple[str, float], Course] = {}
    for R in bench.rejuvenations:
        for kind in KINDS:
            course, energy = train(bench, data, kind, R)
            if kind == "spectral" and course.stopped is None:  # chains of the others may leave for infinity
                look(bench, data, course, energy)
            courses[kind, R] = course
            end = "finished" if course.stopped is None else f"stopped by the guard at {course.stopped}"
            bench.say(f"R = {R:.0%}, {kind}: {end}, v grew {course.growth:.2f}-fold {course.findings}")
    _draw_v(bench, courses)
    _draw_long_run(bench, data, courses)
    return _rows(bench, data, courses)


def _rows(bench: Bench, data: Digits, courses: dict[tuple[str, float], Course]) -> list[Row]:
    rows = []
    for R in bench.rejuvenations:
        spectral, plain = courses["spectral", R], courses["plain", R]
        rows.append(Row(f"v_growth/spectral/R={R:.0%}", spectral.growth, "<=", 2.0))
        rows.append(Row(f"v_growth/plain/R={R:.0%}", plain.growth))
        rows.append(Row(f"updates_made/plain/R={R:.0%}", float(plain.stopped or bench.steps)))
    worse = [
        courses["plain", R].stopped is not None or courses["plain", R].growth > courses["spectral", R].growth
        for R in bench.rejuvenations
    ]
    rows.append(Row("plain_grows_further_or_stops", float(np.mean(worse)), ">=", bench.worse_target))
    most = bench.rejuvenations[-1]
    lost = {"mode-collapse", "samples-too-wide"} & set(courses["spectral", most].findings)
    rows.append(Row(f"long_run_named_lost/R={most:.0%}", float(bool(lost)), ">=", 1.0, paper="mode collapse"))
    for R in bench.rejuvenations:
        rows += _long_rows(data, courses["spectral", R])
    return rows


def _long_rows(data: Digits, course: Course) -> list[Row]:
    if course.long_run is None:
        return []
    R = f"{course.rejuvenation:.0%}"
    return [
        Row(f"fall_from_noise_to_data/R={R}", course.fall),
        Row(f"noise_to_data_in_std/R={R}", course.separation),
        Row(f"energy_spread_nats/R={R}", course.energy_spread),
        Row(f"long_run_classes/R={R}", classes(data, course)),
        Row(f"long_run_distinct/R={R}", distinct(data, course)),
        Row(f"long_run_spread/R={R}", spread(data, course)),
        *(
            Row(f"diagnosis/{name}/R={R}", float(name in course.findings), paper=REPORTED.get((R, name)))
            for name in NAMES
        ),
    ]


def _draw_v(bench: Bench, courses: dict[tuple[str, float], Course]) -> None:
    """Figures 3.2 and 3.3: v over training for each R."""
    from metastable.report.figures import new_figure, palette, save_figure

    figure = new_figure(8, 3.4)
    axes = figure.subplots(1, 2, sharey=True)
    titles = {"plain": "without spectral norm", "spectral": "with spectral norm"}
    top = 20 * max(
        float(np.nanmax(c.v, initial=0.1)) for (kind, _), c in courses.items() if kind == "spectral"
    )
    for axis, kind in zip(axes, ("plain", "spectral"), strict=True):
        for R, colour in zip(bench.rejuvenations, palette, strict=False):
            course = courses[kind, R]
            if not course.history:
                continue
            axis.plot(course.at, course.v, color=colour, lw=1.2, label=f"R = {R:.0%}")
            if course.stopped is not None:
                axis.plot(course.at[-1], 0.7 * top, "x", color=colour, ms=7, mew=2)
        axis.set(title=titles[kind], xlabel="update", yscale="log", xlim=(0, 1.02 * bench.steps))
    axes[0].set(ylabel="v, mean of ‖∇E‖ along chains", ylim=(None, top))
    axes[0].text(0.97, 0.9, "× stopped by the guard", transform=axes[0].transAxes, ha="right", fontsize=8)
    axes[1].legend(fontsize=7)
    save_figure(figure, bench.folder / "figure-3-2.png")


def _draw_long_run(
    bench: Bench, data: Digits, courses: dict[tuple[str, float], Course], count: int = 8
) -> None:
    """Figure 3.1: where long chains end, a row for each R, and data for comparison."""
    from metastable.report.figures import new_figure, save_figure

    rows = [("data", data.x[:: len(data.x) // count][:count])]
    for R in bench.rejuvenations:
        x = courses["spectral", R].long_run
        if x is not None:
            rows.append((f"R = {R:.0%}", x[:count]))
    figure = new_figure(0.62 * count + 0.8, 0.68 * len(rows))
    axes = figure.subplots(len(rows), count, squeeze=False)
    for (label, images), line in zip(rows, axes, strict=True):
        for image, axis in zip(images, line, strict=True):
            axis.imshow(image[0], cmap="gray", vmin=-1, vmax=1)
            axis.set(xticks=[], yticks=[])
            axis.grid(False)
        line[0].set_ylabel(label, rotation=0, ha="right", va="center")
    save_figure(figure, bench.folder / "figure-3-1.png")


PAPER = {"rejuvenations": (0.0, 0.05, 0.1, 0.25, 1.0)}

EXPERIMENT = Experiment(
    name="adance-stability",
    title="Digits: rejuvenation and spectral normalisation in self-adapting NCE (Fig. 3.1–3.3)",
    paper="Nathaniel Xu, Self-adapting noise-contrastive estimation for energy-based models, 2022, Section 3.2",
    scales={
        "smoke": {
            "rejuvenations": (0.0, 1.0),
            "size": 8,
            "widths": (16,),
            "hidden": 32,
            "interval": 5,
            "langevin": 5,
            "buffer": 256,
            "batch": 32,
            "steps": 200,
            "rate": 5e-3,
            "long_chains": 160,
            "long_steps": 300,
            "worse_target": 0.5,
        },
        "cpu": PAPER
        | {
            "size": 16,
            "widths": (16, 32),
            "hidden": 64,
            "interval": 5,
            "langevin": 10,
            "buffer": 1000,
            "batch": 32,
            "steps": 800,
            "rate": 2e-3,
            "long_chains": 200,
            "long_steps": 1000,
            "worse_target": 0.8,
        },
        "gpu": PAPER
        | {
            "size": 28,
            "widths": (32, 64, 128),
            "hidden": 128,
            "interval": 5,
            "langevin": 20,
            "buffer": 10_000,
            "batch": 128,
            "steps": 1000,
            "rate": 1e-3,
            "long_chains": 500,
            "long_steps": 2000,
            "worse_target": 0.8,
        },
    },
    body=body,
)
