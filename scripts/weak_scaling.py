"""How an update's time grows with processes that each bring their own walkers and rows.

    python scripts/weak_scaling.py 2 4                  # numbers of processes, each with a core of its own
    python scripts/weak_scaling.py 2 --walkers 16384    # of larger updates, of which messages are a smaller part

Every process has as many walkers, rows and held-out populations as the one that is alone, so that a perfect group
takes the same time for an update. Three things are timed by turns, in the same processes and several rounds, since
clocks and neighbours of a machine change by more than what is to be seen: the first process while the others wait,
all of them without a word between them, and the group. Ten updates are timed at once. On a virtual machine the host
may give a core to somebody else meanwhile, and a group waits for the slowest of its cores; such times (`stolen` is
more than a percent of the cores' time) are left out, and how many are kept is told. Numbers are medians. Processes
that do not talk say how much of what is lost is the machine's, whose cores share caches and memory. Also: how
long a message takes, of few numbers and of many.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import metastable as ms
from metastable.core import processes

WALKERS, ROWS, POPULATIONS, UPDATES, WARM, EVERY = 4096, 512, 4, 30, 10, 10
WAYS = ("alone", "apart", "together")
STOLEN, LEAST = 0.01, 5
"""The largest share of the cores' time that a host may take from a timing that counts; how many must be left."""


def stolen() -> float:
    """Seconds that a host has kept all cores from running, as far as the kernel knows."""
    try:
        cores = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:  # no Linux, nobody says
        return 0.0
    return int(cores[8]) / os.sysconf("SC_CLK_TCK")


def updates_of(walkers: int) -> list[tuple[float, float]]:
    """Seconds of an update of the processes there are, each with so many walkers, and the share that was stolen."""
    count, times = processes.count(), []

    def seen(row: dict[str, float]) -> None:
        times.append((row["seconds"], stolen()))

    x = torch.randn(20_000, 8, generator=torch.Generator().manual_seed(0))
    method = ms.methods.Jarzynski(walkers=walkers * count, populations=POPULATIONS * count, threshold=0.98)
    options = {"batch_size": ROWS * count, "log_every": EVERY, "learning_rate": 3e-3, "evaluate": False}
    ms.fit("default", x, method, UPDATES + WARM, progress=seen, **options)
    timed, cores = times[WARM // EVERY - 1 :], os.cpu_count() or 1
    return [
        ((after - before) / EVERY, (gone - was) / (cores * (after - before)))
        for (before, was), (after, gone) in pairwise(timed)
    ]


def measured(walkers: int, rounds: int) -> dict[str, float]:
    """Of this group: seconds of an update in each way, bytes that a process sends in one, seconds of messages."""
    torch.set_num_threads(1)
    processes.join()
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            dist.barrier()
            if way == "together":
                found[way] += updates_of(walkers)
            elif way == "apart" or processes.is_first():
                with processes.alone():
                    found[way] += updates_of(walkers)
    made = rounds * (UPDATES + WARM)
    told = {name: sent / made for name, sent in processes.sent.items()}
    told |= {"messages": sum(processes.messages.values()) / made, "processes": processes.count()}
    kept = {way: [seconds for seconds, gone in times if gone <= STOLEN] for way, times in found.items()}
    for way, times in kept.items():
        told |= {way: median(times) if len(times) >= LEAST else math.nan}
        told |= {f"{way}_kept": len(times), f"{way}_timed": len(found[way])}
    told |= {f"{way}_efficiency": told["alone"] / told[way] for way in WAYS[1:]}
    return told | messages()


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


def launched(count: int, walkers: int, rounds: int) -> dict[str, float]:
    """What the first process of a group says."""
    group = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    child = [__file__, "--child", f"--walkers={walkers}", f"--rounds={rounds}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *group, *child], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> int:
    """A table, and the same as JSON where a file is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("counts", type=int, nargs="*", default=[2])
    parser.add_argument("--walkers", type=int, default=WALKERS, help="of every process")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        told = measured(asked.walkers, asked.rounds)
        if processes.is_first():
            print(json.dumps(told), flush=True)
        dist.destroy_process_group()
        return 0
    rows = []
    for count in asked.counts:
        here = launched(count, asked.walkers, asked.rounds)
        rows.append(here)
        ways = ", ".join(f"{1e3 * here[way]:.2f} ms {way}" for way in WAYS)
        print(
            f"{count} processes: an update takes {ways}; efficiency {here['together_efficiency']:.2f}, "
            f"without a word {here['apart_efficiency']:.2f}; "
            + ", ".join(f"{here[f'{way}_kept']} of {here[f'{way}_timed']} timings {way}" for way in WAYS)
            + f" were not stolen from; message {1e6 * here['message']:.0f} µs, "
            f"a million numbers {1e3 * here['million']:.2f} ms; an update has {here['messages']:.1f} messages: "
            + ", ".join(f"{here.get(name, 0):.0f} B {name}" for name in ("gradients", "numbers", "walkers")),
            flush=True,
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
