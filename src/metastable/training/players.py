"""What the trainer asks of the modules that it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from metastable.core.errors import CheckpointError
from metastable.core.protocols import Following, provides


def offsets_of(log_det: float, power: float) -> dict[str, float]:
    """What turns logged energies of the units of training into those of the data's own."""
    energies = ("energy_data", "energy_negatives", "energy_noisy")
    return {name: -log_det / power for name in energies} | {"cross_entropy": -log_det}


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that are not frozen."""
    return [p for p in module.parameters() if p.requires_grad]


def norm_name(player: str) -> str:
    """What a line of metrics calls the norm of a player's gradient."""
    return "grad_norm" if player == "energy" else f"grad_norm_{player}"


def followers(module: nn.Module) -> list[Callable[[], None]]:
    """What parts of a module want to do after each of its optimiser steps (`after_step`)."""
    return [m.after_step for m in module.modules() if provides(m, Following)]  # pyright: ignore


def plain_state(tree: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without the functions it holds, which are made anew on resume."""
    return {k: v for k, v in tree.items() if not callable(v)}


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], name: str) -> None:
    """Put weights of a checkpoint into a module; an error names the one that they do not fit."""
    try:
        module.load_state_dict(dict(weights))
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint's {name!r} does not fit this module: {error}") from error
