"""`metastable rollout`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Device, RunFolder, Seed

if TYPE_CHECKING:
    from metastable.policies import Policy
    from metastable.policies.rollouts import Rollouts

PATHS = "path-planning"


def rollout(
    run: RunFolder,
    env: Annotated[
        str, typer.Option(help="pusht, path-planning, or the name of an environment of Gymnasium.")
    ] = "pusht",
    starts: Annotated[int, typer.Option(help="Starts; path-planning has its 25 worlds instead.")] = 32,
    rollouts: Annotated[int, typer.Option(help="Episodes from each start.")] = 1,
    steps: Annotated[
        int, typer.Option(help="Steps of an episode, at most; a path has its own number.")
    ] = 300,
    candidates: Annotated[int | None, typer.Option(help="Chunks of which the likeliest is taken.")] = None,
    chain: Annotated[int | None, typer.Option(help="Steps of the chain that moves the candidates.")] = None,
    rank: Annotated[str | None, typer.Option(help="What ranks them: energy or network.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Another run's folder: its policy from the same starts, and the difference."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for rollouts.json and rollouts.npz.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
) -> None:
    """Roll a policy out, and say what it scores: means over starts with 95 % intervals."""
    from metastable.core.errors import InputError
    from metastable.policies import load_policy
    from metastable.policies.path_world import roll_paths
    from metastable.runs.folder import write_json

    from .console import note, say

    asked = {"candidates": candidates, "steps": chain, "rank": rank}
    changed = {key: value for key, value in asked.items() if value is not None}
    if env != PATHS and against is not None and starts < 2:
        raise InputError(f"starts: a difference needs at least 2, got {starts}")
    policies = [load_policy(r, device=device, **changed) for r in (run, against) if r is not None]
    if env == PATHS:
        if against is not None:
            raise InputError("against: is for environments; roll the two runs out one after the other")
        found = roll_paths(policies[0], rollouts, seed)
        say(*(f"{name}: {value}" for name, value in found.items()))
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            write_json(out / "rollouts.json", {name: value._asdict() for name, value in found.items()})
            note(f"wrote {out / 'rollouts.json'}")
        return
    episodes = [_episodes(policy, env, starts, rollouts, steps, seed) for policy in policies]
    _say_scores(episodes[0])
    if against is not None:
        for h in episodes[0].horizons:
            say(f"maximum at {h}, {run} − {against}: {episodes[0].ahead_of(episodes[1], h)}")
    if out is not None:
        note(f"wrote {episodes[0].write(out)}")


def _episodes(policy: Policy, env: str, starts: int, rollouts: int, steps: int, seed: int) -> Rollouts:
    """All episodes of one policy, behind a progress bar."""
    from rich.progress import Progress

    from metastable.policies.environments import gym_environments, pusht_starts
    from metastable.policies.rollouts import rollout as roll
    from metastable.policies.rollouts import rollout_pusht

    from .console import console

    with Progress(console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(env, total=steps)
        options: dict[str, Any] = {"rollouts": rollouts, "steps": steps, "seed": seed}
        options["on_step"] = lambda done: progress.update(task, completed=done)
        if env == "pusht":
            return rollout_pusht(policy, pusht_starts(starts), **options)
        return roll(policy, lambda seeds: gym_environments(env, seeds), list(range(starts)), **options)


def _say_scores(episodes: Rollouts) -> None:
    from .console import clock, console, number, say, table

    rows = episodes.table()
    shown = [[number(value, 3) for value in row.values()] for row in rows[:20]]
    more = f"and {len(rows) - 20} more" if len(rows) > 20 else ""
    console().print(table(list(rows[0]), shown, f"{episodes.name}: {episodes.measure}", more, words=0))
    if len(episodes.progress) > 1:
        say(*(f"{name}: {value}" for name, value in episodes.scores().items()))
    each = 1e3 * episodes.acting / max(int(episodes.lengths.max()), 1)
    say(
        f"{len(rows)} episodes in {clock(episodes.seconds)}; {each:.3g} ms a step for all of their actions; "
        f"{episodes.clipped:.1%} of the actions were brought into the box"
    )
