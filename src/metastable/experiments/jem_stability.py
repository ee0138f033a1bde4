"""Appendix M of the β paper in small: a JEM that diverges under plain training, and with β does not.

Scenario 1 is the paper's default, scenario 2 takes a quarter of its SGLD steps, scenario 6 four times its α at a
quarter of its output scale, which doubles the noise of a chain and leaves its drift as it is. In small, a small
wide residual network learns small digits at ten times the paper's learning rate, so that what takes the paper
epochs takes hundreds of updates, with a quarter of the SGLD steps and twice the output scale; scenario 6 keeps the
learning rate there, which the paper divides by four.

Every seed is trained with plain training (β = 0) and with β; where the guard stops a run, that is the outcome which
is counted. The same network as a classifier alone, by the same trainer, says what accuracy there is to lose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.api import fit
from metastable.core.errors import DivergenceError, InputError
from metastable.core.random import derive
from metastable.data import Dataset, load_array, load_images
from metastable.energies import JointEnergy, WideResNet
from metastable.methods import JEM, PersistentCD, Robust
from metastable.training.config import Adam, Schedule

from .base import Bench, Experiment, Row

TAIL = 0.2
"""Accuracies are means over this share of a training's last lines: one line is one lucky batch."""
CLASSIFIER = -1.0
"""In the place of β·o: cross-entropy only."""


@dataclass(frozen=True)
class Scenario:
    """What a scenario changes.

    Attributes:
        number: its number in Appendix M.
        alpha: α of SGLD: drift α/2 on ∇E, noise √α.
        output_scale: o.
        steps: SGLD steps in an update.
        slower: what the learning rate is divided by.
    """

    number: int
    alpha: float = 1e-4
    output_scale: float = 20_000.0
    steps: int = 20
    slower: float = 1.0


PUBLISHED = {
    1: Scenario(1),
    2: Scenario(2, steps=5),
    6: Scenario(6, alpha=4e-4, output_scale=5_000.0, slower=4.0),
}
IN_SMALL = {
    1: Scenario(1, output_scale=40_000.0, steps=5),
    2: Scenario(2, output_scale=40_000.0, steps=1),
    6: Scenario(6, alpha=4e-4, output_scale=10_000.0, steps=5),
}


def scenario_of(bench: Bench, number: int) -> Scenario:
    """As published at the paper's own size, in small otherwise."""
    return (PUBLISHED if bench.published else IN_SMALL)[number]


PAPER = {
    (1, "plain"): "0.905",
    (1, "robust"): "0.917",
    (2, "plain"): "0.100",
    (2, "robust"): "0.883",
    (6, "plain"): "0.362",
    (6, "robust"): "0.924",
}
"""Test accuracy on CIFAR-10, Table 2."""


@dataclass(frozen=True)
class Task:
    """Pictures to train on and to test on, with their labels."""

    name: str
    train: Dataset
    test: Dataset


@dataclass
class Course:
    """One training, to its end or to where the guard stopped it.

    Attributes:
        beta_o: β·o; `CLASSIFIER` for cross-entropy only.
        seed: of the training.
        history: its lines of metrics, with the test accuracy as `test_accuracy`.
        stopped: the update at which the guard stopped it.
        buffer: the chains as they were left, `(n, *event)`.
    """

    beta_o: float
    seed: int
    history: list[dict[str, Any]] = field(default_factory=list)
    stopped: int | None = None
    buffer: Tensor | None = None

    def column(self, name: str) -> np.ndarray:
        """One number for each line; NaN where a line has none."""
        return np.array([row.get(name, math.nan) for row in self.history])

    @property
    def accuracy(self) -> float:
        """Test accuracy at the end; of a run that was stopped, the best that it had before."""
        values = self.column("test_accuracy")
        if self.stopped is not None:
            return float(values.max(initial=0.0))
        return float(values[-max(1, round(TAIL * len(values))) :].mean())

    def share(self, name: str) -> float:
        """A metric's mean over the end of the training."""
        values = self.column(name)
        return float(values[-max(1, round(TAIL * len(values))) :].mean())


# ---- data


def tasks(bench: Bench) -> list[Task]:
    """The data sets of this scale whose files are here; what is missing is said."""
    found = []
    for name in bench.data:
        try:
            found.append(digits(bench.test_share) if name == "digits" else pictures(bench, name))
        except InputError as error:
            bench.say(f"{name} is left out: {error}")
    if not found:
        raise InputError(f"data: none of {', '.join(bench.data)} could be read")
    return found


def digits(test_share: float) -> Task:
    """scikit-learn's 1797 digits of 8 × 8 pixels; one split for every seed."""
    test, train = reversed(load_array("toy:digits").split(test_share, seed=0))
    return Task("digits", train, test)


def pictures(bench: Bench, name: str) -> Task:
    """MNIST or CIFAR-10, shrunk where the scale says so."""
    size, n, m = bench.size, bench.train_rows, bench.test_rows
    train = load_images(name, split="train", size=size, n=n)
    return Task(name, train, load_images(name, split="test", size=size, n=m))


# ---- training


def method_of(bench: Bench, scenario: Scenario, beta_o: float) -> JEM:
    """Appendix M's: a replay buffer with uniform starts, and the β objective on its chains."""
    source = PersistentCD(
        walkers=bench.buffer,
        batch=bench.batch,
        steps=scenario.steps,
        step_size=scenario.alpha / 2,
        start_at="noise",
        noise="uniform",
        rejuvenation=0.05,
    )
    if beta_o == CLASSIFIER:  # one chain that hardly moves, and counts for nothing
        idle = PersistentCD(walkers=1, batch=1, step_size=1e-12, rejuvenation=1.0)
        return JEM(source=idle, generative=0.0)
    return JEM(source=Robust(source=source, beta=beta_o / scenario.output_scale))


def train(bench: Bench, task: Task, scenario: Scenario, beta_o: float, seed: int) -> Course:
    """One training."""
    course = Course(beta_o, seed)
    shape, classes = task.train.event_shape, 10
    network = WideResNet(shape, bench.depth, bench.width, classes, derive(seed, "network") % 2**31)
    energy = JointEnergy(network, scenario.output_scale)
    assert task.test.labels is not None
    x, labels = task.test.x.to(bench.device), task.test.labels.to(bench.device)

    def record(row: dict[str, Any]) -> None:
        course.history.append({**row, "test_accuracy": accuracy_of(energy, x, labels)})

    try:
        run = fit(
            energy,
            task.train,
            method_of(bench, scenario, beta_o),
            bench.steps,
            seed=seed,
            batch_size=bench.batch,
            optimiser=Adam(bench.rate / scenario.slower),
            schedule=schedule_of(bench),
            data_noise=0.03,
            log_every=max(1, bench.steps // 60),
            device=bench.device,
            evaluate=False,
            progress=record,
        )
        course.buffer = None if run.walkers is None else run.walkers.x.cpu()
    except DivergenceError as error:
        course.stopped = error.step
    return course


def schedule_of(bench: Bench) -> Schedule:
    """The paper's: a warm-up, and ×0.3 at 80 and 90 % of the training."""
    drops = tuple(round(share * bench.steps) for share in bench.drops)
    return Schedule("step" if drops else "constant", warmup=bench.warmup, drops=drops, drop=0.3)


@torch.no_grad()
def accuracy_of(energy: JointEnergy, x: Tensor, labels: Tensor, rows: int = 500) -> float:
    """Share of test pictures that are classified right."""
    right = [
        (energy.logits(a).argmax(1) == b).sum()
        for a, b in zip(x.split(rows), labels.split(rows), strict=True)
    ]
    return float(torch.stack(right).sum()) / len(x)


# ---- what comes out

Courses = dict[tuple[str, int, float], list[Course]]


def body(bench: Bench) -> list[Row]:
    """Every data set, scenario, β and seed."""
    found, courses = tasks(bench), Courses()
    for task in found:
        alone: dict[
            float, list[Course]
        ] = {}  # by learning rate: the classifier has nothing else of a scenario
        for number in bench.data[task.name]:
            scenario = scenario_of(bench, number)
            if scenario.slower not in alone:
                alone[scenario.slower] = every_seed(bench, task, scenario, CLASSIFIER)
            courses[task.name, number, CLASSIFIER] = alone[scenario.slower]
            for beta_o in bench.betas:
                courses[task.name, number, beta_o] = every_seed(bench, task, scenario, beta_o)
        _draw(bench, task, courses)
        _draw_buffers(bench, task, courses)
    return rows_of(bench, [task.name for task in found], courses)


def every_seed(bench: Bench, task: Task, scenario: Scenario, beta_o: float) -> list[Course]:
    """One training after the other."""
    made = [train(bench, task, scenario, beta_o, bench.seed + i) for i in range(bench.seeds)]
    bench.say(f"{task.name}, scenario {scenario.number}, {_label(beta_o)}: {_summary(made)}")
    return made


def _summary(courses: Sequence[Course]) -> str:
    stops = [c.stopped for c in courses if c.stopped is not None]
    where = f" at {', '.join(map(str, stops))}" if stops else ""
    return f"{len(stops)} of {len(courses)} stopped{where}; accuracy {mean_accuracy(courses):.3f}"


def _label(beta_o: float) -> str:
    return "classifier alone" if beta_o == CLASSIFIER else f"β·o = {beta_o:g}"


def mean_accuracy(courses: Sequence[Course]) -> float:
    """Over seeds."""
    return float(np.mean([course.accuracy for course in courses]))


def stopped_share(courses: Sequence[Course]) -> float:
    """Of the seeds, those that the guard stopped."""
    return float(np.mean([course.stopped is not None for course in courses]))


def rows_of(bench: Bench, names: Sequence[str], courses: Courses) -> list[Row]:
    """Who was stopped, and what it cost in accuracy."""
    rows = []
    for name in names:
        for number in bench.data[name]:
            of = {b: courses[name, number, b] for b in (CLASSIFIER, *bench.betas)}
            rows += _rows(bench, f"{name}/scenario_{number}", number, of)
    return rows + [Row(f"data_found/{name}", float(name in names)) for name in bench.data]


def _rows(bench: Bench, where: str, number: int, of: dict[float, list[Course]]) -> list[Row]:
    plain, robust, alone = of[0.0], of[bench.stated], mean_accuracy(of[CLASSIFIER])
    at = f"beta_o={bench.stated:g}"
    published = PAPER if bench.scale == "gpu" else {}
    rows = [
        Row(f"stopped/{where}/beta_o=0", stopped_share(plain), ">=", bench.plain_stopped),
        Row(f"stopped/{where}/{at}", stopped_share(robust), "<=", 0.0),
        Row(f"accuracy_lost/{where}/{at}", mean_accuracy(plain) - mean_accuracy(robust), "<=", 0.0),
        Row(f"accuracy_lost/{where}/{at}_to_classifier", alone - mean_accuracy(robust)),
        Row(f"accuracy/{where}/classifier", alone),
        Row(f"accuracy/{where}/beta_o=0", mean_accuracy(plain), paper=published.get((number, "plain"))),
        Row(f"accuracy/{where}/{at}", mean_accuracy(robust), paper=published.get((number, "robust"))),
        Row(f"grad_scale/{where}/{at}", float(np.mean([c.share("grad_scale") for c in robust]))),
        Row(
            f"negatives_ignored/{where}/{at}", float(np.mean([c.share("negatives_ignored") for c in robust]))
        ),
    ]
    stops = [c.stopped for c in plain if c.stopped is not None]
    if stops:
        rows.append(Row(f"updates_made/{where}/beta_o=0", float(np.mean(stops))))
    for beta_o in bench.betas:
        if beta_o not in (0.0, bench.stated):
            rows.append(Row(f"stopped/{where}/beta_o={beta_o:g}", stopped_share(of[beta_o])))
            rows.append(Row(f"accuracy/{where}/beta_o={beta_o:g}", mean_accuracy(of[beta_o])))
    return rows


# ---- pictures

PANELS = (
    ("gap", "data − negatives, log Σ eʰ"),
    ("grad_scale", "mean weight"),
    ("negatives_effective", "negatives that count"),
    ("test_accuracy", "test accuracy"),
)


def _values(course: Course, name: str, scenario: Scenario) -> np.ndarray:
    if name == "gap":  # f = −E, in units of o: what the paper draws
        return -course.column("energy_gap") / scenario.output_scale
    return course.column(name)


def _draw(bench: Bench, task: Task, courses: Courses) -> None:
    """Figures 3 and 16: a column for each scenario; gap, weights and accuracy over updates, a line for a seed."""
    from metastable.report.figures import new_figure, palette, save_figure

    numbers = bench.data[task.name]
    columns = len(numbers)
    figure = new_figure(1.2 + 2.7 * columns, 7.2)
    axes = figure.subplots(len(PANELS), columns, squeeze=False, sharex=True, sharey="row")
    for j, number in enumerate(numbers):
        for i, (name, _) in enumerate(PANELS):
            for beta_o, colour in zip(bench.betas, palette, strict=False):
                for k, course in enumerate(courses[task.name, number, beta_o]):
                    _line(
                        axes[i, j],
                        course,
                        _values(course, name, scenario_of(bench, number)),
                        colour,
                        None if k else beta_o,
                    )
        axes[0, j].set_title(f"scenario {number}")
        axes[-1, j].set(xlabel="update", xlim=(0, 1.02 * bench.steps))
    for i, (_, label) in enumerate(PANELS):
        axes[i, 0].set_ylabel(label)
    _symmetric_log(axes[0, 0])
    axes[1, 0].set_ylim(-0.05, 1.1)
    axes[3, 0].set_ylim(0, 1.02)
    axes[3, 0].legend(fontsize=7, loc="lower right")
    save_figure(figure, bench.folder / f"stability-{task.name}.png", dpi=120)


def _symmetric_log(axis: Any) -> None:
    """Linear up to ±1, logarithmic beyond; plain numbers, as the scale's own labels need mathtext, which is off."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_yscale("symlog", linthresh=1.0)
    axis.yaxis.set_major_locator(FixedLocator([-1e4, -1e2, -1.0, 0.0, 1.0, 1e2, 1e4, 1e6]))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = axis.dataLim.intervaly
    axis.set_ylim(min(-3.0, 3 * low), max(3.0, 3 * high))


def _line(axis: Any, course: Course, values: np.ndarray, colour: str, beta_o: float | None) -> None:
    label = None if beta_o is None else f"β·o = {beta_o:g}"
    steps = course.column("step")
    axis.plot(steps, values, color=colour, lw=0.9, alpha=0.8, label=label)
    if course.stopped is not None and len(values):
        axis.plot(steps[-1], values[-1], "x", color=colour, ms=5, mew=1.5)


def _draw_buffers(bench: Bench, task: Task, courses: Courses, count: int = 10) -> None:
    """Figure 4: chains of the buffer at the end, a row for each scenario and β, and data for comparison."""
    from metastable.report.figures import new_figure, save_figure

    lines = [("data", task.train.x[:count])]
    for number in bench.data[task.name]:
        for beta_o in bench.betas:
            buffer = next(
                (c.buffer for c in courses[task.name, number, beta_o] if c.buffer is not None), None
            )
            if buffer is not None:
                lines.append((f"scenario {number}, β·o = {beta_o:g}", buffer[:count]))
    figure = new_figure(0.6 * count + 1.6, 0.66 * len(lines))
    axes = figure.subplots(len(lines), count, squeeze=False)
    for (label, images), row in zip(lines, axes, strict=True):
        for image, axis in zip(images, row, strict=True):
            shown = image.clamp(-1, 1).add(1).div(2).permute(1, 2, 0)
            axis.imshow(shown if shown.shape[2] == 3 else shown[..., 0], cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            axis.grid(False)
        row[0].set_ylabel(label, rotation=0, ha="right", va="center")
    save_figure(figure, bench.folder / f"chains-{task.name}.png")


SMALL = {
    "published": False,
    "data": {"digits": (1, 2, 6), "mnist": (2,)},
    "test_share": 0.2,
    "size": 16,
    "train_rows": 5000,
    "test_rows": 2000,
    "depth": 10,
    "width": 1,
    "batch": 32,
    "buffer": 1000,
    "rate": 1e-3,
    "warmup": 0,
    "drops": (0.8, 0.9),
    "betas": (0.0, 0.5, 2.0),
    "stated": 0.5,
    "plain_stopped": 0.8,
}

EXPERIMENT = Experiment(
    name="jem-stability",
    title="A classifier that is a density: plain training diverges, with β it does not (Fig. 3, 16, 20, 24)",
    paper="Energy-based model training objective robust to inaccurate SGLD samples, ICLR 2025 submission, App. M",
    scales={
        "smoke": SMALL
        | {
            "data": {"digits": (1,)},
            "betas": (0.0, 0.5),
            "seeds": 1,
            "steps": 300,
            "plain_stopped": 1.0,
        },
        "cpu": SMALL | {"seeds": 5, "steps": 400},
        "gpu": SMALL
        | {
            "published": True,
            "data": {"cifar10": (2, 6)},
            "size": None,
            "train_rows": 45_000,
            "test_rows": 10_000,
            "depth": 28,
            "width": 10,
            "batch": 64,
            "buffer": 10_000,
            "rate": 1e-4,
            "warmup": 1000,
            "drops": (),
            "seeds": 2,
            "steps": 5 * 703,
            "plain_stopped": 1.0,
        },
    },
    body=body,
)
