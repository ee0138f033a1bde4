"""Compare two folders of results row by row: same numbers, same targets, same verdicts?

    python scripts/same_results.py BEFORE AFTER

Every `result.json` below BEFORE is held against the one at the same place below AFTER. Numbers must be equal to the
last bit. What differs is listed, and so are rows and files that only one side has; the exit status is 1 where a
value, a target or a verdict differs. Seconds, and the machine and version that made a file, are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

COMPARED = ("value", "relation", "target", "ok")


class Difference(NamedTuple):
    """What differs at one place; a row or a file that only one side has is told, and is no failure."""

    words: str
    fails: bool


def rows_below(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Rows by metric, without those that time something, of each `result.json` below `folder`."""
    found = {}
    for path in sorted(folder.rglob("result.json")):
        rows = json.loads(path.read_text())["rows"]
        place = path.parent.relative_to(folder).as_posix()
        found[place] = {row["metric"]: row for row in rows if "seconds" not in row["metric"]}
    return found


def differences(before: Path, after: Path) -> Iterator[Difference]:
    """Place by place, then row by row."""
    old, new = rows_below(before), rows_below(after)
    for place in sorted(old.keys() ^ new.keys()):
        yield Difference(f"{place}: only in {before if place in old else after}", False)
    for place in sorted(old.keys() & new.keys()):
        mine, theirs = old[place], new[place]
        for metric in sorted(mine.keys() ^ theirs.keys()):
            yield Difference(f"{place}: {metric} only in {before if metric in mine else after}", False)
        for metric in (metric for metric in mine if metric in theirs):
            for key in COMPARED:
                was, now = mine[metric].get(key), theirs[metric].get(key)
                if repr(was) != repr(now):  # in words NaN is itself, and 1 is not 1.0
                    yield Difference(f"{place}: {metric}: {key} was {was!r}, is {now!r}", True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what differs; 1 where a row does, 2 where there is nothing to compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    given = parser.parse_args(arguments)
    shared = rows_below(given.before).keys() & rows_below(given.after).keys()
    if not shared:
        print(f"no result.json is below both {given.before} and {given.after}")
        return 2
    found = list(differences(given.before, given.after))
    for difference in found:
        print(difference.words)
    failed = sum(difference.fails for difference in found)
    print(f"{len(shared)} results: " + (f"{failed} differences" if failed else "unchanged"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
