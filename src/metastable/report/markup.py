"""HTML from Python values: everything is escaped unless it is already `Html`."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from .formatting import is_number, number

_VOID = {"img", "meta", "link", "br", "hr"}

_SCRIPT = (
    "addEventListener('beforeprint',()=>"
    "document.querySelectorAll('details').forEach(d=>d.setAttribute('open','')))"
)
"""Folded settings open for paper."""


class Html(str):
    """Text that is markup already and is not escaped again."""


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """An element. `class_` and `aria_label` lose their underscores; None and False drop an attribute.

    >>> tag("p", "a < b", tag("b", "c"), class_="x")
    '<p class="x">a &lt; b<b>c</b></p>'
    """
    opening = f"<{name}"
    for attribute, value in attributes.items():
        if value is not None and value is not False:
            opening += f" {attribute.rstrip('_').replace('_', '-')}"
            opening += "" if value is True else f'="{html.escape(str(value))}"'
    return Html(f"{opening}>" if name in _VOID else f"{opening}>{join(children)}</{name}>")


def join(children: Iterable[Any]) -> Html:
    """Children one after the other; strings escaped, None left out."""
    parts = []
    for child in children:
        if isinstance(child, (list, tuple)):
            parts.append(join(child))
        elif child is not None:
            parts.append(child if isinstance(child, Html) else html.escape(str(child)))
    return Html("".join(parts))


def section(anchor: str, title: str, *children: Any) -> Html:
    """A titled part of the page; nothing where it would be empty."""
    body = join(children)
    return tag("section", tag("h2", title), body, id=anchor) if body else Html()


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], class_: str = "") -> Html:
    """A table that scrolls sideways on a narrow screen. A cell is a value or a `<td>` of its own."""
    body = [tag("tr", [_cell(cell) for cell in row]) for row in rows]
    top = tag("thead", tag("tr", [tag("th", h, scope="col") for h in head])) if head else None
    width = "scroll narrow" if "narrow" in class_ else "scroll"
    return tag("div", tag("table", top, tag("tbody", body), class_=class_ or None), class_=width)


def _cell(cell: Any) -> Html:
    if isinstance(cell, Html) and cell.startswith("<td"):
        return cell
    return number_cell(cell) if is_number(cell) else tag("td", cell)


def number_cell(value: Any, text: str | None = None, class_: str = "") -> Html:
    """A right-aligned number; the full precision shows when pointed at."""
    full = repr(value) if is_number(value) else None
    return tag("td", number(value) if text is None else text, class_=f"num {class_}".strip(), title=full)


def badge(text: str, tone: str) -> Html:
    """A small coloured word."""
    return tag("span", text, class_=f"badge {tone}")


def card(title: str, value: Any, *notes: Any, tone: str = "") -> Html:
    """A key number with quiet notes under it."""
    lines = [note if isinstance(note, Html) else tag("p", note, class_="note") for note in notes if note]
    return tag("div", tag("h3", title), tag("p", value, class_="value"), lines, class_=f"card {tone}".strip())


def empty(text: str) -> Html:
    """A plain sentence where something is missing."""
    return tag("p", text, class_="empty")


def png(data: bytes, alt: str, class_: str = "") -> Html:
    """An embedded PNG."""
    source = "data:image/png;base64," + base64.b64encode(data).decode("ascii")
    return tag("img", src=source, alt=alt, class_=class_ or None)


def document(title: str, *body: Any) -> str:
    """A whole page, with a content policy that forbids every request and every script but its own."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    theme = resources.files("metastable.report").joinpath("theme.css").read_text("utf-8")
    head = join(
        [
            tag("meta", charset="utf-8"),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("link", rel="icon", href="data:,"),
            tag("title", title),
            Html(f"<style>{theme}</style>"),
        ]
    )
    script = Html(f"<script>{_SCRIPT}</script>")
    page = tag("html", tag("head", head), tag("body", tag("main", *body), script), lang="en")
    return f"<!doctype html>\n{page}\n"
