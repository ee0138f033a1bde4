"""Why log p_ξ needs the whole trace: Hutchinson's estimate of a divergence, and what it does to a ranking.

Footnote 6 of the R-NCE paper says that the estimate is not applicable, since log-probabilities of a small batch are
compared. Here the flow is the exact one from N(0, I) to a correlated N(0, Σ), so that log p is known, and so is the
noise of the estimate: with one probe e along a trajectory, −∫ eᵀ∂v e dt = −½ eᵀ log Σ e, whose variance is
2 Σ_{i≠j} (½ log Σ)²_ij for probes of ±1. It grows with d, as that of log p does, and falls with the probes m.

A batch is a datum and K negatives of the same law: the right posterior of the datum is 1/(K + 1) for every batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import jvp

from metastable.core.random import derive, generator
from metastable.proposals import InterpolantFlow, VectorField
from metastable.proposals.interpolants import interpolant_named
from metastable.report.figures import draw_level, palette, picture

from .base import Bench, Experiment, Row
from .trials import by_scale

NARROWEST = 0.04
"""The least eigenvalue of Σ; the largest is 1, and the others lie between them, evenly in their logarithms."""
K = 9
WHOLE = 0
"""In the place of a number of probes: the exact trace."""


class CorrelatedField(VectorField):
    """The velocity from N(0, I) to N(0, Σ), Σ of random directions, and its divergence by m probes or exactly."""

    def __init__(self, dim: int, seed: int):
        super().__init__()
        self.interpolant = interpolant_named("trigonometric")
        self.values = torch.logspace(math.log10(NARROWEST), 0, dim, dtype=torch.float64)
        noise = torch.randn((dim, dim), generator=generator(seed), dtype=torch.float64)
        self.frame = torch.linalg.qr(noise).Q
        self.probes, self.rng = WHOLE, generator(seed)

    def velocity(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """(a a′ I + b b′ Σ)(a² I + b² Σ)⁻¹ x."""
        (a, b), (da, db) = self.interpolant.coefficients(clock), self.interpolant.derivatives(clock)
        a, b, da, db = (value[..., None] for value in (a, b, da, db))
        growth = (a * da + b * db * self.values) / (a.square() + b.square() * self.values)
        return ((x @ self.frame) * growth) @ self.frame.T

    def divergence(self, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
        """The trace, or the mean of eᵀ∂v e over probes e of ±1, each kept along its trajectory."""
        if self.probes == WHOLE:
            return super().divergence(x, code, clock)
        found = torch.zeros_like(x[..., 0])
        for _ in range(self.probes):
            e = torch.randint(0, 2, x.shape[1:], generator=self.rng).to(x).mul(2).sub(1).expand_as(x)
            found += (jvp(lambda y: self.velocity(y, code, clock), (x,), (e.clone(),))[1] * e).sum(-1)
        return found / self.probes

    def log_prob(self, x: Tensor) -> Tensor:
        """log N(x; 0, Σ)."""
        white = (x @ self.frame).square() / self.values
        return -0.5 * (white + self.values.log() + math.log(2 * math.pi)).sum(-1)

    def noise(self, probes: int) -> float:
        """Standard deviation of the estimated log p, in nats."""
        half_log = 0.5 * (self.frame * self.values.log()) @ self.frame.T
        return float((2 * (half_log.square().sum() - half_log.diagonal().square().sum()) / probes).sqrt())


class Ranked(NamedTuple):
    """A number of probes in a dimension: exact log p of batches and what was found, `(batches, K + 1)` each."""

    dim: int
    probes: int
    predicted: float
    exact: Tensor
    found: Tensor

    @property
    def noise(self) -> float:
        """Standard deviation of what was found, around the exact."""
        return float((self.found - self.exact).square().mean().sqrt())

    @property
    def first(self) -> float:
        """In how many batches the best is the right one."""
        return float((self.found.argmax(1) == self.exact.argmax(1)).double().mean())

    @property
    def posterior(self) -> float:
        """𝔼 log q of the datum at the true energy, whose log p is exact; −log(K + 1) without noise."""
        return float(torch.log_softmax(self.exact - self.found, 1)[:, 0].mean())


def rank(bench: Bench, dim: int) -> Iterator[Ranked]:
    """One set of batches, scored with each number of probes and by the trace."""
    field = CorrelatedField(dim, derive(bench.seed, "field", dim))
    flow = InterpolantFlow(
        dim, field=field, interpolant=field.interpolant, steps=bench.steps, scored=bench.scored
    ).double()
    rng = generator(derive(bench.seed, "batches", dim))
    z = torch.randn((bench.batches, K + 1, dim), generator=rng, dtype=torch.float64)
    x = (z * field.values.sqrt()) @ field.frame.T
    exact = field.log_prob(x)
    for probes in dict.fromkeys((WHOLE, *bench.probes, dim)):
        field.probes = probes
        flow.chunk = 2**40 if probes else None  # one tile, as a probe belongs to its trajectory
        found = flow.log_prob(x.flatten(0, 1)).detach().view_as(exact)
        yield Ranked(dim, probes, field.noise(probes) if probes else 0.0, exact, found)


def rows_of(each: Ranked, tolerance: float) -> Iterator[Row]:
    """Noise beside its prediction, the right choices, and what is left of the objective."""
    where = f"d={each.dim}/{f'probes={each.probes}' if each.probes else 'trace'}"
    if not each.probes:
        yield Row(f"noise/{where}", each.noise, "<=", 0.05)
    else:
        yield Row(f"noise/{where}", each.noise, oracle=round(each.predicted, 4))
        yield Row(f"noise_error/{where}", abs(each.noise / each.predicted - 1), "<=", tolerance)
    yield Row(f"noise_to_signal/{where}", each.noise / float(each.exact.std()))
    yield Row(f"right_first/{where}", each.first)
    yield Row(f"objective/{where}", each.posterior, oracle=round(-math.log(K + 1), 4))


def draw(bench: Bench, found: Sequence[Ranked]) -> None:
    """Estimates against the truth, right choices and the objective against the probes."""
    with picture(bench.folder / "footnote-6.png", 11, 3.5, columns=3) as (left, middle, right):
        largest = [r for r in found if r.dim == bench.dims[-1]]
        for each, colour in ((largest[1], palette.vermillion), (largest[0], palette.blue)):
            label = f"{each.probes} probe" if each.probes else "trace"
            left.plot(
                each.exact[:60].flatten(), each.found[:60].flatten(), ".", ms=3, color=colour, label=label
            )
        left.set(xlabel="log p", ylabel="log p found", title=f"d = {bench.dims[-1]}")
        left.legend(fontsize=8)
        for dim, colour in zip(bench.dims, (palette.blue, palette.green, palette.vermillion), strict=False):
            own = [r for r in found if r.dim == dim and r.probes]
            middle.plot(
                [r.probes for r in own], [r.first for r in own], "o-", color=colour, label=f"d = {dim}"
            )
            right.plot([r.probes for r in own], [r.posterior for r in own], "o-", color=colour)
        draw_level(middle, 1.0, lw=0.8)
        middle.set(xscale="log", ylim=(0, 1.05), xlabel="probes", title="the best of ten is the right one")
        middle.legend(fontsize=8)
        draw_level(right, -math.log(K + 1), lw=0.8)
        right.set(xscale="log", xlabel="probes", title="R-NCE objective at the truth")


def body(bench: Bench) -> list[Row]:
    """Every dimension and number of probes."""
    found = [each for dim in bench.dims for each in rank(bench, dim)]
    draw(bench, found)
    return [row for each in found for row in rows_of(each, bench.tolerance)]


EXPERIMENT = Experiment(
    name="rnce-hutchinson",
    title="A Hutchinson estimate of the divergence breaks the ranking (footnote 6)",
    paper="Singh, Tu, Sindhwani, TMLR 2024, Section 6",
    scales=by_scale(
        dims=((4, 8), (4, 20, 64)),
        probes=((1,), (1, 4)),
        batches=(60, 300),
        steps=(32, 96),
        scored=(17, 33),
        tolerance=(0.2, 0.05),
    ),
    body=body,
)
