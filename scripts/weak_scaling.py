"""How an update's time grows with processes that each bring their own walkers and rows.

    python scripts/weak_scaling.py 1 2 4            # numbers of processes, each with a core of its own

Every process has as many walkers, rows and held-out populations as the one that is alone, so that a perfect group
takes the same time for an update. Also: how long one message takes, of few numbers and of many.
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

WALKERS, ROWS, POPULATIONS, UPDATES, WARM = 4096, 512, 4, 60, 20


def measured() -> dict[str, float]:
    """Of this group: seconds of an update, bytes that a process sends in one, seconds of messages."""
    torch.set_num_threads(1)
    processes.join()
    count, times = processes.count(), []
    x = torch.randn(20_000, 8, generator=torch.Generator().manual_seed(0))
    method = ms.methods.Jarzynski(walkers=WALKERS * count, populations=POPULATIONS * count, threshold=0.98)
    options = {"batch_size": ROWS * count, "log_every": 1, "learning_rate": 3e-3, "evaluate": False}
    ms.fit("default", x, method, UPDATES + WARM, progress=lambda row: times.append(row["seconds"]), **options)
    told = {name: sent / (UPDATES + WARM) for name, sent in processes.sent.items()}
    if times:
        told["update"] = (times[-1] - times[WARM - 1]) / (len(times) - WARM)
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


def main() -> int:
    """A table, and the same as JSON where a file is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("counts", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        told = measured()
        if processes.is_first():
            print(json.dumps(told), flush=True)
        if dist.is_initialized():
            dist.destroy_process_group()
        return 0
    rows = []
    for count in asked.counts:
        launch = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={count}",
            __file__,
            "--child",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *launch], capture_output=True, text=True, env=environment)
        if done.returncode:
            print(done.stderr[-2000:])
            return 1
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
        here, alone = rows[-1], rows[0]
        print(
            f"{count} processes: {1e3 * here['update']:.2f} ms an update, "
            f"efficiency {alone['update'] / here['update']:.2f}; message {1e6 * here['message']:.0f} µs, "
            f"a million numbers {1e3 * here['million']:.2f} ms; sent in an update: "
            + ", ".join(f"{here.get(name, 0):.0f} B {name}" for name in ("gradients", "numbers", "walkers")),
            flush=True,
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
