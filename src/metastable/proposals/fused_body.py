"""Values of a `TokenBody` with their gradients in the events, by 36 Triton kernels in the place of some 260.

A chain asks for a gradient at a time, of a few events, and waits for the number of its kernels, not for their work.
Here a layer is two of them on the way ahead and two on the way back. Products are as in float32 (each number split
in three of TF32). The order of sums is another than torch's, so values differ by rounding.
"""

from __future__ import annotations

import importlib
import subprocess
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.capture import aside, is_recording
from metastable.core.errors import OutOfMemoryError
from metastable.core.plain import HOOKS, plain_layers
from metastable.core.precision import products_are_tf32
from metastable.core.triton import interpreted, triton_is_here

SMALLEST, LARGEST = 16, 64
"""Rows and columns that products of matrices take at least; tokens of an event and those beside it at most."""
WIDTHS, CHUNK, WARPS, MOST = (32, 64, 128), 32, 4, 8
"""Of tokens; columns of a product; of a program; programs that share hidden units or heads of an event."""
WARPS_OF_FEW = 8
"""Warps of a program of a layer where events are few."""
HELD = 8
"""Numbers of a token that a program can hold on the way back to the event. Of twice as many, at width 128, Hopper's
compiler puts 19 KB of each thread in local memory, and in parts, or at width 64, the gradient was not torch's."""
EVENTS = 512
"""From here on torch's kernels are as fast, and take less memory."""
Tables = dict[tuple[int, ...], tuple[Tensor, bool]]
_TABLES: weakref.WeakKeyDictionary[nn.Module, Tables] = weakref.WeakKeyDictionary()
_RAN: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_REFUSED: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def why_not(body: Any, x: Tensor, beside: Tensor) -> str | None:
    """Why this body cannot be fused for events `(N, d)` and tokens `(M, S, width)`, in words; None where it can."""
    if not triton_is_here():
        return "Triton is not installed, or older than 3.5"
    if x.device.type != "cuda" and not interpreted():
        return f"events are on {x.device.type!r}, and Triton runs on CUDA"
    if torch.is_autocast_enabled(x.device.type) or products_are_tf32():
        return "products are rounded (autocast or TF32), and energies of two roundings make no weights"
    if len(x) > EVENTS:
        return f"{len(x)} events keep a GPU busy without it; up to {EVENTS} are fused"
    return _why_not_modules(body) or _why_not_sizes(body, x, beside) or _REFUSED.get(body)


def _why_not_modules(body: nn.Module) -> str | None:
    """What stands against the body's parts: kernels know those that it is made with, and nothing else."""
    for name, m in body.named_modules():
        if not _known(m):
            return f"{name or 'it'} is a {type(m).__name__} that the kernels do not know"
        if any(vars(m)[hooks] for hooks in HOOKS):
            return f"{name or 'it'} has hooks, which would not be called"
    norms = {m.eps for m in body.modules() if isinstance(m, nn.LayerNorm | nn.GroupNorm)}
    return None if len(norms) == 1 else "norms have several eps"


def _known(m: nn.Module) -> bool:
    """Whether it is a module of ours, or one of torch's as `TokenBody` has them; a parametrised one is neither."""
    if type(m) in (nn.Linear, nn.LayerNorm, nn.GroupNorm):
        return m.bias is not None
    return type(m) in (nn.Sequential, nn.ModuleList, nn.SiLU) or type(m).__module__.startswith(
        __package__ or ""
    )


def _why_not_sizes(body: Any, x: Tensor, beside: Tensor) -> str | None:
    """What stands against its numbers: their kind, place and shapes, and what tokens are made of."""
    tensors = _tensors(body)
    odd = [t for t in (*tensors, x, beside) if t.dtype != torch.float32 or t.device != x.device]
    if odd:
        return f"all must be float32 on {x.device}, and one is {odd[0].dtype} on {odd[0].device}"
    if not all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors):
        return "a weight does not lie in one piece"
    rows, heads, outputs = beside.shape[1] + x.shape[1] // body.step, body.heads, body.head.out_features
    sizes = body.width in WIDTHS and body.width // heads >= SMALLEST and heads <= MOST and rows <= LARGEST
    if not sizes or outputs != 1 or body.step > HELD:
        return (
            f"widths of {WIDTHS} in up to {MOST} heads of {SMALLEST} or more, {LARGEST} tokens of {HELD} numbers "
            f"and one output are fused, not {body.width} in {heads} heads, {rows} of {body.step} and {outputs}"
        )
    return None if _made_of_weights(beside) else "tokens beside an event are made of what is differentiated"


def _power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def _made_of_weights(made: Tensor) -> bool:
    """Whether all that a tensor is differentiable in are parameters, whose gradients nobody asks for here."""
    seen, left = set(), [made.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad") and not isinstance(node.variable, nn.Parameter):  # pyright: ignore
            return False
        left += [following for following, _ in node.next_functions]
    return made.grad_fn is not None or not made.requires_grad


def _tensors(body: Any) -> list[Tensor]:
    """All that the kernel reads of a body, in the order of `body_triton`."""
    pairs = [body.embed[0], body.embed[2]]
    first = [t for layer in pairs for t in (layer.weight, layer.bias)] + [body.place]
    first += [t for layer in (body.norm, body.dense, body.head) for t in (layer.weight, layer.bias)]
    prior = body.prior
    if prior is None:
        first += [body.place] * 12  # never read
    else:
        rounds = zip(prior.convs, prior.norms, prior.dense, strict=True)
        first += [t for conv, *two in rounds for m in (conv.dense, *two) for t in (m.weight, m.bias)]
    for block in body.blocks:
        own = (block.first, block.attention.ask, block.attention.offer, block.attention.out)
        first += [t for m in (*own, block.second, block.dense[0], block.dense[2]) for t in (m.weight, m.bias)]
    return first


def _table(body: nn.Module) -> Tensor:
    """Where these lie, on their device: made anew where one has moved; a recording goes on reading its own."""
    tensors = _tensors(body)
    places, known = tuple(t.data_ptr() for t in tensors), _TABLES.setdefault(body, {})
    if places not in known:
        for old in [old for old, (_, recorded) in known.items() if not recorded]:
            del known[old]
        known[places] = torch.tensor(places, device=tensors[0].device), False
    table, recorded = known[places]
    known[places] = table, recorded or is_recording()
    return table


def _kernels() -> list[Any]:
    """Files that need Triton: kernels of layers, those beside them, and how tiles are numbered."""
    return [importlib.import_module(f"{__package__}.{name}_triton") for name in ("body", "prior", "tiles")]


def value_and_grad(body: Any, x: Tensor, beside: Tensor, how: str = "tf32x3") -> tuple[Tensor, Tensor]:
    """The body's one output at events `(N, d)`, `(N,)`, and its gradient, `(N, d)`.

    Args:
        body: a `TokenBody` that `why_not` has nothing against.
        x: events; `N / M` in turn share their tokens.
        beside: tokens of contexts and times, `(M, S, width)`; those of the path last.
        how: precision of products, by default as in float32.
    """
    x, beside, n = x.contiguous(), beside.contiguous(), len(x)
    energy, value, grad = x.new_empty(n), x.new_zeros(n), torch.empty_like(x)
    if not n:
        return energy, grad
    module, side, tiles = _kernels()
    S, W, step, heads = beside.shape[1], body.width, body.step, body.heads
    L, layers, first = S + x.shape[1] // step, len(body.blocks), S - body.past
    rows = max(SMALLEST, _power(L))
    parts, chunks, table = min(_parts(n, x.device), 4 * W // CHUNK), W // CHUNK, _table(body)
    scratch = x.new_empty(n * tiles.tiles_of(layers, W, CHUNK) * rows * W)
    all_of = {"LAYERS": layers, "R": rows, "W": W, "C": CHUNK, "num_warps": WARPS}
    exact = all_of | {"HOW": how}
    few = parts == MOST
    many = {"num_warps": WARPS_OF_FEW} if few else {}
    early = _early(few, x.device) | many
    normed, ends = {"EPS": body.norm.eps}, {"FIRST": first, "L": L}
    end = ends | all_of | early
    head = normed | {"PARTS": parts, "HEAD": W // heads, "L": L} | exact | early
    hidden = normed | {"PARTS": parts, "HEADS": heads, "H": 4 * W // parts, "L": L} | exact | early
    event = {"S": S, "L": L, "STEP": step} | exact
    prior = body.prior is not None
    with torch.cuda.device_of(x):
        module.embed_kernel[n, chunks](x, beside, n // len(beside), table, scratch, **event)
        with aside(x.device, prior, lane=3) as join:
            if prior:
                for turn in range(2):
                    side.conv_kernel[n, chunks](table, scratch, turn, **normed, **ends, **exact)
                    if not turn:
                        side.between_kernel[n, chunks](table, scratch, **exact)
                side.conv_back_kernel[n, chunks](table, value, scratch, 1, **ends, **exact)
                side.between_back_kernel[n, chunks](table, scratch, **ends, **exact)
                side.conv_back_kernel[n, chunks](table, value, scratch, 0, **ends, **exact)
        for layer in range(layers):
            module.attend_kernel[n, heads](table, scratch, layer, **head)
            module.dense_kernel[n, parts](table, scratch, layer, **hidden)
        module.end_kernel[n, L - first](table, scratch, PARTS=parts, **normed, **end)
        module.end_back_kernel[n, rows](table, energy, scratch, **end)
        for layer in reversed(range(layers)):
            module.dense_back_kernel[n, parts](table, scratch, layer, FIRST=first, **hidden)
            module.attend_back_kernel[n, heads](table, scratch, layer, **head)
        join()
        last = {"PRIOR": prior, "HEADS": heads, "FIRST": first, "WIDE": _power(step)} | event | many
        last |= {"D": W if few else CHUNK}
        module.embed_back_kernel[n, 1](x, table, grad, scratch, **normed, **last)
    return energy + value, grad


def _early(few: bool, device: torch.device) -> dict[str, Any]:
    """How kernels of a layer begin: where events are few they read their weights before anything else.

    From Hopper on they do so while the kernel before is still at work.
    """
    early = few and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"FEW": few, "EARLY": early} | ({"launch_pdl": True} if early else {})


def _parts(n: int, device: torch.device) -> int:
    """Programs that share the hidden units of an event: as many as leave a processor for each."""
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
    )
    return next((p for p in (MOST, MOST // 2) if n * p <= processors), MOST // 4)


class _Fused(torch.autograd.Function):
    """The value, with the gradient that was computed beside it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: Tensor, body: Any) -> Tensor:
        energy, grad = value_and_grad(body, x, beside)
        ctx.body = body
        ctx.save_for_backward(x, beside, grad)
        return energy

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        x, beside, grad = ctx.saved_tensors
        if torch.is_grad_enabled():  # it will be differentiated once more
            with plain_layers():
                made = ctx.body.beside(x, beside)
            return torch.autograd.grad(made, x, d, create_graph=True)[0], None, None
        return d[:, None] * grad, None, None


def fused_value(body: Any, x: Tensor, beside: Tensor) -> Tensor | None:
    """The body's output `(N,)`, which can be differentiated in x alone; None where Triton fails, which is said."""
    try:
        made = _Fused.apply(x, beside, body)
    except Exception as error:
        if not _tritons_own(error, body in _RAN):
            raise
        _REFUSED[body] = f"{type(error).__name__}, {str(error).splitlines()[0]}"
        said = f"{type(body).__name__} cannot be run by kernels of its own: {_REFUSED[body]}"
        warnings.warn(said, RuntimeWarning, stacklevel=2)
        return None
    _RAN.add(body)
    return made  # pyright: ignore


def _tritons_own(error: Exception, ran: bool) -> bool:
    """Whether an error is Triton's, which may also miss a compiler or a folder the first time."""
    if isinstance(error, OutOfMemoryError | torch.OutOfMemoryError):
        return False
    first = isinstance(error, OSError | subprocess.SubprocessError) or "compiler" in str(error)
    return type(error).__module__.startswith("triton") or (first and not ran)
