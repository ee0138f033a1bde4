"""Players with averaged weights in the place of those that training left."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from metastable.core.protocols import is_normalised, provides
from metastable.methods.draw_pool import OnDensity
from metastable.proposals.encoders import Borrowed


def averaged_players(
    players: Mapping[str, nn.Module], averages: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, nn.Module]:
    """Copies of players with other weights; what stands on or borrows from a player does so from its copy."""
    memo: dict[int, Any] = {}
    for part in (part for player in players.values() for part in player.modules()):
        for value in vars(part).values():
            if isinstance(value, Borrowed):
                copy.deepcopy(value.module, memo)
    made = copy.deepcopy(dict(players), memo)
    for name, weights in averages.items():
        made[name].load_state_dict(dict(weights))
    if provides(made["energy"], OnDensity) and "proposal" in made:
        made["energy"].attach(made["proposal"])  # pyright: ignore
    return made


def averaged_run(run: Any) -> Any:
    """A run with averaged weights.

    log Z, walkers and scores belong to the weights as training left them; only a density's log Z, which is known,
    stays.
    """
    players = averaged_players(run.inside or run.players, run.averages)
    log_z = run.log_partition if is_normalised(players["energy"]) else None
    unknown = {"walkers": None, "scores": {}, "modes": None, "contexts": None, "ema": None, "averages": {}}
    kept = {"inside": {}, "coordinates": None, "log_partition": log_z, "unaveraged": run}
    return replace(run, energy=players["energy"], players=players, **unknown, **kept).outward(run.coordinates)
