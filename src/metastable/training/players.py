"""What the trainer asks of the modules that it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from metastable.core.errors import CheckpointError, ConfigError, InputError
from metastable.core.protocols import Following, provides

from .config import TrainerConfig
from .contract import TrainableMethod


def offsets_of(log_det: float, power: float) -> dict[str, float]:
    """What turns logged energies of the units of training into those of the data's own."""
    energies = ("energy_data", "energy_negatives", "energy_noisy")
    return {name: -log_det / power for name in energies} | {"cross_entropy": -log_det}


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that are not frozen."""
    return [p for p in module.parameters() if p.requires_grad]


def optimisers_of(
    players: Mapping[str, nn.Module], config: TrainerConfig, method: TrainableMethod
) -> dict[str, Optimizer]:
    """Of each player that learns its own optimiser, or one like all share, at the rate its method asks for."""
    for field in ("optimisers", "schedules"):
        if unknown := set(vars(config)[field]) - set(players):
            known = ", ".join(players)
            raise ConfigError(f"trainer.{field}.{min(unknown)}", f"is no player of this run ({known})")
    if not any(trainable(module) for module in players.values()):
        raise InputError("energy: has no trainable parameters; there is nothing to fit")
    found = {}
    for name, module in players.items():
        if parameters := trainable(module):
            factory = config.optimisers.get(name, config.optimiser)
            made: Any = factory(module if getattr(factory, "per_module", False) else parameters)  # pyright: ignore
            if not isinstance(made, Optimizer):
                raise InputError(f"optimiser: must make a torch.optim.Optimizer, got {type(made).__name__}")
            for group in made.param_groups:
                group["lr"] *= 1.0 if name in config.optimisers else method.rate(name)
            found[name] = made
    return found


def norm_name(player: str) -> str:
    """What a line of metrics calls the norm of a player's gradient."""
    return "grad_norm" if player == "energy" else f"grad_norm_{player}"


def average_name(player: str) -> str:
    """What a checkpoint calls the average of a player."""
    return "ema" if player == "energy" else f"ema.{player}"


def averages_in(weights: Mapping[str, Mapping[str, Tensor]], players: Iterable[str]) -> dict[str, Any]:
    """The averaged weights of these players in a checkpoint, where it has some."""
    front = "module."
    return {
        name: {
            k.removeprefix(front): v for k, v in weights[average_name(name)].items() if k.startswith(front)
        }
        for name in players
        if average_name(name) in weights
    }


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
