"""A scikit-learn estimator: the density of a table, next to `KernelDensity` and `GaussianMixture`."""

from __future__ import annotations

import copy
import math
import numbers
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import BaseEstimator, OutlierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from metastable.api import fit, log_partition, resolve_energy_settings, resolve_method
from metastable.core.errors import ConfigError, require, require_count
from metastable.core.random import derive, generator
from metastable.core.resampling import resample_indices
from metastable.core.types import Energy, Proposal
from metastable.energies.build import EnergyConfig
from metastable.kernels import MALA, run_chain
from metastable.methods import Jarzynski, Method
from metastable.proposals import Gaussian, ScaleMixture
from metastable.run import Run
from metastable.training.config import Schedule
from metastable.training.defaults import default_learning_rate, default_smoothing, default_steps
from metastable.walkers.smc import default_kernel, smc

ROWS = 16_384
"""A smaller table that is blurred is repeated to at least this many rows, each copy with noise of its own."""
LEAST_VARIANCE = 1e-6
"""Variance that the model has at least in every direction, where the data's is one."""
FLAT = 0.01
"""Less variance than this in a direction of the coordinates u, in which it should be one, is none."""
WALKERS = 512
STEP_SIZE = 0.05
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

    Columns that do not change, or follow from others, are given a spread of a thousandth. Where rows are few for
    the number of columns, correlations are shrunk by as much as cross-validation asks for.

    Args:
        method: how to train: a name (`jarzynski`, `pcd`, …), a mapping with a `name` and settings, or a method
            (`ms.methods.Jarzynski(...)`).
        energy: `mlp`, another built-in energy by name or as a mapping with a `name` and settings, or your own
            module from `(B, d)` to `(B,)`, which is copied and then trained in the coordinates u.
        hidden: widths of the hidden layers of `mlp`.
        steps: updates; `auto` makes 10·rows^(2/3) of them, at least 100 and at most 2000.
        walkers: negatives; `auto` means 512 for `jarzynski`, and the method's own default for another one.
        step_size: h of the kernel that moves them, in the coordinates u; `auto` means MALA with 0.05 for
            `jarzynski`, and the method's own default for another one.
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
        mixture = self._on_mixture(X)
        settings = self._settings(len(X), X.shape[1], mixture)
        seed = _seed(self.random_state)
        whitened = Coordinates.fit(X)
        used = whitened if self.standardize else Coordinates.plain(X.shape[1])
        blur = derive(seed, "blur")
        u = whitened.forward(X)
        blurred = _filled(u, blur) if mixture else _blurred(u, settings.smoothing, blur)
        rows = blurred if self.standardize else whitened.inverse(blurred)
        self.run_ = self._train(rows, settings, seed)
        self._normalise(rows, used, seed)
        self._whitened, self.smoothing_ = whitened, settings.smoothing
        self.offset_ = float(np.percentile(self._log_density(X), 100 * settings.contamination))
        return self

    def _on_mixture(self, X: np.ndarray) -> bool:
        """Whether the rows as they are go to a mixture; those to be blurred are many, and go to a Gaussian."""
        if isinstance(self.energy, nn.Module) or not (_is_auto(self.smoothing) or self.smoothing == 0):
            return False
        config = resolve_energy_settings(self._energy())
        return isinstance(config, EnergyConfig) and config.settled(torch.tensor(X)).reference == "mixture"

    def _settings(self, n: int, d: int, mixture: bool) -> _Settings:
        """Every number checked, and `auto` replaced by what n rows of d columns ask for."""
        rules = {
            "steps": default_steps(n, d),
            "learning_rate": default_learning_rate(n, d) if mixture else default_learning_rate(ROWS, d),
            "smoothing": default_smoothing(n, d, mixture),
        }
        values = {
            name: auto if _is_auto(getattr(self, name)) else getattr(self, name)
            for name, auto in rules.items()
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

    def _train(self, rows: np.ndarray, settings: _Settings, seed: int) -> Run:
        """One run; a second, short one from fresh walkers where they had to leave a Gaussian by our own method.

        Walkers that have been resampled many times while modes drew apart have lost count of them, and the network
        has followed: masses are off by some percent. Walkers that come anew from a Gaussian put this right. On a
        mixture, which has the modes and their masses from the start, there is nothing to put right.
        """
        method = self._method()
        run = self._run(self._energy(), rows, method, settings, seed)
        right = isinstance(self.method, Method) or _mixture_of(run.energy) is not None
        if right or not isinstance(method, Jarzynski):
            return run
        less = settings._replace(steps=-(-settings.steps // 5), learning_rate=settings.learning_rate / 5)
        more = replace(method, walkers=2 * method.walkers)
        last = self._run(run.energy, rows, more, less, derive(seed, "settle"))
        last.history = [
            *run.history,
            *({**row, "step": row["step"] + settings.steps} for row in last.history),
        ]
        last.seconds += run.seconds
        return last

    def _run(self, energy: Any, rows: np.ndarray, method: Method, settings: _Settings, seed: int) -> Run:
        run = fit(
            energy,
            rows,
            method,
            settings.steps,
            seed=seed,
            learning_rate=settings.learning_rate,
            schedule=Schedule("cosine"),
            batch_size=min(settings.batch_size, len(rows)),
            device=self.device,
            evaluate=False,
            progress=bool(self.verbose),
        )
        if run.status == "interrupted":  # the trainer ends gently; a half-trained density would not be one
            raise KeyboardInterrupt
        return run

    def _energy(self) -> Any:
        if isinstance(self.energy, nn.Module):
            return copy.deepcopy(self.energy)
        if isinstance(self.energy, str) and self.energy == "mlp":
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
        if settings.get("name") == "jarzynski" and not {"kernel", "step_size"} & settings.keys():
            settings["kernel"] = MALA(given.pop("step_size", STEP_SIZE))
            settings = {"walkers": WALKERS, "held_out": 0.0, **settings}
        return resolve_method({**settings, **given})

    def _normalise(self, rows: np.ndarray, used: Coordinates, seed: int) -> None:
        """log Z of what was learned, and its energy, both in the table's units.

        From a mixture it is a short way to the model; else it begins at a Gaussian that holds the rows.
        """
        run = self.run_
        parameter = next(iter(run.energy.parameters()))  # pyright: ignore
        some = torch.tensor(rows[:: -(-len(rows) // ENOUGH)]).to(parameter)
        reference = _mixture_of(run.energy)
        start: dict[str, Any] = {"data": some} if reference is None else {"reference": reference}
        z = log_partition(
            run.learned_energy,
            **start,
            walkers=128,
            seed=derive(seed, "log_partition"),
        )
        for words in z.warnings:
            warnings.warn(
                f"log Z may be off, and with it every score: {words}", ConvergenceWarning, stacklevel=3
            )
        run.log_partition = z
        self.run_ = _on_cpu(run)
        energy: Any = copy.deepcopy(run.learned_energy)
        self.energy_ = InUnits(energy, used)
        self.log_partition_ = z.shifted(-used.log_det)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "offset_")  # set last: a fit that was interrupted is none

    # ---- the density

    def score_samples(self, X: Any) -> np.ndarray:
        """log p of each row of `X`, `(n, d)` to `(n,)`, normalised, in the units of the training table."""
        check_is_fitted(self)
        return self._log_density(validate_data(self, X, dtype=np.float64, reset=False))

    def _log_density(self, X: Any) -> np.ndarray:
        with torch.no_grad():
            energies = torch.cat([self.energy_(part) for part in torch.tensor(X).split(BLOCK)])
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
        energy = InCoordinates(self.energy_, self._whitened)
        reference = _mixture_of(self.energy_.energy) if self.standardize else None
        if reference is None:
            reference = Gaussian(torch.zeros(self.n_features_in_, dtype=torch.float64), REACH)  # pyright: ignore
        parts = []
        while left > 0:
            parts.append(_draws(energy, reference, min(left, BLOCK), rng))
            left -= BLOCK
        return self._whitened.inverse(torch.cat(parts).numpy())

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


# --- coordinates -------------------------------------------------------------------------------------------


class Coordinates(NamedTuple):
    """u = (x − mean)·matrix, and back.

    Attributes:
        mean: `(d,)`.
        matrix: A, `(d, d)`.
        inverse_matrix: A⁻¹.
        log_det: log|det A|.
    """

    mean: np.ndarray
    matrix: np.ndarray
    inverse_matrix: np.ndarray
    log_det: float

    @classmethod
    def plain(cls, d: int) -> Coordinates:
        """u = x."""
        return cls(np.zeros(d), np.eye(d), np.eye(d), 0.0)

    @classmethod
    def fit(cls, X: np.ndarray) -> Coordinates:
        """u of mean zero and unit covariance: columns are scaled, then correlations undone symmetrically.

        A = diag(1/σ)·T^{−1/2} with T = (1 − α)R + αI, R the correlations and α their shrinkage. The symmetric root
        keeps columns where they were and, unlike principal axes, hardly moves when the data hardly move.
        """
        mean, scale, varies = _column_scales(X)
        z = (X - mean) / scale
        T = np.diag(np.where(varies, 1.0, LEAST_VARIANCE))
        if varies.any():
            T[np.ix_(varies, varies)] = _shrunk_correlations(z[:, varies])
        variances, axes = np.linalg.eigh(T)
        matrix = (axes / np.sqrt(variances)) @ axes.T / scale[:, None]
        inverse = (axes * np.sqrt(variances)) @ axes.T * scale
        return cls(mean, matrix, inverse, -float(np.log(scale).sum() + 0.5 * np.log(variances).sum()))

    def forward(self, X: np.ndarray) -> np.ndarray:
        """From x to u."""
        return (X - self.mean) @ self.matrix

    def inverse(self, U: np.ndarray) -> np.ndarray:
        """From u to x."""
        return U @ self.inverse_matrix + self.mean


def _column_scales(X: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means, standard deviations, and which columns change by more than rounding; the others get scale 1."""
    mean, scale = X.mean(0), X.std(0)
    varies = scale > 10 * np.finfo(X.dtype).eps * np.abs(X).max(0)
    return mean, np.where(varies, scale, 1.0), varies


def _shrunk_correlations(z: np.ndarray) -> np.ndarray:
    """(1 − α)R + αI for standardised rows, with the α that `_shrinkage` finds."""
    alpha = _shrinkage(z)
    return (1 - alpha) * (z.T @ z / len(z)) + alpha * np.eye(z.shape[1])


def _shrinkage(z: np.ndarray, folds: int = 5) -> float:
    """α in [`LEAST_VARIANCE`, 1] at which a Gaussian with covariance (1 − α)R + αI predicts held-out rows best."""
    candidates = np.geomspace(LEAST_VARIANCE, 1, 25)
    total = np.zeros(len(candidates))
    fold = np.arange(len(z)) % folds
    for k in range(min(folds, len(z))):
        kept, out = z[fold != k], z[fold == k]
        mean = kept.mean(0)
        variances, axes = np.linalg.eigh(np.cov(kept, rowvar=False, bias=True).reshape(2 * z.shape[1:]))
        shrunk = np.outer(1 - candidates, variances.clip(0)) + candidates[:, None]
        squares = ((out - mean) @ axes) ** 2
        total -= 0.5 * (squares.sum(0) / shrunk + len(out) * np.log(shrunk)).sum(1)
    return float(candidates[total.argmax()])


def _filled(U: np.ndarray, seed: int) -> np.ndarray:
    """The rows, with unit noise in directions in which they have hardly any variance, and so no density."""
    variances, axes = np.linalg.eigh(U.T @ U / len(U))
    flat = axes[:, variances < FLAT]
    return U + np.random.default_rng(seed).normal(size=U.shape) @ flat @ flat.T


def _blurred(U: np.ndarray, smoothing: float, seed: int) -> np.ndarray:
    """√(1 − s²)·u + noise, the table repeated to `ROWS` rows or more.

    In a direction in which the rows have variance v the noise has variance 1 − (1 − s²)v, so that together they
    have variance 1, and at least s².
    """
    kept = 1 - smoothing**2
    variances, axes = np.linalg.eigh(U.T @ U / len(U))
    root = axes * np.sqrt(np.maximum(1 - kept * variances, smoothing**2)) @ axes.T
    copies = np.tile(U, (-(-ROWS // len(U)), 1))
    return np.sqrt(kept) * copies + np.random.default_rng(seed).normal(size=copies.shape) @ root


class InUnits(nn.Module):
    """E(x) = E_u((x − mean)·matrix), in float64 on the CPU: an energy of u as one of x."""

    mean: Tensor
    matrix: Tensor

    def __init__(self, energy: nn.Module, coordinates: Coordinates):
        super().__init__()
        self.energy = energy.cpu().double().requires_grad_(False)
        self.event_shape = coordinates.mean.shape
        self.register_buffer("mean", torch.tensor(coordinates.mean))
        self.register_buffer("matrix", torch.tensor(coordinates.matrix))

    def forward(self, x: Tensor) -> Tensor:
        """`(B, d)` to `(B,)`."""
        return self.energy((x.to(self.mean) - self.mean) @ self.matrix)


class InCoordinates:
    """The other way round: an energy of x as one of u, for sampling where every direction has the same scale."""

    def __init__(self, energy: Energy, coordinates: Coordinates):
        self.energy = energy
        self.mean = torch.tensor(coordinates.mean)
        self.matrix = torch.tensor(coordinates.inverse_matrix)

    def __call__(self, u: Tensor) -> Tensor:
        return self.energy(u @ self.matrix + self.mean)


def _mixture_of(energy: Any) -> ScaleMixture | None:
    """The mixture that an energy is a tilt of, if it is one."""
    reference = getattr(energy, "reference", None)
    return reference if isinstance(reference, ScaleMixture) else None


# --- draws -------------------------------------------------------------------------------------------------


def _draws(energy: Energy, reference: Proposal, n: int, rng: torch.Generator) -> Tensor:
    """`n` rows of equal weight: walkers of an annealing run drawn by weight, then moved apart."""
    kernel = default_kernel()
    walkers = smc(energy, reference, 1, max(n, WALKERS), rng, kernel=kernel)
    rows = resample_indices(walkers.log_weight, n, rng=rng)
    x = walkers.x[rows[torch.randperm(n, generator=rng)]]
    h = float(walkers.schedule.step_sizes[-1])  # pyright: ignore
    return run_chain(kernel, energy, kernel.init(energy, x), 10, rng, step_size=h).state.x


def _on_cpu(run: Run) -> Run:
    """The run where any machine can open it."""
    if isinstance(run.energy, nn.Module):
        run.energy.cpu()
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
