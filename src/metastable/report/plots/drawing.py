"""What every plot takes and gives: lines, a window, and a drawing with its notes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Series:
    """A line: values over x, with an error band, a colour and a dash pattern."""

    name: str
    x: np.ndarray
    y: np.ndarray
    color: str
    linestyle: Any = "-"
    band: np.ndarray | None = None


@dataclass(frozen=True)
class Drawing:
    """An SVG and what should be said about it."""

    svg: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Window:
    """The rectangle that every panel of a plane shows."""

    x: tuple[float, float]
    y: tuple[float, float]
