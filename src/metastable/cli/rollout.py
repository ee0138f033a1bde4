"""`metastable rollout`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Device, RunFolder

if TYPE_CHECKING:
    from metastable.policies import Policy
    from metastable.policies.intervals import Interval
    from metastable.policies.rollouts import Rollouts

PATHS, PUSHT, ALONE = "path-planning", "pusht", "an interval needs at least 2 starts"


def rollout(
    run: RunFolder,
    env: Annotated[str, typer.Option(help="pusht, path-planning, or one of Gymnasium by its name.")] = PUSHT,
    set_env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An argument of --env; repeatable.")
    ] = None,
    starts: Annotated[int, typer.Option(help="Starts; path-planning has its 25 worlds instead.")] = 32,
    rollouts: Annotated[int, typer.Option(help="Episodes from each start.")] = 1,
    steps: Annotated[int, typer.Option(help="Of an episode, at most; a path has its own number.")] = 300,
    candidates: Annotated[int | None, typer.Option(help="Chunks of which the likeliest is taken.")] = None,
    chain: Annotated[int | None, typer.Option(help="Steps of the chain that moves the candidates.")] = None,
    ode: Annotated[int | None, typer.Option(help="Steps of a flow's or diffusion's ODE.")] = None,
    rank: Annotated[str | None, typer.Option(help="What ranks them: energy, network or weights.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another run, as saved, from the same starts; the difference.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for rollouts.json, .npz and .html.")] = None,
    films: Annotated[int, typer.Option(help="Push-T: GIFs of the first so many starts, in --out.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes that step the environments.")] = 1,
    seed: Annotated[int, typer.Option(help="Of what policies draw; where episodes start stays.")] = 0,
    device: Device = "cpu",
) -> None:
    """Roll a policy out, and say what it scores: means over starts with 95 % intervals."""
    from metastable.core.errors import InputError, require, require_count
    from metastable.policies import load_policy

    from .console import note, say
    from .settings import with_assignments

    asked = {"candidates": candidates, "steps": chain, "ode": ode, "rank": rank}
    changed = {key: value for key, value in asked.items() if value is not None}
    require_count("rollouts", rollouts)
    require_count("films", films, 0)
    require_count("workers", workers)
    own = with_assignments({}, set_env or [], "set-env: must read NAME=VALUE, as in max_episode_steps=50")
    require(env not in (PATHS, PUSHT) or not own, "set-env", f"left out, as {env} takes no arguments", own)
    if env == PATHS and workers > 1:
        raise InputError(f"workers: path-planning has no environments to step, got {workers}")
    if env != PATHS and against is not None and starts < 2:
        raise InputError(f"starts: a difference needs at least 2, got {starts}")
    if films and (out is None or env != PUSHT):
        raise InputError("films: are of pusht, and lie in a folder: give --out")
    if out is not None and out.exists() and not out.is_dir():
        raise InputError(f"out: must be a folder, got the file {out}")
    policies = [load_policy(run, device=device, **changed)]
    policies += [load_policy(against, device=device)] if against else []  # as it was saved
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # where nothing can be written it says so before the episodes
    if env == PATHS:
        _walk(policies, [str(run), str(against)], rollouts, seed, out)
        return
    how = {"rollouts": rollouts, "steps": steps, "seed": seed, "workers": workers}
    episodes = [_episodes(policy, env, own, starts, **how) for policy in policies]
    scores, apart = _say_scores(episodes[0]), _apart(*episodes) if against else {}
    say(*(f"{name}, {run} − {against}: {value}" for name, value in apart.items()))
    if out is not None:
        from metastable.report.rollout_page import write_rollout_page

        note(f"wrote {episodes[0].write(out, str(against), apart)}")
        scores |= {f"{name}, ahead of {against}": value for name, value in apart.items()}
        drawn = _drawn(policies[0], starts, films, steps, seed, out) if env == PUSHT else {}
        title = f"{run.resolve().name} in {episodes[0].name}"
        note(f"wrote {write_rollout_page(out, title, scores, episodes[0].table(), **drawn)}")


def _walk(policies: list[Policy], names: list[str], paths: int, seed: int, out: Path | None) -> None:
    """Paths in the test worlds; of two policies, how far they are apart, world by world."""
    from metastable.policies.intervals import difference_of
    from metastable.policies.path_frames import walk_test_worlds
    from metastable.policies.path_world import path_intervals
    from metastable.policies.rollouts import differences
    from metastable.runs.folder import write_json

    from .bars import work_bar
    from .console import note, say

    with work_bar("walking"):
        judged = [walk_test_worlds(policy, paths, seed) for policy in policies]
    found = path_intervals(judged[0])
    say(*(f"{name}: {value}" for name, value in found.items()))
    apart = {name: difference_of(judged[0][name], judged[-1][name]) for name in found if len(judged) > 1}
    say(*(f"{name}, {names[0]} − {names[-1]}: {value}" for name, value in apart.items()))
    if out is not None:
        said = {name: value._asdict() for name, value in found.items()}
        write_json(out / "rollouts.json", {**said, **differences(names[-1], apart)})
        note(f"wrote {out / 'rollouts.json'}")


def _drawn(policy: Policy, starts: int, films: int, steps: int, seed: int, out: Path) -> dict[str, Any]:
    """Of a page on Push-T the scenes, and films of episodes of their own, at the first starts."""
    from metastable.policies.environments import PushT, pusht_starts
    from metastable.policies.films import films_pusht
    from metastable.policies.scenes import first_chunks

    worlds = PushT(pusht_starts(min(3, starts)), 256, _sees(policy))
    chunks = first_chunks(policy, worlds.reset(), seed=seed)
    scenes = [(worlds.picture(i), chunk) for i, chunk in enumerate(chunks)]
    made = films_pusht(policy, pusht_starts(films), steps, seed, pictures=_sees(policy)) if films else []
    played = [each.write(out / f"start-{i}.gif", 2).name for i, each in enumerate(made)]
    return {"scenes": scenes, "films": played}


def _episodes(policy: Policy, env: str, own: Any, starts: int, steps: int, **options: Any) -> Rollouts:
    """All episodes of one policy, behind a progress bar."""
    from metastable.policies.environments import gym_environments, pusht_starts
    from metastable.policies.rollouts import rollout as roll
    from metastable.policies.rollouts import rollout_pusht

    from .bars import work_bar

    with work_bar("rolling out") as show:
        on_step = None if show is None else lambda done: show(f"{env}: steps", done, steps)
        options |= {"steps": steps, "on_step": on_step}
        if env == PUSHT:
            return rollout_pusht(policy, pusht_starts(starts), pictures=_sees(policy), **options)
        return roll(policy, partial(gym_environments, env, **own), list(range(starts)), **options)


def _apart(ours: Rollouts, theirs: Rollouts) -> dict[str, Interval]:
    """By how much one is ahead of another, where each is read, and by successes where both have them."""
    from metastable.policies.intervals import difference_of

    name, horizons = next(iter(ours.readings)), max(ours.horizons, theirs.horizons, key=max)
    apart = {f"{name} at {h}": ours.ahead_of(theirs, h) for h in horizons}
    won = [each.scored["success"] for each in (ours, theirs) if each.success is not None]
    return apart | ({"success": difference_of(won[0], won[1])} if len(won) > 1 else {})


def _sees(policy: Policy) -> bool:
    """Whether it was trained on pictures of Push-T."""
    return bool(policy.scaling.pictures)


def _say_scores(episodes: Rollouts) -> dict[str, Any]:
    """Print the episodes and their scores; these, of one start in words."""
    from .console import clock, console, number, say, table

    scores: dict[str, Any] = {k: f"{v:.3f} ({ALONE})" for k, v in episodes.means().items()}
    scores |= episodes.scores() if len(episodes.progress) > 1 else {}
    rows = episodes.table()
    shown = [[number(value, 3) for value in row.values()] for row in rows[:20]]
    more = f"and {len(rows) - 20} more" if len(rows) > 20 else ""
    console().print(table(list(rows[0]), shown, f"{episodes.name}: {episodes.measure}", more, words=0))
    say(*(f"{name}: {value}" for name, value in scores.items()))
    each = 1e3 * episodes.acting / max(int(episodes.lengths.max()), 1)
    say(
        f"{len(rows)} episodes in {clock(episodes.seconds)}; {each:.3g} ms a step for all of their actions; "
        f"{episodes.clipped:.1%} of the actions were brought into the box"
    )
    return scores
