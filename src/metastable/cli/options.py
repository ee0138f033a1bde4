"""Options that several commands have, each with one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFolder = Annotated[Path, typer.Argument(help="The folder of a run.")]
Data = Annotated[str | None, typer.Option(help="A .npy, .npz, .csv or .tsv file, toy:NAME, mnist:FOLDER, …")]
Energy = Annotated[
    str | None, typer.Option(help="default, mlp, conv, mixture, … or your own, module:factory.")
]
OwnEnergy = Annotated[
    str | None, typer.Option(help="What makes the module of a run of your own: module:factory.")
]
LogZ = Annotated[
    bool, typer.Option("--log-z", help="Estimate log Z where that takes minutes too (images, jem).")
]
HeldOut = Annotated[float | None, typer.Option(help="Share of the rows kept for scores; 0.1.")]
Seed = Annotated[int, typer.Option(help="Of every random number.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
SomeDevice = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and print everything, write nothing.")]
