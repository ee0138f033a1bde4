"""Fields by name, with settings of their own where a table says them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from metastable.core.errors import ConfigError, nearest, require_choice

from .encoders import Encoder
from .fields import ConcatSquash, PlainField, ResidualField, VectorField, require_no_encoder
from .transformer import FilmField, TransformerField

FieldChoice = str | Mapping[str, Any] | VectorField | Callable[..., Tensor]
"""A name, a table of a name and settings, a field, or any callable `v(x, given, t)`."""
FIELDS: dict[str, type[VectorField]] = {
    "concatsquash": ConcatSquash,
    "residual": ResidualField,
    "transformer": TransformerField,
    "film": FilmField,
}


def is_named(choice: Any) -> bool:
    """Whether a field is built from a name or a table."""
    return isinstance(choice, (str, Mapping))


def named_field(
    choice: str | Mapping[str, Any],
    kinds: Mapping[str, type[VectorField]],
    setting: str,
    dim: int,
    settings: Mapping[str, Any],
) -> VectorField:
    """One of `kinds` for events of `dim` numbers, by `settings`, which those of a table precede.

    >>> table = {"name": "transformer", "step": 2, "width": 16, "layers": 1}
    >>> named_field(table, FIELDS, "field", 4, {"width": 64}).body.width
    16
    """
    own = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = own.pop("name", "")
    require_choice(setting, name, kinds)
    known = set(inspect.signature(kinds[name].__init__).parameters) - {"self", "dim"}
    for key in own:
        if key not in known:
            raise ConfigError(f"{setting}.{key}", f"unknown setting of {name!r}{nearest(key, known)}")
    return kinds[name](dim, **{**settings, **own})


def field_for(choice: FieldChoice, dim: int, own: Encoder | None = None, **settings: Any) -> VectorField:
    """The field that `choice` names, a field itself, or any callable `v(x, given, t)`.

    Args:
        choice: of the field.
        dim: d, of a flattened event.
        own: the encoder that the user gave, if any, which a callable is given too.
        settings: of a named field, its encoder among them.
    """
    if isinstance(choice, (str, Mapping)):
        return named_field(choice, FIELDS, "field", dim, settings)
    if isinstance(choice, VectorField):
        require_no_encoder(choice, own)
        return choice
    return PlainField(choice, own, settings.get("context_shape"))
