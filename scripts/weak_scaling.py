"""How an update's time grows with processes that each bring their own walkers and rows.

    python scripts/weak_scaling.py 1 2 4            # numbers of processes, each with a core of its own
    python scripts/weak_scaling.py 1 2 4 --apart    # also of as many that never talk to each other
    python scripts/weak_scaling.py 1 2 --walkers 16384   # of larger updates, of which messages are a smaller part

Every process has as many walkers, rows and held-out populations as the one that is alone, so that a perfect group
takes the same time for an update. Processes that are started together but do not know of each other say how much of
what is lost is the machine's, whose cores share clocks, caches and memory. Also: how long one message takes, of few
numbers and of many.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import metastable as ms
from metastable.core import processes

WALKERS, ROWS, POPULATIONS, UPDATES, WARM, EVERY = 4096, 512, 4, 60, 20, 10


def measured(walkers: int) -> dict[str, float]:
    """Of this group: seconds of an update, bytes that a process sends in one, seconds of messages."""
    torch.set_num_threads(1)
    processes.join()
    count, times = processes.count(), []
    x = torch.randn(20_000, 8, generator=torch.Generator().manual_seed(0))
    method = ms.methods.Jarzynski(walkers=walkers * count, populations=POPULATIONS * count, threshold=0.98)
    options = {"batch_size": ROWS * count, "log_every": EVERY, "learning_rate": 3e-3, "evaluate": False}
    ms.fit("default", x, method, UPDATES + WARM, progress=lambda row: times.append(row["seconds"]), **options)
    told = {name: sent / (UPDATES + WARM) for name, sent in processes.sent.items()}
    told["messages"] = sum(processes.messages.values()) / (UPDATES + WARM)
    if times:
        told["update"] = (times[-1] - times[WARM // EVERY - 1]) / UPDATES
    return told | {"processes": count, **messages()}


def messages() -> dict[str, float]:
    """Seconds of an average over all processes, of one number and of a million."""
    made = {}
    for name, size, repeats in (("message", 1, 200), ("million", 1_000_000, 10)):
        value = torch.ones(size)
        processes.average(value)
        began = time.perf_counter()
        for _ in range(repeats):
            processes.average(value)
        made[name] = (time.perf_counter() - began) / repeats
    return made


def launched(count: int, walkers: int, apart: bool = False) -> list[dict[str, float]]:
    """What the first process of a group says, or each of as many that are alone at the same time."""
    group = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command = [sys.executable, *([] if apart else group), __file__, "--child", f"--walkers={walkers}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(count if apart else 1)
    ]
    told = []
    for process in started:
        out, errors = process.communicate()
        if process.returncode:
            raise SystemExit(errors[-2000:])
        told.append(json.loads(out.strip().splitlines()[-1]))
    return told


def main() -> int:
    """A table, and the same as JSON where a file is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("counts", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--walkers", type=int, default=WALKERS, help="of every process")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        told = measured(asked.walkers)
        if processes.is_first():
            print(json.dumps(told), flush=True)
        if dist.is_initialized():
            dist.destroy_process_group()
        return 0
    rows = []
    for count in asked.counts:
        (here,) = launched(count, asked.walkers)
        rows.append(here)
        apart = ""
        if asked.apart:
            here["apart"] = max(one["update"] for one in launched(count, asked.walkers, apart=True))
            apart = f" ({1e3 * here['apart']:.2f} ms apart)"
        print(
            f"{count} processes: {1e3 * here['update']:.2f} ms an update{apart}, "
            f"efficiency {rows[0]['update'] / here['update']:.2f}; message {1e6 * here['message']:.0f} µs, "
            f"a million numbers {1e3 * here['million']:.2f} ms; an update has {here['messages']:.1f} messages: "
            + ", ".join(f"{here.get(name, 0):.0f} B {name}" for name in ("gradients", "numbers", "walkers")),
            flush=True,
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
