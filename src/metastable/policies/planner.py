"""StochGPMP: paths sampled around a Gaussian process and weighed by what they cost.

J. Urain, A. T. Le, A. Lambert, G. Chalvatzaki, B. Boots, J. Peters, *Learning implicit priors for motion
optimization*, IROS 2022; the prior is that of M. Mukadam and others, *Continuous-time Gaussian process motion
planning via probabilistic inference*, IJRR 2018.

| paper | here |
|---|---|
| τ, states (q, q̇) | positions q, `(…, N, 2)`: velocities have no cost and are integrated out |
| μ₀, K | `prior.mean(start, goal)`, `prior.covariance` |
| σ_s, σ_g, σ_v | `PRIOR`: start, goal, and the acceleration of the constant-velocity prior |
| c(τ)/σ_o², λ | `cost(paths)/temperature` |
| μ | the mean of each path's Gaussian, whose covariance is κ²K |

An iteration samples τ ~ N(μ, κ²K), weighs by softmax(−c(τ)/λ) and moves μ. The pull of the prior, κ²(μ − μ₀), is
taken exactly and not from the samples, whose weights then have the noise of the cost alone. κ falls from the first
to the last iteration. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from metastable.core.errors import require_count, require_positive


@dataclass(frozen=True)
class PathPrior:
    """Paths of N points at equal times of one unit, at constant velocity but for white acceleration.

    Attributes:
        points: N.
        start: σ_s, standard deviation of the first point around the start.
        goal: σ_g, of the last one around the goal.
        acceleration: σ_v, of the acceleration; the middle of a path then varies by σ_v/√48.
    """

    points: int = 50
    start: float = 1e-3
    goal: float = 1e-3
    acceleration: float = 1.8

    def __post_init__(self) -> None:
        require_count("prior.points", self.points, 3)
        for name in ("start", "goal", "acceleration"):
            require_positive(f"prior.{name}", vars(self)[name])

    @cached_property
    def covariance(self) -> Tensor:
        """K of the positions of one coordinate, float64 `(N, N)`."""
        N, h = self.points, 1 / (self.points - 1)
        ahead = torch.tensor([[1.0, h], [0.0, 1.0]], dtype=torch.float64)
        Q = self.acceleration**2 * torch.tensor([[h**3 / 3, h**2 / 2], [h**2 / 2, h]], dtype=torch.float64)
        step = torch.cat([-ahead, torch.eye(2, dtype=torch.float64)], 1)
        link = step.T @ torch.linalg.inv(Q) @ step
        precision = torch.zeros(2 * N, 2 * N, dtype=torch.float64)
        for i in range(N - 1):
            precision[2 * i : 2 * i + 4, 2 * i : 2 * i + 4] += link
        precision[0, 0] += self.start**-2
        precision[-2, -2] += self.goal**-2
        return torch.linalg.inv(precision)[::2, ::2]

    @cached_property
    def root(self) -> Tensor:
        """The Cholesky factor of K."""
        K = self.covariance
        return torch.linalg.cholesky((K + K.T) / 2 + 1e-12 * torch.eye(self.points, dtype=torch.float64))

    def mean(self, start: Tensor, goal: Tensor) -> Tensor:
        """μ₀: the straight line from starts to goals, `(…, 2)` each, at constant speed, `(…, N, 2)`."""
        along = torch.linspace(0, 1, self.points, dtype=torch.float64, device=start.device)[:, None]
        return start[..., None, :] + along * (goal - start)[..., None, :]

    def noise(self, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Draws of N(0, K) for both coordinates, `(*shape, N, 2)`."""
        drawn = torch.randn(*shape, self.points, 2, generator=rng, dtype=torch.float64, device=rng.device)
        flat = drawn.mT.reshape(-1, self.points)  # one product for all of them, not one for each path
        return (flat @ self.root.to(drawn.device).T).view(*shape, 2, self.points).mT.contiguous()


@dataclass(frozen=True)
class Planner:
    """StochGPMP for any number of paths at once.

    Attributes:
        prior: of the paths.
        samples: τ for each path in an iteration.
        iterations: how many.
        temperature: λσ_o², of the cost.
        scatter: σ_v of the prior that first paths are drawn from: wider than the other, so that they find different
            ways, which are then pulled straight.
        wide: κ of the first iteration.
        narrow: κ of the last one.
        rate: share of the way to the weighed mean that μ goes in an iteration.
    """

    prior: PathPrior = PathPrior()
    samples: int = 32
    iterations: int = 60
    temperature: float = 0.01
    wide: float = 0.6
    narrow: float = 0.1
    rate: float = 0.7
    scatter: float = 5.0

    def __post_init__(self) -> None:
        for name in ("samples", "iterations"):
            require_count(f"planner.{name}", vars(self)[name])
        for name in ("temperature", "wide", "narrow", "rate", "scatter"):
            require_positive(f"planner.{name}", vars(self)[name])

    @torch.no_grad()
    def plan(
        self,
        start: Tensor,
        goal: Tensor,
        cost: Callable[[Tensor], Tensor],
        rng: torch.Generator,
        first: Tensor | None = None,
    ) -> Tensor:
        """Paths `(P, N, 2)` from starts to goals, `(P, 2)` each.

        Args:
            start: float64.
            goal: float64.
            cost: of paths `(P, S, N, 2)`, S for each start, to `(P, S)`.
            rng: of everything random.
            first: where μ begins, `(P, N, 2)`; by default a draw each of a wider prior.
        """
        μ0, wider = self.prior.mean(start, goal), self.scatter / self.prior.acceleration
        μ = μ0 + wider * self.prior.noise((len(start),), rng) if first is None else first
        for k in range(self.iterations):
            κ = self.wide * (self.narrow / self.wide) ** (k / max(self.iterations - 1, 1))
            ε = κ * self.prior.noise((len(start), self.samples), rng)
            w = torch.softmax(-cost(μ[:, None] + ε) / self.temperature, 1)
            μ = μ + self.rate * (torch.einsum("ps,psni->pni", w, ε) - κ**2 * (μ - μ0))
        return μ
