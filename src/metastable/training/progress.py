"""A progress bar that shows what matters while a model trains: energy gap, ESS, log Z, time left."""

from __future__ import annotations

from typing import Any

from metastable.training.records import Row

SHOWN = (
    ("energy_gap", "gap {:+.3g}"),
    ("score_loss", "score loss {:.4g}"),
    ("density_loss", "loss {:.4g}"),
    ("ess", "ESS {:.0%}"),
    ("log_z", "log Z {:.3f}"),
)


class TrainingBar:
    """A context whose value takes each row of metrics."""

    def __init__(self, steps: int, name: str):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.steps, self.name = steps, name
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )

    def __enter__(self) -> Any:
        self.progress.__enter__()
        task = self.progress.add_task(self.name, total=self.steps, numbers="")

        def show(row: Row) -> None:
            numbers = "  ".join(text.format(row[key]) for key, text in SHOWN if key in row)
            self.progress.update(task, completed=row["step"], numbers=numbers)

        return show

    def __exit__(self, *details: Any) -> None:
        self.progress.__exit__(*details)
