"""Trainings on several processes: right numbers, checkpoints for any number of them, and one that dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group import on
from torch import nn

import metastable as ms
from metastable.core import processes
from metastable.core.errors import ConfigError, InputError, ProcessError, UnsupportedError
from metastable.energies import MLP, JointEnergy, Tilted
from metastable.methods import METHODS
from metastable.proposals import fit_gaussian
from metastable.training import agreement
from metastable.training.checkpoints import CheckpointStore, pack
from metastable.training.records import Gather, of_all, read_jsonl

M = ms.methods
WALKERS, POPULATIONS, LIMIT = 1210, 6, 3.0


def two_modes(n: int = 400) -> torch.Tensor:
    """A third of the rows at −2, the others at 2."""
    rng = torch.Generator().manual_seed(0)
    side = torch.where(torch.arange(n) < n // 3, -2.0, 2.0)
    return (side + 0.6 * torch.randn(n, generator=rng))[:, None]


def weights_of(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def trained() -> dict[str, Any]:
    """A short training, what it says of its model, and what is true of that."""
    x = two_modes()
    energy = Tilted(fit_gaussian(x), MLP(1, hidden=(16,)))
    method = M.Jarzynski(walkers=WALKERS, populations=POPULATIONS, threshold=0.99, pace=None)
    options = {"batch_size": 99, "learning_rate": 0.02, "units": "none", "evaluate": False, "log_every": 4}
    run = ms.fit(energy, x, method, 24, **options)
    grid = torch.linspace(-15, 15, 6001)[:, None]
    with torch.no_grad():
        log_p = -run.energy(grid).double()
    z, walkers = run.log_partition, run.walkers
    assert z is not None
    assert walkers is not None
    p, exact = torch.softmax(walkers.log_weight, 0), torch.softmax(log_p, 0)
    return {
        "z": (float(log_p.logsumexp(0)) - z.value - torch.tensor(200.0).log().item()) / z.std_error,
        "mass": float(p[walkers.x[:, 0] < 0].sum()),
        "true mass": float(exact[grid[:, 0] < 0].sum()),
        "ess": walkers.ess,
        "weights": weights_of(run.players["energy"]),
        "history": run.history,
        "walkers": len(walkers),
    }


@pytest.mark.parametrize("count", [1, 2, 3])
def test_log_z_and_mode_weights_are_right_on_any_number_of_processes(count):
    every = on(count, trained)
    one = every[0]
    for told in every:  # all have the same model, log and walkers
        assert torch.equal(told["weights"], one["weights"])
        assert told["walkers"] == WALKERS
        without = [
            [{k: v for k, v in row.items() if k != "seconds"} for row in h["history"]] for h in (told, one)
        ]
        assert without[0] == without[1]
    assert one["history"][-1]["resamplings"] > 0
    assert abs(one["z"]) < LIMIT
    mass = one["true mass"]
    assert abs(one["mass"] - mass) < LIMIT * (mass * (1 - mass) / one["ess"]) ** 0.5
    assert 0.1 < mass < 0.48  # there are two modes, and they differ


# ---- checkpoints


def kept(folder: str, steps: int, method: Any, resume: bool = False) -> dict[str, Any]:
    """A training with a folder, and what it holds in the end."""
    x = two_modes(120)
    energy = Tilted(fit_gaussian(x), MLP(1, hidden=(8,)))
    options = {"batch_size": 30, "log_every": 2, "checkpoint_every": 4, "evaluate": False, "ema": 0.9}
    options["learning_rate"] = 0.01
    run = ms.fit(energy, x, method, trainer=None, steps=steps, out=folder, resume=resume, **options)
    return {"steps": [row["step"] for row in run.history], "walkers": run.walkers and len(run.walkers)}


def digest(folder: Path, step: int) -> dict[str, bytes]:
    """Everything in a checkpoint but for the clock."""
    checkpoint = CheckpointStore(folder / "checkpoints").load(step)
    state = {k: v for k, v in checkpoint.state.items() if k != "seconds"}
    tensors, skeleton = pack({"weights": checkpoint.weights, "state": state})
    return {k: v.contiguous().numpy().tobytes() for k, v in tensors.items()} | {"all": str(skeleton).encode()}


METHODS_KEPT = {
    "jarzynski": M.Jarzynski(walkers=62, populations=4, threshold=1.0, batch=10),
    "pcd": M.PersistentCD(walkers=31, batch=6, rejuvenation=0.2),
}


@pytest.mark.parametrize("name", METHODS_KEPT)
def test_a_checkpoint_of_two_goes_on_in_one_two_and_three(name, tmp_path):
    method = METHODS_KEPT[name]
    first, whole = tmp_path / "first", tmp_path / "whole"
    on(2, kept, str(whole), 8, method)
    on(2, kept, str(first), 4, method)
    for count in (1, 3):
        other = tmp_path / str(count)
        copied(first, other)
        for told in on(count, kept, str(other), 8, method, True):
            assert told["steps"] == [2, 4, 6, 8]
            assert told["walkers"] in (31, 62)
        assert digest(other, 4) == digest(whole, 4)
        assert digest(other, 8) != digest(whole, 8)  # other streams of random numbers
    on(2, kept, str(first), 8, method, True)
    assert digest(first, 8) == digest(whole, 8)  # the same streams
    assert lines(first) == lines(whole)


def lines(folder: Path) -> list[dict[str, float]]:
    """Of metrics, but for the clock."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_jsonl(folder / "metrics.jsonl")]


def copied(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())


def messages_of(method: Any, steps: int) -> Counter[str]:
    """Of a training without a line of metrics but its last, with processes that agree at its start only."""
    agreement.EVERY = 1e9
    before, energy = processes.messages.copy(), Tilted(fit_gaussian(two_modes()), MLP(1, hidden=(8,)))
    ms.fit(energy, two_modes(), method, steps, batch_size=30, log_every=1000, evaluate=False)
    return processes.messages - before


def messages_of_an_update(method: Any) -> tuple[float, float]:
    """Of gradients and of numbers."""
    few, many = messages_of(method, 4), messages_of(method, 9)
    return (many["gradients"] - few["gradients"]) / 5, (many["numbers"] - few["numbers"]) / 5


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        (M.Jarzynski(walkers=62, populations=5, threshold=1.0), 1),
        (M.PersistentCD(walkers=30, step_size=0.1), 0),
    ],
    ids=["jarzynski", "pcd"],
)
def test_an_update_has_no_more_messages_than_it_needs(method, numbers):
    assert on(2, messages_of_an_update, method) == [(1, numbers)] * 2


def line() -> dict[str, float]:
    """Of two updates, in each of which five things say a number each; a process has some of them."""
    gather, rank = Gather(), torch.tensor(float(processes.rank()))
    for k in (1, 2):
        own = (k * torch.arange(1.0, 6.0).double())[processes.own_rows(5)]
        mean = processes.shared(own, 5, lambda each: each.exp().mean(-1)) + rank
        gather.add(
            {"mean": mean, "rank": rank}, {"most": processes.shared(own, 5, lambda each: each.amax(-1))}
        )
    return of_all(gather.shared, gather.asked())()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_line_reads_what_lies_on_all_processes(count):
    values = torch.arange(1.0, 6.0).double()
    mean = float(torch.stack([values.exp(), (2 * values).exp()]).mean()) + (count - 1) / 2
    for told in on(count, line):
        assert list(told) == ["mean", "rank", "most"]
        assert told == pytest.approx({"mean": mean, "rank": (count - 1) / 2, "most": 10.0}, rel=1e-14)


# ---- every method


SETTINGS: dict[str, Any] = {
    "jarzynski": {"walkers": 64, "populations": 4},
    "short-run": {"steps": 3},
    "flow-contrastive": {"pretrain": 1},
}


def every_method() -> dict[str, Any]:
    """Of each method, weights of all players after two updates, or why it does not train here."""
    x, told = torch.randn((60, 2), generator=torch.Generator().manual_seed(0)), {}
    for name, kind in METHODS.items():
        torch.manual_seed(processes.rank())  # as in a program that does not care
        energy: nn.Module = Tilted(fit_gaussian(x), MLP(2, hidden=(8,)))
        labels = {}
        if name == "jem":
            energy, labels = JointEnergy(nn.Linear(2, 2)), {"labels": (x[:, 0] > 0).long()}
        method = kind(**SETTINGS.get(name, {}))
        try:
            run = ms.fit(energy, x, method, 2, evaluate=False, batch_size=20, log_every=1, **labels)
        except (InputError, UnsupportedError, TypeError) as error:
            told[name] = str(error)
        else:
            told[name] = weights_of(nn.ModuleDict(run.players))
    return told


def test_every_method_trains_on_two_or_says_why_not():
    one, two = on(2, every_method)
    unfit = {name for name, found in one.items() if isinstance(found, str)}
    assert unfit == {"exact", "interpolating-nce", "density"}  # which this energy fits in one process no more
    for name in METHODS.keys() - unfit:
        assert torch.equal(one[name], two[name]), name
        assert torch.isfinite(one[name]).all(), name


def refused() -> str:
    try:
        ms.fit(
            "mlp", two_modes(60), M.Robust(source=M.Jarzynski(walkers=64, populations=4)), 2, evaluate=False
        )
    except UnsupportedError as error:
        return str(error)
    return ""


def test_weights_that_count_across_processes_are_refused_where_they_are_not_understood():
    assert all("robust normalises the weights" in words for words in on(2, refused))


# ---- a process that dies, or is told something else


def dies(who: int) -> Any:
    """A long training, in which one process is killed; returns how the others heard of it, and after how long."""
    began = time.monotonic()
    if processes.rank() == who:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        ms.fit("mlp", two_modes(60), M.PersistentCD(walkers=21), 1_000_000, evaluate=False)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return None


@pytest.mark.parametrize("who", [0, 2])
def test_a_dead_process_ends_the_others_by_its_name(who):
    every = on(3, dies, who)
    assert every[who] is None
    for words, seconds in (one for i, one in enumerate(every) if i != who):
        assert f"process {who} ended" in words
        assert seconds < 30


def outlives() -> str:
    """The process that holds the store knows who died, says so and goes; returns whom the other names later."""
    try:
        with processes.together():
            if processes.rank() == 0:
                processes._store().set("dead", "7 it died without a word")
                time.sleep(1.0)
                os._exit(0)
            time.sleep(2.5)  # as in a message that only waits for the first
            processes.told("a word that nobody leaves")
    except RuntimeError as error:
        return str(error)
    return ""


def test_who_died_is_known_when_the_store_has_gone_since():
    assert "process 7 ended (it died without a word)" in on(2, outlives)[1]


def differs() -> str:
    try:
        ms.fit("mlp", two_modes(60) + processes.rank(), M.PersistentCD(walkers=20), 2, evaluate=False)
    except ConfigError as error:
        return str(error)
    return ""


def by_the_clock() -> str:
    timed: dict[str, Any] = {"follows": "seconds", "max_seconds": 60.0, "evaluate": False}
    try:
        ms.fit("mlp", two_modes(60), M.PersistentCD(walkers=20), 2, **timed)
    except ConfigError as error:
        return str(error)
    return ""


def uneven(method: M.Method) -> str:
    try:
        ms.fit("mlp", two_modes(60), method, 2, evaluate=False)
    except ConfigError as error:
        return str(error)
    return ""


def refusals() -> list[str]:
    """Of rows that differ, of rates that would, and of chains that are not as many in each."""
    few = M.PersistentCD(walkers=20, batch=1), M.PersistentCD(walkers=21), M.ContrastiveDivergence(walkers=1)
    return [differs(), by_the_clock(), *map(uneven, few)]


def test_processes_with_other_data_clocks_or_shares_are_refused():
    for data, clock, batch, walkers, chains in on(2, refusals):
        assert "process 1 has another than 0: data.sha256 is" in data
        assert "trainer.follows: must be 'steps' in several processes" in clock
        assert "pcd.batch: must be a multiple of the 2 processes" in batch
        assert "pcd.walkers: must be a multiple of the 2 processes" in walkers
        assert "cd.walkers: must be a multiple of the 2 processes" in chains


def dies_working() -> str:
    """The first process ends while it alone works, and holds the store; all have joined by then."""
    dist.barrier()
    try:
        with processes.together():
            processes.by_first(lambda: time.sleep(0.5) or os._exit(9))
    except ProcessError as error:
        return str(error)
    return ""


def test_the_first_process_that_dies_at_work_of_its_own_is_named():
    first, other = on(2, dies_working)
    assert first is None
    assert other.startswith("process 0 ended (it held the processes together, and is gone)")


# ---- log Z


def log_z() -> tuple[float, float, float]:
    """Of a density whose log Z is known."""
    energy = ms.energies.Banana()
    z = ms.log_partition(energy, walkers=32, populations=5, seed=1)
    return z.value, z.std_error, float(energy.log_partition())


@pytest.mark.parametrize("count", [2, 3])
def test_log_partition_spreads_its_populations(count):
    alone, every = log_z(), on(count, log_z)
    assert every == [every[0]] * count
    for value, error, exact in (alone, every[0]):
        assert abs(value - exact) < LIMIT * error
    assert every[0][0] != alone[0]
    assert 0.2 < every[0][1] / alone[1] < 5
