"""How an update's time grows with processes that each bring their own walkers and rows.

    python scripts/weak_scaling.py 2 4                  # numbers of processes, each with a core of its own
    python scripts/weak_scaling.py 2 --walkers 16384    # of larger updates, of which messages are a smaller part

Every process has as many walkers, rows and held-out populations as the one that is alone, so that a perfect group
takes the same time for an update. Three things are timed by turns, in the same processes and several rounds, since
clocks and neighbours of a machine change by more than what is to be seen: the first process while the others wait,
all of them without a word between them, and the group. Numbers are medians over rounds. Processes that do not talk
say how much of what is lost is the machine's, whose cores share caches and memory. Also: how long a message takes,
of few numbers and of many.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import metastable as ms
from metastable.core import processes

WALKERS, ROWS, POPULATIONS, UPDATES, WARM, EVERY = 4096, 512, 4, 30, 10, 10
WAYS = ("alone", "apart", "together")


def update_of(walkers: int) -> float:
    """Seconds of an update of the processes there are, each with so many walkers."""
    count, times = processes.count(), []
    x = torch.randn(20_000, 8, generator=torch.Generator().manual_seed(0))
    method = ms.methods.Jarzynski(walkers=walkers * count, populations=POPULATIONS * count, threshold=0.98)
    options = {"batch_size": ROWS * count, "log_every": EVERY, "learning_rate": 3e-3, "evaluate": False}
    ms.fit("default", x, method, UPDATES + WARM, progress=lambda row: times.append(row["seconds"]), **options)
    return (times[-1] - times[WARM // EVERY - 1]) / UPDATES if times else 0.0


def measured(walkers: int, rounds: int) -> dict[str, float]:
    """Of this group: seconds of an update in each way, bytes that a process sends in one, seconds of messages."""
    torch.set_num_threads(1)
    processes.join()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            dist.barrier()
            if way == "together":
                found[way].append(update_of(walkers))
            elif way == "apart" or processes.is_first():
                with processes.alone():
                    found[way].append(update_of(walkers))
    made = rounds * (UPDATES + WARM)
    told = {name: sent / made for name, sent in processes.sent.items()}
    told |= {"messages": sum(processes.messages.values()) / made, "processes": processes.count()}
    for way in WAYS[1:]:
        ratios = [one / other for one, other in zip(found["alone"], found[way], strict=False)]
        told |= {f"{way}_efficiency": median(ratios)} if ratios else {}
    return told | {way: median(times) for way, times in found.items() if times} | messages()


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
    parser.add_argument("--rounds", type=int, default=7)
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
            f"without a word {here['apart_efficiency']:.2f}; message {1e6 * here['message']:.0f} µs, "
            f"a million numbers {1e3 * here['million']:.2f} ms; an update has {here['messages']:.1f} messages: "
            + ", ".join(f"{here.get(name, 0):.0f} B {name}" for name in ("gradients", "numbers", "walkers")),
            flush=True,
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
