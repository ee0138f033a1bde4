"""Tables of README.md and docs/ from `results/NAME/SCALE/result.json`; numbers are never typed by hand.

A table stands between two HTML comments, `table: NAME` and `end table`. NAME is `summary` (one line for each
experiment, with the first numbers of its largest scale), `headlines` (the few numbers of `HEADLINES`, and every
number that is not as required), `index` (one line for each experiment, with its title and its time), `gallery`
(every picture) or an experiment (its pictures, each of the largest scale that has it, and every number at every
scale).
Words after an experiment say less: `table: NAME required figure-2` has the numbers with a requirement only, and one
picture; `table: NAME coverage` has the numbers whose names begin with `coverage/`. `speed` is what
`metastable bench --out results/bench` measured, `speed sampler`, `speed update` and `speed policy` one suite;
`speed laws` is how many of the engines' laws held.

    python scripts/tables.py            write the tables
    python scripts/tables.py --check    only say which files are out of date, and exit with 1 if any is
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metastable.benchmarks.files import torch_of
from metastable.experiments import TITLES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("results")
BENCH = Path("results/bench")
"""One file for each device, written by `metastable bench --out`."""
PICTURES = Path("docs/images/results")
PAGES = Path("docs/results")
"""Where each experiment has its page, `NAME.md`."""
SCALES = ("smoke", "cpu", "gpu")
"""From the smallest to the largest."""
SIGNS = {"<=": "≤", ">=": "≥"}
FIRST = 3
"""Numbers of each experiment that the summary shows."""
MARKED = re.compile(
    r"(?P<begin><!-- table: (?P<name>[\w-]+)(?P<less>( [\w-]+)*) -->\n)(?P<body>.*?)(?P<end><!-- end table -->)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Result:
    """One `result.json`, and where it lies."""

    folder: Path
    content: dict[str, Any]

    @property
    def name(self) -> str:
        """The experiment."""
        return str(self.content["experiment"])

    @property
    def scale(self) -> str:
        """smoke, cpu or gpu."""
        return str(self.content["scale"])

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One for each number."""
        return list(self.content["rows"])

    @property
    def judged(self) -> list[dict[str, Any]]:
        """Those of them that have a requirement."""
        return [row for row in self.rows if row.get("relation")]

    @property
    def pictures(self) -> list[Path]:
        """PNG files beside the numbers."""
        return sorted(self.folder.glob("*.png"))

    def about(self) -> str:
        """How the numbers were made, in a line."""
        c = self.content
        command = f"metastable reproduce {self.name} --scale {self.scale} --seed {c['seed']}"
        lines = [
            f"`{command}{_changed(part)}` · {part['device']} · {_clock(part['seconds'])}"
            for part in c.get("parts", [c])
        ]
        return f"{'; '.join(lines)} · version {c['version']}"


def _changed(part: dict[str, Any]) -> str:
    changes = part.get("changes", {}).items()
    return "".join(f" --set '{key}={json.dumps(value)}'" for key, value in changes)


def read_results(root: Path = ROOT) -> list[Result]:
    """Every stored result, by experiment and then by scale."""
    found = [Result(p.parent, json.loads(p.read_text())) for p in (root / RESULTS).glob("*/*/result.json")]
    return sorted(found, key=lambda r: (r.name, _rank(r.scale)))


def by_name(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Those of each experiment, in the order of scales."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.name, []).append(result)
    return found


def _rank(scale: str) -> int:
    return SCALES.index(scale) if scale in SCALES else len(SCALES)


def rendered(text: str, path: Path, results: Iterable[Result]) -> str:
    """`text`, the content of `path` (relative to the root), with every marked table made anew."""
    results = list(results)

    def table(match: re.Match[str]) -> str:
        name, less = match["name"], match["less"].split()
        match name:
            case "summary":
                body = summary(results, path)
            case "headlines":
                body = headlines(results, path)
            case "index":
                body = index(results, path)
            case "gallery":
                body = gallery(results, path)
            case "speed":
                body = speed(ROOT / BENCH, less)
            case _:
                body = experiment(name, path, results, less)
        return f"{match['begin']}\n{body}\n\n{match['end']}"

    return MARKED.sub(table, text)


def gallery(results: list[Result], path: Path) -> str:
    """The pictures of every experiment that has any, those of the largest scale, below what it shows."""
    parts = []
    for name, own in by_name(results).items():
        found = pictures_of(own)
        if not found:
            continue
        parts.append(f"### {name}\n\n{TITLES.get(name, '')}: {_linked(name, path)}")
        for copied, picture in found.items():
            target = Path(os.path.relpath(PICTURES / copied, path.parent)).as_posix()
            parts.append(f"![{name}, {picture.stem}]({target}){{ width=420 }}")
    return "\n\n".join(parts) or "*No pictures are stored yet.*"


def index(results: list[Result], path: Path) -> str:
    """One line for each experiment, run or not: what it shows, how much of it holds at each scale, and its time."""
    stored = by_name(results)
    rows = []
    for name in [*TITLES, *sorted(stored.keys() - TITLES.keys())]:
        own = stored.get(name, [])
        columns = (
            [r.scale for r in own],
            [_met(r) for r in own],
            [_clock(r.content["seconds"]) for r in own],
        )
        # a line for each scale, side by side: none of them may wrap
        shown = ["<br>".join(lines).replace(" ", "&nbsp;") or "not run yet" for lines in columns]
        rows.append([_linked(name, path), TITLES.get(name, "–"), *shown])
    return _markdown(["experiment", "what it shows", "scale", "holds", "time"], rows)


def _linked(name: str, path: Path) -> str:
    """The experiment's name, leading to its page."""
    return f"[{name}]({Path(os.path.relpath(PAGES / f'{name}.md', path.parent)).as_posix()})"


def summary(results: list[Result], path: Path) -> str:
    """One line for each experiment: how many numbers are as required at each scale, and the largest one's first."""
    if not results:
        return "*No results are stored yet; `metastable reproduce --list` names the experiments.*"
    rows = []
    for name, own in by_name(results).items():
        scales, met = ("<br>".join(lines) for lines in ([r.scale for r in own], map(_met, own)))
        rows.append([_linked(name, path), scales, met, _first_numbers(own[-1])])
    return _markdown(["experiment", "scale", "as required", "first numbers"], rows)


HEADLINES = {
    ("right-by-default", "cpu", "log_z_error/scale=10000"): "log Z on data times 10,000: off by, in nats",
    (
        "log-partition-coverage",
        "cpu",
        "coverage/two-modes",
    ): "95 % intervals of log Z that hold it, two modes",
    ("jarzynski-gmm", "gpu", "first_mass/jarzynski"): "a mode of weight 0.25 in 50 dimensions, Jarzynski",
    ("jarzynski-gmm", "gpu", "first_mass/pcd"): "the same, PCD",
    (
        "jarzynski-mnist",
        "gpu",
        "weight_error/jarzynski/noise=0.3",
    ): "weights of three digits of MNIST: off by",
    ("cifar10", "gpu", "fid/pcd-flip/minutes=20"): "FID on CIFAR-10, twenty minutes of half a GPU",
    ("febm-1d", "cpu", "mu_error/js"): "f-EBM, Jensen–Shannon: the mean of the best fit is missed by",
    ("robust-toy", "gpu", "kl_ratio/circles/beta=0.1 to beta=0"): "β = 0.1: KL over that of plain training",
    (
        "jem-stability",
        "gpu",
        "stopped/cifar10/scenario_2/beta_o=0",
    ): "JEM on CIFAR-10, 5 steps: plain training diverges",
    ("jem-stability", "gpu", "stopped/cifar10/scenario_2/beta_o=0.5"): "the same with β·o = 0.5",
    ("nce-bias", "cpu", "trained/rnce/K=10"): "the scale 1 as R-NCE learns it, K = 10",
    ("nce-bias", "cpu", "trained/ibc/K=10"): "the same as IBC learns it",
    ("path-planning", "gpu", "collisions/r-nce/best"): "paths that collide, R-NCE, best of 48",
    ("path-planning", "gpu", "collisions/flow/one"): "the same, one draw of a flow",
    ("push-t", "gpu", "maximum/i-r-nce/best/200"): "Push-T, I-R-NCE, within 200 steps",
    ("push-t", "gpu", "maximum/flow/best/200"): "the same, flow",
    ("push-t", "cpu", "maximum/on-flow/best/200"): "Push-T on two cores, an energy on a flow",
    ("push-t", "cpu", "maximum/flow/one/200"): "the same, that flow",
}
"""Numbers that a reader wants first: experiment, scale and metric, and what they are in words."""


def headlines(results: list[Result], path: Path) -> str:
    """A few numbers beside the paper's, and after them how many are as required, and which are not."""
    known = {(r.name, r.scale, row["metric"]): row for r in results for row in r.rows}
    rows = [
        [
            words,
            _shown(known[key]["value"]),
            _shown(known[key].get("paper")),
            f"{_linked(key[0], path)}, {key[1]}",
        ]
        for key, words in HEADLINES.items()
        if key in known
    ]
    every = sum(len(r.judged) for r in results)
    missed = [(r, row) for r in results for row in r.judged if not row["ok"]]
    said = f"{every - len(missed)} of {every} numbers are as required"
    words = "; ".join(f"{_linked(r.name, path)}, {r.scale}, {_in_words(row)}" for r, row in missed)
    table = _markdown(["what", "ours", "paper", "experiment"], rows)
    return f"{table}\n\n{said}{f'. These are not: {words}' if words else ''}."


def _met(result: Result) -> str:
    return f"{sum(row['ok'] for row in result.judged)} of {len(result.judged)}"


def _first_numbers(result: Result) -> str:
    """The first judged numbers, and those that are not as required wherever they stand."""
    shown = [row for i, row in enumerate(result.judged) if i < FIRST or not row["ok"]]
    return "<br>".join(_in_words(row) for row in shown)


def _in_words(row: dict[str, Any]) -> str:
    paper = "" if row.get("paper") is None else f", paper {_shown(row['paper'])}"
    return f"`{row['metric']}` {_ours(row)} ({_required(row)}{paper}){'' if row['ok'] else ' **not met**'}"


def experiment(name: str, path: Path, results: list[Result], less: Sequence[str] = ()) -> str:
    """The pictures of one experiment, and its every number at every scale that was run.

    `less` may hold `required`, for the numbers with a requirement only, first parts of the names of numbers, for
    those only, and the names of the pictures to show.
    """
    own = by_name(results).get(name)
    if not own:
        return f"*Not run yet: `metastable reproduce {name}` makes these numbers.*"
    first = {str(x["metric"]).partition("/")[0] for r in own for x in r.rows} & set(less)
    wanted = set(less) - {"required"} - first
    parts = []
    for copied, picture in pictures_of(own).items():
        if not wanted or picture.stem in wanted:
            target = os.path.relpath(PICTURES / copied, path.parent)
            said = f"{picture.stem.replace('-', ' ', 1)}, scale {picture.parent.name}"
            parts += [f"![{name}, {picture.stem}]({Path(target).as_posix()})", f"*{said}*"]
    for r in own:
        exact = any("oracle" in x for x in r.rows)  # a column where some number has an exact answer
        head = ["number", "ours", *(["exact"] if exact else []), "required", "paper", "holds"]
        rows = [
            [
                f"`{x['metric']}`",
                _ours(x),
                *([_shown(x.get("oracle"))] if exact else []),
                _required(x),
                _shown(x.get("paper")),
                _verdict(x),
            ]
            for x in r.rows
            if (x.get("relation") or "required" not in less)
            and (not first or str(x["metric"]).partition("/")[0] in first)
        ]
        parts.append(f"**Scale {r.scale}.** {r.about()}\n\n{_markdown(head, rows)}")
    return "\n\n".join(parts)


PROBLEMS = {
    "mlp/1024": "perceptron 2-128-128-1, 1,024 chains",
    "mlp/100000": "perceptron 2-128-128-1, 100,000 chains",
    "conv/64": "convolutions on 3 × 32 × 32, 64 features, 128 chains",
    "conv/128": "convolutions on 3 × 32 × 32, 128 features, 256 chains",
    "demo/jarzynski": "`make demo`, Jarzynski, 4,096 walkers",
    "demo/jarzynski-batch": "Jarzynski there, a sixteenth moves and steers",
    "demo/jarzynski-batch-all": "Jarzynski there, a sixteenth moves, all steer",
    "demo/pcd": "`make demo`, PCD, 4,096 chains",
    "demo/pcd-batch": "PCD there, as many chains move",
    "images/jarzynski": "convolutions on 28 × 28, Jarzynski, 4,096 walkers",
    "images/f-ebm": "convolutions on 28 × 28, f-EBM, 4,096 chains",
    "images/adance": "convolutions on 28 × 28, AdaNCE",
    "jem/wrn-28-10": "JEM, WRN-28-10 on 3 × 32 × 32, 20 steps of 64 chains",
    "jem/wrn-28-10, bf16": "the same in bf16-mixed",
    "log_z/path": "log Z of a perceptron, a temperature of 8,192 walkers",
}
"""What the suites time, in words."""
SPEEDS = {
    "sampler": ("ms_per_step", "milliseconds a Langevin step"),
    "update": ("update_ms", "milliseconds a training update"),
    "policy": ("ms_a_chunk", "milliseconds a chunk of actions"),
}


LAWS = {
    "captured": "recorded chains, bit for bit",
    "compile": "compiled chains, to 10⁻⁴",
    "fused": "fused chains with eager's noise, to 10⁻⁴",
    "update": "whole updates of a method, bit for bit",
    "log_z": "a path to log Z, bit for bit",
    "memory": "a long chain's memory is a short one's (bytes)",
}
"""What each kind of law says."""


def laws(folder: Path) -> str:
    """How many laws of each kind held on every device, and the largest difference."""
    parts = []
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        held = json.loads(file.read_text())
        kinds: dict[str, list[dict[str, Any]]] = {}
        for row in held["suites"].get("laws", []):
            if row["metric"].startswith("law/"):
                kinds.setdefault(row["metric"].split("/")[1], []).append(row)
        rows = [
            [
                LAWS.get(kind, kind),
                f"{sum(r['ok'] for r in own)} of {len(own)}",
                _shown(float(max(r["value"] for r in own))),
            ]
            for kind, own in kinds.items()
        ]
        if rows:
            head = ["engines held to eager", "hold", "largest difference"]
            parts.append(f"{held['device']}, torch {torch_of(held, 'laws')}:\n\n{_markdown(head, rows)}")
    return (
        "\n\n".join(parts) or "*Not held to eager yet: `metastable bench --suite laws --out results/bench`.*"
    )


def speed(folder: Path, suites: Sequence[str] = ()) -> str:
    """Milliseconds by engine and peer for every device that was measured, one table for each suite."""
    parts = [laws(folder)] if "laws" in suites else []
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        held = json.loads(file.read_text())
        for suite, (front, title) in SPEEDS.items():
            if suite not in held["suites"] or (suites and suite not in suites):
                continue
            cells: dict[tuple[str, str], dict[str, float]] = {}
            for row in held["suites"][suite]:
                name, _, rest = row["metric"].partition("/")
                value = row["value"]
                if name == "steps_per_second":  # of a CPU, which has one problem
                    name, rest, value = front, f"mlp/1024/{rest}", 1e3 / value
                if name == "log_z_ms":
                    name, rest = front, f"log_z/{rest}"
                if name == front:
                    told, named = rest.split("/"), 1 if suite == "policy" else 2
                    problem, case = "/".join(told[:named]), told[named:]
                    kernel = next((part for part in case if part in ("ula", "mala", "hmc")), "")
                    column = " ".join(part for part in case if part != kernel)
                    cells.setdefault((problem, kernel or "ula"), {})[column] = value
            columns = dict.fromkeys(column for line in cells.values() for column in line)
            columns = sorted(columns, key=lambda column: column.startswith("evaluations"))  # of one model
            moves = suite == "sampler"
            rows = [
                [PROBLEMS.get(problem, problem), *([kernel.upper()] if moves else [])]
                + [_shown(line.get(column)) for column in columns]
                for (problem, kernel), line in cells.items()
            ]
            head = [title, *(["kernel"] if moves else []), *columns]
            parts.append(f"{held['device']}, torch {torch_of(held, suite)}:\n\n{_markdown(head, rows)}")
    return "\n\n".join(parts) or "*Nothing is measured yet: `metastable bench --out results/bench`.*"


def pictures_of(own: Sequence[Result]) -> dict[str, Path]:
    """The pictures of an experiment, each of the largest scale that has it.

    Their names are those under which they are kept for the site, which can only show what lies in docs/.
    """
    largest = {picture.name: (r, picture) for r in own for picture in r.pictures}
    in_order = sorted(
        largest, key=lambda name: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", name)]
    )
    return {f"{r.name}-{r.scale}-{p.name}": p for r, p in (largest[name] for name in in_order)}


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _shown(value: Any) -> str:
    """A number in four digits, anything else as it is.

    >>> _shown(0.123456), _shown(None), _shown("collapses"), _shown(2000), _shown(12345.6), _shown(1.23456e13)
    ('0.1235', '–', 'collapses', '2000', '12346', '1.235e+13')
    """
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"
    return str(value)


def _ours(row: dict[str, Any]) -> str:
    error = row.get("std_error")
    return _shown(row["value"]) + (f" ± {error:.2g}" if isinstance(error, float) else "")


def _required(row: dict[str, Any]) -> str:
    if not row.get("relation") or row.get("target") is None:
        return "–"
    return f"{SIGNS.get(row['relation'], row['relation'])} {_shown(row['target'])}"


def _verdict(row: dict[str, Any]) -> str:
    if not row.get("relation"):
        return "–"
    return "yes" if row["ok"] else "**no**"


def _clock(seconds: float) -> str:
    """Seconds as people say them.

    >>> _clock(3.21), _clock(75.0), _clock(3700.0)
    ('3 s', '1 min 15 s', '1 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def pages(root: Path = ROOT) -> list[Path]:
    """README.md and every page of the documentation, relative to the root."""
    found = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [page.relative_to(root) for page in found]


def stale(root: Path = ROOT) -> list[Path]:
    """Pages whose tables, and pictures whose bytes, are not what the results say."""
    results = read_results(root)
    old = [p for p in pages(root) if (text := (root / p).read_text()) != rendered(text, p, results)]
    wanted = _wanted_pictures(results)
    kept = {p.name for p in (root / PICTURES).glob("*.png")}
    changed = {n for n, source in wanted.items() if n in kept and not _same(root / PICTURES / n, source)}
    return [*old, *(PICTURES / n for n in sorted((wanted.keys() ^ kept) | changed))]


def _wanted_pictures(results: list[Result]) -> dict[str, Path]:
    return {copied: p for own in by_name(results).values() for copied, p in pictures_of(own).items()}


def _same(a: Path, b: Path) -> bool:
    return a.read_bytes() == b.read_bytes()


def write(root: Path = ROOT) -> list[Path]:
    """Bring every page and picture up to date; what changed."""
    changed, results = stale(root), read_results(root)
    for page in pages(root):
        text = (root / page).read_text()
        (root / page).write_text(rendered(text, page, results))
    shutil.rmtree(root / PICTURES, ignore_errors=True)
    for name, source in _wanted_pictures(results).items():
        (root / PICTURES).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, root / PICTURES / name)
    return changed


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Tables of README.md and docs/ from results/.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where something is stale"
    )
    check = parser.parse_args(arguments).check
    changed = stale() if check else write()
    for path in changed:
        print(f"{'out of date' if check else 'written'}: {path}")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
