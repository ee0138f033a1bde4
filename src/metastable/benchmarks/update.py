"""One training update, step by step and launched as a whole: the demo's methods, and energies of images.

On a GPU an update is recorded as a CUDA graph (`training.captured`), and its time is set against that of the same
update made step by step, through the real training loop, log lines included. On a CPU, where updates are not
recorded, only those of the demo are timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from metastable.api import log_partition
from metastable.core.batch import Batch
from metastable.data import load_array
from metastable.energies import MLP, ConvNet, JointEnergy, Tilted
from metastable.energies.build import MLPConfig
from metastable.energies.wide_resnet import WideResNet
from metastable.evaluation.rounding import rounding_of
from metastable.experiments.base import Row
from metastable.kernels import HMC
from metastable.methods import JEM, AdaptiveNCE, FDivergence, Jarzynski, Method, PersistentCD
from metastable.methods.base import Context
from metastable.proposals import fit_gaussian
from metastable.runs.plan import make_plan, trainer_of
from metastable.training.config import Adam, Schedule, TrainerConfig
from metastable.training.engine import Engine
from metastable.training.trainer import Trainer
from metastable.walkers import anneal

from .step_cost import advance
from .timing import by_turns, machine

OVER_EAGER = {"demo/jarzynski": 10.0, "demo/pcd": 8.0, "images/jarzynski": 2.0, "images/adance": 2.0}
OVER_PCD = {"jarzynski": ("pcd", 1.10), "jarzynski-batch": ("pcd-batch", 1.10)}
OVER_PCD["jarzynski-batch-all"] = "pcd-batch", 1.35
"""What Jarzynski's updates are set against, with as many chains that move, and how much more they may take."""
ROUNDED = {
    "images/jarzynski": ("auto tf32", "auto bf16", "compile bf16"),
    "images/f-ebm": ("auto bf16",),
    "images/adance": ("auto bf16",),
}
"""Engines with a precision that are timed besides."""
WARM = 60
"""Updates before anything is timed: recordings are made at the second of each kind, then of several."""
FEW = 4
"""Updates in one timing of a network that takes long, and before it."""
LONG = ("jem/wrn-28-10", "jem/wrn-28-10, bf16")
STEPS = 100_000
"""Of which no timing reaches the end."""

Make = Callable[[str, str], Trainer]


def run(
    *,
    walkers: int = 4096,
    rows: int = 4096,
    updates: int = 100,
    eager_updates: int = 10,
    rounds: int = 5,
    device: str | None = None,
) -> list[Row]:
    """Milliseconds of an update by engine, and their ratios.

    Args:
        walkers: of every method.
        rows: of 28 × 28 images; the demo has its own.
        updates: in one timing.
        eager_updates: in one timing of updates made step by step.
        rounds: timings of each case.
        device: `cpu`, or a GPU; the one that is there by default.
    """
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    engines = {"eager": eager_updates} | (
        dict.fromkeys(("captured", "auto"), updates) if place.startswith("cuda") else {}
    )
    measured: list[Row] = []
    for name, make in cases(walkers, rows).items():
        if "captured" in engines or name.startswith("demo"):
            timed = engines | dict.fromkeys(ROUNDED.get(name, ()), updates)
            timed = dict.fromkeys(engines, FEW) if name in LONG else timed
            measured += rows_of(name, make, timed, 2 if name in LONG else rounds, place)
    ms = {row.metric: row.value for row in measured}
    if "captured" in engines:
        full, half = (ms[f"update_ms/{name}/{e}"] for name, e in zip(LONG, ("eager", "auto"), strict=True))
        measured.append(Row("speed_ratio/jem/wrn-28-10/bf16", full / half, ">=", 2.0))
    fast = list(engines)[-1]
    for own, (other, most) in OVER_PCD.items():
        ratio = ms[f"update_ms/demo/{own}/{fast}"] / ms[f"update_ms/demo/{other}/{fast}"]
        relation, bar = ("<=", most) if fast == "auto" else (None, None)
        measured.append(Row(f"cost_ratio/demo/{own}_over_{other}", ratio, relation, bar))
    measured += log_z_rows(place) if "captured" in engines else []
    return [*measured, *machine(device=torch.cuda.get_device_name() if "captured" in engines else place)]


def cases(walkers: int, rows: int) -> dict[str, Make]:
    """What is trained, by name; each takes an engine and a device."""
    some = max(1, walkers // 16)
    return {
        "demo/jarzynski": demo(Jarzynski(walkers=walkers)),
        "demo/pcd": demo(PersistentCD(walkers=walkers)),
        "demo/jarzynski-batch": demo(Jarzynski(walkers=walkers, batch=some, gradient="batch")),
        "demo/jarzynski-batch-all": demo(Jarzynski(walkers=walkers, batch=some)),
        "demo/pcd-batch": demo(PersistentCD(walkers=walkers, batch=2 * some)),
        "images/jarzynski": images(Jarzynski(walkers=walkers), rows),
        "images/f-ebm": images(FDivergence(source=PersistentCD(walkers=walkers)), rows),
        "images/adance": images(AdaptiveNCE(), rows),
        **{name: joint("bf16-mixed" if "bf16" in name else "32-true") for name in LONG},
    }


def demo(method: Method) -> Make:
    """The training that `make demo` makes."""

    def make(engine: str, device: str) -> Trainer:
        settings = {"optimiser": Adam(1e-3), "schedule": Schedule("cosine")}
        config = TrainerConfig(steps=STEPS, engine=engine, device=device, **settings)  # pyright: ignore
        plan = make_plan(MLPConfig(hidden=(64, 64)), load_array("toy:two-modes"), method, config)
        return trainer_of(plan)

    return make


def images(method: Method, rows: int) -> Make:
    """A convolutional energy of 28 × 28 images on a Gaussian; an engine may come with a precision, `auto bf16`."""

    def make(engine: str, device: str) -> Trainer:
        engine, _, rounded = engine.partition(" ")
        home = Engine(device, "bf16-mixed" if rounded == "bf16" else rounded or "32-true")
        rng = torch.Generator().manual_seed(0)
        x = torch.rand((rows, 1, 28, 28), generator=rng)
        x = (x + 0.5 * torch.randn(x.shape, generator=rng)).to(device)
        noise, energy = fit_gaussian(x), home.place_module(Tilted(fit_gaussian(x), ConvNet((1, 28, 28))))
        players = {"energy": energy, **method.companions(energy, x, noise, 0)}
        config = TrainerConfig(steps=STEPS, engine=engine, device=device, optimiser=Adam(1e-4))
        given = {name: home.place_module(m) for name, m in players.items()}
        return Trainer(energy, given, x, method, config, noise=noise, engine=home, make_context=Context)  # pyright: ignore

    return make


def joint(precision: str, depth: int = 28, width: int = 10, rows: int = 512) -> Make:
    """JEM as its paper has it: a wide residual network on 3 × 32 × 32, 20 steps of 64 chains an update."""

    def make(engine: str, device: str) -> Trainer:
        rng = torch.Generator().manual_seed(0)
        x = torch.rand((rows, 3, 32, 32), generator=rng).to(device)
        labels = torch.randint(10, (rows,), generator=rng).to(device)
        energy = JointEnergy(WideResNet((3, 32, 32), depth, width, outputs=10)).to(device)
        if precision != "32-true":  # in which matrix units read half as much
            energy.to(memory_format=torch.channels_last)  # pyright: ignore
        config = TrainerConfig(
            steps=STEPS,
            engine=engine,
            device=device,
            batch_size=64,
            optimiser=Adam(1e-4),
            precision=precision,
        )
        home, method = Engine(device, precision), JEM()
        options = {"noise": fit_gaussian(x), "engine": home, "make_context": Context}
        return Trainer(energy, {"energy": energy}, Batch(x, labels), method, config, **options)  # pyright: ignore

    return make


def log_z_rows(device: str, rounds: int = 3) -> list[Row]:
    """Seconds of log Z of the demo's network, its temperatures step by step and launched as a whole."""
    x = load_array("toy:two-modes").x.float().to(device)
    network = MLP(2, (64, 64), seed=1).to(device)
    for parameter in network.parameters():
        parameter.data *= 4.0  # far enough from the Gaussian for a path of many temperatures
    energy = Tilted(fit_gaussian(x), network, zero_start=False)

    def estimate(least: float) -> None:
        with patch.object(anneal, "LEAST", least):
            log_partition(energy, 2, reference=fit_gaussian(x), seed=0)

    engines = {"eager": math.inf, "auto": anneal.LEAST}
    turns = {name: lambda least=least: estimate(least) for name, least in engines.items()}
    by_turns(turns, 1)
    times = by_turns(turns, rounds)
    found = [Row(f"log_z_s/demo/{name}", times.median(name)) for name in engines]
    found.append(Row("speed_ratio/log_z/demo/eager", times.ratio("eager", "auto")))
    return [*found, *path_rows(energy, rounds)]


def path_rows(energy: Tilted, rounds: int) -> list[Row]:
    """Milliseconds of a temperature of log Z, for a path so long that it pays to compile a kernel for it."""
    start: Any = energy.reference
    rng = torch.Generator(start.mean.device).manual_seed(0)
    x, kernel = start.sample(8192, rng), HMC(0.3, leapfrog=4)

    def walk(count: int, least: float, fused: float) -> None:
        schedule = anneal.Schedule.equal(count, 0.3)
        with patch.object(anneal, "LEAST", least), patch.object(anneal, "FUSED", fused):
            anneal.anneal(energy, start, x, schedule, kernel, rng, steps=4, populations=8)
            torch.cuda.synchronize()

    engines = {"eager": (40, math.inf, math.inf), "captured": (400, 0, math.inf), "fused": (400, 0, 0)}
    turns = {name: lambda given=given: walk(*given) for name, given in engines.items()}
    by_turns(turns, 1)
    times = by_turns(turns, rounds)
    ms = {name: 1e3 * times.median(name) / engines[name][0] for name in engines}
    ratios = [Row(f"speed_ratio/log_z/path/{name}", ms[name] / ms["fused"]) for name in ("eager", "captured")]
    return [*(Row(f"log_z_ms/path/{name}", value) for name, value in ms.items()), *ratios]


def rows_of(name: str, make: Make, engines: dict[str, int], rounds: int, device: str) -> list[Row]:
    """Times of one training by engine, the one over the other, and what was chosen in words."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    trainers = {engine: make(engine, device) for engine in engines}
    for engine, training in trainers.items():
        training._begin()
        few = engine == "eager" or name in LONG
        advance(training, min(WARM, engines[engine]) if few else WARM)
    turns = {e: lambda t=t, n=engines[e]: (advance(t, n), wait()) for e, t in trainers.items()}
    times = by_turns(turns, rounds)
    ms = {engine: 1e3 * times.median(engine) / count for engine, count in engines.items()}
    found = [Row(f"update_ms/{name}/{engine}", value) for engine, value in ms.items()]
    for kind in {engine.partition(" ")[2] for engine in engines} & {"bf16"}:
        rounding = rounding_of(trainers[f"auto {kind}"].energy, trainers[f"auto {kind}"].context.data)
        found.append(Row(f"rounding_std/{name}/{kind}", rounding.std))
    if "auto" in ms:
        floor, ratio = OVER_EAGER.get(name), ms["eager"] / ms["auto"]
        found.append(Row(f"speed_ratio/{name}/eager", ratio, ">=" if floor else None, floor))
        found.append(Row(f"engine/{name}", str(trainers["auto"].choice)))  # pyright: ignore
    return found
