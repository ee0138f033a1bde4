"""How long to train, and how fast, where nobody says."""

from __future__ import annotations


def default_steps(rows: int, numbers: int) -> int:
    """Updates for `rows` of `numbers` each."""
    return int(min(max(10 * rows ** (2 / 3), 100), 2000))


def default_learning_rate(rows: int, numbers: int) -> float:
    """Adam's rate at the start."""
    return min(0.01, 0.03 / numbers)
