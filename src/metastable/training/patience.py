"""When to end: training stops where held-out rows are no longer more likely, and the best is kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metastable.core.parts import energies_of

LOOKS = 50
"""Looks at the held-out rows in a whole training."""
MOST_ROWS = 2000
LEAST = 10
"""Looks without a better score before a training may end: noise alone makes a few."""
SMOOTH = 3
"""Looks behind one number, since log Z of each has noise of its own."""


class Patience:
    """Mean log-likelihood of held-out rows along training.

    Args:
        rows: held-out rows, `(n, *event)`, with the noise that training ends with: without it they would be most
            likely under a model that is narrower than what is to be learned.
        power: P of the density exp(−P·E).
        steps: updates of the whole training.
        share: of `steps` that may pass without a better score.
    """

    def __init__(self, rows: Tensor, power: float, steps: int, share: float):
        self.rows, self.power = rows[:MOST_ROWS], power
        self.every = max(1, steps // LOOKS)
        self.wait = max(LEAST, round(share * steps / self.every))
        self.scores: list[tuple[int, float]] = []
        self.at = 0
        self.looked = 0
        self.highest = -math.inf
        self.best: Any = None

    def due(self, step: int) -> bool:
        """Whether to look after this update."""
        if step % self.every:
            return False
        self.looked = step
        return True

    def better(self, energy: Callable[[Tensor], Tensor], log_z: float, step: int) -> bool:
        """Score the rows; whether the mean of the last few scores is the highest so far."""
        mean = float(energies_of(energy, self.rows).mean())
        self.scores.append((step, -self.power * mean - log_z))
        recent = [score for _, score in self.scores[-SMOOTH:]]
        score = sum(recent) / len(recent)
        if not score > self.highest:
            return False
        self.highest, self.at = score, step
        return True

    @property
    def spent(self) -> bool:
        """Whether the score has not risen for too long: it fell, or log Z can no longer be told."""
        return bool(self.scores) and self.looked - self.at >= self.wait * self.every

    @property
    def past_its_best(self) -> bool:
        """Whether the rows are less likely now than they were, by more than noise, or nobody can tell any more."""
        if self.scores and self.scores[-1][0] < self.looked:
            return True
        recent = [score for _, score in self.scores[-SMOOTH:]]
        return bool(recent) and sum(recent) / len(recent) < self.highest - self.noise

    @property
    def noise(self) -> float:
        """Standard error of one score, from how much neighbours differ."""
        values = torch.tensor([score for _, score in self.scores], dtype=torch.float64)
        if len(values) < 3:
            return 0.0
        return float((values.diff().diff().square().mean() / 6 / SMOOTH).sqrt())

    def words(self, step: int) -> str:
        """How training ended; empty where it went to its last step and nothing better was left behind."""
        if self.best is not None and self.past_its_best:
            early = "Training ended early, " if self.spent else "Training ended, "
            return (
                f"{early}at step {step}: held-out rows were most likely after step {self.at}, and the model of "
                "that step was kept."
            )
        if self.spent:
            words = f"held-out rows were no more likely than after step {self.at}."
            return f"Training ended early, at step {step}: {words}"
        return ""

    def save(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        scores = torch.tensor(self.scores, dtype=torch.float64).view(-1, 2)
        numbers = {"at": self.at, "looked": self.looked, "highest": self.highest, "seen": True}
        return {"scores": scores, "best": self.best, **numbers}

    def load(self, tree: dict[str, Any], noise: float) -> None:
        """The inverse of `save`; scores of rows without their `noise`, as of earlier releases, are forgotten."""
        if noise and "seen" not in tree:
            self.at = self.looked = tree["looked"]
            return
        self.scores = [(int(step), score) for step, score in tree["scores"].tolist()]
        self.at, self.looked = tree["at"], tree["looked"]
        self.highest, self.best = tree["highest"], tree["best"]
