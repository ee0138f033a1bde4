"""What a training will take of memory, known before any of it is taken."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from metastable.core.batch import Batch, Beside
from metastable.core.memory import PROBE, kept_for_backward
from metastable.core.room import require_room
from metastable.core.types import Energy, bind
from metastable.energies import AsEnergy
from metastable.methods import Method
from metastable.training.config import TrainerConfig

COPIES = 4  # of each parameter: itself, its gradient and Adam's two averages
WALKER_COPIES = 3
FEW = 16
"""Steps of an ODE that are solved to see what each of them keeps."""
MANY = 100_000
"""Rows in a backward pass from which it is worth a look at what each of them keeps."""


def seen_alone(energy: Any, rows: Batch) -> Energy:
    """The energy as rows alone see it: given the first contexts, where there are some."""
    return bind(energy, rows.conditions[:PROBE]) if rows.kind is Beside.CONTEXTS else energy


def planned_bytes(method: Method, trainer: TrainerConfig, energy: nn.Module, rows: Batch) -> int:
    """Bytes: parameters with their optimiser, data, walkers, and what one backward pass keeps."""
    x, batch = rows.x, min(trainer.batch_size or len(rows.x), len(rows.x))
    parameters = sum(p.numel() * p.element_size() for p in energy.parameters())
    held = COPIES * parameters + x.numel() * x.element_size()
    moving = batch + method.moving(batch, len(x))
    return held + walker_bytes(method, batch, x) + moving * kept_by_row(energy, rows)


def kept_by_row(energy: Any, rows: Batch) -> int:
    """Bytes that a row keeps until the backward pass; of an ODE from few steps, as each keeps as much."""
    few = steps = 1
    if isinstance(energy, AsEnergy) and energy.costly:
        steps = energy.proposal.steps
        few = min(FEW, steps)
        energy = AsEnergy(energy.proposal.with_steps(few))
    return kept_for_backward(seen_alone(energy, rows), rows.x[:PROBE]) * steps // few


def walker_bytes(method: Method, batch: int, x: Tensor) -> int:
    """Bytes of the walkers that are held between updates on data like `x`."""
    return WALKER_COPIES * method.stored(batch, len(x)) * x[0].numel() * x.element_size()


def require_walkers_fit(method: Method, trainer: TrainerConfig, energy: Any, rows: Batch) -> None:
    """Refuse walkers, or negatives of an update, for which there is no memory."""
    x, batch = rows.x, min(trainer.batch_size or len(rows.x), len(rows.x))
    stored, moving = method.stored(batch, len(x)), method.moving(batch, len(x))
    require_room("method", f"{stored} walkers", walker_bytes(method, batch, x), x.device)
    if moving > MANY and isinstance(energy, nn.Module):
        needed = planned_bytes(method, trainer, energy, rows)
        require_room("method", f"an update of {moving} negatives", needed, x.device)


def require_energy_fits(config: Any, numbers: int, device: object) -> None:
    """Refuse a network for whose weights there is no memory; `numbers` are in one event.

    Counted from the settings of a built-in energy that name widths: a lower bound, since nothing is made yet.
    """
    settings = vars(config)
    hidden = settings.get("hidden", ())
    widths = [numbers, *(hidden if isinstance(hidden, tuple) else (hidden,))]
    weights = sum(a * b for a, b in zip(widths, [*widths[1:], 1], strict=True))
    weights += settings.get("depth", 0) * settings.get("width", 0) ** 2
    weights += settings.get("components", 0) * numbers
    require_room(f"energy.{config.name}", f"a network of {weights} weights", 4 * COPIES * weights, device)
