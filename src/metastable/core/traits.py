"""What a diagnosis and a report ask of a method, as plain values: no method is known by its name elsewhere."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Traits:
    """Facts about a method that those ask who have only its log or its folder; each is a class variable of it.

    Attributes:
        name: of the method.
        title: its name in words, for the middle of a sentence; the name itself where it is left out.
        gap_vanishes: whether negatives are meant to follow the model, so that the energy gap ends at zero.
        sees_mode_weights: whether the method can learn how much mass each of several separated modes has.
        mode_weights_advice: what to try where modes have the wrong mass.
        weighs: whether the logged `objective` is −log(K + 1) where energy and proposal are both the data's law.
    """

    name: str = ""
    title: str = ""
    gap_vanishes: bool = True
    sees_mode_weights: bool = True
    mode_weights_advice: str = ""
    weighs: bool = False

    @classmethod
    def of(cls, method: Any) -> Traits:
        """Of a method, of its class, or by its name; an unknown one gets every check.

        >>> Traits.of("pcd").sees_mode_weights, Traits.of("my-own").sees_mode_weights
        (False, True)
        """
        if isinstance(method, str):
            method = _named(method) or cls(name=method)
        return cls() if method is None else cls(**{f.name: getattr(method, f.name) for f in fields(cls)})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Traits:
        """From a run folder; what it does not know is left at its default."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    @property
    def words(self) -> str:
        """The method's name as a sentence has it."""
        return self.title or self.name.replace("-", " ")


def _named(name: str) -> Any:
    """The method of that name, or of that class name, whatever its punctuation: the library's, or one's own."""
    # loaded when asked for: the methods stand above this room, and need torch, which a log alone does not
    room = importlib.import_module("metastable.methods")
    known = (*room.METHODS.values(), *_below(room.Method))
    return next((kind for kind in known if _plain(name) in (_plain(kind.name), _plain(kind.__name__))), None)


def _below(kind: type) -> list[Any]:
    """Every class that derives from this one and has a name of its own."""
    return [
        k for sub in kind.__subclasses__() for k in (*([sub] if "name" in vars(sub) else []), *_below(sub))
    ]


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
