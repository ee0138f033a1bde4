"""Trials that are done are kept, and taken by the command that goes on; what comes out is the same to the bit."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from metastable.core.errors import DivergenceError, InputError, UnsupportedError
from metastable.core.random import generator
from metastable.experiments import EXPERIMENTS, finished, rnce_2d
from metastable.experiments import trials as room
from metastable.experiments.base import Bench, Experiment, Row, reproduce
from metastable.experiments.finished import Finished, joined, parted, processes
from metastable.experiments.gmm import student, teacher
from metastable.experiments.pieces import Pieces
from metastable.experiments.trials import Arm, Problem, Trial, Trials, draw_curves
from metastable.methods import Jarzynski, PersistentCD
from metastable.report.figures import picture


class Inner(NamedTuple):
    """A part of what is kept."""

    path: Tensor
    names: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """What is kept of a trial."""

    kl: float
    inner: Inner | None
    counts: np.ndarray


ARMS = (Arm("slow/K=1", PersistentCD(walkers=4)), Arm("wild", PersistentCD(walkers=8), {"stop": 3}))


def body(bench: Bench) -> list[Row]:
    """Two arms on two repeats, then one arm again under the same name on another problem."""

    def keep(trial: Trial, at: Problem, run: Any) -> Ended:
        return Ended(float(run.sum()) / 3, Inner(run, ("a", "b")), run.double().numpy() > 0)

    def trials(start: float, arms: tuple[Arm, ...]) -> dict[str, list[Trial]]:
        return Trials(
            arms,
            lambda arm, seed: Problem(start, None),
            {"steps": bench.steps},
            2,
            watch=lambda at, line: {"twice": 2 * line["loss"]},
            keep=keep,
            may_stop=True,
            words=lambda trial: "done",
            records=(Ended, Inner),
        ).run(bench)

    rows = []
    for start, arms in ((0.0, ARMS), (1.0, ARMS[:1])):
        for name, own in trials(start, arms).items():
            for i, trial in enumerate(own):
                curves = np.stack([trial.curves[key] for key in ("step", "loss", "twice", "rare")])
                np.save(bench.folder / f"{name[:4]}-{start:g}-{i}.npy", curves)
                kept, stopped = trial.kept, float(trial.stopped or 0)
                rows += [Row(f"stopped/{name}/{i}", stopped), Row(f"seed/{name}/{i}", trial.seed)]
                if kept is not None:
                    rows.append(Row(f"kl/{name}/{i}/{kept.inner.names}", kept.kl))
                    rows += [Row("x", v) for v in (kept.inner.path.exp() * kept.counts).tolist()]
    return rows


EXPERIMENT = Experiment("tiny", "a title", "a paper", {"smoke": {"steps": 4}, "cpu": {"steps": 4}}, body)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """A fit that draws from its seed; its calls. The one after as many as `LIMIT` says is stopped by a signal."""
    made: list[int] = []

    def fit(model, data, method, steps, *, seed, progress, stop=None, **settings):
        if len(made) == LIMIT.get("calls"):
            raise KeyboardInterrupt
        made.append(seed)
        rng, x = generator(seed), torch.zeros(3)
        for step in range(1, steps + 1):
            if step == stop:
                raise DivergenceError("energies explode", step=step)
            x = model + x + torch.randn(3, generator=rng) / method.walkers
            progress({"step": step, "loss": float(x[0]), **({"rare": math.inf} if step == 1 else {})})
        return x

    monkeypatch.setattr(room, "fit", fit)
    LIMIT.clear()
    return made


LIMIT: dict[str, int] = {}


def run(folder: Path, seed: int = 0, scale: str = "smoke", **more: Any) -> tuple[list[Any], list[str]]:
    """Rows of a run, and what was said."""
    said: list[str] = []
    reproduce(EXPERIMENT, scale, seed, folder, device="cpu", say=said.append, **more)
    return json.loads((folder / "result.json").read_text())["rows"], said


def curves_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.npy")}


@pytest.mark.parametrize("done", [0, 1, 3, 5, 6])
def test_an_experiment_that_was_stopped_goes_on_where_it_was(calls, tmp_path, done):
    rows, _ = run(tmp_path / "whole")
    assert len(calls) == 6
    calls.clear()
    LIMIT["calls"] = done
    if done < 6:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "stopped")
    else:
        run(tmp_path / "stopped")
    assert len(calls) == done
    LIMIT.clear()
    again, said = run(tmp_path / "stopped")
    assert len(calls) == 6
    assert again == rows
    assert curves_in(tmp_path / "stopped") == curves_in(tmp_path / "whole")
    assert [text.endswith("(made before)") for text in said] == [True] * done + [False] * (6 - done)


@pytest.mark.parametrize("change", ["seed", "setting", "scale", "method", "fit", "code"])
def test_a_trial_that_was_made_otherwise_is_not_taken(calls, tmp_path, monkeypatch, change):
    run(tmp_path)
    calls.clear()
    more: dict[str, Any] = {}
    match change:
        case "seed":
            more = {"seed": 1}
        case "scale":
            more = {"scale": "cpu"}
        case "setting":
            more = {"changes": {"steps": 5}}
        case "method":
            other = tuple(replace(arm, method=PersistentCD(walkers=5)) for arm in ARMS)
            monkeypatch.setitem(globals(), "ARMS", other)
        case "fit":
            other = tuple(replace(arm, settings={**arm.settings, "clip": 1}) for arm in ARMS)
            monkeypatch.setitem(globals(), "ARMS", other)
        case "code":
            monkeypatch.setattr(finished, "code", lambda: "another")
    _, said = run(tmp_path, **more)
    assert len(calls) == 6
    assert sum("is made anew" in text for text in said) == 6
    calls.clear()
    _, said = run(tmp_path, **more)
    assert calls == []


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def another_digit(path: Path) -> None:
    kept = json.loads(path.read_text())
    kept["numbers"]["value"]["$tuple"][0][1]["loss"] += 1e-9
    path.write_text(json.dumps(kept))


def bent(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        (".json", halved),
        (".json", another_digit),
        (".json", lambda path: path.write_text("[]")),
        (".json", lambda path: path.write_bytes(b"\xff")),
        (".npz", halved),
        (".npz", bent),
        (".npz", Path.unlink),
    ],
)
def test_a_damaged_file_is_made_anew_and_named(calls, tmp_path, suffix, damage):
    rows, _ = run(tmp_path)
    calls.clear()
    (path,) = (tmp_path / "trials").glob(f"003-*{suffix}")
    damage(path)
    again, said = run(tmp_path)
    assert again == rows
    assert len(calls) == 1
    (named,) = [text for text in said if "is made anew" in text]
    assert "003-slow-K=1-repeat-1.json" in named
    calls.clear()
    run(tmp_path)
    assert calls == []


def test_files_hold_no_code_and_no_half_is_left(calls, tmp_path):
    run(tmp_path)
    files = sorted((tmp_path / "trials").iterdir())
    assert [path.suffix for path in files] == [".json", ".npz"] * 6
    kept = json.loads(files[0].read_text())
    assert {"seed": 0, "scale": "smoke", "settings.steps": 4}.items() <= kept["settings"].items()
    assert kept["settings"]["trial_seed"] == calls[0]
    with np.load(files[1], allow_pickle=False) as arrays:
        assert all(arrays[name].dtype != object for name in arrays.files)


def test_seconds_of_trials_that_were_taken_count(calls, tmp_path):
    run(tmp_path)
    for path in (tmp_path / "trials").glob("*.json"):
        name, found = path.stem, json.loads(path.read_text())
        pieces = Pieces(path.parent, found["settings"])
        piece = pieces.find(name)
        assert piece is not None
        pieces.keep(name, {**piece.numbers, "seconds": 100.0}, piece.arrays)
    run(tmp_path)
    assert 600 <= json.loads((tmp_path / "result.json").read_text())["seconds"] < 650


def test_seconds_of_trials_add_up_to_the_time_that_went_by(tmp_path):
    kept = Finished(tmp_path)
    began = kept.last
    for slot in [kept.slot(name) for name in "ab"]:  # both are asked for at first, as of several processes
        slot.keep(1.0)
    seconds = [json.loads(path.read_text())["numbers"]["seconds"] for path in tmp_path.glob("*.json")]
    assert sum(seconds) == pytest.approx(kept.last - began, abs=1e-9)
    assert min(seconds) > 0


@pytest.mark.parametrize("call", [(math.sqrt, 4.0), (math.sqrt, -1.0)])
def test_what_another_process_gave_is_kept_unless_it_failed(tmp_path, call):
    results: list[Any] = []
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            future = Finished(tmp_path).submit(pool, "root", *call)
        results.append(future.exception() or future.result())
    assert repr(results[0]) == repr(results[1])
    assert len(list(tmp_path.glob("*.json"))) == (call[1] > 0)


def test_after_an_error_processes_begin_nothing_more(monkeypatch):
    monkeypatch.setattr(finished, "ProcessPoolExecutor", lambda count, *_, **__: ThreadPoolExecutor(count))
    futures: list[Future[None]] = []

    def stopped() -> None:
        with processes(1) as pool:
            futures.extend(pool.submit(time.sleep, 0.01) for _ in range(50))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert futures[-1].cancelled()


ORPHAN = """
import os, time
from metastable.experiments.finished import processes
if __name__ == "__main__":
    with processes(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 60)
        time.sleep(60)
"""


def test_processes_end_with_the_one_that_began_them(tmp_path):
    (script := tmp_path / "killed.py").write_text(ORPHAN)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline()  # the worker is there, and holds the other end of the pipe
        parent.kill()
        try:
            parent.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            pytest.fail("it went on by itself")


def test_values_come_back_as_they_were():
    value = {
        "numbers": [1, -0.0, 1e-310, math.inf, True, None, "β"],
        "ended": Ended(0.1 + 0.2, Inner(torch.tensor([[1.5], [math.nan]]), ()), np.arange(3)),
        "none": Ended(math.nan, None, np.array(2.0)),
        "nested": ((1, [2.0]), {}, np.float32(0.1), np.int64(3)),
    }
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(parted(value, arrays, (Ended, Inner)))
    back = joined(json.loads(text), arrays, (Ended, Inner))
    assert repr(back) == repr(value)
    assert back["ended"].inner.path.dtype == torch.float32
    assert type(back["nested"][2]) is np.float32


@pytest.mark.parametrize(
    "value",
    [
        Inner(torch.ones(1), ()),
        Ended(0.0, None, np.ones(1)),
        np.array([{}]),
        {1: 2},
        {"$x": 1},
        {1},
    ],
    ids=str,
)
def test_what_would_not_come_back_is_refused(value):
    with pytest.raises(UnsupportedError, match="cannot be kept of a trial"):
        parted(value, {})


def test_what_cannot_be_kept_is_said_and_stops_nothing(tmp_path):
    said: list[str] = []
    made, before = Finished(tmp_path, say=said.append).once("odd", lambda: {1, 2})
    assert (made, before) == ({1, 2}, False)
    assert said == ["001-odd is not kept: keep: a set cannot be kept of a trial; name it in `records`"]
    assert list(tmp_path.iterdir()) == []


def test_a_bench_without_a_folder_keeps_nothing(tmp_path):
    slot = Finished().slot("a")
    slot.keep(1.0)
    assert slot.find() is None


def test_a_damaged_piece_is_refused_by_name(tmp_path):
    pieces = Pieces(tmp_path, {"seed": 0})
    pieces.keep("a-1", {"fid": np.float64(3.5)}, {"x": np.ones(2)})
    piece = pieces.find("a-1")
    assert piece is not None
    assert piece.numbers == {"fid": 3.5}
    halved(tmp_path / "a-1.npz")
    with pytest.raises(InputError, match=r"a-1\.json or its arrays are damaged"):
        pieces.find("a-1")
    pieces.keep("a-1", {"fid": 1.0}, {})
    kept = json.loads((tmp_path / "a-1.json").read_text())
    del kept["sha256"]  # as older commands wrote it
    (tmp_path / "a-1.json").write_text(json.dumps(kept))
    assert pieces.find("a-1") is not None


def test_jobs_of_several_processes_are_kept_and_come_in_their_order(tmp_path, monkeypatch):
    learned: list[str] = []

    def learn(job: rnce_2d.Job) -> rnce_2d.Outcome:
        learned.append(job.toy)
        x = torch.randn((2, 3), generator=generator(job.seed)).numpy()
        return rnce_2d.Outcome(job, x, float(x.sum()), 7, rnce_2d.Likelihood(0.5, (1.0,), ()), (2.0, 1.0))

    monkeypatch.setattr(rnce_2d, "learn", learn)
    settings = {**EXPERIMENTS["rnce-2d"].scales["smoke"], "workers": 1}
    said: list[str] = []

    def bench() -> Bench:
        kept = Finished(tmp_path, {"seed": 0}, said.append)
        return Bench(settings, "smoke", 0, "cpu", tmp_path, said.append, kept)

    todo = rnce_2d.jobs(bench())
    whole = rnce_2d.learn_all(bench(), todo)
    for path in tmp_path.glob("002-*"):
        path.unlink()
    learned.clear()
    again = rnce_2d.learn_all(bench(), todo)
    assert learned == [todo[1].toy]
    assert [o.job for o in again] == todo
    assert all(
        np.array_equal(a.samples, b.samples) and a[2:] == b[2:] for a, b in zip(whole, again, strict=True)
    )


def real_body(bench: Bench) -> list[Row]:
    """Two modes that are really learned, and a picture of their weights."""
    arms = [Arm("pcd", PersistentCD(walkers=8)), Arm("jarzynski", Jarzynski(walkers=8, held_out=0.0))]
    trials = Trials(
        arms,
        lambda arm, seed: Problem(student(2, seed), teacher(20, 2, -10.0, 6.0, 0.25, seed).x),
        {"steps": 3, "batch_size": None, "device": "cpu"},
        2,
        watch=lambda at, line: {"mass": at.model.first_mass()},
    )
    one, two = trials.run(bench).values()
    with picture(bench.folder / "masses.png", 3, 2) as axes:
        draw_curves(axes, [*one, *two], "mass", "black")
    return [Row("mass", float(trial.curves["mass"][-1])) for trial in (*one, *two)]


def test_real_trainings_go_on_to_the_bit(tmp_path):
    experiment, results = replace(EXPERIMENT, body=real_body), []
    for _ in range(2):
        reproduce(experiment, "smoke", 3, tmp_path, device="cpu")
        rows = json.loads((tmp_path / "result.json").read_text())["rows"]
        results.append((rows, (tmp_path / "masses.png").read_bytes()))
        for name in ("002-jarzynski-repeat-0", "003-pcd-repeat-1"):
            (tmp_path / "trials" / f"{name}.json").unlink()
    assert all(0 < row["value"] < 1 and row["value"] != 0.5 for row in results[0][0])
    assert results[0] == results[1]
