"""Tiny runs, made once, and the command line as a function."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import drawn, rough_log_z
from typer.testing import CliRunner, Result

from metastable.cli.main import app

TINY = [
    *("--steps", "5", "--no-progress", "--set", "energy.hidden=[8]", "--set", "trainer.log_every=1"),
    *("--set", "trainer.batch_size=64"),
]
DATA = "toy:two-modes?n=300"

Command = Callable[..., Result]


@pytest.fixture(scope="module", autouse=True)
def small_estimates(quickly_judged: None) -> None:
    """No command is asked for a sure log Z here."""


@pytest.fixture(scope="session")
def metastable() -> Command:
    """`metastable(*words)` runs the command in this process."""

    def run(*words: object) -> Result:
        return CliRunner().invoke(app, [str(word) for word in words])

    return run


@pytest.fixture
def refused(metastable: Command) -> Callable[..., str]:
    """`refused(*words)` checks that a command ends with status 2 and one line, and gives the line."""

    def run(*words: object) -> str:
        result = metastable(*words)
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        return result.stderr

    return run


def start(*words: object, cwd: Path | None = None) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "metastable.cli.main", *map(str, words)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def tiny_run(command: Command, folder: Path, method: str, **walkers: int) -> Path:
    more = [word for name, n in walkers.items() for word in ("--set", f"method.{name}={n}")]
    with rough_log_z():
        result = command("train", "--data", DATA, "--method", method, "--out", folder, *TINY, *more)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="session")
def run_folder(metastable: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished Jarzynski run; do not change it."""
    with drawn():
        return tiny_run(metastable, tmp_path_factory.mktemp("cli") / "jarzynski", "jarzynski", walkers=64)


@pytest.fixture(scope="session")
def pcd_folder(metastable: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a method without weights; do not change it."""
    return tiny_run(metastable, tmp_path_factory.mktemp("cli") / "pcd", "pcd", walkers=64)
