"""docs/results/papers.md, paper by paper, from `results/papers.toml`: what is where, and what is not.

python scripts/papers.py            write the page
python scripts/papers.py --check    say what is wrong with the table or out of date, and exit with 1 if anything is
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metastable.experiments import TITLES

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path("results/papers.toml")
PAGE = Path("docs/results/papers.md")
STATES = ("shown", "law", "in part", "does not hold", "described", "not yet", "cannot")
PLANNED = (
    "cifar10",
    "cifar10-divergences",
    "cifar10-adance",
    "jem-cifar10",
    "path-planning",
    "push-t",
    "lasa",
)
"""Experiments that a row may name with a question mark before they are there."""
SCALES = ("gpu", "cpu", "smoke")
"""From the largest."""
UNMEASURED = "not measured yet"
NUMBER = re.compile(r"\{([\w-]+) ([^}]+)\}")
INTRODUCTION = """# Paper by paper

Every figure, table, theorem and algorithm of the five papers, and where it is. *Shown* is a number or a figure of
a stored result, *law* a test against an exact answer; *in part*, *not yet* and *cannot* say what is missing and
why, and *does not hold* says with which number, and what was tried. Tests lie under `tests/`. The page is written
by `scripts/papers.py` from `results/papers.toml`, and a test fails where an experiment, a test, a page or a number
that is named does not exist.
"""


@dataclass(frozen=True)
class Item:
    """A row of the table."""

    name: str
    what: str
    state: str
    where: list[str]
    note: str


def read(root: Path = ROOT) -> list[tuple[dict[str, Any], list[Item]]]:
    """Every paper with its rows."""
    papers = tomllib.loads((root / TABLE).read_text(encoding="utf-8"))["paper"]
    return [(paper, [Item(*row) for row in paper["rows"]]) for paper in papers]


def stored(experiment: str, root: Path = ROOT) -> bool:
    """Whether it has a result."""
    return any((root / "results" / experiment).glob("*/result.json"))


def number(experiment: str, metric: str, root: Path = ROOT) -> float | None:
    """One number of the largest stored scale that has it; None where none has."""
    for scale in SCALES:
        path = root / "results" / experiment / scale / "result.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
        for row in rows:
            if row["metric"] == metric:
                return row["value"]
    return None


def standing(item: Item, root: Path = ROOT) -> str:
    """How it stands; what would be shown and has no stored result is not measured yet."""
    experiments = [name for name in item.where if name in TITLES]
    return item.state if item.state != "shown" or any(stored(e, root) for e in experiments) else UNMEASURED


def problems(root: Path = ROOT) -> list[str]:
    """What the table says and the repository does not hold."""
    found = []
    for paper, items in read(root):
        if not (root / "docs" / paper["page"]).is_file():
            found.append(f"{paper['title']}: no page {paper['page']}")
        names = Counter(item.name for item in items)
        found += [f"{paper['title']}, {name}: twice" for name, count in names.items() if count > 1]
        for item in items:
            found += [f"{paper['title']}, {item.name}: {wrong}" for wrong in wrong_with(item, root)]
    return found


def wrong_with(item: Item, root: Path) -> list[str]:
    """Of one row."""
    found = [f"no {name}" for name in item.where if not exists(name, root)]
    found += [f"no number {n}" for *_, n in _missing(item, root)]
    experiments = [name for name in item.where if name in TITLES]
    rules = {
        f"unknown state {item.state!r}": item.state not in STATES,
        "shown by no experiment": item.state == "shown" and not experiments,
        "a law without a test": item.state == "law" and not any("::" in name for name in item.where),
        "says neither why nor where": item.state in ("not yet", "cannot", "in part")
        and not (item.note or item.where),
        "cannot, and does not say why": item.state == "cannot" and not item.note,
        "does not hold, without a number": item.state == "does not hold" and not NUMBER.search(item.note),
        "does not hold, and nothing was tried": item.state == "does not hold"
        and "tried" not in item.note.lower(),
    }
    return found + [rule for rule, broken in rules.items() if broken]


def _missing(item: Item, root: Path) -> list[tuple[str, ...]]:
    named = NUMBER.findall(item.note)
    return [(e, m) for e, m in named if e not in TITLES or (stored(e, root) and number(e, m, root) is None)]


def exists(name: str, root: Path = ROOT) -> bool:
    """An experiment, one that is planned, a test, or a page with its heading."""
    if name.startswith("?"):
        return name[1:] in TITLES or name[1:] in PLANNED
    if "::" in name:
        file, test = name.split("::")
        path = root / "tests" / file
        return (
            path.is_file()
            and re.search(rf"^def {test}\(", path.read_text(encoding="utf-8"), re.M) is not None
        )
    page, _, anchor = name.partition("#")
    if page.endswith(".md"):
        path = root / "docs" / page
        return path.is_file() and (not anchor or anchor in anchors(path.read_text(encoding="utf-8")))
    return name in TITLES


def anchors(text: str) -> set[str]:
    """Of the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def linked(name: str) -> str:
    """As the page shows it, which lies in docs/results/."""
    if name.startswith("?"):
        return linked(name[1:]) if name[1:] in TITLES else f"`{name[1:]}` (not yet)"
    if "::" in name:
        file, test = name.split("::")
        return f"`{file}` `{test}`"
    if ".md" in name:
        return f"[{name.partition('#')[0].removesuffix('.md')}](../{name})"
    return f"[{name}]({name}.md)"


def rendered(root: Path = ROOT) -> str:
    """The page."""
    parts = [INTRODUCTION]
    for paper, items in read(root):
        counts = Counter(standing(item, root) for item in items)
        said = ", ".join(f"{counts[state]} {state}" for state in (*STATES, UNMEASURED) if counts[state])
        head = ["| in the paper | what | stands | where | |", "| --- | --- | --- | --- | --- |"]
        lines = [
            " | ".join(["", item.name, item.what, _bold(standing(item, root)), where, note, ""])
            for item in items
            for where in ["<br>".join(map(linked, item.where))]
            for note in [NUMBER.sub(lambda m: _shown(number(m[1], m[2], root)), item.note)]
        ]
        title = f"## {paper['title']}\n\n{paper['cite']}; [page of the method](../{paper['page']}). {said}."
        parts.append("\n".join([title, "", *head, *(line.strip() for line in lines), ""]))
    return "\n".join(parts)


def _bold(state: str) -> str:
    return f"**{state}**" if state == "does not hold" else state


def _shown(value: float | None) -> str:
    return UNMEASURED if value is None else f"{value:.3g}"


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    wrong, text = problems(), rendered()
    if parser.parse_args().check:
        wrong += (
            []
            if (ROOT / PAGE).is_file() and (ROOT / PAGE).read_text(encoding="utf-8") == text
            else [f"{PAGE}: out of date"]
        )
    else:
        (ROOT / PAGE).write_text(text, encoding="utf-8")
    print("\n".join(wrong) or "every row holds")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
