"""Papers as data. An experiment's module is imported when it is asked for, so that listing them is quick."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Experiment

TITLES: dict[str, str] = {
    "jarzynski-gmm": "Two modes in 50 dimensions: Jarzynski, PCD and CD (Fig. 1, 6, 7)",
}
"""Name and title of every experiment; the module is the name with underscores."""


class _Experiments(Mapping[str, "Experiment"]):
    """Experiments by name, each imported at its first use."""

    def __getitem__(self, name: str) -> Experiment:
        if name not in TITLES:
            raise KeyError(name)
        return importlib.import_module(f"{__name__}.{name.replace('-', '_')}").EXPERIMENT

    def __iter__(self) -> Iterator[str]:
        return iter(TITLES)

    def __len__(self) -> int:
        return len(TITLES)


EXPERIMENTS: Mapping[str, Experiment] = _Experiments()

__all__ = ["EXPERIMENTS", "TITLES"]
