"""How much memory is free, and refusing what cannot fit before any of it is taken."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

from .errors import ConfigError, short

CONTAINER = "/sys/fs/cgroup/memory."
LIMITS = ((f"{CONTAINER}max", f"{CONTAINER}current", f"{CONTAINER}stat"),)
"""Files of a container's limit, of how much of it is taken, and of what: pages of files are given back."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def free_bytes(device: object = "cpu") -> float:
    """Bytes that can still be had on a device, within a container's limit; +inf where nobody knows."""
    if str(device).startswith("cuda"):
        cuda = vars(sys.modules["torch"])["cuda"]  # whoever has such a device has torch
        return cuda.mem_get_info(device)[0] + cuda.memory_reserved(device) - cuda.memory_allocated(device)
    if not str(device).startswith("cpu"):
        return math.inf
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):  # no such file: not Linux
        known = os.name == "posix"
        free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if known else math.inf
    for limit, taken, parts in LIMITS:
        try:
            spared = dict(line.split() for line in Path(parts).read_text().splitlines()).get(
                "inactive_file", 0
            )
            free = min(free, int(Path(limit).read_text()) - int(Path(taken).read_text()) + int(spared))
        except (OSError, ValueError):  # no container, or one without a limit
            continue
    return max(free, 0.0)


def require_room(field: str, value: object, needed: float, device: object = "cpu") -> None:
    """Raise `ConfigError` where `value` asks for more bytes than are free; nothing has been taken yet then.

    >>> require_room("data", "toy:two-modes?n=10", 80)
    >>> require_room("method.walkers", 10**20, 8 * 10**20)
    Traceback (most recent call last):
    ...
    metastable.core.errors.ConfigError: method.walkers: 100000000000000000000 would take about 693.9 EiB ...
    """
    what = value if isinstance(value, str) else short(value)
    if needed > (free := free_bytes(device)):
        raise ConfigError(
            field,
            f"{what} would take about {bytes_in_words(needed)} of memory, and {bytes_in_words(free)} are "
            f"free on {device}; give less",
        )


def bytes_in_words(n: float) -> str:
    """Bytes as people say them.

    >>> bytes_in_words(512), bytes_in_words(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    value, units = float(n), list(UNITS)
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{int(n)} B" if n < 1024 else f"{value:.1f} {units[0]}"
