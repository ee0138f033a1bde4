"""The scikit-learn estimator: its contract, its law of units, and its densities against exact ones."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import FALSE_ALARM, assert_within, each, quadrature, rough_log_partition, z_limit
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks

import metastable as ms
from metastable import estimator
from metastable.core.errors import ConfigError
from metastable.core.types import LogPartition
from metastable.estimator import EnergyDensity

EXPECTED_FAILED_CHECKS: dict[str, str] = {}
"""Checks of scikit-learn's that are failed on purpose, with the reason: none."""

MEAN = np.array([3.0, -50.0])
FACTOR = np.array([[2.0, 0.0], [12.0, 9.0]])
"""Cholesky factor of the true covariance: standard deviations 2 and 15, correlation 0.8."""


def gaussian_rows(n: int, seed: int) -> np.ndarray:
    return MEAN + np.random.default_rng(seed).normal(size=(n, 2)) @ FACTOR.T


def gaussian_log_density(x: np.ndarray) -> np.ndarray:
    white = np.linalg.solve(FACTOR, (x - MEAN).T)
    return -0.5 * (white**2).sum(0) - math.log(2 * math.pi * 2.0 * 9.0)


def quick(**settings) -> EnergyDensity:
    return EnergyDensity(**{"steps": 10, "walkers": 32, "hidden": (8,), "random_state": 0} | settings)


@pytest.fixture(autouse=True)
def rough(monkeypatch):
    """Densities that a test fits for itself have a rough log Z; the shared ones below keep theirs."""
    monkeypatch.setattr(estimator, "log_partition", rough_log_partition)


@pytest.fixture(scope="module")
def gaussian() -> EnergyDensity:
    return EnergyDensity(steps=300, random_state=0).fit(gaussian_rows(2000, seed=0))


@pytest.fixture(scope="module")
def gaussian_grid(gaussian: EnergyDensity):
    """The model on a box of six standard deviations."""
    return quadrature(gaussian.energy_, [(-10.0, 16.0, 301), (-145.0, 45.0, 301)])


@pytest.fixture(scope="module")
def two_modes() -> EnergyDensity:
    """A third of the rows in one narrow mode, two thirds in another, far apart."""
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(-4, 0.5, size=400), rng.normal(4, 0.5, size=800)])
    return EnergyDensity(steps=300, random_state=0).fit(rows[:, None])


# --- scikit-learn's own contract ---------------------------------------------------------------------------


@parametrize_with_checks(
    [EnergyDensity(steps=10, walkers=32, hidden=(8,))],
    expected_failed_checks=lambda _: EXPECTED_FAILED_CHECKS,
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.mark.slow
def test_scikit_learn_checks_with_default_settings():
    check_estimator(EnergyDensity(), expected_failed_checks=EXPECTED_FAILED_CHECKS)


def test_is_tuned_by_a_grid_search_inside_a_pipeline():
    grid = {"energydensity__steps": np.array([5, 10]), "energydensity__smoothing": np.array([0.2])}
    search = GridSearchCV(make_pipeline(StandardScaler(), quick()), grid, cv=2)
    assert np.isfinite(search.fit(gaussian_rows(60, seed=0)).best_score_)


def test_importing_the_library_leaves_scikit_learn_alone():
    code = "import sys, metastable; assert 'sklearn' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the density is the true one, normalised ---------------------------------------------------------------


def divergence(scores: np.ndarray, rows: np.ndarray) -> float:
    """KL of the truth from the model, estimated on fresh draws of the truth."""
    return float((gaussian_log_density(rows) - scores).mean())


def test_density_of_gaussian_rows_is_the_gaussian(gaussian):
    """A Gaussian fitted to 2000 rows has KL 5/4000; a network may add some, but not 0.05 nats.

    KL below 0.05 bounds the mean absolute error by 0.05 + √0.1 (Pinsker); half of that is asked for.
    """
    rows = gaussian_rows(4000, seed=1)
    scores = gaussian.score_samples(rows)
    assert -0.01 < divergence(scores, rows) < 0.05
    assert np.abs(scores - gaussian_log_density(rows)).mean() < 0.18


def test_the_divergence_would_notice_a_density_that_is_a_quarter_too_wide(gaussian):
    rows = gaussian_rows(4000, seed=1)
    wide = gaussian.score_samples(MEAN + (rows - MEAN) / 1.25) - 2 * math.log(1.25)
    assert divergence(wide, rows) > 0.05


def test_log_partition_is_the_integral_in_the_units_of_the_table(gaussian, gaussian_grid):
    low, high = gaussian.log_partition_.interval(1 - FALSE_ALARM)
    assert low < gaussian_grid.log_partition < high
    assert high - low < 0.3


def test_scores_are_energies_less_log_partition_and_integrate_to_one(gaussian, gaussian_grid):
    scores = gaussian.score_samples(gaussian_grid.points.numpy())
    log_cell = float((gaussian_grid.log_mass + gaussian.energy_(gaussian_grid.points))[0])
    error = math.expm1(gaussian.log_partition_.interval(1 - FALSE_ALARM)[1] - gaussian.log_partition_.value)
    assert np.exp(scores + log_cell).sum() == pytest.approx(1, abs=error)


def test_two_modes_keep_their_masses_and_the_density_integrates_to_one(two_modes):
    grid = quadrature(two_modes.energy_, [(-9.0, 9.0, 4001)])
    low, high = two_modes.log_partition_.interval(1 - FALSE_ALARM)
    assert low < grid.log_partition < high
    assert float(grid.mean(lambda x: (x[:, 0] > 0).double())) == pytest.approx(2 / 3, abs=0.06)


def test_score_is_the_total_log_likelihood(gaussian):
    rows = gaussian_rows(50, seed=2)
    assert gaussian.score(rows) == pytest.approx(gaussian.score_samples(rows).sum())


# --- the law of units --------------------------------------------------------------------------------------

UNITS = np.array([8.0, 0.01])


@pytest.fixture(scope="module")
def same_table_in_two_units() -> tuple[EnergyDensity, EnergyDensity]:
    rows = gaussian_rows(300, seed=3)
    return quick().fit(rows), quick().fit(rows * UNITS)


def test_other_units_shift_every_score_by_the_log_of_their_ratio(same_table_in_two_units):
    """log p(cx) = log p(x) − Σ log c: the same numbers are trained on, so that only rounding remains."""
    plain, scaled = same_table_in_two_units
    rows = gaussian_rows(100, seed=4)
    shift = scaled.score_samples(rows * UNITS) - plain.score_samples(rows)
    np.testing.assert_allclose(shift, -np.log(UNITS).sum(), atol=1e-6)
    np.testing.assert_allclose(
        scaled.sample(20, random_state=0), plain.sample(20, random_state=0) * UNITS, rtol=1e-6
    )


def test_without_the_jacobian_the_law_of_units_fails(same_table_in_two_units):
    rows = gaussian_rows(100, seed=4)

    def mutant(density: EnergyDensity, x: np.ndarray) -> np.ndarray:
        u = density.energy_.to_inner(torch.tensor(x))
        return -density.energy_.inner(u).numpy() - density.log_partition_.value

    plain, scaled = same_table_in_two_units
    shift = mutant(scaled, rows * UNITS) - mutant(plain, rows)
    assert np.abs(shift + np.log(UNITS).sum()).min() > 1


def test_rows_may_be_left_in_their_own_units():
    rows = np.random.default_rng(0).normal([1, 2], [1.0, 0.5], size=(500, 2))
    density = EnergyDensity(standardize=False, steps=100, random_state=0).fit(rows)
    assert density.log_partition_ == density.run_.log_partition
    truth = -np.log(2 * np.pi * 0.5) - 0.5
    assert density.score_samples(rows).mean() == pytest.approx(truth - 0.5, abs=0.15)


# --- draws -------------------------------------------------------------------------------------------------

SHARED = 1.5
"""Draws share some ancestors, so that their standard errors are somewhat above those of independent ones."""


def test_draws_have_the_moments_of_the_model(gaussian, gaussian_grid):
    draws = torch.tensor(gaussian.sample(4000, random_state=0))

    def moments(x):
        centred = (x - torch.tensor(MEAN)) / torch.tensor([2.0, 15.0])
        return torch.cat([centred, centred.square(), centred[:, :1] * centred[:, 1:]], 1)

    values = moments(draws)
    assert_within(values.mean(0), gaussian_grid.mean(moments), SHARED * values.std(0) / math.sqrt(len(draws)))


def test_draws_have_the_modes_of_the_model(two_modes):
    model = quadrature(two_modes.energy_, [(-9.0, 9.0, 4001)]).mean(lambda x: (x[:, 0] > 0).double())
    share = (two_modes.sample(4000, random_state=0) > 0).mean()
    assert_within(share, model, SHARED * math.sqrt(2 / 9 / 4000))


def test_draws_follow_their_random_state_and_do_not_repeat_rows(gaussian):
    draws = gaussian.sample(500, random_state=3)
    np.testing.assert_array_equal(draws, gaussian.sample(500, random_state=3))
    assert not np.array_equal(draws, gaussian.sample(500, random_state=4))
    assert len(np.unique(draws, axis=0)) > 490


def test_large_draws_come_in_blocks(gaussian, monkeypatch):
    monkeypatch.setattr(estimator, "BLOCK", 600)
    assert gaussian.sample(1300, random_state=0).shape == (1300, 2)


# --- outliers ----------------------------------------------------------------------------------------------


def test_far_rows_are_outliers_and_the_centre_is_not(gaussian):
    far = MEAN + np.array([[12.0, -60.0], [-12.0, 60.0], [0.0, 500.0], [1e6, 1e6]])
    assert gaussian.predict(far).tolist() == [-1, -1, -1, -1]
    assert gaussian.predict(MEAN[None]).tolist() == [1]


def test_contamination_is_the_share_of_training_rows_and_about_that_of_new_ones(gaussian):
    assert (gaussian.predict(gaussian_rows(2000, seed=0)) == -1).mean() == 0.05
    share = (gaussian.predict(gaussian_rows(4000, seed=5)) == -1).mean()
    # the threshold is a quantile of 2000 rows, the share a mean over 4000
    assert abs(share - 0.05) < z_limit() * math.sqrt(0.05 * 0.95 * (1 / 2000 + 1 / 4000))


# --- coordinates and noise ---------------------------------------------------------------------------------


# --- tables as they come -----------------------------------------------------------------------------------


def odd_tables() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 2))
    return {
        "one column": x[:, :1],
        "two rows": x[:2],
        "equal rows": np.ones((5, 2)),
        "a constant column": np.c_[x, np.full(40, 7.0)],
        "a column twice": np.c_[x, x[:, 0]],
        "fewer rows than columns": rng.normal(size=(6, 20)),
        "integers": rng.integers(0, 5, size=(40, 2)),
        "float32 far from zero": (x + 1e4).astype(np.float32),
        "tiny units": 1e-12 * x,
        "huge units": 1e12 * x,
        "an extreme row": np.r_[x, [[1e6, -1e6]]],
    }


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", odd_tables())
def test_odd_tables_are_fitted(name):
    rows = odd_tables()[name]
    density = quick().fit(rows)
    assert np.isfinite(density.score_samples(rows)).all()
    assert density.sample(3, random_state=0).shape == (3, rows.shape[1])
    assert set(density.predict(rows)) <= {-1, 1}


def test_a_constant_column_keeps_its_value_and_any_other_value_is_an_outlier():
    rows = np.c_[np.random.default_rng(0).normal(size=(100, 1)), np.full(100, 7.0)]
    density = quick().fit(rows)
    np.testing.assert_allclose(density.sample(50, random_state=0)[:, 1], 7, atol=0.01)
    assert density.predict([[0.0, 7.0], [0.0, 7.1]]).tolist() == [1, -1]


def test_column_names_are_kept_and_checked():
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame(gaussian_rows(50, seed=0), columns=["width", "height"])
    density = quick().fit(table)
    assert density.feature_names_in_.tolist() == ["width", "height"]
    with pytest.raises(ValueError, match="feature names"):
        density.predict(table[["height", "width"]])


# --- repeatability, storage --------------------------------------------------------------------------------


def test_the_same_random_state_gives_the_same_density_and_touches_nothing_global():
    rows = gaussian_rows(100, seed=0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    scores = [quick(random_state=seed).fit(rows).score_samples(rows) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(scores[0], scores[1])
    assert not np.allclose(scores[0], scores[2], atol=1e-6)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


def test_a_fitted_estimator_is_stored_whole_and_cloned_bare(gaussian):
    rows = gaussian_rows(20, seed=0)
    loaded = pickle.loads(pickle.dumps(gaussian))
    np.testing.assert_array_equal(loaded.score_samples(rows), gaussian.score_samples(rows))
    np.testing.assert_array_equal(loaded.sample(3, random_state=0), gaussian.sample(3, random_state=0))
    assert loaded.run_.history == gaussian.run_.history
    with pytest.raises(NotFittedError):
        clone(gaussian).sample()


def test_the_run_is_the_density_in_the_tables_units(gaussian):
    rows = gaussian_rows(20, seed=0)
    np.testing.assert_allclose(gaussian.score_samples(rows), gaussian.run_.log_prob(rows).numpy(), atol=1e-4)
    assert gaussian.run_.history[-1]["step"] == 300


# --- choices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        "pcd",
        "cd",
        {"name": "jarzynski", "walkers": 64, "steps": 2},
        ms.methods.Jarzynski(walkers=64, step_size=0.01),
    ],
    ids=str,
)
def test_any_method_trains_it(method):
    rows = gaussian_rows(300, seed=0)
    density = EnergyDensity(method, steps=60, learning_rate=1e-3, random_state=0).fit(rows)
    assert divergence(density.score_samples(rows), rows) < 0.2


def test_a_method_object_is_used_as_it_is():
    density = EnergyDensity(ms.methods.Jarzynski(walkers=64), steps=20, random_state=0).fit(
        gaussian_rows(50, 0)
    )
    assert density.run_.history[-1]["step"] == 20
    assert len(density.run_.walkers) == 64


def test_settings_reach_the_method():
    density = quick(walkers=48, step_size=0.02).fit(gaussian_rows(50, seed=0))
    assert density.run_.config["method"]["kernel"] == {"name": "mala", "step_size": 0.02}
    assert density.run_.config["method"]["walkers"] == 48


@pytest.mark.parametrize(
    ("settings", "reference", "smoothing"),
    [
        ({}, ms.proposals.ScaleMixture, 0.0),
        ({"smoothing": 0.3}, ms.proposals.Gaussian, 0.3),
        ({"energy": {"name": "mlp", "reference": "gaussian"}}, ms.proposals.Gaussian, 0.35 * 50 ** (-1 / 6)),
    ],
    ids=str,
)
def test_a_small_table_is_learned_on_a_mixture_unless_asked_otherwise(settings, reference, smoothing):
    density = quick(**settings).fit(gaussian_rows(50, seed=0))
    assert type(density.run_.within().energy.reference) is reference
    assert density.smoothing_ == pytest.approx(smoothing)


def test_an_energy_of_your_own_is_copied_and_trained():
    own = ms.energies.MLP(2, hidden=(8,), seed=0)
    own = ms.energies.Tilted(ms.proposals.Gaussian(torch.zeros(2), 1.5), own)
    before = [p.clone() for p in own.parameters()]
    density = quick(energy=own).fit(gaussian_rows(50, seed=0))
    assert all(torch.equal(a, b) for a, b in zip(before, own.parameters(), strict=True))
    trained = density.run_.energy.parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, trained, strict=True))


@each(
    "settings, message",
    [
        ({"steps": 0}, "steps: must be an integer of at least 1, got 0"),
        ({"steps": "many"}, "steps: must be an integer of at least 1, got 'many'"),
        ({"learning_rate": -1.0}, "learning_rate: must be a number above 0, got -1.0"),
        ({"smoothing": 1.0}, "smoothing: must be a number at least 0 and below 1, got 1.0"),
        ({"contamination": 0.6}, "contamination: must be a number above 0 and at most 0.5, got 0.6"),
        ({"contamination": "auto"}, "contamination: must be a number"),
        ({"batch_size": 2.5}, "batch_size: must be an integer"),
        ({"walkers": True}, "walkers: must be an integer"),
        ({"step_size": math.nan}, "step_size: must be a number above 0, got nan"),
        ({"hidden": (8, 0)}, "hidden: must be an integer of at least 1, got 0"),
        ({"method": "jarzinski"}, r"method.name: unknown value 'jarzinski' \(did you mean 'jarzynski'\?\)"),
        ({"energy": "mpl"}, r"did you mean 'mlp'"),
        ({"method": ms.methods.Jarzynski(), "walkers": 64}, "walkers: is a setting of the method"),
        ({"device": "tpu"}, "device: must be one of"),
    ],
)
def test_settings_outside_their_rule_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        quick(**settings).fit(gaussian_rows(20, seed=0))


def test_the_number_of_draws_is_checked():
    density = quick().fit(gaussian_rows(20, seed=0))
    with pytest.raises(ConfigError, match="n_samples: must be an integer of at least 1, got 0"):
        density.sample(0)


# --- when something is wrong -------------------------------------------------------------------------------


def test_a_doubtful_log_partition_is_said_aloud(monkeypatch):
    doubtful = LogPartition(0.0, 2.0, warnings=("populations disagree",))
    monkeypatch.setattr(estimator, "log_partition", lambda *args, **kwargs: doubtful)
    with pytest.warns(ConvergenceWarning, match="populations disagree"):
        quick().fit(gaussian_rows(20, seed=0))


def test_an_interrupted_training_leaves_no_density(monkeypatch):
    def interrupted(*args, **kwargs):
        run = ms.fit(*args, **kwargs)
        run.status = "interrupted"
        return run

    monkeypatch.setattr(estimator, "fit", interrupted)
    density = quick()
    with pytest.raises(KeyboardInterrupt):
        density.fit(gaussian_rows(20, seed=0))
    with pytest.raises(NotFittedError):
        density.predict(gaussian_rows(20, seed=0))
