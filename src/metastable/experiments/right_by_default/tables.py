"""Four tables that come with scikit-learn: held-out likelihood with default settings, beside two tuned rivals."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from metastable.core.random import derive

TABLES = ("iris", "wine", "breast-cancer", "diabetes")
SPLITS = 5
HELD_OUT = 0.2
REG_COVAR = 1e-3
MOST_COMPONENTS = 8
BANDWIDTHS = np.geomspace(0.05, 2, 30)
FOLDS = 5

Fit = Callable[[np.ndarray, int], Callable[[np.ndarray], np.ndarray]]
"""From training rows and a seed to a function that gives log p of other rows."""


class Split(NamedTuple):
    """Rows to fit, and rows to score."""

    train: np.ndarray
    test: np.ndarray


class Rivals(NamedTuple):
    """Mean held-out log-likelihoods, in nats to a row.

    Attributes:
        mixture: of `GaussianMixture`, full covariances, as many components as BIC chooses.
        components: how many those were.
        kernel: of `KernelDensity`, Gaussian, with the bandwidth that cross-validation chooses.
        bandwidth: which that was.
    """

    mixture: float
    components: int
    kernel: float
    bandwidth: float

    @property
    def better(self) -> float:
        """The better of both."""
        return max(self.mixture, self.kernel)


def load(name: str) -> np.ndarray:
    """One of `TABLES`, `(n, d)`, with columns of mean zero and standard deviation one.

    Diabetes comes without `sex`, whose two values are spikes and no density.
    """
    from sklearn import datasets

    source = getattr(datasets, f"load_{name.replace('-', '_')}")()
    rows = np.asarray(source.data, dtype=np.float64)
    columns = [i for i, column in enumerate(source.feature_names) if (name, column) != ("diabetes", "sex")]
    rows = rows[:, columns]
    return (rows - rows.mean(0)) / rows.std(0)


def split(table: np.ndarray, number: int) -> Split:
    """Split `number` of a table: four rows of five to fit, one to score."""
    order = np.random.default_rng(derive(number, "split")).permutation(len(table))
    test = round(HELD_OUT * len(table))
    return Split(table[order[test:]], table[order[:test]])


def rivals(rows: Split, seed: int) -> Rivals:
    """What the two do that are at hand in scikit-learn, each tuned as one would."""
    from sklearn.mixture import GaussianMixture
    from sklearn.model_selection import GridSearchCV
    from sklearn.neighbors import KernelDensity

    mixtures = [
        GaussianMixture(k, reg_covar=REG_COVAR, random_state=seed).fit(rows.train)
        for k in range(1, MOST_COMPONENTS + 1)
    ]
    mixture = min(mixtures, key=lambda m: m.bic(rows.train))
    search = GridSearchCV(KernelDensity(), {"bandwidth": BANDWIDTHS}, cv=FOLDS).fit(rows.train)
    kernel: KernelDensity = search.best_estimator_
    return Rivals(
        float(mixture.score(rows.test)),
        int(mixture.n_components),  # pyright: ignore
        float(kernel.score(rows.test)) / len(rows.test),
        float(search.best_params_["bandwidth"]),
    )


def ours(rows: Split, seed: int, fit: Fit | None = None) -> float:
    """Mean held-out log-likelihood of what `fit` makes of the rows; by default of `EnergyDensity`."""
    return float(np.mean((fit or fit_estimator)(rows.train, seed)(rows.test)))


def fit_estimator(train: np.ndarray, seed: int) -> Callable[[np.ndarray], np.ndarray]:
    """`EnergyDensity` with default settings."""
    from metastable.estimator import EnergyDensity

    return EnergyDensity(random_state=seed).fit(train).score_samples


def fit_run(train: np.ndarray, seed: int) -> Callable[[np.ndarray], np.ndarray]:
    """`fit` with default settings."""
    from metastable.api import fit

    run = fit(None, train, seed=seed)
    return lambda rows: np.asarray(run.log_prob(rows))
