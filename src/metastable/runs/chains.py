"""A method at work: what `evaluate` and a run that is read back ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from metastable.methods import Context, Method


class Chains(NamedTuple):
    """A method at the end of training, with what its chains see and where they are."""

    method: Method
    context: Context
    state: Any
    averages: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({})
    """Averaged weights of players, where training kept them."""
