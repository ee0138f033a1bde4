"""Section 7.3 of the R-NCE paper: paths around ten discs (Figure 4, Tables 3 to 5).

Demonstrations are planned by StochGPMP (`policies.planner`), cut into snippets of 3 + 10 points and learned by
every arm. A policy then walks from start to goal in test worlds, chunk after chunk, the likeliest of ℓ draws each.
What counts is how many of its paths collide and what they cost, (7.2). The paper publishes neither the size of its
world nor its weights: ratios between models can be compared with its numbers, and costs cannot.

Deviations, which trainings of minutes gain from: demonstrations are seen from where one stands
(`policies.path_frames`; `centred=false` is the paper's frame) and mirrored, too (`mirrored=false`). At scale cpu
dense networks see distances in 48 directions (`sight=0`: discs), and two points of a chunk are walked (`execute`).

Every arm is trained in `training/` and judged in `pieces/`: a command makes what is missing and gathers all. Smoke
asks for less than other scales: of one path in each of forty worlds one learns to walk in these worlds alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.core.errors import require, require_choice, require_count
from metastable.core.precision import precision
from metastable.core.random import derive
from metastable.data.demonstration_files import load_episodes, save_episodes
from metastable.data.demonstrations import Demonstrations
from metastable.policies import path_frames as frames
from metastable.policies.intervals import Interval
from metastable.policies.models import PATHS
from metastable.policies.path_world import (
    CONTEXT,
    PREDICTION,
    TEST_SEED,
    WITHIN,
    PathWorlds,
    Straight,
    Wandering,
    judge_paths,
    path_demonstrations,
    path_intervals,
    plan_paths,
    rollout_paths,
)
from metastable.policies.policy import PolicyConfig
from metastable.policies.rollouts import Acting

from .base import Bench, Experiment, Row
from .path_planning_figures import SHOWN, draw
from .path_planning_rows import NOTHING, Found, compared, rows_of
from .pieces import Piece, Pieces
from .policy_arms import ARMS, Task, as_asked, parameters, trained
from .trials import by_scale

CHOICES = (
    "arms",
    "acts",
    "required",
    "worlds",
    "paths",
    "seconds",
    "most_collisions",
    "block",
    "world_seed",
    "worst",
)
"""Settings that say which pieces are made and what is asked of them, or that are kept by a rule of their own."""
COUNTS = {"one": "paths", "best": "ranked_paths"}
"""How many paths there are in each world of those that an arm walks by one draw, and by the best of ℓ."""
FOR_MINUTES = {
    "batch_size": 512,
    "energy_rows": 32,
    "turns": (16, 2),
    "proposal_width": 184,
    "reuse": 10,
    "pool": 1024,
    "warmup": (1000, 0, 1000),
    "ode": (64, 17),
    "training_ode": (64, 17),
    "evaluations": 100,
}
"""What trainings of minutes have in the place of Tables 10 and 11, whose are hours."""
Kept = Callable[[str, str], Pieces]
"""Pieces of an arm and a kind: those of one draw know nothing of how many are ranked, the planner's of neither."""


PLANNER = "planner"
BASELINES: dict[str, type] = dict(zip(NOTHING, (Straight, Wandering), strict=True))


# ---- demonstrations


def demonstrations(bench: Bench) -> Demonstrations:
    """Planned once and kept in `demonstrations.npz`."""
    path = bench.folder / "demonstrations.npz"
    if path.is_file():
        kept = load_episodes(path)
        noisy = (frames.PLACE if bench.centred else "place",)  # files from before they said so
        return replace(kept, noisy=noisy, space=frames.space_of(kept.observations))
    seed = derive(bench.seed, "demonstrations") % 2**31
    settings: dict[str, Any] = {key: bench.settings[key] for key in ("every", "refine", "within")}
    shown = path_demonstrations(bench.train_worlds, bench.planned, seed, **settings, device=bench.device)
    if bench.mirrored:
        shown = frames.with_mirrored(shown)
    if bench.centred:
        shown = frames.centred(shown, bench.sight, bench.networks == "paper" or None)
    save_episodes(path, shown)
    return shown


def planner_rows(bench: Bench, pieces: Pieces) -> list[Row]:
    """What the planner's own paths are worth in the test worlds: a piece of its own."""
    piece = pieces.find(PLANNER)
    if piece is None:
        worlds = PathWorlds.test().to(bench.device)
        planned = plan_paths(worlds, bench.planned_test, derive(bench.seed, "test plans") % 2**31)
        found, sides = judge_paths(worlds, planned), worlds.turning(planned).sign()
        both = (sides.amax(1) > sides.amin(1)) & worlds.in_the_way()  # paths on either side of a disc
        numbers = {
            "free_of_collisions": 1 - float(found["collisions"].mean()),
            "within_0.05_of_the_goal": float((found["goal missed by"] < 0.05).double().mean()),
            "blocked_worlds_with_both_sides": float(both.any(1)[worlds.in_the_way().any(1)].double().mean()),
            "cost": float(found["cost"].mean()),
        }
        piece = pieces.keep(PLANNER, numbers, {"paths": planned[:SHOWN].float().cpu().numpy()})
    least = {"free_of_collisions": 0.95, "within_0.05_of_the_goal": 0.95}
    least["blocked_worlds_with_both_sides"] = bench.both_sides
    asked = {name: (">=", limit) for name, limit in least.items()}
    numbers = piece.numbers.items()
    return [Row(f"planner/{name}", value, *asked.get(name, (None, None))) for name, value in numbers]


# ---- walking


def walked(bench: Bench, pieces: Pieces, policy: Acting, worlds: PathWorlds, arm: str, kind: str) -> Tensor:
    """Paths of a policy in every world, `(W, P, N, 2)`, in blocks of like many draws, with a seed of their own."""
    n, size = bench.settings[COUNTS[kind]], bench.block * (bench.candidates if kind == "one" else 1)

    def walk(paths: range) -> dict[str, np.ndarray]:
        seed = derive(bench.seed, "walk", arm, paths.start) % 2**31
        with precision(bench.precision, bench.device):
            return {"paths": rollout_paths(policy, worlds, len(paths), seed).numpy()}

    counts = tuple(COUNTS.values())
    return torch.from_numpy(pieces.blocks(f"{arm}-{kind}", n, size, walk, axis=1, counts=counts)["paths"])


def judged(worlds: PathWorlds, taken: Tensor) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Numbers of one policy, and arrays: every path's own, and the paths of a few worlds."""
    found = judge_paths(worlds, taken)
    numbers = {key: list(value) for key, value in path_intervals(found).items()}
    arrays = {key: value.float().numpy() for key, value in found.items()}
    return numbers, arrays | {"paths": taken[:SHOWN].float().numpy()}


def told(piece: Piece) -> Piece:
    """A piece with the intervals that its arrays have now, whatever they were when it was kept."""
    values = {key: torch.from_numpy(piece.arrays[key]) for key in ("collisions", "cost", "goal missed by")}
    return replace(piece, numbers=piece.numbers | {k: list(v) for k, v in path_intervals(values).items()})


def make(bench: Bench, kept: Kept, worlds: PathWorlds, task: partial[Task], arm: str) -> None:
    """Pieces of one arm that are missing."""
    kinds = ("one",) if arm in BASELINES else ("best",) if arm == "cloning" else ("one", "best")
    missing = [kind for kind in kinds if kept(arm, kind).find(f"{arm}-{kind}") is None]
    if not missing:
        return
    policy: Any = BASELINES[arm]() if arm in BASELINES else trained(bench, task, arm)
    if policy is None:
        return
    learned = arm not in BASELINES
    own = {"parameters": parameters(policy), "seconds": policy.model.run.seconds} if learned else {}
    for kind in missing:
        acts = as_asked(bench, policy, arm) if learned else policy
        acts = acts.acting(candidates=1) if learned and kind == "one" else acts
        walks = frames.walking(acts) if learned else acts
        numbers, arrays = judged(worlds, walked(bench, kept(arm, kind), walks, worlds, arm, kind))
        kept(arm, kind).finish(f"{arm}-{kind}", numbers | own, arrays)
        rate, cost = (Interval(*numbers[key]) for key in ("collisions", "cost"))
        bench.say(f"{arm}, {kind}: collisions {rate}, cost {cost}")


def walked_worlds(bench: Bench) -> PathWorlds:
    """The worlds that policies walk in: without a seed those of the demonstrations."""
    known = derive(derive(bench.seed, "demonstrations") % 2**31, "train worlds")
    return PathWorlds.draw(bench.worlds, known if bench.world_seed is None else bench.world_seed)


def body(bench: Bench) -> list[Row]:
    """The pieces that were asked for, then rows and figures of all that are there."""
    for name in ("arms", "acts"):
        for arm in bench.settings[name]:
            require_choice(name, arm, ARMS)
    require_count("worlds", bench.worlds, 2)  # intervals are over worlds
    worlds = walked_worlds(bench)
    how = {key: value for key, value in bench.settings.items() if key not in CHOICES} | {"seed": bench.seed}
    how |= {"worlds": bench.worlds, "paths": bench.paths}
    how |= {} if bench.world_seed == TEST_SEED else {"world_seed": bench.world_seed}
    rule = "false with dense networks, which see no tokens; set networks=paper"
    near = bench.near and "near" in bench.changes
    require(not (near and bench.networks == "dense"), "near", rule, bench.near)
    sizes = replace(PATHS, **bench.sizes)
    config = PolicyConfig(CONTEXT, PREDICTION, bench.execute, bench.candidates, 0, 0)

    def kept(arm: str, kind: str = "") -> Pieces:
        others = {count for of, count in COUNTS.items() if of != kind}
        own = {key: value for key, value in how.items() if key not in others}
        return Pieces(bench.folder / "pieces", own | {"acts": bench.acts.get(arm, {})})

    @cache
    def shown() -> Demonstrations:
        found = demonstrations(bench)
        bench.say(f"{len(found)} snippets of planned paths")
        return found

    def task() -> Task:
        things = {**frames.SETS, frames.SIGHT: bench.sight}
        sets = {name: n for name, n in things.items() if name in shown().observations}
        near = frames.DISCS if bench.near and frames.DISCS in sets else ""
        return Task(shown(), config, sizes, padded=False, sets=sets, near=near)

    planned = planner_rows(bench, kept(PLANNER))
    for arm in (*BASELINES, *bench.arms):
        make(bench, kept, worlds, partial(task), arm)
    found: Found = {}
    for arm, _, kind in (name.rpartition("-") for name in kept(PLANNER).names() if name != PLANNER):
        piece = kept(arm, kind).find(f"{arm}-{kind}")
        found |= {} if piece is None else {(arm, kind): told(piece)}
    order = [*ARMS, *BASELINES]
    found = dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1])))
    draw(bench, worlds, found)
    return [*rows_of(bench, found), *planned]


EXPERIMENT = Experiment(
    name="path-planning",
    title="Policies that walk around discs: R-NCE beside flows, diffusions and IBC (Fig. 4, Tables 3-5)",
    paper="Singh, Tu, Sindhwani, TMLR 2024, Section 7.3 and Appendix B.3",
    scales=by_scale(
        {"most_parameters": 510_000, "warmup": 100, "options": {}},
        sizes=({}, {}, FOR_MINUTES),
        rate=(3e-3, 3e-3, 1e-3),
        energy_rate=(None, 1e-3, None),
        precision=("32-true", "32-true", "tf32"),
        ema=(0.99, 0.999, 0.999),
        networks=("dense", "dense", "paper"),
        arms=(
            ("cloning",),
            ("flow", "on-flow", "cloning", "diffusion", "r-nce"),
            (
                *("r-nce", "flow", "diffusion", "diffusion-phi", "ibc"),
                *("r-nce-7", "r-nce-31", "r-nce-pretrained"),
            ),
        ),
        required=(
            ("random/cloning", "straight/cloning"),
            tuple(f"random/{arm}" for arm in ("flow", "on-flow", "r-nce"))
            + tuple(f"straight/{arm}" for arm in ("flow", "on-flow", "diffusion", "r-nce")),
            ("random/r-nce", "straight/r-nce", "straight/flow", "straight/diffusion"),
        ),
        halved=((), (), ("r-nce",)),
        behind=((), (), ("flow", "diffusion", "ibc")),
        worst=((), (), ("ibc",)),
        acts=({}, {"on-flow": {"rank": "energy"}}, {}),
        most_collisions=({}, {}, {"r-nce": 0.05}),
        train_worlds=(40, 2500, 4000),
        planned=(1, 2, 8),
        planned_test=(6, 8, 8),
        both_sides=(0.5, 0.5, 0.5),
        every=(1, 4, 5),
        refine=(False, False, True),
        within=(WITHIN, WITHIN, WITHIN),
        mirrored=(False, True, True),
        centred=(True, True, True),
        sight=(0, 48, 24),
        near=(False, False, True),
        execute=(10, 2, 10),
        worlds=(40, 25, 25),
        world_seed=(None, TEST_SEED, TEST_SEED),
        paths=(1, 8, 384),
        ranked_paths=(1, 8, 8),
        block=(1, 16, 4),
        candidates=(4, 8, 48),
        width=(128, 192, 0),
        layers=(4, 5, 0),
        ode=((8, 5), (16, 9), (64, 17)),
        training_ode=(None, (8, 5), None),
        energy_rows=(None, 64, None),
        turns=(None, (3, 1), None),
        interpolant=("trigonometric", "linear", "trigonometric"),
        alpha=(2.0, 1.0, 2.0),
        units=("none", "none", "none"),
        negatives=(7, 15, 63),
        reuse=(20, 10, 1),
        pool=(1024, 8192, 4096),
        chain=(0, 0, 0),
        batch=(128, 256, 128),
        pretrain=(400, 6000, 10_000),
        density_updates=(800, 8000, 500_000),
        energy_updates=(300, 2000, 1_000_000),
        seconds=(None, None, 520.0),
    ),
    body=body,
    compared=compared,
)
