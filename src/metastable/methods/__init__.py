"""Training methods, one file per algorithm."""

from .base import ChainMethod, Context, Method, Negatives
from .contrastive import ContrastiveDivergence, PersistentCD, ShortRun
from .jarzynski import Jarzynski

METHODS: dict[str, type[Method]] = {
    m.name: m for m in (ContrastiveDivergence, PersistentCD, ShortRun, Jarzynski)
}

__all__ = [
    "METHODS",
    "ChainMethod",
    "Context",
    "ContrastiveDivergence",
    "Jarzynski",
    "Method",
    "Negatives",
    "PersistentCD",
    "ShortRun",
]
