"""Trainings on pictures that advance by minutes, and what their samples are worth at each mark.

A piece is an arm at a mark, so many minutes of training. A command trains each arm from where it was left to the
marks that it is asked for, on a checkpoint or on a parcel of an earlier command, and measures there. The time that
measuring takes is none of training.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from metastable.api import fit
from metastable.core.by_class import of_labels
from metastable.core.errors import DivergenceError, require, require_choice
from metastable.core.powered import powered
from metastable.core.precision import precision
from metastable.core.random import derive, generator
from metastable.core.types import Walkers
from metastable.core.weights import ess_fraction
from metastable.data import Dataset, load_array
from metastable.evaluation.distances import without_copies
from metastable.evaluation.frechet import Statistics, frechet_distance, needed, statistics_of
from metastable.evaluation.image_distances import frechet
from metastable.evaluation.image_features import FeatureNetwork, as_pictures, open_network
from metastable.evaluation.image_measures import describe
from metastable.evaluation.restoration import tweedie
from metastable.kernels import Kernel, run_chain
from metastable.methods import Method
from metastable.runs.run import Run
from metastable.training.config import Adam, Schedule
from metastable.walkers.starts import Box

from .base import Bench, Row
from .parcels import park, unpark
from .pieces import Piece, Pieces

NETWORK_VARIABLE, STATISTICS_VARIABLE = "METASTABLE_INCEPTION", "METASTABLE_FID_STATISTICS"
CHOICES = ("arms", "minutes", "marks", "parcels", "required")
"""Settings that say which pieces are made and what is asked of them, not how they are made."""
CIFAR10 = {
    "data": ("toy:digits", "cifar10?n=5000&size=16", "cifar10"),
    "steps": (60, 10**6, 10**6),
    "log_every": (10, 20, 100),
    "batch": (32, 64, 128),
    "rate": (1e-3, 1e-4, 1e-4),
    "walkers": (200, 1000, 10_000),
    "chains": (32, 64, 128),
    "augment": ((), ("flip",), ("flip",)),
    "precision": ("32-true", "32-true", "bf16-mixed"),
    "images": (200, 1000, 10_000),
    "fid": (False, False, True),
}
"""What experiments with cold chains on CIFAR-10 have in common at each scale; small pictures at the first two."""
COLD = {
    **{"chain_step": 1.0, "chain_noise": 0.01, "data_noise": 0.03, "warmup": 0, "parcels": False},
    **{"final_rate": 1.0, "denoised": False, "pixels_target": 0.5},
}
"""What they have in common at all scales, unless they say otherwise."""
BY_NETWORK = {"fid": "FID", "frechet_distance": "Fréchet distance"}
"""Distances of features in rows and in words: that of any network but the usual one is not called FID."""
LEAST_WORTH = 2
"""Images without which there is no covariance."""
REACHED = 0.98
"""Share of a mark's minutes that a training must have had to be measured there."""
SHOWN = 100
"""Samples that are kept of a piece."""
AT_ONCE = 500
"""Chains that are drawn together."""
SIDE = 8
"""Side of the pictures whose pixels are compared."""
EXPONENTS = ("exponent_min", "exponent_max")
"""Extremes of H + E: where both are at the same bound, no gradient reaches the energy."""
LOGGED = (
    *("energy_gap", "ess", "ancestors", "rate_factor", "var_log_g", "divergence", "grad_scale"),
    *EXPONENTS,
)
"""What is kept of the last line of a log, where it is there."""
BEYOND = 4.0
"""How far values of pictures on [−1, 1] may lie, noise included."""
POINTS = 400
"""Lines of a log that are kept."""


@dataclass(frozen=True)
class ImageArm:
    """One of the trainings that are compared.

    Attributes:
        name: in rows, figures and file names.
        method: with its settings.
        energy: what is trained, from the data and a seed.
        settings: of `fit`, in the place of those that all arms share.
        labels: whether it is trained with the labels of the pictures.
        rounded: whether walkers with weights are rounded in parcels, too: where weights say little of energies.
        power: what the energy is multiplied with to take off noise, where the run's own power is not its chains'.
    """

    name: str
    method: Method[Any]
    energy: Callable[[Dataset, int], Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    labels: bool = False
    rounded: bool = False
    power: float | None = None


class Measures(NamedTuple):
    """What samples are compared with.

    Attributes:
        pixels: statistics of the data, shrunk to `SIDE`².
        noise: their distance from pixels of uniform noise.
        network: of FID, or another; None where none is named.
        statistics: of the network's features on the data.
    """

    pixels: Statistics
    noise: float
    network: FeatureNetwork | None = None
    statistics: Statistics | None = None


Found = dict[tuple[str, float], Piece]
"""By arm and minutes."""


def shrunk(x: Tensor) -> Tensor:
    """Pixels of pictures shrunk to `SIDE`², `(N, D)`."""
    return adaptive_avg_pool2d(x.float().clamp(-1, 1), SIDE).flatten(1)


def measures_of(bench: Bench, data: Dataset) -> Measures:
    """FID's network by `METASTABLE_INCEPTION`, where it is asked for; without it nothing is called FID.

    Statistics of its features are in the file that `METASTABLE_FID_STATISTICS` names, or of the data here.
    """
    pixels = statistics_of(shrunk(data.x))
    rng = torch.Generator().manual_seed(0)
    uniform = 2 * torch.rand(len(data), *data.event_shape, generator=rng) - 1
    noise = frechet_distance(statistics_of(shrunk(uniform)), pixels)
    path = os.environ.get(NETWORK_VARIABLE)
    if path is None or not bench.fid:
        return Measures(pixels, noise)
    network, stored = open_network(path, bench.device), os.environ.get(STATISTICS_VARIABLE)
    if stored is not None:
        return Measures(pixels, noise, network, Statistics.load(stored))
    return Measures(
        pixels, noise, network, describe(network, as_pictures(data.x, "data", (-1, 1))).statistics
    )


def measure(measures: Measures, walkers: Walkers, most: int, name: str = "") -> dict[str, float]:
    """Distances of weighted samples, `most` at most, from the data; by the network where they are enough for it.

    Samples that are worth fewer than two images have no covariance, and their pixels a distance that is no number.
    """
    walkers = without_copies(walkers, most)
    log_weight = walkers.log_weight.cpu()
    worth, pixels = float(ess_fraction(log_weight)) * len(walkers), math.nan
    if worth >= LEAST_WORTH:
        pixels = frechet_distance(statistics_of(shrunk(walkers.x.cpu()), log_weight), measures.pixels)
    found = {"pixels": pixels, "pixels_over_noise": pixels / measures.noise, "images": worth}
    network, statistics = measures.network, measures.statistics
    if network is not None and statistics is not None and worth >= needed(network.width):
        features = network(as_pictures(walkers.x.clamp(-1, 1), "samples", (-1, 1))).values
        distance = frechet(features.to(network.device), log_weight, statistics)
        key = "fid" if network.is_inception else "frechet_distance"
        ends = dict(zip((f"{key}_low", f"{key}_high"), distance.interval, strict=True))
        found |= {key: distance.value, f"{key}_se": distance.std_error, **ends}
    return {f"{name}{key}": value for key, value in found.items()}


def shared_settings(bench: Bench) -> dict[str, Any]:
    """Of `fit`, for all arms.

    Where the scale has minutes in which rates and noise fall, they go by these: a training that is stopped at a
    mark is on the same way as one that is not, on machines of any speed.
    """
    minutes = bench.settings.get("falls_over")
    clock = {} if minutes is None else {"follows": "seconds", "follows_seconds": 60 * minutes}
    return clock | {
        "steps": bench.steps,
        "batch_size": bench.batch,
        "optimiser": Adam(bench.rate, (0.0, 0.999)),
        "schedule": Schedule("linear", warmup=bench.warmup, final=bench.final_rate),
        "data_noise": bench.data_noise,
        "augment": bench.augment,
        "log_every": bench.log_every,
        "checkpoint_every": 10**9,
        "keep": 1,
        "device": bench.device,
        "precision": bench.precision,
        "units": "none",
        "evaluate": False,
    }


@dataclass(frozen=True)
class ImageTrials:
    """Arms on one set of pictures, each at several marks.

    Attributes:
        bench: settings, folder and voice.
        data: the pictures.
        arm: by its name.
        measures: what samples are compared with.
        more: of a run at a mark and its samples, further numbers and arrays.
        samples: of a run: the walkers that it keeps, unless something else is said.
    """

    bench: Bench
    data: Dataset
    arm: Callable[[str], ImageArm]
    measures: Measures
    more: Callable[[Run, Walkers], tuple[dict[str, Any], dict[str, np.ndarray]]] = lambda run, walkers: (
        {},
        {},
    )
    samples: Callable[[Run], Any] = lambda run: run.walkers

    @property
    def pieces(self) -> Pieces:
        """Where pieces lie, and what all of them are made with."""
        settings = {key: value for key, value in self.bench.settings.items() if key not in CHOICES}
        return Pieces(self.bench.folder / "pieces", settings | {"seed": self.bench.seed})

    def run(self, known: Collection[str]) -> Found:
        """The pieces that are asked for, of arms that are known, then all that are there."""
        for name in self.bench.arms:
            require_choice("arms", name, known)
        marks = [mark for mark in sorted(self.bench.marks) if mark <= self.bench.minutes]
        first = min(self.bench.marks, default=math.inf)
        require(bool(marks), "minutes", f"at least the first of the marks, {first:g}", self.bench.minutes)
        for name in self.bench.arms:
            for mark in marks:
                piece = self.pieces.find(f"{name}-{mark:g}")
                goes_on = (
                    self.advance(self.arm(name), mark) if piece is None else "stopped" not in piece.numbers
                )
                if not goes_on:
                    break
        return self.found(list(known))

    def found(self, known: Sequence[str]) -> Found:
        """All pieces, in the order of the arms that are known, the others after them, and of minutes."""
        places = (name.rpartition("-") for name in self.pieces.names())
        keys = sorted((arm, float(mark)) for arm, _, mark in places)
        keys.sort(key=lambda key: known.index(key[0]) if key[0] in known else len(known))
        pieces = {(arm, mark): self.pieces.find(f"{arm}-{mark:g}") for arm, mark in keys}
        return {key: piece for key, piece in pieces.items() if piece is not None}

    def advance(self, arm: ImageArm, mark: float) -> bool:
        """Train an arm to a mark and keep what it is worth there; whether it goes on after that."""
        bench, name = self.bench, f"{arm.name}-{mark:g}"
        training, parcels = bench.folder / "training" / arm.name, bench.folder / "parcels"
        unpark(training, parcels, arm.name)
        seed = derive(bench.seed, "piece") % 2**31
        data = self.data if arm.labels else Dataset.of(self.data.x, self.data.name)
        settings = shared_settings(bench) | {"max_seconds": 60 * mark, "seed": seed, "out": training}
        made = arm.energy(data, seed)
        try:
            # bare networks are no densities: it is their chains that are judged
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Along .* rays", UserWarning)
                run = fit(made, data, arm.method, resume=True, **settings | dict(arm.settings))
        except DivergenceError as error:
            self.pieces.keep(name, {"stopped": error.step}, {})
            bench.say(f"{name}: {error}")
            return False
        except KeyboardInterrupt:  # its checkpoint is there, and the same command goes on with it
            if bench.parcels:
                park(training, parcels, arm.name, arm.rounded)
            raise
        if bench.parcels:
            park(training, parcels, arm.name, arm.rounded)
        if run.seconds < 60 * REACHED * mark and bench.scale != "smoke":
            bench.say(f"{name}: not measured: its {run.steps} updates took {run.seconds / 60:.3g} minutes")
            return False
        numbers = self.pieces.keep(name, *self.judge(run, arm.power)).numbers
        network = self.measures.network
        by = "" if network is None or network.is_inception else f" by {network.name}"
        told = [f"{word}{by} {numbers[key]:.4g}, " for key, word in BY_NETWORK.items() if key in numbers]
        bench.say(
            f"{name}: {''.join(told)}pixels {numbers['pixels_over_noise']:.3f} of noise's, {run.steps} updates of "
            f"{numbers['ms_per_update']:.2f} ms, {numbers['engine']}"
        )
        return True

    def judge(self, run: Run, power: float | None = None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Numbers, samples and curves of a training at a mark; noise is taken off by `power`, or the run's own."""
        walkers, last = self.samples(run), run.history[-1]
        numbers = {
            "updates": run.steps,
            "minutes": run.seconds / 60,
            "ms_per_update": 1000 * run.seconds / run.steps,
            "engine": f"{run.engine.get('chosen', '')} {run.engine.get('reason', '')}".strip(),
            **{key: last[key] for key in LOGGED if key in last},
            **measure(self.measures, walkers, self.bench.images),
        }
        if self.bench.denoised:
            x = (
                run.denoised(walkers.x)
                if power is None
                else tweedie(powered(run.energy, power), walkers.x.to(self.bench.device), run.data_noise)
            )
            clean = Walkers(x, walkers.log_weight)
            numbers |= measure(self.measures, clean, self.bench.images, "denoised_")
        drawn = walkers.resampled(min(SHOWN, len(walkers)), seed=1).x
        order = torch.randperm(len(drawn), generator=torch.Generator().manual_seed(0)).to(drawn.device)
        samples = as_pictures(drawn[order].clamp(-1, 1), "samples", (-1, 1)).bytes.cpu().numpy()
        more = self.more(run, walkers)
        return numbers | more[0], {"samples": samples} | curves(run) | more[1]


def curves(run: Run) -> dict[str, np.ndarray]:
    """What was logged, at `POINTS` lines at most."""
    lines = run.history[:: max(1, -(-len(run.history) // POINTS))]
    names = (
        "step",
        "seconds",
        "energy_gap",
        "energy_data",
        "energy_negatives",
        "ess",
        "resamplings",
        "rate_factor",
        "displacement",
        *EXPONENTS,
    )
    return {f"curve_{name}": np.array([line.get(name, np.nan) for line in lines], float) for name in names}


def rows_of(
    bench: Bench, found: Found, paper: Mapping[str, float | str], required: Iterable[str] = ()
) -> list[Row]:
    """Distances first, then how many updates they cost; the paper's FID beside the last mark of an arm."""
    rows, ended = [], [key for key, piece in found.items() if "stopped" not in piece.numbers]
    for (arm, mark), piece in found.items():
        numbers, at = piece.numbers, f"{arm}/minutes={mark:g}"
        if "stopped" in numbers:
            rows.append(Row(f"stopped_at_update/{at}", numbers["stopped"]))
            continue
        last = mark == max(minutes for name, minutes in ended if name == arm)
        judged = ("<=", bench.pixels_target) if arm in required else (None, None)
        rows += [
            Row(f"{key}/{at}", numbers[key], paper=paper.get(arm) if key == "fid" and last else None)
            for by in BY_NETWORK
            for key in (by, f"{by}_se", f"denoised_{by}")
            if key in numbers
        ]
        rows.append(Row(f"pixels_over_noise/{at}", numbers["pixels_over_noise"], *judged))
        names = (
            "images",
            "minutes",
            "updates",
            "ms_per_update",
            "ess",
            "ancestors",
            "rate_factor",
            *EXPONENTS,
        )
        rows += [Row(f"{key}/{at}", numbers[key]) for key in names if key in numbers]
    missing = set(required) - {arm for arm, _ in ended}
    return rows + [
        Row(f"pixels_over_noise/{arm}", math.nan, "<=", bench.pixels_target) for arm in sorted(missing)
    ]


def from_noise(
    bench: Bench, run: Run, kernel: Kernel, n: int, steps: int, labels: Tensor | None = None
) -> Tensor:
    """Chains of a trained energy from uniform noise, `(n, *event)`, each under its label where there are labels."""
    rng = generator(derive(bench.seed, "from noise"), bench.device)
    low = torch.full(run.event_shape, -1.0, device=bench.device)
    ends = []
    with precision(bench.precision, bench.device):
        for rows in torch.arange(n, device=bench.device).split(AT_ONCE):
            energy = of_labels(run.energy, None if labels is None else labels[rows])
            start = Box(low, -low).sample(len(rows), rng)
            ends.append(run_chain(kernel, energy, start, steps, rng).state.x)
    return torch.cat(ends)


def pictures_of(bench: Bench) -> Dataset:
    """The data: a toy set, a file, or a set of pictures with its settings."""
    data = load_array(bench.data)
    require(data.x.dim() == 4, "data", "pictures, (C, H, W)", f"rows of shape {data.event_shape}")
    low, high = (float(end) for end in data.x.aminmax())
    require(low >= -BEYOND and high <= BEYOND, "data", "pictures on [−1, 1]", f"{low:.4g} … {high:.4g}")
    return data
