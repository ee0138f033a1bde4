"""The page of a policy's rollouts: scores, what it thinks of doing at a start, films, and every episode."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .figures import MODEL, MUTED, new_figure
from .formatting import value_text
from .markup import document, png, section, table, tag
from .parts import contents, frame, masthead, pictures

FILE = "rollouts.html"
DRAWN = 64
"""Chunks that are drawn on a scene."""


def write_rollout_page(
    folder: Path,
    title: str,
    scores: Mapping[str, Any],
    episodes: Sequence[Mapping[str, Any]],
    scenes: Sequence[tuple[np.ndarray | None, np.ndarray]] = (),
    films: Sequence[str] = (),
) -> Path:
    """Write `rollouts.html` into a folder.

    Args:
        folder: where.
        title: of the page.
        scores: in words, by name.
        episodes: one row each.
        scenes: a picture of a start, or None, and chunks `(n, N, 2)` that the policy may do there, in its pixels.
        films: GIFs in the same folder.
    """
    shown = [
        frame(f"start {i}", png(scene_png(*scene), f"actions at start {i}")) for i, scene in enumerate(scenes)
    ]
    played = [frame(name, tag("img", src=name, alt=name)) for name in films]
    head = list(episodes[0]) if episodes else []
    parts = [
        section(
            "scores",
            "Scores",
            table(["score", "mean and 95 % interval"], [[k, str(v)] for k, v in scores.items()]),
        ),
        section("scenes", "What it may do first", pictures(shown)) if shown else None,
        section("films", "Episodes", pictures(played)) if played else None,
        section(
            "episodes",
            "Every episode",
            table(head, [[value_text(v) for v in row.values()] for row in episodes]),
        ),
    ]
    there = [part for part in parts if part is not None]
    page = document(f"{title} · metastable", masthead("rollouts", title, None, []), contents(there), *there)
    path = folder / FILE
    path.write_text(page, encoding="utf-8")
    return path


def scene_png(background: np.ndarray | None, chunks: np.ndarray) -> bytes:
    """Chunks `(n, N, 2)` over a picture of the scene, as a PNG: where lines meet, the policy is likely to go."""
    figure = new_figure(3.2, 3.2)
    axes = figure.subplots()
    if background is not None:
        axes.imshow(background, extent=(0, 512, 512, 0))
    for chunk in chunks[:DRAWN]:
        axes.plot(*chunk.T, color=MODEL, lw=0.8, alpha=0.3)
    axes.scatter(*chunks[:DRAWN, -1].T, color=MODEL, s=4, alpha=0.6, edgecolors=MUTED, linewidths=0.2)
    axes.set(xticks=[], yticks=[], aspect="equal")
    if background is not None:
        axes.set(xlim=(0, 512), ylim=(512, 0))
    axes.grid(False)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()
