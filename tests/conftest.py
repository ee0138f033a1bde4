"""One false-alarm rate for every statistical test, and the comparisons that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from hashlib import sha256
from inspect import signature
from statistics import NormalDist
from typing import Any, NamedTuple

import pytest
import torch
from matplotlib.figure import Figure
from rough import rough_log_partition, rough_log_z
from torch import Tensor

from metastable.proposals import fitted
from metastable.training import engine

__all__ = ["rough_log_partition", "rough_log_z"]

# tests run side by side, and torch's idle threads spin: two pools would fight for the cores
torch.set_num_threads(1)

Test = Callable[..., None]


def each(names: str, values: Iterable[Any]) -> Callable[[Test], Test]:
    """One test over many values of a law, for which a test each would say no more; a failure names its value.

    Reads like `pytest.mark.parametrize`. Fixtures are made once for all values.
    """
    parts, values = [name.strip() for name in names.split(",")], list(values)

    def decorate(test: Test) -> Test:
        @wraps(test)
        def over_all(**given: Any) -> None:
            for value in values:
                case = {names: value} if len(parts) == 1 else dict(zip(parts, value, strict=True))
                try:
                    test(**given, **case)
                except Exception as error:
                    error.add_note(f"with {case}")
                    raise

        asked = signature(test)
        left = [p for name, p in asked.parameters.items() if name not in parts]
        over_all.__signature__ = asked.replace(parameters=left)  # pyright: ignore
        del over_all.__wrapped__
        return over_all

    return decorate


render = Figure.savefig


def sketch(figure: Figure, target: Any, **options: Any) -> None:
    """An empty frame in place of a picture of a page; files and PNGs are drawn."""
    if options.get("format") == "svg":
        target.write('<svg width="1" height="1"></svg>')
    else:
        render(figure, target, **options)


@pytest.fixture(scope="session", autouse=True)
def sketched() -> Iterator[None]:
    """Pictures are put together but not rendered: that is most of what a tiny run costs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", sketch)
        yield


@pytest.fixture(scope="session", autouse=True)
def on_the_cpu() -> Iterator[None]:
    """`auto` is the CPU where there is a GPU, too: tests hold trainings against what they compute themselves."""
    found = engine._accelerator
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_accelerator", lambda device: found("cpu" if device == "auto" else device))
        yield


@contextmanager
def drawn() -> Iterator[None]:
    """Pictures as users get them, for the tests of pages and one run of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", render)
        yield


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose answer follows from its arguments alone, asked once for the same ones."""
    known: dict[tuple[object, ...], Any] = {}

    def of(value: Any) -> object:
        tensor = isinstance(value, Tensor)
        return (*value.shape, sha256(value.contiguous().numpy()).digest()) if tensor else repr(value)

    def ask(*given: Any, **named: Any) -> Any:
        key = (*map(of, given), repr(named))
        if key not in known:
            known[key] = function(*given, **named)
        return known[key]

    return ask


CHOOSE, FITTED = fitted.choose, fitted._fitted


@pytest.fixture(scope="session", autouse=True)
def references_of_the_same_rows() -> Iterator[None]:
    """Mixtures are fitted once to the same rows: that is half of a training of a few updates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitted, "choose", remembered(CHOOSE))
        patch.setattr(fitted, "_fitted", remembered(FITTED))
        yield


@pytest.fixture
def references_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtures are fitted whenever they are asked for, for the tests of the fit."""
    monkeypatch.setattr(fitted, "choose", CHOOSE)
    monkeypatch.setattr(fitted, "_fitted", FITTED)


@pytest.fixture(scope="module")
def quickly_judged() -> Iterator[None]:
    """`rough_log_z` for a whole file: `pytestmark = pytest.mark.usefixtures("quickly_judged")`."""
    with rough_log_z():
        yield


FALSE_ALARM = 1e-6
"""Chance that one correct comparison fails under a new seed; every statistical tolerance follows from it."""


def z_limit(comparisons: int = 1) -> float:
    """The |z| that `comparisons` standard normal scores together exceed with probability `FALSE_ALARM`."""
    return NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * comparisons))


def z_scores(value: Tensor | float, truth: Tensor | float, std_error: Tensor | float) -> Tensor:
    """|value − truth| in standard errors; rounding in float64 is forgiven where the error bar is zero."""
    value, truth, error = (torch.as_tensor(v, dtype=torch.float64) for v in (value, truth, std_error))
    rounding = 1e-12 * (1 + truth.abs())
    return (value - truth).abs() / (error + rounding)


def assert_within(value: Tensor | float, truth: Tensor | float, std_error: Tensor | float) -> None:
    """Every `value` lies within the z-limit of its `truth`, corrected for how many there are."""
    scores = z_scores(value, truth, std_error)
    limit = z_limit(scores.numel())
    assert bool((scores <= limit).all()), (
        f"{float(scores.max()):.1f} standard errors, limit {limit:.1f}: "
        f"got {value}, expected {truth} ± {std_error}"
    )


def mean_and_error(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over independent rows of `values`, `(N, ...)`, and its standard error."""
    values = values.double()
    return values.mean(0), values.std(0) / len(values) ** 0.5


class Quadrature(NamedTuple):
    """Points `(M, d)` of a regular grid and the log of the mass exp(−E) of the cell around each."""

    points: Tensor
    log_mass: Tensor

    @property
    def log_partition(self) -> Tensor:
        return torch.logsumexp(self.log_mass, 0)

    def mean(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        """Expectation of `f`, `(M, d)` to `(M, ...)`, under exp(−E)/Z."""
        return torch.tensordot(torch.softmax(self.log_mass, 0), f(self.points), dims=1)


def quadrature(energy: Callable[[Tensor], Tensor], box: Sequence[tuple[float, float, int]]) -> Quadrature:
    """Trapezoid rule on a box, one (low, high, points) per axis, for masses that vanish at its border."""
    axes = [torch.linspace(*side, dtype=torch.float64) for side in box]
    points = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)
    log_cell = sum(torch.log(axis[1] - axis[0]) for axis in axes)
    log_mass = torch.cat([-energy(part) for part in points.split(500_000)]) + log_cell
    return Quadrature(points, log_mass)


def minimise(method: Any, context: Any, state: Any, negatives: Any, iterations: int) -> None:
    """The energy's parameters to where the method's loss on fixed negatives is least."""
    optimiser = torch.optim.LBFGS(
        context.energy.parameters(), max_iter=iterations, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss, _ = method.loss(context, state, "energy", context.data, negatives)
        loss.backward()
        return loss

    optimiser.step(closure)
