"""Results of one experiment that were made apart, an arm here and another there, as one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from metastable.core.errors import InputError, require
from metastable.report.read import read_object

from .base import Bench, Experiment, Result, Row, written

SAME = ("experiment", "scale", "seed", "version")
"""What all of them must agree on."""
TOLD = ("device", "seconds", "changes")
"""What is kept of each."""
FEW = 4
"""Arms that a picture's name tells."""


def row_of(content: Mapping[str, Any]) -> Row:
    """As `Row.as_json` wrote it; whether it holds is asked anew."""
    told = {key: value for key, value in content.items() if key != "ok"}
    return Row(**{**told, "value": math.nan if told["value"] is None else told["value"]})


def read(folder: Path) -> dict[str, Any]:
    """A result with its rows; what is none is refused by its name."""
    path = folder / "result.json"
    content = read_object(path)
    try:
        content["rows"] = [row_of(row) for row in content["rows"]]
        return {key: content[key] for key in (*SAME, "device", "seconds", "rows")} | content
    except (KeyError, TypeError) as error:
        raise InputError(f"join: {path} is no result of an experiment ({error})") from error


def parts_of(content: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """A result as one part, or the parts that it was joined of."""
    return content.get("parts") or [{key: content[key] for key in TOLD if key in content}]


def told(content: Mapping[str, Any], before: Collection[str]) -> list[Mapping[str, Any]]:
    """Its parts, without those that were asked for arms whose rows are all among those taken before."""
    new = {name for row in content["rows"] if row.metric not in before for name in row.metric.split("/")}
    asked = ((part, part.get("changes", {}).get("arms", ())) for part in parts_of(content))
    return [part for part, arms in asked if not arms or new & set(arms)]


def label_of(folder: Path, content: Mapping[str, Any]) -> str:
    """What sets the pictures of a result apart: its arms, where it was asked for a few, or its folder's name."""
    asked = [part.get("changes", {}).get("arms", ()) for part in parts_of(content)]
    arms = dict.fromkeys(arm for several in asked for arm in several)
    return "-".join(arms) if 0 < len(arms) <= FEW else folder.resolve().name


def gather(labelled: Sequence[tuple[Path, str]], out: Path) -> None:
    """Pictures of folders in one: the first has its name, another of that name its folder's label in it, too.

    Those of the first folder, which has no label, are made of all rows: others of their names are left behind.
    """
    made = {path.name for path in labelled[0][0].glob("*.png")}
    content: dict[str, bytes] = {}
    for folder, label in labelled:
        for path in sorted(folder.glob("*.png")):
            if path.name in made and label:
                continue
            data = path.read_bytes()
            ends = itertools.chain(("", f"-{label}"), (f"-{label}-{n}" for n in itertools.count(2)))
            names = (f"{path.stem}{end}.png" for end in ends)
            name = next(name for name in names if content.get(name, data) == data)
            content[name] = data
    for name, data in content.items():
        (out / name).write_bytes(data)


def join(experiment: Experiment, scale: str, seed: int, folders: Sequence[Path], out: Path) -> Result:
    """Rows and pictures of several results, and what compares them; of a row that several have, the first.

    The parts are told in `result.json`, each with its device, its seconds and the settings that were changed; those
    of whose arms every row was taken from an earlier folder are left out.
    """
    found = [read(folder) for folder in folders]
    expected = {"experiment": experiment.name, "scale": scale, "seed": seed, "version": found[0]["version"]}
    for folder, content in zip(folders, found, strict=True):
        for key, value in expected.items():
            require(content[key] == value, "join", f"results with {key} = {value!r}: {folder}", content[key])
    rows, parts = {}, []
    for content in found:
        parts += told(content, rows)
        rows |= {row.metric: row for row in content["rows"] if row.metric not in rows}
    out.mkdir(parents=True, exist_ok=True)
    devices = ", ".join(dict.fromkeys(part["device"] for part in parts))
    with TemporaryDirectory() as drawn:
        bench = Bench(experiment.scales[scale], scale, seed, devices, Path(drawn))
        compared = experiment.compared(bench, list(rows.values()))
        gather([(bench.folder, ""), *zip(folders, map(label_of, folders, found), strict=True)], out)
    seconds = sum(part["seconds"] for part in parts)
    return written(Result(experiment.name, scale, seed, devices, seconds, compared, parts=parts), out)
