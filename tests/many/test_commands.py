"""Commands that a launcher starts as two processes: shared, or done by one of them, and nothing written twice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from group import on
from rough import rough_log_z
from typer.testing import CliRunner

import metastable as ms
from metastable.cli.main import app
from metastable.core import processes
from metastable.kernels import run_chain

DATA, N = "toy:two-modes?n=200", 301
SMALL = {"hidden": [4], "reference": "gaussian"}


def rows() -> torch.Tensor:
    return torch.randn((40, 2), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with runs of several kinds, and pictures."""
    place = tmp_path_factory.mktemp("runs")
    short: dict[str, Any] = {"batch_size": 16, "evaluate": False}
    ms.fit(
        {"name": "mlp", **SMALL},
        DATA,
        ms.methods.Jarzynski(walkers=64, populations=4),
        3,
        out=place / "run",
        **short,
    )
    ms.fit({"name": "mlp", **SMALL}, DATA, ms.methods.PersistentCD(walkers=8), 3, out=place / "bare", **short)
    ms.fit(None, rows(), ms.methods.RankingNCE(), 3, given=rows(), out=place / "given", **short)
    for name, seed in (("a", 0), ("b", 1)):
        np.save(place / f"{name}.npy", np.random.default_rng(seed).uniform(-1, 1, (8, 1, 4, 4)))
    return place


def called(place: str, each: list[list[str]], dies: int = -1) -> tuple[int, str, int]:
    """A command as a process of a launcher runs it, in a folder of its own: status, words, and chains' steps."""
    who, moved = processes.rank(), [0]
    os.chdir(Path(place) / str(who))
    os.environ |= {"RANK": str(who), "WORLD_SIZE": str(processes.count())}

    def counted(kernel: Any, energy: Any, state: Any, steps: int, *args: Any, **named: Any) -> Any:
        if who == dies:
            os._exit(9)
        moved[0] += len(state.x) * steps
        return run_chain(kernel, energy, state, steps, *args, **named)

    with rough_log_z(), patch("metastable.walkers.continuing.run_chain", counted):
        done = CliRunner().invoke(app, each[who % len(each)])
    error = done.exception
    words = done.output if error is None or isinstance(error, SystemExit) else repr(error)
    return done.exit_code, words, moved[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def started(runs: Path, place: Path, *each: str, dies: int = -1) -> tuple[list[Any], list[dict[str, bytes]]]:
    """What became of a command in each process, and which files there are new or others in its own folder."""
    before = contents(runs)
    for who in range(2):
        for name, content in before.items():
            path = place / str(who) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    every = on(2, called, str(place), [words.split() for words in each], dies)
    after = [contents(place / str(who)) for who in range(2)]
    return every, [{k: v for k, v in own.items() if before.get(k) != v} for own in after]


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (f"sample run --n {N} --steps 5 --out s.npy", {"s.npy"}),
        ("sample run --n 1 --weighted --steps 5 --out s.npy", {"s.npy", "s.log_weight.npy"}),
        ("sample bare --n 20 --steps 5 --out s.npy", {"s.npy"}),
        ("sample given --given 0.5,1 --n 5 --steps 2 --out s.npy", {"s.npy"}),
        (f"evaluate run --data {DATA} --out e.json", {"e.json"}),
        ("evaluate bare --data toy:two-modes?n=50", {"bare/evaluation.json", "bare/report.html"}),
        ("evaluate --samples a.npy --reference b.npy --images 8 --out e.json", {"e.json", "e/nearest.png"}),
        ("compare run bare --out c", {"c/compare.json", "c/report.html"}),
    ],
)  # fmt: skip
def test_one_process_writes_what_all_have_done(runs, tmp_path, words, written):
    every, (first, second) = started(runs, tmp_path, words)
    assert [status for status, _, _ in every] == [0, 0], every
    assert set(first) >= written
    assert second == {}
    assert "wrote" in every[0][1] or "report" in every[0][1]
    assert every[1][1] == ""


def test_samples_are_shared_and_each_part_is_a_draw_of_its_own(runs, tmp_path):
    words = f"sample run --n {N} --steps 5 --out s.npy"
    every, (first, _) = started(runs, tmp_path, words)
    (tmp_path / "s.npy").write_bytes(first["s.npy"])
    x = np.load(tmp_path / "s.npy")
    assert x.shape == (N, 2)
    assert len(np.unique(x[:, 0])) > 0.9 * N  # parts from one seed would be the same rows twice
    steps = [moved for _, _, moved in every]
    assert steps[0] == (N + 1) // 2 * (5 + 120)  # and 120 to find a step size
    assert steps[1] == N // 2 * (5 + 120)


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_dies_while_samples_are_drawn_is_named_by_the_other(runs, tmp_path, who):
    every, written = started(runs, tmp_path, f"sample run --n {N} --steps 5 --out s.npy", dies=who)
    assert every[who] is None
    status, words, _ = every[1 - who]
    assert status == 2
    assert f"process {who} ended" in words
    assert written == [{}, {}]


@pytest.mark.parametrize("name", ["score", "restore", "report", "bench"])
def test_what_is_for_one_process_is_refused_and_leaves_no_file(runs, tmp_path, name):
    more = {
        "score": f"run --data {DATA}",
        "restore": "run --images a.npy",
        "report": "run",
        "bench": "--suite x",
    }
    every, written = started(runs, tmp_path, f"{name} {more[name]}")
    assert [status for status, _, _ in every] == [2, 2]
    assert f"{name}: works in one process, and 2 were started" in every[0][1]
    assert written == [{}, {}]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (f"compare --data {DATA} --out c", f"compare --data {DATA} --out d", "out is 'd', not 'c'"),
        ("compare run bare --out c", "compare bare run --out c", "runs is"),
        ("reproduce jarzynski-gmm --seed 1", "reproduce jarzynski-gmm --seed 2", "seed is '2', not '1'"),
        ("sample run --n 5 --out s.npy", "sample run --n 6 --out s.npy", "n is '6', not '5'"),
        ("evaluate run --out e.json", "evaluate run --log-z --out e.json", "log_z is 'True', not 'False'"),
        ("train two-modes --steps 2 --out t", "train two-modes --steps 3 --out t", "steps is '3', not '2'"),
    ],
)  # fmt: skip
def test_options_that_differ_are_named_with_the_process_that_has_them(runs, tmp_path, first, second, said):
    every, written = started(runs, tmp_path, first, second)
    rule = f"{first.split()[0]}: must be the same in all processes, and process 1 has another than 0: {said}"
    for status, words, _ in every:
        assert status == 2
        assert rule in words
    assert written == [{}, {}]
