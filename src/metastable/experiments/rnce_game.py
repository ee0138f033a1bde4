"""The game of `rnce-learned` as it is played: energy and proposal learn from fresh draws, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from metastable.core.random import generator
from metastable.report.figures import draw_level, palette, picture

from .base import Bench, Row
from .rnce_line import Mixture, log_normal, points, statistics


@dataclass(frozen=True)
class Play:
    """How energy and proposal learn from fresh draws: by whose loss the proposal goes, and where both begin."""

    adversarial: bool
    ratio: float = 1.0
    theta: tuple[float, float] = (0.0, 0.0)
    xi: tuple[float, float] = (-0.45, 0.5572)


PLAYS = {
    f"{where}/{who}": Play(who != "likelihood", 10.0 if who.endswith("10") else 1.0, **start)
    for where, start in {
        "near": {},
        "far proposal": {"theta": (0.5, 0.0), "xi": (12.0, 0.0)},
        "wrong energy": {"theta": (0.0, 0.25)},
    }.items()
    for who in ("likelihood", "adversary", "adversary x10")
}
"""`x10`: the adversary takes steps ten times as long as the energy's."""


def play(
    law: Mixture, how: Play, updates: int, seed: int, runs: int = 8, batch: int = 128, K: int = 4
) -> Tensor:
    """(θ, ξ) after every update of `runs` games by Adam, `(updates, runs, 4)`; infinite from where one ran away."""
    rng = generator(seed)
    theta, xi = (
        torch.tensor([v] * runs, dtype=torch.float64, requires_grad=True) for v in (how.theta, how.xi)
    )
    adam = torch.optim.Adam([{"params": [theta], "lr": 0.01}, {"params": [xi], "lr": 0.01 * how.ratio}])
    course = torch.full((updates, runs, 4), math.inf, dtype=torch.float64)
    for k in range(updates):
        y = law.sample((runs, batch), rng)
        z = torch.randn((runs, batch, K), generator=rng, dtype=torch.float64)
        every, offset = points(law, y, z, xi)
        score = (statistics(every) @ theta[:, None, :, None])[..., 0] + offset
        objective = torch.log_softmax(score, 2)[..., 0].mean(1).sum()
        theta.grad, rival = torch.autograd.grad(-objective, [theta, xi])
        own = log_normal(y, xi[:, :1], xi[:, 1:]).mean(1).sum()
        xi.grad = -rival if how.adversarial else torch.autograd.grad(-own, xi)[0]
        adam.step()
        course[k] = torch.cat([theta.detach(), xi.detach()], 1)
        if not bool(torch.isfinite(course[k]).all()):
            break
    return course


def play_rows(name: str, course: Tensor, rival: Tensor) -> Iterator[Row]:
    """Over the last quarter: how far θ is from θ*, and ξ from ξ̄; the worst of the runs."""
    tail = course[-len(course) // 4 :].mean(0)
    yield Row(f"theta_error/{name}", float(tail[:, :2].abs().amax().nan_to_num(math.inf)), oracle=0.0)
    yield Row(f"adversary_distance/{name}", float((tail[:, 2:] - rival).abs().amax().nan_to_num(math.inf)))


def draw(bench: Bench, courses: Mapping[str, Tensor], rival: Tensor) -> None:
    """θ₂ and m of every game over its updates."""
    with picture(bench.folder / "game.png", 10, 5.6, rows=2, columns=3, sharex=True) as axes:
        for (name, course), i in zip(courses.items(), range(len(courses)), strict=True):
            where, who = name.split("/")
            colour = (palette.blue, palette.vermillion, palette.purple)[i % 3]
            for row, part in ((0, 1), (1, 2)):
                values = course[:, 0, part].numpy()
                axes[row, i // 3].plot(values, color=colour, lw=0.8, label=who)
            axes[0, i // 3].set_title(where)
        for i in range(3):
            draw_level(axes[0, i], 0.0, lw=0.8)
            draw_level(axes[1, i], float(rival[0]), lw=0.8)
            axes[1, i].set_xlabel("update")
        axes[0, 0].set_ylabel("θ₂, truth 0")
        axes[1, 0].set_ylabel("m; dashed: the adversary of the truth")
        axes[0, 0].legend(fontsize=7.5)
