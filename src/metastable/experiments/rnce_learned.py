"""What learning the proposal does to an R-NCE estimate: Theorems 4.10 and 4.17 to 4.19, Proposition 4.21.

On the line, with energies −log p(y) − θ·ψ(y), ψ = (y, y²), which hold the data at θ* = 0. Each of n data has K
negatives m + s·z, whose z are drawn once and kept; the proposal N(m, s²) is learned from the same data, by
likelihood or as the adversary of the energy. `rnce-variance` holds it fixed.

| paper | here |
|---|---|
| θ̂_n, ξ̂_n | `theta`, `xi` = (m, log s), `(R, 2)` each for R repeats |
| V_θ = −∇²L(θ*, ξ*)⁻¹ | `ranking_curvature`, by quadrature |
| ξ̄, the adversary of θ* | `adversary`: L(θ*, ·) by quadrature, its minimum by Newton's iteration |
| (θ̂_n, ξ̂_n) of (4.10) | `stackelberg`: θ̂ against the adversary's answer to it, `respond` |
| I, J | `fisher`, and `fisher_distance` for FI itself |

**Proposition 4.21.** For a normal law the paper prints tr(I⁻¹J) = 3/σ² + 4μ²/σ⁴. It is 3/σ²: with
J = [[1, 2μ], [2μ, 4(μ² + σ²)]] and det I = 2σ⁶ the terms in μ cancel, as they must: moving all y by a constant
changes neither the family nor the distance. Rows have both numbers beside what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.func import grad, hessian, vmap

from metastable.core.errors import MetastableError
from metastable.core.random import derive, generator

from .base import Bench, Experiment, Row
from .rnce_game import PLAYS, draw, play, play_rows
from .rnce_line import Mixture, fisher, grid_of, log_normal, points, slopes, statistics
from .rnce_variance import KS_LEVEL, estimate, ks_p_value, ranking_curvature
from .trials import by_scale

POINTS_AT_ONCE = 100_000
"""Data and negatives of all repeats that are in memory together."""


LAWS = {
    "lopsided": Mixture((0.7, 0.3), (-1.5, 2.0), (0.5, 1.0)),
    "rare": Mixture((0.9, 0.1), (-1.0, 3.0), (0.7, 0.7)),
}
"""Laws that no normal proposal is: in one the adversary helps, in the other it looks away from the rare mode."""
FISHER_CASES = ((0.0, 1.0), (1.0, 1.0), (1.0, 0.5))
"""(μ, σ) of Proposition 4.21."""


def curvature_at(law: Mixture, xi: Tensor, K: int) -> Tensor:
    """−∇²L(θ*, ξ)."""
    y, cell = grid_of(law)
    return ranking_curvature(statistics(y), law.log_prob(y), log_normal(y, *xi), cell, (K,))[0]


# ---- estimators


def likelihood(y: Tensor, both: bool = True, log_sd: Tensor | None = None) -> Tensor:
    """ξ̂ of data `(R, n)` by likelihood, `(R, 2)`; with `both` off, log s stays."""
    found = y.std(1, correction=0).log() if both or log_sd is None else log_sd.expand(len(y))
    return torch.stack([y.mean(1), found], 1)


def against(law: Mixture, y: Tensor, z: Tensor, xi: Tensor) -> Tensor:
    """θ̂ for proposals that are given, `(R, 2)`, (4.5)."""
    every, offset = points(law, y, z, xi)
    return estimate(statistics(every), offset)


def respond(
    law: Mixture, y: Tensor, theta: Tensor, K: int, start: Tensor, both: bool, limit: int = 40
) -> Tensor:
    """ξ̂ = argmin L_n(θ̂, ξ), negatives by quadrature, `(R, 2)`; with `both` off, log s stays at its start.

    Newton's iteration downhill: curvatures by their absolute value, steps of at most 0.3.
    """
    free, (grid, cell) = 2 if both else 1, grid_of(law, 201)
    log_u = torch.linspace(-25.0, 20.0, 80, dtype=torch.float64)[:, None]

    def objective(part: Tensor, y: Tensor, theta: Tensor) -> Tensor:
        mean, log_sd = torch.cat([part, start[free:]])
        every = torch.cat([y, grid])
        log_q = log_normal(every, mean, log_sd)
        log_w = law.log_prob(every) + statistics(every) @ theta - log_q
        decay = torch.exp(-torch.exp(log_u + log_w))
        negatives = decay[:, len(y) :] @ (cell * log_q[len(y) :].exp())
        both_sides = decay[:, : len(y)].mean(1) * negatives**K  # as in `population`, but for a constant
        return log_w[: len(y)].mean() + both_sides.sum() * (log_u[1, 0] - log_u[0, 0])

    part = start[:free].expand(len(y), free).clone()
    slope = part
    for _ in range(limit):
        slope = vmap(grad(objective))(part, y, theta)
        if float(slope.abs().max()) < 1e-8:
            return torch.cat([part, start[free:].expand(len(y), 2 - free)], 1)
        size, frame = torch.linalg.eigh(vmap(hessian(objective))(part, y, theta))
        step = frame @ ((frame.mT @ slope[..., None]) / size.abs().clamp(min=1e-3)[..., None])
        part = part - step[..., 0].clamp(-0.3, 0.3)
    raise MetastableError(f"the adversary was not found: its gradient is {float(slope.abs().max()):.2g}")


def stackelberg(law: Mixture, y: Tensor, z: Tensor, start: Tensor, both: bool) -> Tensor:
    """(θ̂, ξ̂), `(R, 4)`: the adversary's answer to a first θ̂, and θ̂ against that answer."""
    first = against(law, y, z, start.expand(len(y), 2))
    xi = respond(law, y, first, z.shape[2], start, both)
    return torch.cat([against(law, y, z, xi), xi], 1)


def population(law: Mixture, xi: Tensor, K: int) -> Tensor:
    """L(θ*, ξ) by quadrature: 𝔼 log w − 𝔼 log Σw, the latter by log s = ∫ (e^{−u} − e^{−us})/u du."""
    y, cell = grid_of(law)
    log_p, log_q = law.log_prob(y), log_normal(y, *xi)
    log_w, log_u = log_p - log_q, torch.linspace(-60.0, 25.0, 400, dtype=torch.float64)
    decay = torch.exp(-torch.exp(log_u[:, None] + log_w))
    both = (decay @ (cell * log_p.exp())) * (decay @ (cell * log_q.exp())) ** K
    log_sum = (torch.exp(-log_u.exp()) - both).sum() * (log_u[1] - log_u[0])
    return cell * (log_p.exp() * log_w).sum() - log_sum


def adversary(law: Mixture, K: int, both: bool = True) -> Tensor:
    """ξ̄ = argmin L(θ*, ξ), `(2,)`; with `both` off, over m alone."""
    start = law.moments()
    free = 2 if both else 1
    value = start[:free].clone()

    def objective(part: Tensor) -> Tensor:
        return population(law, torch.cat([part, start[free:]]), K)

    slope = value
    for _ in range(50):
        slope = grad(objective)(value)
        if float(slope.abs().max()) < 1e-10:
            return torch.cat([value, start[free:]])
        value = value - torch.linalg.solve(hessian(objective)(value), slope)
    raise MetastableError(f"the adversary was not found: its gradient is {float(slope.abs().max()):.2g}")


def repeated(
    law: Mixture, repeats: int, n: int, K: int, seed: int, solve: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """`solve` of data `(R, n)` and kept z `(R, n, K)`, for all repeats."""
    rng, parts = generator(seed), []
    at_once = max(1, POINTS_AT_ONCE // (n * (K + 1)))
    for done in range(0, repeats, at_once):
        size = min(at_once, repeats - done)
        y = law.sample((size, n), rng)
        parts.append(solve(y, torch.randn((size, n, K), generator=rng, dtype=torch.float64)))
    return torch.cat(parts)


# ---- rows


def law_rows(
    name: str, theta: Tensor, n: int, V: Tensor, information: Tensor, tolerance: float
) -> Iterator[Row]:
    """n·𝔼 θ̂ᵀIθ̂/2 and its error beside tr(VI)/2, and whether nθ̂ᵀV⁻¹θ̂ is χ² with two degrees."""
    truth = float((V @ information).trace()) / 2
    each = n * torch.einsum("ri,ij,rj->r", theta, information, theta) / 2
    found = float(each.mean())
    yield Row(f"n_variance/{name}", found, oracle=round(truth, 4))
    yield Row(f"n_variance_se/{name}", float(each.std()) / len(each) ** 0.5)
    yield Row(f"variance_error/{name}", abs(found / truth - 1), "<=", tolerance)
    scaled = n * torch.einsum("ri,ij,rj->r", theta, torch.linalg.inv(V), theta)
    yield Row(f"chi2_p_value/{name}", ks_p_value(scaled, 2), ">=", KS_LEVEL)


def realisable_rows(bench: Bench, K: int) -> Iterator[Row]:
    """Theorem 4.10 where the proposal can be the data's law: θ̂, and θ̂ together with ξ̂.

    In natural coordinates the likelihood's η̂ has variance I⁻¹, θ̂ has (1 + 1/K) I⁻¹ and both together I⁻¹: what
    R-NCE adds to the likelihood's error is I⁻¹/K and independent of it.
    """
    law = Mixture(means=(1.0,))
    information = fisher(law)

    def solve(y: Tensor, z: Tensor) -> Tensor:
        xi = likelihood(y)
        precision = torch.exp(-2 * xi[:, 1])
        natural = torch.stack([xi[:, 0] * precision - 1.0, 0.5 * (1 - precision)], 1)
        return torch.cat([against(law, y, z, xi), natural], 1)

    found = repeated(law, bench.repeats, bench.n, K, derive(bench.seed, "realisable", K), solve)
    theta, natural = found[:, :2], found[:, 2:]
    name = f"learned/K={K}"
    yield from law_rows(
        name, theta, bench.n, curvature_at(law, law.moments(), K).inverse(), information, bench.tolerance
    )
    shared = float(bench.n * torch.einsum("ri,ij,rj->r", theta, information, natural).mean()) / 2
    yield Row(f"joint_covariance/{name}", shared, oracle=1.0)
    yield Row(f"joint_error/{name}", abs(shared - 1), "<=", bench.tolerance)


def game_rows(bench: Bench, name: str, K: int, both: bool) -> Iterator[Row]:
    """Corollary 4.19 beside Theorem 4.10 where the proposal cannot be the data's law."""
    law = LAWS[name]
    information, moments = fisher(law), law.moments()
    rival = adversary(law, K, both)
    kept = None if both else moments[1]

    def by_likelihood(y: Tensor, z: Tensor) -> Tensor:
        return against(law, y, z, likelihood(y, both, kept))

    def by_game(y: Tensor, z: Tensor) -> Tensor:
        return stackelberg(law, y, z, rival, both)

    seed = derive(bench.seed, name, K)
    V = {
        "likelihood": curvature_at(law, moments, K).inverse(),
        "adversary": curvature_at(law, rival, K).inverse(),
    }
    repeats = {"likelihood": bench.repeats_likelihood, "adversary": bench.repeats_game}
    for who, solve in {"likelihood": by_likelihood, "adversary": by_game}.items():
        found = repeated(law, repeats[who], bench.n_game, K, seed, solve)
        yield from law_rows(
            f"{name}/K={K}/{who}", found[:, :2], bench.n_game, V[who], information, bench.tolerance_game
        )
        if who == "adversary":
            yield Row(
                f"adversary_mean/{name}/K={K}", float(found[:, 2].mean()), oracle=round(float(rival[0]), 4)
            )
    gain = [float((v @ information).trace()) for v in V.values()]
    yield Row(f"adversary_gain/{name}/K={K}", 1 - gain[1] / gain[0])


def fisher_distance(theta: Tensor, law: Mixture) -> Tensor:
    """FI(p ‖ p_θ) = θᵀJθ, `(R,)`: in this family it is exact for any θ."""
    return torch.einsum("ri,ij,rj->r", theta, slopes(law), theta)


def fisher_rows(bench: Bench, K: int = 4) -> Iterator[Row]:
    """Proposition 4.21: n·FI with a learned proposal, tr(I⁻¹J) by quadrature, and what the paper prints."""
    for mu, sigma in FISHER_CASES:
        law, where = Mixture(means=(mu,), sds=(sigma,)), f"mu={mu:g}/sigma={sigma:g}"

        def solve(y: Tensor, z: Tensor, law: Mixture = law) -> Tensor:
            return against(law, y, z, likelihood(y))

        theta = repeated(law, bench.repeats, bench.n, K, derive(bench.seed, "fisher", mu, sigma), solve)
        trace = float((fisher(law).inverse() @ slopes(law)).trace())
        found = float(bench.n * fisher_distance(theta, law).mean()) / (1 + 1 / K)
        printed = 3 / sigma**2 + 4 * mu**2 / sigma**4
        yield Row(f"fisher_trace/{where}", trace, paper=printed)
        yield Row(f"fisher_trace_error/{where}", abs(trace * sigma**2 / 3 - 1), "<=", 1e-6)
        yield Row(f"n_fisher/{where}", found, paper=printed)
        yield Row(f"n_fisher_error/{where}", abs(found / trace - 1), "<=", bench.tolerance)


def body(bench: Bench) -> list[Row]:
    """The theorems first, then the game as it is played."""
    rows: list[Row] = []
    for K in bench.counts:
        rows += realisable_rows(bench, K)
        bench.say(f"learned proposal, K = {K}: {rows[-6].value:.4f}, theory {rows[-6].oracle}")
    rows += fisher_rows(bench)
    for name, K, both in (("lopsided", 1, True), ("rare", 4, False)):
        rows += game_rows(bench, name, K, both)
        bench.say(f"{name}, K = {K}: the adversary takes {rows[-1].value:.1%} off the variance")
    law = LAWS["lopsided"]
    rival = adversary(law, 4)
    courses = {name: play(law, how, bench.updates, derive(bench.seed, "play")) for name, how in PLAYS.items()}
    for name, course in courses.items():
        rows += play_rows(name, course, rival)
    draw(bench, courses, rival)
    return rows


EXPERIMENT = Experiment(
    name="rnce-learned",
    title="R-NCE whose proposal learns: its law, its Fisher distance and the adversary (Theorems 4.10, 4.17-4.21)",
    paper="Singh, Tu, Sindhwani, TMLR 2024, Sections 4.2, 4.3.2 and 4.5",
    scales=by_scale(
        repeats=(200, 2000),
        n=(200, 800),
        repeats_game=(20, 1200),
        repeats_likelihood=(20, 3000),  # the adversary is what takes long
        n_game=(400, 800),
        counts=((4,), (1, 4, 16)),
        updates=(200, 2500),
        tolerance=(0.5, 0.1),  # the limit n → ∞ is far from n = 200
        tolerance_game=(1.0, 0.2),  # of 20 and 1,200 repeats
    ),
    body=body,
)
