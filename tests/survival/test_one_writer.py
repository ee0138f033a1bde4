"""One process writes to a folder; another run's files, and files that changed, are named."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from fuzz import call, make_run, quick

import metastable as ms
from metastable.core.errors import CheckpointError, InputError
from metastable.core.seals import SEALS
from metastable.runs import lock
from metastable.runs.lock import LOCK, one_writer

DATA = torch.randn((40, 2), generator=torch.Generator().manual_seed(0))
METHOD = ms.methods.Jarzynski(walkers=16, populations=2, step_size=0.05)
ENERGY = {"name": "mlp", "hidden": [4], "reference": "gaussian"}


def train(folder: Path, **settings):
    options = {"steps": 4, "batch_size": 16, "log_every": 1, "evaluate": False, **settings}
    return ms.fit(ENERGY, DATA, METHOD, out=folder, learning_rate=1e-3, **options)


def hold(folder: str) -> None:
    with one_writer(Path(folder)):
        Path(folder, "held").touch()
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    """Another process that writes to the folder."""
    process = multiprocessing.get_context("fork").Process(target=hold, args=(str(tmp_path),))
    process.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    (tmp_path / "held").unlink()
    yield process
    process.kill()
    process.join()


def test_a_second_writer_is_refused_with_the_id_of_the_first_until_that_is_gone(holder, tmp_path):
    with pytest.raises(InputError, match=f"is being written by process {holder.pid} on "):
        train(tmp_path)
    assert not (tmp_path / "config.json").exists()
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert (tmp_path / LOCK).exists()
    assert train(tmp_path).history[-1]["step"] == 4  # a stale lock holds nobody
    assert not (tmp_path / LOCK).exists()


def test_two_live_writers_leave_the_file_of_the_first(tmp_path):
    """The second tries again and again while the first trains, and nothing of it is in the folder."""
    said = []

    def disturb(row):
        if row["step"] > 3:
            return
        for resume in (False, True):
            other = multiprocessing.get_context("fork").Process(
                target=second, args=(str(tmp_path / "a"), resume)
            )
            other.start()
            other.join()
            said.append(other.exitcode)

    train(tmp_path / "a", progress=disturb)
    train(tmp_path / "b")
    assert said == [TAKEN, REFUSED] * 3
    rows = [
        [
            {k: v for k, v in json.loads(line).items() if k != "seconds"}
            for line in path.read_text().splitlines()
        ]
        for path in (tmp_path / "a" / "metrics.jsonl", tmp_path / "b" / "metrics.jsonl")
    ]
    assert rows[0] == rows[1]
    assert [row["step"] for row in rows[0]] == [1, 2, 3, 4]


TAKEN, REFUSED = 16, 17


def second(folder: str, resume: bool) -> None:
    """Another process at the same training; its status says whether it was refused with the id of the first."""
    try:
        train(Path(folder), resume=resume)
    except InputError as error:
        held = f"is being written by process {os.getppid()} on" in str(error)
        os._exit(REFUSED if held else TAKEN if "already holds a run" in str(error) else 1)
    os._exit(0)


def test_the_lock_of_another_machine_holds_while_its_checkpoints_are_young(monkeypatch, tmp_path):
    (tmp_path / LOCK).write_text(json.dumps({"pid": 7, "host": "elsewhere", "since": "noon"}))
    with pytest.raises(InputError, match="process 7 on elsewhere, since noon"):
        train(tmp_path)
    monkeypatch.setattr(lock, "YOUNG", -1.0)
    assert train(tmp_path).history[-1]["step"] == 4


def test_leftovers_of_a_kill_do_not_make_a_folder_unusable(tmp_path):
    for name in ("config.json.partial", "samples.npy.partial", LOCK):
        (tmp_path / name).write_text("half")
    assert train(tmp_path).history[-1]["step"] == 4


def test_a_checkpoint_of_another_run_is_named(tmp_path):
    train(tmp_path / "a")
    train(tmp_path / "b", seed=1)
    last = Path("checkpoints", "step-00000004")
    shutil.rmtree(tmp_path / "a" / last)
    shutil.copytree(tmp_path / "b" / last, tmp_path / "a" / last)
    with pytest.warns(RuntimeWarning, match="step-00000004: is of another run"):
        run = ms.load_run(tmp_path / "a")
    assert run.kept == 0
    shutil.rmtree(tmp_path / "a" / "checkpoints" / "step-00000000")
    with pytest.raises(CheckpointError, match="is of another run"), warnings.catch_warnings(action="ignore"):
        ms.load_run(tmp_path / "a")


# ---- flipped bits


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    with quick():
        yield make_run(tmp_path_factory.mktemp("run"))


def flipped(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1 << (at % 8)
    path.write_bytes(content)


@pytest.mark.parametrize("bits", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_a_flipped_bit_anywhere_in_a_run_is_named(bits, finished, tmp_path):
    """Of every file of a run, some bit; the page is made anew from the others, and only its own bits are lost."""
    names = [
        p.relative_to(finished)
        for p in sorted(finished.rglob("*"))
        if p.is_file() and p.name != "report.html"
    ]
    assert {"samples.npy", "metrics.jsonl", "summary.json", "config.json", SEALS} <= {
        str(name) for name in names
    }
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    for i in range(max(bits, len(names))):
        name = names[i % len(names)]
        before = (folder / name).read_bytes()
        flipped(folder / name, 7919 * (i + 1))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            said = ""
            for command in (ms.load_run, ms.report.write_report):
                try:
                    command(folder)
                except (InputError, CheckpointError) as error:
                    said += str(error)
        everything = said + " ".join(str(warning.message) for warning in told)
        step = name.parent.name if name.parent.name.startswith("step-") else ""
        older = step not in ("", "step-00000004")  # harmless: nobody reads it while a newer one is whole
        assert name.name in everything or (step and step in everything) or older, (name, i)
        (folder / name).write_bytes(before)


def test_a_folder_without_seals_is_read_as_it_is(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "old")
    (tmp_path / "old" / SEALS).unlink()
    with warnings.catch_warnings(action="error"):
        run = ms.load_run(tmp_path / "old")
    assert np.isfinite(run.log_partition.value)


def test_an_altered_log_is_named_when_training_goes_on(tmp_path):
    train(tmp_path, checkpoint_every=2)
    log = tmp_path / "metrics.jsonl"
    log.write_text(log.read_text().replace('"step": 1,', '"step": 1, "made_up": 1.0,'))
    with pytest.warns(UserWarning, match=r"metrics.jsonl: was altered since the checkpoint of update 4"):
        train(tmp_path, steps=6, resume=True)


def test_a_damaged_summary_or_log_is_refused_by_name(finished, tmp_path):
    for name, text in (
        ("summary.json", '{"scores": 3}'),
        ("metrics.jsonl", "[1]\n{}\n"),
        ("config.json", "{}"),
    ):
        folder = tmp_path / name
        shutil.copytree(finished, folder)
        (folder / SEALS).unlink()
        (folder / name).write_text(text)
        for command in ("evaluate", "sample"):
            status, wrong, said = call((command, str(folder), "--out", str(tmp_path / "x.npy")))
            assert (status, wrong) == (2, "")
            assert name in said
