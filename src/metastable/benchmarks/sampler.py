"""Langevin chains on a small network: our compiled chains beside TorchEBM's sampler and a JAX scan.

All run the same update, x − h∇E(x) + √(2h)ξ, on the same weights from the same positions, in float32. On a GPU
every engine is timed, on larger problems, too (`sampler_gpu`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from metastable.core.errors import need, require_choice
from metastable.energies import MLP
from metastable.experiments.base import Row
from metastable.kernels import HMC, MALA, ULA, Kernel, run_chain

from .memory import peak_of
from .peers import EXTRA, PURPOSE, Chain, jax_chain, problem, torchebm_chain
from .sampler_gpu import SIZES, growth, run_on
from .timing import by_turns, machine, on_cores

OVER_TORCHEBM = 1.5
OVER_JAX = 1.0
GROWTH_TARGET = 20.0
MOST_ROUNDS = 3
"""On a GPU, where nothing else runs and times hardly differ."""


def run(
    *,
    chains: int = 1024,
    hidden: Sequence[int] = (128, 128),
    steps: int = 200,
    rounds: int = 25,
    step_size: float = 0.01,
    cores: int | None = 2,
    memory_steps: tuple[int, int] = (200, 20_000),
    seed: int = 0,
    device: str | None = None,
    only: Sequence[str] = (),
) -> list[Row]:
    """Speed ratios, steps per second, and what a hundred times as many steps add to the memory.

    Args:
        chains: in one batch.
        hidden: widths of the network on the plane.
        steps: in one timing.
        rounds: timings of each case.
        step_size: h; HMC takes √(2h), the same scale.
        cores: CPUs to use.
        memory_steps: the short and the long chain whose peak memory is compared.
        seed: of weights and positions.
        device: `cpu`, or a GPU; the one that is there by default. On a GPU sizes are those of `sampler_gpu`.
        only: names of problems of a GPU, of all of them by default.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for name in only:
        require_choice("only", name, SIZES if place.type == "cuda" else ())
    if place.type == "cuda":
        sizes = {name: SIZES[name] for name in only or SIZES}
        rows = run_on(place, sizes, steps, min(rounds, MOST_ROUNDS), seed, torch.cuda.synchronize)
        rows += [] if only else [growth(place, (200, 2_000))]
        return [*rows, *machine(gpu=torch.cuda.get_device_name(place))]
    torchebm, jax = (need(module, EXTRA, PURPOSE) for module in ("torchebm", "jax"))
    with on_cores(cores):
        net, x = problem(chains, hidden, seed)
        rows = _speeds(net, x, step_size, steps, rounds)
        common = {"chains": chains, "hidden": list(hidden), "step_size": step_size, "seed": seed}
        short, long = (peak_of(long_chain, steps=steps, **common) for steps in memory_steps)
        name = f"memory_growth_mb/{memory_steps[0]}_to_{memory_steps[1]}_steps"
        rows.append(Row(name, (long - short) / 1e6, "<=", GROWTH_TARGET))
        return rows + machine(torchebm=torchebm.__version__, jax=jax.__version__)


def _speeds(net: MLP, x: Tensor, step_size: float, steps: int, rounds: int) -> list[Row]:
    kernels: dict[str, Kernel] = {
        "ula": ULA(step_size),
        "mala": MALA(step_size),
        "hmc": HMC((2 * step_size) ** 0.5),
    }
    cases = {f"{name}/compile": ours(kernel, net, x, "compile") for name, kernel in kernels.items()}
    cases["ula/eager"] = ours(kernels["ula"], net, x, "eager")
    cases["torchebm"] = torchebm_chain(net, x, step_size)
    cases["jax"] = jax_chain(net, x, step_size)
    counts = dict.fromkeys(cases, steps)
    counts["hmc/compile"] = max(1, steps // kernels["hmc"].gradients_per_step)
    turns = {name: lambda c=case, n=counts[name]: c(n) for name, case in cases.items()}
    first, times, fast = by_turns(turns, 1), by_turns(turns, rounds), "ula/compile"
    return [
        Row("speed_ratio/torchebm", times.ratio("torchebm", fast), ">=", OVER_TORCHEBM),
        Row("speed_ratio/jax", times.ratio("jax", fast), ">=", OVER_JAX),
        Row("speed_ratio/eager", times.ratio("ula/eager", fast)),
        *(Row(f"steps_per_second/{name}", n / times.median(name)) for name, n in counts.items()),
        *(Row(f"compile_seconds/{name}", first.median(f"{name}/compile")) for name in kernels),
    ]


def ours(kernel: Kernel, net: MLP, x: Tensor, engine: str) -> Chain:
    """`run_chain`, from the same positions every time."""
    rng = torch.Generator().manual_seed(0)
    return lambda steps: run_chain(kernel, net, kernel.init(net, x), steps, rng, engine=engine).state.x


def long_chain(chains: int, hidden: list[int], step_size: float, steps: int, seed: int) -> None:
    """A chain whose memory is measured."""
    net, x = problem(chains, hidden, seed)
    ours(ULA(step_size), net, x, "eager")(steps)
