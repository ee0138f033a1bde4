"""`metastable`: the commands, and where the program begins.

Only typer is imported here. Each command imports what it needs when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from metastable._version import __version__

from .bench import bench
from .compare import compare
from .evaluate import evaluate
from .guard import guarded
from .report import report
from .reproduce import reproduce
from .restore import restore
from .rollout import rollout
from .sample import sample
from .score import score
from .train import train


class Commands(TyperGroup):
    """All commands, none of which takes a word that no path and no name can have in it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As every group does; typer's own releases differ in what they say of a null character, or fail."""
        for word in args:
            if "\0" in word:
                raise typer.BadParameter(f"a word must have no null character, got {word!r}")
        home = os.path.expanduser("~")  # which shells leave alone behind --out=
        words = [re.sub(r"^(--[\w-]+=)?~(?=/|$)", lambda m: f"{m[1] or ''}{home}", word) for word in args]
        return super().parse_args(ctx, words)


app = typer.Typer(
    cls=Commands,
    name="metastable",
    help="Train energy-based models, sample them, and know what they are worth.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (train, sample, restore, evaluate, score, compare, reproduce, rollout, bench, report):
    app.command()(guarded(command))


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train energy-based models, sample them, and know what they are worth."""


def main() -> None:
    """Run the command line."""
    app(prog_name="metastable")


if __name__ == "__main__":
    main()
