"""The words every room shares: energies, walkers, estimates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .batch import Batch as Batch
from .errors import EnergyError, InputError, need
from .memory import part_of
from .protocols import Encoding, event_shape_of, has_time, provides
from .protocols import is_discrete as is_discrete
from .random import generator
from .resampling import resample_indices
from .times import checked_times
from .weights import ess_fraction, require_weight

Energy = Callable[[Tensor], Tensor]
"""Any callable from `(B, *event)` to `(B,)`; low is likely: p(x) = exp(−E(x))/Z."""


@runtime_checkable
class Proposal(Protocol):
    """A normalised density that samples and scores.

    A trainable one is an `nn.Module` with parameters; where it also has `rsample(n, rng)`, gradients flow through
    its draws. Where it has `sample_and_log_prob(n, rng)`, draws with their log-densities cost less than one after
    the other.
    """

    event_shape: tuple[int, ...]

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` draws, shape `(n, *event)`."""
        ...

    def log_prob(self, x: Tensor) -> Tensor:
        """Normalised log-density, `(B, *event)` to `(B,)`."""
        ...


def precise(values: Tensor) -> Tensor:
    """At least float32, for what is made of energies or logits: weights, means, small differences of large ones."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


class Bound:
    """E(· | given) as a plain energy over rows, K of them for each of B contexts, in the contexts' order.

    A conditional energy is called with events `(B, K, *event)` and `given`, `(B, *context)`, and returns `(B, K)`.
    One with a time is given one for each event too, `(B, K)`, here as in training, though all events of a context
    share it here. One with `encode(given)` and `score(x, code, t)` has its contexts encoded once, here, whatever
    the chains do.

    Attributes:
        energy: the conditional energy.
        given: labels or contexts, B of them.
        t: a time for each context, `(B,)`, where the energy has one.
    """

    def __init__(self, energy: Any, given: Tensor, t: Tensor | None = None, code: Any = None):
        self.energy, self.given, self.t, self.code = energy, given, t, code
        self.discrete = is_discrete(energy)
        if code is None and provides(energy, Encoding):
            with torch.no_grad():
                self.code = energy.encode(given)

    def first(self) -> Bound:
        """The same for the first context alone."""
        return self.some(slice(0, 1))

    def some(self, contexts: slice | Tensor) -> Bound:
        """The same for some of the contexts, which are not encoded again."""
        t, code = (None if values is None else values[contexts] for values in (self.t, self.code))
        return Bound(self.energy, self.given[contexts], t, code)

    def at(self, t: Tensor | float) -> Bound:
        """The same at another time in [0, 1]; contexts are not encoded again."""
        return Bound(self.energy, self.given, _times(self.energy, t, self.given), self.code)

    def parts(self) -> tuple[Any, Any, Any]:
        """What it was bound to: contexts, times and codes. `Bound(energy, *parts)` is the same."""
        return self.given, self.t, self.code

    def __call__(self, rows: Tensor) -> Tensor:
        """`(B·K, *event)` to `(B·K,)`."""
        B = len(self.given)
        if len(rows) % B:
            raise InputError(f"x: must be a multiple of the {B} contexts in number, got {len(rows)} rows")
        event = event_shape_of(self.energy)
        if event is not None and tuple(rows.shape[1:]) != event:
            raise InputError(
                f"x: must be (B, K, *event) with event {event}, K for each of {B} contexts, got rows "
                f"{tuple(rows.shape)}"
            )
        x = rows.view(B, -1, *rows.shape[1:])
        E = self._energies(x)
        if E.numel() != len(rows):
            raise EnergyError(
                f"energy: returned shape {tuple(E.shape)} for events {tuple(x.shape)} and contexts "
                f"{tuple(self.given.shape)}; it must be one for each event, shape {tuple(x.shape[:2])}, where "
                "events are (B, K, *event)"
            )
        return E.flatten()

    def _energies(self, x: Tensor) -> Tensor:
        t = None if self.t is None else self.t[:, None].expand(x.shape[:2])
        if self.code is not None:
            return self.energy.score(x, self.code, t)
        return self.energy(x, self.given, *(() if t is None else (t,)))


def bind(energy: Any, given: Tensor, t: Tensor | float | None = None) -> Bound:
    """E(· | given), or E(· | given, t), as an energy that kernels, samplers and estimators of log Z take.

    >>> shifted = lambda x, given: 0.5 * (x - given[:, None]).square().sum(-1)
    >>> bind(shifted, torch.tensor([[0.0], [1.0]]))(torch.tensor([[1.0], [2.0], [1.0], [3.0]]))  # two rows each
    tensor([0.5000, 2.0000, 0.0000, 2.0000])
    """
    return Bound(energy, given, None if t is None else _times(energy, t, given))


def _times(energy: Any, t: Tensor | float, given: Tensor) -> Tensor:
    """One time in [0, 1] for each context, in the contexts' dtype where that is floating."""
    if not has_time(energy, True):
        raise InputError(f"t: this energy ({type(energy).__name__}) has no time; leave t out")
    like = given if given.is_floating_point() else given.new_empty(0, dtype=torch.get_default_dtype())
    times = checked_times("t", t, like)
    if tuple(times.shape) not in {(), (1,), (len(given),)}:
        raise InputError(
            f"t: must be a number or one for each of the {len(given)} contexts, got shape {tuple(times.shape)}"
        )
    return times.expand(len(given))


def as_shape(shape: int | Iterable[int]) -> tuple[int, ...]:
    """A shape from itself, or from the dimension of a vector."""
    return (shape,) if isinstance(shape, int) else tuple(shape)


class EnergyGrad(NamedTuple):
    """E(x), shape `(B,)`, and ∇E(x), shape `(B, *event)`, both detached."""

    energy: Tensor
    grad: Tensor


def row_sum(x: Tensor) -> Tensor:
    """Sum over everything but the first dimension: `(B, *event)` to `(B,)`."""
    return x.flatten(1).sum(1)


def row_dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner product of each row of `x` with the same row of `y`, shape `(B,)`."""
    return row_sum(x * y)


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """View `(B,)` as `(B, 1, …, 1)` so that it broadcasts against `like`."""
    return values.view(-1, *([1] * (like.dim() - 1)))


def energy_and_grad(energy: Energy, x: Tensor) -> EnergyGrad:
    """Energies and their gradients in x, without touching parameter gradients.

    An energy may bring its own `value_and_grad(x)`; otherwise automatic differentiation is used. Under
    `torch.compile` the functional transform is used instead, which traces without a graph break. One whose values
    do not depend on x differentiably, such as 0 in a box and +inf outside, has gradient zero. Values are of
    float32 at least, whatever autocast made the energy return: small differences of them become weights.
    """
    own = getattr(energy, "value_and_grad", None)
    if own is not None:
        with torch.no_grad():
            values, grad = own(x)
            return EnergyGrad(precise(values), grad)
    if torch.compiler.is_compiling():
        values, grad = traced_energy_and_grad(energy, x)
        return EnergyGrad(values.detach(), grad.detach())
    if (rows := part_of(x)) is not None and not isinstance(energy, Bound):
        parts = [energy_and_grad(energy, part) for part in x.split(rows)]
        return EnergyGrad(*(torch.cat(column) for column in zip(*parts, strict=True)))
    if torch.is_inference_mode_enabled():  # in which nothing has a gradient
        with torch.inference_mode(False), torch.no_grad():
            return energy_and_grad(energy, x.clone())
    values, grad = values_and_grad(energy, x)
    return EnergyGrad(precise(values), grad)


def values_and_grad(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Values `(…)` of a scalar function of events `(…, *event)` and their gradient, detached, of nothing else."""
    with torch.enable_grad(), _events_alone():
        y = x.detach().requires_grad_(True)
        values = function(y)
        grad = torch.autograd.grad(values.sum(), y)[0] if values.requires_grad else torch.zeros_like(x)
    return values.detach(), grad


_alone: ContextVar[bool] = ContextVar("events alone", default=False)


def in_events_alone() -> bool:
    """Whether an energy is called for its values and first gradient in the events, and for nothing else."""
    return _alone.get()


@contextmanager
def _events_alone() -> Iterator[None]:
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def traced_energy_and_grad(energy: Energy, x: Tensor) -> EnergyGrad:
    """E and ∇E, not detached, by a functional transform that `torch.compile` takes into one full graph.

    Parameters can be differentiated through both, as losses of score matching ask for.
    """

    def total(y: Tensor) -> tuple[Tensor, Tensor]:
        values = precise(energy(y))
        return values.sum(), values

    grad, (_, values) = torch.func.grad_and_value(total, has_aux=True)(x)
    return EnergyGrad(values, grad)


@dataclass(frozen=True)
class Walkers:
    """Positions with raw log-weights: what a sampler gives and what a method trains against.

    Attributes:
        x: positions, `(N, *event)`; `(B, N, *event)` where each of B contexts has N of its own.
        log_weight: raw log-weights, `(N,)` or `(B, N)`; zeros where the sampler gives equal weights.
        info: diagnostics by name; `populations`, where there, lists the sizes of independent groups of rows, and
            `start_ess` the effective size of the walkers that these are copies of, however far they moved since.
        trace: positions over time where they were recorded, `(draws, N, *event)`.
        labels: the class of each, int64 `(N,)`, where chains carry one.
    """

    x: Tensor
    log_weight: Tensor
    info: dict[str, Any] = field(default_factory=dict)
    trace: Tensor | None = None
    labels: Tensor | None = None

    @classmethod
    def equal(cls, x: Tensor, **kwargs: Any) -> Walkers:
        """Walkers of equal weight."""
        return cls(x, torch.zeros(x.shape[0], dtype=torch.float64, device=x.device), **kwargs)

    def __len__(self) -> int:
        return self.x.shape[0]

    def of(self, i: int) -> Walkers:
        """The walkers of one context, where each has its own."""
        start = self.info.get("start_ess_given")
        info = self.info if start is None else self.info | {"start_ess": float(start[i])}
        return replace(self, x=self.x[i], log_weight=self.log_weight[i], info=info)

    @property
    def ess(self) -> float:
        """Effective sample size, in walkers; those of all contexts together where there are several.

        Never more than `info["start_ess"]`: copies of a walker are not new walkers, and moves that do not cross
        between modes leave the modes the masses that they began with.
        """
        own = float(ess_fraction(require_weight(self.log_weight)).sum()) * self.log_weight.shape[-1]
        return own * min(1.0, self.info.get("start_ess", math.inf) / self.log_weight.numel())

    def of_class(self, label: int) -> Walkers:
        """Those of one class, where walkers carry their labels."""
        rows = None if self.labels is None else (self.labels == label).nonzero()[:, 0]
        if rows is None or not len(rows):
            raise InputError(f"label: there are no walkers of class {label}")
        spoken = ("populations", "drawn_from", "ess_fraction")  # which speak of all rows
        kept = {name: value for name, value in self.info.items() if name not in spoken}
        return Walkers(self.x[rows], self.log_weight[rows], kept, labels=rows.new_full((len(rows),), label))

    def resampled(self, n: int | None = None, *, seed: int = 0, scheme: str = "systematic") -> Walkers:
        """`n` walkers of equal weight, drawn in proportion to the weights; worth no more than these were."""
        if self.log_weight.dim() > 1:
            raise InputError(
                "resampled: these walkers belong to several contexts; take one, w.of(i).resampled()"
            )
        rng = generator(seed, self.x.device)
        rows = resample_indices(self.log_weight, n or len(self), scheme=scheme, rng=rng)
        moved = ("populations", "drawn_from")  # which speak of rows
        kept = {name: value for name, value in self.info.items() if name not in moved}
        labels = None if self.labels is None else self.labels[rows]
        return Walkers.equal(self.x[rows], info={**kept, "start_ess": self.ess}, labels=labels)

    def to_arviz(self, name: str = "x") -> Any:
        """The recorded trace as an ArviZ `InferenceData`, one chain per walker.

        R-hat, bulk and tail ESS and autocorrelation are then `arviz.summary`, `arviz.rhat`,
        `arviz.ess` and `arviz.autocorr`.
        """
        if self.trace is None:
            raise InputError("trace: nothing was recorded; sample with record=1 to keep every draw")
        az = need("arviz", "diagnostics", "to_arviz()")
        return az.from_dict(posterior={name: self.trace.transpose(0, 1).cpu().numpy()})


@dataclass(frozen=True)
class LogPartition:
    """An estimate of log Z that says how far it can be trusted.

    Attributes:
        value: log Z.
        std_error: standard error of `value`, from independent populations; 0 where log Z is exact.
        ess: effective sample size of the weighted walkers behind it, in walkers.
        degrees: degrees of freedom of the standard error.
        warnings: why this number should not be trusted; empty when nothing speaks against it.
        reverse: the estimate from samples of the model towards the reference, which tends to lie above
            log Z as `value` tends to lie below, where samples were available.
        reverse_std_error: standard error of `reverse`.
        walkers: the weighted samples of the model that gave the estimate, where they were kept.
    """

    value: float
    std_error: float
    ess: float = math.nan
    degrees: int = 0
    warnings: tuple[str, ...] = ()
    reverse: float | None = None
    reverse_std_error: float | None = None
    walkers: Walkers | None = field(default=None, repr=False, compare=False)

    @property
    def trusted(self) -> bool:
        """Whether nothing speaks against the number."""
        return not self.warnings

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """A two-sided interval at `level`, from Student's t with the populations' degrees of freedom."""
        half = student_t_quantile(0.5 + level / 2, self.degrees) * self.std_error
        return self.value - half, self.value + half

    @property
    def bracket(self) -> tuple[float, float] | None:
        """(forward, reverse): lower and upper ends in expectation, where both exist."""
        return None if self.reverse is None else (self.value, self.reverse)

    def shifted(self, by: float) -> LogPartition:
        """The same estimate for an energy lowered by `by`."""
        reverse = None if self.reverse is None else self.reverse + by
        return replace(self, value=self.value + by, reverse=reverse)

    def as_json(self) -> dict[str, Any]:
        """The numbers, with the 95 % interval."""
        names = ("value", "std_error", "ess", "degrees", "reverse", "reverse_std_error")
        numbers = {name: vars(self)[name] for name in names}
        return {**numbers, "warnings": list(self.warnings), "interval": list(self.interval(0.95))}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> LogPartition:
        """The inverse of `as_json`."""
        fields = {k: v for k, v in values.items() if k != "interval"}
        return cls(**{**fields, "warnings": tuple(fields.get("warnings", ()))})

    def __str__(self) -> str:
        low, high = self.interval()
        text = f"log Z = {self.value:.4f} ± {self.std_error:.4f}  (95 %: {low:.4f} … {high:.4f})"
        return text + "".join(f"\n  warning: {w}" for w in self.warnings)


def student_t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t; the normal one when `degrees` is 0 (a known standard error).

    >>> round(student_t_quantile(0.975, 7), 3), round(student_t_quantile(0.975, 0), 3)
    (2.365, 1.96)
    """
    from scipy.special import ndtri, stdtrit

    return float(stdtrit(degrees, probability) if degrees > 0 else ndtri(probability))


def transforms_are_active() -> bool:
    """Whether a transform of `torch.func` goes on, or a derivative forwards, which kernels know nothing of."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
