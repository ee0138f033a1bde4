"""Rows of suites as a file, one for each device."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from metastable._version import __version__
from metastable.experiments.base import Row
from metastable.runs.folder import write_json


def device_name() -> str:
    """The GPU, or the kind of CPU where there is none, as a file may be called.

    >>> re.fullmatch("[a-z0-9-]+", device_name()) is not None
    True
    """
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu {platform.machine()}"
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def write_rows(folder: Path, suites: Mapping[str, Sequence[Row]], partly: bool = False) -> Path:
    """Write the rows of some suites to DEVICE.json; suites that it holds already and are not given stay.

    So do, of suites that were run partly, rows that are not given.
    """
    path = folder / f"{device_name()}.json"
    before = json.loads(path.read_text()) if path.exists() else {"suites": {}}
    held = before["suites"]
    about = {"device": device_name(), "torch": torch.__version__, "metastable": __version__}
    measured_with = {name: torch_of(before, name) for name in held}
    for name in suites:
        both = [measured_with[name]] if partly and held.get(name) else []
        measured_with[name] = " and ".join(dict.fromkeys((*both, torch.__version__)))
    rows = {name: [row.as_json() for row in rows] for name, rows in suites.items()}
    if partly:
        for name, new in rows.items():
            by_metric = {row["metric"]: row for row in (*held.get(name, ()), *new)}
            rows[name] = list(by_metric.values())
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, about | {"torch_of": measured_with, "suites": held | rows})
    return path


def torch_of(held: Mapping[str, Any], suite: str) -> str:
    """The version of torch that a suite of such a file was measured with; of older files that of the last write."""
    return held.get("torch_of", {}).get(suite, held["torch"])
