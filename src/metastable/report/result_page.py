"""The page that sets a paper's numbers beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .formatting import ABSENT, clock, is_number, plus_minus, sentence, value_text
from .markup import Html, badge, card, document, empty, number_cell, png, section, table, tag
from .parts import contents, frame, masthead, pictures, settings
from .read import Reproduction

_SIGNS = {"<=": "≤", ">=": "≥", "==": "=", "!=": "≠", "~": "≈", "~=": "≈"}
_VERDICTS = {True: ("good", "holds"), False: ("bad", "fails"), None: ("calm", ABSENT)}
_SHOWN = {"rows", "experiment", "scale", "seed", "version", "device", "seconds"}


def result_page(reproduction: Reproduction) -> str:
    """The whole page."""
    result = reproduction.result
    asked = judged(reproduction.rows)
    sections = [
        *([section("required", "What is required", rows_table(asked))] if asked else []),
        section("pictures", "Pictures", all_pictures(reproduction.pictures)),
        section("numbers", "All numbers", rows_table(reproduction.rows)),
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


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of which something is required: others are `ok` whatever their number is."""
    return [r for r in rows if isinstance(r.get("ok"), bool) and (r.get("relation") or not r["ok"])]


def verdict(rows: list[dict[str, Any]]) -> Html:
    """One word on the whole."""
    asked = judged(rows)
    if not asked:
        return badge("not judged", "calm")
    return badge("holds", "good") if all(r["ok"] for r in asked) else badge("does not hold", "bad")


def cards(reproduction: Reproduction) -> Html:
    """How many of the rows that are judged hold, and what it cost."""
    held = [row["ok"] for row in judged(reproduction.rows)]
    result, tone = reproduction.result, "good" if held and all(held) else "bad"
    found = [
        card("Requirements that hold", f"{sum(held)} of {len(held)}", tone=tone) if held else None,
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
        value, paper = row.get("value"), row.get("paper")
        tone, word = _VERDICTS[row["ok"] if judged([row]) else None]
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
                tag("td", word if word == ABSENT else badge(word, tone)),
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
