"""Chains of a perceptron in one launch: every step of a block of chains inside one Triton kernel.

Positions stay in registers and weights in shared memory for the whole chain, and noise is made where it is used, so
that a step costs microseconds where launching its parts one by one costs hundreds. ULA, MALA and HMC on energies
with `perceptron()`: the library's `MLP`, alone or on a Gaussian or a mixture of them, in whatever units.

Precision. Products of matrices are rounded: to 2⁻¹¹ of their terms with `tf32`, to 2⁻¹⁶ with `bf16x3`, and as in
float32 with `float32`. MALA and HMC are exact for the energy as the kernel computes it. Energies of two roundings
differ by far more than those of one, so log-weights must be made of energies that are all evaluated in one way: of
those returned here only with `precision="float32"`, and else of eager ones at the positions returned.

The noise is Philox's, under a key that is drawn from the generator once in a call: the same generator state gives
the same chain, but not the one that the eager engine gives.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metastable.core.errors import UnsupportedError, require_choice, require_count
from metastable.core.perceptron import Perceptron
from metastable.core.protocols import perceptron_of
from metastable.core.triton import interpreted, triton_is_here
from metastable.core.types import Energy

from .base import ChainResult, ChainState, Info, Kernel, Noise, StepKernel
from .hmc import HMC
from .mala import MALA
from .ula import ULA
from .watch import modules_in

PRECISIONS = {"tf32": 4, "bf16x3": 4, "float32": 6, "ieee": 4}
"""Bytes of shared memory for a weight: one number, or the parts that it is split into. `ieee` is without tensor
cores, and slow."""
INSIDE = {"float32": "bf16x6"}
"""What the kernel calls a precision, where that is something else."""
ACTIVATIONS = ("silu", "softplus", "tanh", "gelu", "leaky_relu")
NARROW = 8
"""Events of up to so many numbers are multiplied column by column, longer ones by matrix products of 16 or more."""
HOPPER = 9
"""The generation of GPUs, by CUDA's number, whose tensor cores read one operand where it lies."""
LONGEST = 128


class Plan(NamedTuple):
    """How a launch is laid out.

    Attributes:
        block: chains in a program, a power of two.
        warps: of 32 threads in a program.
        flip: weights as the left operand of products, whose side fills the matrix units of few chains.
    """

    block: int = 16
    warps: int = 4
    flip: bool = True


def why_not(kernel: Kernel, energy: Any, x: Tensor, *, precision: str = "tf32") -> str | None:
    """Why these chains cannot be fused, in words; None where they can.

    Args:
        kernel: the Markov step.
        energy: the target, or its layers from `perceptron_of`.
        x: positions, `(B, *event)`.
        precision: of products of matrices.
    """
    require_choice("precision", precision, PRECISIONS)
    if type(kernel) not in (ULA, MALA, HMC):
        return f"the kernel is {kernel.name!r}, and only 'ula', 'mala' and 'hmc' are fused"
    if isinstance(kernel, HMC) and (
        kernel.mass_matrix is not None or not isinstance(kernel.mass, int | float)
    ):
        return "coordinates have masses of their own, and only one mass for all is fused"
    if any(m._forward_hooks or m._forward_pre_hooks for m in modules_in(energy)):
        return "a module of the energy has hooks, which would not be called"
    layers = _layers(energy)
    if layers is None:
        return f"the energy ({type(energy).__name__}) is no perceptron, alone or on Gaussians"
    return why_not_here(x) or _why_not_layers(layers, x, precision)


def why_not_here(x: Tensor) -> str | None:
    """Why no Triton kernel runs where `x` lies."""
    if not triton_is_here():
        return "Triton is not installed, or older than 3.5"
    if x.device.type != "cuda" and not interpreted():
        return f"the chains are on {x.device.type!r}, and Triton runs on CUDA"
    return None


def _why_not_layers(layers: Perceptron, x: Tensor, precision: str) -> str | None:
    """What stands against these layers: their kind, shapes or size."""
    tensors = (*layers.weights, *layers.biases, layers.head, layers.offset, *(layers.below or ()), x)
    wrong = {t.dtype for t in tensors} - {torch.float32}
    if wrong:
        return f"positions and parameters must be float32, and some are {wrong.pop()}"
    if layers.activation not in ACTIVATIONS:
        return f"the activation {layers.activation!r} is not among {', '.join(ACTIVATIONS)}"
    D = x[:1].numel() if len(x) else math.prod(x.shape[1:])
    if layers.weights[0].shape[1] != D or D > LONGEST:
        takes = layers.weights[0].shape[1]
        return f"an event has {D} numbers, and the first layer takes {takes} of at most {LONGEST}"
    if interpreted():
        return None
    properties = torch.cuda.get_device_properties(x.device)
    plan, room = plan_for(layers, len(x), precision, x.device), properties.shared_memory_per_block_optin
    need = shared_bytes(layers, plan, precision, properties.major == HOPPER)
    if need > room:
        return f"its layers need {need >> 10} KiB of shared memory, and a program has {room >> 10}"
    return None


def shared_bytes(layers: Perceptron, plan: Plan, precision: str, hopper: bool = False) -> int:
    """About the shared memory that a program takes: weights in both directions, and what goes between layers.

    Tensor cores of a `hopper` keep 64 rows or more in registers between layers, and read bfloat16 weights in both
    directions from one place.
    """
    each, (widths, columns) = PRECISIONS[precision], _sizes(layers)
    large = hopper and plan.block >= 64 and precision != "ieee"
    ways, edge_ways = (2 if precision == "tf32" or not large else 1), 1 if large else 2
    edges = edge_ways * max(each, 4) * columns * widths[0] + 16 * columns**2 if columns > NARROW else 0
    middle = sum(ways * each * a * b for a, b in itertools.pairwise(widths))
    return middle + edges + (1024 if large else plan.block * max(widths) * each)


def _sizes(layers: Perceptron) -> tuple[list[int], int]:
    """Widths of the hidden layers, and numbers of an event, as tiles have them."""
    first = layers.weights[0].shape[1]
    columns = _power_of_two(first) if first <= NARROW else max(16, _power_of_two(first))
    return [max(16, _power_of_two(w.shape[0])) for w in layers.weights], columns


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def plan_for(layers: Perceptron, chains: int, precision: str, device: torch.device) -> Plan:
    """A launch that fills the device: small blocks while there are programs for all its processors, then larger.

    Where layers do not fit into the shared memory of that, the next smaller block, or a larger one.
    """
    if device.type != "cuda":
        return Plan()
    properties = torch.cuda.get_device_properties(device)
    processors, room = properties.multi_processor_count, properties.shared_memory_per_block_optin
    large = (64, 4) if precision == "float32" else (128, 8)  # of the former two share a processor
    wanted = 16 if chains <= 16 * processors else 32 if chains <= 32 * processors else large[0]
    shapes = (large, (32, 8), (16, 4 if precision == "tf32" else 8))
    plans = [Plan(block, warps, False) for block, warps in shapes]
    plans.sort(key=lambda p: (p.block > wanted, abs(p.block - wanted)))
    hopper = properties.major == HOPPER
    return next((p for p in plans if shared_bytes(layers, p, precision, hopper) <= room), plans[-1])


def fused_chain(
    kernel: Kernel,
    energy: Energy | Perceptron,
    state: ChainState,
    steps: int,
    rng: torch.Generator,
    *,
    step_size: Tensor | float | None = None,
    slopes: bool = False,
    energies: bool = False,
    precision: str = "tf32",
    plan: Plan | None = None,
    noise: Noise | None = None,
    first: Tensor | None = None,
    rows: Tensor | None = None,
    into: ChainState | None = None,
) -> ChainResult:
    """Advance every chain by `steps` steps in one launch; `run_chain` says what arguments and result are.

    A gradient is evaluated `steps` times, for each leapfrog step of HMC, and once more where moves are adjusted,
    which begin from their own energies instead of those in `state`, or for `energies`.

    Args:
        kernel: `ULA`, `MALA`, or `HMC` with one mass.
        energy: the target, or its layers from `perceptron_of`, which saves looking for them in each call.
        state: where the chains are; only `x` is read.
        steps: how many steps.
        rng: from which the key of the noise is drawn.
        step_size: overrides the kernel's; a number, or one for each row, and never waited for.
        slopes: also average ‖∇E‖ along each chain.
        energies: fill energies and gradients of the last positions in for ULA too.
        precision: of products of matrices: `tf32`, `bf16x3`, `float32` or `ieee`.
        plan: how the launch is laid out; chosen by default.
        noise: normals `(steps, B, *event)` and uniforms `(steps, B)` to move by, instead of the kernel's own.
        first: a place, `(B,)`, for the energies that chains of MALA or HMC begin with.
        rows: of the chains that move, each at most once; by default all. `noise` and the mean acceptance and
            distance have a row for each of these.
        into: where chains that move are written over, with energies and gradients; needed with `rows`.
    """
    require_count("steps", steps, 0)
    reason = why_not(kernel, energy, state.x, precision=precision)
    if reason is not None:
        raise UnsupportedError(f"fused chain: {reason}")
    assert isinstance(kernel, StepKernel)
    layers = _layers(energy)
    assert layers is not None
    x = state.x.contiguous()
    n, adjusted = len(x) if rows is None else len(rows), isinstance(kernel, MALA | HMC)
    assert rows is None or into is not None
    out = into or ChainState(torch.empty_like(x), x.new_empty(n), torch.empty_like(x))
    sums = x.new_empty(3, n) if adjusted else x.new_ones(3, n)  # acceptance, moved, slope
    if not (steps or energies or adjusted):
        sums[1:] = 0
    elif n:
        first = x.new_empty(n) if first is None else first
        h = kernel.step_size if step_size is None else step_size
        h = h.to(x) if isinstance(h, Tensor) else x.new_full((), h)  # nothing is copied from the host
        h = h / math.sqrt(kernel.mass) if isinstance(kernel, HMC) else h  # pyright: ignore
        key = _filled(0, 1, x.device, torch.int64)  # of no noise
        if steps:
            key = torch.randint(1 << 62, (1,), generator=rng, device=rng.device).to(x.device)
        given = (x, x) if noise is None else (noise.normal.contiguous(), noise.uniform.contiguous())
        sigma, clip = (kernel.noise, kernel.drift_clip) if isinstance(kernel, ULA) else (None, None)
        plan = plan or plan_for(layers, n, precision, x.device)
        options = _options(layers, plan, precision) | {
            "ADJUSTED": adjusted, "SIGMA": sigma is not None, "CLIP": clip is not None,
            "GIVEN": noise is not None, "ENERGIES": energies or adjusted, "SLOPES": slopes,
            "SOME": rows is not None, "LEAP": kernel.leapfrog if isinstance(kernel, HMC) else 0,
        }  # fmt: skip
        launch = importlib.import_module("metastable.kernels.fused_triton").chain_kernel[
            (-(-n // plan.block),)
        ]
        with torch.cuda.device_of(x):
            launch(
                x, (*out, first), sums, key if rows is None else rows, n, steps, key,
                h.reshape(-1).contiguous(), int(h.numel() > 1), sigma or 0.0, clip or 0.0, given,
                _pointers(layers, precision), **options,
            )  # fmt: skip
    info = Info(sums[0], sums[1])
    empty = x.new_empty(0)
    kept = out if energies or adjusted else ChainState(out.x, empty, empty)
    return ChainResult(kept, info, None, sums[2] if slopes else None)


def _layers(energy: Any) -> Perceptron | None:
    return energy if isinstance(energy, Perceptron) else perceptron_of(energy)


def _pointers(layers: Perceptron, precision: str) -> tuple[Any, ...]:
    """Everything that the kernel reads of an energy; what is not there is zero, or never read."""
    like = layers.head
    D = layers.weights[0].shape[1]
    centre = _filled(0.0, D, like.device) if layers.centre is None else layers.centre
    share = _filled(1.0, 1, like.device) if layers.share is None else layers.share
    below = (*(layers.below or (like,) * 4), share)
    first, *others = (w.detach().contiguous() for w in layers.weights)
    weights = (first, *(rounded(w) for w in others)) if precision == "tf32" else (first, *others)
    biases = tuple(b.detach().contiguous() for b in layers.biases)
    parts = tuple(t.detach().contiguous() for t in below)
    return centre.contiguous(), weights, biases, like.detach().contiguous(), layers.offset.detach(), parts


@functools.cache
def _filled(value: float, n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """One number `n` times, the same tensor in every launch."""
    return torch.full((n,), value, device=device, dtype=dtype)


def rounded(weight: Tensor) -> Tensor:
    """To the nearest numbers of TF32, 10 bits after the leading one.

    >>> rounded(torch.tensor([1.0, 1.0 + 2**-11, 1.0 + 2**-12])).tolist()
    [1.0, 1.0009765625, 1.0]
    """
    return ((weight.view(torch.int32) + 4096) & -8192).view(torch.float32)


def _options(layers: Perceptron, plan: Plan, precision: str) -> dict[str, Any]:
    """What is compiled into the kernel."""
    inside = INSIDE.get(precision, precision)
    components = (0, 1) if layers.below is None else tuple(layers.below.log_peak.shape)
    return {
        "SIZES": (layers.weights[0].shape[1], tuple(w.shape[0] for w in layers.weights), *components),
        "HOW": (layers.activation, inside, "bf16x3" if inside == "tf32" else inside, plan.flip),
        "BLOCK": plan.block,
        "COLUMNS": _sizes(layers)[1],
        "num_warps": plan.warps,
        "num_stages": 1,
    }
