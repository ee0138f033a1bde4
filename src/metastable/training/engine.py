"""Device and precision in one place, carried by Lightning Fabric.

Fabric brings device selection, autocast, true half and double precision, and later several processes, without
owning the training loop. Modules are moved and cast by it but not wrapped: an energy is called many times in
an update, and differentiated in its input, which a process wrapper around `forward` would have to be taught.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from metastable.core.errors import ConfigError, require_choice

PRECISIONS = {"32-true": torch.float32, "64-true": torch.float64, "bf16-mixed": torch.float32}
"""float16 is left out: its loss scaling would have to reach through every chain."""


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
        self.fabric = _fabric_class()(accelerator=accelerator, devices=devices, precision=precision)
        self.dtype = PRECISIONS[precision]
        self.precision = precision

    @property
    def device(self) -> torch.device:
        """Where everything lives."""
        return self.fabric.device

    def place(self, value: Tensor) -> Tensor:
        """A tensor on the device, in the working precision."""
        return value.to(device=self.device, dtype=self.dtype)

    def place_module(self, module: nn.Module) -> nn.Module:
        """A module on the device, its floating-point parameters in the working precision."""
        return module.to(device=self.device, dtype=self.dtype)

    def autocast(self) -> AbstractContextManager:
        """The precision's forward context."""
        return self.fabric.autocast()

    def backward(self, loss: Tensor, parameters: Sequence[Tensor]) -> None:
        """Backward through the precision plugin, into `parameters` and nothing else."""
        self.fabric.backward(loss, inputs=parameters)


def _accelerator(device: str) -> tuple[str, Any]:
    kind, _, index = str(device).partition(":")
    known = ("auto", "cpu", "cuda", "mps")
    if kind not in known:
        raise ConfigError("device", f"must be one of {', '.join(known)} (or cuda:N), got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "'cuda' was asked for, but this torch sees no CUDA device; use 'cpu'")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return kind, [int(index)] if index else 1
