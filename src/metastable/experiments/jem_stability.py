"""Appendix M of the β paper in small: a JEM that diverges under plain training, and with β does not.

Scenario 1 is the paper's default, scenario 2 takes a quarter of its SGLD steps, scenario 6 four times its α at a
quarter of its output scale, which doubles the noise of a chain and leaves its drift as it is. In small, a small
wide residual network learns small digits at ten times the paper's learning rate, so that what takes the paper
epochs takes hundreds of updates, with a quarter of the SGLD steps and twice the output scale; scenario 6 keeps the
learning rate there, which the paper divides by four.

MNIST, shrunk to 8 × 8, has a quarter of that output scale, hence of the drift, and a fifth of the weight of log
p(x): at the settings of the digits nothing diverges with β there either, but from some update on every negative is
ignored, and accuracy is lost.

Every seed is trained with plain training (β = 0) and with β; where the guard stops a run, that is the outcome which
is counted. The same network as a classifier alone, by the same trainer and for as many updates, says what accuracy
there is to lose; the mean weight of the negatives at the end says whether there is still a density in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from torch import Tensor

from metastable.core.errors import InputError
from metastable.core.random import derive
from metastable.data import Dataset, load_array, load_images
from metastable.energies import JointEnergy, WideResNet
from metastable.methods import JEM, PersistentCD, Robust
from metastable.report.figures import palette, picture, save_image_rows
from metastable.training.config import Adam, Schedule

from .base import Bench, Experiment, Row
from .trials import Arm, Line, Problem, Trial, Trials, by_scale, draw_curves, mean

TAIL = 0.2
"""Accuracies are means over this share of a training's last lines: one line is one lucky batch."""
LINES = 40
"""Lines of metrics in a training; each of them classifies all test pictures."""
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
        generative: weight of log p(x) in units of 1/o.
    """

    number: int
    alpha: float = 1e-4
    output_scale: float = 20_000.0
    steps: int = 20
    slower: float = 1.0
    generative: float = 1.0


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
ON_MNIST = {
    number: replace(scenario, output_scale=scenario.output_scale / 4, generative=0.2)
    for number, scenario in IN_SMALL.items()
}
"""A drift of 1/2 on log Σ e^h in the place of 2, with which every negative comes to be ignored, and for good."""


def scenario_of(bench: Bench, name: str, number: int) -> Scenario:
    """As published at the paper's own size, in small otherwise."""
    if bench.published:
        return PUBLISHED[number]
    return (ON_MNIST if name == "mnist" else IN_SMALL)[number]


def betas_of(bench: Bench, number: int) -> tuple[float, ...]:
    """β·o of plain training, the stated one, and others that a scenario has beside it."""
    return (0.0, bench.stated, *bench.more.get(number, ()))


PAPER = {1: {0.0: "0.905", 4.0: "0.917"}, 2: {0.0: "0.100", 2.0: "0.883"}, 6: {0.0: "0.362", 4.0: "0.924"}}
"""Test accuracy on CIFAR-10 by scenario and the β·o that it was measured at, Table 2."""


@dataclass(frozen=True)
class Task:
    """Pictures to train on and to test on, with their labels."""

    name: str
    train: Dataset
    test: Dataset


def late(trial: Trial, name: str) -> float:
    """A metric's mean over the end of the training."""
    values = trial.curves[name]
    return float(values[-max(1, round(TAIL * len(values))) :].mean())


def best(trial: Trial) -> float:
    """The best test accuracy that it ever had."""
    return float(trial.curves["test_accuracy"].max(initial=0.0))


def accuracy(trial: Trial) -> float:
    """Test accuracy at the end; of a run that was stopped, the best that it had before."""
    return late(trial, "test_accuracy") if trial.stopped is None else best(trial)


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
    robust = Robust(source=source, beta=beta_o / scenario.output_scale)
    return JEM(source=robust, generative=scenario.generative / scenario.output_scale)


def trials(bench: Bench, task: Task, scenario: Scenario, betas: Sequence[float]) -> Trials:
    """An arm for each β·o; test pictures are classified at each line of the log, and the last chains kept."""
    assert task.test.labels is not None
    x, labels = task.test.x.to(bench.device), task.test.labels.to(bench.device)

    def problem(arm: Arm, seed: int) -> Problem:
        seed = derive(seed, "network") % 2**31
        network = WideResNet(task.train.event_shape, bench.depth, bench.width, 10, seed)
        return Problem(JointEnergy(network, scenario.output_scale), task.train)

    def watch(at: Problem, line: Line) -> Line:
        # f = −E, in units of o: what the paper draws
        gap = -line.get("energy_gap", np.nan) / scenario.output_scale
        return {"test_accuracy": accuracy_of(at.model, x, labels), "gap": gap}

    settings = {
        "steps": bench.steps,
        "batch_size": bench.batch,
        "optimiser": Adam(bench.rate / scenario.slower),
        "schedule": schedule_of(bench),
        "data_noise": 0.03,
        "log_every": max(1, bench.steps // LINES),
    }
    return Trials(
        [Arm(name_of(task, scenario.number, b), method_of(bench, scenario, b), about=b) for b in betas],
        problem,
        settings,
        bench.seeds,
        seed=lambda bench, arm, repeat: bench.seed + repeat,
        watch=watch,
        keep=lambda trial, at, run: None if run.walkers is None else run.walkers.x[:10].cpu(),
        may_stop=True,
        words=lambda t: (
            f"{'finished' if t.stopped is None else f'stopped at {t.stopped}'}, {accuracy(t):.3f}"
        ),
    )


def name_of(task: Task, number: int, beta_o: float) -> str:
    """Of the arm."""
    label = "classifier alone" if beta_o == CLASSIFIER else f"β·o = {beta_o:g}"
    return f"{task.name}, scenario {number}, {label}"


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

Found = dict[tuple[str, int, float], list[Trial]]


def body(bench: Bench) -> list[Row]:
    """Every data set, scenario, β and seed."""
    read, found = tasks(bench), Found()
    for task in read:
        alone: dict[float, list[Trial]] = {}  # by learning rate: of a scenario nothing else matters to it
        for number in bench.data[task.name]:
            scenario = scenario_of(bench, task.name, number)
            known = scenario.slower in alone
            betas = betas_of(bench, number) if known else (CLASSIFIER, *betas_of(bench, number))
            for repeats in trials(bench, task, scenario, betas).run(bench).values():
                found[task.name, number, repeats[0].arm.about] = repeats
            alone.setdefault(scenario.slower, found.get((task.name, number, CLASSIFIER), []))
            found[task.name, number, CLASSIFIER] = alone[scenario.slower]
        _draw(bench, task, found)
        _draw_buffers(bench, task, found)
    return rows_of(bench, [task.name for task in read], found)


def mean_accuracy(trials: Sequence[Trial]) -> float:
    """Over seeds."""
    return mean(accuracy(trial) for trial in trials)


def stopped_share(trials: Sequence[Trial]) -> float:
    """Of the seeds, those that the guard stopped."""
    return mean(trial.stopped is not None for trial in trials)


def rows_of(bench: Bench, names: Sequence[str], found: Found) -> list[Row]:
    """Who was stopped, what it cost in accuracy, and whether negatives still count; then what data there were."""
    rows = []
    for name in names:
        for number in bench.data[name]:
            of = {b: found[name, number, b] for b in (CLASSIFIER, *betas_of(bench, number))}
            scenario = scenario_of(bench, name, number)
            rows += _rows(bench, f"{name}/scenario_{number}", scenario, of)
    return rows + [Row(f"data_found/{name}", float(name in names), ">=", 1.0) for name in bench.data]


def _rows(bench: Bench, where: str, scenario: Scenario, of: dict[float, list[Trial]]) -> list[Row]:
    plain, robust = of[0.0], of[bench.stated]
    at = f"beta_o={bench.stated:g}"

    def accuracy_row(beta_o: float) -> Row:
        paper = PAPER[scenario.number].get(beta_o) if bench.published else None
        return Row(f"accuracy/{where}/beta_o={beta_o:g}", mean_accuracy(of[beta_o]), paper=paper)

    # what others have more: plain training on its best line, and the classifier alone after as many updates
    to_plain = mean(best(trial) for trial in plain) - mean_accuracy(robust)
    to_classifier = mean_accuracy(of[CLASSIFIER]) - mean_accuracy(robust)
    judged = (None, None) if bench.tolerance is None else ("<=", bench.tolerance)
    least = (None, None) if bench.least_grad_scale is None else (">=", bench.least_grad_scale)
    rows = [
        Row(f"stopped/{where}/beta_o=0", stopped_share(plain), ">=", bench.plain_stopped),
        Row(f"stopped/{where}/{at}", stopped_share(robust), "<=", 0.0),
        Row(f"accuracy_lost/{where}/{at}_to_plain_at_its_best", to_plain, "<=", 0.0),
        Row(f"accuracy_lost/{where}/{at}_to_classifier", to_classifier, *judged),
        Row(f"grad_scale/{where}/{at}", mean(late(t, "grad_scale") for t in robust), *least),
        Row(f"negatives_ignored/{where}/{at}", mean(late(t, "negatives_ignored") for t in robust)),
        Row(f"gap/{where}/{at}", -mean(late(t, "energy_gap") for t in robust) / scenario.output_scale),
        Row(f"accuracy/{where}/classifier", mean_accuracy(of[CLASSIFIER])),
        accuracy_row(0.0),
        accuracy_row(bench.stated),
    ]
    stops = [c.stopped for c in plain if c.stopped is not None]
    if stops:
        rows.append(Row(f"updates_made/{where}/beta_o=0", mean(stops)))
    for beta_o in bench.more.get(scenario.number, ()):
        rows.append(Row(f"stopped/{where}/beta_o={beta_o:g}", stopped_share(of[beta_o])))
        rows.append(accuracy_row(beta_o))
    return rows


# ---- pictures

PANELS = {
    "gap": "data − negatives, log Σ eʰ",
    "grad_scale": "mean weight",
    "negatives_effective": "negatives that count",
    "test_accuracy": "test accuracy",
}


def _draw(bench: Bench, task: Task, found: Found) -> None:
    """Figures 3 and 16: a column for each scenario; gap, weights and accuracy over updates, a line for a seed."""
    numbers = bench.data[task.name]
    path, shape = bench.folder / f"stability-{task.name}.png", (len(PANELS), len(numbers))
    size = 1.2 + 2.7 * len(numbers), 7.2
    with picture(path, *size, *shape, dpi=110, squeeze=False, sharex=True, sharey="row") as axes:
        for column, number in zip(axes.T, numbers, strict=True):
            column[0].set_title(f"scenario {number}")
            for axis, name in zip(column, PANELS, strict=True):
                for beta_o, colour in zip(betas_of(bench, number), palette, strict=False):
                    label = f"β·o = {beta_o:g}"
                    draw_curves(axis, found[task.name, number, beta_o], name, colour, label, lw=0.9)
            column[-1].set(xlabel="update", xlim=(0, 1.02 * bench.steps))
        for axis, label in zip(axes[:, 0], PANELS.values(), strict=True):
            axis.set_ylabel(label)
        _symmetric_log(axes[0])
        axes[1, 0].set_ylim(-0.05, 1.1)
        axes[3, 0].set_ylim(0, 1.02)
        most = max(range(len(numbers)), key=lambda j: len(betas_of(bench, numbers[j])))
        axes[3, most].legend(fontsize=7, loc="lower right")


def _symmetric_log(axes: Any) -> None:
    """Linear up to ±1, logarithmic beyond; plain numbers, as the scale's own labels need mathtext, which is off.

    The axes share their limits, which hold the lines of all of them.
    """
    for axis in axes:
        axis.set_yscale("symlog", linthresh=1.0)
    shown = axes[0].yaxis
    shown.set_major_locator(FixedLocator([-1e6, -1e4, -1e2, -1.0, 0.0, 1.0, 1e2, 1e4, 1e6]))
    shown.set_minor_locator(NullLocator())
    shown.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ends = np.array([axis.dataLim.intervaly for axis in axes])
    axes[0].set_ylim(min(-3.0, 3 * ends[:, 0].min()), max(3.0, 3 * ends[:, 1].max()))


def _draw_buffers(bench: Bench, task: Task, found: Found, count: int = 10) -> None:
    """Figure 4: chains of the buffer at the end, a row for each scenario and β, and data for comparison."""
    rows = {"data": task.train.x[:count]}
    for number in bench.data[task.name]:
        for beta_o in betas_of(bench, number):
            buffers = [t.kept for t in found[task.name, number, beta_o] if t.kept is not None]
            if buffers:
                rows[f"scenario {number}, β·o = {beta_o:g}"] = buffers[0][:count]
    save_image_rows(bench.folder / f"chains-{task.name}.png", rows)


EXPERIMENT = Experiment(
    name="jem-stability",
    title="A classifier that is a density: plain training diverges, with β it does not (Fig. 3, 16, 20, 24)",
    paper="Energy-based model training objective robust to inaccurate SGLD samples, ICLR 2025 submission, App. M",
    scales=by_scale(
        {"test_share": 0.2, "stated": 0.5},
        published=(False, False, True),
        data=({"digits": (1,)}, {"digits": (1, 2, 6), "mnist": (1, 2, 6)}, {"cifar10": (2,)}),
        size=(8, 8, None),
        train_rows=(5000, 5000, 45_000),
        test_rows=(1000, 1000, 10_000),
        depth=(10, 10, 28),
        width=(1, 1, 10),
        batch=(32, 32, 64),
        buffer=(1000, 1000, 10_000),
        rate=(1e-3, 1e-3, 1e-4),
        warmup=(0, 0, 1000),
        drops=((0.8, 0.9), (0.8, 0.9), ()),
        more=({2: (2.0,)}, {2: (2.0,)}, {}),
        seeds=(1, 5, 1),
        steps=(300, 400, 3 * 703),
        plain_stopped=(1.0, 0.8, 1.0),
        tolerance=(0.05, 0.03, None),
        least_grad_scale=(0.1, 0.1, None),
    ),
    body=body,
)
