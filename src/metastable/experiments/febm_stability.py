"""Theorems 4 and 5 of the f-EBM paper in one dimension: the Jacobian, its eigenvalues, and the offset of E and H.

V(θ, ω) = E_p[f′(e^{H+E})] − E_q[f*(f′(e^{H+E}))] of (14) is an integral here, so that E descends and H climbs it
exactly, ż = (−r·∇_θV, ∇_ωV) with r the `energy_rate` (r = 1 in the paper, (19)). Where the model can be the data
the Jacobian at the equilibrium is Theorem 4's,

    J = f″(1)·[[−r·K_EE, r·K_EH], [−K_EHᵀ, −K_HH]],   K_EE = Cov_p[∇E] − E_p[∇E]E_p[∇E]ᵀ,   K_EH = E_p[∇E]E_p[∇H]ᵀ.

Theorem 5 needs K_EE to be positive semi-definite. An energy with a free offset, which every network is, has ∇E = 1
in that direction: K_EE = −1 and K_EH = K_HH = 1. The block of the two offsets is then f″(1)·[[r, r], [−1, −1]] with
eigenvalues 0, for the constant that E and H may exchange, and −(1 − r)f″(1), for their sum. At r = 1 the sum does
not move either: the constant in log p/q is never learned, and as long as it is off E and H drift apart at a
constant speed. Above 1 it runs away. A direction of unit variance in E learns at r·f″(1), so that r = ½ is the
fastest of all.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metastable.core.convex import derivative
from metastable.methods.divergences import Divergence
from metastable.report.figures import draw_level, palette, picture

from .base import Bench, Experiment, Row
from .febm_exact import divergence_named, target
from .trials import by_scale

GRID = torch.linspace(-14, 16, 6001, dtype=torch.float64)
MU, SIGMA = 0.8, 1.3
"""The data where the model can be them: N(μ, σ²)."""
STEP = 1e-4
"""Of central differences."""


class Game:
    """θ = (μ, log σ, offset) of E, ω = (constant, x, x²) of H, and data p given by log p on the grid.

    E = ½((x−μ)/σ)² + offset and H = ω₀ + ω₁x + ω₂x², which holds log(p·Z) of any normal p.

    Args:
        divergence: f.
        log_p: log-density of the data on `GRID`.
        offset: whether E has one.
    """

    def __init__(self, divergence: Divergence, log_p: Tensor, offset: bool):
        self.f, self.log_p, self.offset = divergence, log_p, offset
        self.powers = torch.stack([torch.ones_like(GRID), GRID, GRID.square()], 1)
        self.size = 3 if offset else 2

    def energy(self, theta: Tensor) -> Tensor:
        """E on the grid."""
        bell = 0.5 * ((GRID - theta[0]) * torch.exp(-theta[1])).square()
        return bell + theta[2] if self.offset else bell

    def value(self, theta: Tensor, omega: Tensor) -> Tensor:
        """V: (14), an integral."""
        E = self.energy(theta)
        exponent = self.powers @ omega + E
        q = torch.exp(-E) / torch.trapezoid(torch.exp(-E), GRID)
        inside = self.log_p.exp() * self.f.slope(exponent) - q * self.f.conjugate(exponent)
        return torch.trapezoid(inside, GRID)

    def flow(self, at: Tensor, rate: float = 1.0) -> Tensor:
        """(19): (−r·∇_θV, ∇_ωV)."""
        with torch.enable_grad():
            theta, omega = (part.detach().requires_grad_() for part in (at[: self.size], at[self.size :]))
            down, up = torch.autograd.grad(self.value(theta, omega), [theta, omega])
        return torch.cat([-rate * down, up])

    def jacobian(self, at: Tensor, rate: float = 1.0) -> Tensor:
        """Of the flow, by central differences."""
        columns = []
        for k in range(len(at)):
            step = torch.zeros_like(at)
            step[k] = STEP
            columns.append((self.flow(at + step, rate) - self.flow(at - step, rate)) / (2 * STEP))
        return torch.stack(columns, 1)

    def theorem_4(self, at: Tensor, rate: float = 1.0) -> Tensor:
        """J from K_EE, K_EH and K_HH."""
        theta = at[: self.size]
        p = self.log_p.exp()
        dE = torch.func.jacfwd(self.energy)(theta)

        def expected(values: Tensor) -> Tensor:
            return torch.trapezoid(p.view(-1, *[1] * (values.dim() - 1)) * values, GRID, dim=0)

        mean_E, mean_H = expected(dE), expected(self.powers)
        K_EE = expected(dE[:, :, None] * dE[:, None, :]) - 2 * torch.outer(mean_E, mean_E)
        K_EH = torch.outer(mean_E, mean_H)
        K_HH = expected(self.powers[:, :, None] * self.powers[:, None, :])
        top, low = torch.cat([-rate * K_EE, rate * K_EH], 1), torch.cat([-K_EH.T, -K_HH], 1)
        return curvature_at_one(self.f) * torch.cat([top, low])


def curvature_at_one(f: Divergence) -> float:
    """f″(1): the slope in x of f′(eˣ) at 0."""
    return float(derivative(f.slope, torch.zeros(1, dtype=torch.float64)).detach())


def normal(mu: float, sigma: float) -> Tensor:
    """log N(μ, σ²) on the grid."""
    return -0.5 * ((GRID - mu) / sigma).square() - math.log(sigma) - 0.5 * math.log(2 * math.pi)


def equilibrium(game: Game) -> Tensor:
    """(θ*, ω*) where p is N(μ, σ²): E is its energy without offset, and H = log(p·Z) = −E."""
    theta = [MU, math.log(SIGMA), 0.0][: game.size]
    a = 1 / (2 * SIGMA**2)
    return torch.tensor([*theta, -a * MU**2, 2 * a * MU, -a], dtype=torch.float64)


def slowest(eigenvalues: Tensor, neutral: float = 1e-6) -> float:
    """The largest real part of those that are not 0."""
    real = eigenvalues.real[eigenvalues.abs() > neutral]
    return float(real.max())


def offsets(game: Game, at: Tensor, rate: float) -> Tensor:
    """Eigenvalues of the block of E's offset and H's constant, by finite differences of the flow."""
    rows = torch.tensor([2, game.size])
    return torch.linalg.eigvals(game.jacobian(at, rate)[rows][:, rows])


def drift(game: Game, at: Tensor, rate: float, time: float, steps: int) -> NDArray[np.float64]:
    """E's offset and the sum of both, `(steps + 1, 2)`, from a sum off by ½; Euler's method, shapes held."""
    start, size, path = at.clone(), game.size, []
    start[size] += 0.5
    e = h = 0.0
    for _ in range(steps + 1):
        path.append((e, 0.5 + e + h))
        here = start.clone()
        here[2], here[size] = here[2] + e, here[size] + h
        speed = game.flow(here, rate)
        e, h = e + time / steps * float(speed[2]), h + time / steps * float(speed[size])
    return np.array(path)


def body(bench: Bench) -> list[Row]:
    """Each divergence: Theorem 4 with and without an offset, the offsets' eigenvalues, and a drift."""
    rows: list[Row] = []
    for name in bench.divergences:
        f = divergence_named(name)
        curvature = curvature_at_one(f)
        for offset in (False, True):
            game = Game(f, normal(MU, SIGMA), offset)
            at = equilibrium(game)
            J, exact = game.jacobian(at), game.theorem_4(at)
            label = f"{name}/{'offset' if offset else 'bell'}"
            rows.append(
                Row(
                    f"theorem_4_off/{label}", float((J - exact).norm() / exact.norm()), "<=", 1e-5, oracle=0.0
                )
            )
            if not offset:
                found, want = (slowest(torch.linalg.eigvals(M)) for M in (J, exact))
                rows.append(Row(f"slowest_eigenvalue/{label}", found, "<=", -1e-3, oracle=want))
                continue
            for r in (1.0, 0.5, 0.2):
                values = offsets(game, at, r).real
                rows.append(
                    Row(f"offset_eigenvalue/r={r:g}/{name}", float(values.min()), oracle=(r - 1) * curvature)
                )
            equal = float(offsets(game, at, 1.0).abs().max())
            rows.append(Row(f"offset_eigenvalues_largest/r=1/{name}", equal, "<=", 2e-3, oracle=0.0))
    rows += drift_rows(bench)
    return rows + misspecified(bench)


def drift_rows(bench: Bench) -> list[Row]:
    """With H + E off by ½ at first: E's offset goes on at equal rates and comes to rest below, under KL."""
    game = Game(divergence_named("kl"), normal(MU, SIGMA), True)
    paths = {r: drift(game, equilibrium(game), r, bench.time, bench.euler) for r in (1.0, 0.5, 0.2)}
    with picture(bench.folder / "offset.png", 8, 3.2, columns=2) as (left, right):
        times = np.linspace(0, bench.time, bench.euler + 1)
        for (r, path), colour in zip(paths.items(), palette, strict=False):
            left.plot(times, path[:, 0], color=colour, label=f"energy_rate {r:g}")
            right.plot(times, path[:, 1], color=colour)
        for axis, title in ((left, "offset of E"), (right, "constant in H + E, which should be 0")):
            draw_level(axis, 0.0)
            axis.set(title=title, xlabel="t")
        left.legend(fontsize=7)
    speed = 1 - math.exp(0.5)  # (19) at u = e^½ under KL: E_p[1] − E_q[u]
    rows = [
        Row(
            "offset_speed/r=1", float(np.diff(paths[1.0][:, 0])[-1]) * bench.euler / bench.time, oracle=-speed
        ),
        Row("sum_left/r=1", float(paths[1.0][-1, 1]), ">=", 0.499, oracle=0.5),
    ]
    return rows + [
        Row(f"sum_left/r={r:g}", float(paths[r][-1, 1]), "<=", 0.05, oracle=0.0) for r in (0.5, 0.2)
    ]


def misspecified(bench: Bench) -> list[Row]:
    """The mixture of Section 6.1, which no normal model is: eigenvalues where the flow itself rests.

    Theorem 4 says nothing there, H being quadratic and p no normal; stability is read from finite differences.
    """
    rows, log_p = [], -target()(GRID[:, None])
    for name in bench.mixture:
        game = Game(divergence_named(name), log_p, False)
        at = settled(game, equilibrium(game), bench.newton)
        values = torch.linalg.eigvals(game.jacobian(at))
        rows += [
            Row(f"mixture_rest_speed/{name}", float(game.flow(at).norm()), "<=", 1e-6, oracle=0.0),
            Row(f"mixture_slowest_eigenvalue/{name}", slowest(values), "<=", 0.0),
            Row(f"mixture_mu/{name}", float(at[0])),
            Row(f"mixture_sigma/{name}", math.exp(float(at[1]))),
        ]
    return rows


def settled(game: Game, at: Tensor, steps: int) -> Tensor:
    """Where the flow rests, by damped Newton steps on it."""
    for _ in range(steps):
        v = game.flow(at)
        step = torch.linalg.lstsq(game.jacobian(at), -v[:, None]).solution[:, 0]
        scale = 1.0
        while scale > 1e-4 and not bool(game.flow(at + scale * step).norm() < v.norm()):
            scale /= 2
        at = at + scale * step
    return at


EXPERIMENT = Experiment(
    name="febm-stability",
    title="Local stability of f-EBM in one dimension, and why E must be slower than H (Theorems 4 and 5)",
    paper="Yu, Song, Song, Ermon, ICML 2020, Section 4",
    scales=by_scale(
        divergences=(("kl", "js"), ("kl", "reverse-kl", "js", "hellinger", "pearson", "neyman", "alpha=0.9")),
        mixture=(("kl",), ("kl", "js")),
        time=(8.0, 20.0),
        euler=(200, 2000),
        newton=(30, 60),
    ),
    body=body,
)
