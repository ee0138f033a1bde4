"""Progress while a model trains: energy gap, effective sample size, log Z and the time left."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from metastable.core.telling import Listener, listening
from metastable.training.config import TrainerConfig
from metastable.training.progress import TrainingBar
from metastable.training.records import Row
from metastable.training.trainer import OnRow

from .console import console, note

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@contextmanager
def training_bar(name: str, config: TrainerConfig, shown: bool = True) -> Iterator[OnRow | bool]:
    """What `fit` takes as `progress`; the bar counts seconds where those are the limit.

    It appears with the first numbers, so that settings that are refused leave no empty bar behind; a terminal says
    before that that work goes on.
    """
    if not shown:
        yield False
        return
    timed = config.max_seconds is not None
    total = (config.steps or 0) if config.max_seconds is None else math.ceil(config.max_seconds)
    bar = TrainingBar(total, f"{name} (seconds)" if timed else name)
    with ExitStack() as stack, ExitStack() as before:
        if bar.progress.console.is_terminal:
            stack.enter_context(listening(shown_on(bar.progress)))
            before.enter_context(work_bar(f"{name}: first updates"))

        @functools.cache
        def show() -> OnRow:
            before.close()
            return stack.enter_context(bar)

        @functools.cache
        def say_scoring() -> None:
            _rename(bar, f"{name}: scoring")
            if not bar.progress.console.is_terminal:  # which shows no bar before its end
                note(
                    f"{name}: updates are done; scoring (log Z, samples, report) may take longer than they did"
                )

        def on_row(row: Row) -> None:
            done = min(row["seconds"], total) if timed else row["step"]
            show()({**row, "step": done})
            if done >= total:
                say_scoring()

        try:
            yield on_row
        finally:
            _rename(bar, name)


@contextmanager
def work_bar(what: str) -> Iterator[Listener | None]:
    """A terminal shows for how long `what` has been going on, and each part of it that says how far it is.

    What comes out is for parts that want to be given whom to tell; None where nobody looks.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    screen = console(stderr=True)
    if not screen.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[numbers]}")
    progress = Progress(*columns, TimeElapsedColumn(), console=screen, transient=True)
    show = shown_on(progress, numbers="{}/{}")
    with progress, listening(show):
        progress.add_task(what, total=None, numbers="")
        yield show


def shown_on(progress: Progress, numbers: str = "") -> Listener:
    """A listener with a line for each kind of work, begun anew whenever the work begins anew.

    `numbers` says how far it is, where no column of the bar does.
    """
    lines: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        if what not in lines:
            lines[what] = progress.add_task(what, total=total, numbers="")
        if done == 1:
            progress.reset(lines[what], total=total)
        progress.update(lines[what], completed=done, numbers=numbers.format(done, total))

    return show


def _rename(bar: TrainingBar, name: str) -> None:
    for task in bar.progress.task_ids[:1]:
        bar.progress.update(task, description=name)
