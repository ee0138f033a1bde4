"""The first command of the README, on a table with columns in dollars, years, a code and a date."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from metastable.core.random import derive

from .scales import mixed_table

COMMAND = (sys.executable, "-c", "from metastable.cli.main import app; app()")
"""The command line of this very package, whether or not it is installed."""
COLUMNS = ("dollars", "years", "seen", "code")


def write_table(path: Path, rows: int, seed: int) -> None:
    """A table as somebody would have it, with a header."""
    table = mixed_table(rows, seed)
    code = np.random.default_rng(derive(seed, "codes")).integers(0, 3, rows)
    everything = np.column_stack([table, code])
    np.savetxt(path, everything, delimiter=",", header=",".join(COLUMNS), comments="", fmt="%.10g")


def first_command(rows: int, seed: int) -> dict[str, Any]:
    """Train as the README says, and read what came out.

    Returns:
        `finished`, `log_likelihood`, `problems` (findings that say so) and `columns_named` (in the report).
    """
    with tempfile.TemporaryDirectory() as place:
        table, run = Path(place) / "table.csv", Path(place) / "runs" / "first"
        write_table(table, rows, seed)
        words = ["train", "--data", str(table), "--method", "jarzynski"]
        words += ["--out", str(run), "--seed", str(seed)]
        done = subprocess.run([*COMMAND, *words, "--no-progress"], capture_output=True, check=False)
        if done.returncode != 0:
            return {"finished": 0.0, "log_likelihood": float("nan"), "problems": 1.0, "columns_named": 0.0}
        summary = json.loads((run / "summary.json").read_text())
        page = (run / "report.html").read_text()
    return {
        "finished": float(summary["status"] == "finished"),
        "log_likelihood": summary["scores"]["log_likelihood"],
        "problems": float(sum(f["severity"] == "problem" for f in summary["diagnosis"])),
        "columns_named": float(sum(f">{name}<" in page for name in COLUMNS)),
    }
