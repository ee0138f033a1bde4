"""Figures 2, 3, 4, 11 and 12 of the Jarzynski paper: the weights of three digits.

Digits 2, 3 and 6 at 4/7, 2/7 and 1/7. Energies are a small network, at scale gpu the paper's, on a Gaussian, so
that the first walkers and log Z are exact; a classifier says how much weight each digit has among the samples.
Everything is done at several data noises: the smaller, the further the digits are apart. The paper names none.

- `jarzynski`: Algorithm 1 with MALA and a bound on its pace; a fifth of the walkers only follow, for log Z.
- `jarzynski-annealed`: the same, its noise falling from a large one, at which chains still cross between digits;
  the widths of the Gaussian are learned, since they fall too. `pcd-annealed`: that without weights.
- `pcd`: chains from the reference without weights (C.1.2), by MALA with a step that fits the noise.
- `pcd-data`: Algorithm 4, the same with chains from data.
- `pcd-paper`: `pcd` with what the paper says of its settings: ULA, 1,024 chains, Adam from 10⁻⁴ to 0, β₁ = 0.
- `jarzynski-paper`: Algorithm 1 with ULA and those settings.

Each arm at each noise is a piece of its own, kept in `pieces/` when it is done and resumed in `training/` when it
is not; the result has all pieces that are there, and of one that diverged the update at which it did.

`seconds` ends every training after so long, its rates at zero then, and rows say after how many updates that was;
`max_seconds` breaks it off, to go on later.

At noises under `near_below` settings are those of `near`. Digits are apart there, so that only the gradient brings
a lost weight back. What is lost grows with the variance of the steps' weights over the walkers, v/N, and what is
brought back with the share of the steps that is no noise, so that more walkers, larger batches and more momentum
all help: were v the same at β₁ = 0.999 as at 0.99, steps along the gradient would be three times as long. The
paper's arms have the same settings at every noise. It names no batch of pictures: theirs is that of larger noises.

`precision` is that of all arms, in training and in judging. `tf32` is the fastest to be taken without a look;
`bf16-mixed` where `evaluation.rounding.rounding_of` is below a tenth of a nat.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.api import fit, log_partition
from metastable.core.errors import DivergenceError, require, require_choice
from metastable.core.parts import energies_of
from metastable.core.precision import ROUNDED, precision
from metastable.core.random import derive, generator, normal_like
from metastable.energies import Tilted
from metastable.energies.build import ConvConfig, MLPConfig
from metastable.energies.network_configs import EnergyConfig
from metastable.evaluation.image_classifier import ImageClassifier, train_classifier
from metastable.evaluation.restoration import class_means
from metastable.kernels import MALA
from metastable.methods import Jarzynski, Method, PersistentCD
from metastable.proposals import fit_gaussian
from metastable.runs.run import Run
from metastable.training.config import Adam, Schedule

from .base import Bench, Experiment, Row, changed
from .jarzynski_mnist_figures import SHOWN, Found, draw
from .jarzynski_mnist_rows import compared, rows_of, steering, weights_of
from .pieces import Pieces
from .three_digits import Digits, Sharpened, correlated, digits, sharpening
from .trials import by_scale

PAPER = {"rate": 1e-4, "betas": (0.0, 0.999)}
OF_THE_PAPER = "-paper"
"""How arms end that have the paper's settings."""
ALL_ARMS = (
    *("jarzynski", "jarzynski-annealed", "pcd", "pcd-data", "pcd-annealed", "pcd-paper"),
    "jarzynski-paper",
)
NOT_HERE = {"reference", "inflate", "spectral_norm", "scale"}
"""Fields of energies that say what a network stands on, or how it is made into an energy."""
CHOICES = (
    *("arms", "noises", "required", "error_target", "near", "near_below"),
    *("max_seconds", "seconds", "steps"),
)
"""Settings that say which pieces are made, for how long, and what is asked of them, not how they are made."""


# ---- what is trained


def at_noise(bench: Bench, noise: float, arm: str = "") -> Bench:
    """The bench with the settings of that noise, of which the paper's arms have none of their own."""
    if noise >= bench.near_below or arm.endswith(OF_THE_PAPER):
        return bench
    return replace(bench, settings=changed(bench.settings, bench.near))


def pieces_of(bench: Bench, noise: float, arm: str = "") -> Pieces:
    """Those of one noise, as the arm is trained there."""
    how = {key: value for key, value in at_noise(bench, noise, arm).settings.items() if key not in CHOICES}
    return Pieces(bench.folder / "pieces", how | {"seed": bench.seed})


def is_annealed(bench: Bench, arm: str, noise: float) -> bool:
    """Whether its noise falls."""
    return arm.endswith("-annealed") and noise < bench.first_noise


def method_of(bench: Bench, arm: str, noise: float) -> Method:
    """Of an arm, at a noise."""
    N = bench.walkers
    fitting: dict[str, Any] = {"kernel": MALA(bench.mala_step * noise**2), "steps": bench.moves}
    jarzynski = Jarzynski(
        walkers=N + N // 4,
        held_out=1 / 5,
        populations=bench.populations,
        threshold=0.5,
        pace=bench.pace,
        steps=bench.moves,
    )
    plain: dict[str, Any] = {
        "held_out": 0.0,
        "order": "none",
        "pace": None,
        "step_size": bench.ula_step * noise**2,
    }
    return {
        "jarzynski": lambda: jarzynski,
        "jarzynski-annealed": lambda: jarzynski,
        "pcd": lambda: PersistentCD(walkers=N, start_at="model", **fitting),
        "pcd-data": lambda: PersistentCD(walkers=N, start_at="data", **fitting),
        "pcd-annealed": lambda: PersistentCD(walkers=N, start_at="model"),
        "pcd-paper": lambda: PersistentCD(walkers=bench.paper_walkers, start_at="model"),
        "jarzynski-paper": lambda: Jarzynski(walkers=bench.paper_walkers, threshold=0.5, **plain),
    }[arm]()


def energy_of(bench: Bench, arm: str, noise: float, x: Tensor, seed: int) -> Any:
    """The paper's network on the Gaussian of the pictures with their first noise, `inflate` times as wide."""
    config: EnergyConfig = bench.energy
    given, usual = asdict(config), asdict(type(config)())
    for field in NOT_HERE & given.keys():
        require(
            given[field] == usual[field],
            f"energy.{field}",
            "left as it is: this experiment has its own Gaussian",
            given[field],
        )
    network = config.network(tuple(x.shape[1:]), derive(seed, "network") % 2**31).to(x.device)
    if not is_annealed(bench, arm, noise):
        return Tilted(correlated(x, noise, bench.inflate), network)
    rng = generator(derive(seed, "reference"), x.device)
    seen = x + bench.first_noise * normal_like(x, rng)
    reference = fit_gaussian(seen, inflate=bench.inflate)
    std = bench.inflate * seen.std(0)
    return Tilted(reference, Sharpened(network, seen.mean(0), std))


def settings_of(bench: Bench, arm: str, noise: float) -> dict[str, Any]:
    """Of `fit`."""
    paper = arm.endswith(OF_THE_PAPER)
    annealed = is_annealed(bench, arm, noise)
    rate = {"rate": bench.rate, "betas": tuple(bench.betas)} if not paper else PAPER
    return {
        "steps": bench.steps,
        "batch_size": bench.batch,
        "optimiser": sharpening(bench.rate, bench.faster) if annealed else Adam(rate["rate"], rate["betas"]),
        "schedule": Schedule("linear"),
        "data_noise": bench.first_noise if annealed else noise,
        "data_noise_final": noise if annealed else None,
        "data_noise_over": bench.annealed_over if annealed else 1.0,
        "log_every": max(1, bench.steps // 200),
        "checkpoint_every": max(1, bench.steps // 8),
        "keep": 1,
        "max_seconds": bench.seconds or bench.max_seconds,
        "follows": "seconds" if bench.seconds else "steps",
        "device": bench.device,
        "precision": bench.precision,
        "units": "none",
        "evaluate": False,
    }


def train(bench: Bench, data: Digits, arm: str, noise: float) -> Run | None:
    """One piece, from where it was left; None where `max_seconds` came before its end."""
    seed, x = derive(bench.seed, "piece") % 2**31, data.x
    energy = energy_of(bench, arm, noise, x, seed)
    method, settings = method_of(bench, arm, noise), settings_of(bench, arm, noise)
    out = bench.folder / "training" / f"{arm}-{noise:g}"
    run = fit(energy, x.cpu(), method, seed=seed, out=out, resume=True, **settings)
    if run.steps < bench.steps and run.seconds < (bench.seconds or math.inf):
        bench.say(f"{out.name}: update {run.steps} of {bench.steps}; the same command goes on with it")
        return None
    return run


# ---- what comes out


def judge(
    bench: Bench, data: Digits, classifier: ImageClassifier, noise: float, run: Run
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Numbers and pictures of a finished training."""
    assert run.walkers is not None
    seed, own = derive(bench.seed, "judge", noise), run.log_partition
    rng = generator(seed, data.held_out.device)
    seen = data.held_out + noise * normal_like(data.held_out, rng)
    with precision(bench.precision, bench.device):  # a rounded energy is judged as it was trained
        smc = log_partition(
            run.learned_energy,
            event_shape=run.event_shape,
            walkers=bench.smc_walkers,
            refinements=0,
            conditional_ess=bench.smc_ess,
            seed=seed,
        )
        energy = float(energies_of(run.learned_energy, seen).mean())
    numbers = {
        "seconds": run.seconds,
        "updates": run.steps,
        "engine": run.engine.get("chosen", ""),
        "ess": run.walkers.ess / len(run.walkers),
        **{
            name: run.history[-1].get(name)
            for name in ("ancestors", "acceptance", "step_size", "rate_factor")
        },
        "log_z": own and own.as_json(),
        "smc_log_z": smc.as_json(),
        "cross_entropy": None if own is None else energy + own.value,
        "smc_cross_entropy": energy + smc.value,
        **weights_of(run, run.walkers, classifier, ""),
        **weights_of(run, steering(run.walkers), classifier, "steering_"),
        **({} if smc.walkers is None else weights_of(run, smc.walkers, classifier, "smc_")),
    }
    with precision(bench.precision, bench.device):
        restored, errors = restore(bench, data, run)
    return numbers | errors, pictures(run) | restored | curves(run)


def restore(bench: Bench, data: Digits, run: Run) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The left half of pictures that were not seen, filled in, and as the mean of the right digit has it."""
    rows = torch.linspace(0, len(data.held_out) - 1, bench.restored).long().to(data.held_out.device)
    truth, labels = data.held_out[rows], data.held_out_labels[rows]
    found = run.restore(truth, "left", draws=8, steps=bench.restore_steps, seed=bench.seed)
    errors = found.errors(truth, class_mean=class_means(data.x, data.labels, labels))
    errors = {f"restored_{name}": value for name, value in errors.items()}
    shown = {"truth": truth, "given": found.given, "mean": found.mean, "draw": found.draws[:, 0]}
    arrays = {f"restored_{name}": small(x[:: max(1, len(x) // SHOWN)][:SHOWN]) for name, x in shown.items()}
    return arrays, errors


def small(x: Tensor) -> np.ndarray:
    """Pictures as bytes, from −1 to 1."""
    return ((x.clamp(-1, 1) + 1) * 127.5).round().byte().cpu().numpy()


def pictures(run: Run) -> dict[str, np.ndarray]:
    """Samples with and without their noise, and walkers from the heaviest to the lightest."""
    assert run.walkers is not None
    drawn = run.walkers.resampled(4 * SHOWN, seed=1).x
    drawn = drawn[torch.randperm(len(drawn), generator=generator(0)).to(drawn.device)]
    order = run.walkers.log_weight.argsort(descending=True)
    places = torch.linspace(0, len(order) - 1, 2 * SHOWN).long().to(order.device)
    by_weight = run.denoised(run.walkers.x[order[places]])
    return {"noisy": small(drawn), "clean": small(run.denoised(drawn)), "by_weight": small(by_weight)}


def curves(run: Run) -> dict[str, np.ndarray]:
    """What Figure 4 shows over updates."""
    names = ("step", "ess", "cross_entropy", "log_z", "rate_factor", "pace")
    return {
        f"curve_{name}": np.array([row.get(name, np.nan) for row in run.history], float) for name in names
    }


def classifier_of(bench: Bench, data: Digits) -> ImageClassifier:
    """Of all ten digits, at every noise up to the largest that samples may have."""
    return train_classifier(
        *data.all_train,
        data.all_test,
        noise=(0.0, bench.classifier_noise),
        epochs=bench.epochs,
        width=bench.width,
        seed=bench.seed,
    )


def make(bench: Bench, data: Digits, classifier: ImageClassifier) -> None:
    """The pieces that were asked for and are not there; of one that diverged, when it did."""
    for noise in bench.noises:
        for arm in bench.arms:
            own, pieces = at_noise(bench, noise, arm), pieces_of(bench, noise, arm)
            name = f"{arm}-{noise:g}"
            if pieces.find(name) is not None:
                continue
            try:
                run = train(own, data, arm, noise)
            except DivergenceError as error:
                pieces.keep(name, {"diverged": error.step, "message": str(error)}, {})
                bench.say(f"{name}: {error}")
                continue
            if run is None:
                continue
            numbers = pieces.keep(name, *judge(own, data, classifier, noise, run)).numbers
            shares = ", ".join(f"{share:.3f}" for share in numbers["shares"])
            bench.say(f"{name}: {shares}, error {numbers['error']:.3f}, {numbers['seconds']:.0f} s")


def body(bench: Bench) -> list[Row]:
    """The pieces that were asked for, then rows and figures of all that are there."""
    for arm in bench.arms:
        require_choice("arms", arm, ALL_ARMS)
    require_choice("precision", bench.precision, ("32-true", *ROUNDED))
    data = digits(bench)
    classifier = classifier_of(bench, data)
    of_three = classifier.right_about(data.held_out, data.held_out_labels, bench.seed)
    bench.say(
        f"classifier: {classifier.accuracy:.4f} of the test pictures, {of_three:.4f} of the three digits"
    )
    make(bench, data, classifier)
    there: Found = {}
    names = map(split_name, pieces_of(bench, math.inf).names())
    for noise, arm in sorted(names, key=lambda at: (-at[0], ALL_ARMS.index(at[1]))):
        piece = pieces_of(bench, noise, arm).find(f"{arm}-{noise:g}")
        there |= {} if piece is None else {(arm, noise): piece}
    finished = {key: piece for key, piece in there.items() if "diverged" not in piece.numbers}
    draw(bench, data, finished)
    return [
        Row("classifier_accuracy", classifier.accuracy, ">=", bench.least_accuracy),
        Row("classifier_accuracy_of_three", of_three, ">=", bench.least_accuracy),
        *rows_of(bench, finished),
        *(
            Row(f"diverged_at_update/{arm}/noise={noise:g}", piece.numbers["diverged"])
            for (arm, noise), piece in there.items()
            if "diverged" in piece.numbers
        ),
    ]


def split_name(name: str) -> tuple[float, str]:
    """Noise and arm of a piece."""
    arm, _, noise = name.rpartition("-")
    return float(noise), arm


EXPERIMENT = Experiment(
    name="jarzynski-mnist",
    title="Three digits at 4/7, 2/7 and 1/7: who keeps their weights, and at which noise (Fig. 2-4, 11, 12)",
    paper="Carbone, Hua, Coste, Vanden-Eijnden, NeurIPS 2023, Section 4.2 and Appendices B.2 and C.1.2",
    scales=by_scale(
        {
            "required": ("jarzynski",),
            "max_seconds": None,
            "classifier_noise": 0.3,
            "inflate": 1.05,
            "mala_step": 0.12,
            "ula_step": 0.05,
            "first_noise": 0.3,
            "annealed_over": 0.6,
            "faster": 10.0,
            "smc_ess": 0.9,
        },
        data=("digits", "mnist", "mnist"),
        size=(None, 14, None),
        energy=(MLPConfig(hidden=(128, 128)), MLPConfig(hidden=(256, 256)), ConvConfig()),
        arms=(("jarzynski", "pcd"), ("jarzynski", "pcd", "pcd-data"), ("jarzynski", "pcd", "pcd-data")),
        noises=((0.3,), (0.3, 0.1), (0.3, 0.1, 0.05)),
        train_rows=(None, 12_000, None),
        test_rows=(None, 4000, None),
        count=(30, 250, 1400),
        held_out_count=(9, 60, 200),
        epochs=(30, 6, 8),
        width=(8, 16, 32),
        least_accuracy=(0.95, 0.97, 0.99),
        walkers=(512, 1024, 2048),
        paper_walkers=(256, 512, 1024),
        populations=(4, 8, 8),
        batch=(105, 875, 1960),
        rate=(3e-3, 1e-3, 2e-4),
        betas=((0.99, 0.999), (0.9, 0.999), (0.99, 0.999)),
        pace=(0.03, 0.05, 0.005),
        moves=(1, 2, 2),
        steps=(600, 4000, 60_000),
        seconds=(None, None, 360),
        precision=("32-true", "32-true", "tf32"),
        smc_walkers=(16, 16, 128),
        restored=(12, 24, 96),
        restore_steps=(100, 300, 1000),
        restore_required=(False, False, True),
        error_target=(1.0, 0.5, 0.1),
        near_below=(0.0, 0.0, 0.07),
        near=({}, {}, {"walkers": 8192, "batch": 4900, "betas": (0.999, 0.999), "pace": 0.003}),
    ),
    body=body,
    compared=compared,
)
