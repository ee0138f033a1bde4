"""Tutorials that make what their commands then read: every block runs in order, from an empty folder."""

from __future__ import annotations

import doctest
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from metastable.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```(pycon|console)\n(.*?)```", re.DOTALL)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_session(text: str, known: dict[str, Any], name: str) -> None:
    """A session in the words of all sessions before it."""
    session = doctest.DocTestParser().get_doctest(text, known, name, name, 0)
    result = doctest.DocTestRunner(optionflags=OPTIONS).run(session, clear_globs=False)
    known.update(session.globs)
    assert result.attempted
    assert not result.failed, text


def run_command(line: str) -> None:
    """A command, which says what is missing where the simulator is not installed."""
    said = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
    if "pusht" in line and importlib.util.find_spec("gym_pusht") is None:
        assert "metastable[policies]" in said.output, line
    else:
        assert said.exit_code == 0, f"{line}: {said.output} {said.exception!r}"


def test_a_policy_from_your_demonstrations_as_it_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/tutorials/policy.md"
    known, commands = {"__name__": "__main__"}, 0
    for kind, text in BLOCK.findall(page.read_text()):
        if kind == "pycon":
            run_session(text, known, page.name)
            continue
        for line in text.splitlines():
            if line.startswith("metastable "):
                run_command(line)
                commands += 1
    assert commands >= 3
    if importlib.util.find_spec("gym_pusht") is not None:
        assert {file.suffix for file in Path("runs/energy/rollouts").iterdir()} == {
            ".json",
            ".npz",
            ".html",
            ".gif",
        }


def test_a_command_that_reads_what_nobody_made_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="no such folder"):
        run_command("metastable rollout runs/paths --env path-planning")
