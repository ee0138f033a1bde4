"""Langevin chains on a small network: our compiled chains beside TorchEBM's sampler and a JAX scan.

All run the same update, x − h∇E(x) + √(2h)ξ, on the same weights from the same positions, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from metastable.core.errors import need
from metastable.energies import MLP
from metastable.experiments.base import Row
from metastable.kernels import HMC, MALA, ULA, Kernel, run_chain

from .memory import peak_of
from .timing import by_turns, machine, on_cores

EXTRA = "bench"
PURPOSE = "the sampler benchmark"
OVER_TORCHEBM = 1.4
OVER_JAX = 0.9
GROWTH_TARGET = 20.0

Chain = Callable[[int], Any]
"""Runs that many steps, and returns where the chains are, `(chains, 2)`."""


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
    """
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


def problem(chains: int, hidden: Sequence[int], seed: int) -> tuple[MLP, Tensor]:
    """The network and the positions that every sampler starts from."""
    net = MLP(2, tuple(hidden), seed=seed).requires_grad_(False)
    return net, torch.randn((chains, 2), generator=torch.Generator().manual_seed(seed))


def ours(kernel: Kernel, net: MLP, x: Tensor, engine: str) -> Chain:
    """`run_chain`, from the same positions every time."""
    rng = torch.Generator().manual_seed(0)
    return lambda steps: run_chain(kernel, net, kernel.init(net, x), steps, rng, engine=engine).state.x


def torchebm_chain(net: MLP, x: Tensor, step_size: float) -> Chain:
    """TorchEBM's `LangevinDynamics` without trajectory or diagnostics, the least it can be asked to do."""
    core = need("torchebm.core", EXTRA, PURPOSE)
    samplers = need("torchebm.samplers", EXTRA, PURPOSE)

    class Wrapped(core.BaseModel):
        def __init__(self) -> None:
            super().__init__(device="cpu")
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    sampler = samplers.LangevinDynamics(Wrapped(), step_size=step_size, noise_scale=1.0, device="cpu")
    return lambda steps: sampler.sample(x=x, n_steps=steps)


def jax_energy(net: MLP) -> Callable[[Any], Any]:
    """The same network in `jax.numpy`, `(B, 2)` to `(B,)`."""
    jax = need("jax", EXTRA, PURPOSE)
    linear = [layer for layer in net.modules() if isinstance(layer, torch.nn.Linear)]
    weights = [(jax.numpy.asarray(l.weight.T.numpy()), jax.numpy.asarray(l.bias.numpy())) for l in linear]

    def energy(x: Any) -> Any:
        for weight, bias in weights[:-1]:
            x = jax.nn.silu(x @ weight + bias)
        weight, bias = weights[-1]
        return (x @ weight + bias)[:, 0]

    return energy


def jax_chain(net: MLP, x: Tensor, step_size: float) -> Chain:
    """A jitted `lax.scan`; the normals are drawn inside it."""
    jax = need("jax", EXTRA, PURPOSE)
    energy = jax_energy(net)
    grad = jax.grad(lambda x: energy(x).sum())
    sigma = (2 * step_size) ** 0.5

    def step(carry: Any, _: Any) -> Any:
        x, key = carry
        key, own = jax.random.split(key)
        return (x - step_size * grad(x) + sigma * jax.random.normal(own, x.shape), key), None

    def scan(x: Any, key: Any, steps: int) -> Any:
        return jax.lax.scan(step, (x, key), None, length=steps)[0][0]

    compiled = jax.jit(scan, static_argnums=2)
    start, key = jax.numpy.asarray(x.numpy()), jax.random.PRNGKey(0)
    return lambda steps: compiled(start, key, steps).block_until_ready()


def long_chain(chains: int, hidden: list[int], step_size: float, steps: int, seed: int) -> None:
    """A chain whose memory is measured."""
    net, x = problem(chains, hidden, seed)
    ours(ULA(step_size), net, x, "eager")(steps)
