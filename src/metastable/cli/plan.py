"""What a training would do, without doing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metastable.energies import check_energy
from metastable.training.engine import Engine

from .console import say
from .settings import Job

COPIES = 4  # of each parameter: itself, its gradient and Adam's two averages
PROBE = 7  # rows; no layer is as narrow, so that a parameter is not taken for an activation


def print_plan(job: Job, folder: Path) -> None:
    """The resolved settings, the size of everything, and whether the energy is one."""
    engine = Engine(job.trainer.device, job.trainer.precision)
    x = engine.place(_train_rows(job))
    energy = engine.place_module(job.energy.build(x, job.seed))
    check_energy(energy, x)
    say(json.dumps(job.described(), indent=2), "")
    parameters = sum(p.numel() for p in energy.parameters())
    limit = "" if job.trainer.max_seconds is None else f", at most {job.trainer.max_seconds:g} s"
    say(
        f"data        {job.dataset}",
        f"rows        {len(x)} to train on, {len(job.dataset) - len(x)} held out",
        f"energy      {type(energy).__name__}, {parameters:,} parameters, checked on the data",
        f"device      {engine.device}, {engine.precision}",
        f"steps       {job.trainer.steps}{limit}",
        f"memory      about {_size(memory(job, energy, x))}",
        f"folder      {folder}{_state(folder)}",
        *job.notes,
        "dry run: nothing was written",
    )


def _train_rows(job: Job) -> Tensor:
    return job.dataset.split(job.held_out, job.seed)[0].x if job.held_out > 0 else job.dataset.x


def _state(folder: Path) -> str:
    if not folder.exists() or not any(folder.iterdir()):
        return ""
    return " (holds a run: --resume goes on with it)" if (folder / "config.json").exists() else " (not empty)"


def memory(job: Job, energy: nn.Module, x: Tensor) -> int:
    """Bytes: parameters with their optimiser, data, walkers, and what one backward pass keeps."""
    batch = min(job.trainer.batch_size or len(x), len(x))
    walkers = chains(job.method, batch, len(x))
    row = x[0].numel() * x.element_size()
    parameters = sum(p.numel() * p.element_size() for p in energy.parameters())
    held = COPIES * parameters + x.numel() * x.element_size() + 3 * walkers * row
    return held + (batch + walkers) * kept_for_backward(energy, x[:PROBE])


def chains(method: Any, batch: int, rows: int) -> int:
    """Negatives of one update."""
    copies = len(getattr(method, "betas", (None,)))
    method = getattr(method, "source", method)
    if hasattr(method, "sources"):
        return copies * sum(chains(source, batch, rows) for source in method.sources)
    return copies * _chains_of_one(method, batch, rows)


def _chains_of_one(method: Any, batch: int, rows: int) -> int:
    walkers = getattr(method, "walkers", None)
    if walkers is not None:
        return walkers
    return min(rows, 10_000) if method.name == "pcd" else batch


def kept_for_backward(energy: nn.Module, x: Tensor) -> int:
    """Bytes that one row of a forward pass keeps until the backward pass."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.shape[0] == len(x):
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        energy(x.detach().requires_grad_(True))
    return sum(sizes.values()) // len(x)


def _size(n: int) -> str:
    """Bytes as people say them.

    >>> _size(512), _size(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    value, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{n} B" if n < 1024 else f"{value:.1f} {units[0]}"
