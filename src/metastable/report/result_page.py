"""The page that sets a paper's numbers beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .formatting import ABSENT, clock, is_number, plus_minus, sentence, value_text
from .markup import Html, badge, card, document, empty, number_cell, png, section, table, tag
from .parts import contents, frame, masthead, pictures, settings
from .read import Reproduction

_SIGNS = {"<=": "≤", ">=": "≥", "==": "=", "!=": "≠", "~": "≈", "~=": "≈"}
_VERDICTS = {True: ("good", "holds"), False: ("bad", "fails"), None: ("calm", "not judged")}
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
    """Our value, the exact one where some row has it, what it has to satisfy, the paper's value and the verdict."""
    if not rows:
        return empty("result.json has no rows.")
    lines, exact = [], any("oracle" in row for row in rows)
    for row in rows:
        ok, value, paper = row.get("ok"), row.get("value"), row.get("paper")
        tone, word = _VERDICTS[ok if isinstance(ok, bool) else None]
        ours = plus_minus(value, row.get("std_error")) if is_number(value) else value_text(value)
        relation = str(row.get("relation") or "")
        required = f"{_SIGNS.get(relation, relation)} {value_text(row.get('target'))}".strip()
        lines.append(
            [
                tag("td", tag("code", row.get("metric", "")), class_=tone),
                number_cell(value, ours),
                *([number_cell(row.get("oracle"), value_text(row.get("oracle")))] if exact else []),
                number_cell(row.get("target"), ABSENT if row.get("target") is None else required),
                number_cell(paper, value_text(paper)),
                tag("td", badge(word, tone)),
            ]
        )
    head = ["metric", "ours", *(["exact"] if exact else []), "required", "paper", "verdict"]
    return table(head, lines, class_="numbers results")


def all_pictures(paths: tuple[Path, ...]) -> Html:
    """Every PNG of the folder, embedded."""
    if not paths:
        return empty("No pictures were written beside result.json.")
    drawn = []
    for path in paths:
        title, data = sentence(path.stem.replace("_", " ").replace("-", " ")), path.read_bytes()
        whole = data.startswith(b"\x89PNG\r\n\x1a\n")
        left_out = f"{path.name} is not a PNG file and is left out."
        drawn.append(frame(title, png(data, title, "paper") if whole else empty(left_out)))
    return pictures(drawn, "wide")
