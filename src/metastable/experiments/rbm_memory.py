"""Pattern completion by Hopfield's memory, the last part of `rbm-exact`: random patterns, and seven letters."""

from __future__ import annotations

import torch
from torch import Tensor

from metastable.core.random import derive, generator
from metastable.energies import Hopfield
from metastable.proposals import Signs
from metastable.report.figures import picture

from .base import Bench, Row

LETTERS = {
    "T": "####### ####### ..###.. ..###.. ..###.. ..###.. ..###.. ..###..",
    "L": "##..... ##..... ##..... ##..... ##..... ##..... ####### #######",
    "O": ".#####. ##...## ##...## ##...## ##...## ##...## ##...## .#####.",
    "X": "##...## ##...## .##.##. ..###.. ..###.. .##.##. ##...## ##...##",
    "H": "##...## ##...## ##...## ####### ####### ##...## ##...## ##...##",
    "C": ".###### ##..... ##..... ##..... ##..... ##..... ##..... .######",
    "Z": "####### .....## ....##. ...##.. ..##... .##.... ##..... #######",
}


def completion_rate(
    rule: str, units: int, load: float, repeats: int, seed: int, beta: float | None = None
) -> float:
    """Share of random patterns that half of their units bring back, at `load`·`units` stored ones."""
    found, count = 0.0, max(1, round(load * units))
    for k in range(repeats):
        patterns = Signs.uniform(units).sample(count, generator(derive(seed, "patterns", units, load, k)))
        known = torch.rand(patterns.shape, generator=generator(derive(seed, "known", k))) < 0.5
        back = Hopfield(patterns, rule).complete(patterns, known, beta=beta, seed=k)
        found += float(((back * patterns).mean(1) >= 0.95).double().mean())
    return found / repeats


def letters() -> Tensor:
    """Letters as patterns `(7, 8, 7)`, far from independent of each other."""
    rows = [[[1.0 if c == "#" else -1.0 for c in line] for line in text.split()] for text in LETTERS.values()]
    return torch.tensor(rows)


def memory_rows(bench: Bench) -> list[Row]:
    """Rates at each load, with and without noise."""
    rows = []
    for load in bench.loads:
        for rule in ("hebbian", "pseudo-inverse"):
            rate = completion_rate(rule, bench.units, load, bench.repeats, bench.seed)
            required = (
                (">=", 0.95) if load <= 0.06 or (rule == "pseudo-inverse" and load <= 0.1) else (None, None)
            )
            rows.append(Row(f"completion_rate/{rule}/load={load:g}", rate, *required))
    rate = completion_rate("hebbian", bench.units, bench.loads[0], bench.repeats, bench.seed, beta=6.0)
    return [*rows, Row(f"completion_rate/hebbian/load={bench.loads[0]:g}/beta=6", rate, ">=", 0.95)]


def sheet(images: Tensor, columns: int, frame: float) -> Tensor:
    """Pictures `(n, H, W)` side by side, with grey lines between."""
    framed = torch.nn.functional.pad(images, (1, 1, 1, 1), value=frame)
    rows = [torch.cat(list(framed[k : k + columns]), 1) for k in range(0, len(framed), columns)]
    return torch.cat(rows, 0)


def draw_memory(bench: Bench) -> None:
    """Letters, what is shown of them, and what each rule makes of it."""
    patterns = letters()
    known = torch.zeros_like(patterns, dtype=torch.bool)
    known[:, :4] = True
    shown = torch.where(known, patterns, torch.zeros_like(patterns))
    sheets = {
        "stored": patterns,
        "shown (grey: unknown)": shown,
        "Hebbian": Hopfield(patterns).complete(patterns, known),
        "pseudo-inverse": Hopfield(patterns, "pseudo-inverse").complete(patterns, known),
    }
    with picture(bench.folder / "completion.png", 7.0, 1.2 * len(sheets), len(sheets)) as panels:
        for axes, (title, images) in zip(panels, sheets.items(), strict=True):
            look = {"cmap": "gray_r", "vmin": -1, "vmax": 1, "interpolation": "nearest"}
            axes.imshow(sheet(images, len(images), -0.6), **look)
            axes.set_title(title, fontsize=8)
            axes.set_axis_off()
