"""Pieces that more than one kind of page uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .figures import palette
from .formatting import count, exact, label, sentence, value_text
from .markup import Html, badge, empty, join, section, table, tag
from .plots import Drawing
from .read import Run, mapping

TONES = {
    "finished": "good",
    "interrupted": "caution",
    "unfinished": "caution",
    "diverged": "bad",
    "problem": "bad",
    "warning": "caution",
    "note": "calm",
}

_COLOUR_NAMES = {colour: name for name, colour in palette._asdict().items()}


def status_badge(status: str) -> Html:
    """The state of a run as a coloured word."""
    return badge(status, TONES.get(status, "calm"))


def picture(
    title: str, drawing: Drawing, caption: str = "", keys: Iterable[Html] = (), class_: str = ""
) -> Html:
    """A drawing with its title and legend above and a sentence below, all as text of the page."""
    label_of = f"{title}. {caption}".strip()
    image = Html(drawing.svg.replace("<svg", f"<svg {tag('i', role='img', aria_label=label_of)[3:-5]}", 1))
    return frame(title, image, " ".join([caption, *drawing.notes]).strip(), keys, class_)


def frame(title: str, image: Html, caption: str = "", keys: Iterable[Html] = (), class_: str = "") -> Html:
    """Any image with its title, legend and caption."""
    top = tag("div", tag("h3", title), tag("span", *keys, class_="keys"), class_="top")
    below = tag("figcaption", caption) if caption else None
    return tag("figure", top, image, below, class_=class_ or None)


def key(text: str, colour: str, shape: str = "line", dashes: Any = "-") -> Html:
    """One entry of a legend: a `line`, a `block` or a `tick` beside its name."""
    variable = f"var(--{_COLOUR_NAMES.get(colour, 'ink')})"
    if shape == "block":
        mark = f'<rect width="18" height="10" y="1" rx="1.5" fill="{variable}" opacity="0.35"/>'
    elif shape == "tick":
        mark = f'<path d="M9 1V11" stroke="{variable}" stroke-width="1.6"/>'
    elif shape == "dot":
        mark = f'<circle cx="9" cy="6" r="4" fill="{variable}"/>'
    else:
        pattern = "" if dashes == "-" else f' stroke-dasharray="{",".join(str(2 * d) for d in dashes[1])}"'
        mark = f'<path d="M0 6H18" stroke="{variable}" stroke-width="2.4"{pattern}/>'
    swatch = Html(f'<svg viewBox="0 0 18 12" width="18" height="12" aria-hidden="true">{mark}</svg>')
    return tag("span", swatch, text, class_="key")


def pictures(items: Sequence[Html], size: str = "half") -> Html:
    """Pictures side by side, as many as fit: `half`, `third` or `quarter` of the page wide."""
    return tag("div", *items, class_=f"pictures {size}") if items else Html()


def findings(run: Run, folded: bool = False) -> Html:
    """What went wrong and what to try, the worst first; `folded` keeps evidence and advice out of sight."""
    if not run.summary:
        return empty("No summary.json: the run is still going or was killed, so nothing was diagnosed.")
    if not run.diagnosis:
        return tag("p", "Every check passed: nothing speaks against this run.", class_="passed")
    articles = []
    for found in run.diagnosis:
        severity, advice = str(found.get("severity") or "note"), found.get("advice")
        tone, evidence = TONES.get(severity, "calm"), mapping(found.get("evidence")).items()
        name = sentence(label(str(found.get("name") or "finding").replace("-", "_")))
        top = tag("header", badge(severity, tone), tag("h3", name))
        text = tag("p", found["text"]) if found.get("text") else None
        numbers = [tag("div", tag("dt", label(k)), tag("dd", value_text(v))) for k, v in evidence]
        rest = join(
            [
                tag("dl", numbers) if numbers else None,
                tag("p", tag("strong", "What to try. "), advice, class_="advice") if advice else None,
            ]
        )
        rest = tag("details", tag("summary", "Evidence and advice"), rest) if folded and rest else rest
        articles.append(tag("article", top, text, rest, class_=f"finding {tone}"))
    return join(articles)


def settings(
    values: dict[str, Any], title: str = "Settings", missing: str = "No config.json in this folder."
) -> Html:
    """Every setting by its dotted name, folded away."""
    if not values:
        return section("settings", title, empty(missing))
    rows = [
        (tag("td", tag("code", name)), tag("td", tag("code", exact(value)))) for name, value in dotted(values)
    ]
    fold = tag("details", tag("summary", count(len(rows), "value")), table((), rows, class_="settings"))
    return section("settings", title, fold)


def dotted(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings as dotted names.

    >>> dotted({"method": {"name": "cd", "steps": 5}, "seed": 0})
    [('method.name', 'cd'), ('method.steps', 5), ('seed', 0)]
    """
    rows: list[tuple[str, Any]] = []
    for name, value in values.items():
        nested = isinstance(value, dict) and value
        rows += dotted(value, f"{prefix}{name}.") if nested else [(f"{prefix}{name}", value)]
    return rows


def masthead(kind: str, title: str, mark: Html | None, facts: Iterable[Any]) -> Html:
    """The top of the page: kind, title with badge, and a line of facts."""
    return tag(
        "header",
        tag("p", "metastable", tag("span", kind), class_="kind"),
        tag("h1", title, " ", mark),
        tag("p", [tag("span", fact) for fact in facts if fact], class_="facts"),
        class_="masthead",
    )


def contents(sections: Iterable[Html]) -> Html:
    """Links to the sections that are there."""
    import re

    found = [re.match(r'<section id="([\w-]+)"><h2>(.*?)</h2>', part) for part in sections]
    links = [tag("a", Html(m.group(2)), href=f"#{m.group(1)}") for m in found if m]
    return tag("nav", *links, aria_label="Contents")
