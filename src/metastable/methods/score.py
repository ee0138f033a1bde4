"""Score matching: fit ∇E to the data's score without drawing a single negative.

N. Xu, *Self-adapting noise-contrastive estimation for energy-based models*, MSc thesis, 2022, Section 2.2.3.2,
after A. Hyvärinen (2005), P. Vincent (2011), and Y. Song and others (2019). The score of the model is
∇ log p_θ = −∇E, from which log Z has dropped out; ∇² log p_θ = −∇²E.

| symbol | here |
|---|---|
| x, x̃ | rows of data, and the same with noise |
| ∇ log p_θ(x) | `-g`, with g = ∇E |
| Tr ∇² log p_θ(x) | minus the mean of vᵀ∇²E v over directions v with 𝔼[vvᵀ] = I |
| v | `directions` |
| σ | `sigma` |

Scores say how log p changes from a point to the next one. Between separated modes there is no data to say so,
and with it the weights of the modes are lost: each of these methods is blind to them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from metastable.core.errors import (
    ConfigError,
    UnsupportedError,
    require,
    require_choice,
    require_count,
    require_length,
)
from metastable.core.random import normal_like
from metastable.core.types import Energy, row_dot

from .base import Context, Method, Metrics, Nothing
from .curvature import Curvature, curvature, kink_share, score

TRACES = ("exact", "hutchinson")
PROBES = ("rademacher", "gaussian")
SHAPES = ("geometric", "linear")

MISSED = 0.1
"""Share of the change of ∇E that second derivatives may miss: quadrature misses less, kinks more."""


def implicit(c: Curvature) -> Tensor:
    """Theorem 2.1, and (2.8): ½‖∇ log p_θ‖² + vᵀ∇² log p_θ v for each pair."""
    return 0.5 * row_dot(c.grad, c.grad) - c.bend


def sliced(c: Curvature) -> Tensor:
    """(2.9): ½(vᵀ∇ log p_θ)² + vᵀ∇² log p_θ v for each pair."""
    return 0.5 * c.slope.square() - c.bend


def denoising(energy: Energy, x: Tensor, noise: Tensor, sigma: float) -> tuple[Tensor, Tensor, Tensor]:
    """(2.7): ½‖∇ log p_σ(x̃|x) − ∇ log p_θ(x̃)‖² for each row, with E(x̃) and ∇E(x̃).

    x̃ = x + σ·noise, and ∇ log p_σ(x̃|x) = (x − x̃)/σ² = −noise/σ.
    """
    _, E, g = score(energy, x + sigma * noise)
    miss = g - noise / sigma
    return 0.5 * row_dot(miss, miss), E, g


def axes(rows: Tensor) -> Tensor:
    """Directions √d·e₁ … √d·e_d for each row, `(d, B, *event)`: the mean of vᵀHv over them is Tr H exactly."""
    d = rows[0].numel()
    each = math.sqrt(d) * torch.eye(d, dtype=rows.dtype, device=rows.device)
    return each.view(d, 1, *rows.shape[1:]).expand(d, *rows.shape)


def random_directions(rows: Tensor, n: int, probes: str, rng: torch.Generator) -> Tensor:
    """`n` fresh directions for each row, `(n, B, *event)`, with 𝔼[vvᵀ] = I."""
    like = rows.expand(n, *rows.shape)
    if probes == "gaussian":
        return normal_like(like, rng)
    coins = torch.randint(2, like.shape, generator=rng, device=rows.device)
    return (2 * coins - 1).to(rows.dtype)


class Totals:
    """A loss added up from parts, each differentiated at once so that only one part is ever in memory."""

    def __init__(self, parameters: Sequence[Tensor]):
        self.parameters = parameters
        self.value: Tensor | None = None
        self.grads: list[Tensor] = []

    def add(self, part: Tensor) -> None:
        """Differentiate `part`, and let go of its graph."""
        grads = torch.autograd.grad(part, list(self.parameters), allow_unused=True, materialize_grads=True)
        if self.value is None:
            self.value, self.grads = part.detach(), list(grads)
        else:
            self.value = self.value + part.detach()
            self.grads = [a + b for a, b in zip(self.grads, grads, strict=True)]

    def loss(self) -> Tensor:
        """A scalar with the value and the gradient of the sum."""
        assert self.value is not None
        return self.value + sum(
            ((p - p.detach()) * g).sum() for p, g in zip(self.parameters, self.grads, strict=True)
        )


@dataclass(frozen=True)
class ScoreMethod(Method[Nothing]):
    """A method that learns from ∇E at the data alone: no negatives, nothing carried."""

    gap_vanishes: ClassVar[bool] = False
    sees_mode_weights: ClassVar[bool] = False

    def phase(self, context: Context) -> Hashable:
        """None: the loss is the same in every update."""
        return None

    def start(self, context: Context) -> Nothing:
        """Nothing is carried."""
        return Nothing()

    def load(self, tree: dict[str, Any]) -> Nothing:
        """Nothing was saved."""
        return Nothing()


@dataclass(frozen=True)
class ImplicitScore(ScoreMethod):
    """The methods that need second derivatives; subclasses say along which directions, and of what.

    Attributes:
        chunk: pairs of a row and a direction that go through the energy at once. A batch with more of them is
            done in parts, each differentiated before the next, so memory does not grow with the dimension.
    """

    chunk: int = 4096

    def __post_init__(self) -> None:
        require_count(f"{self.name}.chunk", self.chunk)

    def count(self, d: int) -> int:
        """How many directions each row gets in `d` dimensions."""
        raise NotImplementedError

    def directions(self, rows: Tensor, rng: torch.Generator) -> Tensor:
        """They, `(count, B, *event)`, with 𝔼[vvᵀ] = I."""
        raise NotImplementedError

    def objective(self, c: Curvature) -> Tensor:
        """What is averaged over pairs, `(P,)`."""
        raise NotImplementedError

    def start(self, context: Context) -> Nothing:
        """Refuse an energy whose gradient jumps: the jumps are missing from its second derivative."""
        share = kink_share(context.energy, _parameters(context), *_segments(context))
        if share > MISSED:
            raise UnsupportedError(
                f"{self.name}: ∇E jumps, as it does with ReLU or LeakyReLU: its second derivative misses "
                f"{share:.0%} of how it changes, and the loss would be wrong without a sign of it; use a smooth "
                "activation (silu, softplus, tanh), or denoising-score-matching, which takes no second derivative"
            )
        return Nothing()

    def loss(
        self, context: Context, state: Nothing, player: str, batch: Tensor, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """The mean of the objective over all pairs of a row and a direction."""
        pairs = len(batch) * self.count(batch[0].numel())
        totals = Totals(_parameters(context)) if pairs > self.chunk else None
        loss, seen = None, batch.new_zeros(2)
        for rows, directions in self.parts(batch, context.rng):
            c = curvature(context.energy, rows, directions)
            loss = self.objective(c).sum() / pairs
            seen = seen + torch.stack([c.energy.detach().sum(), c.grad.detach().square().sum()])
            if totals is not None:
                totals.add(loss)
        loss = loss if totals is None else totals.loss()
        assert loss is not None
        metrics = {"energy_data": seen[0] / pairs, "score_norm": (seen[1] / pairs).sqrt()}
        return loss, {"score_loss": loss.detach(), **metrics}

    def parts(self, batch: Tensor, rng: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows with some of their directions, at most `chunk` pairs at a time."""
        for rows in batch.split(max(1, self.chunk // self.count(batch[0].numel()))):
            for directions in self.directions(rows, rng).split(max(1, self.chunk // len(rows))):
                yield rows, directions

    def evaluations(self, context: Context, batch: int) -> int:
        """One for each pair: an energy, its gradient and one Hessian-vector product."""
        return batch * self.count(context.data[0].numel())


def _parameters(context: Context) -> list[Tensor]:
    return [p for p in context.players["energy"].parameters() if p.requires_grad]


def _segments(context: Context, most: int = 32) -> tuple[Tensor, Tensor]:
    """Short segments among the data: from a row a tenth of the way to another one."""
    x = context.data[torch.linspace(0, len(context.data) - 1, min(most, len(context.data))).long()]
    return x, x + 0.1 * (x.roll(1, 0) - x)


@dataclass(frozen=True)
class ScoreMatching(ImplicitScore):
    """Implicit score matching (Theorem 2.1): ½‖∇E‖² − Tr ∇²E, averaged over data.

    At its minimum the model has the data's score wherever there is data. The trace is exact by default, one
    Hessian-vector product for each of the d dimensions of a row; `hutchinson` replaces it by an unbiased
    estimate that costs as much as one dimension (2.8).

    Attributes:
        trace: `exact` or `hutchinson`.
        projections: for `hutchinson`, random directions for each row, fresh at every update.
        probes: for `hutchinson`, `rademacher` (±1, the smaller variance) or `gaussian`.

    >>> import metastable as ms
    >>> x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    >>> run = ms.fit(None, x, ms.methods.ScoreMatching(), steps=5, evaluate=False)
    >>> sorted(set(run.history[-1]) & {"score_loss", "score_norm", "energy_data"})
    ['energy_data', 'score_loss', 'score_norm']
    """

    trace: str = "exact"
    projections: int = 1
    probes: str = "rademacher"

    name: ClassVar[str] = "score-matching"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("score-matching.trace", self.trace, TRACES)
        require_count("score-matching.projections", self.projections)
        require_choice("score-matching.probes", self.probes, PROBES)

    def count(self, d: int) -> int:
        """All d axes, or as many directions as `projections` says."""
        return d if self.trace == "exact" else self.projections

    def directions(self, rows: Tensor, rng: torch.Generator) -> Tensor:
        """The axes, or random directions."""
        if self.trace == "exact":
            return axes(rows)
        return random_directions(rows, self.projections, self.probes, rng)

    def objective(self, c: Curvature) -> Tensor:
        """Theorem 2.1, or (2.8)."""
        return implicit(c)


@dataclass(frozen=True)
class SlicedScoreMatching(ImplicitScore):
    """Sliced score matching (2.9): scores are compared along random directions, fresh at every update.

    The cost of a row does not depend on the dimension.

    Attributes:
        projections: random directions for each row.
        probes: `rademacher` or `gaussian`.
        variance_reduced: take ½‖∇E‖² instead of ½(v·∇E)², whose mean it is: less noise for nothing. This is
            Hutchinson's estimate (2.8) again.
    """

    projections: int = 1
    probes: str = "rademacher"
    variance_reduced: bool = False

    name: ClassVar[str] = "sliced-score-matching"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("sliced-score-matching.projections", self.projections)
        require_choice("sliced-score-matching.probes", self.probes, PROBES)

    def count(self, d: int) -> int:
        """As many as `projections` says."""
        return self.projections

    def directions(self, rows: Tensor, rng: torch.Generator) -> Tensor:
        """Random ones."""
        return random_directions(rows, self.projections, self.probes, rng)

    def objective(self, c: Curvature) -> Tensor:
        """(2.9), or (2.8)."""
        return implicit(c) if self.variance_reduced else sliced(c)


@dataclass(frozen=True)
class DenoisingScoreMatching(ScoreMethod):
    """Denoising score matching (2.7): ∇E at a noisy row must point back to the row it came from.

    What is learned is the density of the data **smoothed by a Gaussian of width σ**, not that of the data: for
    Gaussian data of covariance Σ, the inverse of Σ + σ²I. In exchange no second derivative is taken, so any
    activation will do, and data may be discrete or bounded.

    Attributes:
        sigma: σ, in the units of training; by default a tenth of the data's standard deviation (root mean
            square over coordinates).
        sigma_start: σ of the first update, from which it falls to `sigma`; None keeps σ constant.
        anneal: updates that the fall takes.
        shape: `geometric` or `linear`.
        weighted: multiply the loss by σ². The minimiser for each σ is the same; the size of the loss then
            does not change while σ falls.

    Deviations: `sigma_start` (one energy, σ annealed) and `weighted` are not in the thesis.

    >>> method = DenoisingScoreMatching(sigma=0.1, sigma_start=1.0, anneal=100)
    >>> [round(method.sigma_at(k, scale=1.0), 3) for k in (0, 50, 100, 500)]
    [1.0, 0.316, 0.1, 0.1]
    """

    sigma: float | None = None
    sigma_start: float | None = None
    anneal: int = 1000
    shape: str = "geometric"
    weighted: bool = False

    name: ClassVar[str] = "denoising-score-matching"

    def __post_init__(self) -> None:
        for field in ("sigma", "sigma_start"):
            value = vars(self)[field]
            if value is not None:
                require_length(f"{self.name}.{field}", value)
        require_count(f"{self.name}.anneal", self.anneal)
        require_choice(f"{self.name}.shape", self.shape, SHAPES)
        if self.sigma_start is not None and self.sigma is not None:
            rule = f"at least sigma = {self.sigma}"
            require(self.sigma_start >= self.sigma, f"{self.name}.sigma_start", rule, self.sigma_start)

    def sigma_at(self, step: int, scale: float) -> float:
        """σ at update `step`, for data whose standard deviation is `scale`."""
        last = 0.1 * scale if self.sigma is None else self.sigma
        if self.sigma_start is None:
            return last
        t = min(1.0, step / self.anneal)
        if self.shape == "linear":
            return self.sigma_start + t * (last - self.sigma_start)
        return self.sigma_start ** (1 - t) * last**t

    def phase(self, context: Context) -> Hashable:
        """σ: while it falls every update is one of its own."""
        return self.sigma_at(context.step, _spread(context))

    def start(self, context: Context) -> Nothing:
        """Check σ against the data, where it was left to them."""
        last = self.sigma_at(self.anneal, _spread(context))
        if self.sigma_start is not None and self.sigma_start < last:
            raise ConfigError(
                f"{self.name}.sigma_start", f"must be at least {last:.3g}, the σ that it falls to, "
                f"got {self.sigma_start}; give sigma too, or a larger sigma_start"
            )  # fmt: skip
        return Nothing()

    def loss(
        self, context: Context, state: Nothing, player: str, batch: Tensor, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """(2.7), averaged over rows; times σ² where `weighted`."""
        sigma = self.sigma_at(context.step, _spread(context))
        each, E, g = denoising(context.energy, batch, normal_like(batch, context.rng), sigma)
        loss = each.mean() * (sigma**2 if self.weighted else 1.0)
        metrics = {
            "score_loss": loss.detach(),
            "score_norm": g.detach().square().flatten(1).sum(1).mean().sqrt(),
            "energy_noisy": E.detach().mean(),
            "sigma": loss.detach().new_full((), sigma),
        }
        return loss, metrics

    def evaluations(self, context: Context, batch: int) -> int:
        """One energy and gradient for each row."""
        return batch


def _spread(context: Context) -> float:
    """Standard deviation of the data, root mean square over coordinates."""
    return context.data_scale / math.sqrt(context.data[0].numel())
