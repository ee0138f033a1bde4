"""Where words go: results to stdout, everything else to stderr."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .launcher import launched_as

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TABLE_WIDTH = 150
"""Width of a table where no terminal says how wide it may be (a pipe, a log)."""


def console(stderr: bool = False) -> Console:
    """A console, made anew each time, as tests and pipes replace the streams; one of several processes speaks."""
    from rich.console import Console

    silent = launched_as() > 0
    made = Console(stderr=stderr, highlight=False, quiet=silent)
    return (
        made if made.is_terminal else Console(stderr=stderr, highlight=False, width=TABLE_WIDTH, quiet=silent)
    )


def say(*lines: str) -> None:
    """Plain lines on stdout, never wrapped and never read as markup."""
    for line in lines:
        console().print(line, markup=False, soft_wrap=True)


def note(line: str, everywhere: bool = False) -> None:
    """A line on stderr, for what is not a result; of several processes each says its own where that is wanted."""
    screen, who = console(stderr=True), launched_as()
    screen.quiet = screen.quiet and not everywhere
    screen.print(f"process {who}: {line}" if who else line, markup=False, soft_wrap=True, style="dim")


def say_error(message: str, everywhere: bool = False) -> None:
    """One red-headed line on stderr; of several processes each says it where it concerns `everywhere`."""
    from rich.text import Text

    screen, who = console(stderr=True), launched_as()
    screen.quiet = screen.quiet and not everywhere
    line = Text.assemble(("error: ", "bold red"), f"process {who}: " if who else "", message)
    screen.print(line, soft_wrap=True)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "", caption: str = "", words: int = 1
) -> Table:
    """A table whose first `words` columns are text and whose others are set flush right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title or None, caption=caption or None, box=SIMPLE_HEAD)
    drawn.title_justify = drawn.caption_justify = "left"
    for i, column in enumerate(columns):
        drawn.add_column(column, justify="left" if i < words else "right")
    for row in rows:
        drawn.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return drawn


def number(value: Any, digits: int = 4) -> str:
    """A number as a table shows it; an empty cell for what is not there.

    >>> number(0.123456), number(None), number("all"), number(12)
    ('0.1235', '', 'all', '12')
    """
    if value is None:
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def plus_minus(value: float | None, error: float | None) -> str:
    """`value ± error`, with as many decimals as the error has meaning.

    >>> plus_minus(1.23456, 0.0123), plus_minus(1.5, None), plus_minus(None, 1.0)
    ('1.235 ± 0.012', '1.500', '')
    """
    if value is None:
        return ""
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def clock(seconds: float) -> str:
    """Seconds as people say them.

    >>> clock(3.21), clock(75.0), clock(3700.0)
    ('3.2 s', '1 min 15 s', '1 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
