"""Seeded nonsense for the command line: settings, settings files, data files and damaged run folders.

    python tests/survival/fuzz.py --inputs 5000 --seed 0     # the long one; CI runs a share of it

Every input is one call of the command line in this process. It must end with a documented status, in bounded
processor time and memory, without a traceback; `--dry-run` must refuse exactly what training refuses.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import rough_log_z, sketch

from metastable.cli.main import app
from metastable.core.configure import describe
from metastable.energies.build import ENERGIES
from metastable.kernels import KERNELS
from metastable.methods import METHODS
from metastable.training.config import TrainerConfig

logging.raiseExceptions = False  # of handlers that keep the stream of an earlier call
MOST_SECONDS = 20
"""Processor time of one call; beyond it the call counts as hung."""
MOST_BYTES = 6 << 30
"""Memory that one call may take beyond what is taken already; more of it is refused by the system."""
TINY = {"trainer.steps": 2, "trainer.log_every": 1, "trainer.batch_size": 16, "energy.reference": "gaussian"}
DATA = "toy:two-modes?n=40"
SLOW = ("flow", "interpolant", "diffusion", "diffusion-phi")
"""Energies that solve an equation for every density."""
SOLVED = {"steps": 8, "scored": 4}
"""Few steps of such an equation: with hundreds one second derivative takes longer than a call may."""
UNJUDGED = 3
"""Of four trainings so many are not judged, which takes longest."""


@dataclass(frozen=True)
class Case:
    """One call: what it is of, its words, the statuses it may end with, and whether training takes too long."""

    kind: str
    words: tuple[str, ...]
    allowed: frozenset[int] = frozenset({0, 1, 2})
    only_dry: bool = False

    @classmethod
    def of(
        cls, kind: str, *words: object, allowed: tuple[int, ...] = (0, 1, 2), only_dry: bool = False
    ) -> Case:
        return cls(kind, tuple(map(str, words)), frozenset(allowed), only_dry)


class Hung(BaseException):
    """The call used up its time."""


@contextmanager
def bounded(seconds: int = MOST_SECONDS, extra: int = MOST_BYTES) -> Iterator[None]:
    """Within so much processor time and address space; clocks of the wall would see who else is at work."""

    def late(number: int, frame: Any) -> None:
        raise Hung

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGVTALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (taken + extra, before[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGVTALRM, handler)


def call(words: tuple[str, ...]) -> tuple[int, str, str]:
    """(status, what speaks against it or nothing, the words on stderr) of one call."""
    try:
        with bounded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = CliRunner().invoke(app, list(words))
    except Hung:
        return -1, "hung", ""
    error = done.exception
    if isinstance(error, Hung):
        return -1, "hung", ""
    if error is not None and not isinstance(error, SystemExit):
        return -1, f"traceback: {type(error).__name__}: {error}"[:300], ""
    wrong = ""
    if done.exit_code not in (0, 1, 2):
        wrong = f"status {done.exit_code}"
    elif "Traceback" in done.output:
        wrong = "prints a traceback"
    elif done.exit_code == 1 and "diverged" not in done.stderr:
        wrong = f"status 1 is for divergence, said {done.stderr[-200:]!r}"
    elif done.exit_code == 2 and not done.stderr.strip():
        wrong = "refused without a word"
    return done.exit_code, wrong, done.stderr


def judge(case: Case) -> str:
    """What speaks against a case, in words; empty where nothing does."""
    status, wrong, said = call(case.words)
    if not wrong and status not in case.allowed:
        wrong = f"status {status}, expected one of {sorted(case.allowed)}: {said[-200:]}"
    if not wrong and "--dry-run" in case.words and not case.only_dry:
        really, wrong, told = call(tuple(word for word in case.words if word != "--dry-run"))
        if not wrong and (really == 2) != (status == 2):
            wrong = f"--dry-run ends with {status}, training with {really}: {(said + told)[-300:]}"
    return wrong


# ---- values


def nonsense(rng: random.Random) -> str:
    """A value as one would type it after `--set NAME=`."""
    return rng.choice(
        [
            *("0", "-1", "1", "2", "3", "7", "1.5", "-0.5", "0.999", "1e-300", "1e300", "-1e300", "1e12"),
            *(
                "NaN",
                "Infinity",
                "-Infinity",
                str(10**20),
                str(-(10**20)),
                str(2**63),
                "9" * 400,
                "1" + "0" * 5000,
            ),
            *(
                "true",
                "false",
                "null",
                "",
                '""',
                "word",
                "é\u2028\u0000"[:2],
                "auto",
                "none",
                "a b",
                "x" * 3000,
            ),
            *("[]", "{}", "[[]]", "[1]", "[2, 3]", "[0]", "[-1]", '["a"]', "[null]", "[1e300]", "[4, [4]]"),
            *(
                "[true]",
                "[0.5, 0.9]",
                "[0.5, 0.9, 0.99]",
                '{"name": "mlp"}',
                '{"name": []}',
                '{"name": null}',
            ),
            *(
                '{"name": {"name": 1}}',
                '{"steps": "x"}',
                "[" * 50 + "]" * 50,
                "[" * 5000,
                "<function>",
                "../../x",
            ),
            *(
                '{"a": {"b": {"c": {}}}}',
                "[1000000000000]",
                "1_000",
                "0x10",
                "+1",
                "cuda",
                "mps",
                "cpu:7",
                ":",
            ),
        ]
    )


def paths_of(tree: Any, prefix: str = "") -> list[str]:
    """Dotted names of all leaves and tables of a tree."""
    if not isinstance(tree, dict):
        return [prefix]
    inside = [
        path for key, value in tree.items() for path in paths_of(value, f"{prefix}.{key}" if prefix else key)
    ]
    return inside + ([prefix] if prefix else [])


def default_tree(rng: random.Random) -> dict[str, Any]:
    """Settings of a tiny training with a random method, energy and kernel."""
    method = rng.choice(sorted(METHODS))
    energy = rng.choice(["mlp", "mlp", "mlp", *sorted(ENERGIES)])
    try:
        described = describe(METHODS[method]())
    except Exception:
        described = {"name": method}
    tree = {
        "data": DATA,
        "energy": describe(ENERGIES[energy]()),
        "method": described,
        "trainer": describe(TrainerConfig()) | {"optimiser": {"name": "adam", "betas": [0.9, 0.999]}},
        "seed": 0,
        "held_out": 0.1,
        "units": "auto",
        "dequantise": False,
    }
    if "kernel" in described and rng.random() < 0.5:
        tree["method"]["kernel"] = describe(KERNELS[rng.choice(sorted(KERNELS))]())
    if "hidden" in tree["energy"]:
        tree["energy"]["hidden"] = [4]
    tree["energy"] |= {name: few for name, few in SOLVED.items() if name in tree["energy"]}
    for name in ("walkers", "buffer"):
        if isinstance(described.get(name), int):
            described[name] = 64
    return tree


# ---- kinds of inputs


def settings(rng: random.Random, place: Path, run: Path) -> Case:
    """One or two settings of a method, an energy, a kernel or the trainer, set to nonsense."""
    tree = default_tree(rng)
    words = ["--method", tree["method"]["name"], "--data", DATA, "--out", place / "run", "--no-progress"]
    if tree["energy"]["name"] != "mlp":
        words += ["--energy", tree["energy"]["name"]]
    else:
        words += ["--set", "energy.hidden=[4]"]
    for name, value in TINY.items():
        if name != "energy.reference" or "reference" in tree["energy"]:
            words += ["--set", f"{name}={value}"]
    if isinstance(tree["method"].get("walkers"), int):
        words += ["--set", "method.walkers=64"]
    for name, few in SOLVED.items():
        words += ["--set", f"energy.{name}={few}"] if name in tree["energy"] else []
    for _ in range(rng.choice([1, 1, 2])):
        words += ["--set", f"{rng.choice(paths_of(tree))}={nonsense(rng)}"]
    slow = tree["energy"]["name"] in SLOW
    return Case.of("settings", "train", *words, "--dry-run", only_dry=slow)


FLAGS = {
    "--steps": ("0", "-1", "1e3", "", "x", str(10**20), "2.5", "NaN"),
    "--seed": ("-1", str(2**63), str(2**64), str(10**400), "", "1.5", "x"),
    "--learning-rate": ("0", "-1", "nan", "inf", "1e300", "1e-300", "x", ""),
    "--device": (
        "mps",
        "cpu:7",
        "cuda",
        "cuda:0",
        "cuda:x",
        "cpu:",
        "cpu:-1",
        "tpu",
        "",
        "meta",
        "cpu:0",
        "xla",
    ),
    "--precision": ("16-true", "", "64", "bf16", "bf16-mixed", "64-true"),
    "--held-out": ("1", "-0.1", "nan", "0.999999", "inf", "x", "1e-300"),
    "--units": ("", "metres", "none", "scale", "whiten", "common"),
    "--method": ("", "[]", "jarzinski", "{}", "pcd,cd", " ", "custom", "None", "density"),
    "--energy": (
        "",
        "custom",
        "mlp:",
        ":",
        "os:system",
        "nowhere:f",
        "builtins:list",
        "json:loads",
        "conv",
        "rbm",
        "{}",
    ),
    "--data": (
        *("", "toy:", "toy:nothing", "toy:two-modes?n=0", "toy:two-modes?n=-5", f"toy:two-modes?n={10**20}"),
        *(
            "toy:two-modes?n=1e12",
            "toy:two-modes?n=1000000000000",
            "toy:two-modes?noise=nan",
            "toy:two-modes?",
        ),
        *(
            "toy:two-modes?noise=1e300",
            f"toy:two-modes?seed={10**30}",
            "toy:two-modes?n=3&n=4",
            "toy:digits?n=99999",
        ),
        *(
            "mnist:",
            "mnist:/nowhere",
            "images:/",
            "images:/nowhere",
            "cifar10:/etc",
            "/",
            "/dev/null",
            "/dev/zero",
        ),
        *(
            "nowhere.npy",
            "x.pt",
            "~",
            "a\x00b.npy",
            "x" * 5000 + ".npy",
            "toy:two-modes?n=9223372036854775807",
        ),
        *(
            "mnist:/tmp?n=-1",
            "images:/tmp?size=1e9",
            "toy:pinwheel-given",
            "toy:digits?n=40",
            "toy:digits?n=40&noise=1e300",
            "toy:two-modes?noise=1e25",
            "https://x.org/a.npy",
        ),
    ),
    "--config": ("", "/", "nowhere.json", "/dev/null", "x.toml", "two-modes"),
    "--out": ("", "/", "/dev/null", "/dev/null/x", "a\x00b", "x" * 300, "/etc"),
}


def flags(rng: random.Random, place: Path, run: Path) -> Case:
    """A flag of `train` with a value of nonsense."""
    flag = rng.choice(sorted(FLAGS))
    value = rng.choice(FLAGS[flag])
    given = {"--data": DATA, "--out": place / "run", "--steps": "2", flag: value}
    words = [word for pair in given.items() for word in pair]
    small = ["--set", "trainer.batch_size=16"] + (
        [] if flag == "--energy" else ["--set", "energy.hidden=[4]"]
    )
    small += [] if flag == "--method" else ["--set", "method.walkers=64"]
    return Case.of("flags", "train", *words, *small, "--no-progress", "--dry-run")


def mutated(tree: Any, rng: random.Random) -> Any:
    """A tree of JSON with one place changed to nonsense, left out, or nested."""
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        key = rng.choice(sorted(tree))
        roll = rng.random()
        if roll < 0.1:
            return {k: v for k, v in tree.items() if k != key}
        if roll < 0.15:
            return {**tree, rng.choice(["", "é", "name", "x" * 100]): 1}
        return {**tree, key: mutated(tree[key], rng)}
    text = nonsense(rng)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Bytes cut short, with a bit turned, doubled, emptied, or made up."""
    roll = rng.randrange(7)
    if roll == 0 or not content:
        return b""
    if roll == 1:
        return content[: rng.randrange(len(content))]
    if roll == 2:
        return rng.randbytes(rng.randrange(1, 400))
    if roll == 3:
        return content + content
    if roll == 4:
        at = rng.randrange(len(content))
        return content[:at] + rng.randbytes(rng.randrange(1, 9)) + content[at + rng.randrange(9) :]
    at, bit = rng.randrange(min(len(content), 300) if roll == 5 else len(content)), rng.randrange(8)
    return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]


def config_files(rng: random.Random, place: Path, run: Path) -> Case:
    """A settings file of nonsense: of a wrong kind, deeply nested, damaged, or with one place changed."""
    path = place / rng.choice(["c.json", "c.json", "c.toml", "c.yaml"])
    tree = default_tree(rng)
    tree["trainer"] |= {"steps": 2, "batch_size": 16, "device": "cpu"}
    roll = rng.random()
    if roll < 0.6:
        for _ in range(rng.choice([1, 1, 2])):
            tree = mutated(tree, rng)
        content = json.dumps(tree).encode()
    elif roll < 0.8:
        content = damaged_bytes(json.dumps(tree, indent=1).encode(), rng)
    else:
        text = rng.choice(
            [
                *(
                    "[" * 100_000,
                    '{"a":' * 50_000,
                    "[]",
                    "3",
                    '"x"',
                    "null",
                    "{",
                    "\ufeff{}",
                    "a = [[1]",
                    "data = 1979-05-27",
                ),
                *(
                    "[data]\nsource = 3",
                    "method = [1, 2]",
                    '[[method]]\nname = "cd"',
                    "a." * 20_000 + "b = 1",
                    "seed = 0x10",
                ),
                *(
                    '{"version": [], "data": "x"}',
                    '{"version": "99.0.0"}',
                    '{"method": {"name": ["cd"]}}',
                    '{"seed": 1e400}',
                ),
                *(
                    "x = " + "[" * 5000 + "]" * 5000,
                    '{"energy": [{"name": "mlp"}]}',
                    '{"data": ["toy:two-modes"]}',
                ),
            ]
        )
        content = text.encode()
    path.write_bytes(content)
    words = ("train", "--config", path, "--out", place / "run", "--no-progress", "--dry-run")
    return Case.of("config files", *words, only_dry=trains_long(content))


def trains_long(content: bytes) -> bool:
    """Whether a settings file asks for a slow energy, for many updates, or leaves their number to us."""
    try:
        tree = json.loads(content)
        name, steps = tree.get("energy", {}).get("name"), tree.get("trainer", {}).get("steps")
    except (ValueError, AttributeError, RecursionError):
        return False
    return name in SLOW or steps is None or (isinstance(steps, (int, float)) and steps > 9)


def npy_header(shape: str, dtype: str = "'<f4'", order: str = "False") -> bytes:
    """The beginning of an `.npy` file that claims `shape`."""
    text = f"{{'descr': {dtype}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    text += b" " * (63 - (len(text) + 10) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def hostile_npy(rng: random.Random) -> bytes:
    """An `.npy` file whose header claims too much, or something else than numbers."""
    return rng.choice(
        [
            npy_header("(1000000000000,)"),
            npy_header("(4611686018427387904, 8)") + b"\0" * 64,
            npy_header("(-3, 2)") + b"\0" * 64,
            npy_header("(10, 0)"),
            npy_header("()") + b"\0" * 4,
            npy_header("(4, 2)", "'|O'") + b"cos\nsystem\n(S'true'\ntR.",
            npy_header("(4, 2)", "'<U9'") + b"\0" * 288,
            npy_header("(4, 2)", "[('a', '<f4')]") + b"\0" * 32,
            npy_header("(4, 2)", "'<M8[s]'") + b"\0" * 64,
            npy_header("(4, 2)", "'<c8'") + b"\0" * 64,
            npy_header("(3, 2)", "'<f4'", "1") + b"\0" * 24,
            npy_header("(" * 90 + ")" * 90),
            npy_header("(2.5, 2)"),
            npy_header("(__import__('os').getpid(), 2)"),
            b"\x93NUMPY\x03\x00" + struct.pack("<I", 2**31) + b"{",
            b"\x93NUMPY\x09\x00" + b"\0" * 50,
        ]
    )


def csv_text(rng: random.Random) -> bytes:
    """A table of nonsense."""
    return rng.choice(
        [
            *(
                b"",
                b"\n\n",
                b"a,b\n",
                b"a,b\n1,2\n",
                b"1,2\n3\n",
                b"1;2\n3;4\n",
                b"1,2\nx,y\n",
                b"1,2\n,\n",
                b"\xff\xfe1,2\n",
            ),
            *(
                b"1,1e400\n2,3\n4,5\n",
                b"nan,1\n2,3\n",
                b'"1,2\n3,4\n',
                b"1,2\n3,4\x00\n",
                b",a\n0,1\n1,2\n2,5\n",
                b"1\n" * 30,
            ),
            *(
                b"1,2\n" * 30,
                b"<script>alert(1)</script>,b\n" + b"1,2\n3,4\n5,7\n" * 9,
                b"9" * 200_000 + b",1\n2,3\n",
            ),
            *(
                b"1," * 200_000 + b"1\n",
                b"a,a\n" + b"1,2\n3,5\n9,1\n" * 9,
                b"1e-300,1\n2e-300,4\n5e-300,3\n" * 9,
            ),
            *(b"1e300,1\n2e300,4\n5e300,3\n" * 9, b"1e38,1\n-2e38,4\n5e37,3\n" * 9, b"0,0\n0,0\n0,0\n" * 9),
        ]
    )


def zip_of(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def data_files(rng: random.Random, place: Path, run: Path) -> Case:
    """A file of data: hostile, damaged, of another kind than its name says, or merely odd."""
    good = np.random.default_rng(rng.randrange(99)).normal(size=(40, 2)).astype(np.float32)
    roll, path = rng.randrange(8), place / "x.npy"
    if roll == 0:
        path.write_bytes(hostile_npy(rng))
    elif roll == 1:
        np.save(path, good)
        path.write_bytes(damaged_bytes(path.read_bytes(), rng))
    elif roll == 2:
        path = place / "x.npz"
        np.savez_compressed(
            path, **{rng.choice(["x", "y", "data", "labels", "given"]): good, "labels": np.arange(40) % 3}
        )
        path.write_bytes(damaged_bytes(path.read_bytes(), rng))
    elif roll == 3:
        path = place / "x.npz"
        bomb = npy_header(rng.choice(["(500000000, 2)", "(20000000,)", "(10, 2)"])) + b"\0" * (1 << 22)
        names = rng.choice(
            [["x.npy"], ["../x.npy"], ["x.npy", "given.npy"], ["x"], [], ["x.npy", "labels.npy"]]
        )
        zip_of(path, dict.fromkeys(names, rng.choice([bomb, hostile_npy(rng), b"", b"x"])))
    elif roll == 4:
        path = place / rng.choice(["x.csv", "x.tsv", "x.npy", "x.npz"])
        path.write_bytes(csv_text(rng))
    elif roll == 5:
        odd = [good[:2], good[:3], good[:, :1], good[None], good * 0, good * 1e-30, good * 1e30, good.round()]
        odd += [
            good.astype(">f8"),
            good.astype(np.float16),
            (good > 0),
            good.reshape(40, 2, 1),
            good.reshape(10, 1, 4, 2),
        ]
        np.save(path, rng.choice(odd))
    elif roll == 6:
        return picture_folder(rng, place)
    else:
        path = place / rng.choice(["d.npy", "x.exe", "x", "x.pkl", "x.NPY", "x.json"])
        path.mkdir() if path.suffix == ".npy" else path.write_bytes(rng.randbytes(60))
    return data_case(place, path)


def data_case(place: Path, source: object) -> Case:
    small = [
        "--steps",
        2,
        "--set",
        "energy.hidden=[4]",
        "--set",
        "trainer.batch_size=16",
        "--set",
        "method.walkers=64",
    ]
    return Case.of(
        "data files", "train", "--data", source, "--out", place / "run", *small, "--no-progress", "--dry-run"
    )


def picture_folder(rng: random.Random, place: Path) -> Case:
    """A folder of pictures with one that is hostile or odd."""
    folder = place / "pictures" / "a"
    folder.mkdir(parents=True)
    for i in range(4):
        pixels = np.random.default_rng(i).integers(0, 255, (4, 4), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    first = (folder / "0.png").read_bytes()
    size = struct.pack(">II", rng.choice([2**31 - 1, 60_000, 0, 5]), rng.choice([2**31 - 1, 60_000, 4]))
    body = rng.choice([damaged_bytes(first, rng), first[:16] + size + first[24:], b"BM" + b"\0" * 60, b""])
    (folder / rng.choice(["0.png", "z.png", "z.bmp", "z.webp"])).write_bytes(body)
    return data_case(place, f"images:{folder.parent}")


def damaged_folders(rng: random.Random, place: Path, run: Path) -> Case:
    """A run with one file damaged, removed, made a folder, or changed in one place; then a command on it."""
    folder = place / "run"
    shutil.copytree(run, folder)
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix not in (".html", ".png"))
    texts = [p for p in files if p.suffix in (".json", ".jsonl") and p.name != "manifest.json"]
    path = rng.choice(texts if rng.random() < 0.7 else files)
    roll = rng.random()
    if path.suffix == ".json" and roll < 0.6:
        path.write_text(json.dumps(mutated(json.loads(path.read_text()), rng)))
    elif path.suffix == ".jsonl" and roll < 0.6:
        lines = path.read_text().splitlines()
        at = rng.randrange(len(lines))
        lines[at] = rng.choice([nonsense(rng), json.dumps(mutated(json.loads(lines[at]), rng))])
        path.write_bytes("\n".join(lines).encode("utf-8", "replace"))
    elif roll < 0.7:
        path.unlink()
        if rng.random() < 0.5:
            path.mkdir()
    else:
        path.write_bytes(damaged_bytes(path.read_bytes(), rng))
    more = ["--steps", 2] if rng.random() < 0.5 else []
    command: list[list[object]] = [
        ["sample", folder, "--n", 5, "--out", place / "s.npy", *more],
        ["evaluate", folder, "--out", place / "e.json"],
        ["evaluate", folder],
        ["score", folder, "--data", DATA, "--out", place / "s.csv"],
        ["report", folder],
        ["train", "--resume", "--out", folder, "--no-progress"],
        ["train", folder, "--out", place / "again", "--no-progress", "--dry-run"],
        ["compare", folder, run, "--out", place / "compared"],
    ]
    return Case.of("damaged folders", *rng.choice(command))


def commands(rng: random.Random, place: Path, run: Path) -> Case:
    """Other commands with nonsense for their options."""
    value = nonsense(rng)
    words: list[list[object]] = [
        ["sample", run, "--n", value, "--out", place / "s.npy"],
        ["sample", run, "--steps", value, "--out", place / "s.npy"],
        ["sample", run, "--n", 5, "--seed", value, "--out", place / "s.npy"],
        ["sample", run, "--n", 5, "--label", rng.choice(["0", "-1", "99", "x"]), "--out", place / "s.npy"],
        [
            "sample",
            run,
            "--n",
            5,
            "--given",
            rng.choice(["0.5", "x.npy", "", "nan,1", value]),
            "--out",
            place / "s.npy",
        ],
        ["sample", run, "--n", 5, "--corrected", "--out", place / "s.npy"],
        ["sample", rng.choice([place, "/", "", "/dev/null", place / "none"]), "--out", place / "s.npy"],
        [
            "sample",
            run,
            "--n",
            5,
            "--out",
            rng.choice([place, "", "/x.npy", "/dev/null", "s.txt", "/dev/null/s.npy"]),
        ],
        ["evaluate", run, "--data", rng.choice(FLAGS["--data"]), "--out", place / "e.json"],
        ["evaluate", run, "--device", rng.choice(FLAGS["--device"]), "--out", place / "e.json"],
        ["evaluate", run, "--energy", rng.choice(FLAGS["--energy"]), "--out", place / "e.json"],
        ["evaluate", run, "--ood", DATA, "--out", place / "e.json"],
        ["score", run, "--data", rng.choice(FLAGS["--data"]), "--out", place / "s.csv"],
        ["score", run, "--data", DATA, "--outliers", value, "--out", place / "s.csv"],
        ["score", run, "--data", DATA, "--seed", value, "--out", place / "s.npz"],
        ["report", rng.choice([place, "/", "", "/dev/null", place / "none", "/proc"])],
        ["compare", rng.choice([value, "cd,cd", "", "jarzynski"]), "--dry-run", "--out", place / "c"],
        ["compare", "--data", rng.choice(FLAGS["--data"][:6]), "--dry-run", "--out", place / "c"],
        ["reproduce", value, "--dry-run"],
        ["reproduce", "jarzynski-gmm", "--scale", value, "--dry-run"],
        ["bench", "--suite", rng.choice(["x", "", "updatte", value or "x"]), "--out", place / "b"],
        [rng.choice(["", "trian", "--nothing", "-x", "train --"])],
    ]
    chosen = [str(word) for word in rng.choice(words)]
    return Case.of("commands", *chosen)


KINDS: tuple[tuple[Callable[[random.Random, Path, Path], Case], float], ...] = (
    (settings, 5),
    (config_files, 2),
    (damaged_folders, 2),
    (data_files, 1.5),
    (flags, 1),
    (commands, 1),
)


def make_run(place: Path, method: str = "jarzynski") -> Path:
    """A tiny finished run, to be damaged."""
    data = place / "rows.npy"
    rows = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    rows[:30] += 9  # two modes, which then are in the summary
    np.save(data, rows)
    small = ["energy.hidden=[4]", "energy.reference=gaussian", "trainer.batch_size=16", "trainer.log_every=1"]
    small += ["method.walkers=64", "trainer.steps=4", "trainer.checkpoint_every=2"]
    words = ["train", "--data", str(data), "--method", method, "--out", str(place / "run"), "--no-progress"]
    done = CliRunner().invoke(app, [*words, *(word for s in small for word in ("--set", s))])
    assert done.exit_code == 0, done.output
    return place / "run"


@contextmanager
def quick() -> Iterator[None]:
    """Judged by few walkers, and pictures not drawn: nobody looks at either."""
    with rough_log_z(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", sketch)
        yield


@contextmanager
def unjudged() -> Iterator[None]:
    """A training ends with its last update."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metastable.api._judged", lambda run, plan, *_: run.outward(plan.coordinates))
        yield


def fuzz(inputs: int, seed: int, place: Path, run: Path, only: str = "", tell: bool = False) -> list[str]:
    """What went wrong in so many inputs, one text each, with all that is needed to see it again."""
    found, spent = [], Counter[str]()
    kinds, shares = zip(*KINDS, strict=True)
    for i in range(seed, seed + inputs):
        rng = random.Random(i)
        make = rng.choices(kinds, shares)[0]
        if only and make.__name__ != only:
            continue
        here = Path(tempfile.mkdtemp(dir=place))
        began = time.process_time()
        case = make(rng, here, run)
        with unjudged() if i % (UNJUDGED + 1) else nullcontext():
            wrong = judge(case)
        spent[case.kind] += time.process_time() - began
        shutil.rmtree(here, ignore_errors=True)
        if wrong:
            found.append(f"seed {i}, {case.kind}: {wrong}\n    metastable {' '.join(case.words)[:600]}")
            if tell:
                print(found[-1], flush=True)
    if tell:
        print({kind: round(seconds, 1) for kind, seconds in spent.items()})
    return found


def main() -> int:
    """Run as many as asked for; status 1 where anything was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="inputs of one kind: settings, flags, damaged_folders, …")
    asked = parser.parse_args()
    place = Path(tempfile.mkdtemp())
    try:
        with quick():
            run = make_run(place)
            began = time.perf_counter()
            found = fuzz(asked.inputs, asked.seed, place, run, asked.only, tell=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(f"{asked.inputs} inputs, {len(found)} wrong, {time.perf_counter() - began:.0f} s")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
