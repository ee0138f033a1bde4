"""Long work says how far it is, and Ctrl-C keeps what is done."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import rough_log_partition
from fuzz import app, make_run, quick
from typer.testing import CliRunner

import metastable as ms
from metastable.cli import bars
from metastable.cli.rollout import _episodes
from metastable.core.errors import InputError
from metastable.core.telling import counted, listening
from metastable.policies import rollouts
from metastable.summary.density import Density


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with quick():
        yield make_run(tmp_path_factory.mktemp("run"))


def test_log_z_tells_of_every_temperature_and_the_same_number():
    heard: list[tuple[str, int, int]] = []
    silent = rough_log_partition(ms.energies.Banana(), seed=0)
    with listening(lambda *told: heard.append(told)):
        told = rough_log_partition(ms.energies.Banana(), seed=0)
    assert told.value == silent.value
    walked = [(done, total) for what, done, total in heard if what == "log Z"]
    assert walked == [(k + 1, len(walked)) for k in range(len(walked))]
    assert len(walked) > 1
    assert any("drift" in what for what, _, _ in heard)
    list(counted("nobody listens", 2))
    assert "nobody listens" not in {what for what, _, _ in heard}


def interrupt(self: Any, judged: Any) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_in_an_evaluation_keeps_what_was_found(run, monkeypatch, tmp_path):
    out = tmp_path / "e.json"
    whole = CliRunner().invoke(app, ["evaluate", str(run), "--out", str(out)])
    assert whole.exit_code == 0, whole.output
    before = json.loads(out.read_text())
    monkeypatch.setattr(Density, "applies", lambda self, judged: True)
    monkeypatch.setattr(Density, "measure", interrupt)
    stopped = CliRunner().invoke(app, ["evaluate", str(run), "--out", str(out)])
    assert stopped.exit_code == 130
    assert "stopped by Ctrl-C at the section 'density'" in stopped.stderr
    assert json.loads(out.read_text()) == before | {"stopped_at": "density"}


def test_ctrl_c_while_a_training_is_judged_keeps_the_scores_so_far(run, monkeypatch, tmp_path):
    monkeypatch.setattr(Density, "measure", interrupt)
    shutil.copytree(run, tmp_path / "run")
    done = CliRunner().invoke(app, ["train", "--resume", "--out", str(tmp_path / "run"), "--no-progress"])
    assert done.exit_code == 130, done.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert "log_likelihood" in summary["scores"]
    assert "section 'density'" in summary["ended"]


def test_a_section_that_cannot_be_measured_does_not_lose_the_training(run, monkeypatch, tmp_path):
    def cannot(self: Any, judged: Any) -> None:
        raise InputError("nothing to measure")

    monkeypatch.setattr(Density, "measure", cannot)
    shutil.copytree(run, tmp_path / "run")
    done = CliRunner().invoke(app, ["train", "--resume", "--out", str(tmp_path / "run"), "--no-progress"])
    assert done.exit_code == 0, done.output
    assert "Judging was stopped at its section 'density', by nothing to measure" in done.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert "log_likelihood" in summary["scores"]


def test_a_line_for_each_kind_of_work_begins_anew_with_it():
    from rich.progress import Progress

    progress = Progress(disable=True)
    with listening(bars.shown_on(progress)):
        for n in (3, 5):
            list(counted("log Z", n))
        list(counted("sections judged", 2))
    assert [(t.description, t.completed, t.total) for t in progress.tasks] == [
        ("log Z", 5, 5),
        ("sections judged", 2, 2),
    ]


ROWS = ("train", "--data", "toy:two-modes?n=50", "--method", "cd", "--set", "energy.hidden=[4]")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("sample", "RUN", "--n", "8", "--steps", "2"), ("sampling", "moving walkers", "2/2")),
        (
            ("restore", "RUN", "--images", "toy:two-modes", "--noise", "0.5", "--steps", "2"),
            ("restoring", "2/2"),
        ),
        (("score", "RUN", "--data", "toy:two-modes?n=20"), ("scoring",)),
        ((*ROWS, "--dry-run"), ("trying to begin",)),
        ((*ROWS, "--steps", "3"), ("first updates",)),
    ],
)
def test_a_terminal_is_told_that_work_goes_on(run, monkeypatch, tmp_path, words, shown):
    monkeypatch.chdir(tmp_path)
    command = [str(run) if word == "RUN" else word for word in words]
    silent = CliRunner().invoke(app, command)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    told = CliRunner().invoke(app, command)
    assert told.exit_code == silent.exit_code == 0, told.output
    for line in shown:
        assert line in told.stderr
        assert line not in silent.output
    assert not any(line in told.stdout for line in shown)


def test_pictures_that_are_judged_have_one_bar_for_all(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    features = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    features.side = 0  # pictures as they are
    torch.jit.script(features).save("parts.pt")
    for name, seed in (("a", 0), ("b", 1)):
        np.save(f"{name}.npy", np.random.default_rng(seed).uniform(-1, 1, (8, 1, 4, 4)))
    words = ["evaluate", "--samples", "a.npy", "--reference", "b.npy"]
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    told = CliRunner().invoke(app, [*words, "--inception", "parts.pt"])
    assert told.exit_code == 0, told.output
    assert "judging" in told.stderr
    assert "8/8" in told.stderr
    assert "judging" not in told.stdout


def test_a_rollout_behind_a_pipe_leaves_no_empty_line(monkeypatch, capsys):
    heard = []
    monkeypatch.setattr(rollouts, "rollout_pusht", lambda *_, on_step, **__: heard.append(on_step))
    policy: Any = SimpleNamespace(scaling=SimpleNamespace(pictures={}))
    _episodes(policy, "pusht", {}, 1, 1)
    assert heard == [None]
    assert capsys.readouterr() == ("", "")
