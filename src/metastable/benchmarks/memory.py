"""Work in a process that does nothing else: what it returns, and the most memory it held.

Timings are taken so, too, where a few per cent matter: what a process did before decides how its memory lies.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")


def peak_bytes() -> float:
    """The most memory this process has held.

    From `VmHWM` where there is one: `ru_maxrss` of a child starts at what its parent held.
    """
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * float(line.split()[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_of(work: Callable[..., Any], **arguments: Any) -> float:
    """Peak bytes of a fresh process that calls `work`, a module-level function, with plain `arguments`."""
    return _in_own_process(work, arguments)["peak"]


def returned_by(work: Callable[..., Any], **arguments: Any) -> Any:
    """What `work` returns (as JSON can hold it) when a fresh process calls it with plain `arguments`."""
    return _in_own_process(work, arguments)["returned"]


def _in_own_process(work: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    call = json.dumps([work.__module__, work.__qualname__, arguments])
    done = subprocess.run([sys.executable, "-m", __name__, call], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        from metastable.core.errors import MetastableError

        raise MetastableError(f"{work.__qualname__} failed in its own process:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main(call: str) -> None:
    """What the fresh process does."""
    module, name, arguments = json.loads(call)
    returned = getattr(importlib.import_module(module), name)(**arguments)
    print(json.dumps({"returned": returned, "peak": peak_bytes()}))


if __name__ == "__main__":
    main(sys.argv[1])
