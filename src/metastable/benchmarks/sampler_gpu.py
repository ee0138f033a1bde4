"""The sampler suite on a GPU: our engines side by side, TorchEBM, and JAX and BlackJAX where they see the GPU.

A perceptron on the plane with few and with many chains, and convolutional energies of 32 × 32 images. All make the
same Langevin update on the same weights, in float32 but where the name says otherwise; a case that cannot run is
left out of the rows.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metastable.core.errors import need
from metastable.core.precision import channels_last, precision
from metastable.energies.image_nets import ShortRunNet
from metastable.experiments.base import Row
from metastable.kernels import MALA, ULA, Kernel, run_chain
from metastable.kernels.engine import choose

from .peers import EXTRA, PURPOSE, Chain, jax_chain, jax_energy, problem, torchebm_chain
from .timing import Timings, by_turns

ENGINES = ("eager", "compile", "captured", "fused")
ROUNDED = {"ula": ("captured", "compile"), "mala": ("captured",)}
"""Engines that are timed in bfloat16 too, on convolutions: compiling one more takes ten seconds."""
LONGER = {"mlp/1024": 10}
"""Problems whose steps are so short that a timing has this many times as many."""
SIZES = {"mlp/1024": 1024, "mlp/100000": 100_000, "conv/64": 128, "conv/128": 256}
"""Chains of each problem."""
OVER_EAGER = {"mlp/1024": 10.0, "conv/64": 2.0}
OVER_TORCHEBM = {"mlp/1024": 10.0, "conv/64": 2.0}
MALA_OVER_ULA = 1.5


class Problem(NamedTuple):
    """An energy, where its chains begin, and a step size."""

    energy: nn.Module
    x: Tensor
    step_size: float


def conv_energy(features: int, seed: int = 0) -> nn.Module:
    """Five convolutions from 3 × 32 × 32 to one number, the usual small energy of images."""
    return ShortRunNet((3, 32, 32), features, seed)


def problems(device: torch.device, sizes: Mapping[str, int], seed: int) -> dict[str, Problem]:
    """By name: `mlp/CHAINS`, and `conv/FEATURES` with as many chains as `sizes` says."""
    made: dict[str, Problem] = {}
    for name, chains in sizes.items():
        kind, number = name.split("/")
        if kind == "mlp":
            energy, x = problem(chains, (128, 128), seed)
            made[name] = Problem(energy.to(device), x.to(device), 0.01)
        else:
            x = torch.randn((chains, 3, 32, 32), generator=torch.Generator().manual_seed(seed))
            made[name] = Problem(conv_energy(int(number), seed).to(device), x.to(device), 1e-4)
    return made


def engine_chain(kernel: Kernel, given: Problem, engine: str) -> Chain:
    """`run_chain`, from the same positions every time."""
    energy, x = given.energy, given.x
    rng = torch.Generator(x.device).manual_seed(0)
    return lambda steps: run_chain(kernel, energy, x, steps, rng, engine=engine).state.x


def rounded(chain: Chain, name: str) -> Chain:
    """The same chain at another precision."""

    def run(steps: int) -> Any:
        with precision(name):
            return chain(steps)

    return run


def cases_of(name: str, given: Problem, steps: int) -> dict[str, Chain]:
    """What can run on this problem, by `KERNEL/ENGINE` and by peer."""
    made: dict[str, Chain] = {}
    for kernel in (ULA(given.step_size), MALA(given.step_size)):
        for engine in ENGINES:
            if choose(kernel, given.energy, given.x, steps, engine).engine == engine:
                made[f"{kernel.name}/{engine}"] = engine_chain(kernel, given, engine)
        if f"{kernel.name}/fused" in made:
            made[f"{kernel.name}/fused tf32"] = rounded(made[f"{kernel.name}/fused"], "tf32")
        if name.startswith("conv"):
            beside = given._replace(energy=channels_last(copy.deepcopy(given.energy)))
            able = [e for e in ROUNDED[kernel.name] if f"{kernel.name}/{e}" in made]
            for engine in able:
                made[f"{kernel.name}/{engine} bf16"] = rounded(
                    engine_chain(kernel, beside, engine), "bf16-mixed"
                )
        made[f"{kernel.name}/auto"] = engine_chain(kernel, given, "auto")
    if importlib.util.find_spec("torchebm"):
        made["torchebm"] = torchebm_chain(given.energy, given.x, given.step_size)
    if name.startswith("mlp") and jax_sees_a_gpu():
        made["jax"] = jax_chain(given.energy, given.x, given.step_size)  # pyright: ignore
        if importlib.util.find_spec("blackjax"):
            made["blackjax/mala"] = blackjax_chain(given)
    return made


def jax_sees_a_gpu() -> bool:
    """Whether JAX is installed with a GPU behind it."""
    return bool(importlib.util.find_spec("jax")) and need("jax", EXTRA, PURPOSE).default_backend() == "gpu"


def blackjax_chain(given: Problem) -> Chain:
    """BlackJAX's MALA, every chain through `vmap`, in one jitted `lax.scan`."""
    jax, blackjax = need("jax", EXTRA, PURPOSE), need("blackjax", EXTRA, PURPOSE)
    energy: Any = jax_energy(given.energy)  # pyright: ignore
    mala = blackjax.mala(lambda x: -energy(x[None])[0], given.step_size)

    def step(carry: Any, _: Any) -> Any:
        state, key = carry
        key, own = jax.random.split(key)
        return (jax.vmap(mala.step)(jax.random.split(own, len(given.x)), state)[0], key), None

    def scan(x: Any, key: Any, steps: int) -> Any:
        return jax.lax.scan(step, (jax.vmap(mala.init)(x), key), None, length=steps)[0][0].position

    compiled = jax.jit(scan, static_argnums=2)
    start, key = jax.numpy.asarray(given.x.cpu().numpy()), jax.random.PRNGKey(0)
    return lambda steps: compiled(start, key, steps).block_until_ready()


def run_on(
    device: torch.device,
    sizes: Mapping[str, int],
    steps: int,
    rounds: int,
    seed: int,
    wait: Callable[[], Any],
) -> list[Row]:
    """Rows of every problem; `wait` returns when the device has done what it was asked to."""
    rows: list[Row] = []
    for name, given in problems(device, sizes, seed).items():
        count = steps * LONGER.get(name, 1)
        cases = cases_of(name, given, count)
        turns = {case: lambda c=chain, n=count: (c(n), wait()) for case, chain in cases.items()}
        for turn in turns.values():  # compile, record and choose algorithms before anything is timed
            turn()
        rows += rows_of(name, by_turns(turns, rounds), count)
        rows.append(Row(f"engine/{name}", str(choose(ULA(given.step_size), given.energy, given.x, count))))  # pyright: ignore
    return rows


def rows_of(name: str, times: Timings, steps: int) -> list[Row]:
    """Times over that of `auto`, and milliseconds a step."""
    ratio = {case: times.ratio(case, "mala/auto" if "mala" in case else "ula/auto") for case in times.seconds}
    floors = {"ula/eager": OVER_EAGER.get(name), "torchebm": OVER_TORCHEBM.get(name)}
    claims = [
        Row(f"speed_ratio/{name}/{case}", value, ">=" if floors.get(case) else None, floors.get(case))
        for case, value in ratio.items()
        if not case.endswith("auto")
    ]
    cost = Row(f"cost_ratio/{name}/mala_over_ula", times.ratio("mala/auto", "ula/auto"), "<=", MALA_OVER_ULA)
    speeds = [Row(f"ms_per_step/{name}/{case}", 1e3 * times.median(case) / steps) for case in times.seconds]
    return [*claims, cost, *speeds]


def growth(device: torch.device, steps: tuple[int, int]) -> Row:
    """Bytes that a long chain's peak has over a short one's, both recorded already."""
    given = problems(device, {"mlp/1024": 1024}, 0)["mlp/1024"]
    chain, peaks = engine_chain(ULA(given.step_size), given, "captured"), []
    for count in (*steps, *steps):
        torch.cuda.reset_peak_memory_stats(device)
        chain(count)
        peaks.append(torch.cuda.max_memory_allocated(device))
    return Row(f"memory_growth_mb/{steps[0]}_to_{steps[1]}_steps", (peaks[3] - peaks[2]) / 1e6, "<=", 0.0)
