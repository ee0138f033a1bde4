"""Right by default: true numbers on data that nobody prepared, with default settings throughout.

What a new user would try first: columns in any units, narrow beside wide, other seeds, trainings broken on purpose.
No paper has these numbers; the targets are what an error bar promises.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from statistics import fmean
from typing import Any

from metastable.core.random import derive

from ..base import Bench, Experiment, Row
from ..finished import processes
from ..trials import by_scale
from .first import first_command
from .samples import branch_weights, interpolated_widths, left_mass, widths
from .scales import likelihoods_in_two_units, log_z_at
from .sweep import KINDS, WAYS, attempt
from .tables import TABLES, Rivals, fit_estimator, fit_run, load, ours, rivals, split
from .targets import TARGETS, estimate

SCALES = (1e-3, 1e-1, 1.0, 1e2, 1e4)
LEFT = 0.271
FEWER_TRUSTED = ("funnel",)
"""Targets of which fewer need be trusted; those that are must still be near the truth."""
ESTIMATORS = {"estimator": fit_estimator, "fit": fit_run}


def body(bench: Bench) -> list[Row]:
    """Every part, with its targets."""
    workers = min(os.cpu_count() or 1, 16)
    parts = (_scales, _units, _mixture, _contexts, _coverage, _sweep, _tables, _first)
    with processes(workers) as pool:
        # everything is handed out before anything is waited for
        begun = [part(bench, pool) for part in parts]
        return [row for finish in begun for row in finish()]


Finish = Callable[[], list[Row]]


def _all(
    bench: Bench, pool: Executor, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]
) -> Callable[[], list[Any]]:
    """Hand out one call for each tuple of arguments; what is returned waits for all of them."""
    name, begin = function.__name__, bench.finished.submit
    futures = [begin(pool, name, function, *arguments, records=(Rivals,)) for arguments in calls]
    return lambda: [future.result() for future in futures]


def _scales(bench: Bench, pool: Executor) -> Finish:
    found = _all(bench, pool, log_z_at, [(scale, bench.rows, bench.seed) for scale in SCALES])

    def finish() -> list[Row]:
        rows = []
        for scale, z in zip(SCALES, found(), strict=True):
            bench.say(f"scale {scale:g}: log Z off by {z['error']:.4f}, {z['errors']:.1f} standard errors")
            rows += [
                Row(f"log_z_error/scale={scale:g}", z["error"], "<=", 0.1),
                Row(f"log_z_standard_errors/scale={scale:g}", z["errors"], "<=", 3.0),
                Row(f"log_z_trusted/scale={scale:g}", z["trusted"], ">=", 1.0),
            ]
        return rows

    return finish


def _units(bench: Bench, pool: Executor) -> Finish:
    found = _all(bench, pool, likelihoods_in_two_units, [(bench.rows, bench.seed)])

    def finish() -> list[Row]:
        ((first, second),) = found()
        bench.say(f"the same table in two units: {first:.4f} and {second:.4f} nats a row")
        return [
            Row("likelihood_difference/other_units", abs(first - second), "<=", 0.02),
            Row("likelihood/own_units", first),
        ]

    return finish


def _mixture(bench: Bench, pool: Executor) -> Finish:
    found = _all(bench, pool, left_mass, [(_seed(bench, "mixture", i),) for i in range(bench.mixture_seeds)])

    def finish() -> list[Row]:
        masses = found()
        worst = max(abs(mass - LEFT) for mass, _ in masses)
        covered = sum(abs(mass - LEFT) <= 1.96 * error for mass, error in masses) / len(masses)
        bench.say(f"mass of a mode after sampling: off by {worst:.4f} at most, {covered:.0%} of errors cover")
        return [Row("mode_mass_error/worst", worst, "<=", 0.02), Row("mode_mass_covered", covered, ">=", 0.9)]

    return finish


def _contexts(bench: Bench, pool: Executor) -> Finish:
    n, seed = bench.context_samples, bench.seed
    weights, narrow, stages = (
        _all(bench, pool, part, [(n, seed)]) for part in (branch_weights, widths, interpolated_widths)
    )

    def finish() -> list[Row]:
        (pairs,), (one,), (two,) = weights(), narrow(), stages()
        rows = [Row(f"branch_weight_error/{true:.3f}", abs(got - true), "<=", 0.03) for got, true in pairs]
        for name, found in (("algorithm-2", one), ("algorithm-4", two)):
            bench.say(f"{name}: widths {min(found):.3f} to {max(found):.3f} of the true ones")
            rows.append(Row(f"width_error/{name}", max(abs(w - 1) for w in found), "<=", 0.1))
        return rows

    return finish


def _coverage(bench: Bench, pool: Executor) -> Finish:
    calls = [(name, _seed(bench, name, i)) for name in TARGETS for i in range(bench.coverage_seeds)]
    found = _all(bench, pool, estimate, calls)

    def finish() -> list[Row]:
        every = found()
        return [row for name in TARGETS for row in _covered(bench, [z for z in every if z["target"] == name])]

    return finish


def _covered(bench: Bench, found: list[dict[str, Any]]) -> list[Row]:
    name, sure = found[0]["target"], [z for z in found if z["trusted"]]
    trusted = len(sure) / len(found)
    covered = sum(z["covered"] for z in sure) / len(sure) if sure else math.nan
    worst = max((abs(z["z_score"]) for z in sure), default=0.0)
    seconds = math.fsum(z["seconds"] for z in found) / len(found)
    bench.say(
        f"{name}: {trusted:.0%} trusted, {covered:.0%} of these cover, worst {worst:.1f} standard errors"
    )
    few = name in FEWER_TRUSTED
    told = (
        []
        if few and not sure
        else [_row(f"coverage/{name}", covered, ">=", bench.least_coverage, required=not few)]
    )
    return [
        *told,
        _row(f"trusted/{name}", trusted, ">=", bench.least_trusted, required=not few),
        _row(f"worst_trusted/{name}", worst, "<=", 4.0, required=few),
        Row(f"seconds_per_call/{name}", seconds),
    ]


def _sweep(bench: Bench, pool: Executor) -> Finish:
    turns = [(way, kind) for way in WAYS for kind in KINDS]
    calls = [
        (*turns[i % len(turns)], _seed(bench, "sweep", i), bench.sweep_steps, bench.sweep_walkers)
        for i in range(bench.sweep_runs)
    ]
    found = _all(bench, pool, attempt, calls)

    def finish() -> list[Row]:
        every = found()
        rows = [_worst("all", every, required=True)]
        rows.append(Row("broken/runs", len(every)))
        for way in WAYS:
            mine = [run for run in every if run["way"] == way.name]
            if not mine:
                continue
            trusted = sum(run["trusted"] for run in mine) / len(mine)
            bench.say(f"{way.name}: {trusted:.0%} of {len(mine)} trusted")
            rows += [Row(f"broken/trusted/{way.name}", trusted), _worst(way.name, mine)]
        return rows

    return finish


def _worst(name: str, runs: list[dict[str, Any]], required: bool = False) -> Row:
    worst = max((run["errors"] for run in runs if run["trusted"]), default=0.0)
    return _row(f"broken/worst_trusted/{name}", worst, "<=", 4.0, required=required)


def _row(metric: str, value: float, relation: str, target: float, *, required: bool) -> Row:
    """A row that must hold, or one that is only told."""
    return Row(metric, value, relation, target) if required else Row(metric, value)


def _tables(bench: Bench, pool: Executor) -> Finish:
    places = [(table, number) for table in bench.tables for number in range(bench.splits)]
    parts = [split(load(table), number) for table, number in places]
    theirs = _all(bench, pool, rivals, [(part, bench.seed) for part in parts])
    mine = {
        how: _all(bench, pool, ours, [(p, bench.seed, fit) for p in parts]) for how, fit in ESTIMATORS.items()
    }

    def finish() -> list[Row]:
        them = dict(zip(places, theirs(), strict=True))
        us = {how: dict(zip(places, found(), strict=True)) for how, found in mine.items()}
        rows, ahead = [], dict.fromkeys(ESTIMATORS, 0)
        for table in bench.tables:
            splits = [(table, number) for number in range(bench.splits)]
            means = {
                "gaussian-mixture": fmean(them[place].mixture for place in splits),
                "kernel-density": fmean(them[place].kernel for place in splits),
            }
            best = max(means.values())
            rows += [Row(f"log_likelihood/{table}/{name}", value) for name, value in means.items()]
            for how in ESTIMATORS:
                value = fmean(us[how][place] for place in splits)
                ahead[how] += value > best
                bench.say(f"{table}, {how}: {value:.3f} against {best:.3f}")
                rows += [
                    Row(f"log_likelihood/{table}/{how}", value),
                    Row(f"ahead_of_better_rival/{table}/{how}", value - best, ">=", -0.1),
                ]
        return [
            *rows,
            *(Row(f"tables_ahead/{how}", ahead[how], ">=", bench.least_ahead) for how in ESTIMATORS),
        ]

    return finish


def _first(bench: Bench, pool: Executor) -> Finish:
    found = _all(bench, pool, first_command, [(bench.rows, bench.seed)])

    def finish() -> list[Row]:
        (what,) = found()
        bench.say(f"the first command on a mixed table: {what['log_likelihood']:.3f} nats a row")
        return [
            Row("first_command/finished", what["finished"], ">=", 1.0),
            Row("first_command/columns_in_report", what["columns_named"], ">=", 4.0),
            Row("first_command/problems", what["problems"], "<=", 0.0),
        ]

    return finish


def _seed(bench: Bench, *names: object) -> int:
    return derive(bench.seed, "right-by-default", *names) % 2**31


EXPERIMENT = Experiment(
    name="right-by-default",
    title="Default settings on data nobody prepared: units, scales, mode weights, contexts, log Z, tables",
    paper="Ours: what an error bar promises, and scikit-learn's estimators",
    scales=by_scale(
        rows=(300, 1000),
        mixture_seeds=(4, 24),
        context_samples=(1000, 4000),
        coverage_seeds=(1, 100),
        least_coverage=(0.0, 0.9),
        least_trusted=(0.0, 0.9),
        sweep_runs=(8, 200),
        sweep_steps=(20, 60),
        sweep_walkers=(2048, 4096),
        tables=(("iris",), tuple(TABLES)),
        splits=(1, 5),
        least_ahead=(0, 2),
    ),
    body=body,
)
