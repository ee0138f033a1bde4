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
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from metastable.api import sample
from metastable.core.random import derive, generator, seeded
from metastable.data import load_images
from metastable.energies import spectral_norm
from metastable.evaluation.diagnosis import Facts, diagnose
from metastable.evaluation.modes import mode_weights, nearest_center
from metastable.kernels import ULA
from metastable.methods import AdaptiveNCE, PersistentCD
from metastable.proposals import fit_gaussian
from metastable.report.figures import palette, picture, save_image_rows
from metastable.runs.run import Run
from metastable.training.config import Adam

from .base import Bench, Experiment, Row
from .trials import Arm, Problem, Trial, Trials, by_scale, draw_curves

KINDS = ("spectral", "plain")
EARLY, LATE = (0.2, 0.3), (0.9, 1.0)
"""Shares of the training whose v are compared."""
NAMES = ("constant-energy", "mode-collapse", "samples-too-wide")
"""Findings that long chains and the spread of the energy can lead to."""
REPORTED = {("0%", "constant-energy"): "yes", ("100%", "mode-collapse"): "yes"}
"""Figure 3.1."""
PAPER = (0.0, 0.05, 0.1, 0.25, 1.0)
"""R of the figures."""
SHOWN = 8
"""Images in a row of Figure 3.1."""
MOST = 1e6
"""A growth that is reported as this much is at least this much: the guard stops where numbers end."""


class Digits(NamedTuple):
    """Images in [−1, 1], `(n, 1, s, s)`, and the mean image and share of each class."""

    x: Tensor
    centers: Tensor
    shares: Tensor


def digits(size: int) -> Digits:
    """scikit-learn's 1797 digits of 8 × 8 pixels, enlarged to `size` × `size` by linear interpolation."""
    pixels, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = F.interpolate(pixels.float().div(8).sub(1).view(-1, 1, 8, 8), size=(size, size), mode="bilinear")
    return digits_of(x, labels)


def handwritten(bench: Bench) -> Digits:
    """MNIST from the folder that `METASTABLE_DATA` names, where the scale has it, else the small digits."""
    if bench.settings.get("images", "digits") == "digits":
        return digits(bench.size)
    found = load_images("mnist", n=bench.image_rows, size=bench.size, seed=bench.seed)
    return digits_of(found.x, found.labels)  # pyright: ignore


def digits_of(x: Tensor, labels: Tensor) -> Digits:
    """Images with the means and shares of their classes."""
    classes = [x[labels == c] for c in range(10)]
    shares = torch.tensor([len(c) / len(x) for c in classes])
    return Digits(x, torch.stack([c.mean(0) for c in classes]), shares)


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


class Look(NamedTuple):
    """What a model has learned: its energies on noise and data, where long chains end, and the diagnosis."""

    energy_spread: float
    fall: float
    separation: float
    long_run: Tensor
    findings: tuple[str, ...]


def growth(trial: Trial) -> float:
    """Mean v in the last tenth over that from 20 to 30 %, of the updates that were made."""
    if len(trial.curves) < 10:  # stopped before there were windows to compare
        return MOST
    at, v = trial.curves["step"], trial.curves["gradient_magnitude"]
    late, early = (v[(at > low * at[-1]) & (at <= high * at[-1])].mean() for low, high in (LATE, EARLY))
    return min(float(late / early), MOST) if math.isfinite(late / early) else MOST


def kernel() -> ULA:
    """Section 5.1.2."""
    return ULA(step_size=1.0, noise=0.005)


def network(bench: Bench, kind: str) -> nn.Module:
    """The same initial weights for every course."""
    net = LeakyConv(bench.size, bench.widths, bench.hidden, derive(bench.seed, "network") % 2**31)
    return spectral_norm(net) if kind == "spectral" else net


def arms(bench: Bench) -> list[Arm]:
    """Every R, with and without spectral normalisation."""
    compared = []
    for R in bench.rejuvenations:
        source = PersistentCD(
            walkers=bench.buffer,
            batch=bench.batch,
            kernel=kernel(),
            steps=bench.langevin,
            rejuvenation=R,
            start_at="noise",
        )
        method = AdaptiveNCE(source, interval=bench.interval, tempered=False)
        compared += [Arm(name_of(kind, R), method, about=kind) for kind in KINDS]
    return compared


def name_of(kind: str, R: float) -> str:
    """Of the arm."""
    return f"{kind}/R={R:.0%}"


def look(bench: Bench, data: Digits, trial: Trial, energy: nn.Module) -> Look:
    """Energies of data and noise, long chains from noise, and the diagnosis in the training's own words."""
    x = data.x.to(bench.device)
    noise = fit_gaussian(x).sample(len(x), generator(derive(bench.seed, "noise"), x.device))
    with torch.no_grad():
        on_data, on_noise = energy(x), energy(noise)
    energy_spread = float(torch.cat([on_data, on_noise]).std()) / kernel().temperature
    fall = float(on_noise.mean() - on_data.mean())
    separation = fall / float(((on_noise.var() + on_data.var()) / 2).sqrt())
    init = noise[: bench.long_chains]
    long_run = sample(
        energy, len(init), kernel=kernel(), steps=bench.long_steps, init=init, seed=bench.seed
    ).x.cpu()
    findings = diagnose([dict(line) for line in trial.curves.lines], facts(data, long_run, energy_spread))
    return Look(energy_spread, fall, separation, long_run, tuple(f.name for f in findings))


def facts(data: Digits, long_run: Tensor, energy_spread: float) -> Facts:
    """What the diagnosis is told of long chains: their classes, their spread, and the spread of the energy."""
    shares = mode_weights(long_run, data.centers)
    return Facts(
        method="adance",
        data_mode_weights=data.shares.tolist(),
        sample_mode_weights=shares.tolist(),
        mode_weight_se=(data.shares * (1 - data.shares) / len(long_run)).sqrt().tolist(),
        sample_std_ratio=spread(data, long_run),
        energy_spread=energy_spread,
    )


def spread(data: Digits, long_run: Tensor) -> float:
    """Standard deviation of long chains over that of the data, over all pixels."""
    ratio = long_run.flatten(1).var(0).sum() / data.x.flatten(1).var(0).sum()
    return float(ratio.sqrt())


def classes(data: Digits, long_run: Tensor) -> float:
    """exp of the entropy of the nearest-class histogram of long chains: 10 where all classes are met alike."""
    return float(torch.special.entr(mode_weights(long_run, data.centers)).sum().exp())


def distinct(data: Digits, long_run: Tensor) -> float:
    """How many different images are nearest to one of the long chains, per chain."""
    return len(torch.unique(nearest_center(long_run, data.x))) / len(long_run)


def body(bench: Bench) -> list[Row]:
    """Every R, with and without spectral normalisation, to the end or to where the guard stops it."""
    data = handwritten(bench)

    def keep(trial: Trial, at: Problem, run: Run) -> Look | None:
        """Chains of the plain ones may leave for infinity."""
        return look(bench, data, trial, at.model) if trial.arm.about == "spectral" else None

    def words(trial: Trial) -> str:
        end = "finished" if trial.stopped is None else f"stopped by the guard at {trial.stopped}"
        return f"{end}, v grew {growth(trial):.2f}-fold {trial.kept.findings if trial.kept else ''}"

    settings = {
        "steps": bench.steps,
        "batch_size": bench.batch,
        "optimiser": Adam(bench.rate, betas=(0.0, 0.999)),
        "log_every": max(1, bench.steps // 100),
    }
    found = Trials(
        arms(bench),
        lambda arm, seed: Problem(network(bench, arm.about), data.x),
        settings,
        seed=lambda bench, arm, repeat: bench.seed,
        keep=keep,
        may_stop=True,
        words=words,
        records=(Look,),
    ).run(bench)
    trials = {name: trial for name, (trial,) in found.items()}
    _draw_v(bench, trials)
    pictures = {"data": data.x[:: len(data.x) // SHOWN][:SHOWN]}
    for R in bench.rejuvenations:
        if own := trials[name_of("spectral", R)].kept:
            pictures[f"R = {R:.0%}"] = own.long_run[:SHOWN]
    save_image_rows(bench.folder / "figure-3-1.png", pictures)
    return _rows(bench, data, trials)


def _rows(bench: Bench, data: Digits, trials: dict[str, Trial]) -> list[Row]:
    rows, worse = [], []
    for R in bench.rejuvenations:
        spectral, plain = (trials[name_of(kind, R)] for kind in KINDS)
        rows.append(Row(f"v_growth/spectral/R={R:.0%}", growth(spectral), "<=", 2.0))
        rows.append(Row(f"v_growth/plain/R={R:.0%}", growth(plain)))
        rows.append(Row(f"updates_made/plain/R={R:.0%}", float(plain.stopped or bench.steps)))
        worse.append(plain.stopped is not None or growth(plain) > growth(spectral))
    rows.append(Row("plain_grows_further_or_stops", float(np.mean(worse)), ">=", bench.worse_target))
    most = bench.rejuvenations[-1]
    long = {R: trials[name_of("spectral", R)].kept for R in bench.rejuvenations}
    lost = long[most] is not None and not {"mode-collapse", "samples-too-wide"}.isdisjoint(
        long[most].findings
    )
    judged = (">=", 1.0) if bench.settings.get("judge_long_run", True) else (None, None)
    rows.append(Row(f"long_run_named_lost/R={most:.0%}", float(lost), *judged, paper="mode collapse"))
    for share, own in long.items():
        if own is None:
            continue
        R = f"{share:.0%}"
        rows += [
            Row(f"fall_from_noise_to_data/R={R}", own.fall),
            Row(f"noise_to_data_in_std/R={R}", own.separation),
            Row(f"energy_spread_nats/R={R}", own.energy_spread),
            Row(f"long_run_classes/R={R}", classes(data, own.long_run)),
            Row(f"long_run_distinct/R={R}", distinct(data, own.long_run)),
            Row(f"long_run_spread/R={R}", spread(data, own.long_run)),
        ]
        for name in NAMES:
            found = float(name in own.findings)
            rows.append(Row(f"diagnosis/{name}/R={R}", found, paper=REPORTED.get((R, name))))
    return rows


def _draw_v(bench: Bench, trials: dict[str, Trial]) -> None:
    """Figures 3.2 and 3.3: v over training for each R."""
    titles = {"plain": "without spectral norm", "spectral": "with spectral norm"}
    usual = [t.curves["gradient_magnitude"] for t in trials.values() if t.arm.about == "spectral"]
    top = 20 * max(float(np.nanmax(v, initial=0.1)) for v in usual)
    with picture(bench.folder / "figure-3-2.png", 8, 3.4, columns=2, sharey=True) as axes:
        for axis, (kind, title) in zip(axes, titles.items(), strict=True):
            for R, colour in zip(bench.rejuvenations, palette, strict=False):
                own = trials[name_of(kind, R)]
                draw_curves(axis, [own], "gradient_magnitude", colour, f"R = {R:.0%}", alpha=1.0)
                if own.stopped is not None and len(own.curves):  # its last v is far above
                    axis.plot(own.curves["step"][-1], 0.7 * top, "x", color=colour, ms=7, mew=2)
            axis.set(title=title, xlabel="update", yscale="log", xlim=(0, 1.02 * bench.steps))
        axes[0].set(ylabel="v, mean of ‖∇E‖ along chains", ylim=(None, top))
        axes[0].text(0.97, 0.9, "× stopped by the guard", transform=axes[0].transAxes, ha="right", fontsize=8)
        axes[1].legend(fontsize=7)


EXPERIMENT = Experiment(
    name="adance-stability",
    title="Digits: rejuvenation and spectral normalisation in self-adapting NCE (Fig. 3.1–3.3)",
    paper="Nathaniel Xu, Self-adapting noise-contrastive estimation for energy-based models, 2022, Section 3.2",
    scales=by_scale(
        {"interval": 5},
        rejuvenations=((0.0, 1.0), PAPER, PAPER),
        size=(8, 16, 28),
        widths=((16,), (16, 32), (32, 64, 128)),
        hidden=(32, 64, 128),
        langevin=(5, 10, 20),
        buffer=(256, 1000, 10_000),
        batch=(32, 32, 128),
        steps=(200, 800, 1000),
        rate=(5e-3, 2e-3, 1e-3),
        long_chains=(160, 200, 500),
        long_steps=(300, 1000, 2000),
        worse_target=(0.5, 0.8, 0.8),
    ),
    body=body,
)
