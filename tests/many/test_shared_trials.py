"""Trials of an experiment and methods of a comparison, shared by processes: the same to the bit as by one."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any
from unittest.mock import patch

import pytest
import torch
from group import on
from typer.testing import CliRunner

import metastable as ms
from metastable.cli.main import app
from metastable.compare import compare_methods
from metastable.core import processes
from metastable.core.errors import ConfigError, InputError
from metastable.data import load_array
from metastable.experiments.base import Bench, Experiment, Row, reproduce
from metastable.experiments.trials import Arm, Problem, Trial, Trials
from metastable.training.config import TrainerConfig

M = ms.methods
ARMS = tuple(Arm(f"pcd/{n}", M.PersistentCD(walkers=n)) for n in (4, 6, 8))
REPEATS = 2


def problem(arm: Arm, seed: int) -> Problem:
    """Ten rows of the seed, and a small energy."""
    rng = torch.Generator().manual_seed(seed)
    return Problem(ms.energies.MLP(2, hidden=(4,)), torch.randn(10, 2, generator=rng))


def trials_of(arms: tuple[Arm, ...]) -> Trials:
    settings = {"steps": 3, "log_every": 1, "batch_size": None, "reference": "gaussian"}
    return Trials(arms, problem, settings, REPEATS, keep=lambda trial, at, run: run.steps + len(run.history))


def body(bench: Bench) -> list[Row]:
    """All arms, then the first again, which is trained for longer where the others say so."""
    Path(bench.folder / "seen.txt").write_text("a picture")
    found = trials_of(ARMS).run(bench)
    last = found["pcd/8"][0].curves["energy_gap"][-1]
    found |= trials_of((Arm(f"again/{last}", M.PersistentCD(walkers=5)),)).run(bench)
    bench.say("rows")
    return [row for name, own in found.items() for row in rows_of(name, own)]


def rows_of(name: str, own: list[Trial]) -> list[Row]:
    return [
        Row(f"{name}/{i}/{step}", value)
        for i, trial in enumerate(own)
        for step, value in enumerate([*trial.curves["energy_gap"], trial.kept])
    ]


def begun(made: list[str], bad: str, bench: Bench, name: str) -> int:
    """A trial that is no training, and notes who makes it."""

    def make() -> int:
        made.append(name)
        time.sleep(0.3 if name == "three" else 0)
        if name == bad:
            raise InputError(f"{name} is no good")
        return len(name)

    return bench.finished.once(name, make)[0]


def run(folder: str, work: Any = body) -> tuple[Any, list[str]]:
    """What each process returns, and what it says."""
    said: list[str] = []
    own = Experiment("own", "a title", "a paper", {"smoke": {}}, work)
    result = reproduce(own, "smoke", 0, Path(folder), device="cpu", say=said.append)
    return [row.as_json() for row in result.rows], said


def kept_in(folder: Path) -> dict[str, Any]:
    """What each trial was made with, by its name."""
    return {
        path.stem: json.loads(path.read_text())["settings"] for path in (folder / "trials").glob("*.json")
    }


@pytest.mark.parametrize("count", [2, 3])
def test_processes_that_share_trials_have_the_rows_of_one(tmp_path, count):
    (rows, words), every = run(str(tmp_path / "one")), on(count, run, str(tmp_path / "many"))
    trials = len(ARMS) * REPEATS + REPEATS
    assert len(words) == trials + 1
    assert [own for own, _ in every] == [rows] * count
    assert json.loads((tmp_path / "many/result.json").read_text())["rows"] == rows
    assert len(kept_in(tmp_path / "one")) == trials
    assert kept_in(tmp_path / "many") == kept_in(tmp_path / "one")
    assert {path.name for path in (tmp_path / "many").iterdir()} == {
        path.name for path in (tmp_path / "one").iterdir()
    }
    said = [line for _, own in every for line in own]
    assert f"{count} processes share the trials" in said[0]
    assert sorted(said[1:]) == sorted(words)  # every trial by one of them, and the rows by the first
    assert "rows" in every[0][1]


def notes(bench: Bench, made: list[str], bad: str) -> list[Row]:
    found = bench.finished.each([partial(begun, made, bad, bench, name) for name in NAMES])
    return [Row(name, value) for name, value in zip(NAMES, found, strict=True)]


NAMES = ("one", "three", "seventeen", "four", "eleven")


def made_by(folder: str, bad: str = "") -> tuple[Any, list[str]]:
    """Rows, and which trials this process made."""
    made: list[str] = []
    rows, _ = run(folder, partial(notes, made=made, bad=bad))
    return rows, made


def test_trials_that_are_kept_are_taken_by_any_number_of_processes(tmp_path):
    rows, made = made_by(str(tmp_path))
    assert made == list(NAMES)
    seconds = json.loads((tmp_path / "result.json").read_text())["seconds"]
    for i, name in ((4, "four"), (5, "eleven")):
        (tmp_path / "trials" / f"00{i}-{name}.json").unlink()
    path = tmp_path / "trials/001-one.json"
    path.write_text(path.read_text().replace('"seconds": ', '"seconds": 10'))  # its hash is another now
    every = on(2, made_by, str(tmp_path))
    assert [own for own, _ in every] == [rows] * 2
    assert sorted(name for _, made in every for name in made) == ["eleven", "four", "one"]
    assert 0.3 < json.loads((tmp_path / "result.json").read_text())["seconds"] < seconds + 10  # of three, too


def test_a_trial_that_fails_ends_all_and_those_that_are_done_stay(tmp_path):
    every = on(2, made_by, str(tmp_path), "four")
    own = [words for words in every if words == "InputError: four is no good"]
    other = [words for words in every if words not in own]
    assert len(own) == len(other) == 1
    who = every.index(own[0])
    assert other[0].startswith(f"ProcessError: process {who} ended (")
    kept = sum(len(list((tmp_path / "trials").glob(f"*-{name}.json"))) for name in NAMES)
    made = made_by(str(tmp_path))[1]
    assert len(made) == len(NAMES) - kept
    assert "four" in made


def untried(bench: Bench, calls: str) -> list[Row]:
    with open(calls, "a") as file:
        file.write(f"{os.getpid()}\n")
    with processes.together():  # of one process, for the moment
        return [Row("processes", processes.count())]


def test_what_is_no_trial_is_done_by_the_first(tmp_path):
    calls = tmp_path / "calls"
    every = on(2, run, str(tmp_path / "out"), partial(untried, calls=str(calls)))
    assert len(calls.read_text().split()) == 1
    assert [rows[0]["value"] for rows, _ in every] == [1, 1]
    assert every[0][1][-1] == "there were no trials to share: the first process did everything"
    assert every[1][1] == []


def compared(folder: str) -> tuple[Any, ...]:
    trainer = TrainerConfig(steps=4, device="cpu", log_every=1)
    methods = [M.PersistentCD(walkers=8), M.ContrastiveDivergence(), M.Jarzynski(walkers=64)]
    unjudged = partial(ms.fit, evaluate=False)  # what a judge finds is none of this
    with patch("metastable.compare.fit", unjudged):
        found = compare_methods("mlp", load_array("toy:two-modes?n=60"), methods, folder, trainer=trainer)
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in found.rows]
    return rows, found.truth, found.interrupted


def test_processes_that_share_methods_have_the_table_of_one(tmp_path):
    alone, every = compared(str(tmp_path / "one")), on(2, compared, str(tmp_path / "many"))
    assert [row["method"] for row in alone[0]] == ["pcd", "cd", "jarzynski"]
    assert every == [alone, alone]
    tables = [json.loads((tmp_path / name / "compare.json").read_text()) for name in ("one", "many")]
    for table in tables:
        assert [row.pop("seconds") > 0 for row in table["rows"]] == [True] * 3
    assert tables[0] == tables[1]
    files = [
        {path.relative_to(folder) for path in folder.rglob("*")}
        for folder in (tmp_path / "one", tmp_path / "many")
    ]
    assert files[0] == files[1]


def compared_otherwise(folder: str) -> str:
    """Methods that each process was given with other settings."""
    method, data = M.PersistentCD(walkers=8 + processes.rank()), load_array("toy:two-modes?n=60")
    try:
        compare_methods("mlp", data, [method], folder, trainer=TrainerConfig(steps=2, device="cpu"))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_comparison_that_differs_between_processes_is_refused_before_anything_is_written(tmp_path):
    rule = "compare: must be the same in all processes, and process 1 has another than 0"
    assert on(2, compared_otherwise, str(tmp_path / "c")) == [f"{rule}: methods.pcd.walkers is 9, not 8"] * 2
    assert not (tmp_path / "c").exists()


def by_one(folder: str) -> tuple[Any, ...]:
    """All of it by a process that is alone for the moment."""
    rows, _ = processes.by_first(lambda: run(f"{folder}/trials"))
    return len(rows), [row["method"] for row in processes.by_first(lambda: compared(f"{folder}/methods"))[0]]


def test_a_process_that_is_alone_for_the_moment_waits_for_nobody(tmp_path):
    assert on(2, by_one, str(tmp_path)) == [(32, ["pcd", "cd", "jarzynski"])] * 2


def signalled(folder: str) -> tuple[Any, ...]:
    """One method, of which the process that does not train it is told to stop while it waits."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exchanged, fit = processes.exchanged, partial(ms.fit, evaluate=False)

    def waiting(key: str, word: str) -> list[str]:
        if word == "{}":
            Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return exchanged(key, word)

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.5)
        return fit(*args, **options)

    trainer, data = TrainerConfig(steps=2, device="cpu"), load_array("toy:two-modes?n=60")
    with patch("metastable.compare.fit", slow), patch.object(processes, "exchanged", waiting):
        found = compare_methods("mlp", data, [M.PersistentCD(walkers=8)], folder, trainer=trainer)
    return [row["status"] for row in found.rows], (Path(folder) / "report.html").is_file()


def test_a_process_that_waits_for_rows_has_them_though_all_are_told_to_stop(tmp_path):
    assert on(2, signalled, str(tmp_path)) == [(["finished"], True)] * 2


@pytest.mark.parametrize(("rank", "says"), [("0", True), ("1", False)])
def test_commands_for_one_process_refuse_a_launcher_and_one_process_says_so(rank, says, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    done = CliRunner().invoke(app, ["report", "nowhere"])
    assert done.exit_code == 2
    assert ("report: works in one process, and 2 were started" in done.output) == says
