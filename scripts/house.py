"""Measure the structure of the sources, and fail where a limit is passed.

    python scripts/house.py            # the table; exit status 1 where a number is above its limit
    python scripts/house.py --list     # also what is behind the numbers

A limit is never raised: where a number has fallen below it, the limit follows.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "src" / "metastable"
LAZY = {"matplotlib", "zuko", "sklearn", "scipy", "arviz", "lightning", "tensorboard", "torchmetrics", "rich"}
"""Extras that a function imports when it needs them."""


@dataclass(frozen=True)
class Measure:
    """One number, the limit that it may not pass, where it is to end, and what is behind it."""

    name: str
    value: float
    limit: float
    target: float
    behind: list[str]


LIMITS = {  # (limit, target)
    "circles between files": (0, 0),
    "imports inside functions": (17, 20),
    "files over 400 lines": (3, 5),
    "longest file": (500, 500),
    "longest function": (45, 45),
    "private helpers with one call site, %": (14, 14),
    "hasattr and getattr": (50, 50),
    "Tensor | Batch": (0, 0),
    "sets of method names outside methods": (0, 0),
    "rooms that score a run": (1, 1),
    "lines": (71_500, 32_500),
}


@dataclass(frozen=True)
class File:
    """One source file."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        parts = ("metastable", *self.path.relative_to(SOURCES).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    def functions(self) -> Iterator[ast.FunctionDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef))

    def imported(self, node: ast.Import | ast.ImportFrom) -> list[str]:
        """Modules that an import names, those of `from package import module` too."""
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        base = node.module or ""
        if node.level:
            package = self.module.split(".")
            keep = len(package) - node.level + (self.path.name == "__init__.py")
            base = ".".join([*package[:keep], *([base] if base else [])])
        return [base, *(f"{base}.{alias.name}" for alias in node.names)]

    def imports(self) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
        """Every import that runs, and whether it stands inside a function."""
        stack: list[tuple[ast.AST, bool]] = [(self.tree, False)]
        while stack:
            node, inside = stack.pop()
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                continue
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield node, inside
            inner = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            stack += [(child, inner) for child in ast.iter_child_nodes(node)]


def circles(files: list[File]) -> list[str]:
    """Groups of files that import each other, imports inside functions counted (Tarjan's components)."""
    known = {f.module for f in files}
    graph = {
        f.module: {m for node, _ in f.imports() for m in f.imported(node) if m in known and m != f.module}
        for f in files
    }
    packages = {f.module for f in files if f.path.name == "__init__.py"}
    for module, targets in graph.items():  # `from package import module` asks for the module, not the package
        graph[module] = {
            t
            for t in targets
            if not (t in packages and any(o != t and o.startswith(t + ".") for o in targets))
        }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(v: str) -> None:
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in sorted(graph[v]):
            if w not in index:
                visit(w)
            if w in stack:
                low[v] = min(low[v], low[w])
        if low[v] == index[v]:
            group = []
            while not group or group[-1] != v:
                group.append(stack.pop())
            if len(group) > 1:
                groups.append(group)

    sys.setrecursionlimit(10_000)
    for v in sorted(graph):
        if v not in index:
            visit(v)
    return [" · ".join(sorted(group)) for group in groups]


def imports_inside(files: list[File]) -> list[str]:
    """Imports in functions, but those of extras and in the command line."""
    found = []
    for f in files:
        if f.module.startswith("metastable.cli"):
            continue
        for node, inside in f.imports():
            if inside and f.imported(node)[0].split(".")[0] not in LAZY:
                found.append(f"{f.module}:{node.lineno}")
    return found


def code_lines(function: ast.FunctionDef) -> int:
    """Lines of a function's body: neither its signature nor its docstring has to be followed."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def lonely_helpers(files: list[File]) -> list[str]:
    """Private functions that one place calls."""
    found = []
    for f in files:
        used = Counter(re.findall(r"\b_[a-zA-Z]\w*", f.text))
        for function in f.functions():
            name = function.name
            if name.startswith("_") and not name.startswith("__") and used[name] == 2:
                found.append(f"{f.module}:{function.lineno} {name}")
    return found


def method_names(files: list[File]) -> list[str]:
    """Collections of two or more methods' names outside the rooms that may know them."""
    names = set(
        re.findall(
            r'name: ClassVar\[str\] = "([\w-]+)"',
            "".join(f.text for f in files if f.module.startswith("metastable.methods")),
        )
    )
    allowed = ("metastable.methods", "metastable.experiments", "metastable.benchmarks")
    found = []
    for f in files:
        if f.module.startswith(allowed):
            continue
        for node in ast.walk(f.tree):
            if isinstance(node, (ast.Set, ast.Tuple, ast.List)):
                inside = [e.value for e in node.elts if isinstance(e, ast.Constant)]
                if len([v for v in inside if v in names]) >= 2:
                    found.append(f"{f.module}:{node.lineno} {inside}")
    return found


def scorers(files: list[File]) -> list[str]:
    """Rooms, but estimators and experiments, that ask for a distance between samples: they score a run."""
    free = {"evaluation", "experiments", "benchmarks"}
    asked = {
        f.module.split(".")[1]
        for f in files
        for node, _ in f.imports()
        if "metastable.evaluation.distances" in f.imported(node)
    }
    return sorted(asked - free)


def measures(files: list[File]) -> list[Measure]:
    """Every number of `LIMITS`."""
    functions = [(f, function) for f in files for function in f.functions()]
    long_files = sorted(((f.lines, f.module) for f in files if f.lines > 400), reverse=True)
    long_functions = sorted(((code_lines(g), f"{f.module}.{g.name}") for f, g in functions), reverse=True)
    lonely = lonely_helpers(files)
    probes = Counter({f.module: len(re.findall(r"\b(?:has|get)attr\(", f.text)) for f in files})
    unions = [
        f.module
        for f in files
        if not f.module.endswith("core.batch")
        for _ in re.findall(r"Tensor \| (?:Pairs|Batch)", f.text)
    ]
    rings, inside, names, scored = circles(files), imports_inside(files), method_names(files), scorers(files)
    values: dict[str, tuple[float, list[str]]] = {
        "circles between files": (len(rings), rings),
        "imports inside functions": (len(inside), inside),
        "files over 400 lines": (len(long_files), [f"{n} {m}" for n, m in long_files]),
        "longest file": (max(f.lines for f in files), []),
        "longest function": (long_functions[0][0], [f"{n} {m}" for n, m in long_functions if n > 45]),
        "private helpers with one call site, %": (round(100 * len(lonely) / len(functions), 1), lonely),
        "hasattr and getattr": (probes.total(), [f"{n} {m}" for m, n in probes.most_common(20)]),
        "Tensor | Batch": (len(unions), [f"{n} {m}" for m, n in Counter(unions).most_common()]),
        "sets of method names outside methods": (len(names), names),
        "rooms that score a run": (len(scored), scored),
        "lines": (sum(f.lines for f in files), []),
    }
    return [Measure(name, *values[name][:1], *LIMITS[name], values[name][1]) for name in LIMITS]


def main() -> int:
    """Print the table; 1 where a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--list", action="store_true", help="show what is behind the numbers")
    shown = parser.parse_args()
    found = measures([File(path) for path in sorted(SOURCES.rglob("*.py"))])
    print(f"{'':38} {'now':>8} {'limit':>8} {'target':>8}")
    for m in found:
        print(
            f"{m.name:38} {m.value:8g} {m.limit:8g} {m.target:8g}{'   PASSED' if m.value > m.limit else ''}"
        )
        if shown.list:
            print("".join(f"    {line}\n" for line in m.behind), end="")
    return int(any(m.value > m.limit for m in found))


if __name__ == "__main__":
    sys.exit(main())
