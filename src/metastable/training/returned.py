"""What a method's pieces return, looked at where the trainer takes it: a wrong one is named, with the rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from metastable.core.errors import ConfigError
from metastable.core.processes import Shared

SHAPES = {
    "negatives": ("negatives", "state", "metrics"),
    "loss": ("loss", "metrics"),
    "advance": ("state", "metrics"),
}
"""What each piece returns."""


def returned(name: str, piece: str, made: Any) -> Any:
    """The same tuple, now known to be one of `SHAPES`, whose metrics are tensors.

    >>> returned("cd", "advance", None)
    Traceback (most recent call last):
    ...
    metastable.core.errors.ConfigError: cd.advance: must return (state, metrics), got None
    """
    shape = SHAPES[piece]
    if not isinstance(made, tuple) or len(made) != len(shape) or not isinstance(made[-1], Mapping):
        raise ConfigError(f"{name}.{piece}", f"must return ({', '.join(shape)}), got {_words(made)}")
    for metric, value in made[-1].items():
        if not isinstance(value, Shared) and (not isinstance(value, Tensor) or value.numel() != 1):
            raise ConfigError(
                f"{name}.{piece}",
                "metrics must be tensors of one number, which nobody waits for (no float(), no .item()); got "
                f"{metric} = {_words(value)}",
            )
    if piece == "loss" and not (isinstance(made[0], Tensor) and made[0].dim() == 0):
        raise ConfigError(f"{name}.loss", f"must be one number, a tensor of shape (), got {_words(made[0])}")
    return made


def require_players(name: str, turns: Iterable[tuple[str, ...]], players: Mapping[str, Any]) -> None:
    """Refuse a turn of somebody who does not play: nothing would be trained in it."""
    for player in (player for together in turns for player in together):
        if player not in players:
            raise ConfigError(f"{name}.turns", f"{player!r} is no player of this run ({', '.join(players)})")


def require_gradient(name: str, loss: Tensor) -> None:
    """Refuse a loss that no parameter can learn from."""
    if not loss.requires_grad:
        raise ConfigError(
            f"{name}.loss", "must depend on the player's parameters (a detach() or torch.no_grad() inside?)"
        )


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"{type(value).__name__} of {', '.join(type(part).__name__ for part in value)}"
    return repr(value) if value is None or isinstance(value, (int, float)) else type(value).__name__
