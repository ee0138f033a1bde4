"""The tables of docs/extending.md: all that an energy, proposal, kernel or method may bring, from their source.

`python scripts/members.py` writes them; with `--check` it says whether they are stale.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/extending.md"
PROTOCOLS = "core/protocols.py"
BASES = {
    "kernel": ("kernels/base.py", ("Kernel", "StepKernel")),
    "method": ("core/method.py", ("Method",)),
}
MARKED = re.compile(r"(<!-- members: (\w+) -->\n).*?(<!-- end members -->)", re.DOTALL)


def members(kind: str) -> dict[str, str]:
    """What a thing of this kind may bring, each with the first sentence of its documentation."""
    if kind in BASES:
        path, names = BASES[kind]
        nodes = [c for c in classes(path) if c.name in names]
    else:
        start, end = part_of(kind)
        nodes = [c for c in classes(PROTOCOLS) if start < c.lineno < end]
    return {name: text for node in nodes for name, text in documented(node).items()}


def classes(path: str) -> list[ast.ClassDef]:
    """The classes of a file of the library."""
    tree = ast.parse((ROOT / "src/metastable" / path).read_text())
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def part_of(kind: str) -> tuple[int, int]:
    """First and last line of a part of the protocol file, which begins with `# ---- kind`."""
    lines = (ROOT / "src/metastable" / PROTOCOLS).read_text().splitlines()
    heads = [i for i, line in enumerate(lines, 1) if line.startswith("# ----")]
    start = next(i for i in heads if lines[i - 1].startswith(f"# ---- {kind}"))
    return start, next((i for i in heads if i > start), len(lines))


def documented(node: ast.ClassDef) -> dict[str, str]:
    """Public members of a class with their first sentence; one without any is an error."""
    found: dict[str, str] = {}
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            plain = not any(isinstance(d, ast.Name) and d.id == "property" for d in item.decorator_list)
            arguments = ", ".join(a.arg for a in item.args.args[1:])
            found[f"{item.name}({arguments})" if plain else item.name] = ast.get_docstring(item) or ""
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            literal = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found[item.target.id] = str(after.value.value) if literal else ""  # pyright: ignore
    bare = [name for name, text in found.items() if not text]
    if bare and node.name != "StepKernel":
        raise ValueError(f"{node.name}: no line of documentation for {', '.join(bare)}")
    return {name: " ".join(text.split("\n\n")[0].split()) for name, text in found.items() if text}


def table(kind: str) -> str:
    """The members as a table in Markdown."""
    rows = [f"| `{name}` | {text.replace('|', chr(92) + '|')} |" for name, text in members(kind).items()]
    return "\n".join(["| member | what it says or does |", "|---|---|", *rows, ""])


def written(text: str) -> str:
    """The page with its tables made anew."""
    return MARKED.sub(lambda m: f"{m[1]}{table(m[2])}{m[3]}", text)


def main() -> int:
    """Write, or check."""
    page = ROOT / PAGE
    text = page.read_text()
    new = written(text)
    if "--check" in sys.argv:
        print(f"{PAGE}: run python scripts/members.py" if new != text else "fresh")
        return int(new != text)
    page.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
