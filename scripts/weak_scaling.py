"""How an update's time grows with processes that each bring their own walkers and rows.

    python scripts/weak_scaling.py 2 4                  # numbers of processes, each with a core of its own
    python scripts/weak_scaling.py 2 --walkers 16384    # of larger updates, of which messages are a smaller part

Every process has as many walkers, rows and held-out populations as one that is alone, so that a perfect group
takes the same time for an update. Clocks and neighbours of a machine change by more than what is to be seen,
within minutes and within seconds. So three trainings are alive in the same processes and take turns of five
updates: one process while the others wait, each in its turn (`alone`); all of them without a word between them
(`apart`); and the group (`together`). The slowest process counts. A round is alone, apart, together, and back
again, so that a clock that rises or falls evenly falls out of its ratio, alone over together. Told is the median
of the rounds' ratios, with an interval from their order that holds it with a probability of 95 % as far as rounds
do not depend on each other. `apart` over `alone` is what the machine itself loses: cores differ, share caches and
memory, and clocks fall when all are busy.

A round in which others had more than two percent of the cores' time is left out: other programs, and, on a virtual
machine, a host that gave a core to somebody else, since a group waits for the slowest of its cores. It is told how
many are kept, and what all of them would say. All the while processes listen for each other, as in any training of
several, which is 0.3 % of a core. Also: how long a message takes, of few numbers and of many.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import metastable as ms
from metastable.core import heap, processes
from metastable.core.denormals import flushed
from metastable.data import load_array
from metastable.runs.plan import make_plan, trainer_of
from metastable.training import Adam, Trainer, TrainerConfig

WALKERS, ROWS, POPULATIONS, TURN, ROUNDS = 4096, 512, 4, 5, 30
WAYS = ("alone", "apart", "together")
TAKEN, LEAST = 0.02, 6
"""The largest share of the cores' time that others may take from a round that counts; how many must be left."""


def others() -> float:
    """Seconds that cores of this machine have given to anybody but this group, as far as the kernel knows.

    Also those that a host has kept them from running.
    """
    own = float(processes.stacked(torch.tensor(time.process_time(), dtype=torch.float64)).sum())
    try:
        user, nice, system, _, _, *rest = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:  # no Linux, nobody says
        return 0.0
    return sum(map(int, (user, nice, system, *rest))) / os.sysconf("SC_CLK_TCK") - own


def training_of(walkers: int) -> Trainer:
    """A training by the processes there are, each with so many walkers, before its first update."""
    count = processes.count()
    x = torch.randn(20_000, 8, generator=torch.Generator().manual_seed(0))
    method = ms.methods.Jarzynski(walkers=walkers * count, populations=POPULATIONS * count, threshold=0.98)
    config = TrainerConfig(steps=10**9, batch_size=ROWS * count, log_every=2 * TURN, optimiser=Adam(3e-3))
    trainer = trainer_of(make_plan("default", load_array(x), method, config))
    trainer._begin()
    trainer.engine.prepare()
    return trainer


def go_on(trainer: Trainer) -> None:
    """The loop of `Trainer.run` for a turn, whose clock stands still between turns."""
    began = time.perf_counter() - trainer.seconds
    for _ in range(TURN):
        trainer._update(trainer._unseen())
        trainer.seconds = time.perf_counter() - began
        trainer._agree()
        trainer._after_update()


def turn(trainer: Trainer, way: str, who: int) -> float:
    """Seconds of an update in a turn of one training, of the slowest process that has a part in it."""
    dist.barrier()
    began = time.perf_counter()
    if way == "together":
        go_on(trainer)
    elif way == "apart" or processes.rank() == who:
        with processes.alone():
            go_on(trainer)
    return float(processes.stacked(torch.tensor((time.perf_counter() - began) / TURN)).max())


def turns(walkers: int, rounds: int) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Of every round the seconds of an update in each way, and the share that others took; what an update sends."""
    with processes.alone():
        trainings = {way: training_of(walkers) for way in WAYS[:2]}
    trainings["together"], found = training_of(walkers), []
    for way in WAYS:  # caches and memory as they will be
        for who in range(processes.count()):
            turn(trainings[way], way, who)
    processes.sent.clear()
    processes.messages.clear()
    for i in range(rounds):
        began, before, made = time.perf_counter(), others(), dict.fromkeys(WAYS, 0.0)
        for way in (*WAYS, *reversed(WAYS)):
            made[way] += turn(trainings[way], way, i % processes.count()) / 2
        taken = (others() - before) / ((os.cpu_count() or 1) * (time.perf_counter() - began))
        found.append(made | {"taken": taken})
    processes.sent["numbers"] -= (6 * 4 + 2 * 8) * rounds  # those of this script
    processes.messages["numbers"] -= (6 + 2) * rounds
    updates = 2 * TURN * rounds
    sent = {name: value / updates for name, value in processes.sent.items()}
    return found, sent | {"messages": sum(processes.messages.values()) / updates}


def measured(walkers: int, rounds: int) -> dict[str, Any]:
    """Of this group: how long an update takes in each way, their ratios, what a process sends, and messages."""
    torch.set_num_threads(1)
    processes.join()
    with processes.together(), flushed(), heap.kept():
        found, told = turns(walkers, rounds)
    kept = [one for one in found if one["taken"] <= TAKEN]
    told |= {"processes": processes.count(), "rounds": len(found), "kept": len(kept)}
    for way in WAYS:
        told |= {way: median(one[way] for one in kept) if kept else math.nan}
    for way in WAYS[1:]:
        told[f"{way}_efficiency"] = within([one["alone"] / one[way] for one in kept])
        told[f"{way}_of_all"] = within([one["alone"] / one[way] for one in found])
    told |= {"taken": [one["taken"] for one in found]}
    return told | messages()


def within(values: Sequence[float]) -> tuple[float, float, float]:
    """The median of values, and an interval that holds that of their law with a probability of 95 %."""
    if len(values) < LEAST:
        return math.nan, math.nan, math.nan
    ordered, n, k = sorted(values), len(values), 0
    while sum(math.comb(n, i) for i in range(k + 1)) <= 0.025 * 2**n:
        k += 1
    return median(ordered), ordered[k - 1], ordered[n - k]


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


def launched(count: int, walkers: int, rounds: int) -> dict[str, Any]:
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
    parser.add_argument("--rounds", type=int, default=ROUNDS)
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
        said = {name: "{:.3f} ({:.3f} to {:.3f})".format(*here[name]) for name in here if "_" in name}
        print(
            f"{count} processes: an update takes {ways}; efficiency {said['together_efficiency']}, without a word "
            f"{said['apart_efficiency']}; {here['kept']} of {here['rounds']} rounds were left to it, all say "
            f"{said['together_of_all']} and {said['apart_of_all']}; message {1e6 * here['message']:.0f} µs, "
            f"a million numbers {1e3 * here['million']:.2f} ms; an update has {here['messages']:.1f} messages: "
            + ", ".join(f"{here.get(name, 0):.0f} B {name}" for name in ("gradients", "numbers", "walkers")),
            flush=True,
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
