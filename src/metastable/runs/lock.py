"""One writer: who trains into a folder holds its lock, and a second process is refused with the first one's id.

The lock is the operating system's, on the file `writer.lock`: it goes when its process does, however that ends, so
that a killed training leaves none. The file says in words who holds it. Some file systems keep locks to one
machine, some have none: a file that another machine left counts as held while that run's checkpoints are young, and
without locks so does one of a living process here.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from metastable.core.errors import InputError

try:
    import fcntl
except ImportError:  # Windows has no such locks; the file alone is looked at there
    fcntl = None

LOCK = "writer.lock"
YOUNG = 600.0
"""Seconds since anything was saved, after which the writer on another machine counts as dead."""


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that exists; `InputError` where another process has it."""
    path = folder / LOCK
    with _locked(path) as (file, ours):
        before = _holder(file)
        if _may_live(folder, before, ours):
            raise InputError(_refusal(folder, before) + f"; if that is gone, remove {path}")
        file.seek(0)
        file.truncate()
        holder = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        file.write(json.dumps(holder).encode())
        file.flush()
        try:
            yield
        finally:
            with suppress(OSError):  # somebody may have removed the whole folder
                path.unlink()


@contextmanager
def _locked(path: Path) -> Iterator[tuple[IO[bytes], bool]]:
    """The file, and whether the system locked it; another one of its name may have come while we waited for it."""
    while True:
        with path.open("a+b") as file:
            ours = fcntl is not None
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                        raise InputError(_refusal(path.parent, _holder(file))) from None
                    if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS):
                        raise
                    ours = False
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield file, ours
                return


def _holder(file: IO[bytes]) -> dict[str, Any]:
    """Who wrote the file, as far as it says so."""
    file.seek(0)
    with suppress(ValueError, RecursionError):
        found = json.loads(file.read(4096))
        return found if isinstance(found, dict) else {}
    return {}


def _may_live(folder: Path, holder: dict[str, Any], ours: bool) -> bool:
    """Whether whoever wrote the file may still be at work; `ours` if the system has locked the file for us."""
    if holder.get("host") not in (None, platform.node()):
        return _age(folder) < YOUNG
    pid = holder.get("pid")
    if ours or not isinstance(pid, int) or pid == os.getpid():
        return False
    if os.name != "posix":  # where a signal, even none, would end it
        return _age(folder) < YOUNG
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def _age(folder: Path) -> float:
    """Seconds since the lock was taken or a checkpoint was saved."""
    there = [path for path in (folder / LOCK, folder / "checkpoints") if path.exists()]
    return time.time() - max(path.stat().st_mtime for path in there)


def _refusal(folder: Path, holder: dict[str, Any]) -> str:
    who = f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'this machine')}"
    since = holder.get("since", "just now")
    return f"out: {folder} is being written by {who}, since {since}; wait for it, or stop it"
