"""For the API reference: sessions (`>>>`) in docstrings become code blocks; Markdown takes them for quotations."""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    """`text` with a fence around every doctest, from its `>>>` to the next blank line."""
    lines: list[str] = []
    indent: str | None = None
    for line in text.split("\n"):
        inside = line.strip()
        if indent is None and inside.startswith(">>> "):
            indent = line[: len(line) - len(line.lstrip())]
            lines += [""] if lines and lines[-1].strip() else []
            lines.append(f"{indent}```pycon")
        elif indent is not None and not inside:
            lines.append(f"{indent}```")
            indent = None
        lines.append(line)
    return "\n".join(lines if indent is None else [*lines, f"{indent}```"])


class DoctestFences(griffe.Extension):
    """Rewrites each docstring once, when it was read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """See `fenced`."""
        if obj.docstring is not None and "```pycon" not in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)
