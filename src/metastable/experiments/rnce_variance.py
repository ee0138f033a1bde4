"""How far an R-NCE estimate is from the truth: Theorems 4.10 and 4.12 and the χ² law (4.12), repeat by repeat.

Data are N(0, I) in the plane and the energy ½|y − θ|² can hold them exactly, at θ* = 0. Each of n data has K
negatives, drawn once and kept. The score −E − log p_ξ is θ·y + c(y) up to a constant, so that the objective is
concave in θ and a few Newton steps find its maximum; all repeats are solved together.

| paper | here |
|---|---|
| y, **y** | `y`, `(R, n, K + 1, d)`: R repeats, the datum first |
| q_{θ,ξ} | `q`, the softmax over the K + 1 points |
| L_n, ∇L_n, ∇²L_n | `gradient_and_curvature`, the curvature with its sign turned |
| V_θ = −∇²L⁻¹ | `asymptotic_variance`, by quadrature |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import kstest
from torch import Tensor

from metastable.core.errors import MetastableError
from metastable.core.random import derive, generator
from metastable.report.figures import INK, draw_level, palette, picture

from .base import Bench, Experiment, Row
from .trials import by_scale

DIM = 2
COUNTS = (1, 4, 16)
CURVE = (2, 3, 4, 8, 16)
"""K at which the theory of a mismatched proposal is drawn."""
TOLERANCE = 0.1
KS_LEVEL = 1e-3
"""A true law is refused with this probability by each of the Kolmogorov–Smirnov tests."""
NEWTON = 20
AT_ONCE = 2_000_000
"""Points of all repeats that are in memory together."""


@dataclass(frozen=True)
class Normal:
    """A proposal p_ξ = N(mean, sd² I)."""

    mean: tuple[float, ...] = (0.0,) * DIM
    sd: float = 1.0

    def sample(self, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Draws, `(*shape, d)`."""
        z = torch.randn((*shape, DIM), generator=rng, dtype=torch.float64)
        return torch.tensor(self.mean, dtype=torch.float64) + self.sd * z

    def log_prob(self, y: Tensor) -> Tensor:
        """`(…, d)` to `(…)`."""
        centred = (y - torch.tensor(self.mean, dtype=y.dtype)) / self.sd
        return -0.5 * centred.square().sum(-1) - DIM * math.log(self.sd * math.sqrt(2 * math.pi))


MATCHED = Normal()
MISMATCHED = {"wide": Normal(sd=2.0), "shifted": Normal(mean=(1.0, 0.0))}


# ---- the estimator


def gradient_and_curvature(theta: Tensor, y: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """∇L_n and −∇²L_n at θ, `(R, d)` and `(R, d, d)`: data minus posterior means, and posterior covariances."""
    q = torch.softmax((y @ theta[:, None, :, None])[..., 0] + offset, 2)  # (3.7)
    mean = (q[..., None] * y).sum(2)
    n = y.shape[1]
    second = torch.einsum("rnk,rnki,rnkj->rij", q, y, y) - torch.einsum("rni,rnj->rij", mean, mean)
    return (y[:, :, 0] - mean).mean(1), second / n


def estimate(y: Tensor, offset: Tensor, limit: int = NEWTON) -> Tensor:
    """θ̂ of every repeat, `(R, d)`: Newton's iteration on the concave L_n, (4.5) with the negatives kept.

    Args:
        y: `(R, n, K + 1, d)`, the datum first.
        offset: c(y) = −½|y|² − log p_ξ(y), `(R, n, K + 1)`.
        limit: iterations after which it must have converged.
    """
    theta, slope = y.new_zeros(len(y), y.shape[-1]), math.inf
    for _ in range(limit):
        gradient, curvature = gradient_and_curvature(theta, y, offset)
        slope = float(gradient.abs().max())
        if slope < 1e-11:
            return theta
        theta = theta + torch.linalg.solve(curvature, gradient)
    raise MetastableError(f"Newton's iteration has not converged: the gradient is {slope:.2g}")


def offsets(y: Tensor, proposal: Normal) -> Tensor:
    """c(y) = −½|y|² − log p_ξ(y)."""
    return -0.5 * y.square().sum(-1) - proposal.log_prob(y)


def draw(repeats: int, n: int, K: int, proposal: Normal, rng: torch.Generator) -> Tensor:
    """Data with their negatives, `(R, n, K + 1, d)`."""
    return torch.cat([MATCHED.sample((repeats, n, 1), rng), proposal.sample((repeats, n, K), rng)], 2)


def estimates(repeats: int, n: int, K: int, proposal: Normal, seed: int) -> Tensor:
    """θ̂ of `repeats` independent sets of data with kept negatives, `(R, d)`."""
    rng = generator(seed)
    parts = []
    for size in _parts(repeats, n * (K + 1)):
        y = draw(size, n, K, proposal, rng)
        parts.append(estimate(y, offsets(y, proposal)))
    return torch.cat(parts)


def fresh_estimates(repeats: int, n: int, K: int, steps: int, seed: int) -> Tensor:
    """The same with fresh negatives at every step: Robbins and Monro's iteration θ ← θ + (−∇²L)⁻¹ ∇L_n/k.

    In the limit it solves 𝔼[∇L_n] = 0 over the negatives, (4.4), whose variance is the likelihood's; `steps` sets
    of negatives leave a share 1/(K·steps) on top.
    """
    rng, parts = generator(seed), []
    inverse = 1 + 1 / K  # of the curvature K/(K+1) at the truth, (4.12)
    for size in _parts(repeats, n * (K + 1)):
        data, theta = MATCHED.sample((size, n, 1), rng), torch.zeros(size, DIM, dtype=torch.float64)
        for k in range(1, steps + 1):
            y = torch.cat([data, MATCHED.sample((size, n, K), rng)], 2)
            theta = theta + inverse / k * gradient_and_curvature(theta, y, offsets(y, MATCHED))[0]
        parts.append(theta)
    return torch.cat(parts)


def _parts(repeats: int, points: int) -> Iterator[int]:
    at_once = max(1, AT_ONCE // points)
    for done in range(0, repeats, at_once):
        yield min(at_once, repeats - done)


# ---- the theory


def asymptotic_variance(
    proposal: Normal, counts: Sequence[int], *, side: int = 121, nodes: int = 400
) -> Tensor:
    """V = −∇²L(θ*, ξ)⁻¹ of Theorem 4.10 for each K of `counts`, `(len(counts), d, d)`, by quadrature.

    With w = p/p_ξ the curvature is the mean covariance of a point under the posterior q_k = w_k/Σw. Where the datum
    is one of the K + 1 points with equal chance, that is, by the tower rule,

        −∇²L = 𝔼_p[y yᵀ] − 𝔼_{ξ^{K+1}}[(Σ w_k y_k)(Σ w_k y_k)ᵀ/Σ w_k]/(K + 1),

    and 1/s = ∫₀^∞ e^{−us} du turns the expectation over K + 1 points into those over one,

        ∫ [A₂(u) φ(u)^K + K a₁(u) a₁(u)ᵀ φ(u)^{K−1}] du,

    with φ = 𝔼_ξ e^{−uw}, a₁ = 𝔼_ξ[w y e^{−uw}] and A₂ = 𝔼_ξ[w² y yᵀ e^{−uw}].

    >>> V = asymptotic_variance(MATCHED, (1, 4), side=81, nodes=300)  # 1 + 1/K, Theorem 4.12
    >>> [[round(v, 6) for v in each.diagonal().tolist()] for each in V]
    [[2.0, 2.0], [1.25, 1.25]]
    """
    axis = torch.linspace(-10.0, 11.0, side, dtype=torch.float64)
    y = torch.cartesian_prod(axis, axis)
    cell = float((axis[1] - axis[0]) ** DIM)
    return torch.linalg.inv(
        ranking_curvature(y, MATCHED.log_prob(y), proposal.log_prob(y), cell, counts, nodes)
    )


def ranking_curvature(
    psi: Tensor, log_p: Tensor, log_q: Tensor, cell: float, counts: Sequence[int], nodes: int = 400
) -> Tensor:
    """−∇²L(θ*, ξ) of an energy −θ·ψ(y) for each K, `(len(counts), d, d)`, as `asymptotic_variance` says.

    Args:
        psi: ψ on a grid, `(points, d)`.
        log_p: log p there, `(points,)`.
        log_q: log p_ξ there.
        cell: what a point stands for.
        counts: K.
        nodes: of the integral over u.
    """
    log_w = log_p - log_q
    mass, mass_w = cell * log_q.exp(), cell * log_p.exp()  # p_ξ, w p_ξ
    log_u = torch.linspace(-60.0, 25.0, nodes, dtype=torch.float64)
    K = torch.tensor(counts, dtype=torch.float64)[:, None, None]
    shared = torch.zeros(len(counts), psi.shape[1], psi.shape[1], dtype=torch.float64)
    for s in log_u:
        uw = torch.exp(s + log_w)
        decay = torch.exp(-uw)
        phi = mass @ decay
        a1 = (mass_w * decay) @ psi
        A2 = (psi * (mass_w * uw * decay)[:, None]).T @ psi  # u·A₂: du = u ds
        shared += A2 * phi**K + K * torch.exp(s) * torch.outer(a1, a1) * phi ** (K - 1)
    return (psi * mass_w[:, None]).T @ psi - (log_u[1] - log_u[0]) * shared


def kl_to_truth(theta: Tensor) -> Tensor:
    """KL(p ‖ p_θ) = ½|θ|²."""
    return 0.5 * theta.square().sum(-1)


def ks_p_value(values: Tensor, degrees: int) -> float:
    """How likely values this far from χ² are under it, by the test of Kolmogorov and Smirnov."""
    return float(kstest(values.numpy(), "chi2", args=(degrees,)).pvalue)


# ---- the experiment


def body(bench: Bench) -> list[Row]:
    """Variances beside their theory, and the law of n·KL."""
    R, n = bench.repeats, bench.n
    kept = {K: estimates(R, n, K, MATCHED, derive(bench.seed, "kept", K)) for K in COUNTS}
    fresh = {
        K: fresh_estimates(R, n, K, bench.fresh_steps, derive(bench.seed, "fresh", K)) for K in COUNTS[:2]
    }
    rows = []
    for K, theta in kept.items():
        rows += _variance_rows(f"kept/K={K}", theta, n, torch.eye(DIM) * (1 + 1 / K))
        scaled = 2 * n * kl_to_truth(theta) / (1 + 1 / K)
        rows += [
            Row(
                f"mean_n_kl/K={K}",
                float(n * kl_to_truth(theta).mean()),
                paper=round(DIM / 2 * (1 + 1 / K), 4),
            ),
            Row(f"chi2_p_value/K={K}", ks_p_value(scaled, DIM), ">=", KS_LEVEL),
        ]
        bench.say(f"K = {K}: n·variance {_spread(theta, n):.4f}, theory {1 + 1 / K:.4f}")
    for K, theta in fresh.items():
        rows += _variance_rows(f"fresh/K={K}", theta, n, torch.eye(DIM))
    mismatched = {}
    for name, proposal in MISMATCHED.items():
        for K, V in zip(COUNTS[1:], asymptotic_variance(proposal, COUNTS[1:]), strict=True):
            theta = estimates(R, bench.n_mismatched, K, proposal, derive(bench.seed, name, K))
            bench.say(f"{name} proposal, K = {K}: V = {V[0, 0]:.3f}, {V[1, 1]:.3f}")
            rows += _variance_rows(f"{name}/K={K}", theta, bench.n_mismatched, V)
            mismatched[name, K] = theta
    _draw(bench, kept, fresh, mismatched)
    return rows


def _spread(theta: Tensor, n: int) -> float:
    """n times the mean square of the coordinates of θ̂ − θ*."""
    return float(n * theta.square().mean())


def _variance_rows(name: str, theta: Tensor, n: int, V: Tensor) -> list[Row]:
    """n·Var of θ̂ − θ*, averaged over coordinates, and how far it is from tr V/d, as a share."""
    truth, found = float(V.trace()) / DIM, _spread(theta, n)
    return [
        Row(f"n_variance/{name}", found, oracle=round(truth, 4)),
        Row(f"variance_error/{name}", abs(found / truth - 1), "<=", TOLERANCE),
    ]


def _draw(
    bench: Bench, kept: dict[int, Tensor], fresh: dict[int, Tensor], mismatched: dict[tuple[str, int], Tensor]
) -> None:
    """n·variance against K beside the theory, and the quantiles of n·KL beside those of χ²."""
    with picture(bench.folder / "variance.png", 10, 3.9, columns=2) as (left, right):
        grid = torch.logspace(0, 1.3, 60)
        left.plot(grid, 1 + 1 / grid, color=palette.blue, lw=1.4, label="p_ξ = p: 1 + 1/K (Theorem 4.12)")
        draw_level(left, 1.0, lw=0.9, label="likelihood: 1")
        _draw_found(left, kept, bench.n, fmt="o", color=palette.blue, label="kept negatives")
        _draw_found(left, fresh, bench.n, fmt="o", color=palette.green, label="fresh negatives at every step")
        for name, colour in (("wide", palette.vermillion), ("shifted", palette.purple)):
            theory = [float(V.trace()) / DIM for V in asymptotic_variance(MISMATCHED[name], CURVE)]
            left.plot(CURVE, theory, color=colour, lw=1.2, ls=":")
            own = {K: theta for (other, K), theta in mismatched.items() if other == name}
            _draw_found(left, own, bench.n_mismatched, fmt="s", color=colour, label=f"{name} proposal")
        left.set(xscale="log", xlabel="negatives for each datum, K", ylabel="n × variance")
        left.set_title("variance of the mean")
        left.set_xticks(COUNTS, [str(K) for K in COUNTS])
        left.legend(fontsize=7.5)
        for (K, theta), colour in zip(
            kept.items(), (palette.vermillion, palette.orange, palette.blue), strict=True
        ):
            scaled = (2 * bench.n * kl_to_truth(theta) / (1 + 1 / K)).sort().values
            level = (torch.arange(len(scaled)) + 0.5) / len(scaled)
            right.plot(-2 * torch.log1p(-level), scaled, ".", ms=3, color=colour, label=f"K = {K}")
        right.axline((0, 0), slope=1, color=INK, lw=0.9, ls="--")
        right.set(xlabel="quantile of χ²", ylabel="quantile found")
        right.set_title("2n·KL/(1 + 1/K) and its limit, χ² with 2 degrees (4.12)")
        right.legend(fontsize=8)


def _draw_found(axes: Any, found: dict[int, Tensor], n: int, **look: Any) -> None:
    """n·variance at each K, ± two standard errors."""
    values = [_spread(theta, n) for theta in found.values()]
    errors = [2 * math.sqrt(2 / theta.numel()) * v for theta, v in zip(found.values(), values, strict=True)]
    axes.errorbar(list(found), values, errors, ms=5, **look)


EXPERIMENT = Experiment(
    name="rnce-variance",
    title="The variance of ranking NCE, and the χ² law of its divergence (Theorems 4.10, 4.12)",
    paper="Singh, Tu, Sindhwani, TMLR 2024, Sections 4.2, 4.3.1 and 4.5",
    scales=by_scale({"repeats": 2000}, n=(200, 800), n_mismatched=(400, 1600), fresh_steps=(20, 40)),
    body=body,
)
