"""Section 6.2 of the f-EBM paper (G.3, G.4): pictures without their noise, and half pictures filled in.

The paper shows such pictures of CIFAR-10 and CelebA without a number. Here digits that were never seen are restored
by the energy of each divergence and by that of contrastive divergence, all of one network on the same chains.
Errors stand beside those of what chains began at and of the mean picture of the right digit.

- `inpainting`: the left half is missing.
- `denoising`: normal noise of `restored_noise` is on all of it.

The energy learns slower than H, by `energy_rate`: at H's own rate the exponent H + E stays at its bounds here, and
nothing is learned (Theorem 5 asks for it, too).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from metastable.core.precision import precision
from metastable.core.random import derive, generator, normal_like
from metastable.energies.build import ConvConfig, MLPConfig
from metastable.evaluation.restoration import Restored, class_means
from metastable.kernels import MALA
from metastable.methods import FDivergence, PersistentCD
from metastable.report.figures import save_image_rows
from metastable.runs.run import Run
from metastable.training.config import Adam, Schedule

from .base import Bench, Experiment, Row
from .three_digits import Digits, digits
from .trials import Arm, Problem, Trial, Trials, by_scale

TASKS = ("inpainting", "denoising")
SHOWN = 12
"""Pictures in a row."""


class Task(NamedTuple):
    """What was made of pictures, and its mean squared errors beside others'."""

    restored: Restored
    errors: dict[str, float]


def arms(bench: Bench) -> list[Arm]:
    """Each divergence on the same chains, and the chains alone."""
    chains = PersistentCD(
        walkers=bench.walkers,
        start_at="model",
        kernel=MALA(bench.mala_step * bench.data_noise**2),
        steps=bench.chain_steps,
    )
    losses = {"clip_exponent": bench.clip_exponent, "energy_rate": bench.energy_rate}
    return [
        Arm(name, chains if name == "cd" else FDivergence(chains, f=name, **losses)) for name in bench.arms
    ]


def restore(bench: Bench, data: Digits, run: Run) -> dict[str, Task]:
    """Pictures that were not seen, of all three digits: half of them missing, and noise on all of them."""
    rows = torch.linspace(0, len(data.held_out) - 1, bench.restored).long().to(data.held_out.device)
    truth, labels = data.held_out[rows], data.held_out_labels[rows]
    guess = class_means(data.x, data.labels, labels)
    noisy = truth + bench.restored_noise * normal_like(
        truth, generator(derive(bench.seed, "noise"), truth.device)
    )
    asked: dict[str, Any] = {"draws": bench.draws, "steps": bench.restore_steps, "seed": bench.seed}
    with precision(bench.precision, bench.device):
        found = (run.restore(truth, "left", **asked), run.restore(noisy, noise=bench.restored_noise, **asked))
    return {
        name: Task(one, one.errors(truth, class_mean=guess)) for name, one in zip(TASKS, found, strict=True)
    }


def rows_of(bench: Bench, trials: dict[str, list[Trial]]) -> list[Row]:
    """Errors as shares of those of the start and of the class's mean; arms that were stopped are told."""
    rows = []
    for arm, (trial,) in trials.items():
        if trial.kept is None:
            rows.append(Row(f"stopped_at_update/{arm}", trial.stopped or 0))
            continue
        for name, (_, errors) in trial.kept.items():
            asked = [
                (None, None) if target is None or arm not in bench.required else ("<=", target)
                for target in bench.targets[name]
            ]
            rows += [
                Row(f"over_start/{name}/{arm}", errors["mean"] / errors["given"], *asked[0]),
                Row(f"over_class_mean/{name}/{arm}", errors["mean"] / errors["class_mean"], *asked[1]),
            ]
    return rows


def draw(bench: Bench, data: Digits, trials: dict[str, list[Trial]]) -> None:
    """A picture for each task: the truth, what was given, and of each arm the mean of its draws and one of them."""
    place = torch.linspace(0, len(data.held_out) - 1, bench.restored).long()
    some = torch.linspace(0, bench.restored - 1, min(SHOWN, bench.restored)).long()
    kept = {arm: trial.kept for arm, (trial,) in trials.items() if trial.kept is not None}

    def shown(x: Tensor) -> np.ndarray:
        return x.cpu()[some].clamp(-1, 1).numpy()

    for name in TASKS if kept else ():
        first = next(iter(kept.values()))[name].restored
        rows = {"truth": shown(data.held_out.cpu()[place]), "given": shown(first.given)}
        for arm, tasks in kept.items():
            rows |= {f"{arm}, mean": shown(tasks[name].restored.mean)}
            rows |= {f"{arm}, a draw": shown(tasks[name].restored.draws[:, 0])}
        save_image_rows(bench.folder / f"{name}.png", rows)


def body(bench: Bench) -> list[Row]:
    """Every arm trained and asked for both."""
    data = digits(bench)
    trials = Trials(
        arms(bench),
        lambda arm, seed: Problem(bench.energy, data.x),
        {
            "steps": bench.steps,
            "max_seconds": bench.max_seconds,
            "batch_size": bench.batch,
            "optimiser": Adam(bench.rate),
            "schedule": Schedule("linear", final=0.05),
            "data_noise": bench.data_noise,
            "precision": bench.precision,
            "log_every": bench.log_every,
        },
        keep=lambda trial, problem, run: restore(bench, data, run),
        may_stop=True,
        words=lambda trial: "stopped" if trial.kept is None else words_of(trial.kept),
        records=(Task, Restored),
    ).run(bench)
    draw(bench, data, trials)
    return rows_of(bench, trials)


def words_of(tasks: dict[str, Task]) -> str:
    """Errors of a finished arm, for whoever waits."""
    return ", ".join(
        f"{name} {task.errors['mean'] / task.errors['given']:.0%} of the start's error"
        for name, task in tasks.items()
    )


EXPERIMENT = Experiment(
    name="febm-restoring",
    title="Digits without noise and half digits filled in, by four divergences and CD (Section 6.2, G.3, G.4)",
    paper="Yu, Song, Song, Ermon, ICML 2020, Section 6.2 and Appendices G.3 and G.4",
    scales=by_scale(
        {
            "data_noise": 0.3,
            "restored_noise": 0.5,
            "mala_step": 0.12,
            "clip_exponent": 5.0,
            "energy_rate": 0.2,
            "draws": 8,
            "max_seconds": None,
        },
        data=("digits", "digits", "mnist"),
        size=(None, None, None),
        energy=(
            MLPConfig(hidden=(64, 64), reference="gaussian", inflate=1.1),
            MLPConfig(hidden=(128, 128), reference="gaussian", inflate=1.1),
            ConvConfig(reference="gaussian", inflate=1.1),
        ),
        arms=(("js", "cd"), *(("js", "hellinger", "reverse-kl", "kl", "cd"),) * 2),
        required=(("cd",), ("js", "cd"), ("js", "cd")),
        targets=(
            {"inpainting": (1.0, None), "denoising": (1.0, None)},
            {"inpainting": (0.5, None), "denoising": (0.5, 1.0)},
            {"inpainting": (0.5, 1.0), "denoising": (0.5, 1.0)},
        ),
        train_rows=(None, None, None),
        test_rows=(None, None, None),
        count=(30, 30, 1400),
        held_out_count=(9, 9, 200),
        walkers=(128, 512, 2048),
        chain_steps=(1, 2, 2),
        batch=(64, 128, 512),
        rate=(3e-3, 4e-3, 1e-3),
        steps=(60, 800, 12_000),
        log_every=(20, 50, 100),
        restored=(12, 36, 96),
        restore_steps=(30, 200, 1000),
        precision=("32-true", "32-true", "tf32"),
    ),
    body=body,
)
