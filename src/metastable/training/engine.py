"""Device and precision in one place, carried by Lightning Fabric, and how updates run there.

Fabric brings device selection, autocast, true half and double precision, and later several processes, without
owning the training loop. Modules are moved and cast by it but not wrapped: an energy is called many times in
an update, and differentiated in its input, which a process wrapper around `forward` would have to be taught.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metastable.core.errors import ConfigError, require_choice
from metastable.core.method import Method
from metastable.core.precision import PRECISIONS, ROUNDED, channels_last
from metastable.core.precision import precision as computed_at
from metastable.core.processes import in_group, is_many, local_rank

ENGINES = ("auto", "eager", "compile", "captured", "fused")
SHORT = 100
"""Updates below which recording one is not worth its time."""
LONG = 10_000
"""Steps of chains from which on kernels that fuse them repay the seconds that Triton takes to compile them."""
MOMENTS = ("negatives", "loss", "advance", "turns", "rate_factor")


class Choice(NamedTuple):
    """How updates run, `eager`, `compile` or `captured`, and why not faster, in words.

    `chains` is how the chains within them do, and the energies that weigh walkers: `eager`, `compile`, `fused`, or
    `auto`, each as it is best for it.

    >>> print(Choice("captured", "", "eager", "the activation is not among silu"))
    captured; chains eager (the activation is not among silu)
    """

    chosen: str
    reason: str
    chains: str = "auto"
    chains_reason: str = ""

    def __str__(self) -> str:
        updates = f"{self.chosen} ({self.reason})" if self.reason else self.chosen
        if self.chains in ("auto", self.chosen):
            return updates
        return f"{updates}; chains {self.chains}" + (f" ({self.chains_reason})" if self.chains_reason else "")


def choose_engine(
    wanted: str,
    device: torch.device,
    method: Any,
    steps: int,
    energy: Any = None,
    x: Tensor | None = None,
    precision: str = "32-true",
) -> Choice:
    """How the updates of `method` run on `device`: what is `wanted`, or the fastest that can be.

    Chains of `energy` from rows like `x` are fused where they can be, unless something else is asked for by name.
    """
    if wanted == "eager" or (wanted == "compile" and device.type != "cuda"):
        return Choice(wanted, "as asked for", wanted)
    why_not = "several processes tell each other of it" if is_many() else _why_not_recorded(method)
    if wanted == "compile":
        return Choice("compile", why_not, wanted) if why_not else Choice("captured", "", wanted)
    free = wanted in ("auto", "fused")
    if not why_not and free and device.type != "cuda":
        why_not = f"updates are recorded on cuda devices, not on {device.type}"
    if not why_not and wanted == "auto" and steps < SHORT:
        why_not = f"{steps} updates are too few to record one"
    if why_not:
        return Choice("eager", why_not)
    if device.type != "cuda":
        return Choice("captured", f"without a graph, as there are none on {device.type}", "eager")
    if method.chain_kernel is None:
        return Choice("captured", "")
    if not free or energy is None or x is None:
        return Choice("captured", "", "eager", "to move as step by step")
    if wanted == "auto" and steps * (method.fresh_steps or 1) < LONG:
        few = f"{steps} updates are too few for what compiling a kernel takes; engine='fused' does it"
        return Choice("captured", "", "eager", few)
    why_not = f"the precision is {precision}" if precision != "32-true" else None
    why_not = why_not or method.why_not_fused(energy, x)
    return Choice("captured", "", "fused" if why_not is None else "eager", why_not or "")


def _why_not_recorded(method: Any) -> str:
    """In words, of the method or of a source; nothing where its updates can be recorded."""
    if not isinstance(method, Method):
        return f"{type(method).__name__} is no `Method`, and does not say which of its updates are alike"
    for source in method.sources:
        if why := _why_not_recorded(source):
            return why
    if method.not_recorded:
        return f"{method.name}: {method.not_recorded}"
    kinds = type(method).__mro__
    owner = {name: next(k for k in kinds if name in vars(k)) for name in (*MOMENTS, "phase")}
    said = kinds.index(owner["phase"])
    for moment in MOMENTS:
        kind = owner[moment]
        own = kinds.index(kind) < said and not kind.__module__.startswith("metastable.")
        if owner["phase"] is Method or own:
            who = kind.__name__ if own else type(method).__name__
            return f"{who} does not say with `phase` which of its updates are alike"
    return ""


def _fabric_class() -> Any:
    try:
        from lightning_fabric import Fabric
    except ImportError:
        from lightning.fabric import Fabric  # pyright: ignore
    return Fabric


class Engine:
    """Places tensors and modules, and runs backward passes, on one device at one precision."""

    def __init__(self, device: str = "auto", precision: str = "32-true"):
        require_choice("trainer.precision", precision, PRECISIONS)
        accelerator, devices = _accelerator(device)
        own: Any = "32-true" if precision in ROUNDED else precision  # rounded here, not by Fabric
        self.settings = {"accelerator": accelerator, "devices": devices, "precision": own}
        self.dtype = PRECISIONS[precision]
        self.precision = precision

    @property
    def device(self) -> torch.device:
        """Where everything lives."""
        return torch.device("cpu") if self.settings["accelerator"] == "cpu" else self.fabric.device

    @cached_property
    def fabric(self) -> Any:
        """Made when updates begin, or for a GPU: to import it takes seconds, and a plan on the CPU does without."""
        return _fabric_class()(**self.settings)

    def prepare(self) -> None:
        """Make what updates need, before their time is counted."""
        assert self.fabric.device == self.device

    def place(self, value: Tensor) -> Tensor:
        """A tensor on the device, in the working precision."""
        return value.to(device=self.device, dtype=self.dtype)

    def place_module(self, module: nn.Module) -> nn.Module:
        """A module on the device, its floating-point parameters in the working precision.

        Where products are rounded on a GPU, kernels of convolutions have their channels side by side, as tensor
        cores take them.
        """
        module = module.to(device=self.device, dtype=self.dtype)
        return channels_last(module) if self.precision in ROUNDED and self.device.type == "cuda" else module

    def autocast(self) -> AbstractContextManager:
        """The precision's forward context."""
        return self.rounded() if self.precision in ROUNDED else self.fabric.autocast()

    def rounded(self) -> AbstractContextManager:
        """For whatever evaluates energies outside a forward pass: weights ask for the same rounding everywhere."""
        return computed_at(self.precision, self.device) if self.precision in ROUNDED else nullcontext()

    def backward(self, loss: Tensor, parameters: Sequence[Tensor]) -> None:
        """Backward through the precision plugin, into `parameters` and nothing else."""
        with self.rounded() if self.precision == "tf32" else nullcontext():
            self.fabric.backward(loss, inputs=parameters)


def _accelerator(device: str) -> tuple[str, Any]:
    kind, colon, index = str(device).partition(":")
    known = ("auto", "cpu", "cuda", "mps")
    if kind not in known:
        raise ConfigError("device", f"must be one of {', '.join(known)} (or cuda:N), got {device!r}")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "'cuda' was asked for, but this torch sees no CUDA device; use 'cpu'")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device", "'mps' was asked for, but this torch sees no such device; use 'cpu'")
    there = torch.cuda.device_count() if kind == "cuda" else 1
    if kind == "cuda" and not colon and in_group():
        index = str(local_rank() % there)
    if colon and not (index.isascii() and index.isdigit() and len(index) < 10 and int(index) < there):
        raise ConfigError(
            "device", f"there is {kind}:0 to {kind}:{there - 1} on this machine, got {device!r}"
        )
    # Fabric counts processes on the CPU, and names devices elsewhere
    return kind, [int(index)] if index and kind == "cuda" else 1
