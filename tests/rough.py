"""log Z with little care, where a test looks at other things; by a name that other processes find, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from metastable.core.types import LogPartition
from metastable.evaluation.log_partition import log_partition

ROUGH = {"walkers": 64, "populations": 8, "steps": 1, "conditional_ess": 0.8, "refinements": 0}


def rough_log_partition(*args: Any, **settings: Any) -> LogPartition:
    """log Z from few walkers, which hardly go on, with the larger error bar that they have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metastable.evaluation.stationarity.MOVES", 4)
        return log_partition(*args, **settings | ROUGH)


@contextmanager
def rough_log_z() -> Iterator[None]:
    """That of judged runs, where a test looks at other things."""
    with pytest.MonkeyPatch.context() as patch:
        for room in ("likelihood", "samples"):
            patch.setattr(f"metastable.summary.{room}.log_partition", rough_log_partition)
        yield
