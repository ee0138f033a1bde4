"""A classifier of digits that knows what is no digit: a joint energy on MNIST, with Fashion-MNIST outside.

The β paper trains such models (JEM) for stability; that their likelihood tells other images apart is the claim of
the model's first paper (Grathwohl and others, ICLR 2020). Here one network is trained on MNIST as p(x, y) and then
asked three things on images it has not seen: which digit, how sure, and whether it is a digit at all. The last is
answered by three scores, log p(x), max p(y | x) and −‖∇ log p(x)‖, by how often a digit scores above a piece of
clothing (AUROC). A network of the same start, trained as a classifier only, stands beside it; what the density adds
is the difference of their AUROC by the same score, `auroc_gain`.

The density is a side task at scale cpu: log p(x) has a tenth of the weight that the papers give it (0.1/o, where
theirs is 1/o; `generative` is that number times o), β·o = 1, and chains make 5 steps for an update, on a replay
buffer of 2000. Scale gpu has the papers' 1/o and 20 steps.

The images are not part of the package: `METASTABLE_DATA` names the folder that holds `mnist` and `fashion-mnist`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from metastable.api import sample
from metastable.core.random import derive
from metastable.data import load_images
from metastable.energies import ConvNet, JointEnergy
from metastable.evaluation.classifier import ClassifierSummary, class_samples, classifier_summary
from metastable.kernels import ULA
from metastable.methods import JEM, PersistentCD, Robust
from metastable.report import new_figure, save_figure, style
from metastable.report.figures import DATA, MODEL
from metastable.report.plots import Bins, Cloud, draw_overlaid, draw_reliability, image_grid
from metastable.runs.run import Run
from metastable.training.config import Adam, Schedule

from .base import Bench, Experiment, Row
from .trials import Arm, Problem, Trial, Trials, by_scale

OUTSIDE = "Fashion-MNIST"
TARGETS = {"accuracy": (">=", 0.98), "calibration_error": ("<=", 0.03), "auroc/log_density": (">=", 0.95)}


class Kept(NamedTuple):
    """What is kept of a training: its scores, and samples of each class, `(120, 1, 28, 28)`, of the joint model."""

    summary: ClassifierSummary
    drawn: Tensor | None


def energy(bench: Bench) -> JointEnergy:
    """p(x, y) from the small convolutional network, 78,154 parameters."""
    network = ConvNet((1, 28, 28), derive(bench.seed, "energy"), outputs=10)
    return JointEnergy(network, bench.output_scale)


def method(bench: Bench, generative: float) -> JEM:
    """A replay buffer, 5 % of it fresh uniform noise, and the β objective; α/2 = 1/o moves by ∇ log Σ e^h.

    Args:
        bench: the scale.
        generative: weight of log p(x) in units of 1/o; 0 for the classifier alone.
    """
    chains = PersistentCD(
        walkers=bench.buffer,
        batch=bench.batch_size,
        steps=bench.chain_steps,
        step_size=1 / bench.output_scale,
        start_at="noise",
        noise="uniform",
        rejuvenation=0.05,
    )
    robust = Robust(source=chains, beta=bench.beta_o / bench.output_scale)
    return JEM(source=robust, generative=generative / bench.output_scale)


def numbers(found: ClassifierSummary) -> dict[str, float]:
    """The scalars of a summary by the names of this experiment's rows."""
    values = {
        "accuracy": found.numbers["accuracy"],
        "calibration_error": found.numbers["calibration_error"]["value"],
    }
    auroc = found.numbers["ood"][0]["auroc"]
    return values | {f"auroc/{score}": auroc[score]["value"] for score in auroc}


def row(bench: Bench, name: str, metric: str, value: float) -> Row:
    """With its target where the joint model has one."""
    relation, target = TARGETS.get(metric, (None, None)) if name == "jem" and bench.judged else (None, None)
    return Row(f"{metric}/{name}", value, relation, target)


def gains(rows: list[Row]) -> list[Row]:
    """AUROC of the joint model less that of the classifier alone, by each score."""
    found = {r.metric: r.value for r in rows}
    scores = [name.split("/")[1] for name in found if name.startswith("auroc/") and name.endswith("/jem")]
    return [Row(f"auroc_gain/{s}", found[f"auroc/{s}/jem"] - found[f"auroc/{s}/classifier"]) for s in scores]


def body(bench: Bench) -> list[Row]:
    """Train with and without the generative term, and score both."""
    data = load_images("mnist", n=bench.rows, seed=bench.seed)
    inside = load_images("mnist", split="test", n=bench.tested, seed=bench.seed)
    outside = load_images("fashion-mnist", split="test", n=bench.tested, seed=bench.seed)

    def keep(trial: Trial, at: Problem, run: Run) -> Kept:
        place: Tensor = run.energy.network.head.weight  # pyright: ignore
        assert inside.labels is not None
        found = classifier_summary(
            run.energy, inside.x.to(place), inside.labels, {OUTSIDE: outside.x.to(place)}, seed=bench.seed
        )
        return Kept(found, classes(bench, run) if trial.arm.name == "jem" else None)

    settings = {
        "steps": bench.steps,
        "batch_size": bench.batch_size,
        "optimiser": Adam(bench.learning_rate),
        "schedule": Schedule("cosine", warmup=bench.warmup, final=0.01),
        "data_noise": bench.data_noise,
        "log_every": 50,
    }
    arms = [Arm("jem", method(bench, bench.generative)), Arm("classifier", method(bench, 0.0))]
    trials = Trials(
        arms,
        lambda arm, seed: Problem(energy(bench), data),
        settings,
        seed=lambda bench, arm, repeat: bench.seed,
        keep=keep,
        words=lambda trial: ", ".join(f"{k} {v:.4f}" for k, v in numbers(trial.kept.summary).items()),
        records=(Kept, ClassifierSummary),
    )
    rows: list[Row] = []
    for name, (trial,) in trials.run(bench).items():
        summary, drawn = trial.kept
        rows.extend(row(bench, name, metric, value) for metric, value in numbers(summary).items())
        draw(bench, name, summary)
        if drawn is not None:
            picture = image_grid(drawn.numpy(), -1.0, 1.0, columns=12, most=120)
            (bench.folder / "class-samples.png").write_bytes(picture)
    return rows + gains(rows)


def draw(bench: Bench, name: str, found: ClassifierSummary) -> None:
    """log p(x) of digits and clothing, and the reliability curve."""
    columns = {k: np.asarray(v) for k, v in found.numbers["reliability"].items()}
    figure = new_figure(9.6, 3.6)
    with style():
        left, right = figure.subfigures(1, 2, width_ratios=[1.5, 1])  # pyright: ignore
        axes = left.subplots()
        clouds = [
            Cloud("MNIST", found.arrays["inside_log_density"] / bench.output_scale, DATA, True),
            Cloud(OUTSIDE, found.arrays["outside_0_log_density"] / bench.output_scale, MODEL),
        ]
        draw_overlaid(axes, clouds, "log p(x) / o, up to a constant", 60)
        axes.legend([cloud.name for cloud in clouds])
        draw_reliability(right, Bins(**columns))
    save_figure(figure, bench.folder / f"scores-{name}.png")


def classes(bench: Bench, run: Run) -> Tensor:
    """Samples of p(x | y), twelve for each digit: chains of p(x) go on, and are chosen in proportion to p(y | x).

    Chains on the joint energy would hardly feel the label, which is one part in o of it.
    """
    assert run.walkers is not None
    kernel = ULA(1 / bench.output_scale)
    start = run.walkers.resampled(bench.shown, seed=bench.seed).x
    moved = sample(
        run.energy, bench.shown, kernel=kernel, steps=bench.sample_steps, init=start, seed=bench.seed
    )
    x = class_samples(run.energy, moved.x, kernel=kernel, per_class=12, steps=0, seed=bench.seed)
    return x.flatten(0, 1).cpu()


COMMON = {"output_scale": 20_000.0, "beta_o": 1.0, "batch_size": 64, "data_noise": 0.03}

EXPERIMENT = Experiment(
    name="jem-ood",
    title="A classifier of digits that knows what is no digit: MNIST inside, Fashion-MNIST outside",
    paper="Grathwohl and others, ICLR 2020, with the objective of the β paper",
    scales=by_scale(
        COMMON,
        steps=(60, 4000, 20_000),
        rows=(2000, None, None),
        tested=(500, None, None),
        chain_steps=(3, 5, 20),
        buffer=(2000, 2000, 10_000),
        shown=(50, 600, 600),
        sample_steps=(3, 100, 100),
        generative=(0.3, 0.1, 1.0),
        learning_rate=(1e-3, 1e-3, 3e-4),
        warmup=(20, 200, 500),
        judged=(False, True, True),
    ),
    body=body,
)
