"""A scikit-learn estimator: the density of a table, next to `KernelDensity` and `GaussianMixture`."""

from __future__ import annotations

import copy
import math
import numbers
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import BaseEstimator, OutlierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from metastable.api import fit, log_partition
from metastable.core.configure import build_tagged
from metastable.core.errors import ConfigError, InputError, require, require_count
from metastable.core.random import derive, generator
from metastable.core.types import Energy, Proposal
from metastable.energies.build import ENERGIES, EnergyConfig
from metastable.kernels import MALA, run_chain
from metastable.methods import METHODS, Method
from metastable.proposals import Gaussian
from metastable.run import Run
from metastable.training.config import Schedule
from metastable.walkers.smc import default_kernel, smc

ROWS = 16_384
"""A smaller table is repeated to at least this many rows, each copy with noise of its own."""
LEAST_VARIANCE = 1e-6
"""Variance that the model has at least in every direction, where the data's is one."""
WALKERS = 512
STEP_SIZE = 0.05
REACH = 1.3
"""Sampling begins from a Gaussian this much wider than the data."""
BLOCK = 16_384
"""Rows that are scored or drawn at once, so that memory does not grow with the table."""


class EnergyDensity(OutlierMixin, BaseEstimator):
    """The density of a table as an energy-based model: log p(x) = −E(x) − log Z, in the table's own units.

    The rows are first brought to mean zero and unit covariance, u = (x − m)A. A network on top of a Gaussian is
    trained there, log Z is then estimated by sequential Monte Carlo, and log p(x) = log p(u) + log|det A|.

    What keeps a small table from being learnt by heart is noise, as in a kernel density estimate: the network sees
    √(1 − s²)·u + s·ξ instead of u. This leaves mean and covariance as they are, so that Gaussian data lose
    nothing, and anything else is blurred by s, the `smoothing`; s = 1 would be a fitted Gaussian. Columns that do
    not change, or follow from others, are given a spread of a thousandth. Where rows are few for the number of
    columns, correlations are shrunk by as much as cross-validation asks for.

    Args:
        method: how to train: a name (`jarzynski`, `pcd`, …), a mapping with a `name` and settings, or a method
            (`ms.methods.Jarzynski(...)`).
        energy: `mlp`, another built-in energy by name or as a mapping with a `name` and settings, or your own
            module from `(B, d)` to `(B,)`, which is copied and then trained in the coordinates u.
        hidden: widths of the hidden layers of `mlp`.
        steps: updates; `auto` makes 20·√rows of them, at least 100 and at most 1000.
        walkers: negatives; `auto` means 512 for `jarzynski`, and the method's own default for another one.
        step_size: h of the kernel that moves them, in the coordinates u; `auto` means MALA with 0.05 for
            `jarzynski`, and the method's own default for another one.
        learning_rate: of Adam, falling to zero along a cosine; `auto` means 0.03/columns, at most 0.01.
        batch_size: rows in an update.
        smoothing: s, at least 0 and below 1; `auto` means 0.35·rows^(−1/(columns + 4)), a third of Scott's rule.
        contamination: share of the training rows that `predict` calls outliers.
        standardize: train in the coordinates u; else in the units of the table, to which `step_size` then
            belongs.
        device: where to train: `cpu`, `cuda`, `auto`. A fitted estimator is on the CPU, so that it can be stored
            and opened anywhere.
        random_state: of everything random in `fit`.
        verbose: show a progress bar.

    Attributes:
        energy_: E as a function of rows in the table's units, float64, `(B, d)` to `(B,)`.
        log_partition_: log Z of `energy_`, with its standard error: that of every `score_samples`, common to all.
        offset_: the score below which a row is an outlier.
        run_: the training run; its energy and walkers are in the coordinates u.
        smoothing_: s.
        n_features_in_: columns.
        feature_names_in_: their names, where the table had any.

    >>> X = np.random.default_rng(0).normal([0, 50], [1, 20], size=(200, 2))
    >>> density = EnergyDensity(steps=50, random_state=0).fit(X)
    >>> density.predict([[0, 50], [8, 50]])
    array([ 1, -1])
    >>> abs(density.score_samples([[0, 50]]) + np.log(2 * np.pi * 20)) < 0.5
    array([ True])
    >>> density.sample(5, random_state=0).shape
    (5, 2)
    """

    def __init__(
        self,
        method: str | Mapping[str, Any] | Method = "jarzynski",
        *,
        energy: str | Mapping[str, Any] | EnergyConfig | nn.Module = "mlp",
        hidden: tuple[int, ...] = (64, 64),
        steps: int | str = "auto",
        walkers: int | str = "auto",
        step_size: float | str = "auto",
        learning_rate: float | str = "auto",
        batch_size: int = 256,
        smoothing: float | str = "auto",
        contamination: float = 0.05,
        standardize: bool = True,
        device: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ):
        self.method = method
        self.energy = energy
        self.hidden = hidden
        self.steps = steps
        self.walkers = walkers
        self.step_size = step_size
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.smoothing = smoothing
        self.contamination = contamination
        self.standardize = standardize
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    # ---- fitting

    def fit(self, X: Any, y: Any = None) -> EnergyDensity:
        """Learn the density of the rows of `X`, `(n, d)`; `y` is ignored."""
        X = validate_data(self, X, dtype=np.float64, ensure_min_samples=2)
        self._check_parameters()
        seed = _seed(self.random_state)
        self.smoothing_ = self._smoothing(*X.shape)
        frame = _frame(X, self.smoothing_, bool(self.standardize))
        self.run_ = self._train(_noisy_copies(X, frame, seed), seed)
        self._normalise(X, frame, seed)
        self.offset_ = float(np.percentile(self.score_samples(X), 100 * self.contamination))
        return self

    def _train(self, rows: np.ndarray, seed: int) -> Run:
        n, d = rows.shape[0] if self._rows is None else self._rows, rows.shape[1]
        return fit(
            self._energy(),
            rows,
            self._method(),
            self._steps(n),
            seed=seed,
            learning_rate=self._learning_rate(d),
            schedule=Schedule("cosine"),
            batch_size=int(self.batch_size),
            device=self.device,
            evaluate=False,
            progress=bool(self.verbose),
        )
