"""Progress while a model trains: energy gap, effective sample size, log Z and the time left."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from metastable.training.config import TrainerConfig
from metastable.training.progress import TrainingBar
from metastable.training.records import Row
from metastable.training.trainer import OnRow


@contextmanager
def training_bar(name: str, config: TrainerConfig, shown: bool = True) -> Iterator[OnRow | bool]:
    """What `fit` takes as `progress`; the bar counts seconds where those are the limit.

    It appears with the first numbers, so that settings that are refused leave no empty bar behind.
    """
    if not shown:
        yield False
        return
    timed = config.max_seconds is not None
    total = (config.steps or 0) if config.max_seconds is None else math.ceil(config.max_seconds)
    bar = TrainingBar(total, f"{name} (seconds)" if timed else name)
    with ExitStack() as stack:
        show = functools.cache(lambda: stack.enter_context(bar))

        def on_row(row: Row) -> None:
            done = min(row["seconds"], total) if timed else row["step"]
            show()({**row, "step": done})
            if done >= total:
                _rename(bar, f"{name}: scoring")

        try:
            yield on_row
        finally:
            _rename(bar, name)


def _rename(bar: TrainingBar, name: str) -> None:
    for task in bar.progress.task_ids:
        bar.progress.update(task, description=name)
