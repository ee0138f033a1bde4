"""A scikit-learn estimator: the density of a table, next to `KernelDensity` and `GaussianMixture`.

A thin door: rows, units, reference, steps and rates are those of `metastable.fit`.
"""

from __future__ import annotations

import copy
import math
import numbers
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from sklearn.base import BaseEstimator, OutlierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from metastable.api import fit, log_partition
from metastable.core.errors import ConfigError, require, require_count
from metastable.core.memory import rows_at_once
from metastable.core.protocols import reference_of
from metastable.core.random import derive, generator
from metastable.core.resampling import resample_indices
from metastable.core.types import Energy, Proposal
from metastable.core.units import Units
from metastable.energies.network_configs import EnergyConfig
from metastable.kernels import MALA, run_chain
from metastable.methods import Method
from metastable.proposals import Gaussian, ScaleMixture, fit_gaussian
from metastable.runs.resolve import energy_config, resolve_method
from metastable.runs.run import Run
from metastable.training.config import Schedule
from metastable.training.defaults import default_learning_rate, default_smoothing, default_steps
from metastable.walkers.smc import smc
from metastable.walkers.space import CONTINUOUS

WALKERS = 512
REACH = 1.3
"""Sampling begins from a Gaussian this much wider than the data."""
ENOUGH = 4096
"""Rows that tell the estimate of log Z where the data are."""
BLOCK = 16_384
"""Rows that are scored or drawn at once, so that memory does not grow with the table."""


class EnergyDensity(OutlierMixin, BaseEstimator):
    """The density of a table as an energy-based model: log p(x) = −E(x) − log Z, in the table's own units.

    The rows are first brought to mean zero and unit covariance, u = (x − m)A. A network on top of a reference is
    trained there, log Z is then estimated by sequential Monte Carlo, and log p(x) = log p(u) + log|det A|.

    The reference of at most 2000 rows of at most 64 columns is a mixture of Gaussians with tails, chosen by the
    likelihood of left-out rows (`ms.proposals.fit_reference`); the network then only adds what it can. That of
    larger tables is one Gaussian. There, what keeps rows from being learnt by heart is noise, as in a kernel
    density estimate: the network sees √(1 − s²)·u + s·ξ instead of u. This leaves mean and covariance as they are,
    so that Gaussian data lose nothing, and anything else is blurred by s, the `smoothing`; s = 1 would be a fitted
    Gaussian. A small table with a `smoothing` of its own is learnt this way, too.

    Columns that do not change, or follow from others, are given a spread of about a ten-thousandth. Where rows are
    few for the number of columns, correlations are shrunk by as much as cross-validation asks for.

    Args:
        method: how to train: a name (`jarzynski`, `pcd`, …), a mapping with a `name` and settings, or a method
            (`ms.methods.Jarzynski(...)`).
        energy: `mlp`, which `default` and None mean too; another built-in energy by name or as a mapping with a
            `name` and settings; or your own module from `(B, d)` to `(B,)`, which is copied and then trained in
            the coordinates u.
        hidden: widths of the hidden layers of `mlp`.
        steps: updates; `auto` makes 10·rows^(2/3) of them, at least 100 and at most 2000.
        walkers: negatives; `auto` means 512 for `jarzynski`, and the method's own default for another one.
        step_size: h of the kernel that moves them, in the coordinates u; `auto` lets it tune itself. For
            `jarzynski` that kernel is MALA.
        learning_rate: of Adam, falling to zero along a cosine; `auto` means 0.03/columns, at most 0.01, and for
            fewer than 2000 rows on a mixture times (rows/2000)^(3/2).
        batch_size: rows in an update.
        smoothing: s, at least 0 and below 1; `auto` means 0 on a mixture, and
            else 0.35·rows^(−1/(columns + 4)), a third of Scott's rule.
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
        run_: the training run, in the table's units; `run_.within()` is the same in the coordinates u.
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
        energy: str | Mapping[str, Any] | EnergyConfig | nn.Module | None = "mlp",
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
        settings = self._settings(len(X), X.shape[1], self._on_mixture(X))
        seed = _seed(self.random_state)
        self.run_ = _on_cpu(self._run(X, settings, seed))
        self._normalise(X, seed)
        self.smoothing_ = settings.smoothing
        self.offset_ = float(np.percentile(self._log_density(X), 100 * settings.contamination))
        return self

    def _on_mixture(self, X: np.ndarray) -> bool:
        """Whether the rows as they are go to a mixture; those to be blurred are many, and go to a Gaussian."""
        if isinstance(self.energy, nn.Module) or not (_is_auto(self.smoothing) or self.smoothing == 0):
            return False
        config = energy_config(self._energy(), X.shape[1:], "", False)
        return isinstance(config, EnergyConfig) and config.settled(torch.tensor(X)).reference == "mixture"

    def _settings(self, n: int, d: int, mixture: bool) -> _Settings:
        """Every number checked, and `auto` replaced by what n rows of d columns ask for."""
        rules = {
            "steps": default_steps(n, d),
            "learning_rate": default_learning_rate(n, d, mixture),
            "smoothing": default_smoothing(n, d, mixture),
        }
        values = {
            name: auto if _is_auto(vars(self)[name]) else vars(self)[name] for name, auto in rules.items()
        }
        return _Settings(
            steps=_whole("steps", values["steps"]),
            learning_rate=_real("learning_rate", values["learning_rate"], "above 0", lambda v: v > 0),
            smoothing=_real("smoothing", values["smoothing"], "at least 0 and below 1", lambda v: 0 <= v < 1),
            batch_size=_whole("batch_size", self.batch_size),
            contamination=_real(
                "contamination", self.contamination, "above 0 and at most 0.5", lambda v: 0 < v <= 0.5
            ),
        )

    def _run(self, X: np.ndarray, settings: _Settings, seed: int) -> Run:
        run = fit(
            self._energy(),
            X,
            self._method(),
            settings.steps,
            seed=seed,
            units="whiten" if self.standardize else "none",
            smoothing=settings.smoothing,
            learning_rate=settings.learning_rate,
            schedule=Schedule("cosine"),
            batch_size=settings.batch_size,
            device=self.device,
            evaluate=False,
            progress=bool(self.verbose),
        )
        if run.status == "interrupted":  # the trainer ends gently; a half-trained density would not be one
            raise KeyboardInterrupt
        return run

    def _energy(self) -> Any:
        if isinstance(self.energy, nn.Module):
            return GivenModule(copy.deepcopy(self.energy))
        if self.energy is None or (isinstance(self.energy, str) and self.energy in ("mlp", "default")):
            return {"name": "mlp", "hidden": tuple(_whole("hidden", width) for width in self.hidden)}
        return self.energy

    def _method(self) -> Method:
        """The method with `walkers` and `step_size` where they are given, and quick defaults for `jarzynski`.

        No walkers are held out for log Z, because it is estimated afresh when training has ended.
        """
        given: dict[str, Any] = {}
        if not _is_auto(self.walkers):
            given["walkers"] = _whole("walkers", self.walkers)
        if not _is_auto(self.step_size):
            given["step_size"] = _real("step_size", self.step_size, "above 0", lambda v: v > 0)
        if not isinstance(self.method, (str, Mapping)):
            if given:
                raise ConfigError(next(iter(given)), "is a setting of the method: give it there, not to both")
            return resolve_method(self.method)
        settings: dict[str, Any] = (
            {"name": self.method} if isinstance(self.method, str) else dict(self.method)
        )
        if settings.get("name") == "jarzynski":
            settings = {"walkers": WALKERS, "held_out": 0.0, **settings}
            if "step_size" in given and not {"kernel", "step_size"} & settings.keys():
                settings["kernel"] = MALA(given.pop("step_size"))
        return resolve_method({**settings, **given})

    def _normalise(self, X: np.ndarray, seed: int) -> None:
        """log Z of what was learned, and its energy, both in the table's units.

        From a mixture it is a short way to the model; else it begins at a Gaussian that holds the rows.
        """
        inner = self.run_.within()
        reference = _mixture_of(inner.energy)
        some = torch.tensor(X[:: -(-len(X) // ENOUGH)])
        some = self._units.enter(some, derive(seed, "log_partition rows")).to(inner._home)
        start: dict[str, Any] = {"data": some} if reference is None else {"reference": reference}
        z = log_partition(inner.learned_energy, **start, walkers=128, seed=derive(seed, "log_partition"))
        for words in z.warnings:
            warnings.warn(
                f"log Z may be off, and with it every score: {words}", ConvergenceWarning, stacklevel=3
            )
        self.run_.log_partition = self.log_partition_ = z
        self.energy_ = copy.deepcopy(self.run_.learned_energy).cpu().double().requires_grad_(False)

    @property
    def _units(self) -> Units:
        """Of the training."""
        coordinates = self.run_.coordinates
        return Units.none((self.n_features_in_,)) if coordinates is None else coordinates.events  # pyright: ignore

    def __sklearn_is_fitted__(self) -> bool:
        return "offset_" in vars(self)  # set last: a fit that was interrupted is none

    # ---- the density

    def score_samples(self, X: Any) -> np.ndarray:
        """log p of each row of `X`, `(n, d)` to `(n,)`, normalised, in the units of the training table."""
        check_is_fitted(self)
        return self._log_density(validate_data(self, X, dtype=np.float64, reset=False))

    def _log_density(self, X: Any) -> np.ndarray:
        with torch.no_grad():
            rows = torch.tensor(X)
            parts = rows.split(rows_at_once(self.energy_, rows, BLOCK))
            energies = torch.cat([self.energy_(part) for part in parts])
        return -energies.numpy() - self.log_partition_.value

    def score(self, X: Any, y: Any = None) -> float:
        """Total log-likelihood Σ log p(x) of the rows of `X`, as `KernelDensity` has it; `y` is ignored."""
        return float(self.score_samples(X).sum())

    def sample(
        self, n_samples: int = 1, random_state: int | np.random.RandomState | None = None
    ) -> np.ndarray:
        """`n_samples` draws from the density, `(n_samples, d)`, in the units of the training table.

        Sequential Monte Carlo from the mixture or from a Gaussian around the data: modes get their share anew in
        every call.
        """
        check_is_fitted(self)
        left = _whole("n_samples", n_samples)
        rng = generator(_seed(random_state))
        energy = copy.deepcopy(self.run_.within().learned_energy).double()
        reference = _mixture_of(energy) or self._around()
        parts = []
        while left > 0:
            parts.append(_draws(energy, reference, min(left, BLOCK), rng))
            left -= BLOCK
        return self._units.inverse(torch.cat(parts)).numpy()

    def _around(self) -> Gaussian:
        """A Gaussian that holds the walkers of training."""
        walkers = self.run_.within().walkers
        d = self.n_features_in_  # pyright: ignore
        if walkers is None or self.standardize:
            return Gaussian(torch.zeros(d, dtype=torch.float64), REACH)
        return fit_gaussian(walkers.x.double(), walkers.log_weight, REACH)

    # ---- outliers

    def decision_function(self, X: Any) -> np.ndarray:
        """log p(x) above the threshold, `score_samples(X) − offset_`; negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any) -> np.ndarray:
        """1 for rows that are as likely as the training rows, −1 for outliers."""
        return np.where(self.decision_function(X) >= 0, 1, -1)


class _Settings(NamedTuple):
    steps: int
    learning_rate: float
    smoothing: float
    batch_size: int
    contamination: float


@dataclass(frozen=True)
class GivenModule:
    """A module of one's own as the settings of an energy: it is trained in the coordinates that rows are in."""

    module: nn.Module

    name: ClassVar[str] = "given"

    def build(self, data: Tensor, seed: int) -> nn.Module:
        """The module itself."""
        return self.module


def _mixture_of(energy: Any) -> ScaleMixture | None:
    """The mixture that an energy is a tilt of, if it is one."""
    reference = reference_of(energy)
    return reference if isinstance(reference, ScaleMixture) else None


# --- draws -------------------------------------------------------------------------------------------------


def _draws(energy: Energy, reference: Proposal, n: int, rng: torch.Generator) -> Tensor:
    """`n` rows of equal weight: walkers of an annealing run drawn by weight, then moved apart."""
    kernel = CONTINUOUS.annealer
    walkers = smc(energy, reference, 1, max(n, WALKERS), rng, kernel=kernel)
    rows = resample_indices(walkers.log_weight, n, rng=rng)
    x = walkers.x[rows[torch.randperm(n, generator=rng)]]
    h = float(walkers.schedule.step_sizes[-1])  # pyright: ignore
    return run_chain(kernel, energy, kernel.init(energy, x), 10, rng, step_size=h).state.x


def _on_cpu(run: Run) -> Run:
    """The run where any machine can open it."""
    for player in run.players.values():
        player.cpu()
    if run.walkers is not None:
        x, log_weight = run.walkers.x.cpu(), run.walkers.log_weight.cpu()
        run.walkers = replace(run.walkers, x=x, log_weight=log_weight)
    return run


# --- arguments ---------------------------------------------------------------------------------------------


def _seed(random_state: Any) -> int:
    return int(check_random_state(random_state).randint(2**31 - 1))


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _whole(field: str, value: Any) -> int:
    """A count, also as one of numpy's integers."""
    value = int(value) if isinstance(value, np.integer) else value
    require_count(field, value)
    return value


def _real(field: str, value: Any, rule: str, holds: Callable[[float], bool]) -> float:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    require(number and holds(float(value)), field, f"a number {rule}", value)
    return float(value)
