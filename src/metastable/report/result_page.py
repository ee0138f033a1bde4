"""The page that sets a paper's numbers beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .formatting import ABSENT, clock, is_number, plus_minus, sentence, value_text
from .markup import Html, badge, card, document, empty, join, number_cell, png, section, table, tag
from .parts import contents, frame, masthead, pictures, settings
from .read import Reproduction

_SIGNS = {"<=": "≤", ">=": "≥", "==": "=", "!=": "≠", "~": "≈", "~=": "≈"}
_SHOWN = {"rows", "experiment", "scale", "seed", "version", "device", "seconds"}


def result_page(reproduction: Reproduction) -> str:
    """The whole page."""
    result = reproduction.result
    sections = [
        section("numbers", "Numbers", rows_table(reproduction.rows)),
        section("pictures", "Pictures", all_pictures(reproduction.pictures)),
        settings(
            {k: v for k, v in result.items() if k not in _SHOWN}, "Details", "Nothing else was recorded."
        ),
    ]
    title = str(result.get("experiment") or reproduction.folder.resolve().name)
    facts = [
        f"scale {result['scale']}" if "scale" in result else None,
        f"version {result['version']}" if "version" in result else None,
        f"device {result['device']}" if "device" in result else None,
        f"seed {result['seed']}" if "seed" in result else None,
    ]
    top = masthead("reproduction", title, verdict(reproduction.rows), facts)
    return document(f"{title} · metastable", top, contents(sections), cards(reproduction), *sections)


def verdict(rows: list[dict[str, Any]]) -> Html:
    """One word on the whole."""
    judged = [row["ok"] for row in rows if isinstance(row.get("ok"), bool)]
    if not judged:
        return badge("not judged", "calm")
    return badge("holds", "good") if all(judged) else badge("does not hold", "bad")


def cards(reproduction: Reproduction) -> Html:
    """How many rows hold, and what it cost."""
    judged = [row["ok"] for row in reproduction.rows if isinstance(row.get("ok"), bool)]
    result = reproduction.result
    found = [
        card(
            "Rows that hold",
            f"{sum(judged)} of {len(judged)}",
            tone="good" if judged and all(judged) else "bad",
        ),
        card("Time", clock(result.get("seconds"))) if "seconds" in result else None,
        card("Scale", result["scale"]) if "scale" in result else None,
        card("Seed", value_text(result["seed"])) if "seed" in result else None,
    ]
    return tag("div", *found, class_="cards")


def rows_table(rows: list[dict[str, Any]]) -> Html:
    """Our value, what it has to satisfy, the paper's value and the verdict."""
    if not rows:
        return empty("result.json has no rows.")
    head = ["metric", "ours", "required", "paper", "verdict"]
    return table(head, [_row(row) for row in rows], class_="numbers results")


def _row(row: dict[str, Any]) -> list[Html]:
    ok = row.get("ok")
    tone = {True: "good", False: "bad"}.get(ok, "calm") if isinstance(ok, bool) else "calm"
    words = {"good": "holds", "bad": "fails", "calm": "not judged"}
    return [
        tag("td", tag("code", row.get("metric", "")), class_=tone),
        number_cell(row.get("value"), _ours(row)),
        number_cell(row.get("target"), _required(row)),
        number_cell(row.get("paper"), value_text(row.get("paper"))),
        tag("td", badge(words[tone], tone)),
    ]


def _ours(row: dict[str, Any]) -> str:
    value = row.get("value")
    return plus_minus(value, row.get("std_error")) if is_number(value) else value_text(value)


def _required(row: dict[str, Any]) -> str:
    if row.get("target") is None:
        return ABSENT
    relation = str(row.get("relation") or "")
    return f"{_SIGNS.get(relation, relation)} {value_text(row['target'])}".strip()


def all_pictures(paths: tuple[Path, ...]) -> Html:
    """Every PNG of the folder, embedded."""
    if not paths:
        return empty("No pictures were written beside result.json.")
    return join([pictures([_embedded(p) for p in paths], "wide")])


def _embedded(path: Path) -> Html:
    title, data = sentence(path.stem.replace("_", " ").replace("-", " ")), path.read_bytes()
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return frame(title, empty(f"{path.name} is not a PNG file and is left out."))
    return frame(title, png(data, title, "paper"))
