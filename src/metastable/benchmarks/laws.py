"""Every engine held to eager on the device that is there: chains, whole updates, log Z, and memory of long chains.

A row is the largest difference of any number that two engines leave behind. What is recorded makes eager's numbers
bit for bit, so that its rows must be 0; what is compiled or fused rounds differently. The tests hold the same laws
where they run, which is mostly on a CPU; these rows say that they hold on a GPU.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from unittest.mock import patch

import torch
from torch import Tensor, nn

from metastable.core.errors import MissingDependencyError
from metastable.data import Dataset, load_array
from metastable.energies import MLP, ConvNet, Tilted, on_reference, spectral_norm
from metastable.experiments.base import Row
from metastable.kernels import HMC, MALA, ULA, Kernel, MetropolisHastings, Noise, run_chain
from metastable.kernels.base import ChainResult, StepKernel
from metastable.kernels.compiled import Walk, several
from metastable.kernels.engine import choose
from metastable.kernels.fused import fused_chain, why_not
from metastable.methods import METHODS, Method
from metastable.proposals import Gaussian, fit_gaussian
from metastable.runs.plan import make_plan, trainer_of
from metastable.runs.resolve import resolve_method
from metastable.training.captured import tensors_of
from metastable.training.config import TrainerConfig
from metastable.training.trainer import Trainer
from metastable.walkers import anneal
from metastable.walkers.path import Schedule

from .sampler_gpu import conv_energy
from .timing import machine

KERNELS: dict[str, Kernel] = {
    "ula": ULA(0.05),
    "ula, clipped": ULA(0.05, noise=0.1, drift_clip=0.02),
    "mala": MALA(0.3),
    "hmc": HMC(0.3, leapfrog=2),
    "metropolis": MetropolisHastings(0.5),
}
STEPS = 40
COMPILED, FUSED = 1e-4, 1e-4
"""What rounding may make of a chain's positions in so many steps, of which the fused one has three."""
ENERGIES = {"exact": "mixture", "density": "diffusion"}
"""For methods that need more than the default energy: one that draws, one that is a density."""


def run(
    *,
    chains: int = 64,
    rows: int = 200,
    updates: int = 12,
    methods: Sequence[str] = tuple(METHODS),
    memory_steps: tuple[int, int] = (1, 1000),
    compiled: bool = True,
    device: str | None = None,
) -> list[Row]:
    """Differences from eager, and bytes that a long chain takes beyond a short one.

    Args:
        chains: in one batch.
        rows: of data.
        updates: of each training.
        methods: whose updates are compared.
        memory_steps: the short and the long chain.
        compiled: whether chains are compiled, too, which takes longest.
        device: `cpu`, or a GPU; the one that is there by default.
    """
    home = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # cuDNN may add in another order every time, with which eager would not equal itself
    with warnings.catch_warnings(), torch.backends.cudnn.flags(deterministic=True, allow_tf32=True):
        warnings.simplefilter("ignore")  # what an engine has to say is in the rows
        found = [*recorded_chains(home, chains), *rounded_chains(home, chains, compiled)]
        found += [row for name in methods for row in launched_updates(name, rows, updates, home)]
        found.append(launched_log_z(home, chains))
        if home.type == "cuda":
            found += [growth(home, engine, *memory_steps) for engine in ("eager", "captured", "fused")]
    gpu = {"gpu": torch.cuda.get_device_name(home)} if home.type == "cuda" else {}
    return [*found, *machine(**gpu)]


def largest_difference(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """Of any two numbers in the same place; +inf where one of them alone is not a number.

    >>> one = [torch.tensor([1.0, torch.nan, torch.inf])]
    >>> largest_difference(one, one), largest_difference(one, [torch.tensor([1.5, torch.nan, torch.inf])])
    (0.0, 0.5)
    """
    most = 0.0
    for a, b in zip(ours, theirs, strict=True):
        a, b = a.detach().cpu().double(), b.detach().cpu().double()
        same = (a == b) | (a.isnan() & b.isnan())
        apart = (a - b).abs().nan_to_num(nan=math.inf).masked_fill(same, 0.0)
        most = max(most, float(apart.max()) if apart.numel() else 0.0)
    return most


def energies(device: torch.device) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """What chains are compared on, with the shape of an event."""
    rows = torch.randn((50, 2), generator=torch.Generator().manual_seed(0))
    net = lambda: MLP(2, (64, 64), seed=1)  # noqa: E731
    made = {
        "mlp": (net(), (2,)),
        "mlp on a Gaussian": (on_reference(net(), rows, zero_start=False), (2,)),
        "mlp, spectral norm": (spectral_norm(net(), scale=2.0), (2,)),
        "convolutions": (ConvNet((1, 8, 8), seed=1), (1, 8, 8)),
        "convolutions, 3 × 32 × 32": (conv_energy(8).requires_grad_(False), (3, 32, 32)),
    }
    return {name: (energy.to(device), shape) for name, (energy, shape) in made.items()}


def starts(chains: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The same positions on every device."""
    return torch.randn((chains, *shape), generator=torch.Generator().manual_seed(2)).to(device)


def chain(kernel: Kernel, energy: nn.Module, x: Tensor, engine: str) -> ChainResult:
    """With the random numbers that every engine gets."""
    rng = torch.Generator(x.device).manual_seed(3)
    return run_chain(kernel, energy, kernel.init(energy, x), STEPS, rng, engine=engine, slopes=True)


def left_by_chain(made: ChainResult) -> list[Tensor]:
    """All that a chain returns."""
    kept = (*made.state, *made.info[:2], made.slope)
    return [tensor for tensor in kept if tensor is not None]


def recorded_chains(device: torch.device, chains: int) -> list[Row]:
    """Recorded steps beside eager ones, for every kernel and energy; where they are not recorded, no difference."""
    found = []
    for name, (energy, shape) in energies(device).items():
        x = starts(chains, shape, device)
        for label, kernel in KERNELS.items():
            if (choice := choose(kernel, energy, x, STEPS, "captured")).engine != "captured":
                return [Row("engine/chains", str(choice))]  # pyright: ignore
            pair = [left_by_chain(chain(kernel, energy, x, engine)) for engine in ("captured", "eager")]
            found.append(Row(f"law/captured/{label}/{name}", largest_difference(*pair), "<=", 0.0))
    return found


def rounded_chains(device: torch.device, chains: int, compiled: bool) -> list[Row]:
    """Compiled and fused steps, whose products are rounded in another order; fused ones are given eager's noise."""
    energy, shape = energies(device)["mlp on a Gaussian"]
    x, found = starts(chains, shape, device), []
    for label in ("ula", "mala"):
        kernel = KERNELS[label]
        if compiled:
            pair = [chain(kernel, energy, x, engine).state.x for engine in ("compile", "eager")]
            found.append(Row(f"law/compile/{label}", largest_difference(pair[:1], pair[1:]), "<=", COMPILED))
        if (why := why_not(kernel, energy, x, precision="float32")) is None:
            found.append(Row(f"law/fused/{label}", fused_apart(kernel, energy, x), "<=", FUSED))
        else:
            found.append(Row(f"engine/fused/{label}", why))  # pyright: ignore
    return found


@torch.no_grad()
def fused_apart(kernel: Kernel, energy: nn.Module, x: Tensor) -> float:
    """Positions and mean acceptance of three steps with the same noise."""
    assert isinstance(kernel, StepKernel)
    rng, state = torch.Generator(x.device).manual_seed(3), kernel.init(energy, x)
    normal = torch.randn((3, *x.shape), generator=rng, device=x.device)
    uniform = torch.rand((3, len(x)), generator=rng, device=x.device)
    noises = [Noise(*pair) for pair in zip(normal, uniform, strict=True)]
    h = x.new_full((), kernel.step_size)
    eager = several(kernel, energy, Walk.start(state, False), noises, h, False)
    ours = fused_chain(kernel, energy, state, 3, rng, precision="float32", noise=Noise(normal, uniform))
    return largest_difference(
        (ours.state.x, ours.info.acceptance), (eager.state.x, eager.acceptance / len(noises))
    )


# ---- whole updates


def data_for(method: Method, rows: int) -> Dataset:
    """Rows with what the method needs beside them."""
    if method.needs == "given":
        return load_array(f"toy:pinwheel-given?n={rows}")
    plain = load_array(f"toy:two-modes?n={rows}")
    return plain.beside(labels=torch.arange(rows) % 3) if method.needs == "labels" else plain


def training(name: str, rows: int, updates: int, engine: str, device: torch.device) -> Trainer:
    """Of the method as it is by default, on its default energy."""
    method = resolve_method(name)
    energy = "joint-mlp" if method.needs == "labels" else ENERGIES.get(name)
    config = TrainerConfig(steps=updates, log_every=5, engine=engine, device=str(device))
    return trainer_of(make_plan(energy, data_for(method, rows), method, config))


def left_by(made: Trainer) -> list[Tensor]:
    """All that a training leaves: weights, the method's state, random numbers and what was logged."""
    made.run()
    weights = [t for module in made.players.values() for t in module.state_dict().values()]
    logged = [
        torch.tensor([v for k, v in sorted(row.items()) if k != "seconds"], dtype=torch.float64)
        for row in made.recorder.history
    ]
    return [*weights, *tensors_of(made.state), made.context.rng.get_state(), *logged]


def launched_updates(name: str, rows: int, updates: int, device: torch.device) -> list[Row]:
    """Updates launched as a whole beside the same ones step by step; in words where they cannot be."""
    try:
        pair = [training(name, rows, updates, engine, device) for engine in ("captured", "eager")]
    except MissingDependencyError as error:
        return [Row(f"left_out/update/{name}", str(error))]  # pyright: ignore
    apart = largest_difference(*map(left_by, pair))
    captured = pair[0].choice.chosen == "captured"
    words = [] if captured else [Row(f"engine/update/{name}", str(pair[0].choice))]  # pyright: ignore
    return [Row(f"law/update/{name}", apart if captured else math.inf, "<=", 0.0), *words]


def launched_log_z(device: torch.device, chains: int) -> Row:
    """Every temperature of a path launched as a whole beside the same path step by step."""
    q = Gaussian(torch.zeros(2, device=device))
    energy = Tilted(q, MLP(2, (64, 64), seed=1).to(device), zero_start=False)
    made = []
    for least in (1, math.inf):
        rng = torch.Generator(device).manual_seed(3)
        with patch.object(anneal, "LEAST", least):
            options = {"steps": 2, "populations": 4}
            x = starts(chains, (2,), device)
            walked = anneal.anneal(energy, q, x, Schedule.equal(8), HMC(0.3), rng, **options)
        made.append((walked.x, walked.log_weight))
    return Row("law/log_z", largest_difference(*made), "<=", 0.0)


def growth(device: torch.device, engine: str, short: int, long: int) -> Row:
    """Bytes that a long chain's peak has over a short one's, each run before.

    Step by step, where a chain began is held beside where it is from the second step on: a position and a gradient.
    """
    x = starts(4096, (2,), device)
    energy = Tilted(fit_gaussian(x), MLP(2, (64, 64), seed=1).to(device), zero_start=False)
    rng, peaks = torch.Generator(device), []
    for count in (short, long, short, long):
        torch.cuda.reset_peak_memory_stats(device)
        run_chain(ULA(0.01), energy, x, count, rng, engine=engine)
        peaks.append(torch.cuda.max_memory_allocated(device))
    most = 2.0 * x.nbytes if engine == "eager" else 0.0
    return Row(f"law/memory/{engine}/{short}_to_{long}_steps", float(peaks[3] - peaks[2]), "<=", most)
