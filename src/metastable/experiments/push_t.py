"""Section 7.4 of the R-NCE paper: a block in the shape of a T is pushed to its place (Tables 6 and 7).

Policies see states, or with `pictures=true` the agent's position and a picture, drawn of the demonstrations' states
once (`pictures.npz`, which can be taken to where there is no simulator) and of every step of an episode; those that
are learned from are changed at random in the ways that `augment` names.

Every arm learns from the 206 human demonstrations (`METASTABLE_PUSHT` names their folder; the paper has 136) and
is rolled out from stored starts, which no training and no choice of settings sees: maximum and final coverage at
200 and 300 steps, means over starts with their intervals, and differences from the flow start by start. An episode
ends at score 1. Nothing is picked: the weights are those at the end of a training.

Training needs no simulator. An arm that lies finished in `training/` is rolled out wherever `gym-pusht` is
installed; where it is not, the command trains and says what is missing. Rollouts of small dense networks need no
GPU; those of the paper's networks do: 38 chunks an episode, each of 512 steps of an ODE or 1,000 gradients of an
energy. They are kept `block` starts at a time, and a command that was stopped goes on with the next block. With
`timed=false` commands roll out some `kinds` each, and one without it times a chunk of all where nothing else runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.core.errors import InputError, MissingDependencyError, require, require_choice, require_count
from metastable.core.precision import precision
from metastable.core.random import derive, generator
from metastable.data.demonstration_files import load_pusht
from metastable.data.demonstrations import Demonstrations
from metastable.policies.environments import PushT, pusht_pictures, pusht_starts
from metastable.policies.intervals import Interval
from metastable.policies.models import PUSH_T
from metastable.policies.policy import Policy, PolicyConfig
from metastable.policies.rollouts import Acting, rollout_pusht
from metastable.runs.folder import write_arrays

from .base import Bench, Experiment, Row
from .pieces import Piece, Pieces
from .policy_arms import ARMS, Arm, Task, as_asked, concerning, hurried, median_ms, parameters, trained
from .push_t_figures import Found, draw, drawing, show
from .push_t_rows import NOTHING, OF_PICTURES, RIVALS, TIME, in_order, rollouts_of, rounds_of, rows_of
from .trials import by_scale

FOLDER = "METASTABLE_PUSHT"
DENSITIES = ("flow", "diffusion", "diffusion-phi")
ALONE = ("cloning", "proposal")
"""Arms that draw one chunk."""
CHOICES = (
    *("arms", "acts", "kinds", "timed", "gradients", "required"),
    *("seconds", "least", "ahead", "block", "pictures", "workers"),
)
EVERYWHERE: dict[str, Any] = {"options": {}, "sizes": {}, "acts": {}, "kinds": (), "timed": True}
EVERYWHERE |= {"most_parameters": 3_400_000, "warmup": 200, "pretrain": 10_000}
EVERYWHERE |= {"pictures": False, "augment": (), "centred": True}
"""Settings of all scales."""
DRAWN = "pictures.npz"
"""Pictures of the demonstrations, with the states that they are of."""
OF_STATES: dict[str, Any] = {"required": (), "ahead": (), "least": {}}
"""Settings of a scale that ask something of policies which see states, and what pictures have in their place."""
TIMES = 7
"""Chunks that are timed."""


class Going:
    """Goes straight to the middle of the goal, and stays."""

    def reset(self, seed: int | None = None) -> None:
        """Nothing is remembered."""

    def select_action(self, observation: Any) -> Tensor:
        """The middle, `(B, 2)`."""
        return torch.full((len(observation["agent"]), 2), 256.0)


class Anywhere:
    """Is told another point of the window every eight steps."""

    def reset(self, seed: int | None = None) -> None:
        """From the first random number."""
        self.rng, self.step = generator(derive(seed or 0, "anywhere")), 0

    def select_action(self, observation: Any) -> Tensor:
        """A point, `(B, 2)`."""
        if self.step % 8 == 0:
            self.target = 512 * torch.rand(len(observation["agent"]), 2, generator=self.rng)
        self.step += 1
        return self.target


BASELINES: dict[str, type] = dict(zip(NOTHING, (Going, Anywhere), strict=True))


def simulator(bench: Bench) -> bool:
    """Whether Push-T is there; what is missing is said."""
    try:
        PushT(pusht_starts(1))
    except MissingDependencyError as error:
        bench.say(f"no rollouts: {error}. The same command goes on with what lies in {bench.folder}")
        return False
    return True


def demonstrations(bench: Bench) -> Demonstrations:
    """Those of the folder, with pictures where policies see them, which are drawn once."""

    def draw(states: np.ndarray) -> np.ndarray:
        path = bench.folder / DRAWN
        if not path.is_file():
            bench.say(f"{len(states)} pictures of the demonstrations are drawn into {path}")
            write_arrays(path, states=states, pictures=pusht_pictures(states))
        with np.load(path, allow_pickle=False) as kept:
            if not np.array_equal(kept["states"], states):
                raise InputError(f"out: {path} has pictures of other demonstrations; remove it")
            return kept["pictures"]

    return load_pusht(os.environ[FOLDER], draw if bench.pictures else None, centred=bench.centred)


def rollouts_each(bench: Bench, name: str) -> int:
    """Rollouts of each start, by an arm and how it acts: what is to be told apart has `more`."""
    return bench.more.get(name, bench.rollouts)


def rolled(
    bench: Bench, pieces: Pieces, policy: Acting, name: str, before: Piece | None = None
) -> dict[str, np.ndarray]:
    """Every episode of one policy from all starts, `block` of them at a time, with a seed of their own.

    Where rollouts of a start are `apart` they come in rounds over all starts, and those that are `before` serve.
    """
    starts, rollouts = pusht_starts(bench.starts, bench.start_seed), rollouts_each(bench, name)
    rounds = rollouts if bench.apart else 1

    def roll(rows: range, later: Sequence[int] = ()) -> dict[str, np.ndarray]:
        seed = derive(bench.seed, "rollouts", rows.start, *later) % 2**31
        own = starts[rows.start : rows.stop]
        each = {"rollouts": rollouts // rounds, "steps": bench.horizon, "workers": bench.workers}
        with precision(bench.precision, bench.device):
            found = rollout_pusht(policy, own, seed=seed, pictures=bench.pictures, **each)
        costs = {"acting_ms": 1e3 * found.acting / int(found.lengths.max()), "clipped": found.clipped}
        every = {key: np.full(found.lengths.shape, value) for key, value in costs.items()}
        return {"progress": found.progress.float().numpy(), "lengths": found.lengths.numpy(), **every}

    made = [] if before is None else [before.arrays]
    for k in range(0 if before is None else rounds_of(before), rounds):
        own, later = (f"{name}/{k}", (k,)) if k else (name, ())
        made.append(pieces.blocks(own, bench.starts, bench.block, partial(roll, later=later)))
    return {
        key: np.hstack([each[key].reshape(bench.starts, -1, *each[key].shape[2:]) for each in made])
        for key in made[0]
    }


def numbers_of(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Scores at both horizons with their intervals, and what an action cost."""
    found = rollouts_of(arrays).scores()
    at = {name.replace(" at ", "/"): list(score) for name, score in found.items() if " at " in name}
    weights = arrays["lengths"].reshape(*arrays["clipped"].shape, -1).sum(-1)
    clipped = float(np.average(arrays["clipped"], weights=weights))
    return {**at, "acting_ms": float(arrays["acting_ms"].mean()), "clipped": clipped}


def chunk_ms(bench: Bench, policy: Policy) -> float:
    """Milliseconds of one chunk in one environment, the median of those after the first few."""
    seen = PushT(pusht_starts(1, bench.start_seed), pictures=bench.pictures).reset()

    def one(k: int) -> None:
        policy.reset(k)
        policy.select_action(seen)

    return median_ms(one, TIMES, TIMES)


def kinds_of(bench: Bench, arm: str) -> tuple[str, ...]:
    """How an arm acts: by the best of ℓ draws, by one, I-R-NCE by less work; `kinds` may name some."""
    alone = arm in (*BASELINES, *ALONE) or (arm in DENSITIES and not bench.ranked_densities)
    kinds = ("one",) if alone else ("best", "one", *(shorter(bench) if arm == "i-r-nce" else ()))
    return tuple(kind for kind in kinds if not bench.kinds or kind in bench.kinds)


def shorter(bench: Bench) -> tuple[str, ...]:
    """Kinds with fewer gradients, and no more steps of the proposal's ODE than gradients."""
    return tuple(f"g{n}" for n in bench.gradients)


def acting(bench: Bench, policy: Policy, arm: str, kind: str) -> Policy:
    """A policy as it acts, `acts` of its arm in the place of what was saved: by all its draws, one, or `g100`."""
    policy = as_asked(bench, policy, arm)
    if kind.startswith("g"):
        policy = policy.acting(**hurried(policy, int(kind[1:])))
    return policy.acting(candidates=1) if kind == "one" else policy


def make(bench: Bench, pieces: Pieces, task: partial[Task], arm: str, rolls: bool) -> None:
    """The training of one arm, and its rollouts where they can be made, chunks timed if that is asked for."""
    found = {kind: pieces.find(f"{arm}-{kind}") for kind in kinds_of(bench, arm)}
    learned, wanted = arm not in BASELINES, bench.timed and arm not in BASELINES
    short = [
        kind
        for kind, piece in found.items()
        if piece is None or rounds_of(piece) < rollouts_each(bench, f"{arm}-{kind}")
    ]
    untimed = [kind for kind, piece in found.items() if piece is None or TIME not in piece.numbers]
    missing = [kind for kind in found if kind in short or (wanted and kind in untimed)]
    shows = learned and ("best" in bench.kinds if bench.kinds else bench.timed)
    drawn = not shows or drawing(bench, f"table-6-{arm}").is_file()
    if not (missing or (rolls and not drawn)) or not (learned or rolls):
        return
    policy: Any = trained(bench, task(), arm) if learned else BASELINES[arm]()
    if policy is None or not rolls:
        return
    own = {"parameters": parameters(policy), "seconds": policy.model.run.seconds} if learned else {}
    for kind in missing:
        acts, name = acting(bench, policy, arm, kind) if learned else policy, f"{arm}-{kind}"
        before = found[kind] or Piece(name, {}, {})
        arrays = rolled(bench, pieces, acts, name, found[kind]) if kind in short else before.arrays
        numbers = numbers_of(arrays)
        if wanted or kind not in untimed:  # what a chunk takes does not depend on rounds
            numbers[TIME] = chunk_ms(bench, acts) if kind in untimed else before.numbers[TIME]
        pieces.finish(name, numbers | own, arrays, map(str, range(1, arrays["progress"].shape[1])))
        said = ", ".join(f"{key} {Interval(*numbers[key])}" for key in numbers if key.startswith("maximum"))
        bench.say(f"{arm}, {kind}: {said}, {numbers['acting_ms']:.1f} ms a step")
    if shows:
        show(bench, arm, acting(bench, policy, arm, "best"))


def body(bench: Bench) -> list[Row]:
    """The pieces that were asked for, then rows of all that are there."""
    kinds = ("best", "one", *shorter(bench))
    for name, known in {"arms": ARMS, "acts": ARMS, "kinds": kinds}.items():
        for value in bench.settings[name]:
            require_choice(name, value, known)
    for name, count in bench.more.items():
        require_choice("more", name, [f"{arm}-{kind}" for arm in (*BASELINES, *ARMS) for kind in kinds])
        require_count(f"more.{name}", count)
    require_count("workers", bench.workers)
    if FOLDER not in os.environ:
        what = "the demonstrations of Push-T (action, state, episode_ends)"
        bench.say(f"skipped: {FOLDER} names no folder with {what}")
        return []
    rule = "false with dense networks, which have no eyes; set networks=paper"
    require(not bench.pictures or bench.networks == "paper", "pictures", rule, bench.pictures)
    how = {key: value for key, value in bench.settings.items() if key not in CHOICES} | {"seed": bench.seed}
    how["pictures"] = bench.pictures
    if bench.apart:
        del how["rollouts"], how["more"]  # others can be added
    rolls = simulator(bench)

    def pieces(arm: str) -> Pieces:
        own = concerning({**how, "acts": bench.acts.get(arm, {})}, ARMS.get(arm, Arm("")))
        return Pieces(bench.folder / "pieces", own)

    @cache
    def task() -> Task:
        sizes = replace(PUSH_T, **bench.sizes)
        return Task(demonstrations(bench), PolicyConfig(candidates=bench.candidates), sizes)

    for arm in bench.arms if bench.kinds else (*BASELINES, *bench.arms):
        make(bench, pieces(arm), partial(task), arm, rolls)
    found: Found = {}
    for name in pieces("").names():  # in as many rounds as each has
        arm, _, kind = name.rpartition("-")
        piece = pieces(arm).find(name)
        found |= {} if piece is None else {(arm, kind): piece}
    draw(bench, found)
    if not bench.pictures:
        return rows_of(bench, found)
    asked = {key: bench.changes.get(key, empty) for key, empty in OF_STATES.items()}
    rows = rows_of(replace(bench, settings={**bench.settings, **asked}), found)
    return [replace(row, metric=f"{OF_PICTURES}{row.metric}") for row in rows]


EXPERIMENT = Experiment(
    name="push-t",
    title="Policies that push a T to its place: energies and diffusions from human demonstrations (Tables 6, 7)",
    paper="Singh, Tu, Sindhwani, TMLR 2024, Section 7.4 and Appendix B.4",
    scales=by_scale(
        EVERYWHERE,
        rate=(3e-3, 3e-3, 1e-3),
        energy_rate=(3e-3, 1e-3, 1e-3),
        precision=("32-true", "32-true", "tf32"),
        ema=(0.99, 0.99, 0.999),
        start_seed=(16, 17, 17),  # what smoke trains was chosen on its starts; nothing else looks at them
        networks=("dense", "dense", "paper"),
        arms=(
            ("cloning",),
            ("flow", "on-flow", "cloning", "diffusion"),
            ("i-r-nce", "i-r-nce-2", "r-nce", "flow", "diffusion", "diffusion-phi", "on-flow"),
        ),
        required=(("cloning",), ("flow", "on-flow"), ("i-r-nce", "flow")),
        least=({}, {"flow/300": 0.75}, {"i-r-nce/200": 0.85}),
        ahead=(
            (),
            ("on-flow/one_draw_of_flow/300",),
            tuple(f"i-r-nce/{other}/200" for other in ("flow", *RIVALS[:3])),
        ),
        gradients=((), (), (500, 250, 100, 50)),
        starts=(32, 128, 256),
        block=(32, 128, 256),
        rollouts=(1, 1, 4),
        more=({}, {"flow-one": 4, "on-flow-best": 4}, {}),
        workers=(1, 2, 1),
        apart=(False, False, True),
        horizon=(200, 300, 300),
        candidates=(4, 8, 8),
        ranked_densities=(False, False, True),
        width=(128, 256, 0),
        layers=(4, 6, 0),
        ode=((8, 5), (16, 9), (64, 17)),
        training_ode=((8, 5), (8, 5), (48, 17)),
        units=("none", "none", "none"),
        interpolant=("trigonometric", "linear", "trigonometric"),
        alpha=(2.0, 1.0, 2.0),
        negatives=(7, 7, 31),
        reuse=(20, 10, 50),
        pool=(1024, 16_384, 8192),
        chain=(0, 20, 0),
        batch=(128, 256, 128),
        density_updates=(2000, 6000, 200_000),
        energy_updates=(200, 3000, 600_000),
        seconds=(None, None, 1200.0),
    ),
    body=body,
    compared=in_order,
)
