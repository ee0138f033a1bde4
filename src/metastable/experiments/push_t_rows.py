"""Rows of `push-t`: scores of every arm with their intervals, then differences start by start."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from metastable.core.types import student_t_quantile
from metastable.policies.environments import PushT
from metastable.policies.intervals import Interval
from metastable.policies.rollouts import HORIZONS, Rollouts

from .base import Bench, Row
from .pieces import Piece
from .push_t_figures import Found

PAPER = {"flow": 0.866, "r-nce": 0.824, "i-r-nce-2": 0.880, "i-r-nce": 0.884, "diffusion": 0.864}
PAPER |= {"diffusion-phi": 0.860}
"""Table 7: maximum within 200 steps, from pictures."""
RIVALS = ("r-nce", "diffusion", "diffusion-phi", "i-r-nce-2")
"""Whom interpolating energies are compared with, beside the flow."""
COMPARED = ("i-r-nce", "i-on-proposal")
NOTHING = ("straight", "random")
"""Those that learn nothing."""
OF_PICTURES = "pictures/"
"""What rows begin with of policies that see pictures."""
TIME = "chunk_ms"
"""Milliseconds of a chunk, where they were taken."""


def in_order(bench: Bench, rows: list[Row]) -> list[Row]:
    """Those of states first, however results were joined."""
    return sorted(rows, key=lambda row: row.metric.startswith(OF_PICTURES))


def rounds_of(piece: Piece) -> int:
    """Rollouts of each start."""
    return piece.arrays["progress"].shape[1]


def rollouts_of(arrays: Mapping[str, np.ndarray]) -> Rollouts:
    """Episodes as they are kept."""
    progress, lengths = (torch.from_numpy(arrays[key]) for key in ("progress", "lengths"))
    return Rollouts(progress.double(), lengths, PushT.measure, "Push-T")


def rows_of(bench: Bench, found: Found) -> list[Row]:
    """Scores of every arm, then differences start by start."""
    rows = []
    for (arm, kind), piece in found.items():
        first = kind == first_kind(found, arm)
        least = {f"maximum/{h}": bench.least.get(f"{arm}/{h}") for h in HORIZONS if first}
        table = {"maximum/200": PAPER.get(arm)} if first else {}
        for name, value in piece.numbers.items():
            if isinstance(value, list):
                measure, _, steps = name.partition("/")
                at, asked = f"{measure}/{arm}/{kind}/{steps}", (">=", least.get(name))
                rows.append(Row(at, value[0], *(asked if asked[1] else (None, None)), table.get(name)))
                rows += [Row(f"{at}/low", value[1]), Row(f"{at}/high", value[2])]
        rows.append(Row(f"rollouts/{arm}/{kind}", rounds_of(piece)))
        rows.append(Row(f"ms_a_step/{arm}/{kind}", piece.numbers["acting_ms"]))
        if TIME in piece.numbers:
            rows.append(Row(f"ms_a_chunk/{arm}/{kind}", piece.numbers[TIME]))
        if first and arm not in NOTHING:
            rows += compared_rows(bench, found, arm)
    return rows


def first_kind(found: Found, arm: str) -> str:
    """`best`, where the arm has it."""
    return "best" if (arm, "best") in found else "one"


def compared_rows(bench: Bench, found: Found, arm: str) -> list[Row]:
    """Of an arm: clear of those that learn nothing, ahead of one draw and of the flow."""
    best = found[arm, first_kind(found, arm)]
    rows = [Row(f"parameters/{arm}", best.numbers["parameters"], "<=", bench.most_parameters)]
    rows.append(Row(f"seconds/{arm}", best.numbers["seconds"]))
    ours, at = rollouts_of(best.arrays), f"maximum/{bench.horizon}"
    for other in NOTHING:
        if (other, "one") in found:
            gap = Interval(*best.numbers[at]).low - Interval(*found[other, "one"].numbers[at]).high
            asked = (">=", 0.0) if arm in bench.required else (None, None)
            rows.append(Row(f"clear_of_{other}/{arm}", gap, *asked))
    compared = {"one_draw": (arm, "one"), "flow": ("flow", "best"), "one_draw_of_flow": ("flow", "one")}
    if arm in COMPARED:
        compared |= {other: (other, first_kind(found, other)) for other in RIVALS}
    for name, key in compared.items():
        if key in found and key != (arm, first_kind(found, arm)):
            for steps in [h for h in HORIZONS if h <= bench.horizon]:
                apart = ours.ahead_of(rollouts_of(found[key].arrays), steps)
                rows += ahead_rows(bench, f"{arm}/{name}/{steps}", apart, len(ours.progress))
    return rows


def ahead_rows(bench: Bench, name: str, apart: Interval, starts: int) -> list[Row]:
    """A paired difference, with its interval and in its own standard errors."""
    error = (apart.value - apart.low) / student_t_quantile(0.975, starts - 1)
    asked = (">=", 2.0) if name in bench.ahead else (None, None)
    return [
        Row(f"ahead_of/{name}", apart.value),
        Row(f"ahead_of/{name}/low", apart.low),
        Row(f"ahead_in_se/{name}", apart.value / max(error, 1e-12), *asked),
    ]
