"""Errors at the edge: one clear line and an exit status, never a traceback unless somebody asks for it.

| status | meaning |
|---|---|
| 1 | training diverged, or a reproduced number is not where it should be |
| 2 | something that was given is not right: a file, a setting, a folder, a full disk |
| 130 | stopped by Ctrl-C or SIGTERM |
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer

from .console import say_error
from .launcher import launched

FAILED, REFUSED, STOPPED = 1, 2, 130
FOR_MANY = ("train", "sample", "evaluate", "compare", "reproduce")
"""Commands that several processes may be started for."""

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with a `--debug` option, whose errors become a line and an exit status."""

    @functools.wraps(command)
    def run(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        try:
            join_others(command.__name__, kwargs)
            command(*args, **kwargs)
        except KeyboardInterrupt as error:
            say_error("stopped by Ctrl-C")
            raise typer.Exit(STOPPED) from error
        except Exception as error:
            found = explain(error)
            if found is None:
                raise
            if debug:
                traceback.print_exc()
            message, status = found
            say_error(message, everywhere=command.__name__ in FOR_MANY)
            raise typer.Exit(status) from error

    signature = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    parameters = [*signature.parameters.values(), option]
    run.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore
    return run


def join_others(name: str, options: dict[str, Any]) -> None:
    """Join the processes that a launcher started; refused where one does all of the work, or options differ."""
    if launched() == 1:
        return
    if name not in FOR_MANY:
        from metastable.core.errors import InputError

        raise InputError(
            f"{name}: works in one process, and {launched()} were started; start it without a launcher "
            f"(several processes are for {', '.join(FOR_MANY)})"
        )
    from metastable.core import processes

    processes.join()
    processes.require_same(name, {key: str(value) for key, value in options.items() if key != "device"})


def explain(error: Exception) -> tuple[str, int] | None:
    """The line to print and the exit status, or None for an error that nobody foresaw."""
    if isinstance(error, (typer.Exit, typer.Abort, BrokenPipeError)):
        return None
    from metastable.core.errors import DivergenceError, MetastableError

    if isinstance(error, MetastableError):
        return str(error), FAILED if isinstance(error, DivergenceError) else REFUSED
    words = str(error).lower()
    full = any(text in words for text in ("out of memory", "can't allocate memory", "not enough memory"))
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and full):  # torch's is, on the CPU
        return f"out of memory ({error}); use fewer walkers, a smaller batch or a smaller energy", REFUSED
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"{error.filename}: no such file or folder", REFUSED
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; choose another place, or free some space", REFUSED
    if isinstance(error, OSError):
        return str(error), REFUSED
    return None
