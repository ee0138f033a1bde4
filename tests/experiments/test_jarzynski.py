"""The Jarzynski paper's experiments: Appendix C's equations against closed forms, and tiny runs of all three."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import z_limit

from metastable.core.random import generator
from metastable.experiments import jarzynski_collapse as collapse
from metastable.experiments import jarzynski_gmm as gmm
from metastable.experiments import jarzynski_resampling as resampling
from metastable.experiments.base import Bench, Experiment, Result, reproduce
from metastable.experiments.jarzynski_resampling import SCHEMES, resampling_noise
from metastable.experiments.trials import Arm, Curves, Trial
from metastable.methods import ContrastiveDivergence, Jarzynski, PersistentCD

SHARES = [(0.5, 0.25), (0.53, 0.21), (0.46, 0.4), (0.5, 0.75)]
over = pytest.mark.parametrize


def tiny(experiment: Experiment, out: Path, **settings: Any) -> Result:
    """The experiment at its smoke scale with some settings made smaller."""
    scales = {"tiny": {**experiment.scales["smoke"], **settings}}
    return reproduce(dataclasses.replace(experiment, scales=scales), "tiny", 0, out, device="cpu")


def values(result: Result) -> dict[str, float]:
    return {row.metric: row.value for row in result.rows}


# ---- the equations of Appendix C


def time_of_weighted(z: np.ndarray, q0: float, q: float) -> np.ndarray:
    """When (53) passes `z`, from z(0) = 0: with y = z − log(q̂(0)/p̂(0)) it is ẏ = 1/(1 + e^y) − q̂*, separable."""
    shift, p = math.log(q0 / (1 - q0)), 1 - q

    def antiderivative(y: np.ndarray | float) -> np.ndarray:
        return y / p - np.log(np.abs(p - q * np.exp(y))) / (p * q)

    return antiderivative(z - shift) - antiderivative(-shift)


@over("q0, q", SHARES)
def test_weighted_path_is_the_separable_solution(q0: float, q: float) -> None:
    times = np.linspace(0, 20, 41)
    path = collapse.integrate(lambda z: collapse.weighted_rate(z, q0, q), times)
    assert np.allclose(time_of_weighted(path, q0, q), times, atol=1e-5)


@over("q0, q", SHARES)
def test_weighted_path_rests_at_the_stable_point(q0: float, q: float) -> None:
    point = collapse.stable_point(q0, q)
    path = collapse.integrate(
        lambda z: collapse.weighted_rate(z, q0, q), np.array([0.0, 200.0]), substeps=2000
    )
    assert abs(collapse.weighted_rate(point, q0, q)) < 1e-15
    assert abs(path[-1] - point) < 1e-8
    without_correction = math.log((1 - q) / q)
    assert q0 == 0.5 or abs(collapse.weighted_rate(without_correction, q0, q)) > 1e-3


@over("q0, q", SHARES)
def test_weights_change_nothing_at_the_start(q0: float, q: float) -> None:
    assert collapse.weighted_rate(0.0, q0, q) == pytest.approx(collapse.drift(q0, q))


def test_integrate_is_of_fourth_order() -> None:
    times = np.array([0.0, 1.0, 2.0])
    errors = [abs(collapse.integrate(lambda z: -z, times, 1.0, n)[-1] - math.exp(-2)) for n in (4, 8)]
    assert 14 < errors[0] / errors[1] < 20


def test_slope_goes_through_the_origin() -> None:
    times = np.linspace(0, 10, 21)
    assert collapse.fitted_slope(times, -0.3 * times) == pytest.approx(-0.3)
    assert collapse.fitted_slope(times, 1 + 0 * times) > 0


@over(
    "p, count",
    [
        ([0.5, 0.4], 0),
        ([0.0, 0.05], 0),
        ([0.05, 0.5, 0.05], 0),
        ([0.05, 0.5, 0.95], 1),
        ([0.95, 0.0, 1.0, 0.2], 2),
    ],
)
def test_alternations(p: list[float], count: int) -> None:
    assert collapse.alternations(p) == count


def test_share_near_b_counts_the_interval() -> None:
    x = torch.tensor([[-5.0], [0.9], [1.0], [5.0], [9.0], [9.1]])
    assert collapse.share_near_b(x) == 0.5


# ---- mode collapse


@pytest.fixture(scope="module")
def line() -> Bench:
    """One dimension over a short horizon, in few coarse steps."""
    settings = {**collapse.EXPERIMENT.scales["smoke"], "horizon": 10.0, "step_size": 0.02, "log_every": 25}
    return Bench(settings, "tiny", 0, "cpu", Path())


def test_line_remembers_its_first_walkers() -> None:
    model = collapse.Line()
    x = model.sample(7, generator(0))
    assert model.drawn is x
    assert x.shape == (7, 1)


def test_algorithms_differ_as_the_paper_says(line: Bench) -> None:
    unweighted, pcd, jarzynski, cd = (arm.method for arm in (*collapse.arms(line), collapse.restarting(line)))
    assert isinstance(unweighted, PersistentCD)
    assert unweighted.start_at == "model"
    assert isinstance(pcd, PersistentCD)
    assert pcd.start_at == "data"
    assert isinstance(jarzynski, Jarzynski)
    assert jarzynski.resample == "never"
    assert jarzynski.counts == (line.points, 0)
    assert isinstance(cd, ContrastiveDivergence)


def test_every_algorithm_follows_its_own_equation_and_no_other(line: Bench) -> None:
    trials = collapse.one_dimension(line)
    unweighted, pcd, jarzynski, cd = (
        collapse.path_of(line, trials.train(line, arm, 3))
        for arm in (*collapse.arms(line), collapse.restarting(line))
    )
    assert pcd.q0 == pcd.q_data == unweighted.q_data == cd.q0
    assert np.abs(cd.z).max() < 0.02  # (52)
    assert unweighted.crossed == pcd.crossed == jarzynski.crossed == 0
    assert np.abs(unweighted.z - unweighted.predicted).max() < 0.02
    assert np.abs(pcd.z).max() < 0.02
    assert np.abs(jarzynski.z - jarzynski.predicted_weighted).max() < 0.05  # Euler's step and h are coarse
    assert np.abs(jarzynski.z - jarzynski.predicted).max() > 0.5
    assert unweighted.times[-1] == pytest.approx(line.horizon)
    assert len(unweighted.z) == 21


def test_crossings_count_walkers_that_changed_sides() -> None:
    assert (
        collapse.crossings(torch.tensor([[-5.0], [5.0], [4.0]]), torch.tensor([[-4.0], [-5.0], [6.0]])) == 1
    )


def test_collapse_runs(tmp_path: Path) -> None:
    result = tiny(
        collapse.EXPERIMENT,
        tmp_path,
        horizon=5.0,
        early=5.0,
        step_size=0.05,
        repeats=1,
        dim=5,
        walkers=100,
        steps=40,
    )
    rows = values(result)
    assert rows["drift_error_of_(50)/unweighted/worst"] < 0.1
    assert rows["displacement/pcd/worst"] < 0.1
    assert rows["displacement_(52)/cd/worst"] < 0.1
    assert {f"walkers_that_crossed/{name}" for name in ("unweighted", "pcd", "jarzynski")} <= set(rows)
    assert json.loads((tmp_path / "result.json").read_text())["experiment"] == "jarzynski-collapse"
    assert (tmp_path / "figure-14.png").stat().st_size > 0
    assert (tmp_path / "figure-8.png").exists()


# ---- resampling


def weighted_walkers(n: int = 500) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Two separated modes in shuffled rows with uneven weights, and the mass of the first."""
    rng = generator(5)
    x = torch.randn((n, 3), generator=rng)
    first = torch.rand(n, generator=rng) < 0.3
    x[:, 0] += torch.where(first, -10.0, 6.0)
    A = torch.randn(n, generator=rng, dtype=torch.float64)
    return x, A, float(torch.softmax(A, 0)[first].sum())


def test_multinomial_noise_is_binomial() -> None:
    x, A, p = weighted_walkers()
    draws = 2000
    noise = resampling_noise(x, A, SCHEMES["multinomial"], draws, 0)
    exact = math.sqrt(p * (1 - p) / len(x))
    limit = z_limit() / math.sqrt(2 * draws)  # the relative error of a standard deviation
    assert abs(noise / exact - 1) < limit
    systematic = resampling_noise(x, A, SCHEMES["systematic"], draws, 0)
    assert abs(systematic / exact - 1) > limit


def test_sorted_noise_is_below_one_walker() -> None:
    x, A, _ = weighted_walkers()
    noise = {name: resampling_noise(x, A, scheme, 200, 0) for name, scheme in SCHEMES.items()}
    assert noise["sorted"] < 1 / len(x)
    assert min(noise["stratified"], noise["systematic"]) > 1 / len(x)
    assert max(noise["stratified"], noise["systematic"]) < noise["multinomial"]


def test_spread_and_errors_are_taken_over_repeats() -> None:
    def trial(errors: list[float]) -> Trial:
        lines = [{"step": k, "error": error} for k, error in enumerate(errors)]
        return Trial(Arm("sorted/lag=1", Jarzynski()), 0, Curves(lines))

    trials = [trial([0.7, 0.3, 0.1, 0.1]), trial([-0.2, 0.2, -0.1, -0.1])]
    assert resampling.off(trials) == pytest.approx(0.0)
    assert resampling.off(trials[1:]) == pytest.approx(0.1)
    assert resampling.spread(trials) == pytest.approx(0.2 / math.sqrt(2))


def test_no_resampling_has_followers() -> None:
    bench = Bench(resampling.EXPERIMENT.scales["smoke"], "smoke", 0, "cpu", Path())
    methods = {arm.name: arm.method for arm in resampling.arms(bench)}
    assert methods["never"].counts == (bench.walkers, bench.walkers)
    method = methods["sorted/lag=10"]
    assert (method.counts, method.lag, method.order) == ((bench.walkers, 0), 10, "principal")


@over("scale", list(resampling.EXPERIMENT.scales))
def test_last_resampling_is_not_the_last_update(scale: str) -> None:
    settings = resampling.EXPERIMENT.scales[scale]
    assert settings["steps"] % settings["lags"][1]
    assert settings["steps"] > settings["lags"][-1]


def test_resampling_runs(tmp_path: Path) -> None:
    result = tiny(
        resampling.EXPERIMENT,
        tmp_path,
        dim=4,
        data=200,
        walkers=200,
        steps=25,
        repeats=2,
        noise_draws=20,
        lags=(1, 10, 20),
    )
    rows = values(result)
    assert all(math.isfinite(value) for value in rows.values())
    assert len([name for name in rows if name.startswith("mass_spread/")]) == 12
    assert rows["resampling_noise_over_multinomial/systematic"] < 1
    assert 0 < rows["ess_final/never/held_out"] < 1
    assert (tmp_path / "figure-9.png").exists()
    assert (tmp_path / "figure-10.png").exists()


# ---- all three


def test_gmm_runs(tmp_path: Path) -> None:
    result = tiny(
        gmm.EXPERIMENT, tmp_path, dim=4, data=200, walkers=200, steps=30, sweep=(0.5,), sweep_steps=30
    )
    rows = values(result)
    assert all(math.isfinite(value) for value in rows.values())
    assert {f"first_mass/{name}" for name in ("jarzynski", "pcd", "cd")} <= set(rows)
    assert rows["log_z_error/jarzynski"] < 1
    assert (tmp_path / "figure-6.png").exists()
    assert (tmp_path / "figure-7.png").exists()
